//! Backups that end at any moment, on a model of a file system: with the process, or with the power.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_block::{Error, Kind};
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, long, text};

use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};
use crate::fixture::PASSWORD;
use crate::storage::{CONFIG, RepositoryStorage};
use crate::test_place::{contents, copy_to, make_repository, place};
use crate::test_support::TestWrite;

/// A file system in memory, which ends at one of its operations.
struct ModelStorage(Mutex<ModelDisk>);

/// The names that programs see, and those that the medium has.
#[derive(Clone, Default)]
struct ModelDisk {
    files: BTreeMap<String, ModelFile>,
    /// Files whose folder was synced after they got their names.
    durable: BTreeMap<String, ModelFile>,
    /// Operations until the end.
    left: Option<usize>,
    held: Option<Vec<u8>>,
}

#[derive(Clone)]
struct ModelFile {
    bytes: Arc<Vec<u8>>,
    is_synced: bool,
}

impl ModelDisk {
    /// Refuses an operation after the end.
    fn step(&mut self) -> Result<()> {
        match &mut self.left {
            Some(0) => Err(Error::new(Kind::Io, "the machine has ended").into()),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// What is there after the next start. `has_power`: the process alone has ended, by itself or not.
    fn restarted(&self, has_power: bool, rng: &mut Rng) -> ModelDisk {
        if has_power {
            return ModelDisk {
                files: self.files.clone(),
                durable: self.files.clone(),
                ..ModelDisk::default()
            };
        }
        let names: BTreeSet<_> = self.files.keys().chain(self.durable.keys()).collect();
        let mut files = BTreeMap::new();
        for name in names {
            let is_durable = self.durable.contains_key(name) && self.files.contains_key(name);
            // A name whose folder was not synced may be there or not, and so may one that was removed.
            if !is_durable && rng.chance(50) {
                continue;
            }
            let file = self.files.get(name).or(self.durable.get(name)).unwrap();
            let mut bytes = file.bytes.to_vec();
            if !file.is_synced {
                bytes.truncate(rng.below(bytes.len() as u64 + 1) as usize);
            }
            files.insert(name.clone(), ModelFile { bytes: bytes.into(), is_synced: true });
        }
        ModelDisk { durable: files.clone(), files, ..ModelDisk::default() }
    }
}

impl ModelStorage {
    fn new(disk: ModelDisk) -> Arc<ModelStorage> {
        Arc::new(ModelStorage(Mutex::new(disk)))
    }

    fn lock(&self) -> MutexGuard<'_, ModelDisk> {
        self.0.lock().unwrap()
    }

    fn find(&self, file: &str) -> Result<Arc<Vec<u8>>> {
        let mut disk = self.lock();
        disk.step()?;
        let found = disk.files.get(file).ok_or_else(|| RepositoryFault::missing(file))?;
        Ok(found.bytes.clone())
    }

    /// Writes all files to a directory.
    fn write_to(&self, folder: &Path) {
        for name in crate::storage::FOLDERS {
            fs::create_dir_all(folder.join(name)).unwrap();
        }
        for (name, file) in &self.lock().files {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, &*file.bytes).unwrap();
        }
    }
}

impl RepositoryStorage for ModelStorage {
    fn parallel(&self) -> usize {
        3
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let mut disk = self.lock();
        disk.step()?;
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let rest = |name: &String| Some(name.strip_prefix(&prefix)?.split('/').next()?.to_owned());
        let names: BTreeSet<_> = disk.files.keys().filter_map(rest).collect();
        Ok(names.into_iter().collect())
    }

    fn whole(&self, file: &str, _most: u64) -> Result<Vec<u8>> {
        Ok(self.find(file)?.to_vec())
    }

    fn range(&self, file: &str, at: u64, len: usize) -> Result<Vec<u8>> {
        let found = self.find(file)?;
        let part = found.get(at as usize..at as usize + len);
        part.map(<[u8]>::to_vec).ok_or_else(|| RepositoryFault::damaged(file, "it is shorter"))
    }

    fn size(&self, file: &str) -> Result<u64> {
        Ok(self.find(file)?.len() as u64)
    }

    fn check_writable(&self) -> Result<()> {
        Ok(())
    }

    fn make(&self) -> Result<()> {
        self.lock().step()
    }

    fn hold(&self) -> Result<()> {
        let config = self.find(CONFIG);
        let missing = |_| RepositoryFault::NoRepository;
        let config = match config {
            Err(RepositoryFault::MissingFile { .. }) => return Err(missing(())),
            config => config?,
        };
        self.lock().held = Some(config.to_vec());
        Ok(())
    }

    fn check_held(&self) -> Result<()> {
        let config = self.find(CONFIG)?;
        assert_eq!(self.lock().held.as_ref(), Some(&*config));
        Ok(())
    }

    /// The steps of a directory: a file without a name is written and synced, gets its name, and the folder is synced.
    fn put_new(&self, file: &str, bytes: &[u8]) -> Result<bool> {
        let bytes = Arc::new(bytes.to_vec());
        // Written, but not synced: without a name, nothing of it is there after a restart.
        self.lock().step()?;
        self.lock().step()?;
        {
            let mut disk = self.lock();
            disk.step()?;
            if disk.files.contains_key(file) {
                return Ok(false);
            }
            disk.files.insert(file.to_owned(), ModelFile { bytes, is_synced: true });
        }
        let mut disk = self.lock();
        disk.step()?;
        let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
        let is_in =
            |name: &String| name.rsplit_once('/').map_or("", |(folder, _)| folder) == folder;
        let ModelDisk { files, durable, .. } = &mut *disk;
        durable.retain(|name, _| !is_in(name) || files.contains_key(name));
        durable.extend(
            files
                .iter()
                .filter(|(name, _)| is_in(name))
                .map(|(name, file)| (name.clone(), file.clone())),
        );
        Ok(true)
    }

    fn remove(&self, file: &str) -> Result<()> {
        let mut disk = self.lock();
        disk.step()?;
        disk.files.remove(file);
        Ok(())
    }
}

/// Changes of a disk, which it gets.
fn changes(bytes: &mut [u8], rng: &mut Rng) -> Vec<TestWrite> {
    let mut writes = Vec::new();
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(bytes.len() as u64);
        let len = (1 + rng.below(1 << 20)).min(bytes.len() as u64 - at);
        let mut part = vec![0; len as usize];
        rng.fill(&mut part);
        let write = TestWrite::Bytes(at, part);
        write.apply(bytes);
        writes.push(write);
    }
    writes
}

/// Backups of which some end at a moment of their own; returns whether one ended before its snapshot.
fn run(seed: u64, restic: Option<&PeerProgram>) -> usize {
    let mut rng = Rng::new(seed);
    let mut disk = ModelDisk::default();
    let makes = seed % 20 == 7;
    if !makes {
        let storage = ModelStorage::new(disk);
        make_repository(&*storage);
        disk = storage.lock().clone();
    }
    let mut bytes = vec![0; 3 << 20];
    rng.fill(&mut bytes[..2 << 20]);
    let mut known: BTreeMap<Digest, Vec<u8>> = BTreeMap::new();
    let mut ended = 0;
    for round in 0..4 {
        let mut next = bytes.clone();
        let writes = changes(&mut next, &mut rng);
        let all = [TestWrite::Bytes(0, next.clone())];
        let is_full = known.is_empty() || rng.chance(40);
        let (size, writes) =
            if is_full { (Some(next.len() as u64), &all[..]) } else { (None, &writes[..]) };
        let is_last = round == 3;
        if is_last {
            // As restic unlock: else packs that only other programs may name would stay without an index.
            disk.files.retain(|name, _| !name.starts_with("locks/"));
        }
        disk.left = (!is_last).then(|| rng.below(150) as usize);
        let storage = ModelStorage::new(disk);
        let outcome = copy_to(place(storage.clone(), 1 << 20), size, writes);
        let has_power = rng.chance(40);
        ended += usize::from(outcome.is_err());
        disk = storage.lock().restarted(has_power, &mut rng);
        if !disk.files.contains_key(CONFIG) {
            assert!(makes && known.is_empty(), "seed {seed}, round {round}");
            // A key without a repository is removed by hand.
            disk = ModelDisk::default();
            continue;
        }
        let found = contents(ModelStorage::new(disk.clone()));
        for (id, old) in &known {
            assert!(
                found.iter().any(|(found, bytes)| found == id && bytes == old),
                "seed {seed}, round {round}"
            );
        }
        for (id, bytes) in found {
            // A snapshot whose copy has failed at its end is right, too.
            let expected = known.entry(id).or_insert_with(|| next.clone());
            assert!(bytes == *expected, "seed {seed}, round {round}");
        }
        assert!(
            outcome.is_err() || known.values().any(|bytes| *bytes == next),
            "seed {seed}, round {round}"
        );
        if is_last {
            outcome.unwrap();
        }
        if let Some((_, newest)) = contents(ModelStorage::new(disk.clone())).pop() {
            bytes = newest;
        }
    }
    if let Some(restic) = restic {
        let scratch = ScratchDir::new().unwrap();
        ModelStorage::new(disk).write_to(&scratch.file("repo"));
        let mut command = restic.command();
        command.args(["check", "--read-data", "--no-lock", "--no-cache"]);
        command.env("RESTIC_REPOSITORY", scratch.file("repo")).env("RESTIC_PASSWORD", PASSWORD);
        let output = tools::output(&mut command, std::time::Duration::from_secs(120)).unwrap();
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(
            output.status.success() && said.contains("no errors were found"),
            "seed {seed}: {said}"
        );
        assert!(!said.contains("additional files"), "seed {seed}: {said}");
    }
    ended
}

#[test]
fn a_crash_at_any_operation_leaves_finished_snapshots() {
    let Some(restic) = PeerProgram::require("restic") else { return };
    let (first, count) = match std::env::var("BLOCKHAUL_SEED") {
        Ok(seed) => (seed.parse().unwrap(), 1),
        Err(_) if long() => (0, 500),
        Err(_) => (u64::from(std::process::id()), 20),
    };
    println!("seeds from {first}");
    let ended: usize =
        (first..first + count).map(|seed| run(seed, (seed % 10 == 0).then_some(&restic))).sum();
    assert!(ended as u64 >= count / 2, "{ended}");
}
