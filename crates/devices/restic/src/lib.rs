//! Files in snapshots of restic's repositories, as read-only devices: `restic:REPO#SNAPSHOT/PATH`; and disks that are
//! backed up to repositories: `restic:REPO#new/PATH`.
//!
//! A repository has encrypted files: snapshots name trees, trees are directories and name the blobs of files, index
//! files say where in which pack a blob is. Readers lock nothing: files never change, and a pack that `restic prune`
//! removes is at worst an error.
//!
//! - `storage`: places of repositories; `object_storage`: those of services. `parallel`: work on many files. `cipher`, `key_file`, `password`: encryption, and keys that passwords open.
//! - `repository`: files, decrypted and checked. `digest`, `index`, `snapshot`, `tree`: their contents.
//! - `content`: the blobs of a file, and its holes. `loads` fetches blobs, `cache` keeps them, `ahead` notices sequential
//!   readers.
//! - `writer`: backups.
//! - `device`: requests. `backend`: descriptions. `list`: the files of snapshots. `fault`: errors.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]
#![cfg_attr(not(test), warn(clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

mod ahead;
mod backend;
#[cfg(test)]
mod backup_tests;
mod cache;
mod cipher;
mod content;
#[cfg(test)]
mod crash_tests;
mod device;
mod digest;
mod fault;
#[cfg(test)]
mod fixture;
mod index;
mod key_file;
mod list;
mod loads;
#[cfg(test)]
mod many_packs_tests;
mod parallel;
mod password;
#[cfg(test)]
mod peer_tests;
mod repository;
mod snapshot;
mod storage;
#[cfg(test)]
mod test_place;
#[cfg(test)]
mod test_support;
#[cfg(test)]
mod tests;
mod tree;
mod writer;

#[cfg(feature = "remote")]
mod object_storage;

use std::sync::Arc;
use std::time::Duration;

pub use fault::RepositoryFault;
pub use writer::beside::{ResticFile, check_file_names};
pub use writer::store::{
    ResticBackup, ResticDisk, ResticPoint, ResticStore, check_disk_names, check_point_name,
};

/// Time limits of requests to object stores.
#[derive(Debug, Clone, Copy)]
pub struct ResticOptions {
    /// Time for a connection, with the handshake of TLS; zero: none.
    pub connect_timeout: Duration,
    /// Time for a response to begin, and for each 256 KiB of its body; zero: none.
    pub timeout: Duration,
}

/// The kind of storage of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all(options: ResticOptions) -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![Arc::new(backend::ResticBackend::new(options))]
}
