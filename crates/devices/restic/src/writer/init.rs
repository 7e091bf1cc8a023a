//! New repositories.

use std::time::Duration;

use blockhaul_block::{Error, Kind};
use jiff::Timestamp;
use openssl::base64::encode_block;
use openssl::pkcs5::scrypt;
use openssl::rand::rand_bytes;
use serde_json::json;

use crate::cipher::CipherKey;
use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};
use crate::key_file;
use crate::repository::unsealed;
use crate::storage::{CONFIG, FOLDERS, RepositoryStorage};
use crate::writer::person::Person;
use crate::writer::polynomial;
use crate::writer::unserialized;

/// The work of a password: parameters of scrypt, as restic chooses them at least.
const WORK: [u64; 3] = [1 << 15, 8, 5];
const MEMORY: u64 = 1 << 28;
/// Time after which a key without `config` is no longer that of a repository that another program makes.
const MAKING: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(50);

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
    found.retain(|name| !FOLDERS.contains(&&name[..]));
    found.sort_unstable();
    if let Some(name) = found.first() {
        let text =
            format!("restic: the place for the new repository has other files, such as {name:?}");
        return Err(Error::new(Kind::Usage, text).with_remedy("choose an empty directory").into());
    }
    // A new repository over them would make backups unreadable that a copy of config and keys opens.
    for folder in ["data", "index", "snapshots", key_file::FOLDER] {
        if let Some(found) = first_file(storage, folder)? {
            let text = format!(
                "restic: the place for the new repository has remains of another one, such as {found}"
            );
            let remedy =
                "restore its files config and keys from a copy; or choose an empty directory";
            return Err(Error::new(Kind::Usage, text).with_remedy(remedy).into());
        }
    }
    Ok(())
}

/// Whether a repository was made here. Waits while another program has written its key alone. Blocks.
///
/// # Errors
/// The storage fails.
pub(crate) fn is_made(storage: &dyn RepositoryStorage) -> Result<bool> {
    let begun = blockhaul_io::now();
    loop {
        let names = storage.list("")?;
        if names.iter().any(|name| name == CONFIG) {
            return Ok(true);
        }
        let has_key = names.iter().any(|name| name == key_file::FOLDER)
            && first_file(storage, key_file::FOLDER)?.is_some();
        if !has_key || blockhaul_io::elapsed(begun) > MAKING {
            return Ok(false);
        }
        std::thread::sleep(LOOK);
    }
}

/// A file in a folder, or in the folders in it.
fn first_file(storage: &dyn RepositoryStorage, folder: &str) -> Result<Option<String>> {
    for name in storage.list(folder)? {
        let inner = format!("{folder}/{name}");
        // Folders of packs have two digits.
        if folder != "data" || name.len() != 2 {
            return Ok(Some(inner));
        }
        if let Some(file) = storage.list(&inner)?.first() {
            return Ok(Some(format!("{inner}/{file}")));
        }
    }
    Ok(None)
}

/// Makes a repository of version 2 with a random key that this password opens. A repository that another program has made
/// here since the check stays. Blocks.
///
/// # Errors
/// The storage fails.
pub(crate) fn create(storage: &dyn RepositoryStorage, password: &[u8]) -> Result<()> {
    storage.make()?;
    if is_made(storage)? {
        return Ok(());
    }
    check(storage, password)?;
    let key = CipherKey::random().map_err(unsealed)?;
    let file = key_file(&key, password)?;
    let key_name = format!("{}/{}", key_file::FOLDER, Digest::of(&file));
    // Not as a file that may be replaced: a service that ignores the condition is noticed before `config` is written.
    let made = storage.put_new(&key_name, &file).and_then(|_| write_config(storage, &key));
    // While `config` may be sealed with it, the only key stays.
    let is_unused = match &made {
        Ok(true) => false,
        Ok(false) => storage.list(key_file::FOLDER).is_ok_and(|names| names.len() > 1),
        Err(_) => {
            let config = storage.whole(CONFIG, CONFIG_MAX);
            matches!(config, Err(RepositoryFault::MissingFile { .. }))
        }
    };
    if is_unused && let Err(fault) = storage.remove(&key_name) {
        log::warn!("restic: the key of a repository that was not made stays: {fault}");
    }
    made.map(drop)
}

/// Most bytes of `config` that are read.
const CONFIG_MAX: u64 = 1 << 20;

/// Writes the last file, which makes the place a repository. False: another program has written it.
fn write_config(storage: &dyn RepositoryStorage, key: &CipherKey) -> Result<bool> {
    let mut id = [0; 32];
    rand_bytes(&mut id).map_err(unsealed)?;
    let polynomial = format!("{:x}", polynomial::random().map_err(unsealed)?);
    let config = json!({ "version": 2, "id": Digest(id), "chunker_polynomial": polynomial });
    let config = serde_json::to_vec(&config).map_err(unserialized)?;
    let sealed = key.seal(&config).map_err(unsealed)?;
    if !storage.put_new(CONFIG, &sealed)? {
        return Ok(false);
    }
    // Another program may replace the file.
    let found = storage.whole(CONFIG, sealed.len() as u64)?;
    if key.open(&found).is_none() {
        return Ok(false);
    }
    Ok(true)
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
