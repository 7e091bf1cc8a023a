//! The names of files in a store, and how they are read and replaced.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};

/// The list of points.
pub(crate) const MANIFEST: &str = "manifest.json";
/// The description of the point that is being made.
pub(crate) const UNFINISHED: &str = "unfinished.json";
/// The record of increments that become one.
pub(crate) const JOINING: &str = "joining.json";
/// The file that the one program that changes the store has locked.
pub(crate) const LOCK: &str = "lock";
/// The file in which readers lock the byte at the number of the point that they read.
pub(crate) const READERS: &str = "readers";

/// Endings of the files of a point.
pub(crate) const RAW: &str = "raw";
pub(crate) const RANGES: &str = "ranges";
pub(crate) const DIGESTS: &str = "digests";
pub(crate) const JOURNAL: &str = "journal";

/// The file of a point with this number.
pub(crate) fn numbered(dir: &Path, number: u32, ending: &str) -> PathBuf {
    dir.join(format!("{number:06}.{ending}"))
}

/// The number in the name of a file of a point.
pub(crate) fn number_of(name: &str) -> Option<u32> {
    let (number, ending) = name.split_once('.')?;
    let ending = ending.trim_end_matches(TEMPORARY);
    let is_one = number.len() >= 6
        && number.bytes().all(|byte| byte.is_ascii_digit())
        && [RAW, RANGES, DIGESTS, JOURNAL].contains(&ending);
    is_one.then(|| number.parse().ok()).flatten()
}

/// Whether the name is one that a store gives to its files.
pub(crate) fn is_own(name: &str) -> bool {
    let plain = name.trim_end_matches(TEMPORARY);
    [MANIFEST, UNFINISHED, JOINING, LOCK, READERS].contains(&plain) || number_of(name).is_some()
}

/// Ending of files that are not complete.
const TEMPORARY: &str = ".tmp";

/// Reads a text of at most `most` bytes; `None`: there is no such file.
pub(crate) fn read(path: &Path, most: u64) -> Result<Option<String>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("cannot open", path, error)),
    };
    let mut text = String::new();
    let read = file.take(most.saturating_add(1)).read_to_string(&mut text);
    let len = read.map_err(|error| failed("cannot read", path, error))?;
    if len as u64 > most {
        let text = format!("{} is longer than {most} bytes", path.display());
        return Err(Error::new(Kind::Invalid, text));
    }
    Ok(Some(text))
}

/// Replaces a file, durably: after a crash it has either the old contents or the new ones.
pub(crate) fn replace(path: &Path, text: &[u8]) -> Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(TEMPORARY);
    let fresh = PathBuf::from(name);
    let written = || -> std::io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(&fresh)?;
        file.write_all(text)?;
        file.sync_all()?;
        std::fs::rename(&fresh, path)?;
        blockhaul_io::sync_folder(path)
    };
    written().map_err(|error| {
        // A full file system gets its space back.
        let _ = std::fs::remove_file(&fresh);
        failed("cannot write", path, error)
    })
}

/// Makes the contents of a file durable.
pub(crate) fn sync(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|file| file.sync_all());
    synced.map_err(|error| failed("cannot sync", path, error))
}

/// Removes a file, if there is one.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(failed("cannot remove", path, error))
        }
        _ => Ok(()),
    }
}

/// The error of a system call on a file.
pub(crate) fn failed(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::system(format!("{what} {}", path.display()), error)
}
