//! Jobs that outlive a server: two files for each, in the directory of `--job-state`.
//!
//! `job-N.json` says what the job does: a line of JSON, and a line with its digest. `job-N.map` shows
//! where the target may differ from the disk ([`PersistentDirtyMap`]). The description is written last, before
//! the target is touched, and removed first: a job exists while its description does.
//!
//! A server that finds a description marks what clients write in the map from its first request on. The
//! job itself stays interrupted until it is resumed or cancelled.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use blockhaul_control::{InterruptedFigures, ResumeMode};
use blockhaul_engine::DurableCallback;
use blockhaul_io::{plain, read_regular_file};
use blockhaul_snapshot::PersistentDirtyMap;
use blockhaul_transfer::{Recorder, TransferError, TransferErrorKind, TransferStep};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Map, Value, json};

use crate::bitmap_files::{check_digest, identity, replace, with_digest};
use crate::error::JobError;
use crate::export::OpenExport;

/// Version of the format.
const VERSION: u64 = 1;
/// Largest description that is read, in bytes.
const SIZE_MAX: u64 = 1 << 20;

/// The directory of the files.
pub struct JobFiles {
    directory: PathBuf,
    /// Jobs of earlier servers.
    found: Vec<Arc<JobRecord>>,
}

/// A job that outlives the server.
pub struct JobRecord {
    directory: PathBuf,
    id: u64,
    facts: Mutex<Map<String, Value>>,
    tracking: Mutex<MapState>,
    /// Its files are removed.
    removed: AtomicBool,
}

#[derive(Default)]
struct MapState {
    /// The name of the export, and where its disk differs from the target.
    by: Option<(String, PersistentDirtyMap)>,
    /// Why the job cannot be resumed.
    unusable: Option<String>,
}

impl JobFiles {
    /// The files in this directory, which must exist; reads the descriptions of all jobs.
    ///
    /// # Errors
    /// If there is no such directory, another server uses it, or it cannot be read.
    pub fn new(directory: &Path) -> Result<JobFiles, JobError> {
        let wrong =
            |why: &str| JobError::request(format!("--job-state {}: {why}", directory.display()));
        match fs::metadata(directory) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(wrong("it is not a directory")),
            Err(error) => return Err(wrong(&format!("{}: create it first", plain(&error)))),
        }
        // The server may change its working directory.
        let directory = std::path::absolute(directory).map_err(|error| wrong(&plain(&error)))?;
        let entries = fs::read_dir(&directory).map_err(|error| wrong(&plain(&error)))?;
        let names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        let numbers = |ending: &str| -> Vec<u64> {
            let number = |name: &std::ffi::OsString| {
                name.to_str()?.strip_prefix("job-")?.strip_suffix(ending)?.parse().ok()
            };
            names.iter().filter_map(number).collect()
        };
        let mut described = numbers(".json");
        described.sort_unstable();
        for id in numbers(".map").into_iter().filter(|id| !described.contains(id)) {
            // It never began, or has ended.
            let _ = fs::remove_file(path(&directory, id, "map"));
        }
        let found =
            described.into_iter().map(|id| Arc::new(JobRecord::read(&directory, id))).collect();
        Ok(JobFiles { directory, found })
    }

    /// The jobs of earlier servers, by number.
    pub fn found(&self) -> &[Arc<JobRecord>] {
        &self.found
    }

    /// A job that is about to begin on an export with a disk of `size` bytes: every block differs.
    /// Blocks. It does not outlive the server before [`JobRecord::commit`].
    ///
    /// # Errors
    /// If the map cannot be created.
    pub fn begin(
        &self,
        id: u64,
        export: &OpenExport,
        size: u64,
    ) -> Result<Arc<JobRecord>, JobError> {
        let path = path(&self.directory, id, "map");
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)
            .and_then(|file| {
                flock(&file, FlockOperation::NonBlockingLockExclusive)
                    .map(|()| file)
                    .map_err(Into::into)
            });
        let file = opened.map_err(|error| cannot("create", &path, &error))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unique = format!("{} {} {}", now.as_nanos(), std::process::id(), path.display());
        let hash = blake3::hash(unique.as_bytes()).to_hex();
        let map = &hash[..32];
        let facts = json!({
            "version": VERSION,
            "map": map,
            "export": export.name,
            "device": identity(&export.storage()),
            "size": size,
            "begun": now.as_secs(),
        });
        let Value::Object(facts) = facts else { return Err(JobError::other("no object")) };
        let id_of_map = bytes_of(map).unwrap_or_default();
        let remaining = PersistentDirtyMap::create(file, id_of_map, size);
        let by = Some((export.name.clone(), remaining.clone()));
        let record = Arc::new(JobRecord {
            directory: self.directory.clone(),
            id,
            facts: Mutex::new(facts),
            tracking: Mutex::new(MapState { by, unusable: None }),
            removed: AtomicBool::new(false),
        });
        watch(&remaining, &record);
        Ok(record)
    }

    /// Opens the maps of jobs on the disk of this export. Blocks.
    pub fn attach(&self, export: &str, device: &str, size: u64) -> Vec<PersistentDirtyMap> {
        let here = identity(device);
        let mut opened = Vec::new();
        for record in &self.found {
            if let Some(map) = record.attach(export, &here, size) {
                watch(&map, record);
                opened.push(map);
            }
        }
        opened
    }

    /// The export is gone: what is written elsewhere is not marked any more.
    pub fn detach(&self, export: &str) {
        for record in &self.found {
            let mut tracking = record.tracking();
            if tracking.by.as_ref().is_some_and(|(name, _)| name == export) {
                tracking.by = None;
            }
        }
    }
}

impl JobRecord {
    /// Reads a description; if that fails, the job can only be cancelled.
    fn read(directory: &Path, id: u64) -> JobRecord {
        let path = path(directory, id, "json");
        let (facts, unusable) = match described(&path) {
            Ok(facts) => (facts, None),
            Err(why) => {
                let text = format!("its description {} {why}", path.display());
                log::warn!("job {id} of an earlier server cannot be resumed: {text}");
                (Map::new(), Some(text))
            }
        };
        JobRecord {
            directory: directory.to_path_buf(),
            id,
            facts: Mutex::new(facts),
            tracking: Mutex::new(MapState { by: None, unusable }),
            removed: AtomicBool::new(false),
        }
    }

    /// Opens its map, if the job is of this device.
    fn attach(&self, export: &str, device: &str, size: u64) -> Option<PersistentDirtyMap> {
        if self.is_removed() || self.tracking().unusable.is_some() || self.tracking().by.is_some() {
            return None;
        }
        let before = self.text("device");
        if before != device {
            if self.text("export") == export {
                let text =
                    format!("export {export:?} had the device {before}, and has {device} now");
                self.tracking().unusable = Some(text);
            }
            return None;
        }
        let unusable = |why: String| {
            log::warn!("job {} of an earlier server cannot be resumed: {why}", self.id);
            self.tracking().unusable = Some(why);
            None
        };
        if self.number("size") != Some(size) {
            let before = self.number("size").unwrap_or_default();
            return unusable(format!("its disk had {before} bytes, and has {size} now"));
        }
        let path = path(&self.directory, self.id, "map");
        match open(&path, &self.text("map"), size) {
            Err(why) => unusable(format!("its map {}: {why}", path.display())),
            Ok((map, damaged)) => {
                if damaged > 0 {
                    log::warn!(
                        "job {}: {damaged} sectors of {} are damaged: their blocks are copied again",
                        self.id,
                        path.display()
                    );
                }
                log::info!(
                    export = export;
                    "job {} of an earlier server, {} of export {export:?}, is interrupted: resume or \
                     cancel it",
                    self.id,
                    self.text("type")
                );
                self.tracking().by = Some((export.to_string(), map.clone()));
                Some(map)
            }
        }
    }

    /// Its number.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where the disk differs from the target, if an export marks that.
    pub fn map(&self) -> Option<PersistentDirtyMap> {
        self.tracking().by.as_ref().map(|(_, map)| map.clone())
    }

    /// The name of the export that has its disk, or had it.
    pub fn export(&self) -> String {
        let by = self.tracking().by.as_ref().map(|(name, _)| name.clone());
        by.unwrap_or_else(|| self.text("export"))
    }

    /// Why it cannot be resumed, if so.
    pub(crate) fn unusable(&self) -> Option<String> {
        if let Some(why) = self.tracking().unusable.clone() {
            return Some(why);
        }
        if self.is("moved") {
            return Some(format!(
                "the clients of export {:?} have moved to {}: serve that instead",
                self.text("export"),
                self.text("target")
            ));
        }
        let map = self.map();
        match &map {
            None => Some(format!("no export has its disk: {}", self.text("device"))),
            Some(map) => map.broken().map(|why| format!("its map cannot be written: {why}")),
        }
    }

    /// Whether it copies a point in time.
    pub(crate) fn is_backup(&self) -> bool {
        self.text("type") == "backup"
    }

    /// A fact; empty if there is none.
    pub fn text(&self, name: &str) -> String {
        self.facts().get(name).and_then(Value::as_str).unwrap_or_default().to_string()
    }

    /// A fact that is a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.facts().get(name).and_then(Value::as_u64)
    }

    /// A fact that is true or false.
    pub(crate) fn is(&self, name: &str) -> bool {
        self.facts().get(name).and_then(Value::as_bool).unwrap_or_default()
    }

    /// Any fact.
    pub(crate) fn fact(&self, name: &str) -> Value {
        self.facts().get(name).cloned().unwrap_or_default()
    }

    /// Adds facts, to be written later.
    pub fn note(&self, more: Value) {
        if let Value::Object(more) = more {
            self.facts().extend(more);
        }
    }

    /// Writes the description durably: from now on the job outlives the server. Blocks.
    ///
    /// # Errors
    /// If the description cannot be written.
    pub fn commit(&self) -> Result<(), JobError> {
        let path = path(&self.directory, self.id, "json");
        // Until it is written: it is not removed in between.
        let facts = self.facts();
        if self.is_removed() {
            // It does not outlive the server any more.
            return Ok(());
        }
        let line = Value::Object(facts.clone()).to_string();
        let written = replace(&path, with_digest(&line).as_bytes());
        written.map_err(|error| cannot("write", &path, &error))
    }

    /// Writes the map and the description durably.
    ///
    /// # Errors
    /// If the map or the description cannot be written.
    pub(crate) async fn persist(self: &Arc<JobRecord>) -> Result<(), JobError> {
        if let Some(map) = self.map() {
            let stored = map.store().await;
            stored.map_err(|why| {
                JobError::other(format!("cannot write the map of job {}: {why}", self.id))
            })?;
        }
        let record = self.clone();
        let committed = blockhaul_io::offload(move || record.commit()).await;
        committed.unwrap_or_else(|lost| Err(JobError::other(lost.to_string())))
    }

    /// Whether its target was opened, and may have a part of the disk.
    pub(crate) fn has_target(&self) -> bool {
        !self.text("target_id").is_empty()
    }

    /// The name of the bitmap that shows what is left.
    pub(crate) fn rest_bitmap_name(&self) -> String {
        format!("blockhaul-job-{}", self.id)
    }

    /// How the job can be resumed, or why it cannot.
    fn resume_mode(&self) -> Result<ResumeMode, String> {
        match self.unusable() {
            Some(why) => Err(why),
            None if self.is_backup() => Ok(ResumeMode::NewMoment),
            None => Ok(ResumeMode::Same),
        }
    }

    /// The error of the interrupted job, which says whether the job can be resumed.
    pub(crate) fn interruption(&self) -> String {
        let next = match self.resume_mode() {
            Err(why) => format!("it cannot be resumed: {why}"),
            Ok(ResumeMode::NewMoment) => {
                "its moment is lost; it can be resumed with --new-moment".to_string()
            }
            Ok(ResumeMode::Same) => "it can be resumed".to_string(),
        };
        format!("the server ended before the job; {next}")
    }

    /// The figures of the interrupted job, for the control socket.
    pub(crate) fn figures(&self) -> InterruptedFigures {
        let left = self.map().map(|map| map.ranges().iter().map(|(_, len)| len).sum());
        InterruptedFigures {
            resume: self.resume_mode().ok(),
            dirty: left,
            begun: self.number("begun"),
        }
    }

    /// Removes its files: the job has ended. Blocks.
    pub fn remove(&self) {
        if self.removed.swap(true, Ordering::SeqCst) {
            return;
        }
        let _facts = self.facts();
        let description = path(&self.directory, self.id, "json");
        let removed = match fs::remove_file(&description) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.and_then(|()| blockhaul_io::sync_folder(&description)),
        };
        match removed {
            Ok(()) => {
                let _ = fs::remove_file(path(&self.directory, self.id, "map"));
            }
            Err(error) => log::error!(
                "cannot remove {}: {}: remove it by hand before the server is started again, and do not \
                 resume job {}",
                description.display(),
                plain(&error),
                self.id
            ),
        }
    }

    fn is_removed(&self) -> bool {
        self.removed.load(Ordering::SeqCst)
    }

    fn facts(&self) -> MutexGuard<'_, Map<String, Value>> {
        self.facts.lock().expect("no panic under this lock")
    }

    fn tracking(&self) -> MutexGuard<'_, MapState> {
        self.tracking.lock().expect("no panic under this lock")
    }
}

impl Recorder for JobRecord {
    fn check(&self, target: &str) -> Result<(), TransferError> {
        let before = self.text("target_id");
        if before.is_empty() || before == target {
            return Ok(());
        }
        let text = format!(
            "the target {} is not the one that the job has written: {before} then, {target} now: begin \
             another job",
            self.text("target")
        );
        Err(TransferError::new(TransferErrorKind::Open, TransferStep::OpenTarget, text))
    }

    fn begin(&self, target: &str) -> Result<(), TransferError> {
        if self.is_removed() || self.text("target_id") == target {
            // Without its map the job goes on, and does not outlive the server.
            return Ok(());
        }
        self.note(json!({ "target_id": target }));
        let failed = |failure: JobError| {
            let text = failure.to_string();
            TransferError::new(TransferErrorKind::Other, TransferStep::OpenTarget, text)
        };
        self.commit().map_err(failed)
    }

    fn durable(&self) -> DurableCallback {
        let map = self.map();
        DurableCallback(Arc::new(move |ranges| {
            if let Some(map) = &map {
                map.copied(ranges);
            }
        }))
    }
}

/// If the map cannot be written, the job does not outlive the server.
fn watch(map: &PersistentDirtyMap, record: &Arc<JobRecord>) {
    let weak = Arc::downgrade(record);
    map.on_failure(Box::new(move |why| {
        if let Some(record) = weak.upgrade() {
            log::error!(
                "job {} cannot be resumed after a restart of the server: cannot write its map: {why}",
                record.id
            );
            record.remove();
        }
    }));
}

/// The facts of a description.
fn described(path: &Path) -> Result<Map<String, Value>, String> {
    let bytes = read_regular_file(path, SIZE_MAX).map_err(|error| plain(&error))?;
    let text = String::from_utf8(bytes).map_err(|_| "is not text in UTF-8")?;
    let (line, digest) = text.split_once('\n').ok_or("is incomplete")?;
    check_digest(line, digest)?;
    match serde_json::from_str(line) {
        Ok(Value::Object(facts)) if facts.get("version") == Some(&VERSION.into()) => Ok(facts),
        _ => Err(format!("is not of version {VERSION}")),
    }
}

fn open(path: &Path, id: &str, size: u64) -> Result<(PersistentDirtyMap, usize), String> {
    let id = bytes_of(id).ok_or("its description has a wrong number for it")?;
    let file: File = OpenOptions::new().read(true).write(true).open(path).map_err(|e| plain(&e))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => PersistentDirtyMap::open(file, id, size),
        Err(rustix::io::Errno::WOULDBLOCK) => Err("another server uses it".to_string()),
        Err(error) => Err(plain(&io::Error::from(error))),
    }
}

/// The bytes of 32 hexadecimal digits.
fn bytes_of(hex: &str) -> Option<[u8; 16]> {
    u128::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 32).map(u128::to_be_bytes)
}

fn path(directory: &Path, id: u64, ending: &str) -> PathBuf {
    directory.join(format!("job-{id}.{ending}"))
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> JobError {
    JobError::other(format!("cannot {what} {}: {}", path.display(), plain(error)))
}
