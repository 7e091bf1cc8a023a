//! The journal of a copy: which segments are durable on the target, so that a copy that was killed
//! can continue.
//!
//! An append-only file: a header that describes the copy, then records of 32 bytes, each with a
//! checksum over its content, its position and the journal's random ID. A record is written only
//! after the segment's writes have completed and the connection that wrote them has then been
//! flushed; it is itself made durable before the next batch. Everything from the first record with
//! a wrong checksum on is a torn batch of a crash and is discarded: its segments are copied again.
//! If more follows than a crash can leave, the file is damaged, and refused.
//!
//! What a copy discards at its source is recorded before. Its journal gets a last record that
//! everything is copied, and stays: a copy that began anew would copy what the discards have left.

mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod parts;

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use rustix::fs::{FlockOperation, flock};

use self::format::{HEADER, HeaderError, JournalRecord, RECORD, is_damaged, recover};
pub(crate) use self::format::{JournalContent, JournalIdentity};
pub(crate) use self::parts::SelectedParts;
use crate::marker::JournalPosition;

/// Where the journal is, and what identifies the two sides of the copy.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// The file: created by the first run, read by later ones and removed after success, unless
    /// something was discarded at the source.
    pub path: PathBuf,
    /// Start over, whatever the journal records.
    pub restart: bool,
    /// Keep the file after success; the caller removes it.
    pub keep: bool,
    /// Maximum time for which finished segments wait for a flush and their records.
    pub interval: Duration,
    /// The source: a name, and what changes when the source does (inode, modification time).
    pub source: String,
    /// The target: a name, and what distinguishes it from other storage of this name (inode).
    pub target: String,
}

/// An open journal.
pub(crate) struct Journal {
    path: PathBuf,
    id: [u8; 16],
    batch: AtomicU32,
    file: Arc<Mutex<JournalTail>>,
}

struct JournalTail {
    file: File,
    /// Records so far.
    count: u64,
    /// Number of the batch of the last of them.
    last: u32,
    /// Why recording has stopped.
    broken: Option<String>,
}

impl Journal {
    /// Creates a journal, or continues the existing one. Blocks.
    pub(crate) fn open(
        options: &JournalOptions,
        wanted: &JournalIdentity,
    ) -> Result<(Journal, JournalContent)> {
        let wanted = wanted.clone().shortened();
        let path = &options.path;
        if options.restart {
            discard_journal(path)?;
        }
        match there(path)? {
            Some(file) => Journal::go_on(file, path, &wanted),
            None => {
                let recorded =
                    JournalContent { place: wanted.place.clone(), ..JournalContent::default() };
                Ok((Journal::begin(path, &wanted)?, recorded))
            }
        }
    }

    /// What an existing journal that is to be continued says of its copy. Blocks.
    pub(crate) fn identity_there(options: &JournalOptions) -> Option<JournalIdentity> {
        let file = there(&options.path).ok().flatten().filter(|_| !options.restart)?;
        let mut header = Vec::with_capacity(HEADER);
        file.take(HEADER as u64).read_to_end(&mut header).ok()?;
        JournalIdentity::decode(&header).ok().map(|(_, found)| found)
    }

    /// Its random identifier.
    pub(crate) fn id(&self) -> [u8; 16] {
        self.id
    }

    fn begin(path: &Path, wanted: &JournalIdentity) -> Result<Journal> {
        let id = random_id()?;
        // The file is complete or absent: it is renamed into place when the header is durable.
        let (fresh, mut file) = make_fresh(path, &id)?;
        lock(&file, path)?;
        let made = file
            .write_all(&wanted.encode(&id))
            .and_then(|()| file.sync_all())
            .and_then(|()| std::fs::rename(&fresh, path))
            .and_then(|()| blockhaul_io::sync_folder(path));
        made.map_err(|error| {
            // A copy that cannot start leaves no file behind.
            let _ = std::fs::remove_file(&fresh);
            failed("write", path, error)
        })?;
        Ok(Journal::new(path, id, file, &[]))
    }

    fn go_on(
        mut file: File,
        path: &Path,
        wanted: &JournalIdentity,
    ) -> Result<(Journal, JournalContent)> {
        lock(&file, path)?;
        let found = ExistingJournal::read(&mut file, path)?;
        found.refuse_other(path, wanted)?;
        found.refuse_damaged(path)?;
        found.refuse_unmarked(path)?;
        let segments = wanted.range.1.div_ceil(wanted.segment);
        let is_complete = found.is_complete();
        let ExistingJournal { id, identity, records, rest, .. } = found;
        if is_complete {
            let journal = Journal::new(path, id, file, &records);
            let count = records.len() as u64;
            let everything = JournalContent::everything(segments);
            return Ok((
                journal,
                JournalContent { count, is_earlier: true, place: identity.place, ..everything },
            ));
        }
        let is_known = |record: &&JournalRecord| {
            record.end() <= segments || **record == JournalRecord::LEAVING
        };
        let known = records.iter().take_while(is_known);
        let records: Vec<_> = known.copied().collect();
        if rest > 0 && identity.discards {
            log::warn!(
                "journal {}: its last record is damaged, as after a crash: what it recorded is copied again",
                path.display()
            );
        }
        // Remove the torn tail, so that new records follow valid ones, also after the next crash.
        let len = (HEADER + records.len() * RECORD) as u64;
        file.set_len(len)
            .and_then(|()| file.sync_all())
            .map_err(|error| failed("cut", path, error))?;
        let journal = Journal::new(path, id, file, &records);
        journal.skip_batches()?;
        let recorded = JournalContent::of(&records, identity.discards);
        let JournalIdentity { zeroes_checked, place, .. } = identity;
        Ok((journal, JournalContent { is_earlier: true, zeroes_checked, place, ..recorded }))
    }

    fn new(path: &Path, id: [u8; 16], file: File, records: &[JournalRecord]) -> Journal {
        let batch = records.iter().map(|record| record.batch).max().unwrap_or(0);
        let last = records.last().map_or(0, |record| record.batch);
        let tail = JournalTail { file, count: records.len() as u64, last, broken: None };
        let batch = AtomicU32::new(batch);
        Journal { path: path.to_owned(), id, batch, file: Arc::new(Mutex::new(tail)) }
    }

    /// Leaves out a random count of batch numbers: earlier runs may have used some of which nothing is recorded.
    fn skip_batches(&self) -> Result<()> {
        let [low, high, ..] = random_id()?;
        let _ = self.batch.fetch_add(u32::from_be_bytes([0, 0, high, low]), Ordering::Relaxed);
        Ok(())
    }

    /// A number for a batch.
    pub(crate) fn next_batch(&self) -> u32 {
        // Numbers that are used up end at 2^32 batches, or 2^16 runs.
        self.batch.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// How far it is.
    pub(crate) fn position(&self) -> JournalPosition {
        let tail = self.file.lock().expect("no panic under this lock");
        JournalPosition { count: tail.count, last: tail.last, next: 0 }
    }

    /// Records segments as durable, and makes the records durable: the first of each range, the one
    /// after its last, and whether there is content. An error says why the journal cannot be used any more; the
    /// copy itself need not fail.
    pub(crate) async fn append(
        &self,
        (lane, batch): (u32, u32),
        segments: Vec<(u64, u64, bool)>,
    ) -> Result<(), String> {
        if segments.is_empty() {
            return Ok(());
        }
        let of = move |(first, end, content)| JournalRecord::of((first, end), content, batch, lane);
        self.write(segments.into_iter().flat_map(of).collect()).await
    }

    /// Records that everything is copied, and makes that durable. For a copy that discards what it
    /// records. Errors as for [`Journal::append`].
    pub(crate) async fn complete(&self) -> Result<(), String> {
        self.write(vec![JournalRecord::COMPLETE]).await
    }

    /// Records that all is recorded but what is copied last, and that the marker is about to be overwritten; makes
    /// that durable. Errors as for [`Journal::append`].
    pub(crate) async fn leave(&self) -> Result<(), String> {
        self.write(vec![JournalRecord::LEAVING]).await
    }

    /// Appends records, and makes them durable.
    async fn write(&self, records: Vec<JournalRecord>) -> Result<(), String> {
        let id = self.id;
        let file = self.file.clone();
        let appended = blockhaul_io::offload(move || {
            let mut tail = file.lock().expect("no panic under this lock");
            if let Some(why) = &tail.broken {
                return Err(why.clone());
            }
            let mut bytes = Vec::with_capacity(records.len() * RECORD);
            let mut index = tail.count;
            let last = records.last().map_or(tail.last, |record| record.batch);
            for record in records {
                bytes.extend(record.encode(&id, index));
                index += 1;
            }
            let at = HEADER as u64 + tail.count * RECORD as u64;
            let written = tail.file.write_all_at(&bytes, at);
            match written.and_then(|()| tail.file.sync_data()) {
                Ok(()) => {
                    (tail.count, tail.last) = (index, last);
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

    /// Removes the file after the copy is complete. Blocks.
    pub(crate) fn remove(&self) -> std::io::Result<()> {
        std::fs::remove_file(&self.path).and_then(|()| blockhaul_io::sync_folder(&self.path))
    }
}

/// Why a copy with a journal must not begin anew, and what else to do.
const DISCARDED: &str = "what it records was discarded at the source, and is on the target only, and a new \
                         copy would lack it: go on with the same sides and options";

/// The same for a copy whose journal is damaged.
const DAMAGED: &str = "what it recorded was discarded at the source, and is on the target only, and a new copy \
                       would lack it: keep both sides and the journal, and put an undamaged copy of its latest \
                       state in its place";

/// The same for a copy that is complete.
const COMPLETE: &str = "its copy is complete, and its source was discarded, so the target may be the only \
                        copy: use another journal and another target; remove this file only if the source has \
                        new contents";

/// The same for the journal of another copy that is complete.
const OTHER_COMPLETE: &str = "it is the journal of another copy, which is complete and has discarded its \
                              source, so its target may be the only copy: use another journal and another \
                              target";

/// The state of an existing journal of a copy that discards its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalState {
    /// Something is recorded, or may be.
    Begun,
    /// Everything is copied.
    Complete,
}

/// The state of the journal of this name. `None`: there is none, or it is not of a copy that discards
/// its source. Blocks.
///
/// # Errors
/// The file cannot be read, or is not a journal, or its header is damaged: what it says of the source is
/// not known then.
pub fn discarding_journal(path: &Path) -> Result<Option<JournalState>> {
    let Some(mut file) = there(path)? else { return Ok(None) };
    let found = ExistingJournal::read(&mut file, path)?;
    let state = if found.is_complete() { JournalState::Complete } else { JournalState::Begun };
    Ok(found.identity.discards.then_some(state))
}

/// Refuses the journal of this name unless it is that of the wanted copy. Returns its identifier, and what it has
/// recorded. Blocks.
pub(crate) fn check_identity(
    path: &Path,
    wanted: &JournalIdentity,
) -> Result<([u8; 16], JournalContent)> {
    let Some(mut file) = there(path)? else {
        return Err(refused(path, "it has just been removed: run the copy again"));
    };
    lock(&file, path)?;
    let found = ExistingJournal::read(&mut file, path)?;
    found.refuse_other(path, &wanted.clone().shortened())?;
    Ok((found.id, JournalContent::of(&found.records, found.identity.discards)))
}

/// An existing journal.
struct ExistingJournal {
    id: [u8; 16],
    identity: JournalIdentity,
    records: Vec<JournalRecord>,
    /// Bytes after the valid records.
    rest: usize,
    /// They are not what a crash leaves.
    is_damaged: bool,
}

impl ExistingJournal {
    /// Reads the whole file. Refuses one that is no journal, or whose header is damaged.
    fn read(file: &mut File, path: &Path) -> Result<ExistingJournal> {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|error| failed("read", path, error))?;
        let (id, identity) = decode(&bytes, path)?;
        let records = recover(&bytes, &id);
        let rest = bytes.len().saturating_sub(HEADER + records.len() * RECORD);
        let is_damaged = is_damaged(&bytes, &id, records.len());
        Ok(ExistingJournal { id, identity, records, rest, is_damaged })
    }

    /// Whether everything is copied, and may be discarded at the source.
    fn is_complete(&self) -> bool {
        self.identity.discards && self.records.contains(&JournalRecord::COMPLETE)
    }

    /// Refuses the journal of another copy than the wanted one.
    fn refuse_other(&self, path: &Path, wanted: &JournalIdentity) -> Result<()> {
        let Some(why) = self.identity.differs(wanted) else { return Ok(()) };
        let next = match self.identity.discards {
            true if self.is_complete() => OTHER_COMPLETE,
            true => DISCARDED,
            false => "use --restart to copy everything again",
        };
        Err(refused(path, &format!("{why}; {next}")))
    }

    /// Refuses a journal that no crash leaves so.
    fn refuse_damaged(&self, path: &Path) -> Result<()> {
        if !self.is_damaged {
            return Ok(());
        }
        let next =
            if self.identity.discards { DAMAGED } else { "use --restart to copy everything again" };
        let number = self.records.len() + 1;
        let at = HEADER + self.records.len() * RECORD;
        let text =
            format!("its record {number} (at offset {at}) is damaged, and valid ones follow");
        Err(refused(path, &format!("{text}: {next}")))
    }

    /// Refuses the journal of a copy that has left no marker on its target: whether both sides are the right
    /// ones is not known.
    fn refuse_unmarked(&self, path: &Path) -> Result<()> {
        if !self.identity.discards || self.identity.is_marked {
            return Ok(());
        }
        let text = "an earlier version has begun its copy with --discard-source, without a marker on the target: \
                    keep both sides and the journal, and complete the copy with that version";
        Err(refused(path, text))
    }
}

/// Checks whether a journal can be created under this name, or the existing one continued. For a
/// caller that is about to empty a target, and would find out too late. Leaves nothing behind, and
/// does not change an existing journal. Blocks.
///
/// # Errors
/// The existing file is not a journal, has a damaged header or is in use, or none can be created there.
/// [`Kind::Usage`]: it is not a regular file.
pub fn check_journal(path: &Path, restart: bool) -> Result<()> {
    if let Some(mut old) = there(path)? {
        check_old(&mut old, path)?;
        if !restart {
            return Ok(());
        }
        check_source_is_there(path)?;
    }
    let (fresh, mut file) = make_fresh(path, &random_id()?)?;
    // As much as a new journal writes: a full disk can create files, but not fill them.
    let written = file.write_all(&[0; HEADER]).and_then(|()| file.sync_all());
    let removed = std::fs::remove_file(&fresh);
    written.and(removed).map_err(|error| failed("write", path, error))
}

/// Creates the file that becomes the journal of this name, under a unique name of its own.
fn make_fresh(path: &Path, id: &[u8; 16]) -> Result<(PathBuf, File)> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(format!(".{:08x}.new", u128::from_be_bytes(*id) >> 96));
    let fresh = PathBuf::from(fresh);
    let made = OpenOptions::new().read(true).write(true).create_new(true).open(&fresh);
    let file = made.map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let text = format!("cannot create the journal {}", path.display());
            Error::system(text, error).with_remedy("create its directory first")
        }
        _ => failed("make", path, error),
    })?;
    Ok((fresh, file))
}

/// Refuses a foreign file, a journal with a damaged header, and one in use; otherwise locks it.
fn check_old(old: &mut File, path: &Path) -> Result<()> {
    let mut header = Vec::with_capacity(HEADER);
    let read = old.take(HEADER as u64).read_to_end(&mut header);
    read.map_err(|error| failed("read", path, error))?;
    decode(&header, path)?;
    lock(old, path)
}

/// The ID of a journal, and what it says of its copy.
fn decode(bytes: &[u8], path: &Path) -> Result<([u8; 16], JournalIdentity)> {
    JournalIdentity::decode(bytes).map_err(|error: HeaderError| refused(path, error.text()))
}

/// Refuses a journal of which the source was discarded.
fn check_source_is_there(path: &Path) -> Result<()> {
    match discarding_journal(path)? {
        Some(JournalState::Begun) => Err(refused(path, DISCARDED)),
        Some(JournalState::Complete) => Err(refused(path, COMPLETE)),
        None => Ok(()),
    }
}

/// Removes the existing journal, if there is one: its records do not count any more. For a caller
/// that is about to empty a target. Refuses to remove a foreign file, a journal in use, and one of a
/// source that was discarded as far as it records. Blocks.
///
/// # Errors
/// If the journal cannot be read or removed, or must stay.
pub fn discard_journal(path: &Path) -> Result<()> {
    let Some(mut old) = there(path)? else { return Ok(()) };
    check_old(&mut old, path)?;
    check_source_is_there(path)?;
    let removed = std::fs::remove_file(path).and_then(|()| blockhaul_io::sync_folder(path));
    removed.map_err(|error| failed("remove", path, error))
}

/// Opens the existing file. Anything but a regular file (a device, a pipe) may have no end.
fn there(path: &Path) -> Result<Option<File>> {
    match std::fs::metadata(path) {
        Ok(data) if data.is_file() => {}
        Ok(data) => {
            let path = path.display();
            let text = if data.is_dir() {
                format!("journal {path}: it is a directory: give the name of a file in it")
            } else {
                format!("journal {path}: it is not a regular file: choose another name")
            };
            return Err(Error::new(Kind::Usage, text));
        }
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

/// A random identifier.
pub(crate) fn random_id() -> Result<[u8; 16]> {
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
