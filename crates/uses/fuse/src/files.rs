//! The files of a mount: a disk, and a text about it.

use std::time::Duration;

use blockhaul_block::Can;
use blockhaul_block::Facts;

use crate::protocol::{Attr, NodeKind, ROOT, Statfs};

/// Name of the disk in a directory.
pub const DISK: &str = "disk";
/// Name of the text in a directory.
pub const INFO: &str = "info.json";

/// Nodes, if the root is a directory.
const DISK_NODE: u64 = 2;
const INFO_NODE: u64 = 3;

/// How long the kernel may use attributes: a size that changes is seen after this time.
const VALID: Duration = Duration::from_secs(1);
/// Size of a block of the file system.
const BLOCK: u32 = 4096;
/// Unit of a file's allocation.
const SECTOR: u64 = 512;

/// Who may use the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permissions {
    /// The owner.
    pub uid: u32,
    /// The owner's group.
    pub gid: u32,
    /// The disk may be written.
    pub write: bool,
    /// Other users may read and, with `write`, write, too.
    pub others: bool,
}

/// The files that are shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The text about the disk, in a directory; none: the root is the disk.
    pub info: Option<String>,
    /// Who may use them.
    pub permissions: Permissions,
    /// The time of all files, since 1970.
    pub time: Duration,
}

/// A file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Node {
    Folder,
    Disk,
    Info,
}

impl Files {
    /// The node of a number.
    pub(crate) fn node(&self, number: u64) -> Option<Node> {
        match (number, &self.info) {
            (ROOT, None) => Some(Node::Disk),
            (ROOT, Some(_)) => Some(Node::Folder),
            (DISK_NODE, Some(_)) => Some(Node::Disk),
            (INFO_NODE, Some(_)) => Some(Node::Info),
            _ => None,
        }
    }

    /// The file of this name in the directory.
    pub(crate) fn named(&self, name: &[u8]) -> Option<Node> {
        match name {
            name if name == DISK.as_bytes() => Some(Node::Disk),
            name if name == INFO.as_bytes() => Some(Node::Info),
            _ => None,
        }
    }

    /// Entries of the directory, in order.
    pub(crate) fn entries(&self) -> [(u64, NodeKind, &'static str); 4] {
        [
            (ROOT, NodeKind::Folder, "."),
            (ROOT, NodeKind::Folder, ".."),
            (DISK_NODE, NodeKind::File, DISK),
            (INFO_NODE, NodeKind::File, INFO),
        ]
    }

    /// The text about the disk.
    pub(crate) fn text(&self) -> &[u8] {
        self.info.as_deref().unwrap_or_default().as_bytes()
    }

    /// The attributes of a node; `disk` are the facts of the disk.
    pub(crate) fn attr(&self, node: Node, disk: &Facts) -> Attr {
        let (number, kind) = match node {
            Node::Folder => (ROOT, NodeKind::Folder),
            Node::Disk if self.info.is_none() => (ROOT, NodeKind::File),
            Node::Disk => (DISK_NODE, NodeKind::File),
            Node::Info => (INFO_NODE, NodeKind::File),
        };
        let size = match node {
            Node::Folder => 0,
            Node::Disk => disk.size,
            Node::Info => self.text().len() as u64,
        };
        Attr {
            node: number,
            kind,
            permissions: self.mode(node),
            size,
            blocks: blocks(node, size, disk),
            block_size: disk.block.preferred.max(BLOCK),
            time: self.time,
            uid: self.permissions.uid,
            gid: self.permissions.gid,
            valid: VALID,
        }
    }

    fn mode(&self, node: Node) -> u32 {
        let Permissions { write, others, .. } = self.permissions;
        let owner = match node {
            Node::Folder => 0o500,
            Node::Disk if write => 0o600,
            Node::Disk | Node::Info => 0o400,
        };
        if others { owner | owner >> 3 | owner >> 6 } else { owner }
    }

    /// The facts of the file system.
    pub(crate) fn statfs(&self, disk: &Facts) -> Statfs {
        let blocks = disk.size.div_ceil(u64::from(BLOCK));
        let files = if self.info.is_some() { 3 } else { 1 };
        Statfs { blocks, block_size: BLOCK, files, name_max: 255 }
    }
}

/// The allocated units of a file. How much of a disk is allocated is known only after all its
/// extents were asked for, which can take long. Programs search for holes where a file has fewer
/// units than its size, so a disk that reports its holes has one less.
fn blocks(node: Node, size: u64, disk: &Facts) -> u64 {
    let blocks = size.div_ceil(SECTOR);
    let reports_holes = disk.can.difference(disk.emulated).contains(Can::EXTENTS);
    if node == Node::Disk && reports_holes { blocks.saturating_sub(1) } else { blocks }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(info: Option<&str>, write: bool, others: bool) -> Files {
        let permissions = Permissions { uid: 1, gid: 2, write, others };
        Files { info: info.map(str::to_string), permissions, time: Duration::ZERO }
    }

    #[test]
    fn the_root_is_the_disk_or_a_directory_with_it() {
        let disk = Facts::new("d", 10_000);
        let alone = files(None, false, false);
        assert_eq!((alone.node(ROOT), alone.node(2)), (Some(Node::Disk), None));
        assert_eq!(alone.attr(Node::Disk, &disk).node, ROOT);
        let folder = files(Some("{}\n"), false, false);
        assert_eq!(folder.node(ROOT), Some(Node::Folder));
        for (number, kind, name) in &folder.entries()[2..] {
            let node = folder.named(name.as_bytes()).unwrap();
            let attr = folder.attr(node, &disk);
            assert_eq!((attr.node, attr.kind), (*number, *kind));
            assert_eq!(folder.node(*number), Some(node));
        }
        assert_eq!(folder.attr(Node::Info, &disk).size, 3);
        assert_eq!(folder.named(b"other"), None);
    }

    #[test]
    fn permissions_are_those_of_the_mount() {
        let disk = Facts::new("d", 10_000);
        let mode =
            |write, others, node| files(Some(""), write, others).attr(node, &disk).permissions;
        assert_eq!(mode(false, false, Node::Disk), 0o400);
        assert_eq!(mode(true, false, Node::Disk), 0o600);
        assert_eq!(mode(true, true, Node::Disk), 0o666);
        assert_eq!(mode(true, true, Node::Info), 0o444);
        assert_eq!(mode(true, true, Node::Folder), 0o555);
    }

    #[test]
    fn only_a_disk_that_reports_holes_looks_sparse() {
        let mut disk = Facts::new("d", 10_000);
        assert_eq!(files(None, false, false).attr(Node::Disk, &disk).blocks, 20);
        disk.can |= Can::EXTENTS;
        assert_eq!(files(None, false, false).attr(Node::Disk, &disk).blocks, 19);
        disk.emulated |= Can::EXTENTS;
        assert_eq!(files(None, false, false).attr(Node::Disk, &disk).blocks, 20);
    }
}
