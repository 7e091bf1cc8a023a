//! Digests and signatures of requests, by the OpenSSL that connections use, too.

use object_store::client::{
    CryptoProvider, DigestAlgorithm, DigestContext, HmacContext, Signer, SigningAlgorithm,
};
use object_store::{Error, Result};
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;

/// OpenSSL for object stores.
#[derive(Debug)]
pub(crate) struct OpenSslCrypto;

fn failed(source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Generic { store: "OpenSSL", source: Box::new(source) }
}

fn unsupported() -> Error {
    Error::NotSupported { source: "unknown algorithm".into() }
}

impl CryptoProvider for OpenSslCrypto {
    fn digest(&self, algorithm: DigestAlgorithm) -> Result<Box<dyn DigestContext>> {
        match algorithm {
            DigestAlgorithm::Sha256 => {
                Ok(Box::new(Digest { hash: openssl::sha::Sha256::new(), sum: [0; 32] }))
            }
            _ => Err(unsupported()),
        }
    }

    fn hmac(&self, algorithm: DigestAlgorithm, secret: &[u8]) -> Result<Box<dyn HmacContext>> {
        match algorithm {
            DigestAlgorithm::Sha256 => {
                let key = PKey::hmac(secret).map_err(failed)?;
                Ok(Box::new(Hmac { key, text: Vec::new(), code: Vec::new() }))
            }
            _ => Err(unsupported()),
        }
    }

    fn sign(&self, algorithm: SigningAlgorithm, pem: &[u8]) -> Result<Box<dyn Signer>> {
        match algorithm {
            SigningAlgorithm::RS256 => Ok(Box::new(RsaSigner(private_key(pem).map_err(failed)?))),
            _ => Err(unsupported()),
        }
    }
}

/// A key in PKCS #8 or PKCS #1.
fn private_key(pem: &[u8]) -> Result<PKey<Private>, ErrorStack> {
    PKey::private_key_from_pem(pem).or_else(|_| PKey::from_rsa(Rsa::private_key_from_pem(pem)?))
}

struct Digest {
    hash: openssl::sha::Sha256,
    sum: [u8; 32],
}

impl DigestContext for Digest {
    fn update(&mut self, data: &[u8]) {
        self.hash.update(data);
    }

    fn finish(&mut self) -> Result<&[u8]> {
        self.sum = self.hash.clone().finish();
        Ok(&self.sum)
    }
}

/// Texts to sign are short: they are kept until the end.
struct Hmac {
    key: PKey<Private>,
    text: Vec<u8>,
    code: Vec<u8>,
}

impl HmacContext for Hmac {
    fn update(&mut self, data: &[u8]) {
        self.text.extend_from_slice(data);
    }

    fn finish(&mut self) -> Result<&[u8]> {
        self.code = sign(&self.key, &self.text).map_err(failed)?;
        Ok(&self.code)
    }
}

struct RsaSigner(PKey<Private>);

impl Signer for RsaSigner {
    fn sign(&self, text: &[u8]) -> Result<Vec<u8>> {
        sign(&self.0, text).map_err(failed)
    }
}

fn sign(key: &PKey<Private>, text: &[u8]) -> Result<Vec<u8>, ErrorStack> {
    openssl::sign::Signer::new(MessageDigest::sha256(), key)?.sign_oneshot_to_vec(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_standards() {
        // FIPS 180-4 and RFC 4231, test case 2.
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let mut digest = OpenSslCrypto.digest(DigestAlgorithm::Sha256).unwrap();
        digest.update(b"ab");
        digest.update(b"c");
        let sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(digest.finish().unwrap()), sum);
        let mut hmac = OpenSslCrypto.hmac(DigestAlgorithm::Sha256, b"Jefe").unwrap();
        hmac.update(b"what do ya want ");
        hmac.update(b"for nothing?");
        let code = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(hex(hmac.finish().unwrap()), code);
        let rsa = Rsa::generate(2048).unwrap();
        for pem in [
            rsa.private_key_to_pem().unwrap(),
            PKey::from_rsa(rsa.clone()).unwrap().private_key_to_pem_pkcs8().unwrap(),
        ] {
            let signer = OpenSslCrypto.sign(SigningAlgorithm::RS256, &pem).unwrap();
            assert_eq!(signer.sign(b"text").unwrap().len(), 256);
        }
        assert!(OpenSslCrypto.sign(SigningAlgorithm::RS256, b"no key").is_err());
    }
}
