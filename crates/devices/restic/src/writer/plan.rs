//! A backup before it begins: all that can be refused is refused here.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use blockhaul_block::{Error, Kind, Result};

use crate::digest::Digest;
use crate::fault::RepositoryFault;
use crate::repository::{INDEX, Repository, RepositoryReader};
use crate::snapshot;
use crate::storage::RepositoryStorage;
use crate::writer::device::{BackupDevice, DiskBackup};
use crate::writer::disk::{self, DiskImage};
use crate::writer::lock::RepositoryLock;
use crate::writer::parent::{self, ParentFile};
use crate::writer::person::Person;
use crate::writer::session::{BackupSession, CompressionMode, SnapshotFacts};
use crate::writer::{init, tree_text};

/// A backup that a user describes.
#[derive(Debug, Clone)]
pub(crate) struct BackupRequest {
    pub(crate) path: String,
    pub(crate) host: Option<String>,
    pub(crate) tags: Vec<String>,
    /// The earlier backup: a snapshot, or none. None: the newest one of the same host and path.
    pub(crate) parent: Option<String>,
    pub(crate) compression: CompressionMode,
    /// A repository that does not exist is made.
    pub(crate) init: bool,
}

/// A backup that was checked.
pub(crate) struct BackupPlan {
    request: BackupRequest,
    person: Person,
    storage: Arc<dyn RepositoryStorage>,
    password: Vec<u8>,
    found: Option<FoundRepository>,
    size: u64,
    chunk: u64,
    /// Only parts are replaced.
    is_kept: bool,
}

/// A repository that exists.
struct FoundRepository {
    reader: RepositoryReader,
    /// The index files of the index.
    names: Vec<Digest>,
    repository: Repository,
    parent: Option<ParentFile>,
}

impl BackupPlan {
    /// Checks a backup. `size`: bytes of the disk, which is replaced as a whole. None: parts of the earlier backup are
    /// replaced. Blocks.
    ///
    /// # Errors
    /// The request is wrong, the repository cannot be read or is locked, or there is no earlier backup of which parts could
    /// be replaced.
    pub(crate) fn check(
        storage: Arc<dyn RepositoryStorage>,
        password: Vec<u8>,
        request: BackupRequest,
        size: Option<u64>,
    ) -> Result<BackupPlan> {
        tree_text::checked_path(&request.path)?;
        let person = Person::here();
        let host = request.host.as_ref().unwrap_or(&person.host).clone();
        let found = match RepositoryReader::open(storage.clone(), &password) {
            Err(RepositoryFault::NoRepository) if request.init => {
                init::check(&*storage, &password)?;
                None
            }
            Err(RepositoryFault::NoRepository) => {
                let error = Error::from(RepositoryFault::NoRepository);
                return Err(error.with_remedy(
                    "name the directory that has the file config, or add init=on to make a repository",
                ));
            }
            Ok(reader) => {
                storage.check_writable()?;
                RepositoryLock::check(&reader)?;
                Some(FoundRepository::open(reader, &request, &host, size.is_none())?)
            }
            Err(fault) => return Err(fault.into()),
        };
        let parent = found.as_ref().and_then(|found| found.parent.as_ref());
        let is_kept = size.is_none();
        let earlier = parent.map(|parent| parent.content.size());
        let size = size.or(earlier).ok_or_else(|| parent::absent(&request.path, &host))?;
        let chunk = disk::chunk_of(size, parent)?;
        Ok(BackupPlan { request, person, storage, password, found, size, chunk, is_kept })
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
        let BackupPlan { request, person, storage, password, found, size, chunk, is_kept } = self;
        let host = request.host.as_ref().unwrap_or(&person.host).clone();
        let found = match found {
            Some(found) => found,
            None => {
                init::create(&*storage, &password)?;
                let reader = RepositoryReader::open(storage, &password)?;
                FoundRepository::open(reader, &request, &host, false)?
            }
        };
        let lock = RepositoryLock::acquire(&found.reader, &person)?;
        let FoundRepository { reader, names, repository, parent } = found;
        if let Some(parent) = &parent
            && !reader.names(snapshot::FOLDER)?.contains(&parent.snapshot)
        {
            let text = format!("snapshot {} was removed just now", parent.snapshot.short());
            return Err(Error::new(Kind::NotFound, text).with_remedy("run the copy again"));
        }
        // What others have removed before the lock must not count.
        let is_same = reader.names(INDEX)? == names;
        let repository = if is_same { repository } else { Repository::load(reader.clone())? };
        let (compression, tags) = (request.compression, request.tags);
        let session = BackupSession::new(reader, lock, repository.into_index(), compression);
        let session = Arc::new(session);
        let snapshot = parent.as_ref().map(|parent| parent.snapshot);
        let facts = SnapshotFacts { host, tags, parent: snapshot };
        let disk = DiskImage::new(session.clone(), (size, chunk), parent.filter(|_| is_kept));
        let path = request.path.trim_matches('/').to_owned();
        let (has_changed, turn) = (AtomicBool::new(true), Mutex::default());
        device.begin(DiskBackup { session, disk, path, facts, has_changed, turn });
        Ok(())
    }
}

impl FoundRepository {
    fn open(
        reader: RepositoryReader,
        request: &BackupRequest,
        host: &str,
        is_kept: bool,
    ) -> Result<FoundRepository> {
        let path = request.path.trim_matches('/');
        let candidates = parent::candidates(&reader, request.parent.as_deref(), path, host)?;
        let names = reader.names(INDEX)?;
        let repository = Repository::load(reader.clone())?;
        let parent = match parent::find(&repository, &candidates, path) {
            Err(fault) if !is_kept => {
                log::warn!("restic: the earlier backup of {path} cannot be used: {fault}");
                None
            }
            found => found?,
        };
        Ok(FoundRepository { reader, names, repository, parent })
    }
}
