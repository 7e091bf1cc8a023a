//! Certificates: the right one, and wrong ones.

use blockhaul_block::Kind;
use openssl::asn1::Asn1Time;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;
use openssl::ssl::{SslContext, SslMethod};
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509Builder, X509NameBuilder};

use super::*;

pub struct CertifiedKey {
    key: PKey<Private>,
    pub certificate: X509,
}

/// A certificate for a name, valid until so many days from now, signed by an authority or by itself.
pub fn certificate(name: &str, days: i64, by: Option<&CertifiedKey>) -> CertifiedKey {
    let key = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
    let mut subject = X509NameBuilder::new().unwrap();
    subject.append_entry_by_text("CN", name).unwrap();
    let subject = subject.build();
    let mut builder = X509Builder::new().unwrap();
    builder.set_version(2).unwrap();
    builder.set_subject_name(&subject).unwrap();
    builder.set_issuer_name(by.map_or(&subject, |by| by.certificate.subject_name())).unwrap();
    builder.set_pubkey(&key).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs()
        as i64;
    let time = |days: i64| Asn1Time::from_unix(now + days * 86400).unwrap();
    builder.set_not_before(&time(-10)).unwrap();
    builder.set_not_after(&time(days)).unwrap();
    if by.is_none() {
        builder.append_extension(BasicConstraints::new().critical().ca().build().unwrap()).unwrap();
    }
    let context = builder.x509v3_context(by.map(|by| &*by.certificate), None);
    let names = match name.parse::<std::net::IpAddr>() {
        Ok(_) => SubjectAlternativeName::new().ip(name).build(&context),
        Err(_) => SubjectAlternativeName::new().dns(name).build(&context),
    };
    builder.append_extension(names.unwrap()).unwrap();
    builder.sign(by.map_or(&key, |by| &by.key), MessageDigest::sha256()).unwrap();
    CertifiedKey { key, certificate: builder.build() }
}

pub fn context(own: &CertifiedKey) -> SslContext {
    let mut context = SslContext::builder(SslMethod::tls_server()).unwrap();
    context.set_private_key(&own.key).unwrap();
    context.set_certificate(&own.certificate).unwrap();
    context.build()
}

#[test]
fn servers_are_checked_against_the_authority() {
    let authority = certificate("authority", 10, None);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), authority.certificate.to_pem().unwrap()).unwrap();
    let ca = format!("#ca={}", file.path().display());
    let right = certificate("127.0.0.1", 10, Some(&authority));
    let server = ObjectServer::secure(object(), context(&right));
    assert!(all_of(server.url(&format!("/{ca}"))).unwrap() == content(1, SIZE));
    let insecure = |url: String, why: &str| {
        let error = refused(url);
        assert_eq!(error.kind(), Kind::Refused, "{error}");
        assert!(
            error.to_string().contains("certificate verify failed")
                && error.to_string().contains(why),
            "{error}"
        );
    };
    // The system does not know the authority.
    insecure(server.url("/"), "issuer certificate");
    let other = certificate("127.0.0.2", 10, Some(&authority));
    let server = ObjectServer::secure(object(), context(&other));
    insecure(server.url(&format!("/{ca}")), "mismatch");
    let expired = certificate("127.0.0.1", -1, Some(&authority));
    let server = ObjectServer::secure(object(), context(&expired));
    insecure(server.url(&format!("/{ca}")), "expired");
    let own = certificate("127.0.0.1", 10, None);
    let server = ObjectServer::secure(object(), context(&own));
    insecure(server.url(&format!("/{ca}")), "self-signed");
    // No TLS behind https, and TLS behind http.
    let plain = ObjectServer::start(object(), |_, _, _| Fault::Drop);
    let error = refused(format!("https://{}/", plain.address()));
    assert!(error.to_string().contains("cannot connect"), "{error}");
    let server = ObjectServer::secure(object(), context(&right));
    all_of(format!("http://{}/", server.address())).unwrap_err();
}
