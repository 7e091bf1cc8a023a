//! Makes credentials for TLS: an authority with certificates for a server and a client, or a file
//! of keys.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use openssl::asn1::Asn1Time;
use openssl::bn::{BigNum, MsbOption};
use openssl::ec::{EcGroup, EcKey};
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::x509::extension::{
    AuthorityKeyIdentifier, BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectAlternativeName,
    SubjectKeyIdentifier,
};
use openssl::x509::{X509, X509Builder, X509Name};

use crate::error::{TlsError, TlsErrorKind};

/// Lifetime of an authority in days: ten years. After that, make everything anew.
const AUTHORITY_DAYS: u32 = 3653;
/// Certificates are backdated by an hour, for clocks that are slow.
const LATE: i64 = 3600;
/// Length of a pre-shared key in bytes, as with psktool.
const KEY: usize = 32;

/// Which certificates to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateConfig {
    /// Names and addresses of the server.
    pub hosts: Vec<String>,
    /// Name of the client.
    pub client: String,
    /// Lifetime of both certificates in days; the authority's is ten years, or this if longer.
    pub days: u32,
}

/// Makes an authority and certificates in `dir`, in files readable only by their owner. Returns the
/// files.
///
/// # Errors
/// One of the files exists; a name that is invalid in a certificate; a directory that is not
/// writable.
pub fn certificates(dir: &Path, wanted: &CertificateConfig) -> Result<Vec<PathBuf>, TlsError> {
    let names = ["ca-cert", "ca-key", "server-cert", "server-key", "client-cert", "client-key"];
    let paths = names.map(|name| dir.join(format!("{name}.pem")));
    paths.iter().try_for_each(|path| absent(path))?;
    check_names(wanted)?;
    let made = make(wanted).map_err(|stack| TlsError::setup("cannot make certificates", &stack))?;
    if !dir.is_dir() {
        let built = fs::DirBuilder::new().mode(0o700).create(dir);
        built.map_err(|error| cannot_write(dir, &error))?;
    }
    for (index, (path, pem)) in paths.iter().zip(&made).enumerate() {
        if let Err(error) = write_new(path, pem) {
            // What is left would be in the way of the next attempt.
            for made_before in &paths[..index] {
                let _ = fs::remove_file(made_before);
            }
            return Err(error);
        }
    }
    Ok(paths.into())
}

/// Makes a file with a new key for each user, readable only by its owner, or adds them to the users
/// of such a file.
///
/// # Errors
/// The file cannot be read or written, or is no file of keys; a user name that is invalid, listed
/// twice, or in the file already.
pub fn keys(path: &Path, users: &[String]) -> Result<(), TlsError> {
    let known = users_of(path)?;
    let mut text = String::new();
    for (index, user) in users.iter().enumerate() {
        if user.is_empty() || user.len() > 128 || user.contains([':', '\n', '\r', '\0', '#']) {
            return Err(TlsError::new(
                TlsErrorKind::Setup,
                format!("{user:?} cannot be a user's name"),
            ));
        }
        if users[..index].contains(user) {
            return Err(TlsError::new(
                TlsErrorKind::Setup,
                format!("user {user:?} is named twice"),
            ));
        }
        if known.as_ref().is_some_and(|known| known.contains(user)) {
            let text = format!("{} has a key for user {user:?} already", path.display());
            return Err(TlsError::new(TlsErrorKind::File, text));
        }
        let mut key = [0; KEY];
        let made = openssl::rand::rand_bytes(&mut key);
        made.map_err(|stack| TlsError::setup("cannot make a key", &stack))?;
        let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        text += &format!("{user}:{hex}\n");
    }
    match known {
        None => write_new(path, text.as_bytes()),
        Some(_) => append(path, text.as_bytes()),
    }
}

/// The users of a file of keys; none if it does not exist.
fn users_of(path: &Path) -> Result<Option<Vec<String>>, TlsError> {
    let text = match blockhaul_io::open_regular_file(path).and_then(std::io::read_to_string) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            let text = format!("cannot read {}: {}", path.display(), blockhaul_io::plain(&error));
            return Err(TlsError::new(TlsErrorKind::File, text));
        }
    };
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let users = lines.map(|line| match line.split_once(':') {
        Some((user, key)) if key.bytes().all(|byte| byte.is_ascii_hexdigit()) => Ok(user.into()),
        _ => {
            let text = format!(
                "{} exists already, and is no file of keys: choose another place",
                path.display()
            );
            Err(TlsError::new(TlsErrorKind::File, text))
        }
    });
    users.collect::<Result<_, _>>().map(Some)
}

/// Adds lines to a file, on a line of their own.
fn append(path: &Path, bytes: &[u8]) -> Result<(), TlsError> {
    let written = OpenOptions::new().append(true).open(path).and_then(|mut file| {
        let ends_within_line = fs::read(path)?.last().is_some_and(|byte| *byte != b'\n');
        if ends_within_line {
            file.write_all(b"\n")?;
        }
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| cannot_write(path, &error))
}

fn absent(path: &Path) -> Result<(), TlsError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(cannot_write(path, &error)),
        Ok(_) => {
            let text = format!("{} exists already: choose another place", path.display());
            Err(TlsError::new(TlsErrorKind::File, text))
        }
    }
}

/// Writes a file that does not exist. If that fails, nothing is left of it.
fn write_new(path: &Path, bytes: &[u8]) -> Result<(), TlsError> {
    let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let mut file = opened.map_err(|error| cannot_write(path, &error))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|error| {
        let _ = fs::remove_file(path);
        cannot_write(path, &error)
    })
}

fn cannot_write(path: &Path, error: &std::io::Error) -> TlsError {
    TlsError::new(
        TlsErrorKind::File,
        format!("cannot write {}: {}", path.display(), blockhaul_io::plain(error)),
    )
}

/// Names become part of OpenSSL's configuration language, so only plain names are allowed.
fn check_names(wanted: &CertificateConfig) -> Result<(), TlsError> {
    let wrong = |text: String| Err(TlsError::new(TlsErrorKind::Setup, text));
    for host in &wanted.hosts {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let name = host.strip_prefix("*.").unwrap_or(host);
        let is_name = !name.is_empty() && name.len() <= 253 && name.chars().all(plain);
        if host.parse::<IpAddr>().is_err() && !is_name {
            return wrong(format!("{host:?} is no host name or address"));
        }
    }
    if wanted.hosts.is_empty() {
        return wrong("the server needs a name or an address".to_string());
    }
    let client = &wanted.client;
    if client.is_empty() || client.len() > 64 || client.chars().any(char::is_control) {
        return wrong(format!("{client:?} cannot be a client's name"));
    }
    Ok(())
}

/// The files' contents, in the order of their names above.
fn make(wanted: &CertificateConfig) -> Result<[Vec<u8>; 6], ErrorStack> {
    let authority_key = new_key()?;
    let days = AUTHORITY_DAYS.max(wanted.days);
    let mut authority = begin("blockhaul CA", &authority_key, days)?;
    let name = common_name("blockhaul CA")?;
    authority.set_issuer_name(&name)?;
    authority.append_extension(BasicConstraints::new().critical().ca().pathlen(0).build()?)?;
    let usage = KeyUsage::new().critical().key_cert_sign().crl_sign().build()?;
    authority.append_extension(usage)?;
    let id = SubjectKeyIdentifier::new().build(&authority.x509v3_context(None, None))?;
    authority.append_extension(id)?;
    authority.sign(&authority_key, MessageDigest::sha256())?;
    let authority = authority.build();

    // A common name has at most 64 characters; only the alternative names matter.
    let host: String = wanted.hosts[0].chars().take(64).collect();
    let server_key = new_key()?;
    let mut server = begin(&host, &server_key, wanted.days)?;
    let mut names = SubjectAlternativeName::new();
    for host in &wanted.hosts {
        match host.parse::<IpAddr>() {
            Ok(_) => names.ip(host),
            Err(_) => names.dns(host),
        };
    }
    let names = names.build(&server.x509v3_context(Some(&authority), None))?;
    server.append_extension(names)?;
    server.append_extension(ExtendedKeyUsage::new().server_auth().build()?)?;
    let server = finish(server, &authority, &authority_key)?;

    let client_key = new_key()?;
    let mut client = begin(&wanted.client, &client_key, wanted.days)?;
    client.append_extension(ExtendedKeyUsage::new().client_auth().build()?)?;
    let client = finish(client, &authority, &authority_key)?;

    Ok([
        authority.to_pem()?,
        authority_key.private_key_to_pem_pkcs8()?,
        server.to_pem()?,
        server_key.private_key_to_pem_pkcs8()?,
        client.to_pem()?,
        client_key.private_key_to_pem_pkcs8()?,
    ])
}

fn new_key() -> Result<PKey<Private>, ErrorStack> {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1)?;
    PKey::from_ec_key(EcKey::generate(&group)?)
}

fn common_name(name: &str) -> Result<X509Name, ErrorStack> {
    let mut builder = X509Name::builder()?;
    builder.append_entry_by_nid(Nid::COMMONNAME, name)?;
    Ok(builder.build())
}

fn begin(name: &str, key: &PKey<Private>, days: u32) -> Result<X509Builder, ErrorStack> {
    let mut builder = X509::builder()?;
    // Version 3 is number 2.
    builder.set_version(2)?;
    let mut serial = BigNum::new()?;
    serial.rand(127, MsbOption::ONE, false)?;
    let serial = serial.to_asn1_integer()?;
    builder.set_serial_number(&serial)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let start = Asn1Time::from_unix(i64::try_from(now).unwrap_or(i64::MAX) - LATE)?;
    builder.set_not_before(&start)?;
    let end = Asn1Time::days_from_now(days)?;
    builder.set_not_after(&end)?;
    let subject = common_name(name)?;
    builder.set_subject_name(&subject)?;
    builder.set_pubkey(key)?;
    Ok(builder)
}

/// The common parts of the server's and the client's certificate, and the authority's signature.
fn finish(
    mut builder: X509Builder,
    authority: &X509,
    key: &PKey<Private>,
) -> Result<X509, ErrorStack> {
    builder.set_issuer_name(authority.subject_name())?;
    builder.append_extension(BasicConstraints::new().critical().build()?)?;
    // QEMU before version 10 requires key encipherment, too, and only warns if this is not
    // critical.
    let usage = KeyUsage::new().digital_signature().key_encipherment().build()?;
    builder.append_extension(usage)?;
    let id = SubjectKeyIdentifier::new().build(&builder.x509v3_context(Some(authority), None))?;
    builder.append_extension(id)?;
    let issuer = AuthorityKeyIdentifier::new()
        .keyid(true)
        .build(&builder.x509v3_context(Some(authority), None))?;
    builder.append_extension(issuer)?;
    builder.sign(key, MessageDigest::sha256())?;
    Ok(builder.build())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn wanted(hosts: &[&str], client: &str) -> CertificateConfig {
        let hosts = hosts.iter().map(|host| host.to_string()).collect();
        CertificateConfig { hosts, client: client.into(), days: 2 }
    }

    #[test]
    fn certificates_are_signed_and_nobody_else_reads_their_keys() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("a");
        let all = wanted(&["*.example.com", "127.0.0.1", "::1"], "me, myself=I");
        // A mistyped path makes no tree of directories.
        assert!(certificates(&dir.join("b"), &all).is_err());
        assert!(!dir.exists());
        let files = certificates(&dir, &all).unwrap();
        for file in &files {
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        let load = |name: &str| X509::from_pem(&fs::read(dir.join(name)).unwrap()).unwrap();
        let authority = load("ca-cert.pem");
        let key = authority.public_key().unwrap();
        for name in ["ca-cert.pem", "server-cert.pem", "client-cert.pem"] {
            let certificate = load(name);
            assert!(certificate.verify(&key).unwrap(), "{name}");
            assert!(*certificate.not_before() < Asn1Time::days_from_now(0).unwrap());
        }
        let names = load("server-cert.pem").subject_alt_names().unwrap();
        assert_eq!(names[0].dnsname(), Some("*.example.com"));
        assert_eq!(names[1].ipaddress(), Some(&[127, 0, 0, 1][..]));
        assert_eq!(names.len(), 3);

        // No file is overwritten, and none is made if one exists.
        let before = fs::read(&files[1]).unwrap();
        fs::remove_file(&files[5]).unwrap();
        assert_eq!(certificates(&dir, &all).unwrap_err().kind(), TlsErrorKind::File);
        assert_eq!(fs::read(&files[1]).unwrap(), before);
        assert!(!files[5].exists());
    }

    #[test]
    fn names_are_only_names() {
        let dir = tempfile::tempdir().unwrap();
        let long = "c".repeat(65);
        for (hosts, client) in [
            (&["a,DNS:b"][..], "c"),
            (&["a b"], "c"),
            (&[""], "c"),
            (&[], "c"),
            (&["a"], ""),
            (&["a"], "a\nb"),
            (&["a"], &long),
        ] {
            let error = certificates(dir.path(), &wanted(hosts, client)).unwrap_err();
            assert_eq!(error.kind(), TlsErrorKind::Setup, "{error}");
        }
        let path = dir.path().join("keys");
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        for users in [&["a:b"][..], &[""], &["a", "a"], &["#a"]] {
            assert!(keys(&path, &names(users)).is_err(), "{users:?}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        keys(&path, &names(&["a", "b"])).unwrap();
        assert!(keys(&path, &names(&["a"])).is_err());
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!((text.len(), text.lines().count()), (2 * (2 + 64 + 1), 2));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
