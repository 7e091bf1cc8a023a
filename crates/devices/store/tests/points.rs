//! Stores made with [`StoreWriter`], read as devices.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use blockhaul_block::{Kind, Result};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_store::{
    BackupPoint, FullBackup, Increment, IncrementRanges, PointContent, Store, StoreWriter,
};
use blockhaul_testkit::conform::{self, ConformOptions, Subject};
use blockhaul_testkit::rng::{self, Rng};

const SIZE: u64 = (1 << 20) + 512;

fn registry() -> Registry {
    let mut backends = blockhaul_backends::all();
    backends.extend(blockhaul_store::all());
    Registry { backends, path: blockhaul_backends::PATH_SCHEME, ..Registry::default() }
}

async fn open(dir: &Path, point: &str) -> Result<Stack> {
    let spec = DeviceSpec::parse(format!("backup:{}?point={point}", dir.display()).as_ref())?;
    registry().open(&spec, Vec::new(), Intent::READ).await
}

fn on_a_worker<T: Send + 'static, F: Future<Output = T> + 'static>(
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig::default()).unwrap().block_on(work)
}

/// A store, and what the disk was at each of its points.
struct Made {
    folder: tempfile::TempDir,
    disks: Vec<(String, Vec<u8>)>,
}

impl Made {
    fn dir(&self) -> &Path {
        self.folder.path()
    }

    /// A full backup and increments of random ranges.
    fn new(rng: &mut Rng, increments: usize) -> Made {
        let mut made = Made { folder: tempfile::tempdir().unwrap(), disks: Vec::new() };
        made.full("p0", rng.disk(SIZE as usize, 40_000, 60));
        for number in 1..=increments {
            made.increment(&format!("p{number}"), rng);
        }
        made
    }

    fn point(&self, writer: &StoreWriter, name: &str) -> BackupPoint {
        let number = writer.next_number().unwrap();
        let (name, checkpoint) = (name.to_string(), name.to_string());
        let content = PointContent::Full(FullBackup { file: number, folding: None });
        BackupPoint { number, name, checkpoint, size: SIZE, created: 0, content, digest: None }
    }

    fn full(&mut self, name: &str, disk: Vec<u8>) {
        let mut writer = StoreWriter::lock(self.dir()).unwrap();
        let point = self.point(&writer, name);
        let number = point.number;
        writer.begin(point, None).unwrap();
        fs::write(writer.store().raw(number), &disk).unwrap();
        writer.publish(1, None).unwrap();
        self.disks.push((name.into(), disk));
    }

    fn increment(&mut self, name: &str, rng: &mut Rng) {
        let (parent, mut disk) = self.disks.last().unwrap().clone();
        let mut list = Vec::new();
        let mut at = rng.below(SIZE / 4);
        while at < SIZE {
            let len = rng.between(1, 100_000).min(SIZE - at);
            list.push((at, len));
            let new = rng.disk(len as usize, 20_000, 50);
            disk[at as usize..(at + len) as usize].copy_from_slice(&new);
            at += len + rng.between(1, SIZE / 4);
        }
        let ranges = IncrementRanges::new(list, SIZE).unwrap();
        let mut writer = StoreWriter::lock(self.dir()).unwrap();
        let increment = Increment {
            parent,
            bitmap: "b".into(),
            ranges: ranges.digest(),
            changed: ranges.total(),
        };
        let content = PointContent::Increment(increment);
        let point = BackupPoint { content, ..self.point(&writer, name) };
        let raw = writer.store().raw(point.number);
        writer.begin(point, Some(&ranges)).unwrap();
        let file = fs::File::create(raw).unwrap();
        file.set_len(SIZE).unwrap();
        for &(at, len) in ranges.list() {
            file.write_all_at(&disk[at as usize..(at + len) as usize], at).unwrap();
        }
        writer.publish(1, None).unwrap();
        self.disks.push((name.into(), disk));
    }

    /// Checks that each point is the disk at that time.
    #[track_caller]
    fn assert_points(&self) {
        let store = Store::open(self.dir()).unwrap();
        let names: Vec<_> = store.points().iter().map(|point| point.name.as_str()).collect();
        assert_eq!(names, self.disks.iter().map(|disk| disk.0.as_str()).collect::<Vec<_>>());
        for (name, disk) in &self.disks {
            let dir = self.dir().to_path_buf();
            let name = name.clone();
            let found = on_a_worker(move || async move {
                let stack = open(&dir, &name).await.unwrap();
                let room = blockhaul_io::Reservation::unpooled(SIZE as usize);
                let read = blockhaul_block::Request::read(0, room);
                match stack.device().submit(read).await.unwrap() {
                    blockhaul_block::Reply::Data(data) => data.bytes().to_vec(),
                    _ => vec![0; SIZE as usize],
                }
            });
            assert!(found == *disk);
        }
    }
}

fn rng() -> Rng {
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    Rng::new(seed)
}

#[test]
fn points_keep_the_contract_of_devices() {
    let made = Made::new(&mut rng(), 3);
    let (_, disk) = made.disks.last().unwrap().clone();
    let dir = made.dir().to_path_buf();
    let content = conform::InitialContent::oracle(move |at| disk[at as usize]);
    conform::check("backup", ConformOptions::default().content(content), move || {
        let dir = dir.clone();
        async move { open(&dir, "p3").await.map(Subject::from) }
    });
}

#[test]
fn every_point_is_the_disk_at_its_time_also_after_each_fold() {
    let mut made = Made::new(&mut rng(), 4);
    made.assert_points();
    while made.disks.len() > 1 {
        let mut writer = StoreWriter::lock(made.dir()).unwrap();
        let fold = writer.begin_fold(0).unwrap().unwrap();
        made.disks.remove(0);
        // Nothing is copied yet, then a part, then all of it twice.
        made.assert_points();
        let from = fs::read(&fold.from).unwrap();
        let to = fs::File::options().write(true).open(&fold.to).unwrap();
        for &(at, len) in fold.ranges.list() {
            to.write_all_at(&from[at as usize..(at + len) as usize], at).unwrap();
            made.assert_points();
        }
        // A program that was killed here goes on.
        drop(writer);
        let mut writer = StoreWriter::lock(made.dir()).unwrap();
        assert_eq!(writer.begin_fold(0).unwrap().unwrap().ranges, fold.ranges);
        writer.end_fold(None).unwrap();
        made.assert_points();
    }
    let store = Store::open(made.dir()).unwrap();
    assert_eq!((store.orphans().unwrap(), store.points()[0].file()), (vec![], 1));
}

/// Copies what a fold or a join says.
fn copy(fold: &blockhaul_store::Fold) {
    let from = fs::read(&fold.from).unwrap();
    let to = fs::File::options().write(true).open(&fold.to).unwrap();
    for &(at, len) in fold.ranges.list() {
        to.write_all_at(&from[at as usize..(at + len) as usize], at).unwrap();
    }
}

#[test]
fn increments_are_joined_and_a_join_that_was_killed_leaves_nothing() {
    let mut made = Made::new(&mut rng(), 5);
    let mut writer = StoreWriter::lock(made.dir()).unwrap();
    assert_eq!(writer.begin_join(0, 1).unwrap_err().kind(), Kind::Invalid, "a full backup");
    assert_eq!(writer.begin_join(2, 2).unwrap_err().kind(), Kind::Invalid, "one increment");
    let join = writer.begin_join(2, 4).unwrap();
    join.parts.iter().take(2).for_each(copy);
    drop(writer);
    made.assert_points();
    let mut writer = StoreWriter::lock(made.dir()).unwrap();
    assert!(writer.store().orphans().unwrap().is_empty(), "of the join that was killed");
    let join = writer.begin_join(2, 4).unwrap();
    join.parts.iter().for_each(copy);
    made.assert_points();
    writer.end_join(join, None).unwrap();
    made.disks.drain(2..4);
    made.assert_points();
    assert!(writer.store().orphans().unwrap().is_empty());
    drop(writer);
    // The next increment, and a fold, find their parents.
    made.increment("p6", &mut rng());
    let mut writer = StoreWriter::lock(made.dir()).unwrap();
    copy(&writer.begin_fold(0).unwrap().unwrap());
    writer.end_fold(None).unwrap();
    made.disks.remove(0);
    made.assert_points();
}

#[test]
fn a_full_backup_in_the_middle_takes_in_its_increment() {
    let mut rng = rng();
    let mut made = Made::new(&mut rng, 1);
    made.full("q0", rng.disk(SIZE as usize, 40_000, 60));
    made.increment("q1", &mut rng);
    made.full("r0", rng.disk(SIZE as usize, 40_000, 60));
    let mut writer = StoreWriter::lock(made.dir()).unwrap();
    assert!(!writer.remove(2, 3).unwrap(), "an increment needs it");
    copy(&writer.begin_fold(2).unwrap().unwrap());
    assert_eq!(writer.folding(), Some(2));
    writer.end_fold(None).unwrap();
    made.disks.remove(2);
    made.assert_points();
    assert!(writer.remove(1, 2).unwrap(), "nothing needs it");
    made.disks.remove(1);
    made.assert_points();
    assert!(writer.store().orphans().unwrap().is_empty());
}

#[test]
fn a_point_that_is_read_is_not_removed() {
    let made = Made::new(&mut rng(), 2);
    let dir = made.dir().to_path_buf();
    on_a_worker(move || async move {
        let newer = open(&dir, "p1").await.unwrap();
        let oldest = open(&dir, "p0").await.unwrap();
        let mut writer = StoreWriter::lock(&dir).unwrap();
        let error = writer.begin_fold(0).unwrap_err();
        assert!(error.to_string().contains("\"p0\" is being read"), "{error}");
        drop(oldest);
        writer.begin_fold(0).unwrap().unwrap();
        writer.end_fold(None).unwrap();
        // Still the same point, in other files.
        assert_eq!(writer.begin_fold(0).unwrap_err().kind(), Kind::InUse);
        assert_eq!(writer.folding(), None);
        drop(newer);
        writer.begin_fold(0).unwrap().unwrap();
    });
}

#[test]
fn two_programs_do_not_change_a_store() {
    let made = Made::new(&mut rng(), 1);
    let writer = StoreWriter::lock(made.dir()).unwrap();
    let error = StoreWriter::lock(made.dir()).unwrap_err();
    assert!(error.to_string().contains("in use by another"), "{error}");
    made.assert_points();
    drop(writer);
    StoreWriter::lock(made.dir()).unwrap();
}

#[test]
fn a_point_that_is_not_published_does_not_exist() {
    let made = Made::new(&mut rng(), 1);
    let mut writer = StoreWriter::lock(made.dir()).unwrap();
    let point = made.point(&writer, "p2");
    writer.begin(point.clone(), None).unwrap();
    fs::write(writer.store().raw(point.number), "half").unwrap();
    drop(writer);
    made.assert_points();
    let mut writer = StoreWriter::lock(made.dir()).unwrap();
    assert_eq!(writer.unfinished(), Some(&point));
    writer.abandon().unwrap();
    assert_eq!(writer.unfinished(), None);
    assert!(writer.store().orphans().unwrap().is_empty());
    drop(writer);
    assert_eq!(StoreWriter::lock(made.dir()).unwrap().unfinished(), None);
}

#[test]
fn damage_is_an_error_and_says_which_file() {
    let file = |made: &Made, name: &str| made.dir().join(name);
    type Damage = fn(&Path);
    let cases: [(&str, Damage, &str); 6] = [
        ("000002.raw", |path| fs::remove_file(path).unwrap(), "000002.raw"),
        ("000001.raw", |path| fs::remove_file(path).unwrap(), "000001.raw"),
        ("000002.raw", |path| fs::write(path, "short").unwrap(), "5 bytes, not the 1049088"),
        ("000002.ranges", |path| fs::remove_file(path).unwrap(), "000002.ranges is missing"),
        ("000002.ranges", |path| fs::write(path, "[]\n").unwrap(), "its digest is wrong"),
        ("manifest.json", |path| fs::write(path, "{}").unwrap(), "not a manifest"),
    ];
    for (name, damage, said) in cases {
        let made = Made::new(&mut rng(), 2);
        damage(&file(&made, name));
        let dir = made.dir().to_path_buf();
        let error = on_a_worker(move || async move { open(&dir, "p2").await.err().unwrap() });
        assert!(error.to_string().contains(said), "{error}");
    }
}

#[test]
fn other_directories_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("letter"), "dear").unwrap();
    let error = StoreWriter::lock(&other).unwrap_err();
    assert!(error.to_string().contains("choose an empty directory"), "{error}");
    assert_eq!(fs::read_dir(&other).unwrap().count(), 1, "nothing was created");
    let error = StoreWriter::lock(&other.join("letter")).unwrap_err();
    assert_eq!(error.kind(), Kind::Usage, "{error}");
    assert_eq!(Store::open(&folder.path().join("none")).unwrap_err().kind(), Kind::NotFound);
    StoreWriter::lock(&folder.path().join("new")).unwrap();
}
