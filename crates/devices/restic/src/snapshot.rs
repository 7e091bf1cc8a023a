//! Snapshots, and which one a description names.

use blockhaul_block::{Error, Kind};
use blockhaul_wire::printable;
use jiff::Timestamp;
use serde::Deserialize;

use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};
use crate::parallel::try_each;
use crate::repository::RepositoryReader;

/// The folder of snapshots.
pub(crate) const FOLDER: &str = "snapshots";
/// Name of the newest snapshot.
const LATEST: &str = "latest";
/// Snapshots in a message.
const SHOWN: usize = 10;
/// Most bytes of a name in a message.
const SHOWN_MAX: usize = 1024;

/// A snapshot.
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    pub(crate) id: Digest,
    pub(crate) time: Timestamp,
    /// The root directory.
    pub(crate) tree: Digest,
    pub(crate) host: String,
    pub(crate) tags: Vec<String>,
    /// What was backed up: absolute paths.
    pub(crate) paths: Vec<String>,
}

#[derive(Deserialize)]
struct SnapshotFile {
    time: String,
    tree: Digest,
    #[serde(default)]
    hostname: Option<String>,
    #[serde(default)]
    tags: Option<Vec<String>>,
    #[serde(default)]
    paths: Option<Vec<String>>,
}

impl Snapshot {
    /// Reads the JSON of a snapshot.
    ///
    /// # Errors
    /// [`RepositoryFault::DamagedFile`]
    pub(crate) fn parse(id: Digest, text: &[u8]) -> Result<Snapshot> {
        let wrong = |why: String| RepositoryFault::damaged(&format!("{FOLDER}/{id}"), why);
        let found: SnapshotFile =
            serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
        let time = found.time.parse().map_err(|error: jiff::Error| wrong(error.to_string()))?;
        let host = found.hostname.unwrap_or_default();
        let tags = found.tags.unwrap_or_default();
        let paths = found.paths.unwrap_or_default();
        Ok(Snapshot { id, time, tree: found.tree, host, tags, paths })
    }

    /// Reads a snapshot.
    ///
    /// # Errors
    /// The file is missing or damaged.
    pub(crate) fn load(reader: &RepositoryReader, id: Digest) -> Result<Snapshot> {
        Snapshot::parse(id, &reader.file(FOLDER, &id)?)
    }

    /// Identifier, time, host and tags, for users.
    pub(crate) fn shown(&self) -> String {
        let shown = |text: &str| printable(text.as_bytes(), SHOWN_MAX);
        let host = if self.host.is_empty() {
            String::new()
        } else {
            format!(", host {}", shown(&self.host))
        };
        let tags = match &self.tags[..] {
            [] => String::new(),
            tags => format!(", tags {}", shown(&tags.join(","))),
        };
        format!("snapshot {} of {}{host}{tags}", self.id.short(), self.shown_time())
    }

    /// The time, in seconds of UTC.
    pub(crate) fn shown_time(&self) -> String {
        self.time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }
}

/// Which snapshots may be the newest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SnapshotFilter {
    pub(crate) host: Option<String>,
    /// The snapshot has all of these.
    pub(crate) tags: Vec<String>,
}

impl SnapshotFilter {
    fn takes(&self, snapshot: &Snapshot) -> bool {
        self.host.as_ref().is_none_or(|host| *host == snapshot.host)
            && self.tags.iter().all(|tag| snapshot.tags.contains(tag))
    }
}

/// All snapshots that the filter takes, the oldest first.
///
/// # Errors
/// A snapshot cannot be read.
pub(crate) fn all(reader: &RepositoryReader, filter: &SnapshotFilter) -> Result<Vec<Snapshot>> {
    let loaded = try_each(reader.parallel(), &reader.names(FOLDER)?, |id| {
        match Snapshot::load(reader, *id) {
            // It was removed after the list was made.
            Err(RepositoryFault::MissingFile { .. }) => Ok(None),
            loaded => loaded.map(|loaded| Some(loaded).filter(|snapshot| filter.takes(snapshot))),
        }
    });
    let mut found: Vec<_> = loaded?.into_iter().flatten().collect();
    found.sort_unstable_by_key(|snapshot| (snapshot.time, snapshot.id));
    Ok(found)
}

/// The snapshot with this name: `latest`, or the beginning of an identifier.
///
/// # Errors
/// There is none, several begin so, or a snapshot cannot be read.
pub(crate) fn find(
    reader: &RepositoryReader,
    name: &str,
    filter: &SnapshotFilter,
) -> Result<Snapshot> {
    if name == LATEST {
        let newest = all(reader, filter)?.pop();
        return newest.ok_or_else(|| {
            let text = "no snapshot has this host and these tags";
            not_found(reader, text.into())
        });
    }
    let begins = |id: &Digest| !name.is_empty() && id.to_string().starts_with(&name.to_lowercase());
    let found: Vec<_> = reader.names(FOLDER)?.into_iter().filter(begins).collect();
    match found[..] {
        [id] => Snapshot::load(reader, id),
        [] if name.is_empty() => Err(not_found(reader, "the description names no snapshot".into())),
        [] => Err(not_found(reader, format!("there is no snapshot {name:?}"))),
        _ => {
            let text = format!("{} snapshots begin with {name:?}", found.len());
            Err(Error::new(Kind::Usage, text).with_remedy("write more digits").into())
        }
    }
}

/// The error of a snapshot that does not exist, with the newest ones.
fn not_found(reader: &RepositoryReader, text: String) -> RepositoryFault {
    let remedy = match all(reader, &SnapshotFilter::default()) {
        Ok(found) if found.is_empty() => "make one with restic backup: there are none".to_owned(),
        Ok(found) => {
            let newest = found.iter().rev().take(SHOWN).map(|one| {
                let host = Some(&one.host).filter(|host| !host.is_empty());
                let host = host.map(|host| format!(" {host}")).unwrap_or_default();
                format!("{} ({}{host})", one.id.short(), one.shown_time())
            });
            let newest: Vec<_> = newest.collect();
            format!("write #SNAPSHOT/PATH; the newest of {} are {}", found.len(), newest.join(", "))
        }
        Err(_) => "restic snapshots lists them".to_owned(),
    };
    Error::new(Kind::NotFound, text).with_remedy(remedy).into()
}
