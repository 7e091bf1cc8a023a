//! Dirty bitmaps that outlive a server: a file for each export, in the directory of `--bitmaps`.
//!
//! A file is either *clean*, with what each bitmap shows, or *in use*, with their names only. It is
//! made in use, durably, before clients can write, and clean when they cannot any more. After a crash
//! it is in use still, and its bitmaps are *inconsistent*: they can only be removed. A file is a line of
//! JSON, and a line with its digest.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_catalog::DeviceSpec;
use blockhaul_io::{plain, read_regular_file};
use blockhaul_snapshot::DirtyBitmap;
use blockhaul_transfer::path_of;
use serde_json::{Value, json};

use crate::error::JobError;
use crate::export::OpenExport;

/// Version of the format.
const VERSION: u64 = 2;
/// The version of files without a digest.
const WITHOUT_DIGEST: u64 = 1;
/// Largest file that is read, in bytes: some million ranges.
const SIZE_MAX: u64 = 256 << 20;

/// The directory of the files.
pub struct BitmapFiles(PathBuf);

/// The bitmaps of a file.
#[derive(Default)]
pub struct StoredBitmaps {
    pub bitmaps: Vec<Arc<DirtyBitmap>>,
    /// Names of bitmaps that may lack writes, and why.
    pub inconsistent: Vec<(String, String)>,
}

impl BitmapFiles {
    /// The files in this directory, which must exist.
    ///
    /// # Errors
    /// If there is no such directory.
    pub fn new(directory: &Path) -> Result<BitmapFiles, JobError> {
        match fs::metadata(directory) {
            Ok(found) if found.is_dir() => Ok(BitmapFiles(directory.to_path_buf())),
            Ok(_) => Err(JobError::request(format!(
                "--bitmaps {}: it is not a directory",
                directory.display()
            ))),
            Err(error) => Err(JobError::request(format!(
                "--bitmaps {}: {}: create it first",
                directory.display(),
                plain(&error)
            ))),
        }
    }

    /// Reads the bitmaps of an export with a disk of `size` bytes.
    ///
    /// # Errors
    /// If the file cannot be read, or belongs to another device.
    pub fn read(&self, export: &str, device: &str, size: u64) -> Result<StoredBitmaps, JobError> {
        let path = self.path(export);
        let text = match read_regular_file(&path, SIZE_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(StoredBitmaps::default());
            }
            read => read,
        };
        let wrong = |why: &str| {
            JobError::other(format!(
                "cannot read the bitmaps in {}: {why}: move the file away, and make a full backup next",
                path.display()
            ))
        };
        let text = text.map_err(|error| wrong(&plain(&error)))?;
        let text = String::from_utf8(text).map_err(|error| wrong(&error.to_string()))?;
        let (line, digest) = text.split_once('\n').unwrap_or((&text, ""));
        let value: Value = serde_json::from_str(line).map_err(|error| wrong(&error.to_string()))?;
        let is_old = value["version"] == WITHOUT_DIGEST && digest.is_empty();
        if !is_old {
            if value["version"] != VERSION {
                return Err(wrong(&format!("it is not of version {VERSION}")));
            }
            check_digest(line, digest).map_err(|why| wrong(&format!("it {why}")))?;
        }
        let all = value["bitmaps"].as_array().ok_or_else(|| wrong("it has no list of bitmaps"))?;
        let doubt = doubt(&value, device, size)
            .or_else(|| is_old.then(|| "the file is of a version without a digest".to_string()));
        let mut kept = StoredBitmaps::default();
        for one in all {
            let name = one["name"].as_str().ok_or_else(|| wrong("a bitmap has no name"))?;
            let own = one["inconsistent"].as_str().map(String::from);
            match own.or_else(|| doubt.clone()) {
                Some(why) => kept.inconsistent.push((name.to_string(), why)),
                None => kept.bitmaps.push(restored(name, size, one).map_err(|why| wrong(&why))?),
            }
        }
        Ok(kept)
    }

    /// Writes the file of an export, durably; `clean`: with what the bitmaps show.
    ///
    /// # Errors
    /// If the file cannot be written or removed.
    pub fn write(&self, export: &OpenExport, clean: bool) -> Result<(), JobError> {
        let path = self.path(&export.name);
        let mut bitmaps = export.bitmaps().clone();
        bitmaps.retain(|bitmap| bitmap.is_kept());
        let inconsistent = export.inconsistent().clone();
        let written = if bitmaps.is_empty() && inconsistent.is_empty() {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                Err(_) => Ok(()),
                Ok(()) => blockhaul_io::sync_folder(&path),
            }
        } else {
            let size = export.device().map(|device| device.facts().size);
            let sound = bitmaps.iter().map(|bitmap| described(bitmap, clean));
            let broken =
                inconsistent.iter().map(|(name, why)| json!({ "name": name, "inconsistent": why }));
            let value = json!({
                "version": VERSION,
                "export": export.name,
                "device": identity(&export.storage()),
                "size": size,
                "state": if clean { "clean" } else { "in use" },
                "bitmaps": sound.chain(broken).collect::<Vec<_>>(),
            });
            replace(&path, with_digest(&value.to_string()).as_bytes())
        };
        written.map_err(|error| {
            let text = format!("cannot write the bitmaps to {}: {}", path.display(), plain(&error));
            JobError::other(text)
        })
    }

    /// The file of an export: its name, without characters that are special in file names.
    fn path(&self, export: &str) -> PathBuf {
        let mut name = String::from("bitmaps-");
        for byte in export.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => {
                    name.push(char::from(byte));
                }
                _ => name.push_str(&format!("%{byte:02X}")),
            }
        }
        self.0.join(name + ".json")
    }
}

/// The name of a device in a file of bitmaps: a file of the disk by its full path, so that the file may be
/// named otherwise the next time.
pub(crate) fn identity(device: &str) -> String {
    let path = DeviceSpec::parse(device.as_ref()).ok().and_then(|spec| path_of(&spec));
    match path.and_then(|path| fs::canonicalize(path).ok()) {
        Some(path) => path.display().to_string(),
        None => device.to_string(),
    }
}

/// Why no bitmap of a file can be trusted, if so.
fn doubt(value: &Value, device: &str, size: u64) -> Option<String> {
    if value["state"] != "clean" {
        return Some("the server did not end in order".to_string());
    }
    if value["size"] != size {
        return Some(format!("the disk had {} bytes", value["size"]));
    }
    let before = value["device"].as_str().unwrap_or_default();
    (before != device && before != identity(device)).then(|| format!("the device was {before}"))
}

fn restored(name: &str, size: u64, value: &Value) -> Result<Arc<DirtyBitmap>, String> {
    let granularity = value["granularity"].as_u64().ok_or("a bitmap has no granularity")?;
    let bitmap = DirtyBitmap::new(name, size, granularity).map_err(|error| error.to_string())?;
    let dirty = value["dirty"].as_array().ok_or("a bitmap has no list of dirty ranges")?;
    for range in dirty {
        let at = range[0].as_u64();
        let len = range[1].as_u64();
        let range =
            at.zip(len).filter(|(at, len)| at.checked_add(*len).is_some_and(|end| end <= size));
        let (at, len) = range.ok_or("a dirty range is not in the disk")?;
        bitmap.set(at, len);
    }
    bitmap.enable(value["enabled"] != false);
    Ok(Arc::new(bitmap))
}

fn described(bitmap: &DirtyBitmap, clean: bool) -> Value {
    let mut value = json!({
        "name": bitmap.name(),
        "granularity": bitmap.granularity(),
        "enabled": bitmap.is_enabled(),
    });
    if clean {
        value["dirty"] = json!(bitmap.unsettled_ranges());
    }
    value
}

/// A line, and one with its digest.
pub(crate) fn with_digest(line: &str) -> String {
    format!("{line}\n{}\n", blake3::hash(line.as_bytes()).to_hex())
}

/// Checks the digest of a line, which is in the next one. An error says what the file is or has.
pub(crate) fn check_digest(line: &str, digest: &str) -> Result<(), String> {
    if digest.trim_end() == blake3::hash(line.as_bytes()).to_hex().as_str() {
        Ok(())
    } else {
        Err("is damaged: its digest does not match".to_string())
    }
}

/// Replaces a file durably; only its owner can read it.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut fresh = path.as_os_str().to_os_string();
    fresh.push(".new");
    let fresh = PathBuf::from(fresh);
    let written = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&fresh, path))
        .and_then(|()| blockhaul_io::sync_folder(path));
    if written.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    written
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_may_be_named_otherwise_the_next_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        fs::write(&path, "x").unwrap();
        let other = dir.path().join("./../").join(dir.path().file_name().unwrap()).join("disk.raw");
        let [path, other] = [path, other].map(|path| path.display().to_string());
        let clean = json!({ "state": "clean", "size": 1, "device": identity(&path) });
        assert_eq!(doubt(&clean, &other, 1), None);
        let elsewhere = other.replace("disk.raw", "gone.raw");
        assert!(doubt(&clean, &elsewhere, 1).unwrap().contains("the device was"));
        let memory = json!({ "state": "clean", "size": 1, "device": identity("memory:1") });
        assert_eq!(doubt(&memory, "memory:1", 1), None);
    }
}
