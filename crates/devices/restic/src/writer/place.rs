//! The repository of a backup: opened, then locked.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};

use crate::digest::Digest;
use crate::fault::RepositoryFault;
use crate::repository::{INDEX, Repository, RepositoryReader};
use crate::snapshot::{self, Snapshot, SnapshotFilter};
use crate::storage::RepositoryStorage;
use crate::writer::init;
use crate::writer::lock::RepositoryLock;
use crate::writer::orphans::OrphanPacks;
use crate::writer::person::Person;
use crate::writer::session::{BackupSession, CompressionMode};

/// The options of a backup.
#[derive(Debug, Clone)]
pub(crate) struct BackupRequest {
    /// The host of the snapshot. None: this one.
    pub(crate) host: Option<String>,
    pub(crate) tags: Vec<String>,
    /// The earlier backup: a snapshot, or none. None: the newest one of the same host and path.
    pub(crate) parent: Option<String>,
    pub(crate) compression: CompressionMode,
    /// A repository that does not exist is made.
    pub(crate) init: bool,
    /// Bytes of blobs from which on a pack is complete.
    pub(crate) pack_size: usize,
}

/// The repository of a backup.
pub(crate) struct BackupPlace {
    pub(crate) storage: Arc<dyn RepositoryStorage>,
    pub(crate) password: Vec<u8>,
    pub(crate) request: BackupRequest,
    pub(crate) person: Person,
}

/// A repository that exists, before it is locked.
pub(crate) struct FoundRepository {
    pub(crate) reader: RepositoryReader,
    /// The index files of the index.
    names: Vec<Digest>,
    pub(crate) repository: Repository,
}

impl BackupPlace {
    /// The host of the snapshot.
    pub(crate) fn host(&self) -> &str {
        self.request.host.as_ref().unwrap_or(&self.person.host)
    }

    /// Opens the repository. None: there is none, and it can be made. Nothing is written. Blocks.
    ///
    /// # Errors
    /// The repository cannot be read or written, or is locked.
    pub(crate) fn open(&self) -> Result<Option<RepositoryReader>> {
        let mut opened = self.reader();
        if self.request.init
            && matches!(opened, Err(RepositoryFault::NoRepository))
            && init::is_made(&*self.storage)?
        {
            opened = self.reader();
        }
        match opened {
            Err(RepositoryFault::NoRepository) if self.request.init => {
                init::check(&*self.storage, &self.password)?;
                Ok(None)
            }
            Err(RepositoryFault::NoRepository) => {
                let remedy =
                    "name the place that has the file config, or add init=on to make a repository";
                Err(Error::from(RepositoryFault::NoRepository).with_remedy(remedy))
            }
            Ok(reader) => {
                RepositoryLock::check(&reader)?;
                Ok(Some(reader))
            }
            Err(fault) => Err(fault.into()),
        }
    }

    /// The repository that has the place now: writes go to this one alone.
    fn reader(&self) -> Result<RepositoryReader, RepositoryFault> {
        self.storage.check_writable()?;
        self.storage.hold()?;
        RepositoryReader::open(self.storage.clone(), &self.password)
    }

    /// The snapshots of the host, the oldest first. Blocks.
    ///
    /// # Errors
    /// A snapshot cannot be read.
    pub(crate) fn snapshots(&self, reader: &RepositoryReader) -> Result<Vec<Snapshot>> {
        let filter = SnapshotFilter { host: Some(self.host().to_owned()), tags: Vec::new() };
        Ok(snapshot::all(reader, &filter)?)
    }

    /// Locks the repository, or makes it, and begins a backup that uses these snapshots. Blocks.
    ///
    /// # Errors
    /// The repository is locked, a snapshot was removed, or the storage fails.
    pub(crate) fn begin(
        &self,
        found: Option<FoundRepository>,
        parents: &[Digest],
    ) -> Result<Arc<BackupSession>> {
        let found = match found {
            Some(found) => found,
            None => {
                init::create(&*self.storage, &self.password)?;
                let reader = self.reader()?;
                RepositoryLock::check(&reader)?;
                FoundRepository::load(reader)?
            }
        };
        let FoundRepository { reader, names, repository } = found;
        self.storage.check_held()?;
        let lock = RepositoryLock::acquire(&reader, &self.person)?;
        let snapshots = reader.names(snapshot::FOLDER)?;
        if let Some(gone) = parents.iter().find(|parent| !snapshots.contains(parent)) {
            let text = format!("snapshot {} was removed just now", gone.short());
            return Err(Error::new(Kind::NotFound, text).with_remedy("run the command again"));
        }
        // The index must not name packs that another program removed before the lock.
        let is_same = reader.names(INDEX)? == names;
        let repository = if is_same { repository } else { Repository::load(reader.clone())? };
        let index = repository.into_index();
        let orphans = OrphanPacks::find(&reader, &index, lock.is_alone())?;
        let form = (self.request.compression, self.request.pack_size);
        Ok(Arc::new(BackupSession::new(reader, lock, index, orphans, form)))
    }
}

impl FoundRepository {
    /// Reads the index. Take the list of snapshots before. Blocks.
    ///
    /// # Errors
    /// The storage fails.
    pub(crate) fn load(reader: RepositoryReader) -> Result<FoundRepository> {
        let names = reader.names(INDEX)?;
        let repository = Repository::load(reader.clone())?;
        Ok(FoundRepository { reader, names, repository })
    }
}
