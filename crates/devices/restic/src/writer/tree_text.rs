//! Directories of a snapshot, as restic writes them.

use std::collections::BTreeMap;

use blockhaul_block::{Error, Kind};
use jiff::Timestamp;
use serde::Serialize;

use crate::digest::Digest;
use crate::fault::Result;
use crate::writer::unserialized;

/// Permissions of files and directories, with the bit of a directory in the language Go.
const FILE_MODE: u32 = 0o600;
const FOLDER_MODE: u32 = 1 << 31 | 0o700;

/// A file of a snapshot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileNode<'a> {
    pub(crate) size: u64,
    /// Its blobs, in order.
    pub(crate) content: &'a [Digest],
    pub(crate) time: Timestamp,
    pub(crate) owner: [u32; 2],
}

/// A directory of a snapshot.
#[derive(Default)]
pub(crate) struct TreeFolder<'a>(BTreeMap<&'a str, TreeEntry<'a>>);

enum TreeEntry<'a> {
    File(FileNode<'a>),
    Folder(TreeFolder<'a>),
}

#[derive(Serialize)]
struct TreeText<'a> {
    nodes: Vec<NodeText<'a>>,
}

#[derive(Serialize)]
struct NodeText<'a> {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    mode: u32,
    mtime: Timestamp,
    atime: Timestamp,
    ctime: Timestamp,
    uid: u32,
    gid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    links: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a [Digest]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subtree: Option<Digest>,
}

/// Checks the path of a file in a snapshot, and returns it without slashes at its ends.
///
/// # Errors
/// [`Kind::Usage`]
pub(crate) fn checked_path(path: &str) -> blockhaul_block::Result<&str> {
    let path = path.trim_matches('/');
    let is_odd = |part: &str| matches!(part, "" | "." | "..");
    if path.is_empty() || path.split('/').any(is_odd) || path.contains(blockhaul_wire::unprintable)
    {
        let text = format!("restic: {path:?} is no path in a snapshot");
        let remedy = "write restic:REPO#new/NAME, for example #new/vm1/vda.raw";
        return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
    }
    Ok(path)
}

impl<'a> TreeFolder<'a> {
    /// The root directory of a snapshot with these files.
    ///
    /// # Errors
    /// [`Kind::Usage`]: a path is that of a file and of a directory, or of two files.
    pub(crate) fn with_files(files: &[(&'a str, FileNode<'a>)]) -> Result<TreeFolder<'a>> {
        let mut root = TreeFolder::default();
        for (path, node) in files {
            root.add(path, *node).ok_or_else(|| {
                let text = format!("restic: {path:?} is the path of several files");
                Error::new(Kind::Usage, text).with_remedy("choose another path")
            })?;
        }
        Ok(root)
    }

    fn add(&mut self, path: &'a str, node: FileNode<'a>) -> Option<()> {
        match path.split_once('/') {
            None => {
                let before = self.0.insert(path, TreeEntry::File(node));
                before.is_none().then_some(())
            }
            Some((folder, rest)) => {
                let entry = self.0.entry(folder);
                match entry.or_insert_with(|| TreeEntry::Folder(TreeFolder::default())) {
                    TreeEntry::Folder(folder) => folder.add(rest, node),
                    TreeEntry::File(_) => None,
                }
            }
        }
    }

    /// Saves the directories, the lowest first, and returns the digest of this one.
    ///
    /// # Errors
    /// Those of `save`.
    pub(crate) fn save(&self, save: &impl Fn(&[u8]) -> Result<Digest>) -> Result<Digest> {
        let mut nodes = Vec::with_capacity(self.0.len());
        let mut room = 1 << 10;
        for (name, entry) in &self.0 {
            let node = match entry {
                TreeEntry::File(file) => {
                    room += 512 + 67 * file.content.len();
                    let node = node(name, "file", FILE_MODE, file.time, file.owner);
                    NodeText {
                        size: Some(file.size),
                        links: Some(1),
                        content: Some(file.content),
                        ..node
                    }
                }
                TreeEntry::Folder(folder) => {
                    let subtree = Some(folder.save(save)?);
                    let (time, owner) = folder.newest().unwrap_or_default();
                    NodeText { subtree, ..node(name, "dir", FOLDER_MODE, time, owner) }
                }
            };
            nodes.push(node);
        }
        let mut text = Vec::with_capacity(room);
        serde_json::to_writer(&mut text, &TreeText { nodes }).map_err(unserialized)?;
        text.push(b'\n');
        save(&text)
    }

    /// Time and owner of the newest file.
    fn newest(&self) -> Option<(Timestamp, [u32; 2])> {
        let newest = self.0.values().filter_map(|entry| match entry {
            TreeEntry::File(file) => Some((file.time, file.owner)),
            TreeEntry::Folder(folder) => folder.newest(),
        });
        newest.max()
    }
}

fn node<'a>(
    name: &str,
    kind: &'static str,
    mode: u32,
    time: Timestamp,
    [uid, gid]: [u32; 2],
) -> NodeText<'a> {
    NodeText {
        // restic writes names as strings of the language Go.
        name: name.replace('\\', "\\\\").replace('"', "\\\""),
        kind,
        mode,
        mtime: time,
        atime: time,
        ctime: time,
        uid,
        gid,
        size: None,
        links: None,
        content: None,
        subtree: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_read_back() {
        let content = [Digest::of(b"a"), Digest::of(b"b")];
        let time = Timestamp::UNIX_EPOCH;
        let file = FileNode { size: 7, content: &content, time, owner: [1, 2] };
        let files = [("vm/disks/a \"b\"\\", file), ("vm/disks/é", file), ("vm/x", file)];
        let root = TreeFolder::with_files(&files).unwrap();
        let saved = std::cell::RefCell::new(Vec::new());
        let save = |text: &[u8]| {
            saved.borrow_mut().push(crate::tree::parse(text).unwrap());
            Ok(Digest::of(text))
        };
        root.save(&save).unwrap();
        let saved = saved.into_inner();
        let names = |at: usize| saved[at].iter().map(|node| node.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(0), ["a \"b\"\\".as_bytes(), "é".as_bytes()]);
        assert_eq!(names(1), [&b"disks"[..], b"x"]);
        assert_eq!(names(2), [b"vm"]);
        assert_eq!((saved[0][0].size, &saved[0][0].content[..]), (7, &content[..]));
        for twice in [["a", "a"], ["a", "a/b"], ["a/b", "a"]] {
            let files = twice.map(|path| (path, file));
            assert!(TreeFolder::with_files(&files).is_err(), "{twice:?}");
        }
    }

    #[test]
    fn paths_are_checked() {
        assert_eq!(checked_path("/a/b.raw").unwrap(), "a/b.raw");
        for bad in ["", "/", "a//b", "a/../b", ".", "a\nb"] {
            assert_eq!(checked_path(bad).unwrap_err().kind(), Kind::Usage, "{bad}");
        }
    }
}
