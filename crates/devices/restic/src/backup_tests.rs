//! Backups to repositories, judged by restic.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockhaul_block::{Error, Kind, Reply, Request};
use blockhaul_catalog::{DeviceSpec, Intent};
use blockhaul_io::Reservation;
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{PeerProgram, long};

use serde_json::json;

use crate::digest::Digest;
use crate::fault::RepositoryFault;
use crate::peer_tests::{MIB, Repository, disk};
use crate::repository::RepositoryReader;
use crate::storage::{DirectoryStorage, RepositoryStorage};
use crate::test_place::{copy_to, place as place_of};
use crate::test_support::{TestWrite, back_up, files_below, on_a_worker, open, registry};
use crate::writer::pack::PACK_SIZE;

impl Repository {
    /// The contents of a file in the newest snapshot, as restic restores it.
    fn restored(&self, path: &str) -> Vec<u8> {
        let target = self.scratch.file("restored");
        self.run(&[
            "restore",
            "latest",
            "--target",
            target.to_str().unwrap(),
            "--path",
            &format!("/{path}"),
        ]);
        let bytes = fs::read(target.join(path)).unwrap();
        fs::remove_dir_all(target).unwrap();
        bytes
    }

    fn check(&self) {
        let output = self.run(&["check", "--read-data"]);
        assert!(output.contains("no errors were found"), "{output}");
        assert!(!output.contains("warning"), "{output}");
    }

    /// The lines of a list of restic: locks, packs and others.
    fn list(&self, kind: &str) -> Vec<String> {
        self.run(&["list", "--no-lock", kind]).lines().map(str::to_owned).collect()
    }

    fn pack_bytes(&self) -> u64 {
        let files = files_below(&self.scratch.file("repo").join("data"));
        files.iter().map(|file| file.metadata().unwrap().len()).sum()
    }
}

/// All of a disk, in writes of odd lengths and in any order; zeroes as such.
fn all_of(bytes: &[u8], rng: &mut Rng) -> Vec<TestWrite> {
    let (mut writes, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let len = if rng.chance(50) { MIB } else { 1 + rng.below(3 << 20) as usize };
        let part = &bytes[at..bytes.len().min(at + len)];
        let is_zero = part.iter().all(|byte| *byte == 0);
        writes.push(if is_zero {
            TestWrite::Zeroes(at as u64, part.len() as u64)
        } else {
            TestWrite::Bytes(at as u64, part.to_vec())
        });
        at += part.len();
    }
    rng.shuffle(&mut writes);
    writes
}

/// A few changes of a disk, which it gets.
fn changes(bytes: &mut [u8], rng: &mut Rng) -> Vec<TestWrite> {
    let mut writes = Vec::new();
    for _ in 0..1 + rng.below(6) {
        let at = rng.below(bytes.len() as u64);
        let len = (1 + rng.below(2 << 20)).min(bytes.len() as u64 - at);
        let write = if rng.chance(30) {
            TestWrite::Zeroes(at, len)
        } else {
            let mut part = vec![0; len as usize];
            rng.fill(&mut part);
            TestWrite::Bytes(at, part)
        };
        write.apply(bytes);
        writes.push(write);
    }
    writes
}

fn full_and_increments(restic: PeerProgram, seed: u64, version: &str, compression: &str) {
    let mut rng = Rng::new(seed);
    let repository = Repository::new(restic, version);
    let size = MIB + rng.below(12 << 20) as usize;
    let mut bytes = disk(seed, size);
    let spec = repository.spec("#new/vm/disks/vda.raw");
    let spec = format!("{spec}&tag=a,b&compression={compression}");
    let written = back_up(&spec, Some(size as u64), all_of(&bytes, &mut rng)).unwrap();
    assert!(written == bytes, "seed {seed}");
    assert!(repository.restored("vm/disks/vda.raw") == bytes, "seed {seed}");
    let packs = repository.list("packs");
    // The same again adds a snapshot alone.
    assert!(back_up(&spec, Some(size as u64), all_of(&bytes, &mut rng)).unwrap() == bytes);
    let added = repository.list("packs").len() - packs.len();
    assert!(added <= 1, "{added}");
    for _ in 0..3 {
        let writes = changes(&mut bytes, &mut rng);
        assert!(back_up(&spec, None, writes).unwrap() == bytes, "seed {seed}");
        assert!(repository.read("latest", "vm/disks/vda.raw").unwrap() == bytes, "seed {seed}");
    }
    assert!(repository.restored("vm/disks/vda.raw") == bytes, "seed {seed}");
    assert!(repository.list("locks").is_empty());
    repository.check();
    let listed = repository.run(&["snapshots", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 5, "{listed}");
    assert_eq!(listed[4]["parent"], listed[3]["id"]);
    assert_eq!(listed[4]["tags"], serde_json::json!(["a", "b"]));
    assert_eq!(listed[4]["paths"], serde_json::json!(["/vm/disks/vda.raw"]));
    repository.run(&["forget", "--keep-last", "1", "--prune", "--max-unused", "0"]);
    assert!(repository.read("latest", "vm/disks/vda.raw").unwrap() == bytes, "seed {seed}");
    let writes = changes(&mut bytes, &mut rng);
    assert!(back_up(&spec, None, writes).unwrap() == bytes, "seed {seed}");
    repository.check();
}

#[test]
fn backups_and_increments_are_what_restic_restores() {
    let restic = require_peer!("restic");
    for seed in 0..if long() { 12 } else { 1 } {
        for (version, compression) in [("2", "auto"), ("1", "auto"), ("2", "max"), ("2", "off")] {
            full_and_increments(restic.clone(), seed, version, compression);
        }
    }
}

#[test]
fn increments_of_backups_of_restic_keep_the_rest() {
    let restic = require_peer!("restic");
    let repository = Repository::new(restic, "2");
    let mut rng = Rng::new(9);
    let mut bytes = disk(7, 9 * MIB + 1234);
    repository.write("vda.raw", &bytes);
    let path = repository.scratch.file("disks").join("vda.raw");
    let path = path.to_str().unwrap();
    repository.run(&["backup", path]);
    let path = path.trim_start_matches('/');
    let spec = repository.spec(&format!("#new/{path}"));
    for _ in 0..3 {
        let writes = changes(&mut bytes, &mut rng);
        assert!(back_up(&spec, None, writes).unwrap() == bytes);
    }
    assert!(repository.restored(path) == bytes);
    repository.check();
    // A snapshot that is named, and of another host.
    let other = format!("{spec}&host=other");
    assert_eq!(back_up(&other, None, Vec::new()).unwrap_err().kind(), Kind::NotFound);
    let id = repository.list("snapshots").pop().unwrap();
    let named = format!("{spec}&parent={id}");
    back_up(&named, None, vec![TestWrite::Zeroes(5, 1)]).unwrap();
    // A path that the snapshot does not name, as restic makes it of a directory that the user is in.
    repository.run(&["backup", "."]);
    let inner = repository.spec("#new/vda.raw");
    assert_eq!(back_up(&inner, None, Vec::new()).unwrap_err().kind(), Kind::NotFound);
    let zero = TestWrite::Zeroes(0, 5 << 20);
    let first = fs::read(repository.scratch.file("disks").join("vda.raw")).unwrap();
    let mut expected = first.clone();
    zero.apply(&mut expected);
    assert!(back_up(&format!("{inner}&parent=latest"), None, vec![zero]).unwrap() == expected);
    repository.check();
    let none = format!("{spec}&parent=none");
    assert_eq!(back_up(&none, None, Vec::new()).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn a_disk_of_zeroes_takes_no_space_and_any_size_is_exact() {
    let restic = require_peer!("restic");
    let repository = Repository::absent(restic);
    for (name, size) in [("a", 0), ("b", 1), ("c", MIB), ("d", 100 * MIB + 1), ("e", 4 * MIB - 1)] {
        let spec = repository.spec(&format!("#new/{name}")) + "&init=on";
        let writes = if size == 0 { vec![] } else { vec![TestWrite::Zeroes(0, size as u64)] };
        assert_eq!(back_up(&spec, Some(size as u64), writes).unwrap().len(), size);
        assert!(repository.restored(name) == vec![0; size], "{name}");
    }
    repository.check();
    assert!(repository.pack_bytes() < 100_000, "{}", repository.pack_bytes());
}

#[test]
fn a_repository_is_made_only_where_nothing_else_is() {
    let restic = require_peer!("restic");
    let repository = Repository::absent(restic);
    let place = repository.scratch.file("repo");
    let spec = repository.spec("#new/disk");
    let fails = |spec: &str| back_up(spec, Some(9), vec![]).unwrap_err();
    assert!(fails(&spec).to_string().contains("init=on"), "{}", fails(&spec));
    assert!(!place.exists());
    fs::create_dir(&place).unwrap();
    fs::write(place.join("other"), "x").unwrap();
    let error = fails(&format!("{spec}&init=on"));
    assert!(error.to_string().contains("\"other\""), "{error}");
    assert_eq!(fs::read_dir(&place).unwrap().count(), 1);
    fs::remove_file(place.join("other")).unwrap();
    fs::write(repository.scratch.file("password"), "\n").unwrap();
    assert!(fails(&format!("{spec}&init=on")).to_string().contains("password is empty"));
    fs::write(repository.scratch.file("password"), "p").unwrap();
    back_up(&format!("{spec}&init=on"), Some(9), vec![TestWrite::Bytes(0, vec![7; 9])]).unwrap();
    assert!(repository.run(&["cat", "config"]).contains("\"version\": 2"));
    repository.check();
    // restic adds to it with its own chunker.
    repository.write("a", &disk(1, 3 * MIB));
    repository.run(&["backup", "."]);
    repository.check();
    // Only the owner may read it.
    let below = files_below(&place).into_iter().filter(|file| file.parent() != Some(&place));
    let modes = below.map(|file| {
        use std::os::unix::fs::MetadataExt as _;
        (
            fs::metadata(&file).unwrap().mode() & 0o777,
            fs::metadata(file.parent().unwrap()).unwrap().mode() & 0o077,
        )
    });
    assert!(modes.collect::<Vec<_>>().iter().all(|modes| *modes == (0o400, 0)));
}

#[test]
fn wrong_targets_are_refused_before_anything_is_written() {
    let restic = require_peer!("restic");
    let repository = Repository::new(restic, "2");
    let before = repository.files();
    let fails = |place: &str, more: &str| {
        let spec = repository.spec(place) + more;
        back_up(&spec, Some(9), vec![]).unwrap_err()
    };
    for (place, more, words) in [
        ("#new", "", "no path"),
        ("#new/a//b", "", "no path"),
        ("#new/a/../b", "", "no path"),
        ("#latest/a", "", "read-only"),
        ("#new/a", "&compression=some", "auto, max or off"),
        ("#new/a", "&parent=ffff", "no snapshot"),
        ("#new/a", "&host=", "host= has an empty value"),
        ("#new/a", "&tag=", "tag= has an empty value"),
    ] {
        let error = fails(place, more);
        assert!(format!("{error} {:?}", error.remedy()).contains(words), "{place}{more}: {error}");
        assert!(error.remedy().is_some());
    }
    let huge = back_up(&repository.spec("#new/a"), Some(1 << 50), vec![]).unwrap_err();
    assert_eq!(huge.kind(), Kind::Unsupported);
    fs::write(repository.scratch.file("password"), "other").unwrap();
    assert_eq!(fails("#new/a", "").kind(), Kind::Refused);
    assert_eq!(repository.files(), before);
}

#[test]
fn what_is_written_during_a_flush_is_in_the_next_snapshot() {
    let restic = require_peer!("restic");
    let repository = Repository::new(restic, "2");
    let bytes = disk(31, 24 * MIB);
    let repository = Arc::new(repository);
    let spec = DeviceSpec::parse(repository.spec("#new/disk").as_ref()).unwrap();
    let locked = repository.clone();
    let parts: Vec<_> = bytes.chunks(MIB).map(<[u8]>::to_vec).collect();
    on_a_worker(move || async move {
        let intent = Intent::target(24 << 20);
        let opened = registry().open_target(&spec, Vec::new(), intent).await;
        let (stack, preparation) = opened.unwrap();
        preparation.run().await.unwrap();
        let mut pending = Vec::new();
        for (number, part) in parts.into_iter().enumerate() {
            let write = TestWrite::Bytes((number * MIB) as u64, part).request();
            pending.push(stack.device().submit(write));
            if number % 5 == 2 {
                pending.push(stack.device().submit(Request::flush()));
            }
        }
        for request in pending {
            request.await.unwrap();
        }
        stack.device().submit(Request::flush()).await.unwrap();
        let said = locked.fails(&["prune"]);
        assert!(said.contains("already locked"), "{said}");
        // A second flush makes no other snapshot.
        stack.device().submit(Request::flush()).await.unwrap();
    });
    assert!(repository.restored("disk") == bytes);
    let count = repository.list("snapshots").len();
    assert!((1..=7).contains(&count), "{count}");
    repository.check();
}

#[test]
fn disks_above_2_tib_have_chunks_of_4_mib() {
    let restic = require_peer!("restic");
    let repository = Repository::new(restic, "2");
    let size = (2 << 40) + 12_345;
    let writes = [(0, 1000), (size - 9 * MIB as u64, 9 * MIB), ((1 << 40) + 77, 5 * MIB)];
    let mut rng = Rng::new(3);
    let bytes = writes.map(|(at, len)| {
        let mut bytes = vec![0; len];
        rng.fill(&mut bytes);
        (at, bytes)
    });
    let copy = |intent: Intent, writes: Vec<TestWrite>| {
        let spec = DeviceSpec::parse(repository.spec("#new/disk").as_ref()).unwrap();
        on_a_worker(move || async move {
            let opened = registry().open_target(&spec, Vec::new(), intent).await;
            let (stack, preparation) = opened.unwrap();
            preparation.run().await.unwrap();
            assert_eq!(stack.device().facts().block.preferred, 4 << 20);
            for write in writes {
                stack.device().submit(write.request()).await.unwrap();
            }
            stack.device().submit(Request::flush()).await.unwrap();
        });
    };
    let all = bytes.clone().map(|(at, bytes)| TestWrite::Bytes(at, bytes));
    copy(Intent::target(size), all.to_vec());
    copy(Intent::TARGET, vec![TestWrite::Bytes(3 << 39, vec![9; 10])]);
    let spec = repository.spec("#latest/disk");
    on_a_worker(move || async move {
        let stack = open(&spec).await.unwrap();
        assert_eq!(stack.device().facts().size, size);
        for (at, expected) in
            bytes.into_iter().chain([(3 << 39, vec![9; 10]), (1 << 39, vec![0; 99])])
        {
            let room = Reservation::unpooled(expected.len());
            let reply = stack.device().submit(Request::read(at, room)).await.unwrap();
            match reply {
                Reply::Data(data) => assert!(data.bytes() == expected, "{at}"),
                Reply::Hole => assert!(expected.iter().all(|byte| *byte == 0), "{at}"),
                other => panic!("{other:?}"),
            }
        }
    });
    repository.check();
    let data = repository.pack_bytes();
    assert!(data < 25 << 20, "{data}");
}

/// A lock of another program.
pub(crate) fn foreign_lock(repository: &Repository, lock: &serde_json::Value) -> Digest {
    let password = crate::peer_tests::PASSWORD.as_bytes();
    let storage = Arc::new(DirectoryStorage::new(repository.scratch.file("repo")));
    let reader = RepositoryReader::open(storage, password).unwrap();
    reader.put("locks", lock.to_string().as_bytes()).unwrap()
}

#[test]
fn locks_of_others_are_respected() {
    let restic = require_peer!("restic");
    let repository = Repository::new(restic, "2");
    let time = jiff::Timestamp::now();
    let lock = |pid: u32, host: &str, exclusive: bool| json!({ "time": time, "exclusive": exclusive, "hostname": host, "username": "u", "pid": pid, "uid": 1, "gid": 1 });
    let spec = repository.spec("#new/disk");
    let back_up = || back_up(&spec, Some(9), vec![TestWrite::Bytes(0, vec![1; 9])]);
    // Others that add files: one on this host, whose process may run in another container; one that was not refreshed.
    let host = rustix::system::uname().nodename().to_str().unwrap().to_owned();
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let here = foreign_lock(&repository, &lock(ended.id(), &host, false));
    let other = foreign_lock(&repository, &lock(1, "another host", false));
    let mut old = lock(2, "another host", false);
    old["time"] = json!("2026-01-02T03:04:05Z");
    let old = foreign_lock(&repository, &old);
    back_up().unwrap();
    let mut expected = [here.to_string(), other.to_string()];
    expected.sort();
    let mut left = repository.list("locks");
    left.sort();
    assert_eq!(left, expected, "{old}");
    // One that is no lock.
    let damaged = repository.scratch.file("repo").join(format!("locks/{}", "0".repeat(64)));
    fs::write(&damaged, "x").unwrap();
    let error = back_up().unwrap_err();
    assert!(error.remedy().unwrap().contains("restic unlock"), "{error}");
    fs::remove_file(damaged).unwrap();
    // One that removes files.
    foreign_lock(&repository, &lock(77, "a\u{1b}b", true));
    let before = repository.files();
    let error = back_up().unwrap_err();
    assert_eq!(error.kind(), Kind::InUse);
    let text = format!("{error} {}", error.remedy().unwrap());
    assert!(
        text.contains("process 77 of u on a\\u{1b}b") && text.contains("restic unlock"),
        "{text}"
    );
    assert_eq!(repository.files(), before);
    repository.run(&["unlock", "--remove-all"]);
    back_up().unwrap();
    repository.check();
}

/// A directory whose file system fails at one moment, and stays full: or a process that is killed then.
struct FailingStorage {
    inner: DirectoryStorage,
    /// Changes that succeed.
    left: AtomicUsize,
}

impl FailingStorage {
    fn step(&self) -> Result<(), RepositoryFault> {
        let step = |left: usize| left.checked_sub(1);
        let passed = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, step);
        passed.map(drop).map_err(|_| Error::new(Kind::NoSpace, "no space is left").into())
    }
}

impl RepositoryStorage for FailingStorage {
    fn parallel(&self) -> usize {
        self.inner.parallel()
    }

    fn list(&self, folder: &str) -> Result<Vec<String>, RepositoryFault> {
        self.inner.list(folder)
    }

    fn whole(&self, file: &str, most: u64) -> Result<Vec<u8>, RepositoryFault> {
        self.inner.whole(file, most)
    }

    fn range(&self, file: &str, at: u64, len: usize) -> Result<Vec<u8>, RepositoryFault> {
        self.inner.range(file, at, len)
    }

    fn size(&self, file: &str) -> Result<u64, RepositoryFault> {
        self.inner.size(file)
    }

    fn check_writable(&self) -> Result<(), RepositoryFault> {
        Ok(())
    }

    fn make(&self) -> Result<(), RepositoryFault> {
        self.step()?;
        self.inner.make()
    }

    fn hold(&self) -> Result<(), RepositoryFault> {
        self.inner.hold()
    }

    fn check_held(&self) -> Result<(), RepositoryFault> {
        self.inner.check_held()
    }

    fn put_new(&self, file: &str, bytes: &[u8]) -> Result<bool, RepositoryFault> {
        self.step()?;
        self.inner.put_new(file, bytes)
    }

    fn remove(&self, file: &str) -> Result<(), RepositoryFault> {
        self.step()?;
        self.inner.remove(file)
    }
}

/// A copy of these writes through a storage that fails after some changes.
fn back_up_failing(
    place: &Path,
    steps: usize,
    size: Option<u64>,
    writes: &[TestWrite],
) -> Result<(), Error> {
    let inner = DirectoryStorage::new(place);
    let storage = Arc::new(FailingStorage { inner, left: AtomicUsize::new(steps) });
    let mut place = place_of(storage, PACK_SIZE);
    place.password = crate::peer_tests::PASSWORD.into();
    copy_to(place, size, writes)
}

#[test]
fn a_failure_at_any_moment_leaves_finished_snapshots_and_the_next_backup_succeeds() {
    let restic = require_peer!("restic");
    let mut rng = Rng::new(11);
    let first = disk(21, 18 * MIB);
    let mut second = first.clone();
    let later = changes(&mut second, &mut rng);
    let all = all_of(&first, &mut rng);
    let steps = if long() { 1 } else { 4 };
    for way in 0..2 {
        let mut failures = 0;
        for left in (0..).step_by(steps) {
            let repository = Repository::absent(restic.clone());
            let place = repository.scratch.file("repo");
            let (size, writes) =
                if way == 0 { (Some(first.len() as u64), &all) } else { (None, &later) };
            if way == 1 {
                back_up_failing(&place, usize::MAX, Some(first.len() as u64), &all).unwrap();
            }
            let outcome = back_up_failing(&place, left, size, writes);
            if let Err(error) = &outcome {
                assert_eq!(error.kind(), Kind::NoSpace, "{left}: {error}");
                failures += 1;
            }
            if way == 1 {
                repository.run(&["check", "--read-data", "--no-lock"]);
                let expected = if outcome.is_err() { &first } else { &second };
                assert!(repository.read("latest", "disk").unwrap() == *expected, "{left}");
            }
            if way == 0 && !place.join("config").exists() {
                // A key without a repository is removed by hand.
                let again = back_up_failing(&place, usize::MAX, size, writes);
                assert_eq!(again.is_err(), left == 2, "{left}");
                if again.is_err() {
                    fs::remove_dir_all(&place).unwrap();
                }
            }
            back_up_failing(&place, usize::MAX, size, writes).unwrap();
            let expected = if way == 0 { &first } else { &second };
            assert!(repository.restored("disk") == *expected, "{left}");
            repository.run(&["unlock", "--remove-all"]);
            repository.run(&["check", "--read-data"]);
            if outcome.is_ok() {
                break;
            }
        }
        assert!(failures > 1, "{failures}");
    }
}

/// A copy to `#new/disk` of 1 MiB that does this before its flush.
fn back_up_around(
    repository: &Repository,
    during: impl FnOnce() + Send + 'static,
) -> Result<(), Error> {
    let spec = DeviceSpec::parse(repository.spec("#new/disk").as_ref())?;
    on_a_worker(move || async move {
        let intent = Intent::target(MIB as u64);
        let (stack, preparation) = registry().open_target(&spec, Vec::new(), intent).await?;
        preparation.run().await?;
        let mut bytes = vec![0; MIB];
        Rng::new(77).fill(&mut bytes);
        stack.device().submit(TestWrite::Bytes(0, bytes).request()).await?;
        during();
        stack.device().submit(Request::flush()).await.map(drop)
    })
}

#[test]
fn a_repository_that_is_moved_away_fails_the_copy_and_another_one_stays_unchanged() {
    let restic = require_peer!("restic");
    for is_replaced in [false, true] {
        let repository = Repository::new(restic.clone(), "2");
        let other = Repository::new(restic.clone(), "2");
        let (place, away) = (repository.scratch.file("repo"), repository.scratch.file("away"));
        let (from, to, source) = (place.clone(), away.clone(), other.scratch.file("repo"));
        let error = back_up_around(&repository, move || {
            fs::rename(&from, &to).unwrap();
            if is_replaced {
                fs::rename(source, &from).unwrap();
            }
        });
        let error = error.unwrap_err();
        assert_eq!(error.kind(), Kind::NotFound, "{error}");
        assert!(format!("{error:?}").contains("the repository is gone"), "{error:?}");
        assert!(error.remedy().is_some());
        if is_replaced {
            let names: Vec<_> = files_below(&place)
                .iter()
                .map(|file| file.parent().unwrap().file_name().unwrap().to_owned())
                .collect();
            assert_eq!(names.len(), 2, "config and a key: {names:?}");
            fs::rename(&place, other.scratch.file("repo")).unwrap();
            other.check();
        } else {
            assert!(!place.exists());
        }
        fs::rename(&away, &place).unwrap();
        assert!(repository.list("snapshots").is_empty());
        repository.check();
    }
    // A folder that is absent is not made.
    let repository = Repository::new(restic, "2");
    let data = repository.scratch.file("repo").join("data");
    let removed = data.clone();
    let error = back_up_around(&repository, move || fs::remove_dir_all(removed).unwrap());
    assert!(format!("{:?}", error.unwrap_err()).contains("the repository is gone"));
    assert!(!data.exists());
}

#[test]
fn first_runs_at_once_share_one_repository() {
    let restic = require_peer!("restic");
    for round in 0..4 {
        let repository = Repository::absent(restic.clone());
        let start = std::sync::Barrier::new(3);
        std::thread::scope(|scope| {
            for number in 0..3 {
                let (start, repository) = (&start, &repository);
                scope.spawn(move || {
                    let spec = repository.spec(&format!("#new/disk{number}")) + "&init=on";
                    start.wait();
                    back_up(&spec, Some(9), vec![TestWrite::Bytes(0, vec![number; 9])]).unwrap();
                });
            }
        });
        for number in 0..3 {
            assert_eq!(repository.restored(&format!("disk{number}")), vec![number; 9], "{round}");
        }
        assert_eq!(repository.list("keys").len(), 1, "{round}");
        repository.check();
    }
}

#[test]
fn no_repository_is_made_over_remains_of_another_one() {
    let restic = require_peer!("restic");
    let repository = Repository::new(restic, "2");
    let place = repository.scratch.file("repo");
    let spec = repository.spec("#new/disk") + "&init=on";
    back_up(&spec, Some(9), vec![TestWrite::Bytes(0, vec![7; 9])]).unwrap();
    fs::remove_file(place.join("config")).unwrap();
    fs::remove_dir_all(place.join("keys")).unwrap();
    for left in ["data", "index", "snapshots"] {
        let before = repository.files();
        let error = back_up(&spec, Some(9), vec![]).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage, "{error}");
        assert!(
            error.to_string().contains(&format!("remains of another one, such as {left}/")),
            "{error}"
        );
        assert_eq!(repository.files(), before);
        fs::remove_dir_all(place.join(left)).unwrap();
    }
    back_up(&spec, Some(9), vec![TestWrite::Bytes(0, vec![7; 9])]).unwrap();
    repository.check();
}

#[test]
fn a_lock_or_a_pack_that_is_removed_during_a_copy_fails_it() {
    let restic = require_peer!("restic");
    let repository = Repository::new(restic, "2");
    let locks = repository.scratch.file("repo").join("locks");
    let folder = locks.clone();
    let error = back_up_around(&repository, move || {
        for lock in files_below(&folder) {
            fs::remove_file(lock).unwrap();
        }
    });
    let error = error.unwrap_err();
    assert!(error.to_string().contains("lock of this backup was removed"), "{error}");
    assert!(repository.list("snapshots").is_empty() && files_below(&locks).is_empty());
    // Without a lock, a prune may remove the packs: restic would not write again what an index names.
    assert!(repository.list("index").is_empty());
    // The packs that it has written are found.
    back_up_around(&repository, || {}).unwrap();
    assert_eq!(repository.list("snapshots").len(), 1);
    let data = repository.scratch.file("repo").join("data");
    let error = back_up_around(&repository, move || {
        for pack in files_below(&data) {
            fs::remove_file(pack).unwrap();
        }
    });
    let error = error.unwrap_err();
    assert!(error.to_string().contains("data/"), "{error}");
    assert_eq!(repository.list("snapshots").len(), 1);
}

#[test]
fn parts_are_never_copied_over_a_base_that_is_not_the_newest() {
    let restic = require_peer!("restic");
    let repository = Repository::new(restic, "2");
    let spec = repository.spec("#new/disk");
    let part = |at: u64| vec![TestWrite::Bytes(at, vec![at as u8 + 1; 9])];
    back_up(&spec, Some(MIB as u64), part(0)).unwrap();
    // Another program backs up the disk during the copy.
    for other_is_full in [false, true] {
        let before = repository.list("snapshots").len();
        let (inner, other) = (spec.clone(), spec.clone());
        let error = on_a_worker(move || async move {
            let spec = DeviceSpec::parse(inner.as_ref())?;
            let opened = registry().open_target(&spec, Vec::new(), Intent::TARGET).await;
            let (stack, preparation) = opened?;
            preparation.run().await?;
            stack.device().submit(TestWrite::Bytes(100, vec![3; 9]).request()).await?;
            let size = other_is_full.then_some(MIB as u64);
            let work = move || back_up(&other, size, vec![TestWrite::Bytes(50, vec![2; 9])]);
            std::thread::spawn(work).join().unwrap()?;
            stack.device().submit(Request::flush()).await.map(drop)
        });
        let error = error.unwrap_err();
        assert_eq!(error.kind(), Kind::InUse, "{error}");
        assert_eq!(repository.list("snapshots").len(), before + 1);
    }
    let bytes = back_up(&spec, None, part(20)).unwrap();
    assert!(bytes[50..59] == [2; 9] && bytes[20..29] == [21; 9]);
    // A snapshot of the future is newest, and hides the next one.
    repository.write("disk", &disk(5, MIB));
    let host = rustix::system::uname().nodename().to_str().unwrap().to_owned();
    let source = repository.scratch.file("disks");
    repository.run(&[
        "backup",
        "--host",
        &host,
        "--time",
        "2199-01-02 03:04:05",
        source.join("disk").to_str().unwrap(),
    ]);
    let path = source.join("disk");
    let far = repository.spec(&format!("#new/{}", path.to_str().unwrap().trim_start_matches('/')));
    let error = back_up(&far, None, part(7)).unwrap_err();
    let text = format!("{error} {}", error.remedy().unwrap());
    assert!(text.contains("2199-01-02") && text.contains("parent="), "{text}");
    let newest = repository.list("snapshots").len();
    back_up(&format!("{far}&parent=latest"), None, part(7)).unwrap();
    assert_eq!(repository.list("snapshots").len(), newest + 1);
    repository.check();
}

#[test]
fn names_of_disks_and_points_are_those_of_files_and_tags() {
    let check = |names: &[&str]| crate::check_disk_names(names.iter().copied());
    check(&["vda", "vdb", "a/vda"]).unwrap();
    for names in
        [&["a", "a/b"][..], &["a/b", "a"], &["a,b"], &["a:point=b"], &["a:checkpoint="], &[""]]
    {
        assert_eq!(check(names).unwrap_err().kind(), Kind::Usage, "{names:?}");
    }
    crate::check_point_name("monday-2").unwrap();
    for name in ["a,b", "x:point=y", ""] {
        assert_eq!(crate::check_point_name(name).unwrap_err().kind(), Kind::Usage, "{name}");
    }
}
