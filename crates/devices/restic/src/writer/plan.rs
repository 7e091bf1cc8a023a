//! A backup of one disk before it begins: all that can be refused is refused here.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use blockhaul_block::Result;

use crate::digest::Digest;
use crate::snapshot;
use crate::writer::bases::KeptBases;
use crate::writer::device::{BackupDevice, DiskBackup, SnapshotDuty};
use crate::writer::disk::{self, DiskImage};
use crate::writer::parent::{self, ParentFile};
use crate::writer::place::{BackupPlace, FoundRepository};
use crate::writer::snapshot_text::SnapshotFacts;
use crate::writer::tree_text;

/// A backup of one disk that was checked.
pub(crate) struct BackupPlan {
    place: BackupPlace,
    /// Of the file in the snapshot.
    path: String,
    found: Option<FoundRepository>,
    parent: Option<ParentFile>,
    size: u64,
    chunk: u64,
    /// Only parts are replaced.
    is_kept: bool,
    /// The snapshots when the earlier backup was chosen.
    known: Vec<Digest>,
}

const FUTURE: &str =
    "correct the clock; name the snapshot to keep: parent=SNAPSHOT, or copy all of the disk";

impl BackupPlan {
    /// Checks a backup. `size`: bytes of the disk, which is replaced as a whole. None: parts of the earlier backup are
    /// replaced. Blocks.
    ///
    /// # Errors
    /// The request is wrong, the repository cannot be read or is locked, or there is no earlier backup of which parts could
    /// be replaced.
    pub(crate) fn check(place: BackupPlace, path: &str, size: Option<u64>) -> Result<BackupPlan> {
        let path = tree_text::checked_path(path)?.to_owned();
        let is_kept = size.is_none();
        let (mut found, mut parent, mut known) = (None, None, Vec::new());
        if let Some(reader) = place.open()? {
            known = reader.names(snapshot::FOLDER)?;
            let named = place.request.parent.as_deref();
            let candidates = match parent::candidates(&reader, named, &path, &place) {
                // A copy of all of the disk needs no earlier backup.
                Err(fault) if !is_kept && named.is_none() => {
                    log::warn!("restic: the earlier backup of {path} is not searched: {fault}");
                    Vec::new()
                }
                found => found?,
            };
            if let (true, None, Some(newest)) = (is_kept, named, candidates.first()) {
                parent::check_time(&path, newest, FUTURE)?;
            }
            let opened = FoundRepository::load(reader)?;
            parent = match parent::find(&opened.repository, &candidates, &path) {
                Err(fault) if !is_kept => {
                    log::warn!("restic: the earlier backup of {path} cannot be used: {fault}");
                    None
                }
                found => found?,
            };
            found = Some(opened);
        }
        let earlier = parent.as_ref().map(|parent| parent.content.size());
        let size = size.or(earlier).ok_or_else(|| parent::absent(&path, place.host()))?;
        let chunk = disk::chunk_of(size, parent.as_ref())?;
        Ok(BackupPlan { place, path, found, parent, size, chunk, is_kept, known })
    }

    /// The device, whose backup has not begun.
    pub(crate) fn device(&self, name: &str) -> BackupDevice {
        BackupDevice::new(name, self.size, self.chunk)
    }

    /// Locks the repository, or makes it, and begins the backup. Blocks.
    ///
    /// # Errors
    /// The repository is locked, or its storage fails.
    pub(crate) fn begin(self, device: &BackupDevice) -> Result<()> {
        let BackupPlan { place, path, found, parent, size, chunk, is_kept, known } = self;
        let snapshot = parent.as_ref().map(|parent| parent.snapshot.id);
        let mut bases = KeptBases::new(known);
        if let (true, Some(parent)) = (is_kept, &parent) {
            bases.add(&path, &parent.snapshot);
        }
        let session = place.begin(found, snapshot.as_slice())?;
        let host = place.host().to_owned();
        let facts = SnapshotFacts { host, tags: place.request.tags, parent: snapshot, bases };
        let disk = DiskImage::new(session.clone(), (size, chunk), parent.filter(|_| is_kept));
        let snapshot = Some(SnapshotDuty { path, facts });
        let (has_changed, turn) = (AtomicBool::new(true), Mutex::default());
        device.begin(DiskBackup { session, disk, snapshot, has_changed, turn });
        Ok(())
    }
}
