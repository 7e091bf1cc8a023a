//! Backups written to a repository.
//!
//! Packs come first, then the index files that name their blobs, then the snapshot: each is durable before the next one is
//! written, so that a kill leaves at most blobs that nothing uses.
//!
//! - `session`: one backup: its lock, its packs, its snapshot. `pack`: blobs in a file; `session_index`: known blobs.
//! - `disk`: the chunks of a disk; `parent`: an earlier backup of it; `bases`: those that copies of parts build on. `device`: the target of a copy.
//! - `orphans`: packs that no index names.
//! - `place`: a repository, opened, then locked. `plan`: checks of one disk before anything is written; `store`: several disks
//!   in one snapshot, with the files `beside` them. `lock`: locks. `init`: new repositories. `person`: host and user.
//! - `tree_text`, `snapshot_text`: directories and snapshots.

mod bases;
pub(crate) mod beside;
pub(crate) mod device;
pub(crate) mod disk;
pub(crate) mod init;
mod lock;
mod orphans;
pub(crate) mod pack;
mod parent;
pub(crate) mod person;
pub(crate) mod place;
pub(crate) mod plan;
pub(crate) mod polynomial;
pub(crate) mod session;
mod session_index;
pub(crate) mod snapshot_text;
pub(crate) mod store;
pub(crate) mod tree_text;

use blockhaul_block::{Error, Kind};

/// JSON cannot be made.
pub(crate) fn unserialized(error: serde_json::Error) -> Error {
    Error::new(Kind::Io, "cannot write JSON").because(error)
}
