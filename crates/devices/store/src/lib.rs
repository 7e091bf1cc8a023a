//! Backups of one disk in a plain directory, and a device for each point in time.
//!
//! ```text
//! manifest.json     the points, oldest first; a point exists if and only if it is listed here
//! 000001.raw        a full backup: the disk, as a sparse file
//! 000002.raw        an increment: a sparse file of the size of the disk
//! 000002.ranges     what the increment holds, as JSON lines; the rest of its file has no meaning
//! 000002.digests    a manifest of the engine, of the file 000002.raw
//! unfinished.json   the point that is being made; its files are not in the manifest yet
//! 000003.journal    how far it is copied
//! joining.json      increments that become one: the numbers of the new file, and of the old ones
//! lock, readers     locked by the one program that changes the directory, and by those that read it
//! ```
//!
//! The manifest is replaced by a rename, after all files that it lists are durable. A point that was
//! interrupted is therefore never listed. An increment is read over the points below it, down to the
//! last full backup.
//!
//! [`Store`] reads the directory, [`StoreWriter`] changes it, and [`BackupBackend`] is the kind of storage
//! `backup:DIR`.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

mod backend;
mod device;
mod files;
mod manifest;
mod overlay;
mod ranges;
mod removal;
mod store;
mod writer;

use std::sync::Arc;

pub use backend::BackupBackend;
pub use manifest::{BackupPoint, FoldState, FullBackup, Increment, PointContent, check_name};
pub use ranges::IncrementRanges;
pub use removal::{Fold, Join};
pub use store::{CHAIN_MAX, Store, store_of_file};
pub use writer::StoreWriter;

/// The kind of storage of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![Arc::new(BackupBackend)]
}
