//! Trees: the directories of a snapshot.

use blockhaul_block::{Error, Kind};
use blockhaul_wire::printable;
use serde::Deserialize;

use crate::digest::{Digest, hex_digit};
use crate::fault::{RepositoryFault, Result};
use crate::index::BlobKind;
use crate::repository::Repository;

/// Most directories within each other.
pub(crate) const DEPTH_MAX: usize = 4096;
/// Names in a message.
const SHOWN: usize = 20;

/// An entry of a directory.
#[derive(Debug)]
pub(crate) struct TreeNode {
    pub(crate) name: Vec<u8>,
    pub(crate) kind: String,
    /// Bytes of a file.
    pub(crate) size: u64,
    /// The blobs of a file, in order.
    pub(crate) content: Vec<Digest>,
    /// The entries of a directory.
    pub(crate) subtree: Option<Digest>,
}

#[derive(Deserialize)]
struct TreeBlob {
    #[serde(default)]
    nodes: Option<Vec<RawNode>>,
}

#[derive(Deserialize)]
struct RawNode {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    content: Option<Vec<Digest>>,
    #[serde(default)]
    subtree: Option<Digest>,
}

/// Reads the JSON of a tree. None: it is not that of a tree.
pub(crate) fn parse(text: &[u8]) -> Option<Vec<TreeNode>> {
    let found: TreeBlob = serde_json::from_slice(text).ok()?;
    let node = |node: RawNode| {
        let RawNode { name, kind, size, content, subtree } = node;
        let name = unquoted(&name)?;
        Some(TreeNode { name, kind, size, content: content.unwrap_or_default(), subtree })
    };
    found.nodes.unwrap_or_default().into_iter().map(node).collect()
}

impl TreeNode {
    /// The name for users.
    pub(crate) fn shown(&self) -> String {
        printable(&self.name, usize::MAX)
    }
}

/// The entries of a directory.
///
/// # Errors
/// No index has the blob, or it is damaged.
pub(crate) fn load(repository: &Repository, tree: &Digest) -> Result<Vec<TreeNode>> {
    let (pack, text) = repository.blob(BlobKind::Tree, tree)?;
    parse(&text).ok_or_else(|| RepositoryFault::blob(&pack, tree, "it is not the JSON of a tree"))
}

/// The file with this path below the root of a snapshot.
///
/// # Errors
/// There is none, or it is no regular file, with what is there; a directory cannot be read.
pub(crate) fn find(repository: &Repository, root: &Digest, path: &str) -> Result<TreeNode> {
    let mut nodes = load(repository, root)?;
    let mut walked = String::new();
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    for _ in 0..DEPTH_MAX {
        let Some(part) = parts.next() else {
            return Err(incomplete(&walked, &nodes));
        };
        let Some(place) = nodes.iter().position(|node| node.name == part.as_bytes()) else {
            return Err(absent(&walked, part, &nodes));
        };
        let node = nodes.swap_remove(place);
        walked += &format!("/{part}");
        match (&node.kind[..], node.subtree) {
            ("dir", Some(subtree)) => nodes = load(repository, &subtree)?,
            ("file", None) if parts.next().is_none() => return Ok(node),
            (kind, _) => return Err(no_file(&walked, kind)),
        }
    }
    Err(no_file(&walked, "a directory in too many others"))
}

fn incomplete(walked: &str, nodes: &[TreeNode]) -> RepositoryFault {
    let place = if walked.is_empty() { "the description names no path" } else { walked };
    let what = if walked.is_empty() { "" } else { " is a directory" };
    let error = Error::new(Kind::Usage, format!("{place}{what}"));
    error.with_remedy(offer(walked, nodes)).into()
}

fn absent(walked: &str, part: &str, nodes: &[TreeNode]) -> RepositoryFault {
    let text = format!("the snapshot has no {walked}/{part}");
    Error::new(Kind::NotFound, text).with_remedy(offer(walked, nodes)).into()
}

fn no_file(walked: &str, kind: &str) -> RepositoryFault {
    let text = format!("{walked} in the snapshot is no regular file ({kind})");
    Error::new(Kind::Usage, text).with_remedy("choose the file of a disk").into()
}

/// The remedy of an error about a path: the names in the directory.
fn offer(walked: &str, nodes: &[TreeNode]) -> String {
    if nodes.is_empty() {
        return "choose another path: the directory is empty".to_owned();
    }
    let shown = |node: &TreeNode| {
        format!("{}{}", node.shown(), if node.subtree.is_some() { "/" } else { "" })
    };
    let names: Vec<_> = nodes.iter().take(SHOWN).map(shown).collect();
    let more = nodes.len().saturating_sub(SHOWN);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("write a path; {walked}/ has {}{more}", names.join(", "))
}

/// The name of an entry, which is written as a string of the language Go. None: it is not one.
fn unquoted(text: &str) -> Option<Vec<u8>> {
    let mut name = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'\\' {
            name.push(first);
            continue;
        }
        let (&escape, tail) = rest.split_first()?;
        rest = tail;
        let (digits, radix) = match escape {
            b'x' => (2, 16),
            b'u' => (4, 16),
            b'U' => (8, 16),
            b'0'..=b'7' => {
                // The letter is the first digit.
                name.push(
                    u8::try_from(number(&[&[escape][..], rest.get(..2)?].concat(), 8)?).ok()?,
                );
                rest = &rest[2..];
                continue;
            }
            _ => {
                name.push(plain_escape(escape)?);
                continue;
            }
        };
        let value = number(rest.get(..digits)?, radix)?;
        rest = &rest[digits..];
        if digits == 2 {
            name.push(u8::try_from(value).ok()?);
        } else {
            name.extend_from_slice(char::from_u32(value)?.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }
    Some(name)
}

fn number(digits: &[u8], radix: u32) -> Option<u32> {
    digits.iter().try_fold(0_u32, |number, digit| {
        let digit = u32::from(hex_digit(*digit)?);
        (digit < radix).then(|| number.checked_mul(radix)?.checked_add(digit)).flatten()
    })
}

fn plain_escape(escape: u8) -> Option<u8> {
    Some(match escape {
        b'a' => 7,
        b'b' => 8,
        b't' => b'\t',
        b'n' => b'\n',
        b'v' => 11,
        b'f' => 12,
        b'r' => b'\r',
        b'\\' | b'"' | b'\'' => escape,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_escapes_of_go() {
        let good: [(&str, &[u8]); 7] = [
            ("disk.raw", b"disk.raw"),
            (r"a\\b\tc", b"a\\b\tc"),
            (r#"\"q\""#, b"\"q\""),
            (r"\xff\x00", b"\xff\0"),
            (r"\u00e9é", "éé".as_bytes()),
            (r"\U0001f600", "😀".as_bytes()),
            (r"\101", b"A"),
        ];
        for (text, name) in good {
            assert_eq!(unquoted(text).unwrap(), name, "{text}");
        }
        for bad in
            ["\\", r"\x", r"\xf", r"\xzz", r"\u12", r"\ud800", r"\U00110000", r"\9", r"\777", r"\q"]
        {
            assert_eq!(unquoted(bad), None, "{bad}");
        }
    }

    #[test]
    fn trees_may_have_no_entries() {
        assert!(parse(b"{\"nodes\":null}").unwrap().is_empty());
        assert!(parse(b"{\"nodes\":[{\"name\":\"a\"}]}").is_none());
        assert!(parse(b"[").is_none());
    }
}
