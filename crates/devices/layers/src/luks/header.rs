//! The header of a LUKS1 container ("LUKS On-Disk Format Specification", version 1.2.3) and its key
//! slots.

use blockhaul_block::Kind;
use openssl::hash::{Hasher, MessageDigest};

use super::cipher::{SECTOR, Sectors, Suite, digest};
use super::derive::derivation;

/// Length of the header in bytes, in whole sectors.
pub(super) const HEADER: usize = 1024;
const SLOTS: usize = 8;
const ACTIVE: u32 = 0x00ac_71f3;
/// Maximum stripes of a key slot; the usual number is 4000.
const STRIPES_MAX: u32 = 64 << 10;
/// Rounds of PBKDF2 per slice: about 20 ms.
const SLICE: u64 = 100_000;

/// A container's header.
pub(super) struct Header {
    suite: Suite,
    digest: MessageDigest,
    /// First sector of the payload.
    pub(super) payload: u64,
    key_len: usize,
    key_digest: [u8; 20],
    key_salt: [u8; 32],
    key_rounds: u32,
    pub(super) slots: Vec<KeySlot>,
}

/// A key slot: the key, encrypted with a passphrase.
#[derive(Clone)]
pub(super) struct KeySlot {
    pub(super) active: bool,
    rounds: u32,
    salt: [u8; 32],
    /// First sector of its material.
    pub(super) at: u64,
    stripes: u32,
}

impl Header {
    /// Parses the first [`HEADER`] bytes of a container; an error says what is wrong. `iterations`:
    /// the maximum for a key.
    pub(super) fn parse(bytes: &[u8], iterations: u64) -> Result<Header, (Kind, String)> {
        let invalid = |why: &str| (Kind::Invalid, why.to_string());
        let unsupported = |why| (Kind::Unsupported, why);
        if !bytes.starts_with(b"LUKS\xba\xbe") {
            return Err(invalid("not a LUKS container"));
        }
        match be16(bytes, 6) {
            1 => {}
            2 => {
                return Err(unsupported(
                    "LUKS version 2 is not supported; cryptsetup convert --type luks1 converts some \
                     containers to version 1"
                        .to_string(),
                ));
            }
            version => return Err(unsupported(format!("LUKS version {version} is not supported"))),
        }
        let text = |at: usize| {
            let field = &bytes[at..at + 32];
            let end = field.iter().position(|&byte| byte == 0).unwrap_or(32);
            String::from_utf8_lossy(&field[..end]).into_owned()
        };
        let suite = Suite::parse(&text(8), &text(40)).map_err(unsupported)?;
        let name = text(72);
        let digest = digest(&name)
            .ok_or_else(|| unsupported(format!("the digest {name:?} is not supported")))?;
        let key_len = be32(bytes, 108) as usize;
        if !matches!(key_len, 16 | 24 | 32 | 64) {
            return Err(invalid(&format!("a key of {key_len} bytes")));
        }
        let slots: Vec<KeySlot> =
            (0..SLOTS).map(|slot| KeySlot::parse(&bytes[208 + 48 * slot..])).collect();
        let rounds = be32(bytes, 164);
        let all = slots.iter().filter(|slot| slot.active);
        if rounds == 0 || !all.clone().all(|slot| slot.fits()) {
            return Err(invalid("a key slot with invalid numbers"));
        }
        let longest = all.clone().map(|slot| slot.rounds).max().unwrap_or(0).max(rounds);
        if u64::from(longest) > iterations {
            return Err(invalid(&format!(
                "a key takes {longest} iterations, and max-iterations is {iterations}: raise it if you \
                 trust the container"
            )));
        }
        if all.count() == 0 {
            return Err(invalid("it has no key slot in use and cannot be opened"));
        }
        Ok(Header {
            suite,
            digest,
            payload: u64::from(be32(bytes, 104)),
            key_len,
            key_digest: bytes[112..132].try_into().expect("twenty bytes"),
            key_salt: bytes[132..164].try_into().expect("32 bytes"),
            key_rounds: rounds,
            slots,
        })
    }

    /// Length of a slot's material in bytes, in whole sectors.
    pub(super) fn material_len(&self, slot: &KeySlot) -> u64 {
        (self.key_len as u64 * u64::from(slot.stripes)).next_multiple_of(SECTOR)
    }

    /// The container's cipher, if the passphrase opens one of the slots, given with their material.
    /// Takes long; ends soon after it is dropped.
    pub(super) async fn unlock(
        &self,
        passphrase: &[u8],
        slots: Vec<(KeySlot, Vec<u8>)>,
    ) -> Result<Option<Sectors>, String> {
        for (slot, material) in slots {
            let derived = self.derive(passphrase, &slot.salt, slot.rounds, self.key_len).await?;
            let suite = self.suite;
            let digest = self.digest;
            let key_len = self.key_len;
            let merged = blockhaul_io::offload(move || {
                let mut material = material;
                let sectors = suite.with_key(&derived)?;
                sectors.decrypt(0, &mut material).map_err(|error| error.to_string())?;
                let key = merge(&material, key_len, slot.stripes as usize, digest);
                key.map_err(|error| error.to_string())
            });
            let key = merged.await.map_err(|lost| lost.to_string())??;
            let found = self.derive(&key, &self.key_salt, self.key_rounds, 20).await?;
            if openssl::memcmp::eq(&found, &self.key_digest) {
                return self.suite.with_key(&key).map(Some);
            }
        }
        Ok(None)
    }

    /// Derives a key on another thread, in slices; stops when the future is dropped.
    async fn derive(
        &self,
        from: &[u8],
        salt: &[u8],
        rounds: u32,
        len: usize,
    ) -> Result<Vec<u8>, String> {
        let text = |error: openssl::error::ErrorStack| error.to_string();
        let mut work = derivation(self.digest, from, salt, rounds, len).map_err(text)?;
        loop {
            let slice = blockhaul_io::offload(move || {
                let done = work.advance(SLICE);
                done.map(|done| (done, work))
            });
            let slice = slice.await.map_err(|lost| lost.to_string())?;
            let (done, rest) = slice.map_err(text)?;
            if done {
                return Ok(rest.key());
            }
            work = rest;
        }
    }
}

impl KeySlot {
    fn parse(bytes: &[u8]) -> KeySlot {
        KeySlot {
            active: be32(bytes, 0) == ACTIVE,
            rounds: be32(bytes, 4),
            salt: bytes[8..40].try_into().expect("32 bytes"),
            at: u64::from(be32(bytes, 40)),
            stripes: be32(bytes, 44),
        }
    }

    fn fits(&self) -> bool {
        self.rounds > 0 && (1..=STRIPES_MAX).contains(&self.stripes)
    }
}

/// Merges material that was split so that no part reveals the key (section 2.4 of the
/// specification).
fn merge(
    material: &[u8],
    len: usize,
    stripes: usize,
    digest: MessageDigest,
) -> Result<Vec<u8>, openssl::error::ErrorStack> {
    let mut key = vec![0; len];
    for (index, stripe) in material.chunks_exact(len).take(stripes).enumerate() {
        key.iter_mut().zip(stripe).for_each(|(byte, other)| *byte ^= other);
        if index + 1 < stripes {
            diffuse(&mut key, digest)?;
        }
    }
    Ok(key)
}

fn diffuse(key: &mut [u8], digest: MessageDigest) -> Result<(), openssl::error::ErrorStack> {
    for (index, piece) in (0_u32..).zip(key.chunks_mut(digest.size())) {
        let mut hasher = Hasher::new(digest)?;
        hasher.update(&index.to_be_bytes())?;
        hasher.update(piece)?;
        let hashed = hasher.finish()?;
        piece.copy_from_slice(&hashed[..piece.len()]);
    }
    Ok(())
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}
