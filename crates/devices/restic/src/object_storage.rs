//! Repositories in object stores and behind REST servers.

use std::sync::OnceLock;

use blockhaul_block::Kind;
use blockhaul_remote::RemotePlace;

use crate::fault::{RepositoryFault, Result};
use crate::parallel::try_each;
use crate::storage::{CONFIG, RepositoryStorage};

/// Folders of packs that are listed one by one: a list of all has 1000 names in each response.
const FOLDERS_MAX: usize = 16;

/// Longest file `config`.
const CONFIG_MAX: u64 = 1 << 20;

/// A place of a service.
pub(crate) struct RemoteStorage<P> {
    place: P,
    /// For messages.
    name: String,
    /// The file `config` of the repository that is written.
    config: OnceLock<Vec<u8>>,
}

impl<P: RemotePlace> RemoteStorage<P> {
    /// `name`: the place, for messages.
    pub(crate) fn new(place: P, name: &str) -> RemoteStorage<P> {
        RemoteStorage { place, name: name.to_owned(), config: OnceLock::new() }
    }
}

impl<P: RemotePlace> RepositoryStorage for RemoteStorage<P> {
    fn parallel(&self) -> usize {
        self.place.connections()
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        Ok(self.place.names(folder)?)
    }

    fn whole(&self, file: &str, most: u64) -> Result<Vec<u8>> {
        found(file, self.place.whole(file, most))
    }

    fn range(&self, file: &str, at: u64, len: usize) -> Result<Vec<u8>> {
        found(file, self.place.range(file, at, len))
    }

    fn size(&self, file: &str) -> Result<u64> {
        found(file, self.place.size(file))
    }

    fn packs(&self, begins: &[u8]) -> Result<Vec<String>> {
        if begins.len() > FOLDERS_MAX {
            return Ok(self.place.names_below("data")?);
        }
        let list = |byte: &u8| self.list(&format!("data/{byte:02x}"));
        Ok(try_each(self.parallel(), begins, list)?.concat())
    }

    fn check_writable(&self) -> Result<()> {
        // Only a write shows it: the first one is a lock or a key.
        Ok(())
    }

    fn make(&self) -> Result<()> {
        Ok(self.place.make()?)
    }

    fn hold(&self) -> Result<()> {
        let config = match self.whole(CONFIG, CONFIG_MAX) {
            Err(RepositoryFault::MissingFile { .. }) => return Err(RepositoryFault::NoRepository),
            config => config?,
        };
        self.config.get_or_init(|| config);
        self.check_held()
    }

    fn check_held(&self) -> Result<()> {
        let Some(held) = self.config.get() else { return Err(RepositoryFault::NoRepository) };
        match self.whole(CONFIG, CONFIG_MAX) {
            Ok(found) if found == *held => Ok(()),
            Ok(_) | Err(RepositoryFault::MissingFile { .. }) => {
                Err(RepositoryFault::RepositoryGone { place: self.name.clone() })
            }
            Err(fault) => Err(fault),
        }
    }

    fn put_new(&self, file: &str, bytes: &[u8]) -> Result<bool> {
        Ok(self.place.create(file, bytes)?)
    }

    fn put(&self, file: &str, bytes: &[u8]) -> Result<()> {
        Ok(self.place.put(file, bytes)?)
    }

    fn remove(&self, file: &str) -> Result<()> {
        Ok(self.place.remove(file)?)
    }
}

/// What was found in a file, or the fault. One of another length than it should have is damaged; a service that fails says nothing about it.
fn found<T>(file: &str, read: blockhaul_block::Result<Option<T>>) -> Result<T> {
    match read {
        Ok(found) => found.ok_or_else(|| RepositoryFault::missing(file)),
        Err(error) if error.kind() == Kind::Invalid => {
            Err(RepositoryFault::damaged(file, error.text()))
        }
        Err(error) => Err(error.into()),
    }
}
