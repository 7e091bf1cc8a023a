//! Distinguished names of certificates, as text in the form of RFC 4514.

use openssl::nid::Nid;
use openssl::x509::{X509NameEntryRef, X509NameRef, X509Ref};

/// The names in a certificate: `CN=alice,O=Example`, the most specific part first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateNames {
    /// The subject.
    pub subject: String,
    /// The issuer.
    pub issuer: String,
}

impl CertificateNames {
    pub(crate) fn of(certificate: &X509Ref) -> CertificateNames {
        let [subject, issuer] =
            [certificate.subject_name(), certificate.issuer_name()].map(distinguished);
        CertificateNames { subject, issuer }
    }
}

fn distinguished(name: &X509NameRef) -> String {
    let mut parts: Vec<_> = name.entries().map(part).collect();
    parts.reverse();
    parts.join(",")
}

fn part(entry: &X509NameEntryRef) -> String {
    let object = entry.object();
    let key = match object.nid() {
        // As GnuTLS calls it.
        Nid::PKCS9_EMAILADDRESS => "EMAIL".to_string(),
        Nid::UNDEF => object.to_string(),
        nid => nid.short_name().map_or_else(|_| object.to_string(), str::to_string),
    };
    let value = match entry.data().to_string() {
        Ok(text) => escaped(text.as_bytes()),
        Err(_) => escaped(entry.data().as_slice()),
    };
    format!("{key}={value}")
}

/// A value in the form of RFC 4514 (section 2.4); invisible characters are in hexadecimal.
fn escaped(value: &[u8]) -> String {
    let text = String::from_utf8_lossy(value);
    let last = text.chars().count().saturating_sub(1);
    let mut out = String::with_capacity(text.len());
    for (index, c) in text.chars().enumerate() {
        match c {
            '"' | '+' | ',' | ';' | '<' | '>' | '\\' => out.extend(['\\', c]),
            '#' if index == 0 => out.push_str("\\#"),
            ' ' if index == 0 || index == last => out.push_str("\\ "),
            c if c.is_ascii_control() => out.push_str(&format!("\\{:02X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use openssl::x509::X509Name;

    use super::*;

    #[test]
    fn names_begin_with_the_most_particular_part_and_are_escaped() {
        let mut name = X509Name::builder().unwrap();
        name.append_entry_by_text("C", "CH").unwrap();
        name.append_entry_by_text("O", "Salt, Pepper + Söhne").unwrap();
        name.append_entry_by_text("emailAddress", "a@example.com").unwrap();
        name.append_entry_by_text("CN", "#1 \"alice\" ").unwrap();
        let wanted = "CN=\\#1 \\\"alice\\\"\\ ,EMAIL=a@example.com,O=Salt\\, Pepper \\+ Söhne,C=CH";
        assert_eq!(distinguished(&name.build()), wanted);
        assert_eq!(escaped(b"a\0b\n"), "a\\00b\\0A");
    }
}
