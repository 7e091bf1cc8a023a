//! The identity of the storage of a path, a descriptor or a device, and the files and devices below
//! block devices (sysfs(5)).

use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use blockhaul_block::FileId;
use blockhaul_catalog::{StorageId, StorageIds};
use rustix::fs::{FileType, Stat, fstat, major, makedev, minor};

/// Maximum number of files and devices of one side whose lower devices are followed.
const FOLLOWED_MAX: usize = 4096;

/// Identifies the storage of a path: device and inode of a file; for a block device its number, so
/// that two nodes of one device are equal, and 0. `None` if the path does not exist or cannot be
/// inspected.
///
/// For callers that must not open a source as the target, because opening a target empties it.
pub fn identity(path: &Path) -> Option<FileId> {
    rustix::fs::stat(path).ok().map(|stat| of(&stat))
}

/// The same for an open regular file or block device; `None` for everything else, such as pipes.
pub fn identity_of(fd: impl AsFd) -> Option<FileId> {
    let stat = fstat(fd).ok()?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => Some(of(&stat)),
        _ => None,
    }
}

/// All identities of the storage of a file or block device, for a claim. Blocks.
pub(super) fn storage_ids(stat: &Stat) -> StorageIds {
    let StorageIdentity { same, below } = StorageIdentity::of(&[of(stat)]);
    let ids = |files: Vec<FileId>| files.into_iter().map(StorageId::File).collect();
    StorageIds { same: ids(same), below: ids(below) }
}

pub(super) fn of(stat: &Stat) -> FileId {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => (stat.st_rdev, 0),
        _ => (stat.st_dev, stat.st_ino),
    }
}

/// The relation between the storage of two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageRelation {
    /// They have no storage in common.
    Nothing,
    /// One is a part of the other: a partition of a disk, a volume on it.
    Part,
    /// They have a file or a block device in common. A loop device over a whole file is that file.
    Same,
}

/// The relation between the storage of two devices, from the files and block devices that they use
/// ([`blockhaul_block::Facts::files`]). Blocks.
pub fn shared(one: &[FileId], other: &[FileId]) -> StorageRelation {
    let [one, other] = [StorageIdentity::of(one), StorageIdentity::of(other)];
    let meet = |a: &[FileId], b: &[FileId]| a.iter().any(|id| b.contains(id));
    if meet(&one.same, &other.same) {
        StorageRelation::Same
    } else if meet(&one.same, &other.below) || meet(&one.below, &other.same) {
        StorageRelation::Part
    } else {
        StorageRelation::Nothing
    }
}

/// Files and block devices with their aliases, and the devices that they are parts of.
#[derive(Default)]
struct StorageIdentity {
    same: Vec<FileId>,
    below: Vec<FileId>,
}

impl StorageIdentity {
    fn of(files: &[FileId]) -> StorageIdentity {
        let mut place = StorageIdentity { same: files.to_vec(), below: Vec::new() };
        let mut next = 0;
        while let Some(&id) = place.same.get(next).filter(|_| next < FOLLOWED_MAX) {
            next += 1;
            let Some(node) = sysfs(id) else { continue };
            if let Some(backing) = backing_file(&node) {
                let known = if is_whole(&node) { &mut place.same } else { &mut place.below };
                add(known, backing);
            }
            lower(&node).into_iter().for_each(|id| add(&mut place.below, id));
        }
        let mut next = 0;
        while let Some(&id) = place.below.get(next).filter(|_| next < FOLLOWED_MAX) {
            next += 1;
            let Some(node) = sysfs(id) else { continue };
            let lower = lower(&node).into_iter().chain(backing_file(&node));
            lower.for_each(|id| add(&mut place.below, id));
        }
        place
    }
}

fn add(known: &mut Vec<FileId>, id: FileId) {
    if !known.contains(&id) {
        known.push(id);
    }
}

/// The directory of a block device in sysfs.
fn sysfs((device, inode): FileId) -> Option<PathBuf> {
    (inode == 0).then(|| folder(device)).filter(|node| node.exists())
}

pub(super) fn folder(device: u64) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{}:{}", major(device), minor(device)))
}

/// The number of a block device from its directory in sysfs.
pub(super) fn number(node: &Path) -> Option<u64> {
    let text = fs::read_to_string(node.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The disk of a partition, or the devices below a device-mapper volume or a RAID.
fn lower(node: &Path) -> Vec<FileId> {
    let disk = node.join("partition").exists().then(|| node.join(".."));
    let slaves = fs::read_dir(node.join("slaves")).into_iter().flatten().flatten();
    let nodes = disk.into_iter().chain(slaves.map(|entry| entry.path()));
    nodes.filter_map(|node| Some((number(&node)?, 0))).collect()
}

/// The file behind a loop device.
fn backing_file(node: &Path) -> Option<FileId> {
    let path = fs::read(node.join("loop/backing_file")).ok()?;
    let path = path.strip_suffix(b"\n").unwrap_or(&path);
    identity(Path::new(OsStr::from_bytes(path)))
}

/// Whether a loop device covers all of its file.
fn is_whole(node: &Path) -> bool {
    let is_zero = |name| {
        let text = fs::read_to_string(node.join(name)).unwrap_or_default();
        text.trim() == "0"
    };
    is_zero("loop/offset") && is_zero("loop/sizelimit")
}
