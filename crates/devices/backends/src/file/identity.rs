//! Which storage a path, a descriptor or a device stands for, and which block devices lie on which files
//! and devices (sysfs(5)).

use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use blockhaul_block::FileId;
use rustix::fs::{FileType, Stat, fstat, major, makedev, minor};

/// Most files and devices of one side that are followed to what they lie on.
const FOLLOWED_MAX: usize = 4096;

/// What makes two paths the same storage: device and inode of a file; of a block device its number,
/// so that two nodes of one device are equal, and 0. `None` if there is nothing at the path or it
/// cannot be looked at.
///
/// For callers that must not open a source as the target, because opening a target empties it.
pub fn identity(path: &Path) -> Option<FileId> {
    rustix::fs::stat(path).ok().map(|stat| of(&stat))
}

/// The same of an open regular file or block device; `None` for everything else, such as pipes.
pub fn identity_of(fd: impl AsFd) -> Option<FileId> {
    let stat = fstat(fd).ok()?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => Some(of(&stat)),
        _ => None,
    }
}

pub(super) fn of(stat: &Stat) -> FileId {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => (stat.st_rdev, 0),
        _ => (stat.st_dev, stat.st_ino),
    }
}

/// How the storage of two devices is related.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// They have no storage in common.
    Nothing,
    /// One is a part of the other: a partition of a disk, a volume on it.
    Part,
    /// They have a file or a block device in common. A loop device over a whole file is that file.
    Same,
}

/// How the storage of two devices is related, by the files and block devices that they are made of
/// ([`blockhaul_block::Facts::files`]). Blocks.
pub fn shared(one: &[FileId], other: &[FileId]) -> Shared {
    let [one, other] = [Place::of(one), Place::of(other)];
    let meet = |a: &[FileId], b: &[FileId]| a.iter().any(|id| b.contains(id));
    if meet(&one.same, &other.same) {
        Shared::Same
    } else if meet(&one.same, &other.below) || meet(&one.below, &other.same) {
        Shared::Part
    } else {
        Shared::Nothing
    }
}

/// Files and block devices with other names for them, and what they are parts of.
#[derive(Default)]
struct Place {
    same: Vec<FileId>,
    below: Vec<FileId>,
}

impl Place {
    fn of(files: &[FileId]) -> Place {
        let mut place = Place { same: files.to_vec(), below: Vec::new() };
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

/// The folder of a block device in sysfs.
fn sysfs((device, inode): FileId) -> Option<PathBuf> {
    (inode == 0).then(|| folder(device)).filter(|node| node.exists())
}

pub(super) fn folder(device: u64) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{}:{}", major(device), minor(device)))
}

/// The number of a block device by its folder in sysfs.
pub(super) fn number(node: &Path) -> Option<u64> {
    let text = fs::read_to_string(node.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The disk of a partition; what a volume of the device mapper or a RAID lies on.
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

/// Whether a loop device shows all of its file.
fn is_whole(node: &Path) -> bool {
    let is_zero = |name| {
        let text = fs::read_to_string(node.join(name)).unwrap_or_default();
        text.trim() == "0"
    };
    is_zero("loop/offset") && is_zero("loop/sizelimit")
}
