//! A backup from its lock to its snapshot.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use blockhaul_block::Error;
use jiff::Timestamp;
use serde_json::json;

use crate::cache::BlobBytes;
use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result, pack_file};
use crate::index::{BlobIndex, BlobKind};
use crate::repository::{INDEX, RepositoryReader, uncompressed};
use crate::snapshot;
use crate::writer::lock::RepositoryLock;
use crate::writer::orphans::OrphanPacks;
use crate::writer::pack::{FullPack, OpenPack, PackBlob, SealedBlob};
use crate::writer::session_index::{FoundBlob, SessionIndex};
use crate::writer::snapshot_text::{SnapshotFacts, SnapshotHead, snapshot_text};
use crate::writer::tree_text::{FileNode, TreeFolder};
use crate::writer::unserialized;

/// Packs that are written at a time, each with 16 MiB.
const WRITES_MAX: usize = 2;
/// Blobs after which an index file is written, and the time after which it is written with fewer: a later run finds the
/// blobs of a run that was killed.
const INDEX_BLOBS: usize = 20_000;
const INDEX_TIME: Duration = Duration::from_secs(120);
/// Blobs that were read last, for readers of parts of them.
const RECENT: usize = 8;

/// How contents are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompressionMode {
    Off,
    Auto,
    Max,
}

impl CompressionMode {
    /// The mode with this name in restic.
    pub(crate) fn parse(name: &str) -> Option<CompressionMode> {
        match name {
            "off" => Some(CompressionMode::Off),
            "auto" => Some(CompressionMode::Auto),
            "max" => Some(CompressionMode::Max),
            _ => None,
        }
    }

    fn level(self) -> i32 {
        if self == CompressionMode::Max { 11 } else { zstd::DEFAULT_COMPRESSION_LEVEL }
    }
}

/// A backup that is written.
pub(crate) struct BackupSession {
    reader: RepositoryReader,
    lock: RepositoryLock,
    compression: CompressionMode,
    /// Bytes of blobs from which on a pack is complete.
    pack_size: usize,
    begun: Timestamp,
    index: RwLock<SessionIndex>,
    /// Packs of data and of directories.
    open: [Mutex<OpenPack>; 2],
    packs: Mutex<PackState>,
    turn: Condvar,
    recent: Mutex<VecDeque<(Digest, BlobBytes)>>,
    failed: Mutex<Option<RepositoryFault>>,
    /// Packs that no index names, and that another program may be about to name: those that are used are named.
    orphans: Mutex<HashMap<Digest, Vec<PackBlob>>>,
    /// The snapshots that were made.
    published: Mutex<Vec<Digest>>,
    figures: BackupFigures,
}

/// Blobs and bytes that a backup has added.
#[derive(Debug, Default)]
struct BackupFigures {
    blobs: AtomicU64,
    bytes: AtomicU64,
    stored: AtomicU64,
    trees: AtomicU64,
    snapshots: AtomicU64,
}

struct PackState {
    /// Packs that are being written.
    writes: usize,
    /// Packs that no index file names.
    unlisted: Vec<(Digest, Vec<PackBlob>)>,
    /// All packs that were written, or found without an index.
    written: Vec<Digest>,
    blobs: usize,
    listed: std::time::Instant,
}

impl BackupSession {
    pub(crate) fn new(
        reader: RepositoryReader,
        lock: RepositoryLock,
        index: BlobIndex,
        orphans: OrphanPacks,
        (compression, pack_size): (CompressionMode, usize),
    ) -> BackupSession {
        let listed = blockhaul_io::now();
        let mut index = SessionIndex::new(index);
        for (pack, blobs) in &orphans.packs {
            index.add_absent(*pack, blobs);
        }
        let OrphanPacks { packs, is_ours } = orphans;
        let (unlisted, orphans) = if is_ours {
            (packs, HashMap::new())
        } else {
            (Vec::new(), packs.into_iter().collect())
        };
        BackupSession {
            reader,
            lock,
            compression,
            pack_size,
            begun: Timestamp::now(),
            index: RwLock::new(index),
            open: Default::default(),
            packs: Mutex::new(PackState {
                writes: 0,
                written: unlisted.iter().map(|(pack, _)| *pack).collect(),
                blobs: unlisted.iter().map(|(_, blobs)| blobs.len()).sum(),
                unlisted,
                listed,
            }),
            turn: Condvar::new(),
            recent: Mutex::default(),
            failed: Mutex::default(),
            orphans: Mutex::new(orphans),
            published: Mutex::default(),
            figures: BackupFigures::default(),
        }
    }

    /// Writes a blob, unless the repository has it. Blocks.
    ///
    /// # Errors
    /// The storage fails, or has failed before.
    pub(crate) fn save(&self, kind: BlobKind, digest: Digest, plain: &[u8]) -> Result<()> {
        self.check()?;
        if self.read_index(|index| index.find(kind, &digest).is_some()) {
            return Ok(());
        }
        if !self.write_index(|index| index.claim(kind, &digest)) {
            return Ok(());
        }
        let saved = self.seal(kind, digest, plain).and_then(|blob| self.add(blob));
        saved.map_err(|fault| self.fail(fault))
    }

    fn seal(&self, kind: BlobKind, digest: Digest, plain: &[u8]) -> Result<SealedBlob> {
        // restic compresses directories in any case.
        let is_tried = self.reader.version() > 1
            && (self.compression != CompressionMode::Off || kind == BlobKind::Tree);
        let packed = if is_tried {
            Some(zstd::bulk::compress(plain, self.compression.level()).map_err(uncompressed)?)
        } else {
            None
        };
        let packed = packed.filter(|packed| packed.len() < plain.len());
        let bytes = self.reader.seal(packed.as_deref().unwrap_or(plain))?;
        let len = u32::try_from(plain.len()).map_err(|_| Error::misfit())?;
        let figures = &self.figures;
        let blobs = if kind == BlobKind::Tree { &figures.trees } else { &figures.blobs };
        blobs.fetch_add(1, Ordering::Relaxed);
        figures.bytes.fetch_add(plain.len() as u64, Ordering::Relaxed);
        figures.stored.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(SealedBlob { kind, digest, bytes, plain: len, is_compressed: packed.is_some() })
    }

    fn add(&self, blob: SealedBlob) -> Result<()> {
        // Directories are in packs of their own.
        let is_tree = blob.kind == BlobKind::Tree;
        let mut open = lock(&self.open[usize::from(is_tree)]);
        if !open.add(blob, self.pack_size) {
            return Ok(());
        }
        let full = std::mem::take(&mut *open);
        drop(open);
        self.write_pack(full)
    }

    fn write_pack(&self, pack: OpenPack) -> Result<()> {
        if pack.is_empty() {
            return Ok(());
        }
        {
            let mut state = lock(&self.packs);
            while state.writes >= WRITES_MAX {
                state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.writes += 1;
        }
        let written =
            pack.finish(&self.reader).and_then(|pack| self.put_pack(&pack).map(|()| pack));
        let mut state = lock(&self.packs);
        state.writes -= 1;
        self.turn.notify_all();
        let FullPack { name, blobs, .. } = written?;
        self.write_index(|index| index.add(name, &blobs));
        state.blobs += blobs.len();
        state.written.push(name);
        state.unlisted.push((name, blobs));
        let is_due = state.blobs >= INDEX_BLOBS || blockhaul_io::elapsed(state.listed) > INDEX_TIME;
        if is_due { self.list(&mut state) } else { Ok(()) }
    }

    fn put_pack(&self, pack: &FullPack) -> Result<()> {
        self.reader.storage().put(&pack_file(&pack.name.to_string()), &pack.bytes)
    }

    /// Writes index files with the packs that none names.
    fn list(&self, state: &mut PackState) -> Result<()> {
        if state.unlisted.is_empty() {
            return Ok(());
        }
        let blob = |blob: &PackBlob| {
            let mut entry = json!({ "id": blob.digest, "type": blob.kind, "offset": blob.at, "length": blob.len });
            if blob.is_compressed {
                entry["uncompressed_length"] = blob.plain.into();
            }
            entry
        };
        // An index that names packs that a prune has removed would keep other programs from writing their blobs again.
        self.confirm()?;
        self.check_packs(state.unlisted.iter().map(|(pack, _)| *pack).collect())?;
        while !state.unlisted.is_empty() {
            let mut blobs = 0;
            let has_room = |(_, more): &&(Digest, Vec<PackBlob>)| {
                let is_first = blobs == 0;
                blobs += more.len();
                is_first || blobs <= INDEX_BLOBS
            };
            let some: Vec<_> = state.unlisted.iter().take_while(has_room).collect();
            let packs = some.iter().map(|(name, blobs)| {
                json!({ "id": name, "blobs": blobs.iter().map(blob).collect::<Vec<_>>() })
            });
            let text = json!({ "packs": packs.collect::<Vec<_>>() });
            let text = serde_json::to_vec(&text).map_err(unserialized)?;
            self.reader.put(INDEX, &text)?;
            let count = some.len();
            state.unlisted.drain(..count);
        }
        state.blobs = 0;
        state.listed = blockhaul_io::now();
        Ok(())
    }

    /// Makes all blobs that were saved durable, and names them in index files. Blocks.
    ///
    /// # Errors
    /// The storage fails, or has failed before.
    pub(crate) fn commit(&self) -> Result<()> {
        for open in &self.open {
            let open = std::mem::take(&mut *lock(open));
            self.write_pack(open)?;
        }
        let mut state = lock(&self.packs);
        while state.writes > 0 {
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.check()?;
        self.list(&mut state)
    }

    /// Writes a snapshot with these files, and returns its identifier. Blocks.
    ///
    /// # Errors
    /// A blob of a file is missing, the lock is lost, or the storage fails.
    pub(crate) fn publish(
        &self,
        files: &[(&str, FileNode<'_>)],
        facts: &SnapshotFacts,
    ) -> Result<Digest> {
        self.publish_files(files, facts).map_err(|fault| self.fail(fault))
    }

    fn publish_files(
        &self,
        files: &[(&str, FileNode<'_>)],
        facts: &SnapshotFacts,
    ) -> Result<Digest> {
        self.commit()?;
        let mut packs = HashSet::new();
        for (_, file) in files {
            self.check_blobs(file.content, &mut packs)?;
        }
        self.adopt(&packs);
        let root = TreeFolder::with_files(files)?;
        let tree = root.save(&|text| {
            let digest = Digest::of(text);
            self.save(BlobKind::Tree, digest, text).map(|()| digest)
        })?;
        self.commit()?;
        self.confirm()?;
        packs.extend(lock(&self.packs).written.iter().copied());
        self.check_packs(packs)?;
        self.check_bases(facts)?;
        let is_first = self.figures.snapshots.fetch_add(1, Ordering::Relaxed) == 0;
        let figure = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let head = SnapshotHead {
            tree,
            facts,
            paths: files.iter().map(|(path, _)| format!("/{path}")).collect(),
            // restic finds the newest by this time, and it is that of the beginning.
            time: facts.bases.later(if is_first { self.begun } else { Timestamp::now() }),
            begun: self.begun,
            bytes: files.iter().map(|(_, file)| file.size).sum(),
            blobs: [figure(&self.figures.blobs), figure(&self.figures.trees)],
            added: [figure(&self.figures.bytes), figure(&self.figures.stored)],
        };
        let id = self.reader.put(snapshot::FOLDER, &snapshot_text(&head)?)?;
        lock(&self.published).push(id);
        // What others have done between the checks and now: of two copies of parts, at least one sees the other.
        if let Err(fault) = self.confirm().and_then(|()| self.check_bases(facts)) {
            let _ = self.reader.storage().remove(&format!("{}/{id}", snapshot::FOLDER));
            return Err(fault);
        }
        Ok(id)
    }

    /// Notes that an index file must name those of these packs that none names.
    fn adopt(&self, packs: &HashSet<Digest>) {
        let mut orphans = lock(&self.orphans);
        let used: Vec<_> = orphans.extract_if(|pack, _| packs.contains(pack)).collect();
        lock(&self.packs).unlisted.extend(used);
    }

    fn check_bases(&self, facts: &SnapshotFacts) -> Result<()> {
        let own = lock(&self.published).clone();
        facts.bases.check(&self.reader, &facts.host, &own)
    }

    /// Checks that the repository has its place, and the lock.
    fn confirm(&self) -> Result<()> {
        self.reader.storage().check_held()?;
        self.lock.confirm()
    }

    /// Checks that these packs are there: a lock does not bind every program.
    fn check_packs(&self, packs: HashSet<Digest>) -> Result<()> {
        let mut begins: Vec<u8> = packs.iter().map(|pack| pack.0[0]).collect();
        begins.sort_unstable();
        begins.dedup();
        let found = self.reader.packs(&begins)?;
        match packs.iter().find(|pack| found.binary_search(pack).is_err()) {
            Some(pack) => Err(RepositoryFault::missing(&pack_file(&pack.to_string()))),
            None => Ok(()),
        }
    }

    /// Checks that the repository has all blobs of a file, and notes their packs: the snapshot of a backup must not name
    /// others.
    fn check_blobs(&self, content: &[Digest], packs: &mut HashSet<Digest>) -> Result<()> {
        let mut last = None;
        for digest in content {
            if last == Some(digest) {
                continue;
            }
            last = Some(digest);
            match self.read_index(|index| index.find(BlobKind::Data, digest)) {
                Some(FoundBlob::Written(pack, _)) => drop(packs.insert(pack)),
                Some(FoundBlob::Pending) | None => {
                    let blob = digest.to_string();
                    return Err(RepositoryFault::UnknownBlob { blob, damaged_index: None });
                }
            }
        }
        Ok(())
    }

    /// The contents of a blob of a file. Blocks.
    ///
    /// # Errors
    /// The blob is missing or damaged, or the storage fails.
    pub(crate) fn read(&self, digest: &Digest) -> Result<BlobBytes> {
        let recent = lock(&self.recent).iter().find(|(one, _)| one == digest).cloned();
        if let Some((_, bytes)) = recent {
            return Ok(bytes);
        }
        let mut found = self.read_index(|index| index.find(BlobKind::Data, digest));
        if matches!(found, Some(FoundBlob::Pending)) {
            self.commit()?;
            found = self.read_index(|index| index.find(BlobKind::Data, digest));
        }
        let Some(FoundBlob::Written(pack, place)) = found else {
            let blob = digest.to_string();
            return Err(RepositoryFault::UnknownBlob { blob, damaged_index: None });
        };
        let bytes = self.reader.blob(&pack, digest, place).or_else(|fault| {
            self.read_index(|index| {
                let places = index.index().copies().places(BlobKind::Data, digest);
                self.reader.first_of(index.index().packs(), digest, places).ok_or(fault)
            })
        });
        let bytes = BlobBytes::new(bytes?);
        let mut recent = lock(&self.recent);
        recent.push_back((*digest, bytes.clone()));
        if recent.len() > RECENT {
            recent.pop_front();
        }
        Ok(bytes)
    }

    fn check(&self) -> Result<()> {
        lock(&self.failed).clone().map_or(Ok(()), Err)
    }

    /// Notes a failure, after which nothing of this backup is published.
    fn fail(&self, fault: RepositoryFault) -> RepositoryFault {
        lock(&self.failed).get_or_insert(fault).clone()
    }

    fn read_index<T>(&self, work: impl FnOnce(&SessionIndex) -> T) -> T {
        work(&self.index.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write_index<T>(&self, work: impl FnOnce(&mut SessionIndex) -> T) -> T {
        work(&mut self.index.write().unwrap_or_else(PoisonError::into_inner))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
