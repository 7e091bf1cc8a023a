//! Repositories in object stores.

use blockhaul_block::Kind;
use blockhaul_remote::ObjectPlace;

use crate::fault::{RepositoryFault, Result};
use crate::storage::RepositoryStorage;

impl RepositoryStorage for ObjectPlace {
    fn parallel(&self) -> usize {
        self.connections()
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        Ok(self.names(folder)?)
    }

    fn whole(&self, file: &str, most: u64) -> Result<Vec<u8>> {
        found(file, ObjectPlace::whole(self, file, most))
    }

    fn range(&self, file: &str, at: u64, len: usize) -> Result<Vec<u8>> {
        found(file, ObjectPlace::range(self, file, at, len))
    }
}

/// The bytes of a file, or the fault. An object of another length than it should have is damaged; a service that fails says nothing about it.
fn found(file: &str, read: blockhaul_block::Result<Option<Vec<u8>>>) -> Result<Vec<u8>> {
    match read {
        Ok(bytes) => bytes.ok_or_else(|| RepositoryFault::missing(file)),
        Err(error) if error.kind() == Kind::Invalid => {
            Err(RepositoryFault::damaged(file, error.text()))
        }
        Err(error) => Err(error.into()),
    }
}
