//! Encrypts and decrypts sectors, like dm-crypt.

use std::sync::{Mutex, PoisonError};

use blockhaul_block::{Error, Kind, Result};
use openssl::cipher::{Cipher, CipherRef};
use openssl::cipher_ctx::CipherCtx;
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;

/// Size in bytes of a sector, the unit of encryption.
pub(super) const SECTOR: u64 = 512;

/// How sectors are encrypted.
#[derive(Clone, Copy)]
pub(super) struct Suite {
    chain: CipherMode,
    iv: Iv,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CipherMode {
    Xts,
    Cbc,
    Ecb,
}

/// The source of a sector's initialization vector.
#[derive(Clone, Copy)]
enum Iv {
    /// Its number in 32 bits.
    Plain,
    /// Its number in 64 bits.
    Plain64,
    /// Its number, encrypted with a digest of the key.
    Essiv(MessageDigest),
    /// None.
    None,
}

impl Suite {
    /// Parses the cipher and mode of a header; an error says what is unsupported.
    pub(super) fn parse(name: &str, mode: &str) -> Result<Suite, String> {
        let unknown = || {
            let suite = format!("{name}-{mode}");
            format!("the cipher {suite:?} is not supported: only AES in mode xts, cbc or ecb")
        };
        if name != "aes" {
            return Err(unknown());
        }
        let (chain, iv) = mode.split_once('-').unwrap_or((mode, ""));
        let chain = match chain {
            "xts" => CipherMode::Xts,
            "cbc" => CipherMode::Cbc,
            "ecb" => CipherMode::Ecb,
            _ => return Err(unknown()),
        };
        let iv = match iv {
            _ if chain == CipherMode::Ecb => Iv::None,
            "plain" => Iv::Plain,
            "plain64" => Iv::Plain64,
            _ => {
                let digest = iv.strip_prefix("essiv:").and_then(digest);
                Iv::Essiv(digest.ok_or_else(unknown)?)
            }
        };
        Ok(Suite { chain, iv })
    }

    /// A cipher with this key; an error says what is wrong.
    pub(super) fn with_key(self, key: &[u8]) -> Result<Sectors, String> {
        let cipher = match (self.chain, key.len()) {
            (CipherMode::Xts, 32) => Cipher::aes_128_xts(),
            (CipherMode::Xts, 64) => Cipher::aes_256_xts(),
            (CipherMode::Cbc, 16) => Cipher::aes_128_cbc(),
            (CipherMode::Cbc, 24) => Cipher::aes_192_cbc(),
            (CipherMode::Cbc, 32) => Cipher::aes_256_cbc(),
            (CipherMode::Ecb, 16) => Cipher::aes_128_ecb(),
            (CipherMode::Ecb, 24) => Cipher::aes_192_ecb(),
            (CipherMode::Ecb, 32) => Cipher::aes_256_ecb(),
            (_, len) => return Err(format!("a key of {} bits does not fit the cipher", 8 * len)),
        };
        let essiv = match self.iv {
            Iv::Essiv(digest) => {
                let hashed = openssl::hash::hash(digest, key).map_err(|error| error.to_string())?;
                Some(Essiv::new(&hashed)?)
            }
            _ => None,
        };
        Ok(Sectors { cipher, key: key.to_vec(), iv: self.iv, essiv, idle: Mutex::default() })
    }
}

/// The digest of this name in a header.
pub(super) fn digest(name: &str) -> Option<MessageDigest> {
    Some(match name {
        "sha1" => MessageDigest::sha1(),
        "sha224" => MessageDigest::sha224(),
        "sha256" => MessageDigest::sha256(),
        "sha384" => MessageDigest::sha384(),
        "sha512" => MessageDigest::sha512(),
        "ripemd160" => MessageDigest::ripemd160(),
        _ => return None,
    })
}

/// The cipher that makes initialization vectors.
struct Essiv {
    cipher: &'static CipherRef,
    key: Vec<u8>,
}

impl Essiv {
    fn new(key: &[u8]) -> Result<Essiv, String> {
        let cipher = match key.len() {
            16 => Cipher::aes_128_ecb(),
            24 => Cipher::aes_192_ecb(),
            32 => Cipher::aes_256_ecb(),
            len => return Err(format!("a digest of {len} bytes is not a key for AES")),
        };
        Ok(Essiv { cipher, key: key.to_vec() })
    }
}

/// Encrypts and decrypts whole sectors by their number.
pub(super) struct Sectors {
    cipher: &'static CipherRef,
    key: Vec<u8>,
    iv: Iv,
    essiv: Option<Essiv>,
    /// Contexts with the key already set, which takes longer than a sector: per direction.
    idle: Mutex<[Vec<CipherContexts>; 2]>,
}

/// The contexts of one thread: the data cipher, and that of the initialization vectors.
struct CipherContexts {
    data: CipherCtx,
    essiv: Option<CipherCtx>,
}

impl CipherContexts {
    /// Encrypts or decrypts a sector.
    fn update(&mut self, sector: &mut [u8]) -> Result<(), ErrorStack> {
        if self.data.block_size() == 1 {
            let len = sector.len();
            return self.data.cipher_update_inplace(sector, len).map(drop);
        }
        // Block ciphers need space for one more block.
        let mut out = [0; SECTOR as usize + 32];
        self.data.cipher_update(sector, Some(&mut out))?;
        sector.copy_from_slice(&out[..sector.len()]);
        Ok(())
    }
}

impl Sectors {
    /// Decrypts sectors in place; `first` is the number of the first.
    pub(super) fn decrypt(&self, first: u64, bytes: &mut [u8]) -> Result<()> {
        self.with_contexts(false, |contexts| {
            for (number, sector) in (first..).zip(bytes.chunks_exact_mut(SECTOR as usize)) {
                let iv = self.iv(number, contexts)?;
                contexts.data.decrypt_init(None, None, iv.as_ref().map(|iv| &iv[..]))?;
                contexts.update(sector)?;
            }
            Ok(())
        })
    }

    /// Encrypts sectors from `bytes` into `out` of the same length; `first` is the number of the
    /// first.
    pub(super) fn encrypt(&self, first: u64, bytes: &[u8], out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(bytes);
        self.with_contexts(true, |contexts| {
            for (number, sector) in (first..).zip(out.chunks_exact_mut(SECTOR as usize)) {
                let iv = self.iv(number, contexts)?;
                contexts.data.encrypt_init(None, None, iv.as_ref().map(|iv| &iv[..]))?;
                contexts.update(sector)?;
            }
            Ok(())
        })
    }

    fn iv(
        &self,
        number: u64,
        contexts: &mut CipherContexts,
    ) -> Result<Option<[u8; 16]>, ErrorStack> {
        let mut iv = [0; 16];
        match self.iv {
            Iv::None => return Ok(None),
            // Without the upper half.
            Iv::Plain => iv[..4].copy_from_slice(&(number as u32).to_le_bytes()),
            Iv::Plain64 | Iv::Essiv(_) => iv[..8].copy_from_slice(&number.to_le_bytes()),
        }
        if let Some(essiv) = &mut contexts.essiv {
            essiv.encrypt_init(None, None, None)?;
            let mut out = [0; 32];
            essiv.cipher_update(&iv, Some(&mut out))?;
            iv.copy_from_slice(&out[..16]);
        }
        Ok(Some(iv))
    }

    fn with_contexts(
        &self,
        encrypts: bool,
        work: impl FnOnce(&mut CipherContexts) -> Result<(), ErrorStack>,
    ) -> Result<()> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let direction = usize::from(encrypts);
        let ready = idle()[direction].pop();
        let mut contexts = match ready {
            Some(contexts) => contexts,
            None => self.contexts(encrypts).map_err(failed)?,
        };
        work(&mut contexts).map_err(failed)?;
        idle()[direction].push(contexts);
        Ok(())
    }

    fn contexts(&self, encrypts: bool) -> Result<CipherContexts, ErrorStack> {
        let mut data = CipherCtx::new()?;
        let cipher = Some(self.cipher);
        let key = Some(&self.key[..]);
        let iv = [0; 16];
        let iv = (!matches!(self.iv, Iv::None)).then_some(&iv[..]);
        if encrypts {
            data.encrypt_init(cipher, key, iv)?;
        } else {
            data.decrypt_init(cipher, key, iv)?;
        }
        data.set_padding(false);
        let essiv = match &self.essiv {
            None => None,
            Some(essiv) => {
                let mut context = CipherCtx::new()?;
                context.encrypt_init(Some(essiv.cipher), Some(&essiv.key), None)?;
                context.set_padding(false);
                Some(context)
            }
        };
        Ok(CipherContexts { data, essiv })
    }
}

fn failed(error: ErrorStack) -> Error {
    Error::new(Kind::Io, "the cipher failed").because(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_come_back_and_depend_on_their_number() {
        let plain: Vec<u8> = (0..2048_u32).map(|at| (at % 512 % 251) as u8).collect();
        for (mode, key) in [
            ("xts-plain64", 64),
            ("xts-plain", 32),
            ("cbc-plain64", 24),
            ("cbc-essiv:sha256", 32),
            ("ecb", 16),
        ] {
            let key: Vec<u8> = (0..key).map(|byte| byte * 3 + 1).collect();
            let sectors = Suite::parse("aes", mode).unwrap().with_key(&key).unwrap();
            let mut secret = vec![0; plain.len()];
            sectors.encrypt(7, &plain, &mut secret).unwrap();
            assert_ne!(secret, plain);
            let mut again = secret.clone();
            sectors.decrypt(7, &mut again).unwrap();
            assert!(again == plain, "{mode}");
            let mut elsewhere = secret[512..1024].to_vec();
            sectors.decrypt(8, &mut elsewhere).unwrap();
            assert_eq!(elsewhere, plain[512..1024], "{mode}");
            sectors.encrypt(9, &plain[..512], &mut elsewhere).unwrap();
            assert_eq!(elsewhere == secret[..512], mode == "ecb", "{mode}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for (name, mode) in [
            ("twofish", "xts-plain64"),
            ("aes", "gcm-plain64"),
            ("aes", "cbc-essiv:md5"),
            ("aes", "xts"),
        ] {
            assert!(Suite::parse(name, mode).is_err(), "{name} {mode}");
        }
        let suite = Suite::parse("aes", "xts-plain64").unwrap();
        assert!(suite.with_key(&[1; 48]).is_err());
        assert!(Suite::parse("aes", "cbc-essiv:sha512").unwrap().with_key(&[1; 32]).is_err());
    }
}
