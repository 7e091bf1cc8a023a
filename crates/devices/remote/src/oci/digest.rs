//! Digests of contents, by which registries name them.

use std::fmt;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::printable;
use openssl::sha::{Sha256, Sha512};

/// Longest name of a digest that is shown.
const SHOWN_MAX: usize = 140;

/// A digest of contents, such as `sha256:…`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContentDigest {
    is_long: bool,
    /// Lower case.
    hex: String,
}

impl ContentDigest {
    /// Parses a name.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the algorithm is neither SHA-256 nor SHA-512, or the name is invalid.
    pub(super) fn parse(text: &str) -> Result<ContentDigest> {
        let (algorithm, hex) = text.split_once(':').unwrap_or((text, ""));
        let len = match algorithm {
            "sha256" => 64,
            "sha512" => 128,
            _ => 0,
        };
        let is_hex = hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if len == 0 || hex.len() != len || !is_hex {
            let text = format!("{:?} is no digest", printable(text.as_bytes(), SHOWN_MAX));
            let remedy = "write sha256: and 64 hexadecimal digits in lower case";
            return Err(Error::new(Kind::Unsupported, text).with_remedy(remedy));
        }
        Ok(ContentDigest { is_long: len == 128, hex: hex.to_owned() })
    }

    /// The SHA-256 of bytes.
    pub(super) fn of(bytes: &[u8]) -> ContentDigest {
        let mut sum = DigestSum::new(false);
        sum.add(bytes);
        sum.finish()
    }

    /// Whether bytes have this digest.
    pub(super) fn is_of(&self, bytes: &[u8]) -> bool {
        let mut sum = self.sum();
        sum.add(bytes);
        sum.finish() == *self
    }

    /// A sum of the same algorithm.
    pub(super) fn sum(&self) -> DigestSum {
        DigestSum::new(self.is_long)
    }

    /// The names of the algorithm and of the digest.
    pub(super) fn parts(&self) -> (&'static str, &str) {
        (if self.is_long { "sha512" } else { "sha256" }, &self.hex)
    }
}

impl fmt::Display for ContentDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (algorithm, hex) = self.parts();
        write!(f, "{algorithm}:{hex}")
    }
}

/// A digest of bytes that come in parts.
pub(super) enum DigestSum {
    Short(Sha256),
    Long(Box<Sha512>),
}

impl DigestSum {
    fn new(is_long: bool) -> DigestSum {
        if is_long { DigestSum::Long(Box::default()) } else { DigestSum::Short(Sha256::new()) }
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        match self {
            DigestSum::Short(sum) => sum.update(bytes),
            DigestSum::Long(sum) => sum.update(bytes),
        }
    }

    pub(super) fn finish(self) -> ContentDigest {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            DigestSum::Short(sum) => ContentDigest { is_long: false, hex: hex(&sum.finish()) },
            DigestSum::Long(sum) => ContentDigest { is_long: true, hex: hex(&sum.finish()) },
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_standard_and_names_are_checked() {
        let short = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let long = "sha512:ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a836ba3c23a3\
                    feebbd454d4423643ce80e2a9ac94fa54ca49f";
        for name in [short, long] {
            let digest = ContentDigest::parse(name).unwrap();
            assert!(digest.is_of(b"abc") && !digest.is_of(b"abd"));
            assert_eq!(digest.to_string(), name);
        }
        assert_eq!(ContentDigest::of(b"abc").to_string(), short);
        let upper = short.to_uppercase();
        for wrong in
            ["", "sha256:", &short[..70], "md5:00", &upper, &format!("{short}0"), "sha256:../../x"]
        {
            assert_eq!(
                ContentDigest::parse(wrong).unwrap_err().kind(),
                Kind::Unsupported,
                "{wrong}"
            );
        }
    }
}
