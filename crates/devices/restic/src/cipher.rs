//! Encryption: AES-256 in counter mode, authenticated by Poly1305-AES.

use openssl::error::ErrorStack;
use openssl::memcmp;
use openssl::pkey::{Id, PKey};
use openssl::rand::rand_bytes;
use openssl::sign::Signer;
use openssl::symm::{Cipher, Crypter, Mode, encrypt};

/// Bytes of the nonce before the data, and of the code behind it.
const NONCE: usize = 16;
const CODE: usize = 16;
/// Bytes that encryption adds.
pub(crate) const OVERHEAD: usize = NONCE + CODE;

/// The keys of encrypted bytes.
#[derive(Clone)]
pub(crate) struct CipherKey {
    pub(crate) encrypt: [u8; 32],
    /// The key of AES for the code.
    pub(crate) mac_k: [u8; 16],
    /// The key of Poly1305.
    pub(crate) mac_r: [u8; 16],
}

impl CipherKey {
    /// The keys in 64 bytes that a password yields.
    pub(crate) fn from_bytes(bytes: &[u8; 64]) -> CipherKey {
        let part = |from: usize| {
            let mut part = [0; 16];
            part.copy_from_slice(&bytes[from..from + 16]);
            part
        };
        let mut encrypt = [0; 32];
        encrypt.copy_from_slice(&bytes[..32]);
        CipherKey { encrypt, mac_k: part(32), mac_r: part(48) }
    }

    /// Decrypts bytes. None: their code does not match them.
    pub(crate) fn open(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, rest) = sealed.split_first_chunk::<NONCE>()?;
        let (text, code) = rest.split_last_chunk::<CODE>()?;
        let made = self.code(nonce, text).ok()?;
        if made.len() != CODE || !memcmp::eq(&made, code) {
            return None;
        }
        // Encryption and decryption are one in counter mode.
        encrypt(Cipher::aes_256_ctr(), &self.encrypt, Some(nonce), text).ok()
    }

    /// A new random key.
    ///
    /// # Errors
    /// No random bytes are left.
    pub(crate) fn random() -> Result<CipherKey, ErrorStack> {
        let mut bytes = [0; 64];
        rand_bytes(&mut bytes)?;
        let mut key = CipherKey::from_bytes(&bytes);
        // The bits that Poly1305 ignores.
        for at in [3, 7, 11, 15] {
            key.mac_r[at] &= 0x0f;
        }
        for at in [4, 8, 12] {
            key.mac_r[at] &= 0xfc;
        }
        Ok(key)
    }

    /// Encrypts bytes with a random nonce.
    ///
    /// # Errors
    /// No random bytes are left.
    pub(crate) fn seal(&self, text: &[u8]) -> Result<Vec<u8>, ErrorStack> {
        let mut nonce = [0; NONCE];
        rand_bytes(&mut nonce)?;
        let mut sealed = vec![0; OVERHEAD + text.len()];
        let (head, rest) = sealed.split_at_mut(NONCE);
        let (body, tail) = rest.split_at_mut(text.len());
        head.copy_from_slice(&nonce);
        let cipher = Cipher::aes_256_ctr();
        let mut crypter = Crypter::new(cipher, Mode::Encrypt, &self.encrypt, Some(&nonce))?;
        // A mode without blocks: nothing is left for the end.
        crypter.update(text, body)?;
        let code = self.code(&nonce, body)?;
        tail.copy_from_slice(code.get(..CODE).ok_or_else(ErrorStack::get)?);
        Ok(sealed)
    }

    fn code(&self, nonce: &[u8; NONCE], text: &[u8]) -> Result<Vec<u8>, ErrorStack> {
        // The second block is padding.
        let masked = encrypt(Cipher::aes_128_ecb(), &self.mac_k, None, nonce)?;
        let key = [&self.mac_r[..], &masked[..16]].concat();
        let key = PKey::private_key_from_raw_bytes(&key, Id::POLY1305)?;
        let mut signer = Signer::new_without_digest(&key)?;
        signer.update(text)?;
        signer.sign_to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_published_examples() {
        // D. J. Bernstein, "The Poly1305-AES message-authentication code", appendix B.
        let hex = |text: &str| {
            let digits: Vec<_> =
                text.bytes().filter_map(|digit| char::from(digit).to_digit(16)).collect();
            digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect::<Vec<_>>()
        };
        let examples = [
            (
                "f3f6",
                "851fc40c3467ac0be05cc20404f3f700",
                "ec074c835580741701425b623235add6",
                "fb447350c4e868c52ac3275cf9d4327e",
                "f4c633c3044fc145f84f335cb81953de",
            ),
            (
                "",
                "a0f3080000f46400d0c7e9076c834403",
                "75deaa25c09f208e1dc4ce6b5cad3fbf",
                "61ee09218d29b0aaed7e154a2c5509cc",
                "dd3fab2251f11ac759f0887129cc2ee7",
            ),
        ];
        for (text, r, k, nonce, code) in examples {
            let [mac_r, mac_k, nonce] = [r, k, nonce].map(|text| hex(text).try_into().unwrap());
            let key = CipherKey { encrypt: [0; 32], mac_k, mac_r };
            assert_eq!(key.code(&nonce, &hex(text)).unwrap(), hex(code));
        }
    }

    #[test]
    fn changed_bytes_are_refused() {
        let key = CipherKey { encrypt: [1; 32], mac_k: [2; 16], mac_r: [3; 16] };
        let sealed = key.seal(b"some text").unwrap();
        assert_eq!(key.open(&sealed).unwrap(), b"some text");
        for at in 0..sealed.len() {
            let mut other = sealed.clone();
            other[at] ^= 0x10;
            assert!(key.open(&other).is_none(), "{at}");
            assert!(key.open(&sealed[..at]).is_none(), "{at}");
        }
    }
}
