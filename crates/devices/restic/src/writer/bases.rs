//! The earlier backups that copies of parts build on.

use std::time::Duration;

use blockhaul_block::{Error, Kind};
use jiff::Timestamp;

use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};
use crate::repository::RepositoryReader;
use crate::snapshot::{self, Snapshot};

/// Difference of the clocks of two machines that is usual.
const SKEW: Duration = Duration::from_secs(5 * 60);

/// The earlier backups of which copies of parts keep the rest.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeptBases {
    /// The snapshots of the repository when they were chosen, in order.
    known: Vec<Digest>,
    paths: Vec<String>,
    /// The time of the newest one.
    time: Option<Timestamp>,
}

impl KeptBases {
    /// `known`: all snapshots, in order, from before the choice.
    pub(crate) fn new(known: Vec<Digest>) -> KeptBases {
        KeptBases { known, ..KeptBases::default() }
    }

    /// Adds the earlier backup of a path.
    pub(crate) fn add(&mut self, path: &str, base: &Snapshot) {
        log::info!("restic: {path}: the rest is that of {}", base.shown());
        self.paths.push(path.to_owned());
        self.time = self.time.max(Some(base.time));
    }

    /// The time of a snapshot that must be newer than the earlier backups, if their clocks differ as usual.
    pub(crate) fn later(&self, time: Timestamp) -> Timestamp {
        let after = self.time.and_then(|base| base.checked_add(Duration::from_millis(1)).ok());
        let after = after.filter(|after| !is_ahead(*after, time));
        after.map_or(time, |after| time.max(after))
    }

    /// Refuses to publish where another program has backed up one of the disks since. `own`: snapshots of this backup.
    ///
    /// # Errors
    /// [`Kind::InUse`]; a snapshot cannot be read.
    pub(crate) fn check(
        &self,
        reader: &RepositoryReader,
        host: &str,
        own: &[Digest],
    ) -> Result<()> {
        if self.paths.is_empty() {
            return Ok(());
        }
        for id in reader.names(snapshot::FOLDER)? {
            if self.known.binary_search(&id).is_ok() || own.contains(&id) {
                continue;
            }
            let found = match Snapshot::load(reader, id) {
                Err(RepositoryFault::MissingFile { .. }) => continue,
                found => found?,
            };
            let has = |path: &&String| found.paths.iter().any(|above| is_below(path, above));
            if found.host == host
                && let Some(path) = self.paths.iter().find(has)
            {
                let text = format!(
                    "restic: another program has backed up {path} during this copy of parts: {}",
                    found.shown()
                );
                let remedy = "run the copy again: it then keeps the rest of that snapshot";
                return Err(Error::new(Kind::InUse, text).with_remedy(remedy).into());
            }
        }
        Ok(())
    }
}

/// Whether a path of a snapshot is this one, or below it.
pub(crate) fn is_below(path: &str, above: &str) -> bool {
    let above = above.trim_matches('/');
    let rest = path.strip_prefix(above);
    rest.is_some_and(|rest| rest.is_empty() || above.is_empty() || rest.starts_with('/'))
}

/// Whether a time is later than clocks usually differ.
pub(crate) fn is_ahead(time: Timestamp, now: Timestamp) -> bool {
    Duration::try_from(time.duration_since(now)).is_ok_and(|ahead| ahead > SKEW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_below_directories() {
        for (above, is) in [
            ("/vm/vda", true),
            ("/vm", true),
            ("/", true),
            ("/v", false),
            ("/vm/vd", false),
            ("/vm/vda/x", false),
        ] {
            assert_eq!(is_below("vm/vda", above), is, "{above}");
        }
    }
}
