//! The record of an upload: its identifier at the service, and the parts that the service has. A copy that was killed
//! continues with it. The file is text:
//!
//! ```text
//! blockhaul upload 1
//! object s3://BUCKET/NAME
//! size BYTES
//! part BYTES
//! id IDENTIFIER OF THE UPLOAD
//! sent NUMBER SHA-256 IDENTIFIER OF THE PART
//! ```
//!
//! A line without an end, as a crash leaves it, does not count. A part is used only if its content has the same digest
//! now, and if the service confirms it when the object is completed.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};
use object_store::multipart::PartId;
use rustix::fs::{FlockOperation, flock};

const HEAD: &str = "blockhaul upload 1\n";
/// Largest record: that of 10,000 parts has less than 3 MB.
const RECORD_MAX: u64 = 16 << 20;

/// The SHA-256 of a part.
pub(crate) type PartDigest = [u8; 32];

/// The object that an upload makes, and its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UploadTarget {
    pub(crate) name: String,
    /// Bytes of the object, and of each part but the last one.
    pub(crate) size: u64,
    pub(crate) part: u64,
}

/// An open record.
#[derive(Debug)]
pub(crate) struct UploadRecord {
    path: PathBuf,
    file: File,
    /// Bytes of all valid lines.
    len: u64,
    pub(crate) id: String,
    /// The parts that the service has.
    pub(crate) sent: BTreeMap<u64, (PartDigest, PartId)>,
}

impl UploadRecord {
    /// Opens the record of this upload, if there is one. Blocks.
    ///
    /// # Errors
    /// The file cannot be read, is in use, or is no record of this upload.
    pub(crate) fn open(path: &Path, target: &UploadTarget) -> Result<Option<UploadRecord>> {
        let found = UploadRecord::read(path)?;
        let Some((record, earlier)) = found else { return Ok(None) };
        if earlier != *target {
            let text = format!("{}: it is the record of another upload", path.display());
            let remedy = "continue with the same source and target, or begin anew with --restart";
            return Err(Error::new(Kind::Invalid, text).with_remedy(remedy));
        }
        Ok(Some(record))
    }

    /// Opens a record, whichever upload it is of. Blocks.
    ///
    /// # Errors
    /// The file cannot be read, is in use, or is no record.
    pub(crate) fn read(path: &Path) -> Result<Option<(UploadRecord, UploadTarget)>> {
        let failed = |error| failed("read", path, error);
        let opened = OpenOptions::new().read(true).write(true).open(path);
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        lock(&file, path)?;
        let mut bytes = Vec::new();
        (&file).take(RECORD_MAX).read_to_end(&mut bytes).map_err(failed)?;
        let Some((len, target, id, sent)) = parse(&bytes) else {
            let text = format!("{} is no record of an upload", path.display());
            let remedy = "choose another name for the journal, or remove the file";
            return Err(Error::new(Kind::Invalid, text).with_remedy(remedy));
        };
        Ok(Some((UploadRecord { path: path.to_owned(), file, len, id, sent }, target)))
    }

    /// Creates the record of an upload that has begun. Blocks.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn create(path: &Path, target: &UploadTarget, id: &str) -> Result<UploadRecord> {
        let UploadTarget { name, size, part } = target;
        let text = format!("{HEAD}object {name}\nsize {size}\npart {part}\nid {id}\n");
        let mut fresh = path.as_os_str().to_owned();
        fresh.push(format!(".{}.new", std::process::id()));
        let fresh = PathBuf::from(fresh);
        // The file is complete or absent.
        let made = (|| {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).open(&fresh)?;
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&fresh, path)?;
            blockhaul_io::sync_folder(path)?;
            Ok(file)
        })();
        let file = made.map_err(|error| {
            // An upload that cannot be recorded leaves no file behind.
            let _ = std::fs::remove_file(&fresh);
            failed("write", path, error)
        })?;
        let (len, id, sent) = (text.len() as u64, id.to_owned(), BTreeMap::new());
        Ok(UploadRecord { path: path.to_owned(), file, len, id, sent })
    }

    /// Records that the service has a part, and makes that durable. Blocks.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn add(&mut self, number: u64, digest: &PartDigest, part: &PartId) -> Result<()> {
        if part.content_id.contains(char::is_control) {
            // It would not be read as one line: the part is sent again.
            return Ok(());
        }
        let text = format!("sent {number} {} {}\n", hex(digest), part.content_id);
        // A torn line of an earlier run may be longer.
        let cut = self.file.set_len(self.len);
        cut.and_then(|()| self.file.write_all_at(text.as_bytes(), self.len))
            .and_then(|()| self.file.sync_data())
            .map_err(|error| failed("write", &self.path, error))?;
        self.len += text.len() as u64;
        Ok(())
    }

    /// Removes the file. Blocks.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub(crate) fn remove(&self) -> Result<()> {
        let removed = std::fs::remove_file(&self.path);
        removed
            .and_then(|()| blockhaul_io::sync_folder(&self.path))
            .map_err(|error| failed("remove", &self.path, error))
    }
}

/// The valid lines of a record: their length in bytes, the target, the identifier, and the parts.
type RecordContent = (u64, UploadTarget, String, BTreeMap<u64, (PartDigest, PartId)>);

fn parse(bytes: &[u8]) -> Option<RecordContent> {
    let mut lines = RecordLines { rest: bytes.strip_prefix(HEAD.as_bytes())?, len: HEAD.len() };
    let name = lines.field("object")?.to_owned();
    let (size, part) = (lines.field("size")?.parse().ok()?, lines.field("part")?.parse().ok()?);
    let id = lines.field("id")?.to_owned();
    let mut sent = BTreeMap::new();
    loop {
        let len = lines.len as u64;
        // What follows a damaged line does not count, and is overwritten.
        let Some((number, part_sent)) = lines.field("sent").and_then(sent_part) else {
            return Some((len, UploadTarget { name, size, part }, id, sent));
        };
        sent.insert(number, part_sent);
    }
}

/// The lines of a record that were not read yet.
struct RecordLines<'a> {
    rest: &'a [u8],
    /// Bytes that were read.
    len: usize,
}

impl<'a> RecordLines<'a> {
    /// The value in the next line, which begins with this name.
    fn field(&mut self, name: &str) -> Option<&'a str> {
        let end = self.rest.iter().position(|byte| *byte == b'\n')?;
        let (line, rest) = self.rest.split_at(end);
        let value = std::str::from_utf8(line).ok()?.strip_prefix(name)?.strip_prefix(' ')?;
        self.rest = &rest[1..];
        self.len += end + 1;
        Some(value)
    }
}

fn sent_part(text: &str) -> Option<(u64, (PartDigest, PartId))> {
    let (number, rest) = text.split_once(' ')?;
    let (digest, content_id) = rest.split_once(' ')?;
    let part = PartId { content_id: content_id.to_owned() };
    Some((number.parse().ok()?, (unhex(digest)?, part)))
}

fn hex(digest: &PartDigest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<PartDigest> {
    let byte = |at: usize| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..text.len() / 2).map(byte).collect();
    bytes?.try_into().ok()
}

fn lock(file: &File, path: &Path) -> Result<()> {
    flock(file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        let text = format!("{} is in use by another copy", path.display());
        Error::new(Kind::Invalid, text).with_remedy("wait for its end")
    })
}

fn failed(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::system(format!("cannot {what} the record {}", path.display()), error)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    fn target() -> UploadTarget {
        UploadTarget { name: "s3://b/a b".to_owned(), size: 20, part: 8 }
    }

    fn part(number: u64) -> (PartDigest, PartId) {
        ([number as u8; 32], PartId { content_id: format!("\"{number} x\"") })
    }

    fn numbers(path: &Path) -> Vec<u64> {
        let record = UploadRecord::open(path, &target()).unwrap().unwrap();
        assert_eq!(record.id, "an id");
        let is_right = |(number, sent): (&u64, &(PartDigest, PartId))| {
            let (digest, id) = part(*number);
            sent.0 == digest && sent.1.content_id == id.content_id
        };
        assert!(record.sent.iter().all(is_right));
        record.sent.into_keys().collect()
    }

    #[test]
    fn parts_are_read_again_up_to_the_first_damage() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("j.upload");
        assert!(UploadRecord::open(&path, &target()).unwrap().is_none());
        let mut record = UploadRecord::create(&path, &target(), "an id").unwrap();
        for number in 0..3 {
            let (digest, id) = part(number);
            record.add(number, &digest, &id).unwrap();
        }
        let busy = UploadRecord::open(&path, &target()).unwrap_err();
        assert!(busy.to_string().contains("in use"));
        drop(record);
        assert_eq!(numbers(&path), [0, 1, 2]);
        let other = UploadTarget { size: 21, ..target() };
        assert!(UploadRecord::open(&path, &other).unwrap_err().to_string().contains("another"));
        // Each length that a crash can leave.
        let whole = std::fs::read(&path).unwrap();
        let head = whole.windows(5).position(|text| text == b"sent ").unwrap();
        for len in head..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let known = numbers(&path);
            assert!(known.len() < 3 && known == (0..known.len() as u64).collect::<Vec<_>>());
            let mut record = UploadRecord::open(&path, &target()).unwrap().unwrap();
            let (digest, id) = part(9);
            record.add(9, &digest, &id).unwrap();
            drop(record);
            assert!(numbers(&path).ends_with(&[9]));
        }
        std::fs::write(&path, "text").unwrap();
        assert!(UploadRecord::open(&path, &target()).unwrap_err().is_complete());
    }
}
