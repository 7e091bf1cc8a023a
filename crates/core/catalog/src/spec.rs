//! The grammar of devices, the same in every command.
//!
//! `PATH` · `SCHEME:REST[?key=value&…]` · `nbd…://…` · `-` · `[ CMD … ]`

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use blockhaul_block::{Error, Kind, Result};

/// A device as it was typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSpec {
    /// A bare path: literal, without options.
    Path(PathBuf),
    /// `SCHEME:REST`; the backend interprets REST.
    Scheme {
        /// Lower case, without the colon.
        scheme: String,
        /// Everything after the first colon, as typed.
        rest: String,
    },
    /// `[ CMD … ]`: a server to start, by socket activation.
    Command(Vec<OsString>),
    /// `-`: standard input or output.
    Pipe,
}

impl DeviceSpec {
    /// Parses one word of a command line. A text can be parsed, too.
    ///
    /// # Errors
    /// [`Kind::Usage`] if it is empty.
    pub fn parse(word: &OsStr) -> Result<DeviceSpec> {
        if word == "-" {
            return Ok(DeviceSpec::Pipe);
        }
        if word.is_empty() {
            return Err(Error::new(Kind::Usage, "a device name is empty"));
        }
        let Some(text) = word.to_str() else {
            return Ok(DeviceSpec::Path(word.into()));
        };
        let Some((scheme, rest)) = text.split_once(':') else {
            return Ok(DeviceSpec::Path(word.into()));
        };
        let mut letters = scheme.chars();
        let named = letters.next().is_some_and(|c| c.is_ascii_alphabetic())
            && letters.all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        if !named {
            return Ok(DeviceSpec::Path(word.into()));
        }
        Ok(DeviceSpec::Scheme { scheme: scheme.to_ascii_lowercase(), rest: rest.to_string() })
    }
}

impl FromStr for DeviceSpec {
    type Err = Error;

    fn from_str(word: &str) -> Result<DeviceSpec> {
        DeviceSpec::parse(OsStr::new(word))
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceSpec::Path(path) => write!(f, "{}", path.display()),
            DeviceSpec::Scheme { scheme, rest } => write!(f, "{scheme}:{rest}"),
            DeviceSpec::Command(words) => {
                f.write_str("[")?;
                words.iter().try_for_each(|word| write!(f, " {}", word.display()))?;
                f.write_str(" ]")
            }
            DeviceSpec::Pipe => f.write_str("-"),
        }
    }
}

/// A word of a command line with `…` for the password of `USER:PASSWORD@` in a URI, because messages are logged.
pub fn without_login_password(word: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = word.split_once("://") else { return word.into() };
    let authority = rest.split('/').next().unwrap_or_default();
    let login = authority.rsplit_once('@').map(|(login, _)| login);
    match login.and_then(|login| login.split_once(':')) {
        Some((user, password)) => {
            let rest = &rest[user.len() + 1 + password.len()..];
            format!("{scheme}://{user}:…{rest}").into()
        }
        None => word.into(),
    }
}

/// Bytes as a part of a URI: all but letters, digits and `-._~/` are written as `%XX`.
pub fn percent_encode(bytes: &[u8]) -> String {
    let mut text = String::new();
    for &byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                text.push(char::from(byte));
            }
            _ => text += &format!("%{byte:02X}"),
        }
    }
    text
}

/// Replaces each `%XX` by the byte.
///
/// # Errors
/// [`Kind::Usage`] for an incomplete `%XX`, or if the result is not UTF-8.
pub fn percent_decode(text: &str) -> Result<String> {
    let strict = "% must be followed by two hexadecimal digits (%25 for %)";
    decode(text, |_| Err(Error::new(Kind::Usage, format!("{text:?}: {strict}"))))
}

/// Like [`percent_decode`], but a `%` not followed by two hexadecimal digits is literal, so that
/// shares can be typed as `30%`.
pub(crate) fn percent_decode_value(text: &str) -> Result<String> {
    decode(text, Ok)
}

fn decode(text: &str, lone_percent: impl Fn(u8) -> Result<u8>) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = tail.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let byte = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match byte {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => bytes.push(lone_percent(first)?),
        }
    }
    String::from_utf8(bytes)
        .map_err(|_| Error::new(Kind::Usage, format!("{text:?}: not UTF-8 after decoding")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> DeviceSpec {
        DeviceSpec::parse(OsStr::new(text)).unwrap()
    }

    #[test]
    fn words_are_paths_schemes_or_pipes() {
        assert_eq!(parse("disk.raw"), DeviceSpec::Path("disk.raw".into()));
        assert_eq!(parse("./a:b"), DeviceSpec::Path("./a:b".into()));
        assert_eq!(parse("/x%20y?z=1"), DeviceSpec::Path("/x%20y?z=1".into()));
        assert_eq!(parse("-"), DeviceSpec::Pipe);
        let memory = DeviceSpec::Scheme { scheme: "memory".into(), rest: "1G".into() };
        assert_eq!(parse("memory:1G"), memory);
        assert_eq!(parse("MEMORY:1G"), memory);
        let uri = DeviceSpec::Scheme { scheme: "nbd+unix".into(), rest: "///?socket=/s".into() };
        assert_eq!(parse("nbd+unix:///?socket=/s"), uri);
        assert!(DeviceSpec::parse(OsStr::new("")).is_err());
    }

    #[test]
    fn percent_signs_are_decoded_strictly() {
        assert_eq!(percent_decode("a%20b%2fc").unwrap(), "a b/c");
        assert_eq!(percent_encode(b"a b/c?\xff"), "a%20b/c%3F%FF");
        for bad in ["%", "%2", "%zz", "%+1", "%ff"] {
            assert!(percent_decode(bad).is_err(), "{bad}");
        }
        assert_eq!(percent_decode_value("30%").unwrap(), "30%");
        assert_eq!(percent_decode_value("30%25%").unwrap(), "30%%");
    }
}
