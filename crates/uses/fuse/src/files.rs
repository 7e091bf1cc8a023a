//! The files of a mount: disks, and a text about them.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::Can;
use blockhaul_block::Facts;

use crate::protocol::{Attr, NodeKind, ROOT, Statfs};

/// Name of the only disk in a directory.
pub const DISK: &str = "disk";
/// Name of the text in a directory.
pub const INFO: &str = "info.json";
/// Maximum number of disks: each of them is open, and the kernel may ask for all of them at once.
pub const DISKS_MAX: usize = 4096;

/// Node of the first disk, if the root is a directory. The others follow, and after them the text.
const FIRST_DISK: u64 = 2;

/// How long the kernel may use attributes: a size that changes is seen after this time.
const VALID: Duration = Duration::from_secs(1);
/// Size of a block of the file system.
const BLOCK: u32 = 4096;
/// Unit of a file's allocation.
const SECTOR: u64 = 512;
/// Maximum length of a name, in bytes.
const NAME_MAX: u32 = 255;

/// Who may use the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permissions {
    /// The owner.
    pub uid: u32,
    /// The owner's group.
    pub gid: u32,
    /// Disks may be written.
    pub write: bool,
    /// Other users may read; with `write`, the owner can let them write, too (chmod(2)).
    pub others: bool,
}

/// Makes a text about the disks, from their facts in the order of the disks.
pub type Info = Arc<dyn Fn(&[Arc<Facts>]) -> String + Send + Sync>;

/// The files that are shown.
pub struct Files {
    /// The text about the disks, in a directory; none: the root is the only disk.
    pub info: Option<Info>,
    /// Who may use them.
    pub permissions: Permissions,
    /// The time of all files, since 1970.
    pub time: Duration,
}

/// Why a disk cannot have this name in a directory; none: it can.
pub fn refused_name(name: &str) -> Option<&'static str> {
    match name {
        "" => Some("is empty"),
        "." | ".." => Some("is not the name of a file"),
        INFO => Some("is the name of the file about the disks"),
        name if name.contains('/') => Some("contains a slash"),
        name if name.contains('\0') => Some("contains a NUL"),
        name if name.len() > NAME_MAX as usize => Some("is longer than 255 bytes"),
        _ => None,
    }
}

/// A file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Node {
    Folder,
    /// A disk, by its place in the list.
    Disk(usize),
    Info,
}

/// What the files need to know about a disk.
pub(crate) trait DiskAttributes {
    /// Its name.
    fn name(&self) -> &str;
    /// It may be written.
    fn write(&self) -> bool;
    /// The permissions that its owner has given it; none: those of the mount.
    fn mode(&self) -> Option<u32>;
    /// Its facts, as they are now.
    fn facts(&self) -> Arc<Facts>;
}

impl Files {
    /// The node of a number, if there are so many disks.
    pub(crate) fn node(&self, number: u64, disks: usize) -> Option<Node> {
        match (number, &self.info) {
            (ROOT, None) => Some(Node::Disk(0)),
            (ROOT, Some(_)) => Some(Node::Folder),
            (_, None) => None,
            (_, Some(_)) => match usize::try_from(number.checked_sub(FIRST_DISK)?).ok()? {
                place if place < disks => Some(Node::Disk(place)),
                place if place == disks => Some(Node::Info),
                _ => None,
            },
        }
    }

    /// The number of a node.
    fn number(&self, node: Node, disks: usize) -> u64 {
        match node {
            Node::Folder => ROOT,
            Node::Disk(_) if self.info.is_none() => ROOT,
            Node::Disk(place) => FIRST_DISK + place as u64,
            Node::Info => FIRST_DISK + disks as u64,
        }
    }

    /// The file of this name in the directory.
    pub(crate) fn named<D: DiskAttributes>(&self, name: &[u8], disks: &[D]) -> Option<Node> {
        if name == INFO.as_bytes() {
            return Some(Node::Info);
        }
        let place = disks.iter().position(|disk| disk.name().as_bytes() == name)?;
        Some(Node::Disk(place))
    }

    /// Entries of the directory, in order.
    pub(crate) fn entries<'a, D: DiskAttributes>(
        &self,
        disks: &'a [D],
    ) -> impl Iterator<Item = (u64, NodeKind, &'a str)> {
        let folder = |name| (ROOT, NodeKind::Folder, name);
        let info = (self.number(Node::Info, disks.len()), NodeKind::File, INFO);
        let disks = disks.iter().zip(FIRST_DISK..);
        let disks = disks.map(|(disk, number)| (number, NodeKind::File, disk.name()));
        [".", ".."].map(folder).into_iter().chain(disks).chain([info])
    }

    /// The text about the disks.
    pub(crate) fn text<D: DiskAttributes>(&self, disks: &[D]) -> String {
        let Some(info) = &self.info else { return String::new() };
        let facts: Vec<_> = disks.iter().map(DiskAttributes::facts).collect();
        info(&facts)
    }

    /// The attributes of a node.
    pub(crate) fn attr<D: DiskAttributes>(&self, node: Node, disks: &[D]) -> Attr {
        let mut attr = Attr {
            node: self.number(node, disks.len()),
            kind: if node == Node::Folder { NodeKind::Folder } else { NodeKind::File },
            permissions: self.mode(node, disks),
            size: 0,
            blocks: 0,
            block_size: BLOCK,
            time: self.time,
            uid: self.permissions.uid,
            gid: self.permissions.gid,
            valid: VALID,
        };
        match node {
            Node::Folder => {}
            Node::Info => {
                attr.size = self.text(disks).len() as u64;
                attr.blocks = attr.size.div_ceil(SECTOR);
            }
            Node::Disk(place) => {
                let disk = disks[place].facts();
                attr.size = disk.size;
                attr.blocks = blocks(&disk);
                attr.block_size = disk.block.preferred.max(BLOCK);
            }
        }
        attr
    }

    fn mode<D: DiskAttributes>(&self, node: Node, disks: &[D]) -> u32 {
        let owner = match node {
            Node::Folder => 0o500,
            Node::Disk(place) => match disks[place].mode() {
                Some(mode) => return mode,
                None if disks[place].write() => 0o600,
                None => 0o400,
            },
            Node::Info => 0o400,
        };
        // Whoever may write a disk can change every file in it, and what a machine runs as root.
        let others = owner & !0o200;
        if self.permissions.others { owner | others >> 3 | others >> 6 } else { owner }
    }

    /// The facts of the file system.
    pub(crate) fn statfs<D: DiskAttributes>(&self, disks: &[D]) -> Statfs {
        let blocks = disks.iter().map(|disk| disk.facts().size.div_ceil(u64::from(BLOCK)));
        let files = if self.info.is_some() { disks.len() as u64 + 2 } else { 1 };
        Statfs {
            blocks: blocks.fold(0, u64::saturating_add),
            block_size: BLOCK,
            files,
            name_max: NAME_MAX,
        }
    }
}

/// The allocated units of a disk. How much of it is allocated is known only after all its
/// extents were asked for, which can take long. Programs search for holes where a file has fewer
/// units than its size, so a disk that reports its holes has one less.
fn blocks(disk: &Facts) -> u64 {
    let blocks = disk.size.div_ceil(SECTOR);
    let reports_holes = disk.can.difference(disk.emulated).contains(Can::EXTENTS);
    if reports_holes { blocks.saturating_sub(1) } else { blocks }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Disk(&'static str, bool, Facts);

    impl DiskAttributes for Disk {
        fn name(&self) -> &str {
            self.0
        }

        fn write(&self) -> bool {
            self.1
        }

        fn mode(&self) -> Option<u32> {
            None
        }

        fn facts(&self) -> Arc<Facts> {
            Arc::new(self.2.clone())
        }
    }

    fn disk(name: &'static str, write: bool) -> Disk {
        Disk(name, write, Facts::new("d", 10_000))
    }

    fn files(info: Option<&'static str>, others: bool) -> Files {
        let permissions = Permissions { uid: 1, gid: 2, write: false, others };
        let info = info.map(|text| Arc::new(move |_: &[Arc<Facts>]| text.to_string()) as Info);
        Files { info, permissions, time: Duration::ZERO }
    }

    #[test]
    fn the_root_is_the_disk_or_a_directory_with_disks() {
        let disks = [disk("a", false), disk("b", true)];
        let alone = files(None, false);
        assert_eq!((alone.node(ROOT, 1), alone.node(2, 1)), (Some(Node::Disk(0)), None));
        assert_eq!(alone.attr(Node::Disk(0), &disks[..1]).node, ROOT);
        let folder = files(Some("{}\n"), false);
        for disks in [&disks[..1], &disks] {
            assert_eq!(folder.node(ROOT, disks.len()), Some(Node::Folder));
            let entries: Vec<_> = folder.entries(disks).collect();
            for (number, kind, name) in &entries[2..] {
                let node = folder.named(name.as_bytes(), disks).unwrap();
                let attr = folder.attr(node, disks);
                assert_eq!((attr.node, attr.kind), (*number, *kind));
                assert_eq!(folder.node(*number, disks.len()), Some(node));
            }
            assert_eq!(entries.len(), disks.len() + 3);
            assert_eq!(folder.node(disks.len() as u64 + 3, disks.len()), None);
            assert_eq!(folder.attr(Node::Info, disks).size, 3);
            assert_eq!(folder.named(b"other", disks), None);
            assert_eq!(folder.statfs(disks).blocks, 3 * disks.len() as u64);
        }
        assert_eq!(folder.node(0, 2), None);
        assert_eq!(folder.node(u64::MAX, 2), None);
    }

    #[test]
    fn a_disk_has_the_name_of_a_file_in_the_directory() {
        for good in ["disk", "a.raw", "...", "-", "a b", "ä"] {
            assert_eq!(refused_name(good), None, "{good}");
        }
        let long = "x".repeat(256);
        for bad in ["", ".", "..", "/", "a/b", "/etc/passwd", "../x", "a\0b", INFO, &long] {
            assert!(refused_name(bad).is_some(), "{bad:?}");
        }
    }

    #[test]
    fn permissions_are_those_of_the_mount_and_the_disk() {
        let mode = |write, others, node| {
            files(Some(""), others).attr(node, &[disk("d", write)]).permissions
        };
        assert_eq!(mode(false, false, Node::Disk(0)), 0o400);
        assert_eq!(mode(true, false, Node::Disk(0)), 0o600);
        assert_eq!(mode(true, true, Node::Disk(0)), 0o644);
        assert_eq!(mode(true, true, Node::Info), 0o444);
        assert_eq!(mode(true, true, Node::Folder), 0o555);
    }

    #[test]
    fn only_a_disk_that_reports_holes_looks_sparse() {
        let mut one = disk("d", false);
        let mut units = |change: fn(&mut Facts)| {
            change(&mut one.2);
            files(None, false).attr(Node::Disk(0), std::slice::from_ref(&one)).blocks
        };
        assert_eq!(units(|_| {}), 20);
        assert_eq!(units(|facts| facts.can |= Can::EXTENTS), 19);
        assert_eq!(units(|facts| facts.emulated |= Can::EXTENTS), 20);
    }
}
