//! Repositories, as devices.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use blockhaul_block::{ContextSet, Error, HOLE, Kind, Reply, Request, Result, ZERO};
use blockhaul_catalog::Stack;
use blockhaul_io::Reservation;
use serde_json::json;

use crate::RepositoryFault;
use crate::digest::Digest;
use crate::fixture::{Numbers, PASSWORD, TestRepository, chunks};
use crate::test_support::{on_a_worker, open, read_all};

/// Bytes of a request.
const STEP: usize = 7000;

/// A description with the password.
fn described(repository: &TestRepository, place: &str, options: &str) -> String {
    let password = repository.path().join("password");
    fs::write(&password, PASSWORD).unwrap();
    let path = repository.path().display();
    format!("restic:{path}{place}?password-file={}{options}", password.display())
}

fn fails(spec: &str) -> Error {
    let spec = spec.to_owned();
    on_a_worker(|| async move { open(&spec).await.err().unwrap() })
}

async fn read(stack: &Stack, at: u64, len: usize) -> Result<Vec<u8>> {
    match stack.device().submit(Request::read(at, Reservation::unpooled(len))).await? {
        Reply::Data(data) => Ok(data.bytes().to_vec()),
        Reply::Hole => Ok(vec![0; len]),
        other => panic!("{other:?}"),
    }
}

fn fault(error: &Error) -> &RepositoryFault {
    std::error::Error::source(error).and_then(|cause| cause.downcast_ref()).unwrap()
}

#[test]
fn reads_and_extents_agree_with_the_file() {
    for seed in 0..24 {
        let mut numbers = Numbers::new(seed);
        let chunks = chunks(&mut numbers, 40);
        let mut repository = TestRepository::new(1 + (seed % 2) as u32);
        let id = repository.add_disk(&chunks, &mut numbers);
        let cache = ["&cache=1k", "&cache=10k", ""][numbers.below(3)];
        let spec = described(&repository, &format!("#{}/disk", &id.to_string()[..9]), cache);
        let whole = chunks.concat();
        on_a_worker(move || async move {
            let stack = open(&spec).await.unwrap();
            assert_eq!(stack.device().facts().size, whole.len() as u64);
            assert_eq!(read_all(&stack, STEP).await.unwrap(), whole, "seed {seed}");
            for _ in 0..50 {
                let at = numbers.below(whole.len());
                let len = 1 + numbers.below((whole.len() - at).min(9000));
                assert_eq!(read(&stack, at as u64, len).await.unwrap(), &whole[at..at + len]);
                holes_are_zeroes(&stack, &whole, at, len).await;
            }
            let zeroes = chunks.iter().filter(|chunk| chunk.iter().all(|byte| *byte == 0));
            let holes = holes_are_zeroes(&stack, &whole, 0, whole.len()).await;
            assert_eq!(holes, zeroes.map(Vec::len).sum::<usize>(), "seed {seed}");
        });
    }
}

/// Bytes of holes in a range.
async fn holes_are_zeroes(stack: &Stack, whole: &[u8], at: usize, len: usize) -> usize {
    let request = Request::extents(at as u64, len as u64, ContextSet::first());
    let Reply::Extents(lists) = stack.device().submit(request).await.unwrap() else { panic!() };
    assert_eq!(lists[0].total(), len as u64);
    let mut holes = 0;
    for (at, run) in lists[0].ranges(at as u64) {
        let is_hole = run.state == HOLE | ZERO;
        let bytes = &whole[at as usize..(at + run.len) as usize];
        assert!(!is_hole || bytes.iter().all(|byte| *byte == 0));
        holes += if is_hole { bytes.len() } else { 0 };
    }
    holes
}

#[test]
fn damage_anywhere_is_an_error_and_never_other_bytes() {
    let cases = if blockhaul_testkit::tools::long() { 5000 } else { 200 };
    let (mut failed, mut equal) = (0, 0);
    for seed in 0..cases {
        let mut numbers = Numbers::new(1000 + seed);
        let chunks = chunks(&mut numbers, 12);
        let mut repository = TestRepository::new(1 + (seed % 2) as u32);
        let id = repository.add_disk(&chunks, &mut numbers);
        let files = repository.files();
        damage(&files[numbers.below(files.len())], &mut numbers);
        let spec = described(&repository, &format!("#{id}/disk"), "");
        let read = on_a_worker(move || async move { read_all(&open(&spec).await?, STEP).await });
        match read {
            Ok(bytes) => {
                assert!(bytes == chunks.concat(), "seed {seed}");
                equal += 1;
            }
            Err(error) => {
                assert!(error.remedy().is_some(), "seed {seed}: {error}");
                failed += 1;
            }
        }
    }
    // Zeroes and the ends of packs are not read.
    assert!(failed > equal, "{failed} failed, {equal} equal");
}

/// Flips a bit, cuts a file off, removes it, or makes it longer.
fn damage(path: &Path, numbers: &mut Numbers) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    match numbers.below(8) {
        0 => fs::remove_file(path).unwrap(),
        1 => file.set_len(numbers.below(len) as u64).unwrap(),
        2 => file.write_all_at(&numbers.bytes(20), len as u64).unwrap(),
        _ => {
            let (at, mut byte) = (numbers.below(len) as u64, [0]);
            file.read_exact_at(&mut byte, at).unwrap();
            byte[0] ^= 1 << numbers.below(8);
            file.write_all_at(&byte, at).unwrap();
        }
    }
}

#[test]
fn errors_name_what_is_wrong_and_what_to_do() {
    let mut numbers = Numbers::new(1);
    let mut repository = TestRepository::new(2);
    let disk = vec![numbers.bytes(500), numbers.bytes(600)];
    repository.add_disk(&disk, &mut numbers);
    let text = |place: &str| fails(&described(&repository, place, "")).to_string();
    for (place, parts) in [
        ("", ["names no snapshot", "the newest of 1 are"]),
        ("#latest", ["names no path", "a/, disk"]),
        ("#latest/b", ["has no /b", "a/, disk"]),
        ("#latest/disk/x", ["/disk in the snapshot is no regular file", "choose"]),
        ("#latest/a/x", ["no index has blob", "restic check"]),
        ("#00ff/disk", ["no snapshot \"00ff\"", "(2026-01-02T02:04:05Z h)"]),
    ] {
        let text = text(place);
        assert!(parts.iter().all(|part| text.contains(part)), "{place}: {text}");
    }
    let spec = described(&repository, "#latest/disk", "&host=x");
    assert!(fails(&spec).to_string().contains("no snapshot has this host"));
    let spec = described(&repository, "#latest/disk", "");
    fs::write(repository.path().join("password"), "another").unwrap();
    let error = fails(&spec);
    assert!(matches!(fault(&error), RepositoryFault::WrongPassword { keys: 1, damaged: 0 }));
    assert_eq!(error.kind(), Kind::Refused);
    let error = fails(&spec.replace("#latest", "/data#latest"));
    assert!(matches!(fault(&error), RepositoryFault::NoRepository), "{error}");
    let newer = TestRepository::new(3);
    let error = fails(&described(&newer, "#latest/disk", ""));
    assert!(matches!(fault(&error), RepositoryFault::UnknownVersion(3)), "{error}");
}

#[test]
fn any_of_several_passwords_opens_a_repository() {
    let mut numbers = Numbers::new(2);
    let mut repository = TestRepository::new(2);
    repository.add_key("second");
    repository.write(&format!("keys/{}", Digest::of(b"other")), b"{");
    let disk = vec![numbers.bytes(500)];
    repository.add_disk(&disk, &mut numbers);
    for password in [PASSWORD, "second"] {
        let spec = described(&repository, "#latest/disk", "");
        fs::write(repository.path().join("password"), password).unwrap();
        let disk = disk.concat();
        on_a_worker(move || async move {
            assert_eq!(read_all(&open(&spec).await.unwrap(), STEP).await.unwrap(), disk);
        });
    }
}

#[test]
fn the_newest_snapshot_of_a_host_with_all_tags_is_the_latest() {
    let mut repository = TestRepository::new(2);
    let mut make = |byte: u8, time: &str, host: &str, tags: &[&str]| {
        let blob = vec![byte; 100];
        let pack = repository.add_pack("data", std::slice::from_ref(&blob));
        let content = [Digest::of(&blob).to_string()];
        let (tree, tree_pack) = repository.add_tree(json!([
            { "name": "disk", "type": "file", "size": 100, "content": content }
        ]));
        repository.add_file("index", &json!({ "packs": [pack, tree_pack] }));
        repository.add_snapshot(tree, time, host, tags)
    };
    make(1, "2026-01-01T00:00:00Z", "one", &["a", "b"]);
    make(2, "2026-01-01T02:00:00+03:00", "one", &["a"]);
    make(3, "2025-01-01T00:00:00Z", "two", &[]);
    for (options, byte) in
        [("", 1), ("&tag=a", 1), ("&tag=a,b", 1), ("&host=two", 3), ("&host=one", 1)]
    {
        let spec = described(&repository, "#latest/disk", options);
        on_a_worker(move || async move {
            assert_eq!(
                read_all(&open(&spec).await.unwrap(), STEP).await.unwrap(),
                [byte; 100],
                "{options}"
            );
        });
    }
}

#[test]
fn a_snapshot_with_damage_leaves_others_readable() {
    let mut numbers = Numbers::new(3);
    let mut repository = TestRepository::new(2);
    let (one, two) = (vec![numbers.bytes(900)], vec![numbers.bytes(800), numbers.bytes(10)]);
    let first = repository.add_disk(&one, &mut numbers);
    let index = |repository: &TestRepository| {
        let files = repository.files();
        files
            .into_iter()
            .filter(|file| file.parent().unwrap().ends_with("index"))
            .collect::<Vec<_>>()
    };
    let before = index(&repository);
    let second = repository.add_disk(&two, &mut numbers);
    for file in index(&repository).iter().filter(|file| !before.contains(file)) {
        fs::write(file, "damaged").unwrap();
    }
    let spec = described(&repository, &format!("#{first}/disk"), "");
    on_a_worker(move || async move {
        assert_eq!(read_all(&open(&spec).await.unwrap(), STEP).await.unwrap(), one.concat());
    });
    let error = fails(&described(&repository, &format!("#{second}/disk"), ""));
    let RepositoryFault::UnknownBlob { damaged_index, .. } = fault(&error) else {
        panic!("{error}")
    };
    assert!(damaged_index.is_some());
}

#[test]
fn a_blob_in_two_packs_is_read_from_either() {
    let mut numbers = Numbers::new(6);
    let mut repository = TestRepository::new(2);
    let disk = vec![numbers.bytes(900), numbers.bytes(800)];
    let content: Vec<_> = disk.iter().map(|chunk| Digest::of(chunk).to_string()).collect();
    let nodes = json!([{ "name": "disk", "type": "file", "size": 1700, "content": content }]);
    let packs = [0, 1].map(|_| repository.add_pack("data", &disk));
    let trees = [0, 1].map(|_| repository.add_tree(nodes.clone()));
    let names = [&packs[0], &packs[1], &trees[0].1, &trees[1].1].map(|pack| pack["id"].clone());
    let packs = [&packs[..], &trees.clone().map(|(_, pack)| pack)].concat();
    repository.add_file("index", &json!({ "packs": packs }));
    repository.add_snapshot(trees[0].0, "2026-01-01T00:00:00Z", "h", &[]);
    let spec = described(&repository, "#latest/disk", "");
    let file = |name: &serde_json::Value| {
        repository.path().join(crate::fault::pack_file(name.as_str().unwrap()))
    };
    for (one, way) in [(0, true), (1, true), (0, false), (1, false)] {
        for name in [&names[one], &names[2 + one]] {
            let (file, aside) = (file(name), repository.path().join("aside"));
            if way {
                fs::rename(&file, aside.with_extension(name.as_str().unwrap())).unwrap();
            } else {
                let mut bytes = fs::read(&file).unwrap();
                bytes[20] ^= 1;
                fs::write(&file, bytes).unwrap();
            }
        }
        let (spec, whole) = (spec.clone(), disk.concat());
        on_a_worker(move || async move {
            assert_eq!(read_all(&open(&spec).await.unwrap(), STEP).await.unwrap(), whole);
        });
        for name in [&names[one], &names[2 + one]] {
            let (file, aside) = (file(name), repository.path().join("aside"));
            if way {
                fs::rename(aside.with_extension(name.as_str().unwrap()), &file).unwrap();
            } else {
                let mut bytes = fs::read(&file).unwrap();
                bytes[20] ^= 1;
                fs::write(&file, bytes).unwrap();
            }
        }
    }
}

#[test]
fn parsers_take_any_text() {
    let mut numbers = Numbers::new(4);
    let digest = Digest::of(b"").to_string();
    let texts = [
        json!({ "supersedes": [digest], "packs": [{ "id": digest, "blobs": [{ "id": digest, "type": "tree",
            "offset": 1, "length": 99, "uncompressed_length": 7 }] }] }),
        json!({ "nodes": [{ "name": "a\\x41", "type": "file", "size": 3, "content": [digest] },
            { "name": "d", "type": "dir", "subtree": digest }] }),
        json!({ "time": "2026-01-02T03:04:05.678+01:00", "tree": digest, "tags": ["a"], "hostname": "h" }),
    ]
    .map(|text| text.to_string().into_bytes());
    let cases = if blockhaul_testkit::tools::long() { 1_000_000 } else { 20_000 };
    for _ in 0..cases {
        let mut text = texts[numbers.below(3)].clone();
        for _ in 0..1 + numbers.below(3) {
            let at = numbers.below(text.len());
            match numbers.below(4) {
                0 => text[at] = numbers.next() as u8,
                1 => text[at] = b"0123456789\\\"{}[],:-.en"[numbers.below(22)],
                2 => drop(text.drain(at..(at + numbers.below(30)).min(text.len()))),
                _ => text.splice(at..at, b"99999999999".iter().copied()).for_each(drop),
            }
            if text.is_empty() {
                break;
            }
        }
        // Neither panics, whatever they return.
        drop(crate::index::parse("index/x", &text));
        drop(crate::tree::parse(&text));
        drop(crate::snapshot::Snapshot::parse(Digest::of(b""), &text));
    }
}

/// Seconds that all threads of this process have computed.
fn processor_time() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<f64>().unwrap() / 100.0
}

/// A disk of 1 TiB in a million blobs of 1 MiB, of which the first alone has bytes.
#[test]
fn a_disk_of_a_million_blobs_opens_within_seconds() {
    let count: u32 = if blockhaul_testkit::tools::long() { 1 << 20 } else { 1 << 12 };
    let mut repository = TestRepository::new(2);
    let first = Numbers::new(5).bytes(1 << 20);
    let mut packs = vec![repository.add_pack("data", std::slice::from_ref(&first))];
    let digest = |number: u32| Digest::of(&number.to_le_bytes()).to_string();
    for pack in 0..count / 16 {
        let blobs = (0..16).map(|blob| {
            json!({ "id": digest(pack * 16 + blob), "type": "data", "offset": blob << 20, "length": 900_000,
                "uncompressed_length": 1 << 20 })
        });
        packs.push(json!({ "id": digest(1 << 30 | pack), "blobs": blobs.collect::<Vec<_>>() }));
    }
    let mut content = vec![Digest::of(&first).to_string()];
    content.extend((1..count).map(digest));
    let (tree, pack) = repository.add_tree(json!([
        { "name": "disk", "type": "file", "size": u64::from(count) << 20, "content": content }
    ]));
    packs.push(pack);
    for packs in packs.chunks(3000) {
        repository.add_file("index", &json!({ "packs": packs }));
    }
    drop((packs, content));
    repository.add_snapshot(tree, "2026-01-01T00:00:00Z", "h", &[]);
    let spec = described(&repository, "#latest/disk", "");
    on_a_worker(move || async move {
        let (begun, used) = (blockhaul_io::now(), processor_time());
        let stack = open(&spec).await.unwrap();
        assert_eq!(stack.device().facts().size, u64::from(count) << 20);
        assert_eq!(read(&stack, 0, 1).await.unwrap(), first[..1]);
        let (took, used) = (blockhaul_io::elapsed(begun), processor_time() - used);
        println!("opened and read in {took:?}, with {used} s of processor time");
        assert!(read(&stack, 5 << 20, 1).await.is_err());
    });
}
