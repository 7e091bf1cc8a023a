//! An earlier backup of a disk.

use blockhaul_block::{Error, Kind};
use jiff::Timestamp;

use crate::content::FileContent;
use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};
use crate::repository::{Repository, RepositoryReader};
use crate::snapshot::{self, Snapshot, SnapshotFilter};
use crate::tree;
use crate::writer::bases::{is_ahead, is_below};
use crate::writer::place::BackupPlace;

/// The value of the option for no earlier backup.
const NONE: &str = "none";
/// A file of an earlier snapshot.
pub(crate) struct ParentFile {
    pub(crate) snapshot: Snapshot,
    pub(crate) content: FileContent,
    pub(crate) digests: Vec<Digest>,
}

/// The snapshots that have, by their lists of paths, a file with this path; the newest first. `name`: the one that the
/// user names.
///
/// # Errors
/// A snapshot cannot be read, or the one with this name does not exist.
pub(crate) fn candidates(
    reader: &RepositoryReader,
    name: Option<&str>,
    path: &str,
    place: &BackupPlace,
) -> Result<Vec<Snapshot>> {
    match name {
        Some(NONE) => Ok(Vec::new()),
        Some(name) => {
            let filter = SnapshotFilter { host: Some(place.host().to_owned()), tags: Vec::new() };
            Ok(vec![snapshot::find(reader, name, &filter)?])
        }
        None => {
            let mut found = place.snapshots(reader)?;
            found.retain(|snapshot| snapshot.paths.iter().any(|above| is_below(path, above)));
            found.reverse();
            Ok(found)
        }
    }
}

/// The file with this path in the first of these snapshots that has it.
///
/// # Errors
/// No index has one of its blobs, or a directory is damaged.
pub(crate) fn find(
    repository: &Repository,
    candidates: &[Snapshot],
    path: &str,
) -> Result<Option<ParentFile>> {
    for candidate in candidates {
        let node = match tree::find(repository, &candidate.tree, path) {
            Err(RepositoryFault::Other(error))
                if matches!(error.kind(), Kind::NotFound | Kind::Usage) =>
            {
                continue;
            }
            found => found?,
        };
        let content = FileContent::new(repository, &node)?;
        let (snapshot, digests) = (candidate.clone(), node.content);
        return Ok(Some(ParentFile { snapshot, content, digests }));
    }
    Ok(None)
}

/// Refuses a newest snapshot whose time lies in the future: it hides all that are made until then.
///
/// # Errors
/// [`Kind::Invalid`]
pub(crate) fn check_time(path: &str, newest: &Snapshot, remedy: &'static str) -> Result<(), Error> {
    if is_ahead(newest.time, Timestamp::now()) {
        let text = format!(
            "restic: the newest backup of {path} is one of the future: {}; newer ones may be hidden",
            newest.shown()
        );
        return Err(Error::new(Kind::Invalid, text).with_remedy(remedy));
    }
    Ok(())
}

/// The error of a copy of parts of a disk that has no earlier backup.
pub(crate) fn absent(path: &str, host: &str) -> Error {
    let text = format!(
        "restic: no snapshot of host {host:?} has {path}, of which parts are to be replaced"
    );
    let remedy = "copy all of the disk first, or name a snapshot: parent=SNAPSHOT, host=HOST";
    Error::new(Kind::NotFound, text).with_remedy(remedy)
}
