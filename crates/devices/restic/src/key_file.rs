//! Files of keys: a password opens the keys of the repository.

use openssl::base64;
use openssl::pkcs5::scrypt;
use serde::Deserialize;

use crate::cipher::CipherKey;
use crate::fault::{RepositoryFault, Result};
use crate::storage::RepositoryStorage;

/// The folder of the files.
pub(crate) const FOLDER: &str = "keys";
/// Longest file of a key.
const FILE_MAX: u64 = 64 << 10;
/// Most keys that are tried: each takes a good part of a second.
const KEYS_MAX: usize = 32;
/// Memory that a key may need, and its work in steps of 128 bytes.
const MEMORY_MAX: u64 = 1 << 30;
const WORK_MAX: u64 = 1 << 25;

#[derive(Deserialize)]
struct KeyFile {
    kdf: String,
    #[serde(rename = "N")]
    n: u64,
    r: u64,
    p: u64,
    salt: String,
    data: String,
}

#[derive(Deserialize)]
struct MasterKey {
    mac: MasterMac,
    encrypt: String,
}

#[derive(Deserialize)]
struct MasterMac {
    k: String,
    r: String,
}

/// The keys of a repository: those that open `config`, if keys of a run that was ended have the same password.
///
/// # Errors
/// [`RepositoryFault::WrongPassword`], and errors of the storage.
pub(crate) fn open(
    storage: &dyn RepositoryStorage,
    password: &[u8],
    config: &[u8],
) -> Result<CipherKey> {
    let mut names = storage.list(FOLDER)?;
    names.retain(|name| crate::digest::Digest::parse(name).is_some());
    names.sort_unstable();
    names.truncate(KEYS_MAX);
    let (mut keys, mut damaged, mut other) = (0, 0, None);
    for name in &names {
        let file = format!("{FOLDER}/{name}");
        let bytes = match storage.whole(&file, FILE_MAX) {
            Err(RepositoryFault::Other(error)) => return Err(error.into()),
            // Removed at this moment, or damaged: another one may fit.
            Err(_) => None,
            Ok(bytes) => Some(bytes),
        };
        match bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            Some(key) if is_bounded(&key) => {
                keys += 1;
                match unlock(&key, password) {
                    Some(master) if master.open(config).is_some() => return Ok(master),
                    Some(master) => other = Some(master),
                    None => {}
                }
            }
            _ => damaged += 1,
        }
    }
    other.ok_or(RepositoryFault::WrongPassword { keys, damaged })
}

/// Whether the parameters name a function that this program carries out.
fn is_bounded(key: &KeyFile) -> bool {
    let work = key.n.checked_mul(key.r);
    let memory = work.and_then(|work| work.checked_mul(128));
    let all = work.and_then(|work| work.checked_mul(key.p));
    key.kdf == "scrypt"
        && key.n.is_power_of_two()
        && memory.is_some_and(|memory| memory <= MEMORY_MAX)
        && all.is_some_and(|all| all <= WORK_MAX)
}

/// The keys of the repository, if the password is that of this key.
fn unlock(key: &KeyFile, password: &[u8]) -> Option<CipherKey> {
    let salt = base64::decode_block(&key.salt).ok()?;
    let sealed = base64::decode_block(&key.data).ok()?;
    let mut derived = [0; 64];
    let memory = 2 * MEMORY_MAX;
    scrypt(password, &salt, key.n, key.r, key.p, memory, &mut derived).ok()?;
    let text = CipherKey::from_bytes(&derived).open(&sealed)?;
    let master: MasterKey = serde_json::from_slice(&text).ok()?;
    let part = |text: &str| base64::decode_block(text).ok();
    Some(CipherKey {
        encrypt: part(&master.encrypt)?.try_into().ok()?,
        mac_k: part(&master.mac.k)?.try_into().ok()?,
        mac_r: part(&master.mac.r)?.try_into().ok()?,
    })
}
