//! Finds what uses a block device that cannot be opened exclusively, for the message.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind};

use super::identity::{folder, number};

/// The error of O_EXCL on the block device with this number.
pub(super) fn error(device: u64) -> Error {
    let mut devices = vec![(device, folder(device))];
    // A disk is in use if one of its partitions is.
    let parts = fs::read_dir(folder(device)).into_iter().flatten().flatten();
    let parts = parts.map(|entry| entry.path()).filter(|part| part.join("partition").exists());
    devices.extend(parts.filter_map(|part| Some((number(&part)?, part))));
    let mounts = devices.iter().flat_map(|(device, _)| mounts(*device));
    let swap = devices.iter().filter(|(device, _)| is_swap(*device)).map(|_| "swap".to_string());
    let holders = devices.iter().flat_map(|(_, node)| holders(node));
    let mut users: Vec<_> = mounts.chain(swap).chain(holders).collect();
    users.dedup();
    let text = match &users[..] {
        [] => "the block device is in use: another program has opened it exclusively: end that program, or \
               choose another target"
            .to_string(),
        users => format!(
            "the block device is in use ({}): unmount it or stop its user, or choose another target",
            users.join(", ")
        ),
    };
    Error::new(Kind::InUse, text)
}

/// Where it is mounted, in this mount namespace.
fn mounts(device: u64) -> Vec<String> {
    // Mount points are bytes, some escaped as octal numbers.
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let lines = table.split(|&byte| byte == b'\n');
    let mounted = lines.filter_map(|line| {
        let words: Vec<_> = line.split(|&byte| byte == b' ').collect();
        let place = words.get(4)?;
        let source =
            words.iter().position(|word| *word == b"-").and_then(|at| words.get(at + 2))?;
        let source = PathBuf::from(std::ffi::OsStr::from_bytes(&unescaped(source)));
        let listed = String::from_utf8_lossy(words.get(2)?);
        let mounted =
            listed == format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        // File systems on several devices have a separate number.
        (mounted || is_node(&source, device))
            .then(|| format!("mounted on {}", String::from_utf8_lossy(&unescaped(place))))
    });
    mounted.collect()
}

fn is_swap(device: u64) -> bool {
    let table = fs::read("/proc/swaps").unwrap_or_default();
    let mut files = table.split(|&byte| byte == b'\n').skip(1).filter_map(|line| {
        let file = line.split(|byte| byte.is_ascii_whitespace()).next()?;
        Some(PathBuf::from(std::ffi::OsStr::from_bytes(&unescaped(file))))
    });
    files.any(|file| is_node(&file, device))
}

/// Devices on top of it: volumes, RAIDs.
fn holders(node: &Path) -> Vec<String> {
    let holders = fs::read_dir(node.join("holders")).into_iter().flatten().flatten();
    let named = holders.map(|entry| {
        let node = entry.file_name().to_string_lossy().into_owned();
        match fs::read_to_string(entry.path().join("dm/name")) {
            Ok(name) => format!("part of {} ({node})", name.trim()),
            Err(_) => format!("part of {node}"),
        }
    });
    named.collect()
}

fn is_node(path: &Path, device: u64) -> bool {
    path.is_absolute() && super::identity(path) == Some((device, 0))
}

/// The bytes of a word in a kernel table, where `\040` is a space.
fn unescaped(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, behind)) = rest.split_first() {
        let octal = behind.get(..3).filter(|_| byte == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &behind[3..];
            }
            None => {
                bytes.push(byte);
                rest = behind;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_escapes_are_bytes() {
        for (word, bytes) in [("a\\040b\\134", "a b\\"), ("\\04", "\\04"), ("\\", "\\"), ("", "")] {
            assert_eq!(unescaped(word.as_bytes()), bytes.as_bytes(), "{word}");
        }
    }
}
