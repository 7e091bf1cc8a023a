//! Snapshots, as restic writes them.

use jiff::Timestamp;
use serde_json::json;

use crate::digest::Digest;
use crate::fault::Result;
use crate::writer::bases::KeptBases;
use crate::writer::person::Person;
use crate::writer::unserialized;

/// Facts of a snapshot besides its files.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotFacts {
    pub(crate) host: String,
    pub(crate) tags: Vec<String>,
    pub(crate) parent: Option<Digest>,
    pub(crate) bases: KeptBases,
}

/// The facts of a snapshot.
pub(crate) struct SnapshotHead<'a> {
    pub(crate) tree: Digest,
    pub(crate) facts: &'a SnapshotFacts,
    /// The paths of its files, by which restic groups snapshots.
    pub(crate) paths: Vec<String>,
    pub(crate) time: Timestamp,
    /// When the backup began.
    pub(crate) begun: Timestamp,
    /// Bytes of its files.
    pub(crate) bytes: u64,
    /// New blobs: those of files, and directories.
    pub(crate) blobs: [u64; 2],
    /// New bytes: before compression, and as they are stored.
    pub(crate) added: [u64; 2],
}

/// The JSON of a snapshot.
///
/// # Errors
/// The text cannot be made.
pub(crate) fn snapshot_text(head: &SnapshotHead<'_>) -> Result<Vec<u8>> {
    let Person { user, uid, gid, .. } = Person::here();
    let now = Timestamp::now();
    let [data_blobs, tree_blobs] = head.blobs;
    let [data_added, data_added_packed] = head.added;
    let mut snapshot = json!({
        "time": head.time, "tree": head.tree, "paths": head.paths, "hostname": head.facts.host,
        "username": user, "uid": uid, "gid": gid,
        "program_version": concat!("blockhaul ", env!("CARGO_PKG_VERSION")),
        "summary": {
            "backup_start": head.begun, "backup_end": now, "files_new": head.paths.len(), "files_changed": 0,
            "files_unmodified": 0, "dirs_new": 0, "dirs_changed": 0, "dirs_unmodified": 0,
            "data_blobs": data_blobs, "tree_blobs": tree_blobs, "data_added": data_added,
            "data_added_packed": data_added_packed, "total_files_processed": head.paths.len(),
            "total_bytes_processed": head.bytes,
        },
    });
    if let Some(parent) = &head.facts.parent {
        snapshot["parent"] = json!(parent);
    }
    if !head.facts.tags.is_empty() {
        snapshot["tags"] = json!(head.facts.tags);
    }
    Ok(serde_json::to_vec(&snapshot).map_err(unserialized)?)
}
