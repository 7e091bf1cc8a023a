//! The configuration of each side: certificates or keys, and the requirements for the peer.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use blockhaul_io::Stream;
use openssl::error::ErrorStack;
use openssl::ex_data::Index;
use openssl::ssl::{
    AlpnError, Ssl, SslContext, SslContextBuilder, SslFiletype, SslMethod, SslMode, SslOptions,
    SslRef, SslSessionCacheMode, SslVerifyMode, SslVersion, select_next_proto,
};
use openssl::x509::X509Name;
use openssl::x509::store::X509Lookup;
use openssl::x509::verify::X509VerifyFlags;

use crate::error::{TlsError, TlsErrorKind};
use crate::handshake::{self, Role, TlsHandshake, TlsSession};
use crate::psk::Users;
use crate::seen::HandshakeData;

/// Default directory name of server certificates (nbdkit's).
const SERVER_DIRS: &str = "nbdkit";
/// Default directory name of client certificates (libnbd's).
const CLIENT_DIRS: &str = "libnbd";

/// Suites of TLS 1.3 for processors with AES instructions. Pre-shared keys are bound to SHA-256,
/// and longer keys gain nothing.
const SUITES: &str = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
/// The same for other processors.
const SUITES_WITHOUT_AES: &str =
    "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384";
/// Suites of TLS 1.2 with certificates, all with forward secrecy.
const CERTIFICATE_CIPHERS: &str = "ECDHE+AESGCM:ECDHE+CHACHA20";
/// Suites of TLS 1.2 with pre-shared keys, all with forward secrecy.
const KEY_CIPHERS: &str = "ECDHE-PSK-CHACHA20-POLY1305:DHE-PSK-AES128-GCM-SHA256:\
                           DHE-PSK-AES256-GCM-SHA384:ECDHE-PSK-AES128-CBC-SHA256";

/// How a side authenticates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsCredentials {
    /// A directory with `ca-cert.pem` and, for a server, `server-cert.pem` and `server-key.pem`; a
    /// client may have `client-cert.pem` and `client-key.pem`. Certificates revoked in `ca-crl.pem`
    /// are refused. The layout of nbdkit, libnbd and QEMU.
    Certificates(PathBuf),
    /// A file with the certificates of the authorities that a client trusts.
    Authority(PathBuf),
    /// A file of pre-shared keys.
    Keys(PathBuf),
    /// Certificates in the default directories: nbdkit's for a server, libnbd's for a client. A
    /// client without any trusts the system's authorities.
    Usual,
}

/// The default directory of a server's certificates, if it exists.
pub fn usual_certificates() -> Option<PathBuf> {
    usual_dirs(SERVER_DIRS).into_iter().find(|dir| dir.join("server-cert.pem").exists())
}

/// Which code makes and opens the records of TLS 1.3. Those of TLS 1.2 are always OpenSSL's.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum RecordImplementation {
    /// Ours, which encrypts and decrypts payloads where they are.
    #[default]
    Own,
    /// OpenSSL's, which copies them once more on the way.
    OpenSsl,
}

/// The server's side.
pub struct TlsAcceptor {
    context: SslContext,
    seen: Index<Ssl, Arc<Mutex<HandshakeData>>>,
    keys: bool,
    records: RecordImplementation,
}

impl TlsAcceptor {
    /// A server with these credentials. `verify_peer`: clients must have a certificate signed by
    /// the authority of `ca-cert.pem`.
    ///
    /// # Errors
    /// Missing or invalid files.
    pub fn new(credentials: &TlsCredentials, verify_peer: bool) -> Result<TlsAcceptor, TlsError> {
        let seen = new_index()?;
        let mut context = builder(seen)?;
        let keys = match credentials {
            TlsCredentials::Keys(_) if verify_peer => {
                let text = "clients with pre-shared keys have no certificates to verify";
                return Err(TlsError::new(TlsErrorKind::Setup, text));
            }
            TlsCredentials::Keys(path) => {
                let users = Users::read(path)?;
                only_keys(&mut context)?;
                context.set_psk_server_callback(move |ssl, user, into| {
                    Ok(offer_key(ssl, seen, &users, user.unwrap_or_default(), into))
                });
                true
            }
            TlsCredentials::Authority(_) => {
                let text = "a server needs a certificate of its own";
                return Err(TlsError::new(TlsErrorKind::Setup, text));
            }
            TlsCredentials::Certificates(dir) => {
                server_certificates(&mut context, dir, verify_peer)?;
                false
            }
            TlsCredentials::Usual => {
                let dirs = usual_dirs(SERVER_DIRS);
                let found = dirs.iter().find(|dir| dir.join("server-cert.pem").exists());
                let dir = found.ok_or_else(|| none_in(&dirs, "server-cert.pem"))?;
                server_certificates(&mut context, dir, verify_peer)?;
                false
            }
        };
        // Clients that name other protocols only are served as those that name none.
        context.set_alpn_select_callback(|_, offered| {
            select_next_proto(HTTP, offered).ok_or(AlpnError::NOACK)
        });
        Ok(TlsAcceptor { context: context.build(), seen, keys, records: RecordImplementation::Own })
    }

    /// The same, with records by this code.
    #[must_use]
    pub fn with_records(self, records: RecordImplementation) -> TlsAcceptor {
        TlsAcceptor { records, ..self }
    }

    /// The server's side of a handshake. Nothing may have been read beyond the bytes before it.
    /// Takes as long as the client does: use a timeout.
    ///
    /// # Errors
    /// The client failed to authenticate, does not speak TLS, or has disconnected.
    pub async fn accept(&self, stream: &Stream) -> Result<TlsSession, TlsError> {
        handshake::run(self.begin(|_| Ok(()))?, stream).await
    }

    /// A handshake without I/O, changed by `change`.
    pub(crate) fn begin(
        &self,
        change: impl FnOnce(&mut Ssl) -> Result<(), ErrorStack>,
    ) -> Result<TlsHandshake, TlsError> {
        let wrong = |stack: ErrorStack| TlsError::setup("TLS", &stack);
        let mut ssl = Ssl::new(&self.context).map_err(wrong)?;
        change(&mut ssl).map_err(wrong)?;
        let shaking = TlsHandshake::new(ssl, self.seen, Role::Server { keys: self.keys })?;
        Ok(shaking.with_records(self.records))
    }
}

/// The client's side.
pub struct TlsConnector {
    context: SslContext,
    seen: Index<Ssl, Arc<Mutex<HandshakeData>>>,
    /// Expected name in the server's certificate.
    hostname: Option<String>,
    /// The server must prove that name, if set.
    verify: bool,
    keys: bool,
    /// Says that HTTP/1.1 follows (ALPN).
    http: bool,
}

/// The protocol that follows, as ALPN has it (RFC 7301).
const HTTP: &[u8] = b"\x08http/1.1";

/// How a client authenticates, and what it requires of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectorConfig {
    /// How to authenticate, and which authorities to trust.
    pub credentials: TlsCredentials,
    /// The user name for pre-shared keys. Default: the login name if it has a key, or the only user
    /// with one.
    pub user: Option<String>,
    /// The required name in the server's certificate; `None`: any signed certificate.
    pub hostname: Option<String>,
    /// Whether the server's certificate must be signed by a trusted authority.
    pub verify: bool,
}

impl TlsConnector {
    /// A client with these credentials.
    ///
    /// # Errors
    /// Missing or invalid files.
    pub fn new(demands: &ConnectorConfig) -> Result<TlsConnector, TlsError> {
        let seen = new_index()?;
        let mut context = builder(seen)?;
        let keys = match &demands.credentials {
            TlsCredentials::Keys(path) => {
                client_key(&mut context, path, demands.user.as_deref())?;
                true
            }
            TlsCredentials::Certificates(dir) => {
                client_certificates(&mut context, dir)?;
                false
            }
            TlsCredentials::Authority(path) => {
                let path = can_open(path.clone())?;
                let loaded = context.set_ca_file(&path);
                loaded.map_err(|stack| unusable(&path, "a certificate", &stack))?;
                false
            }
            TlsCredentials::Usual => {
                let dirs = usual_dirs(CLIENT_DIRS);
                match dirs.iter().find(|dir| dir.join("ca-cert.pem").exists()) {
                    Some(dir) => client_certificates(&mut context, dir)?,
                    None => context
                        .set_default_verify_paths()
                        .map_err(|stack| TlsError::setup("the system's authorities", &stack))?,
                }
                false
            }
        };
        match (keys, demands.verify) {
            // TLS 1.3 has no key-only suites: a peer without the key could present a certificate
            // instead. Accept none.
            (true, _) => context.set_verify_callback(SslVerifyMode::PEER, |_, _| false),
            (false, true) => context.set_verify(SslVerifyMode::PEER),
            (false, false) => context.set_verify(SslVerifyMode::NONE),
        }
        Ok(TlsConnector {
            context: context.build(),
            seen,
            hostname: demands.hostname.clone(),
            verify: demands.verify && !keys,
            keys,
            http: false,
        })
    }

    /// The same, with ALPN for HTTP/1.1, for servers that speak several protocols.
    #[must_use]
    pub fn for_http(self) -> TlsConnector {
        TlsConnector { http: true, ..self }
    }

    /// The client's side of a handshake, like [`TlsAcceptor::accept`].
    ///
    /// # Errors
    /// The server failed to authenticate, rejects our credentials, does not speak TLS, or has
    /// disconnected.
    pub async fn connect(&self, stream: &Stream) -> Result<TlsSession, TlsError> {
        handshake::run(self.begin()?, stream).await
    }

    /// A handshake without I/O.
    pub(crate) fn begin(&self) -> Result<TlsHandshake, TlsError> {
        let ssl = self.ssl().map_err(|stack| TlsError::setup("TLS", &stack))?;
        let hostname = self.hostname.clone();
        TlsHandshake::new(ssl, self.seen, Role::Client { keys: self.keys, hostname })
    }

    fn ssl(&self) -> Result<Ssl, ErrorStack> {
        let mut ssl = Ssl::new(&self.context)?;
        if self.http {
            ssl.set_alpn_protos(HTTP)?;
        }
        let Some(name) = &self.hostname else { return Ok(ssl) };
        match name.parse::<IpAddr>() {
            Ok(address) if self.verify => ssl.param_mut().set_ip(address)?,
            Ok(_) => {}
            Err(_) => {
                if !self.keys {
                    ssl.set_hostname(name)?;
                }
                if self.verify {
                    ssl.param_mut().set_host(name)?;
                }
            }
        }
        Ok(ssl)
    }
}

impl fmt::Debug for TlsAcceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsAcceptor").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl fmt::Debug for TlsConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsConnector").field("keys", &self.keys).finish_non_exhaustive()
    }
}

fn new_index() -> Result<Index<Ssl, Arc<Mutex<HandshakeData>>>, TlsError> {
    static INDEX: Mutex<Option<Index<Ssl, Arc<Mutex<HandshakeData>>>>> = Mutex::new(None);
    let mut index = INDEX.lock().expect("no panic under this lock");
    if let Some(index) = *index {
        return Ok(index);
    }
    let new = Ssl::new_ex_index().map_err(|stack| TlsError::setup("TLS", &stack))?;
    Ok(*index.insert(new))
}

/// The settings that both sides share.
fn builder(seen: Index<Ssl, Arc<Mutex<HandshakeData>>>) -> Result<SslContextBuilder, TlsError> {
    let make = || -> Result<SslContextBuilder, ErrorStack> {
        let mut context = SslContext::builder(SslMethod::tls())?;
        // nbd: tls.version
        context.set_min_proto_version(Some(SslVersion::TLS1_2))?;
        context.set_options(
            SslOptions::NO_COMPRESSION
                | SslOptions::NO_RENEGOTIATION
                | SslOptions::NO_TICKET
                | SslOptions::CIPHER_SERVER_PREFERENCE,
        );
        // Free buffers that a session needs only for a moment.
        context.set_mode(SslMode::RELEASE_BUFFERS);
        context.set_session_cache_mode(SslSessionCacheMode::OFF);
        // A ticket would use a sequence number of records, which are ours after the handshake.
        context.set_num_tickets(0)?;
        context.set_ciphersuites(if aes_in_hardware() { SUITES } else { SUITES_WITHOUT_AES })?;
        context.set_cipher_list(CERTIFICATE_CIPHERS)?;
        context.set_keylog_callback(move |ssl, line| note_secret(ssl, seen, line));
        Ok(context)
    };
    make().map_err(|stack| TlsError::setup("TLS", &stack))
}

fn aes_in_hardware() -> bool {
    #[cfg(target_arch = "x86_64")]
    let found = std::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    let found = std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let found = false;
    found
}

/// Saves the secrets of a session for its record layer only.
fn note_secret(ssl: &SslRef, seen: Index<Ssl, Arc<Mutex<HandshakeData>>>, line: &str) {
    let Some(seen) = ssl.ex_data(seen) else { return };
    let mut words = line.split(' ');
    let (Some(label), Some(_), Some(secret)) = (words.next(), words.next(), words.next()) else {
        return;
    };
    let mut seen = seen.lock().expect("no panic under this lock");
    match label {
        "CLIENT_TRAFFIC_SECRET_0" => seen.client_secret = crate::psk::unhex(secret),
        "SERVER_TRAFFIC_SECRET_0" => seen.server_secret = crate::psk::unhex(secret),
        _ => {}
    }
}

fn only_keys(context: &mut SslContextBuilder) -> Result<(), TlsError> {
    context.set_cipher_list(KEY_CIPHERS).map_err(|stack| TlsError::setup("TLS", &stack))
}

/// Looks up the key of the user that a client names; 0 bytes: there is none.
fn offer_key(
    ssl: &SslRef,
    seen: Index<Ssl, Arc<Mutex<HandshakeData>>>,
    users: &Users,
    user: &[u8],
    into: &mut [u8],
) -> usize {
    let key = users.key(user).filter(|key| key.len() <= into.len());
    if let Some(seen) = ssl.ex_data(seen) {
        let mut seen = seen.lock().expect("no panic under this lock");
        seen.user = Some(user.to_vec());
        seen.unknown = key.is_none();
    }
    let Some(key) = key else { return 0 };
    into[..key.len()].copy_from_slice(key);
    key.len()
}

fn client_key(
    context: &mut SslContextBuilder,
    path: &Path,
    user: Option<&str>,
) -> Result<(), TlsError> {
    let users = Users::read(path)?;
    let shown = path.display();
    let (user, key) = match user {
        Some(user) => match users.key(user.as_bytes()) {
            Some(key) => (user.to_string(), key.to_vec()),
            None => {
                let text = format!("{shown}: user {user:?} has no key in it; check the name");
                return Err(TlsError::new(TlsErrorKind::Setup, text));
            }
        },
        None => users
            .choose(login())
            .map_err(|why| TlsError::new(TlsErrorKind::Setup, format!("{shown}: {why}")))?,
    };
    only_keys(context)?;
    context.set_psk_client_callback(move |_, _, name, into| {
        if name.len() <= user.len() || into.len() < key.len() {
            return Ok(0);
        }
        name[..user.len()].copy_from_slice(user.as_bytes());
        name[user.len()] = 0;
        into[..key.len()].copy_from_slice(&key);
        Ok(key.len())
    });
    Ok(())
}

/// The name of the local user, from the environment.
fn login() -> Option<String> {
    ["LOGNAME", "USER"].iter().find_map(|name| std::env::var(name).ok())
}

/// Loads an authority and its revocation list, if there is one.
fn authority(context: &mut SslContextBuilder, dir: &Path) -> Result<(), TlsError> {
    let path = readable(dir, "ca-cert.pem")?;
    context.set_ca_file(&path).map_err(|stack| unusable(&path, "a certificate", &stack))?;
    if !dir.join("ca-crl.pem").exists() {
        return Ok(());
    }
    let path = readable(dir, "ca-crl.pem")?;
    let mut load = || -> Result<(), ErrorStack> {
        let store = context.cert_store_mut();
        store.set_flags(X509VerifyFlags::CRL_CHECK)?;
        store.add_lookup(X509Lookup::file())?.load_crl_file(&path, SslFiletype::PEM)?;
        Ok(())
    };
    load().map_err(|stack| unusable(&path, "a list of revoked certificates", &stack))
}

/// Loads a certificate with its key.
fn identity(context: &mut SslContextBuilder, dir: &Path, who: &str) -> Result<(), TlsError> {
    let certificate = readable(dir, &format!("{who}-cert.pem"))?;
    let key = readable(dir, &format!("{who}-key.pem"))?;
    crate::exposed::warn(&key, "the private key");
    let due = format!("the key of {who}-cert.pem");
    let wrong = |stack: ErrorStack| unusable(&key, &due, &stack);
    let chain = context.set_certificate_chain_file(&certificate);
    chain.map_err(|stack| unusable(&certificate, "a certificate", &stack))?;
    context.set_private_key_file(&key, SslFiletype::PEM).map_err(wrong)?;
    context.check_private_key().map_err(wrong)
}

fn server_certificates(
    context: &mut SslContextBuilder,
    dir: &Path,
    verify_peer: bool,
) -> Result<(), TlsError> {
    identity(context, dir, "server")?;
    if verify_peer {
        authority(context, dir)?;
        let path = readable(dir, "ca-cert.pem")?;
        let names = X509Name::load_client_ca_file(&path)
            .map_err(|stack| unusable(&path, "a certificate", &stack))?;
        context.set_client_ca_list(names);
        context.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
    } else {
        context.set_verify(SslVerifyMode::NONE);
    }
    Ok(())
}

fn client_certificates(context: &mut SslContextBuilder, dir: &Path) -> Result<(), TlsError> {
    authority(context, dir)?;
    let has = |name: &str| dir.join(name).exists();
    if has("client-cert.pem") || has("client-key.pem") {
        identity(context, dir, "client")
    } else {
        Ok(())
    }
}

/// The error for a file with the wrong contents.
fn unusable(path: &Path, due: &str, stack: &ErrorStack) -> TlsError {
    let why = crate::error::first(stack);
    let text = format!("cannot use {}: {why}; check that it is {due}, in PEM", path.display());
    TlsError::new(TlsErrorKind::Setup, text)
}

/// Checks that a file can be opened, for a better message than OpenSSL's.
fn readable(dir: &Path, name: &str) -> Result<PathBuf, TlsError> {
    can_open(dir.join(name))
}

fn can_open(path: PathBuf) -> Result<PathBuf, TlsError> {
    match blockhaul_io::open_regular_file(&path) {
        Ok(_) => Ok(path),
        Err(error) => {
            let why = crate::psk::advice(&error);
            Err(TlsError::new(TlsErrorKind::File, format!("cannot read {}: {why}", path.display())))
        }
    }
}

/// Certificate directories: the user's own, and root's.
fn usual_dirs(name: &str) -> Vec<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return vec![Path::new("/etc/pki").join(name)];
    }
    let home = std::env::var_os("HOME").map(PathBuf::from);
    home.iter()
        .flat_map(|home| [".pki", ".config/pki"].map(|at| home.join(at).join(name)))
        .collect()
}

fn none_in(dirs: &[PathBuf], file: &str) -> TlsError {
    let places: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    let text = format!(
        "no {file} in {}: name a directory with --tls-certificates, or make one with blockhaul tls \
         init",
        if places.is_empty() { "any usual place".to_string() } else { places.join(" or ") }
    );
    TlsError::new(TlsErrorKind::File, text)
}
