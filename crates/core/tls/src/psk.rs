//! Files of pre-shared keys, as GnuTLS's `psktool` writes them: `USER:KEY` in lines, the key in
//! hexadecimal digits.

use std::path::Path;

use crate::error::{TlsError, TlsErrorKind};

/// Maximum key length in bytes: OpenSSL's limit.
const KEY_MAX: usize = 256;
/// Maximum name length in bytes: OpenSSL's limit.
const USER_MAX: usize = 128;
/// Maximum file size in bytes: some hundred thousand users.
const FILE_MAX: u64 = 32 << 20;

/// The system's error text and a remedy; `blockhaul tls init` makes missing files.
pub(crate) fn advice(error: &std::io::Error) -> String {
    let words = blockhaul_io::plain(error);
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            format!("{words}: check the name, or make it with blockhaul tls init")
        }
        std::io::ErrorKind::IsADirectory => format!("{words}: choose the file in it"),
        std::io::ErrorKind::NotADirectory => format!("{words}: choose the folder that it is in"),
        std::io::ErrorKind::PermissionDenied => format!("{words}: check who may read it"),
        _ => words,
    }
}

/// Users and their keys. Its `Debug` output has no key.
pub(crate) struct Users(Vec<(String, Vec<u8>)>);

impl Users {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Users, TlsError> {
        let shown = path.display();
        let cannot =
            |why: String| TlsError::new(TlsErrorKind::File, format!("cannot read {shown}: {why}"));
        let failed = |error: std::io::Error| cannot(advice(&error));
        let bytes = blockhaul_io::read_regular_file(path, FILE_MAX).map_err(failed)?;
        let text = String::from_utf8(bytes);
        let text = text.map_err(|_| cannot("it is not text in UTF-8".to_string()))?;
        crate::exposed::warn(path, "the keys");
        Users::parse(&text)
            .map_err(|why| TlsError::new(TlsErrorKind::Setup, format!("{shown}: {why}")))
    }

    fn parse(text: &str) -> Result<Users, String> {
        let mut users = Vec::new();
        for (line, number) in text.lines().zip(1..) {
            if line.trim().is_empty() {
                continue;
            }
            let wrong = |why: &str| format!("line {number} {why}, where USER:HEXKEY is expected");
            // Hexadecimal digits contain no colon; a name may.
            let (user, key) = line.rsplit_once(':').ok_or_else(|| wrong("has no colon"))?;
            let key = unhex(key.trim_end()).ok_or_else(|| wrong("has a key that is not hex"))?;
            match (user.len(), key.len()) {
                (1..=USER_MAX, 1..=KEY_MAX) => users.push((user.to_string(), key)),
                (1..=USER_MAX, _) => return Err(wrong("has a key that is empty or too long")),
                _ => return Err(wrong("has a name that is empty or too long")),
            }
        }
        if users.is_empty() {
            Err("there is no key in this file: make one with blockhaul tls init --psk".to_string())
        } else {
            Ok(Users(users))
        }
    }

    /// The key of a user; the first of several.
    pub(crate) fn key(&self, user: &[u8]) -> Option<&[u8]> {
        let found = self.0.iter().find(|(name, _)| name.as_bytes() == user);
        found.map(|(_, key)| key.as_slice())
    }

    /// The user to log in as by default: the one of this name, or the only one.
    pub(crate) fn choose(self, login: Option<String>) -> Result<(String, Vec<u8>), String> {
        let same = |(user, _): &(String, Vec<u8>)| Some(user) == login.as_ref();
        let mut users = self.0;
        match users.iter().position(same) {
            Some(index) => Ok(users.swap_remove(index)),
            None if users.len() == 1 => Ok(users.remove(0)),
            None => {
                Err(format!("{} users are in it: name one, as in nbds://USER@HOST", users.len()))
            }
        }
    }
}

pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let pairs = text.as_bytes().chunks(2);
    pairs
        .map(|pair| match pair {
            // Two digits make a byte.
            [high, low] => Some((digit(*high)? * 16 + digit(*low)?) as u8),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_keys() {
        let users = Users::parse("alice:00ff\r\n\nbo:b:0aA1\n").unwrap();
        assert_eq!(users.key(b"alice"), Some(&[0, 255][..]));
        assert_eq!(users.key(b"bo:b"), Some(&[0x0a, 0xa1][..]));
        assert_eq!(users.key(b"bo"), None);
        assert!(users.choose(Some("carol".into())).unwrap_err().contains("2 users"));
        let users = Users::parse("alice:00ff\nbob:01\n").unwrap();
        assert_eq!(users.choose(Some("bob".into())).unwrap(), ("bob".into(), vec![1]));
        let only = Users::parse("alice:00ff\n").unwrap();
        assert_eq!(only.choose(Some("bob".into())).unwrap().0, "alice");
    }

    #[test]
    fn what_is_no_file_of_keys_is_refused() {
        let long = format!("a:{}", "00".repeat(KEY_MAX + 1));
        let name = format!("{}:00", "n".repeat(USER_MAX + 1));
        for text in ["", "\n", "alice", "alice:", "alice:0", "alice:zz", ":00", &long, &name] {
            let error = Users::parse(text).err().unwrap_or_else(|| panic!("{text}"));
            assert!(!error.contains("00ff"), "{error}");
        }
    }
}
