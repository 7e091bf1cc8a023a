//! The journal of a copy: which segments are durable on the target, so that a copy that was killed
//! goes on where it was.
//!
//! An append-only file: a header that says what is copied where, then records of 32 bytes, each with a
//! checksum over its content, its place and the journal's own random name. A record is written only
//! after the segment's writes have completed and the connection that wrote them has been flushed
//! after that, and is itself made durable before the next batch. What follows the first record that
//! does not check is what a crash has left of the last batch, and is discarded: its segments are
//! copied again.

mod format;

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use rustix::fs::{FlockOperation, flock};

use self::format::{HEADER, MAGIC, RECORD, Record, recover};
pub(crate) use self::format::{Identity, Recorded};

/// Where a journal is kept, and what tells the two sides of the copy from others.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// The file. It is made by the first run, read by the next ones and removed after success.
    pub path: PathBuf,
    /// Begin anew, whatever the journal says.
    pub restart: bool,
    /// Leave it there after success: whoever asked for it removes it.
    pub keep: bool,
    /// Longest time for which finished segments wait for a flush and their records.
    pub interval: Duration,
    /// What is copied: a name, and whatever changes when it does (inode, time of change).
    pub source: String,
    /// Where to: a name, and what tells the storage from another under this name (inode).
    pub target: String,
}

/// An open journal.
pub(crate) struct Journal {
    path: PathBuf,
    id: [u8; 16],
    batch: AtomicU32,
    file: Arc<Mutex<Tail>>,
}

struct Tail {
    file: File,
    /// Records so far.
    count: u64,
    /// Why nothing more is recorded.
    broken: Option<String>,
}

impl Journal {
    /// Begins a journal, or goes on with the one that is there. Blocks.
    pub(crate) fn open(options: &JournalOptions, wanted: &Identity) -> Result<(Journal, Recorded)> {
        let wanted = wanted.clone().shortened();
        let path = &options.path;
        if options.restart {
            discard_journal(path)?;
        }
        match there(path)? {
            Some(file) => Journal::go_on(file, path, &wanted),
            None => Ok((Journal::begin(path, &wanted)?, Recorded::default())),
        }
    }

    /// Bytes of a segment in the journal that is there and is gone on with. Blocks.
    pub(crate) fn segment_there(options: &JournalOptions) -> Option<u64> {
        let file = there(&options.path).ok().flatten().filter(|_| !options.restart)?;
        let mut header = Vec::with_capacity(HEADER);
        file.take(HEADER as u64).read_to_end(&mut header).ok()?;
        Identity::decode(&header).ok().map(|(_, found)| found.segment)
    }

    fn begin(path: &Path, wanted: &Identity) -> Result<Journal> {
        let id = random()?;
        // Complete or not there: the header gets its name when it is durable.
        let (fresh, mut file) = make_fresh(path, &id)?;
        lock(&file, path)?;
        let made = file
            .write_all(&wanted.encode(&id))
            .and_then(|()| file.sync_all())
            .and_then(|()| std::fs::rename(&fresh, path))
            .and_then(|()| blockhaul_io::sync_folder(path));
        made.map_err(|error| {
            // A copy that could not begin leaves nothing behind.
            let _ = std::fs::remove_file(&fresh);
            failed("write", path, error)
        })?;
        Ok(Journal::new(path, id, file, 0, 0))
    }

    fn go_on(mut file: File, path: &Path, wanted: &Identity) -> Result<(Journal, Recorded)> {
        lock(&file, path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|error| failed("read", path, error))?;
        let (id, found) = Identity::decode(&bytes).map_err(|why| refused(path, &why))?;
        if let Some(why) = found.differs(wanted) {
            let text = format!("{why}; use --restart to copy everything anew");
            return Err(refused(path, &text));
        }
        let records = recover(&bytes, &id);
        let segments = wanted.range.1.div_ceil(wanted.segment);
        let known = records.iter().take_while(|record| record.end() <= segments);
        let records: Vec<_> = known.copied().collect();
        // The torn tail goes, so that what is appended follows what checks.
        let len = (HEADER + records.len() * RECORD) as u64;
        file.set_len(len).map_err(|error| failed("cut", path, error))?;
        let batch = records.iter().map(|record| record.batch).max().unwrap_or(0);
        let journal = Journal::new(path, id, file, records.len() as u64, batch);
        Ok((journal, Recorded::of(&records)))
    }

    fn new(path: &Path, id: [u8; 16], file: File, count: u64, batch: u32) -> Journal {
        let tail = Tail { file, count, broken: None };
        let batch = AtomicU32::new(batch);
        Journal { path: path.to_owned(), id, batch, file: Arc::new(Mutex::new(tail)) }
    }

    /// Records segments as durable, durably: the first of each range, the one behind its last, and
    /// whether there is content. An error says why the journal is of no more use; the copy itself need
    /// not fail.
    pub(crate) async fn append(
        &self,
        lane: u32,
        segments: Vec<(u64, u64, bool)>,
    ) -> Result<(), String> {
        if segments.is_empty() {
            return Ok(());
        }
        let batch = self.batch.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let (id, file) = (self.id, self.file.clone());
        let appended = blockhaul_io::offload(move || {
            let mut tail = file.lock().expect("no panic under this lock");
            if let Some(why) = &tail.broken {
                return Err(why.clone());
            }
            let mut bytes = Vec::with_capacity(segments.len() * RECORD);
            let mut index = tail.count;
            let of = |(first, end, content)| Record::of((first, end), content, batch, lane);
            for record in segments.into_iter().flat_map(of) {
                bytes.extend(record.encode(&id, index));
                index += 1;
            }
            let at = HEADER as u64 + tail.count * RECORD as u64;
            let written = tail.file.write_all_at(&bytes, at);
            match written.and_then(|()| tail.file.sync_data()) {
                Ok(()) => {
                    tail.count = index;
                    Ok(())
                }
                Err(error) => {
                    tail.broken = Some(error.to_string());
                    Err(error.to_string())
                }
            }
        });
        appended.await.unwrap_or_else(|lost| Err(lost.to_string()))
    }

    /// Removes the file: the copy is complete. Blocks.
    pub(crate) fn remove(&self) -> std::io::Result<()> {
        std::fs::remove_file(&self.path).and_then(|()| blockhaul_io::sync_folder(&self.path))
    }
}

/// Finds out whether a journal can be begun under this name, or the one that is there be gone on with.
/// For who is about to empty a target, and would learn only then that it cannot: nothing is left behind,
/// and a journal that is there stays as it is. Blocks.
///
/// # Errors
/// What is there is no journal or is in use; or none can be made there.
pub fn check_journal(path: &Path, restart: bool) -> Result<()> {
    if let Some(mut old) = there(path)? {
        check_old(&mut old, path)?;
        if !restart {
            return Ok(());
        }
    }
    let (fresh, mut file) = make_fresh(path, &random()?)?;
    // As much as a journal begins with: a full disk makes files, but does not fill them.
    let written = file.write_all(&[0; HEADER]).and_then(|()| file.sync_all());
    let removed = std::fs::remove_file(&fresh);
    written.and(removed).map_err(|error| failed("write", path, error))
}

/// A file that will be the journal of this name. Its own name until then is nobody else's.
fn make_fresh(path: &Path, id: &[u8; 16]) -> Result<(PathBuf, File)> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(format!(".{:08x}.new", u128::from_be_bytes(*id) >> 96));
    let fresh = PathBuf::from(fresh);
    let made = OpenOptions::new().read(true).write(true).create_new(true).open(&fresh);
    let file = made.map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let path = path.display();
            let text = format!(
                "cannot make the journal {path}: make the folder that it is to lie in first"
            );
            Error::system(text, error)
        }
        _ => failed("make", path, error),
    })?;
    Ok((fresh, file))
}

/// Refuses somebody else's file, and a journal in use; else it is locked.
fn check_old(old: &mut File, path: &Path) -> Result<()> {
    let mut magic = [0; MAGIC.len()];
    if old.read_exact(&mut magic).is_err() || magic != *MAGIC {
        return Err(refused(path, "it is not a journal: choose another name"));
    }
    lock(old, path)
}

/// Removes the journal that is there, if there is one: what it recorded does not count any more. For
/// who is about to empty a target. Somebody else's file is not removed, and a journal in use neither.
/// Blocks.
pub fn discard_journal(path: &Path) -> Result<()> {
    let Some(mut old) = there(path)? else { return Ok(()) };
    check_old(&mut old, path)?;
    let removed = std::fs::remove_file(path).and_then(|()| blockhaul_io::sync_folder(path));
    removed.map_err(|error| failed("remove", path, error))
}

/// The file that is there. What is no regular file, as a device or a pipe, need not have an end.
fn there(path: &Path) -> Result<Option<File>> {
    match std::fs::metadata(path) {
        Ok(data) if data.is_file() || data.is_dir() => {}
        Ok(_) => return Err(refused(path, "it is not a regular file: choose another name")),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("open", path, error)),
    }
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("open", path, error)),
    }
}

fn lock(file: &File, path: &Path) -> Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(refused(path, "another copy is using it: wait for its end"))
        }
        Err(error) => Err(failed("lock", path, error.into())),
    }
}

fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let got = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty());
    got.map_err(|error| Error::system("cannot get random bytes", error.into()))?;
    Ok(bytes)
}

fn refused(path: &Path, why: &str) -> Error {
    Error::new(Kind::Invalid, format!("journal {}: {why}", path.display()))
}

fn failed(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::system(format!("cannot {what} the journal {}", path.display()), error)
}
