//! New repositories.

use blockhaul_block::{Error, Kind};
use jiff::Timestamp;
use openssl::base64::encode_block;
use openssl::pkcs5::scrypt;
use openssl::rand::rand_bytes;
use serde_json::json;

use crate::cipher::CipherKey;
use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};
use crate::repository::unsealed;
use crate::storage::{CONFIG, RepositoryStorage};
use crate::writer::person::Person;
use crate::writer::polynomial;
use crate::writer::unserialized;

/// The work of a password: parameters of scrypt, as restic chooses them at least.
const WORK: [u64; 3] = [1 << 15, 8, 5];
const MEMORY: u64 = 1 << 28;

/// Refuses to make a repository where files of others are, or with an empty password.
///
/// # Errors
/// [`Kind::Usage`], and those of the storage.
pub(crate) fn check(storage: &dyn RepositoryStorage, password: &[u8]) -> Result<()> {
    storage.check_writable()?;
    if password.is_empty() {
        let text = "restic: the password is empty";
        let remedy = "choose a password: nobody can read the backups without it";
        return Err(Error::new(Kind::Usage, text).with_remedy(remedy).into());
    }
    let mut found = storage.list("")?;
    // A run that was killed before the last file has left the folders, and perhaps a key.
    found.retain(|name| !["data", "index", "keys", "locks", "snapshots"].contains(&&name[..]));
    found.sort_unstable();
    if let Some(name) = found.first() {
        let text =
            format!("restic: the place for the new repository has other files, such as {name:?}");
        return Err(Error::new(Kind::Usage, text).with_remedy("choose an empty directory").into());
    }
    Ok(())
}

/// Makes a repository of version 2 with a random key that this password opens. Blocks.
///
/// # Errors
/// The storage fails.
pub(crate) fn create(storage: &dyn RepositoryStorage, password: &[u8]) -> Result<()> {
    let key = match crate::key_file::open(storage, password) {
        // A run that was killed has made it.
        Ok(key) => key,
        Err(RepositoryFault::WrongPassword { keys: 0, damaged: 0 }) => {
            let key = CipherKey::random().map_err(unsealed)?;
            let file = key_file(&key, password)?;
            storage.put(&format!("keys/{}", Digest::of(&file)), &file)?;
            key
        }
        Err(fault) => return Err(fault),
    };
    let mut id = [0; 32];
    rand_bytes(&mut id).map_err(unsealed)?;
    let polynomial = format!("{:x}", polynomial::random().map_err(unsealed)?);
    let config = json!({ "version": 2, "id": Digest(id), "chunker_polynomial": polynomial });
    let config = serde_json::to_vec(&config).map_err(unserialized)?;
    // Last: it makes the place a repository.
    storage.put(CONFIG, &key.seal(&config).map_err(unsealed)?)
}

fn key_file(key: &CipherKey, password: &[u8]) -> Result<Vec<u8>, RepositoryFault> {
    let (mut salt, mut derived) = ([0; 64], [0; 64]);
    rand_bytes(&mut salt).map_err(unsealed)?;
    let [n, r, p] = WORK;
    scrypt(password, &salt, n, r, p, MEMORY, &mut derived).map_err(unsealed)?;
    let master = json!({
        "mac": { "k": encode_block(&key.mac_k), "r": encode_block(&key.mac_r) },
        "encrypt": encode_block(&key.encrypt),
    });
    let master = serde_json::to_vec(&master).map_err(unserialized)?;
    let data = CipherKey::from_bytes(&derived).seal(&master).map_err(unsealed)?;
    let Person { host, user, .. } = Person::here();
    let file = json!({
        "created": Timestamp::now(), "username": user, "hostname": host,
        "kdf": "scrypt", "N": n, "r": r, "p": p, "salt": encode_block(&salt), "data": encode_block(&data),
    });
    Ok(serde_json::to_vec(&file).map_err(unserialized)?)
}
