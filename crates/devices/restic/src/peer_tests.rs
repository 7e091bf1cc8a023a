//! Repositories that restic has written.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_block::{ContextSet, Reply, Request, Result};
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, long, text};

use crate::test_support::{files_below, on_a_worker, open, read_all};

const LIMIT: Duration = Duration::from_secs(120);
pub(crate) const PASSWORD: &str = "pass word";
pub(crate) const MIB: usize = 1 << 20;

/// A repository, and files to back up.
pub(crate) struct Repository {
    restic: PeerProgram,
    pub(crate) scratch: ScratchDir,
}

impl Repository {
    /// A place without a repository.
    pub(crate) fn absent(restic: PeerProgram) -> Repository {
        let scratch = ScratchDir::new().unwrap();
        fs::write(scratch.file("password"), format!("{PASSWORD}\n")).unwrap();
        fs::create_dir(scratch.file("disks")).unwrap();
        Repository { restic, scratch }
    }

    pub(crate) fn new(restic: PeerProgram, version: &str) -> Repository {
        let repository = Repository::absent(restic);
        repository.run(&["init", "--repository-version", version]);
        repository
    }

    pub(crate) fn run(&self, args: &[&str]) -> String {
        let mut command = self.restic.command();
        command.args(args).current_dir(self.scratch.file("disks"));
        command.arg("--no-cache").env("RESTIC_REPOSITORY", self.scratch.file("repo"));
        command.env("RESTIC_PASSWORD_FILE", self.scratch.file("password"));
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// What restic says when it fails.
    pub(crate) fn fails(&self, args: &[&str]) -> String {
        let mut command = self.restic.command();
        command.args(args).arg("--no-cache").env("RESTIC_REPOSITORY", self.scratch.file("repo"));
        command.env("RESTIC_PASSWORD_FILE", self.scratch.file("password"));
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(!output.status.success(), "{args:?}: {}", text(&output.stdout));
        text(&output.stderr)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.scratch.file("disks").join(name), bytes).unwrap();
    }

    pub(crate) fn spec(&self, place: &str) -> String {
        let (repo, password) = (self.scratch.file("repo"), self.scratch.file("password"));
        format!("restic:{}{place}?password-file={}", repo.display(), password.display())
    }

    /// Reads a file of a snapshot.
    pub(crate) fn read(&self, snapshot: &str, path: &str) -> Result<Vec<u8>> {
        let spec = self.spec(&format!("#{snapshot}/{path}"));
        on_a_worker(|| async move { read_all(&open(&spec).await?, 3 * MIB / 2).await })
    }

    /// Packs, index files and others, in order.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        files_below(&self.scratch.file("repo"))
    }
}

/// Bytes that compress, random ones and zeroes, in long runs.
pub(crate) fn disk(seed: u64, size: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut bytes = rng.disk(size, 3 << 20, 40);
    let quarter = size / 4;
    let letters = (0..quarter).map(|at| b"some text "[at % 10] ^ (at >> 12) as u8);
    bytes.splice(quarter..2 * quarter, letters);
    bytes
}

/// Three snapshots with several files, read back; `more`: options of the backup.
fn are_read(restic: PeerProgram, version: &str, more: &[&str]) -> Repository {
    let repository = Repository::new(restic, version);
    let mut first = disk(1, 12 * MIB + 77);
    let sparse = [vec![0; 5 * MIB], vec![1; 100], vec![0; 9 * MIB]].concat();
    let mut rng = Rng::new(2);
    let mut ids = Vec::new();
    for round in 0..3 {
        repository.write("first.raw", &first);
        repository.write("sparse.raw", &sparse);
        repository.write("empty.raw", b"");
        repository.write("a \\ \"b\"\té.raw", &first[..1000]);
        let stdout = repository.run(&[&["backup", "--json", "--host", "h", "."], more].concat());
        let summary = stdout.lines().rev().find(|line| line.contains("snapshot_id")).unwrap();
        let id = summary.split("\"snapshot_id\":\"").nth(1).unwrap()[..64].to_owned();
        ids.push((id, first.clone()));
        let at = rng.below(11) as usize * MIB;
        rng.fill(&mut first[at..at + MIB / 2 + round]);
    }
    for (id, first) in &ids {
        assert!(repository.read(&id[..10], "first.raw").unwrap() == *first, "{id}");
    }
    let (_, last) = &ids[2];
    assert!(repository.read("latest", "first.raw").unwrap() == *last);
    assert!(repository.read("latest", "a%20\\%20\"b\"%09é.raw").unwrap() == last[..1000]);
    assert!(repository.read("latest", "empty.raw").unwrap().is_empty());
    assert!(repository.read("latest", "sparse.raw").unwrap() == sparse);
    let spec = repository.spec("#latest/sparse.raw");
    let holes = on_a_worker(|| async move {
        let stack = open(&spec).await.unwrap();
        let size = stack.device().facts().size;
        let request = Request::extents(0, size, ContextSet::first());
        let Reply::Extents(lists) = stack.device().submit(request).await.unwrap() else { panic!() };
        assert_eq!(lists[0].total(), size);
        lists[0].runs().iter().filter(|run| run.state == 3).map(|run| run.len).sum::<u64>()
    });
    // restic cuts runs of zeroes each 512 KiB.
    assert!(holes >= 12 << 20, "{holes}");
    repository
}

#[test]
fn repositories_of_both_versions_are_read() {
    let restic = require_peer!("restic");
    are_read(restic.clone(), "1", &[]);
    let repository = are_read(restic, "2", &["--compression", "max"]);
    // A second key, and what prune leaves.
    fs::write(repository.scratch.file("second"), "another").unwrap();
    let second = repository.scratch.file("second");
    repository.run(&["key", "add", "--new-password-file", second.to_str().unwrap()]);
    let before = repository.read("latest", "first.raw").unwrap();
    repository.run(&["forget", "--keep-last", "1", "--prune", "--max-unused", "0"]);
    fs::copy(second, repository.scratch.file("password")).unwrap();
    assert!(repository.read("latest", "first.raw").unwrap() == before);
    assert!(repository.read("latest", "sparse.raw").is_ok());
}

#[test]
fn damage_to_a_repository_is_an_error_and_never_other_bytes() {
    let restic = require_peer!("restic");
    let repository = Repository::new(restic, "2");
    let bytes = disk(3, 6 * MIB);
    repository.write("disk.raw", &bytes);
    repository.run(&["backup", "--compression", "off", "."]);
    let files = repository.files();
    let files: Vec<_> = files.iter().filter(|file| !is_lock(file)).collect();
    let mut rng = Rng::new(4);
    let (mut failed, cases) = (0, if long() { 500 } else { 10 });
    for case in 0..cases {
        let path = files[rng.below(files.len() as u64) as usize];
        let file = fs::OpenOptions::new().read(true).write(true).open(path);
        let Ok(file) = file else { continue };
        let len = file.metadata().unwrap().len();
        let (at, mut byte) = (rng.below(len), [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << rng.below(8)], at).unwrap();
        match repository.read("latest", "disk.raw") {
            Ok(read) => assert!(read == bytes, "case {case}: {}", path.display()),
            Err(_) => failed += 1,
        }
        file.write_all_at(&byte, at).unwrap();
    }
    assert!(failed > cases / 4, "{failed}");
    assert!(repository.read("latest", "disk.raw").unwrap() == bytes);
}

pub(crate) fn is_lock(file: &Path) -> bool {
    file.parent().is_some_and(|folder| folder.ends_with("locks"))
}
