//! Several disks of one machine in one snapshot, with the points in time that earlier snapshots are.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use jiff::Timestamp;

use crate::ResticOptions;
use crate::backend::{ResticBackend, store_place};
use crate::digest::Digest;
use crate::fault::RepositoryFault;
use crate::snapshot::{self, Snapshot};
use crate::writer::bases::KeptBases;
use crate::writer::beside::ResticFile;
use crate::writer::device::{BackupDevice, DiskBackup};
use crate::writer::disk::{self, DiskImage};
use crate::writer::parent::{self, ParentFile};
use crate::writer::person::Person;
use crate::writer::place::{BackupPlace, FoundRepository};
use crate::writer::session::BackupSession;
use crate::writer::snapshot_text::SnapshotFacts;
use crate::writer::tree_text::{FileNode, checked_path};

/// Tags of a disk: the name of its point, and that of the bitmap that began then.
const POINT: &str = ":point=";
const CHECKPOINT: &str = ":checkpoint=";
/// Time limits of requests to services.
const CONNECT_TIME: Duration = Duration::from_secs(10);
const RESPONSE_TIME: Duration = Duration::from_secs(60);
const FUTURE: &str =
    "correct the clock; restic forget removes the snapshot; or make a full backup with --full";

/// Refuses names of disks that cannot be in one directory, or that their tags cannot have.
///
/// # Errors
/// [`Kind::Usage`]
pub fn check_disk_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<()> {
    let names: Vec<_> = names.collect();
    for name in &names {
        check_tag_part("disk", name)?;
        checked_path(name)?;
        let is_above =
            |above: &&&str| name.strip_prefix(**above).is_some_and(|rest| rest.starts_with('/'));
        if let Some(above) = names.iter().find(is_above) {
            let text = format!("restic: disk {name:?} is below disk {above:?}, which is a file");
            return Err(Error::new(Kind::Usage, text).with_remedy("choose another name"));
        }
    }
    Ok(())
}

/// Refuses the name of a point or a checkpoint that a tag cannot have.
///
/// # Errors
/// [`Kind::Usage`]
pub fn check_point_name(name: &str) -> Result<()> {
    check_tag_part("point", name)
}

fn check_tag_part(kind: &str, name: &str) -> Result<()> {
    let wrong = [",", POINT, CHECKPOINT].into_iter().find(|part| name.contains(part));
    if name.is_empty() || wrong.is_some() {
        let text = match wrong {
            Some(part) => format!("restic: the name of {kind} {name:?} has {part:?}"),
            None => format!("restic: a {kind} has an empty name"),
        };
        let remedy = "choose another name: it becomes part of a tag of the snapshot";
        return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
    }
    Ok(())
}

/// A directory in the snapshots of a repository, with disks that are backed up together.
pub struct ResticStore {
    name: Arc<str>,
    place: BackupPlace,
    /// The directory in the snapshots, with a slash behind it; or nothing.
    folder: String,
    found: Option<StoreContents>,
}

/// A repository that exists.
struct StoreContents {
    repository: FoundRepository,
    /// The oldest first.
    snapshots: Vec<Snapshot>,
    /// All snapshots of the repository.
    known: Vec<Digest>,
}

/// A disk in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResticPoint {
    /// The name of the point.
    pub name: String,
    /// The name of the bitmap that began at it.
    pub checkpoint: String,
    /// When the snapshot was made, in seconds since 1970.
    pub created: u64,
}

/// A disk that is backed up.
#[derive(Debug, Clone)]
pub struct ResticDisk {
    /// The name of its file.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// The name of the point.
    pub point: String,
    /// The name of the bitmap that begins at it.
    pub checkpoint: String,
    /// The point of which the rest is kept. None: all of the disk is copied.
    pub parent: Option<String>,
}

/// Disks that are being backed up.
pub struct ResticBackup {
    name: Arc<str>,
    session: Arc<BackupSession>,
    facts: SnapshotFacts,
    disks: Vec<StoreDisk>,
    /// Their paths in the snapshot, and the files beside the disks.
    files: Vec<(String, ResticFile)>,
}

struct StoreDisk {
    disk: ResticDisk,
    path: String,
    device: BackupDevice,
    is_complete: AtomicBool,
}

impl ResticStore {
    /// Whether this text is the name of such a store.
    pub fn is_named_by(text: &str) -> bool {
        text.starts_with("restic:")
    }

    /// Opens the store `restic:REPO#DIRECTORY`, with the options of a target of a copy. Nothing is written. Blocks.
    ///
    /// # Errors
    /// The name or an option is wrong, or the repository cannot be read or is locked.
    pub fn open(text: &str) -> Result<ResticStore> {
        let options = ResticOptions { connect_timeout: CONNECT_TIME, timeout: RESPONSE_TIME };
        let backend: Arc<dyn blockhaul_catalog::Backend> = Arc::new(ResticBackend::new(options));
        let registry = Registry { backends: vec![backend], ..Registry::default() };
        let (_, target) = registry.target(&DeviceSpec::parse(text.as_ref())?, Intent::TARGET)?;
        let (name, place, folder) = store_place(&target, options)?;
        let opened = ResticStore::open_place(&name, place, &folder);
        opened.map_err(|error| error.on(&name))
    }

    fn open_place(name: &Arc<str>, place: BackupPlace, folder: &str) -> Result<ResticStore> {
        let folder = match folder.trim_matches('/') {
            "" => String::new(),
            folder => format!("{}/", checked_path(folder)?),
        };
        let mut found = None;
        if let Some(reader) = place.open()? {
            let known = reader.names(snapshot::FOLDER)?;
            let snapshots = place.snapshots(&reader)?;
            let repository = FoundRepository::load(reader)?;
            found = Some(StoreContents { repository, snapshots, known });
        }
        Ok(ResticStore { name: name.clone(), place, folder, found })
    }

    fn path(&self, disk: &str) -> String {
        format!("{}{disk}", self.folder)
    }

    /// The points of a disk, the oldest first.
    pub fn points(&self, disk: &str) -> Vec<ResticPoint> {
        self.snapshots(disk).map(|(point, _)| point).collect()
    }

    fn snapshots(&self, disk: &str) -> impl DoubleEndedIterator<Item = (ResticPoint, &Snapshot)> {
        let path = format!("/{}", self.path(disk));
        let prefixes = [POINT, CHECKPOINT].map(|key| format!("{disk}{key}"));
        let all = self.found.iter().flat_map(|found| &found.snapshots);
        all.filter_map(move |snapshot| {
            let tag =
                |prefix: &String| snapshot.tags.iter().find_map(|tag| tag.strip_prefix(prefix));
            let [name, checkpoint] = [tag(&prefixes[0])?, tag(&prefixes[1])?].map(str::to_owned);
            let created = u64::try_from(snapshot.time.as_second()).unwrap_or(0);
            let is_there = snapshot.paths.contains(&path);
            is_there.then_some((ResticPoint { name, checkpoint, created }, snapshot))
        })
    }

    /// Bytes of a disk at its newest point; none if there is no point. Blocks.
    ///
    /// # Errors
    /// The snapshot cannot be read.
    pub fn newest_size(&self, disk: &str) -> Result<Option<u64>> {
        let Some((_, newest)) = self.snapshots(disk).next_back() else { return Ok(None) };
        let found = self.parent(disk, newest).map_err(|error| error.on(&self.name))?;
        Ok(Some(found.content.size()))
    }

    /// The file of a disk in a snapshot.
    fn parent(&self, disk: &str, snapshot: &Snapshot) -> Result<ParentFile> {
        let path = self.path(disk);
        let found = self.found.as_ref().map(|found| {
            parent::find(&found.repository.repository, std::slice::from_ref(snapshot), &path)
        });
        let found = found.transpose()?.flatten();
        found.ok_or_else(|| {
            let text = format!("snapshot {} has no file {path}", snapshot.id.short());
            Error::new(Kind::NotFound, text).with_remedy("make a full backup")
        })
    }

    /// Locks the repository, or makes it, and begins the backup of these disks, with files beside them. Blocks.
    ///
    /// # Errors
    /// A name cannot be that of a file, a point does not exist, the repository is locked, or its storage fails.
    pub fn begin(self, disks: Vec<ResticDisk>, files: Vec<ResticFile>) -> Result<ResticBackup> {
        let name = self.name.clone();
        self.begin_disks(disks, files).map_err(|error| error.on(&name))
    }

    fn begin_disks(
        mut self,
        disks: Vec<ResticDisk>,
        files: Vec<ResticFile>,
    ) -> Result<ResticBackup> {
        check_disk_names(disks.iter().map(|disk| &disk.name[..]))?;
        for disk in &disks {
            check_point_name(&disk.point)?;
            check_point_name(&disk.checkpoint)?;
        }
        let known = self.found.as_ref().map(|found| found.known.clone());
        let mut bases = KeptBases::new(known.unwrap_or_default());
        let mut prepared = Vec::with_capacity(disks.len());
        for disk in disks {
            let path = self.path(&disk.name);
            checked_path(&path)?;
            let newest =
                self.snapshots(&disk.name).next_back().map(|(point, found)| (point, found.clone()));
            let parent = match (&disk.parent, newest) {
                (None, newest) => {
                    // Only the length of its chunks counts.
                    let found = newest.map(|(_, newest)| self.parent(&disk.name, &newest));
                    found.and_then(|found| found.ok())
                }
                (Some(name), Some((point, newest))) if point.name == *name => {
                    parent::check_time(&path, &newest, FUTURE)?;
                    bases.add(&path, &newest);
                    Some(self.parent(&disk.name, &newest)?)
                }
                (Some(name), _) => {
                    let text = format!("{path} has no newest point {name:?}");
                    return Err(Error::new(Kind::NotFound, text).with_remedy("run it again"));
                }
            };
            let chunk = disk::chunk_of(disk.size, parent.as_ref())?;
            prepared.push((disk, path, parent, chunk));
        }
        let parents = prepared.iter().filter_map(|(.., parent, _)| parent.as_ref());
        let parents: Vec<_> = parents.map(|parent| parent.snapshot.id).collect();
        let found = self.found.take().map(|found| found.repository);
        let files = files.into_iter().map(|file| (self.path(&file.name), file)).collect();
        let session = self.place.begin(found, &parents)?;
        let facts = SnapshotFacts {
            host: self.place.host().to_owned(),
            tags: self.place.request.tags.clone(),
            parent: parents.first().copied(),
            bases,
        };
        let disks = prepared.into_iter().map(|(disk, path, parent, chunk)| {
            let kept = parent.filter(|_| disk.parent.is_some());
            let device = BackupDevice::new(&format!("restic:{path}"), disk.size, chunk);
            let image = DiskImage::new(session.clone(), (disk.size, chunk), kept);
            device.begin(DiskBackup {
                session: session.clone(),
                disk: image,
                snapshot: None,
                has_changed: AtomicBool::new(true),
                turn: Mutex::default(),
            });
            StoreDisk { disk, path, device, is_complete: AtomicBool::new(false) }
        });
        let disks = disks.collect();
        Ok(ResticBackup { name: self.name, session, facts, disks, files })
    }
}

impl ResticBackup {
    /// The target of the copy of a disk, by its place in the list with which the backup has begun.
    pub fn device(&self, index: usize) -> Option<Arc<dyn Device>> {
        let disk = self.disks.get(index)?;
        Some(Arc::new(disk.device.clone()))
    }

    /// The target of the copy of a disk, for messages.
    pub fn target_name(&self, index: usize) -> String {
        let path = self.disks.get(index).map_or("", |disk| &disk.path);
        let repository =
            self.name.split_once('#').map_or(&*self.name, |(repository, _)| repository);
        format!("{repository}#new/{path}")
    }

    /// Notes that a disk was copied and flushed.
    pub fn complete(&self, index: usize) {
        if let Some(disk) = self.disks.get(index) {
            disk.is_complete.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the snapshot of the disks that are complete, and returns its identifier. None: no disk is complete. Blocks.
    ///
    /// # Errors
    /// The storage fails, or the lock is lost.
    pub fn finish(&self) -> Result<Option<String>> {
        self.publish().map_err(|fault| Error::from(fault).on(&self.name))
    }

    fn publish(&self) -> Result<Option<String>, RepositoryFault> {
        let complete = |disk: &&StoreDisk| disk.is_complete.load(Ordering::Relaxed);
        let disks: Vec<_> = self.disks.iter().filter(complete).collect();
        if disks.is_empty() {
            return Ok(None);
        }
        let lists = disks.iter().map(|disk| disk.device.digests());
        let lists = lists.collect::<Result<Vec<_>, RepositoryFault>>()?;
        let Person { uid, gid, .. } = Person::here();
        let time = Timestamp::now();
        let beside = self.files.iter().map(|(_, file)| file.save(&self.session));
        let beside = beside.collect::<Result<Vec<_>, RepositoryFault>>()?;
        let beside = self.files.iter().zip(&beside).map(|((path, file), content)| {
            let (size, time) = (file.size(), file.time);
            (path.as_str(), FileNode { size, content, time, owner: [uid, gid] })
        });
        let files: Vec<_> = disks
            .iter()
            .zip(&lists)
            .map(|(disk, content)| {
                let node = FileNode { size: disk.disk.size, content, time, owner: [uid, gid] };
                (disk.path.as_str(), node)
            })
            .chain(beside)
            .collect();
        let mut facts = self.facts.clone();
        for StoreDisk { disk, .. } in disks {
            let ResticDisk { name, point, checkpoint, .. } = disk;
            facts.tags.extend([
                format!("{name}{POINT}{point}"),
                format!("{name}{CHECKPOINT}{checkpoint}"),
            ]);
        }
        self.session.publish(&files, &facts).map(|id| Some(id.to_string()))
    }
}
