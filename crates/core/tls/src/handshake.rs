//! A handshake over a stream: OpenSSL makes the messages, this module transfers them.

use std::io::IoSliceMut;
use std::sync::{Arc, Mutex};

use blockhaul_io::{Stream, StreamOpener, StreamSealer};
use openssl::ex_data::Index;
use openssl::nid::Nid;
use openssl::ssl::{self, ErrorCode, Ssl, SslRef, SslStream, SslVersion};
use openssl::x509::{X509Ref, X509VerifyResult};

use crate::context::RecordImplementation;
use crate::error::{TlsError, TlsErrorKind, reason};
use crate::names::CertificateNames;
use crate::records::{self, PeerRole, TlsCipherSuite};
use crate::seen::{HandshakeData, escaped};
use crate::wrapped::{self, Pipe};

/// Bytes per receive. OpenSSL limits the messages of a handshake itself.
const RECEIVE: usize = 16 << 10;

/// Which side this is.
pub(crate) enum Role {
    Server { keys: bool },
    Client { keys: bool, hostname: Option<String> },
}

/// An established session.
pub struct TlsSession {
    /// Opens received bytes.
    pub opener: Box<dyn StreamOpener>,
    /// Seals bytes to send.
    pub sealer: Box<dyn StreamSealer>,
    /// Bytes received after the handshake: for the opener.
    pub received: Vec<u8>,
    /// What was negotiated.
    pub about: TlsSessionInfo,
}

/// What was negotiated, and the peer's identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsSessionInfo {
    /// The version of TLS, as `TLSv1.3`.
    pub version: String,
    /// The suite, as `TLS_AES_128_GCM_SHA256`.
    pub suite: String,
    /// The peer's authenticated identity: the name of its key, or the name in its certificate.
    pub peer: Option<String>,
    /// The name of the pre-shared key that the peer has.
    pub key_name: Option<String>,
    /// The names in the peer's certificate, if it sent one.
    pub names: Option<CertificateNames>,
}

/// Runs a handshake.
pub(crate) async fn run(
    mut shaking: TlsHandshake,
    stream: &Stream,
) -> Result<TlsSession, TlsError> {
    let mut buffer = vec![0; RECEIVE];
    loop {
        let (out, step) = shaking.step();
        // After a failure this is the alert for the peer.
        let sent = stream.send_all(&out).await;
        let done = step?;
        sent.map_err(|error| lost(&error))?;
        if done {
            return shaking.finish();
        }
        let received = stream.recv(&mut [IoSliceMut::new(&mut buffer)]).await;
        match received.map_err(|error| lost(&error))? {
            0 => {
                // As GnuTLS servers do if they do not know the key.
                let text = "TLS: the other side closed the connection during the handshake";
                return Err(advised(TlsError::new(TlsErrorKind::Closed, text), &shaking.role));
            }
            count => shaking.receive(&buffer[..count]),
        }
    }
}

/// A handshake in progress, without I/O.
pub(crate) struct TlsHandshake {
    session: SslStream<Pipe>,
    seen: Arc<Mutex<HandshakeData>>,
    role: Role,
    records: RecordImplementation,
}

impl TlsHandshake {
    /// Starts a handshake.
    pub(crate) fn new(
        mut ssl: Ssl,
        index: Index<Ssl, Arc<Mutex<HandshakeData>>>,
        role: Role,
    ) -> Result<TlsHandshake, TlsError> {
        let seen = Arc::new(Mutex::new(HandshakeData::default()));
        ssl.set_ex_data(index, seen.clone());
        match role {
            Role::Server { .. } => ssl.set_accept_state(),
            Role::Client { .. } => ssl.set_connect_state(),
        }
        let session = SslStream::new(ssl, Pipe::default());
        let session = session.map_err(|stack| TlsError::setup("TLS", &stack))?;
        Ok(TlsHandshake { session, seen, role, records: RecordImplementation::Own })
    }

    /// The same, with records by this code after the handshake.
    pub(crate) fn with_records(self, records: RecordImplementation) -> TlsHandshake {
        TlsHandshake { records, ..self }
    }

    /// Proceeds as far as possible: the bytes to send, and whether the handshake is complete.
    pub(crate) fn step(&mut self) -> (Vec<u8>, Result<bool, TlsError>) {
        let step = self.session.do_handshake();
        let out = std::mem::take(&mut self.session.get_mut().outgoing);
        let step = match step {
            Ok(()) => Ok(true),
            Err(error) if error.code() == ErrorCode::WANT_READ => Ok(false),
            Err(error) => Err(failed(self.session.ssl(), &self.seen, &self.role, &error)),
        };
        (out, step)
    }

    /// Adds received bytes.
    pub(crate) fn receive(&mut self, bytes: &[u8]) {
        self.session.get_mut().incoming.extend_from_slice(bytes);
    }

    /// The session, when the handshake is complete.
    pub(crate) fn finish(self) -> Result<TlsSession, TlsError> {
        self.finish_with(records::KEY_RECORDS)
    }

    /// The same, with keys that last for this many records.
    pub(crate) fn finish_with(self, key_records: u64) -> Result<TlsSession, TlsError> {
        let about = about(self.session.ssl(), &self.seen);
        let received = self.session.get_ref().rest().to_vec();
        let Some((opener, sealer)) = self.halves(&about, key_records)? else {
            return Ok(self.wrap(about, received));
        };
        Ok(TlsSession { opener: Box::new(opener), sealer: Box::new(sealer), received, about })
    }

    /// The halves of our record layer, if it supports what was negotiated.
    fn halves(
        &self,
        about: &TlsSessionInfo,
        key_records: u64,
    ) -> Result<Option<RecordHalves>, TlsError> {
        let secrets = {
            let mut seen = self.seen.lock().expect("no panic under this lock");
            seen.client_secret.take().zip(seen.server_secret.take())
        };
        let (Some(suite), Some((client, server))) = (TlsCipherSuite::named(&about.suite), secrets)
        else {
            return Ok(None);
        };
        let ours = self.records == RecordImplementation::Own;
        if !ours || self.session.ssl().version2() != Some(SslVersion::TLS1_3) {
            return Ok(None);
        }
        let (peer, ours, theirs) = match self.role {
            Role::Server { .. } => (PeerRole::Client, server, client),
            Role::Client { .. } => (PeerRole::Server, client, server),
        };
        let halves = records::halves(suite, peer, ours, theirs, key_records);
        halves.map(Some).map_err(|stack| TlsError::setup("TLS", &stack))
    }

    /// The halves themselves, with keys that last for this many records.
    #[cfg(test)]
    pub(crate) fn finish_halves(self, key_records: u64) -> RecordHalves {
        let about = about(self.session.ssl(), &self.seen);
        let halves = self.halves(&about, key_records).expect("the suite is supported");
        halves.expect("TLS 1.3 was negotiated")
    }

    /// The session with OpenSSL's record layer.
    fn wrap(mut self, about: TlsSessionInfo, received: Vec<u8>) -> TlsSession {
        let pipe = self.session.get_mut();
        pipe.incoming.clear();
        pipe.taken = 0;
        let (opener, sealer) = wrapped::halves(self.session);
        TlsSession { opener: Box::new(opener), sealer: Box::new(sealer), received, about }
    }

    /// The same, whatever was negotiated.
    #[cfg(test)]
    pub(crate) fn finish_wrapped(self) -> TlsSession {
        let about = about(self.session.ssl(), &self.seen);
        let received = self.session.get_ref().rest().to_vec();
        self.wrap(about, received)
    }
}

/// The receiving and the sending half of our record layer.
type RecordHalves = (records::RecordOpener, records::RecordSealer);

fn about(ssl: &SslRef, seen: &Mutex<HandshakeData>) -> TlsSessionInfo {
    let mut seen = seen.lock().expect("no panic under this lock");
    // A name without a key proves nothing.
    let user = seen.user.take().filter(|_| !seen.unknown);
    let shown = user.as_deref().map(escaped);
    let certificate = ssl.peer_certificate();
    TlsSessionInfo {
        version: ssl.version_str().to_string(),
        suite: suite(ssl),
        names: certificate.as_deref().map(CertificateNames::of),
        peer: shown.or_else(|| certificate.map(|certificate| subject(&certificate))),
        // A file of keys is text.
        key_name: user.and_then(|user| String::from_utf8(user).ok()),
    }
}

fn suite(ssl: &SslRef) -> String {
    let cipher = ssl.current_cipher();
    let name = cipher.map(|cipher| cipher.standard_name().unwrap_or_else(|| cipher.name()));
    name.unwrap_or_default().to_string()
}

/// The common name of a certificate, or its number.
fn subject(certificate: &X509Ref) -> String {
    let mut names = certificate.subject_name().entries_by_nid(Nid::COMMONNAME);
    match names.next() {
        Some(name) => escaped(name.data().as_slice()),
        None => "a certificate without a common name".to_string(),
    }
}

/// Why a handshake failed, in helpful words.
fn failed(ssl: &SslRef, seen: &Mutex<HandshakeData>, role: &Role, error: &ssl::Error) -> TlsError {
    let seen = seen.lock().expect("no panic under this lock");
    let refused = |text: String| TlsError::new(TlsErrorKind::Refused, text);
    if let Some(user) = seen.user.as_deref().map(escaped) {
        return refused(if seen.unknown {
            format!("TLS: user \"{user}\" has no key here")
        } else {
            format!("TLS: user \"{user}\" has another key ({})", reason(error))
        });
    }
    let verified = ssl.verify_result();
    if verified != X509VerifyResult::OK {
        if let Role::Client { keys: true, .. } = role {
            let text = "TLS: the server does not know the key, but shows a certificate";
            let remedy = "check the user name, and that the server has keys";
            return refused(text.into()).with_remedy(remedy);
        }
        let whose = match role {
            Role::Server { .. } => "the client's",
            Role::Client { .. } => "the server's",
        };
        let name = match role {
            Role::Client { hostname: Some(name), .. } => format!(" for \"{name}\""),
            _ => String::new(),
        };
        let why = verified.error_string();
        let error = refused(format!("TLS: {whose} certificate is not accepted{name}: {why}"));
        return match role {
            Role::Server { .. } => error,
            Role::Client { .. } => error.with_remedy(other_certificate(verified)),
        };
    }
    let reason = reason(error);
    let distrusted =
        ["unknown ca", "bad certificate", "certificate expired", "certificate revoked"]
            .iter()
            .any(|alert| reason.ends_with(alert));
    let error = refused(format!("TLS: {reason}"));
    match role {
        Role::Server { keys: false } if distrusted => {
            error.with_remedy("the client does not accept this server's certificate")
        }
        Role::Server { keys: true } => error.with_remedy("clients need a user name and a key"),
        role => advised(error, role),
    }
}

/// What a client can do if a server aborts without a reason.
fn advised(error: TlsError, role: &Role) -> TlsError {
    match role {
        Role::Client { keys: true, .. } => error.with_remedy(
            "check the user name and its key, and that the server has keys and no certificates",
        ),
        Role::Client { .. } => error.with_remedy(
            "check that the server has certificates, and whether it requires one of its clients, or a \
             key (tls-psk-file=FILE)",
        ),
        Role::Server { .. } => error,
    }
}

/// What helps a client that does not accept a server's certificate.
fn other_certificate(why: X509VerifyResult) -> &'static str {
    /// As in OpenSSL's `x509_vfy.h`.
    const EXPIRED: i32 = 10;
    const REVOKED: i32 = 23;
    match why.as_raw() {
        EXPIRED => "the server needs a new certificate",
        REVOKED => "the server needs another certificate",
        _ => "set its authority with tls-certificates=DIR, or its host name with tls-hostname=NAME",
    }
}

fn lost(error: &std::io::Error) -> TlsError {
    TlsError::new(TlsErrorKind::Lost, format!("TLS: {error}"))
}
