//! Repositories with many packs, and packs that no index names.

use std::fs;
use std::sync::Arc;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::Rng;
use jiff::Timestamp;
use serde_json::json;

use crate::backup_tests::foreign_lock;
use crate::digest::Digest;
use crate::fixture::PASSWORD;
use crate::index::BlobKind;
use crate::peer_tests::{MIB, Repository as PeerRepository, disk};
use crate::repository::{Repository, RepositoryReader};
use crate::storage::{DirectoryStorage, RepositoryStorage};
use crate::test_place::{make_repository, place};
use crate::test_support::{TestWrite, back_up, files_below};
use crate::writer::place::FoundRepository;
use crate::writer::session::BackupSession;
use crate::writer::snapshot_text::SnapshotFacts;
use crate::writer::tree_text::FileNode;

fn begin(storage: &Arc<dyn RepositoryStorage>, pack_size: usize) -> Arc<BackupSession> {
    let place = place(storage.clone(), pack_size);
    let reader = place.open().unwrap().unwrap();
    place.begin(Some(FoundRepository::load(reader).unwrap()), &[]).unwrap()
}

/// Saves blobs, and makes a snapshot with a file of them.
fn publish(session: &BackupSession, blobs: &[Vec<u8>]) {
    let digests = blobs.iter().map(|blob| {
        let digest = Digest::of(blob);
        session.save(BlobKind::Data, digest, blob).unwrap();
        digest
    });
    let content: Vec<_> = digests.collect();
    let size = blobs.iter().map(|blob| blob.len() as u64).sum();
    let node = FileNode { size, content: &content, time: Timestamp::now(), owner: [0, 0] };
    let facts = SnapshotFacts {
        host: "h".to_owned(),
        tags: Vec::new(),
        parent: None,
        bases: Default::default(),
    };
    session.publish(&[("disk", node)], &facts).unwrap();
}

#[test]
fn a_repository_of_10000_packs_is_written_and_read() {
    let restic = require_peer!("restic");
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let storage: Arc<dyn RepositoryStorage> = Arc::new(DirectoryStorage::new(dir.path()));
    make_repository(&*storage);
    let (packs, blobs_of_pack) = (10_000, 4);
    let mut rng = Rng::new(3);
    let blobs: Vec<Vec<u8>> = (0..packs * blobs_of_pack)
        .map(|_| {
            let mut blob = vec![0; 68];
            rng.fill(&mut blob);
            blob
        })
        .collect();
    let session = begin(&storage, blobs_of_pack * 100);
    publish(&session, &blobs);
    drop(session);
    let count = || files_below(&dir.path().join("data")).len();
    assert_eq!(count(), packs + 1);
    let reader = RepositoryReader::open(storage.clone(), PASSWORD.as_bytes()).unwrap();
    let repository = Repository::load(reader).unwrap();
    for blob in blobs.iter().step_by(7) {
        let (_, read) = repository.blob(BlobKind::Data, &Digest::of(blob)).unwrap();
        assert!(read == *blob);
    }
    // 32 bytes for the name of a pack, which has more blobs else.
    let names = packs * 32;
    let bytes = repository.index().heap_bytes() - names;
    let each = bytes as f64 / blobs.len() as f64;
    println!("{each:.1} bytes a blob, {names} bytes for names of packs");
    assert!(each <= 48.0, "{each}");
    drop(repository);
    // The same blobs again are a snapshot with its directory.
    publish(&begin(&storage, blobs_of_pack * 100), &blobs);
    assert!(count() <= packs + 2, "{}", count());
    let mut command = restic.command();
    command.args(["check", "--no-cache"]).env("RESTIC_REPOSITORY", dir.path());
    let output = blockhaul_testkit::tools::output(
        command.env("RESTIC_PASSWORD", PASSWORD),
        std::time::Duration::from_secs(300),
    );
    let said = blockhaul_testkit::tools::text(&output.unwrap().stdout);
    assert!(said.contains("no errors were found"), "{said}");
}

/// Removes what names the packs of a repository.
fn forget_all(repository: &PeerRepository) {
    for folder in ["index", "snapshots"] {
        for file in files_below(&repository.scratch.file("repo").join(folder)) {
            fs::remove_file(file).unwrap();
        }
    }
}

#[test]
fn packs_that_no_index_names_are_used_and_named() {
    let restic = require_peer!("restic");
    let repository = PeerRepository::new(restic, "2");
    let spec = repository.spec("#new/disk");
    let mut bytes = disk(41, 40 * MIB + 5);
    let all = |bytes: &[u8]| vec![TestWrite::Bytes(0, bytes.to_vec())];
    let size = Some(bytes.len() as u64);
    back_up(&spec, size, all(&bytes)).unwrap();
    let data = repository.scratch.file("repo").join("data");
    let packs = files_below(&data);
    assert!(packs.len() > 1, "{packs:?}");
    forget_all(&repository);
    // One that is cut off, and one that was never a pack.
    let cut = data.join("00").join("0".repeat(64));
    fs::create_dir_all(cut.parent().unwrap()).unwrap();
    fs::write(&cut, &fs::read(&packs[0]).unwrap()[..99]).unwrap();
    let other = data.join("01").join(format!("01{}", "0".repeat(62)));
    fs::create_dir_all(other.parent().unwrap()).unwrap();
    fs::write(&other, "x").unwrap();
    back_up(&spec, size, all(&bytes)).unwrap();
    // A directory with another time.
    assert!(files_below(&data).len() <= packs.len() + 3, "{packs:?}");
    fs::remove_file(cut).unwrap();
    fs::remove_file(other).unwrap();
    let clean = |repository: &PeerRepository| {
        let output = repository.run(&["check", "--read-data", "--no-lock"]);
        assert!(output.contains("no errors were found"), "{output}");
        !output.contains("additional files") && !output.contains("several indexes")
    };
    assert!(clean(&repository));
    // Beside a program that may be about to name its packs, only those that are used are named.
    forget_all(&repository);
    let time = Timestamp::now();
    foreign_lock(
        &repository,
        &json!({ "time": time, "exclusive": false, "hostname": "other", "username": "u", "pid": 1, "uid": 1, "gid": 1 }),
    );
    bytes[..39 * MIB].fill(0);
    bytes[39 * MIB..].fill(9);
    back_up(&spec, size, all(&bytes)).unwrap();
    assert!(!clean(&repository));
    repository.run(&["unlock", "--remove-all"]);
    back_up(&spec, size, all(&bytes)).unwrap();
    assert!(clean(&repository));
}

#[test]
fn a_storage_that_fails_during_the_search_fails_the_copy() {
    let repository = PeerRepository::new(require_peer!("restic"), "2");
    let spec = repository.spec("#new/disk");
    let back_up = |byte: u8| back_up(&spec, Some(9), vec![TestWrite::Bytes(0, vec![byte; 9])]);
    back_up(1).unwrap();
    let data = repository.scratch.file("repo").join("data");
    // A file in place of an empty folder of packs.
    let mut folders = (0..=255).map(|byte| data.join(format!("{byte:02x}")));
    let folder = folders.find(|folder| fs::remove_dir(folder).is_ok()).unwrap();
    fs::write(&folder, "x").unwrap();
    let error = back_up(2).unwrap_err();
    assert!(error.to_string().contains("cannot list"), "{error}");
    fs::remove_file(&folder).unwrap();
    back_up(2).unwrap();
    assert_eq!(repository.run(&["list", "locks", "--no-lock"]), "");
}
