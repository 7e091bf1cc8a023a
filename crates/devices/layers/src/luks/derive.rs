//! PBKDF2 (RFC 8018, section 5.2) with HMAC, in slices: the number of rounds comes from an
//! untrusted header, and OpenSSL's own function cannot be interrupted.

use openssl::error::ErrorStack;
use openssl::hash::{Hasher, MessageDigest};
use openssl::sha::{Sha1, Sha224, Sha256, Sha384, Sha512};

/// Maximum digest and digest block in bytes.
const DIGEST_MAX: usize = 64;
const BLOCK_MAX: usize = 128;

/// A derivation that can be interrupted after each slice.
pub(super) trait Derivation: Send {
    /// Runs at most `rounds` rounds; true: the key is complete.
    fn advance(&mut self, rounds: u64) -> Result<bool, ErrorStack>;

    /// The key.
    fn key(self: Box<Self>) -> Vec<u8>;
}

/// Starts to derive a key of `len` bytes.
pub(super) fn derivation(
    digest: MessageDigest,
    from: &[u8],
    salt: &[u8],
    rounds: u32,
    len: usize,
) -> Result<Box<dyn Derivation>, ErrorStack> {
    // The plain functions take a third of the time of the generic ones.
    let name = digest.type_();
    let is = |other: MessageDigest| other.type_() == name;
    Ok(if is(MessageDigest::sha1()) {
        Box::new(Keys::new(Sha1::new(), from, salt, rounds, len)?)
    } else if is(MessageDigest::sha224()) {
        Box::new(Keys::new(Sha224::new(), from, salt, rounds, len)?)
    } else if is(MessageDigest::sha256()) {
        Box::new(Keys::new(Sha256::new(), from, salt, rounds, len)?)
    } else if is(MessageDigest::sha384()) {
        Box::new(Keys::new(Sha384::new(), from, salt, rounds, len)?)
    } else if is(MessageDigest::sha512()) {
        Box::new(Keys::new(Sha512::new(), from, salt, rounds, len)?)
    } else {
        Box::new(Keys::new(Hasher::new(digest)?, from, salt, rounds, len)?)
    })
}

/// A digest in progress.
trait Digest: Clone + Send {
    /// Block size in bytes, the length of HMAC's padding.
    const BLOCK: usize;

    fn add(&mut self, bytes: &[u8]) -> Result<(), ErrorStack>;

    /// Writes the digest to the front of `out`; returns its length.
    fn end(self, out: &mut [u8; DIGEST_MAX]) -> Result<usize, ErrorStack>;
}

macro_rules! digests {
    ($($digest:ty, $block:expr;)*) => {$(
        impl Digest for $digest {
            const BLOCK: usize = $block;

            fn add(&mut self, bytes: &[u8]) -> Result<(), ErrorStack> {
                self.update(bytes);
                Ok(())
            }

            fn end(self, out: &mut [u8; DIGEST_MAX]) -> Result<usize, ErrorStack> {
                let found = self.finish();
                out[..found.len()].copy_from_slice(&found);
                Ok(found.len())
            }
        }
    )*};
}

digests! {
    Sha1, 64;
    Sha224, 64;
    Sha256, 64;
    Sha384, 128;
    Sha512, 128;
}

/// RIPEMD-160, which has no plain functions here.
impl Digest for Hasher {
    const BLOCK: usize = 64;

    fn add(&mut self, bytes: &[u8]) -> Result<(), ErrorStack> {
        self.update(bytes)
    }

    fn end(mut self, out: &mut [u8; DIGEST_MAX]) -> Result<usize, ErrorStack> {
        let found = self.finish()?;
        out[..found.len()].copy_from_slice(&found);
        Ok(found.len())
    }
}

struct Keys<D> {
    /// HMAC's two digests, with the padded passphrase already added.
    inner: D,
    outer: D,
    salt: Vec<u8>,
    rounds: u32,
    len: usize,
    digest_len: usize,
    key: Vec<u8>,
    /// Rounds of the current block done so far, the last result, and their sum.
    done: u32,
    last: [u8; DIGEST_MAX],
    sum: [u8; DIGEST_MAX],
}

impl<D: Digest> Keys<D> {
    fn new(
        empty: D,
        from: &[u8],
        salt: &[u8],
        rounds: u32,
        len: usize,
    ) -> Result<Self, ErrorStack> {
        let digest_len = empty.clone().end(&mut [0; DIGEST_MAX])?;
        let mut padded = [0; BLOCK_MAX];
        if from.len() > D::BLOCK {
            let mut digest = empty.clone();
            digest.add(from)?;
            let mut found = [0; DIGEST_MAX];
            let found_len = digest.end(&mut found)?;
            padded[..found_len].copy_from_slice(&found[..found_len]);
        } else {
            padded[..from.len()].copy_from_slice(from);
        }
        let keyed = |pad: u8| {
            let mut digest = empty.clone();
            digest.add(&padded.map(|byte| byte ^ pad)[..D::BLOCK])?;
            Ok(digest)
        };
        Ok(Keys {
            inner: keyed(0x36)?,
            outer: keyed(0x5c)?,
            salt: salt.to_vec(),
            rounds: rounds.max(1),
            len,
            digest_len,
            key: Vec::with_capacity(len + DIGEST_MAX),
            done: 0,
            last: [0; DIGEST_MAX],
            sum: [0; DIGEST_MAX],
        })
    }

    /// Ends a round, whose bytes were added to `inner`; the result is in `last`.
    fn end_round(&mut self, inner: D) -> Result<(), ErrorStack> {
        let len = inner.end(&mut self.last)?;
        let mut outer = self.outer.clone();
        outer.add(&self.last[..len])?;
        outer.end(&mut self.last)?;
        Ok(())
    }
}

impl<D: Digest> Derivation for Keys<D> {
    fn advance(&mut self, rounds: u64) -> Result<bool, ErrorStack> {
        for _ in 0..rounds {
            if self.key.len() >= self.len {
                break;
            }
            let mut inner = self.inner.clone();
            if self.done == 0 {
                let number = (self.key.len() / self.digest_len + 1) as u32;
                inner.add(&self.salt)?;
                inner.add(&number.to_be_bytes())?;
                self.sum = [0; DIGEST_MAX];
            } else {
                inner.add(&self.last[..self.digest_len])?;
            }
            self.end_round(inner)?;
            self.sum.iter_mut().zip(&self.last).for_each(|(sum, byte)| *sum ^= byte);
            self.done += 1;
            if self.done == self.rounds {
                self.key.extend_from_slice(&self.sum[..self.digest_len]);
                self.done = 0;
            }
        }
        Ok(self.key.len() >= self.len)
    }

    fn key(mut self: Box<Self>) -> Vec<u8> {
        self.key.truncate(self.len);
        self.key
    }
}

#[cfg(test)]
mod tests {
    use openssl::pkcs5::pbkdf2_hmac;

    use super::*;

    #[test]
    fn slices_make_the_same_key_as_openssl() {
        let digests = [
            MessageDigest::sha1(),
            MessageDigest::sha224(),
            MessageDigest::sha256(),
            MessageDigest::sha384(),
            MessageDigest::sha512(),
            MessageDigest::ripemd160(),
        ];
        for digest in digests {
            for (from, salt, rounds, len) in [
                (&b"secret"[..], &[7; 32][..], 1, 20),
                (b"", &[0; 32], 50, 64),
                (&[b'x'; 300], b"salt", 33, 32),
            ] {
                let mut expected = vec![0; len];
                pbkdf2_hmac(from, salt, rounds, digest, &mut expected).unwrap();
                let mut work = derivation(digest, from, salt, rounds as u32, len).unwrap();
                let mut slices = 1;
                while !work.advance(7).unwrap() {
                    slices += 1;
                }
                assert!(slices >= rounds / 7);
                assert_eq!(work.key(), expected, "{} bytes", digest.size());
            }
        }
    }
}
