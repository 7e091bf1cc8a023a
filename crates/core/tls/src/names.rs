//! Distinguished names of certificates, in the form of RFC 4514.

use std::collections::BTreeSet;
use std::fmt;

use openssl::asn1::Asn1Object;
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

/// Names of types of attributes besides OpenSSL's, in any case, and their numbers: those of RFC 4514, and that of GnuTLS
/// for addresses of mail.
const TYPES: &[(&str, &str)] = &[
    ("CN", "2.5.4.3"),
    ("L", "2.5.4.7"),
    ("ST", "2.5.4.8"),
    ("O", "2.5.4.10"),
    ("OU", "2.5.4.11"),
    ("C", "2.5.4.6"),
    ("STREET", "2.5.4.9"),
    ("DC", "0.9.2342.19200300.100.1.25"),
    ("UID", "0.9.2342.19200300.100.1.1"),
    ("EMAIL", "1.2.840.113549.1.9.1"),
];

/// The type of an attribute as DER has its number.
type AttributeType = Vec<u8>;

/// A distinguished name: equal to another one if both have the same parts in the same order, each with the same
/// attributes in any order. Values are compared byte for byte.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DistinguishedName(Vec<BTreeSet<(AttributeType, AttributeValue)>>);

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum AttributeValue {
    Text(Vec<u8>),
    /// The encoding of a value that is no text.
    Encoded(Vec<u8>),
}

/// Why a text is no distinguished name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameSyntaxError {
    /// The attribute with the fault.
    attribute: String,
    fault: &'static str,
}

impl fmt::Display for NameSyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NameSyntaxError { attribute, fault } = self;
        write!(f, "{attribute:?} {fault}; write a name such as CN=alice,O=Example (RFC 4514)")
    }
}

impl std::error::Error for NameSyntaxError {}

impl DistinguishedName {
    /// Parses a name such as `CN=alice,O=Example`. Types are names in any case, OpenSSL's names, or numbers.
    ///
    /// # Errors
    /// The first attribute that is not in the form of RFC 4514, or has an unknown type; an empty name.
    pub fn parse(text: &str) -> Result<DistinguishedName, NameSyntaxError> {
        let mut parts = vec![BTreeSet::new()];
        for (separator, attribute) in attributes(text) {
            if separator == Some(',') {
                parts.push(BTreeSet::new());
            }
            let wrong = |fault| NameSyntaxError { attribute: attribute.to_string(), fault };
            let parsed = parsed(attribute).map_err(wrong)?;
            // At least one part is there.
            if !parts.last_mut().is_some_and(|part| part.insert(parsed)) {
                return Err(wrong("is there twice"));
            }
        }
        Ok(DistinguishedName(parts))
    }
}

/// The attributes of a name, each with the separator before it.
fn attributes(text: &str) -> impl Iterator<Item = (Option<char>, &str)> {
    let mut rest = Some((None, text));
    std::iter::from_fn(move || {
        let (separator, text) = rest.take()?;
        let mut is_escaped = false;
        let end = text.find(|c: char| {
            let ends = !is_escaped && matches!(c, ',' | '+');
            is_escaped = !is_escaped && c == '\\';
            ends
        });
        let Some(end) = end else { return Some((separator, text)) };
        rest = Some((text[end..].chars().next(), &text[end + 1..]));
        Some((separator, &text[..end]))
    })
}

fn parsed(attribute: &str) -> Result<(AttributeType, AttributeValue), &'static str> {
    let (name, value) = attribute.split_once('=').ok_or("has no =")?;
    let kind = type_named(name).ok_or("has a type that is unknown")?;
    let value = match value.strip_prefix('#') {
        Some(digits) => {
            let encoded = crate::psk::unhex(digits).filter(|bytes| !bytes.is_empty());
            AttributeValue::Encoded(encoded.ok_or("has a # before what is not hexadecimal")?)
        }
        None => AttributeValue::Text(unescaped(value)?),
    };
    Ok((kind, value))
}

/// The type with this name or number.
fn type_named(name: &str) -> Option<AttributeType> {
    let is_number = name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let is_word = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if !is_number && !is_word {
        return None;
    }
    let known = TYPES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
    let object = Asn1Object::from_str(known.map_or(name, |(_, number)| number)).ok()?;
    Some(object.as_slice().to_vec()).filter(|number| !number.is_empty())
}

/// The bytes of a value (RFC 4514, section 3).
fn unescaped(value: &str) -> Result<Vec<u8>, &'static str> {
    let mut bytes = Vec::new();
    let mut rest = value.as_bytes();
    while let [first, after @ ..] = rest {
        rest = match (*first, after) {
            (b'\\', [high, low, after @ ..])
                if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
            {
                let digits = [*high, *low].map(|digit| char::from(digit).to_digit(16).unwrap_or(0));
                // Two digits make a byte.
                bytes.push((digits[0] * 16 + digits[1]) as u8);
                after
            }
            (b'\\', [special, after @ ..]) if b" \"#+,;<=>\\".contains(special) => {
                bytes.push(*special);
                after
            }
            (b'\\', _) => return Err("has a \\ before a character that needs none"),
            (b'"' | b';' | b'<' | b'>' | 0, _) => {
                return Err("has a character that needs a \\ before it");
            }
            (b' ', _) if rest.len() == value.len() || after.is_empty() => {
                return Err("has a space at an end of its value that needs a \\ before it");
            }
            (byte, after) => {
                bytes.push(byte);
                after
            }
        };
    }
    Ok(bytes)
}

fn distinguished(name: &X509NameRef) -> String {
    let encoded = name.to_der().unwrap_or_default();
    let mut entries = name.entries();
    let part = |attributes: &Vec<EncodedAttribute<'_>>| {
        let attributes = attributes.iter().zip(entries.by_ref());
        let attributes = attributes.map(|(encoded, entry)| attribute(entry, encoded));
        attributes.collect::<Vec<_>>().join("+")
    };
    let mut parts: Vec<_> = encoded_parts(&encoded).unwrap_or_default().iter().map(part).collect();
    parts.reverse();
    parts.join(",")
}

/// An attribute as DER has it.
struct EncodedAttribute<'a> {
    /// The number of its type.
    number: &'a [u8],
    /// Its value, with tag and length.
    value: &'a [u8],
}

/// The attributes of a name, by the parts that they are in; `None`: it is no name.
fn encoded_parts(name: &[u8]) -> Option<Vec<Vec<EncodedAttribute<'_>>>> {
    let (sequence, _) = element(name)?;
    elements(sequence.contents)?.into_iter().map(encoded_part).collect()
}

fn encoded_part(set: DerElement<'_>) -> Option<Vec<EncodedAttribute<'_>>> {
    elements(set.contents)?.into_iter().map(encoded_attribute).collect()
}

fn encoded_attribute(attribute: DerElement<'_>) -> Option<EncodedAttribute<'_>> {
    match &elements(attribute.contents)?[..] {
        [number, value] => Some(EncodedAttribute { number: number.contents, value: value.whole }),
        _ => None,
    }
}

/// An element of DER.
struct DerElement<'a> {
    whole: &'a [u8],
    contents: &'a [u8],
}

fn elements(mut bytes: &[u8]) -> Option<Vec<DerElement<'_>>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let (one, rest) = element(bytes)?;
        found.push(one);
        bytes = rest;
    }
    Some(found)
}

/// The first element, and what follows.
fn element(bytes: &[u8]) -> Option<(DerElement<'_>, &[u8])> {
    let (head, len) = match *bytes.get(1)? {
        long if long > 0x80 => {
            let count = usize::from(long - 0x80);
            let digits = bytes.get(2..2 + count).filter(|digits| digits.len() <= 4)?;
            let len = digits.iter().fold(0_usize, |len, byte| (len << 8) | usize::from(*byte));
            (2 + count, len)
        }
        short => (2, usize::from(short)),
    };
    let end = head.checked_add(len)?;
    let one = DerElement { whole: bytes.get(..end)?, contents: bytes.get(head..end)? };
    Some((one, &bytes[end..]))
}

fn attribute(entry: &X509NameEntryRef, encoded: &EncodedAttribute<'_>) -> String {
    let digits = || encoded.value.iter().map(|byte| format!("{byte:02X}")).collect::<String>();
    let value = match entry.data().to_string() {
        Ok(text) => escaped(&text),
        Err(_) => format!("#{}", digits()),
    };
    format!("{}={value}", type_name(entry.object().nid(), encoded.number))
}

/// The name of a type from which [`type_named`] makes this number, or the number.
fn type_name(nid: Nid, number: &[u8]) -> String {
    let leads_here = |name: &&str| type_named(name).is_some_and(|found| found == number);
    let known = TYPES.iter().map(|(name, _)| *name).find(leads_here);
    let short = || nid.short_name().ok().filter(leads_here);
    match known.or_else(short) {
        Some(name) => name.to_string(),
        None => dotted(number),
    }
}

/// The number of a type in the form `2.5.4.3`.
fn dotted(number: &[u8]) -> String {
    let mut arcs = Vec::new();
    let mut arc = 0_u128;
    for byte in number {
        arc = (arc << 7) | u128::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            arcs.push(arc);
            arc = 0;
        }
    }
    // The first two arcs are one number.
    let first = arcs.first().copied().unwrap_or(0);
    let root = (first / 40).min(2);
    let rest = arcs.iter().skip(1).map(|arc| format!(".{arc}")).collect::<String>();
    format!("{root}.{}{rest}", first - root * 40)
}

/// A value in the form of RFC 4514 (section 2.4); invisible characters are in hexadecimal.
fn escaped(text: &str) -> String {
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
    use std::slice;

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
        let shown = distinguished(&name.build());
        assert_eq!(shown, wanted);
        assert!(DistinguishedName::parse(&shown).is_ok());
        assert_eq!(escaped("a\0b\n"), "a\\00b\\0A");
    }

    /// An attribute of a name: its number, the tag of its value, and that value.
    fn encoded(number: &str, tag: u8, value: &[u8]) -> Vec<u8> {
        let number = Asn1Object::from_str(number).unwrap().as_slice().to_vec();
        der(0x30, &[der(6, &number), der(tag, value)].concat())
    }

    fn der(tag: u8, contents: &[u8]) -> Vec<u8> {
        [&[tag, u8::try_from(contents.len()).unwrap()], contents].concat()
    }

    fn name(sets: &[&[Vec<u8>]]) -> String {
        let sets: Vec<u8> = sets.iter().flat_map(|set| der(0x31, &set.concat())).collect();
        distinguished(&X509Name::from_der(&der(0x30, &sets)).unwrap())
    }

    #[test]
    fn attributes_of_one_part_are_joined_by_a_plus() {
        let (cn, o) = (encoded("2.5.4.3", 0x0c, b"a"), encoded("2.5.4.10", 0x0c, b"b"));
        assert_eq!(name(&[&[cn.clone(), o.clone()]]), "CN=a+O=b");
        assert_eq!(name(&[slice::from_ref(&o), slice::from_ref(&cn)]), "CN=a,O=b");
        assert_eq!(name(&[&[o], &[cn.clone(), cn]]), "CN=a+CN=a,O=b");
        // OpenSSL's short name of another attribute is `uid`.
        let other = "0.9.2342.19200300.100.1.44";
        assert_eq!(name(&[&[encoded(other, 0x0c, b"a")]]), format!("{other}=a"));
        assert_eq!(name(&[&[encoded("0.9.2342.19200300.100.1.1", 0x0c, b"a")]]), "UID=a");
        assert_eq!(name(&[&[encoded("1.2.3.999999", 0x0c, b"a")]]), "1.2.3.999999=a");
        assert_eq!(name(&[&[encoded("2.999.1", 0x0c, b"a")]]), "2.999.1=a");
        // Two values that are no text stay two values.
        assert_eq!(name(&[&[encoded("2.5.4.3", 3, b"\0\xff")]]), "CN=#030200FF");
    }

    #[test]
    fn names_are_equal_if_their_parts_are() {
        let parse = |text| DistinguishedName::parse(text).unwrap();
        assert_ne!(parse("CN=a+O=b"), parse("CN=a,O=b"));
        assert_ne!(parse("CN=a,O=b"), parse("O=b,CN=a"));
        assert_ne!(parse("CN=a"), parse("CN=A"));
        assert_ne!(parse("CN=a\\,O=b"), parse("CN=a,O=b"));
        assert_ne!(parse("CN=#0401ff"), parse("CN=\\#0401ff"));
        for (one, other) in [
            ("CN=a+O=b", "o=b+cn=a"),
            ("CN=a", "2.5.4.3=a"),
            ("EMAIL=a", "emailAddress=a"),
            ("CN=a\\,b", "CN=a\\2Cb"),
            ("CN=\\C3\\B6", "CN=ö"),
            ("CN=\\ a\\ ", "CN=\\20a\\20"),
            ("CN=a=b", "CN=a\\=b"),
            ("CN=", "CN="),
        ] {
            assert_eq!(parse(one), parse(other), "{one}");
        }
    }

    #[test]
    fn texts_that_are_no_names_are_refused() {
        for (text, fault) in [
            ("", "has no ="),
            ("alice", "has no ="),
            ("CN=a,", "has no ="),
            ("CN=a, O=b", "\" O=b\" has a type that is unknown"),
            ("CN = a", "has a type that is unknown"),
            ("=a", "has a type that is unknown"),
            ("XY=a", "has a type that is unknown"),
            ("1.=a", "has a type that is unknown"),
            ("CN= a", "has a space"),
            ("CN=a ", "has a space"),
            ("CN=a;O=b", "has a character"),
            ("CN=\"a\"", "has a character"),
            ("CN=a\\", "has a \\"),
            ("CN=a\\xyz", "has a \\"),
            ("CN=#", "has a #"),
            ("CN=#0", "has a #"),
            ("CN=a+CN=a", "is there twice"),
        ] {
            let error = DistinguishedName::parse(text).unwrap_err().to_string();
            assert!(error.contains(fault), "{text}: {error}");
        }
    }
}
