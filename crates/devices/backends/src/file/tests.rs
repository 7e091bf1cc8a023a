//! What the conformance suite cannot check: ways to zero that a file system refuses, allocated
//! blocks, files changed by other programs, and errors on open.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{
    Can, ContextSet, Device, DeviceExt, Extents, HOLE, Kind, LeaseAccess, PendingRequest, Reply,
    Request, RequestFlags, Result, ZERO,
};
use blockhaul_catalog::{Backend, BackendTarget, DirectMode, Intent, ParamValues};
use blockhaul_io::{
    Data, FallocateMode, IoEngine, PayloadRoute, Reservation, RouteCounters, Runtime, RuntimeConfig,
};
use tempfile::TempDir;

use super::device::FileDevice;
use super::storage::WriteRoute;
use super::{FileBackend, identity, open};

const HOLE_AND_ZERO: u64 = HOLE | ZERO;

/// Runs a check in a directory of each kind of file system, on every engine that this machine
/// offers.
fn everywhere<F: Future<Output = ()> + 'static>(check: fn(PathBuf) -> F) {
    for engine in [IoEngine::Uring, IoEngine::Threads] {
        if engine == IoEngine::Uring && blockhaul_io::uring_available().is_err() {
            eprintln!("io_uring is refused here: checked with threads only");
            continue;
        }
        let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine }).unwrap();
        for folder in ["/var/tmp", "/dev/shm"] {
            let Ok(dir) = tempfile::tempdir_in(folder) else {
                eprintln!("{folder} cannot be used here");
                continue;
            };
            let path = dir.path().to_path_buf();
            runtime.block_on(move || check(path));
        }
    }
}

fn target(path: &Path, query: &str, intent: Intent) -> BackendTarget {
    let typed = blockhaul_catalog::parse_options(query).unwrap();
    let args = ParamValues::check("file", FileBackend.params(), &typed).unwrap();
    let scheme = "file".into();
    let rest = path.into();
    let command = Vec::new();
    // The devices of a test share its files.
    let registry = blockhaul_catalog::Registry::default().for_command();
    let context = blockhaul_catalog::OpenContext::new(&registry);
    BackendTarget { scheme, rest, command, args, intent, context }
}

fn device(path: &Path, query: &str, intent: Intent) -> Result<Arc<FileDevice>> {
    let (device, resize) = open::open(&target(path, query, intent))?;
    resize.map_or(Ok(()), |resize| resize.run())?;
    Ok(Arc::new(device))
}

fn open_error(path: &Path, query: &str, intent: Intent) -> blockhaul_block::Error {
    device(path, query, intent).err().unwrap()
}

/// Allocated bytes of the file.
fn occupied(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

async fn all_extents(device: &FileDevice, at: u64, len: u64) -> Extents {
    let mut all = Extents::new();
    while all.total() < len {
        let rest = (at + all.total(), len - all.total());
        let found = device.extents(rest.0, rest.1, ContextSet::first()).await.unwrap();
        found[0].runs().iter().for_each(|run| all.push(run.len, run.state));
    }
    all
}

#[test]
fn every_way_to_zero_zeroes_its_range_and_nothing_else() {
    everywhere(|folder| async move {
        let all = [FallocateMode::PunchHole, FallocateMode::ZeroRange, FallocateMode::Reserve];
        for refused in 0..8 {
            for flags in [
                RequestFlags::empty(),
                RequestFlags::NO_HOLE,
                RequestFlags::NO_HOLE | RequestFlags::FUA,
            ] {
                // More than one call of 64 MiB if zeroes have to be written, and unaligned.
                let at = 5_000;
                let len = (70 << 20) + 77;
                let size = 80 << 20;
                let path = folder.join("disk");
                let device = device(&path, "", Intent::target(size)).unwrap();
                for (index, how) in all.into_iter().enumerate() {
                    if refused >> index & 1 == 1 {
                        device.inner().zero.refuse(how);
                    }
                }
                let places = [at - 1, at, at + (40 << 20), at + (66 << 20), at + len - 1, at + len];
                for place in places {
                    device.write(place, Data::copy_of(&[9])).await.unwrap();
                }
                let zeroed = device.submit(Request::zero(at, len).with(flags)).await;
                assert!(matches!(zeroed, Ok(Reply::Done)), "{refused} {flags:?}: {zeroed:?}");
                for place in places {
                    let inside = (at..at + len).contains(&place);
                    let byte = device.read(place, 1).await.unwrap().bytes()[0];
                    assert_eq!(byte == 0, inside, "{refused} {flags:?} at {place}");
                }
                let occupied = occupied(&path);
                if flags.contains(RequestFlags::NO_HOLE) {
                    assert!(occupied >= len, "{refused} {flags:?}: {occupied} bytes kept");
                } else if refused & 1 == 0 {
                    assert!(occupied < 1 << 20, "{refused}: {occupied} bytes are left");
                }
                assert_eq!(fs::metadata(&path).unwrap().len(), size);
                fs::remove_file(path).unwrap();
            }
        }
    });
}

#[test]
fn fast_zeroing_fails_at_once_rather_than_write_and_trim_may_do_nothing() {
    everywhere(|folder| async move {
        let device = device(&folder.join("disk"), "", Intent::target(1 << 20)).unwrap();
        device.write(0, Data::copy_of(&[9; 8192])).await.unwrap();
        for how in [FallocateMode::PunchHole, FallocateMode::ZeroRange] {
            device.inner().zero.refuse(how);
        }
        for flags in [RequestFlags::FAST, RequestFlags::FAST | RequestFlags::NO_HOLE] {
            let error = device.submit(Request::zero(0, 8192).with(flags)).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported);
        }
        device.trim(0, 8192).await.unwrap();
        assert_eq!(device.read(0, 8192).await.unwrap().bytes(), [9; 8192]);
    });
}

#[test]
fn extents_are_found_however_many_there_are() {
    everywhere(|folder| async move {
        // Blocks of 64 KiB: large enough for the pages of every file system.
        let unit = 64 << 10;
        let count = 5_000;
        let path = folder.join("disk");
        let device = device(&path, "", Intent::target(unit * 2 * count + 100)).unwrap();
        let mut expected = Extents::new();
        for index in 0..count {
            let at = (index * 2 + 1) * unit;
            device.write(at, Data::copy_of(&[1; 4096])).await.unwrap();
            expected.push(unit, HOLE_AND_ZERO);
            expected.push(unit, 0);
        }
        expected.push(100, HOLE_AND_ZERO);
        let size = expected.total();
        let found = all_extents(&device, 0, size).await;
        let data: u64 = found.runs().iter().filter(|run| run.state == 0).map(|run| run.len).sum();
        assert!(found.len() >= 10_000, "{} runs", found.len());
        // A file system may report more than the written page as data, never less.
        assert!((count * 4096..=count * unit).contains(&data), "{data} bytes of data");
        for (at, run) in found.ranges(0) {
            if run.state == 0 {
                assert_eq!(at % (2 * unit), unit, "data at {at}");
            }
        }
        let part = device.extents(unit, 4096, ContextSet::first()).await.unwrap();
        assert_eq!(part, [Extents::one(4096, 0)]);
        let first = Request::extents(0, size, ContextSet::first()).with(RequestFlags::ONE_EXTENT);
        let Ok(Reply::Extents(lists)) = device.submit(first).await else { panic!("no extents") };
        assert_eq!(lists, [Extents::one(unit, HOLE_AND_ZERO)]);
    });
}

#[test]
fn known_data_is_not_searched_for_until_it_is_trimmed_or_zeroed() {
    everywhere(|folder| async move {
        let unit = 64 << 10;
        let size = 128 << 20;
        let device = device(&folder.join("disk"), "", Intent::target(size)).unwrap();
        assert_eq!(all_extents(&device, 0, size).await, Extents::one(size, HOLE_AND_ZERO));
        device.write(2 * unit, Data::copy_of(&[1; 4096])).await.unwrap();
        // As if all were data, which took a long time to find.
        let known = &device.inner().known_data;
        known.found_after(std::time::Duration::from_secs(60), 0..100 << 20);
        let mut expected = Extents::new();
        expected.push(100 << 20, 0);
        expected.push(28 << 20, HOLE_AND_ZERO);
        assert_eq!(all_extents(&device, 0, size).await, expected);
        let part = device.extents(unit, unit, ContextSet::first()).await.unwrap();
        assert_eq!(part, [Extents::one(unit, 0)]);
        device.trim(unit, unit).await.unwrap();
        // What is below is searched for again.
        let part = device.extents(0, 3 * unit, ContextSet::first()).await.unwrap();
        let mut expected = Extents::new();
        expected.push(2 * unit, HOLE_AND_ZERO);
        expected.push(unit, 0);
        assert_eq!(part, [expected]);
        let zeroed = device.submit(Request::zero(0, 100 << 20)).await;
        assert!(matches!(zeroed, Ok(Reply::Done)), "{zeroed:?}");
        assert_eq!(all_extents(&device, 0, size).await, Extents::one(size, HOLE_AND_ZERO));
    });
}

#[test]
fn a_file_that_shrinks_is_an_error_and_never_zeroes() {
    everywhere(|folder| async move {
        for query in ["", "direct=on"] {
            let path = folder.join("disk");
            fs::write(&path, vec![5; 1 << 20]).unwrap();
            let device = match device(&path, query, Intent::READ) {
                Ok(device) => device,
                Err(error) => {
                    assert_eq!(error.kind(), Kind::Unsupported, "{error}");
                    continue;
                }
            };
            assert_eq!(device.read(4096, 4096).await.unwrap().bytes(), [5; 4096]);
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(300_000).unwrap();
            for (at, len) in [(299_008, 4096), (524_288, 4096), (0, 1 << 20)] {
                let error = device.read(at, len).await.unwrap_err();
                assert_eq!(error.kind(), Kind::Io);
                let text = error.to_string();
                assert!(text.contains("300000") && text.contains("1048576"), "{text}");
            }
            assert_eq!(device.read(8192, 4096).await.unwrap().bytes(), [5; 4096]);
            let found = all_extents(&device, 0, 1 << 20).await;
            assert_eq!(found, Extents::one(1 << 20, 0), "what is missing is no hole");
        }
    });
}

#[test]
fn facts_follow_the_intent() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk");
    fs::write(&path, [1; 10_000]).unwrap();
    let read = device(&path, "", Intent::READ).unwrap().facts();
    assert!(!read.can.intersects(Can::CHANGES) && read.can.contains(Can::EXTENTS | Can::FLUSH));
    assert_eq!((read.size, read.block.minimum, read.zeroed), (10_000, 1, false));
    assert!(read.name.starts_with("file:/") && read.contexts == ["base:allocation"]);
    let write = device(&path, "", Intent::WRITE).unwrap().facts();
    assert!(write.can.contains(Can::CHANGES | Can::CACHE) && !write.zeroed);
    assert_eq!(fs::read(&path).unwrap(), [1; 10_000], "opening for writing keeps the content");
}

#[test]
fn a_copy_target_is_made_or_emptied() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk");
    for size in [5_000, 0, 70_000] {
        let facts = device(&path, "", Intent::target(size)).unwrap().facts();
        assert_eq!((facts.size, facts.zeroed), (size, true));
        assert_eq!(fs::read(&path).unwrap(), vec![0; usize::try_from(size).unwrap()]);
        fs::write(&path, [7; 60_000]).unwrap();
    }
    let huge = open_error(&path, "", Intent::target(i64::MAX as u64));
    assert_eq!(huge.kind(), Kind::NoSpace, "{huge}");
}

#[test]
fn a_target_is_as_it_was_until_it_is_resized() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk");
    // A new file is removed again, unless it was resized or another program has written to it.
    let unprepared = || open::open(&target(&path, "", Intent::target(5_000))).unwrap();
    let (made, resize) = unprepared();
    assert_eq!((made.facts().size, made.facts().zeroed), (5_000, true));
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    drop((made, resize));
    assert!(!path.exists());
    let opened = unprepared();
    fs::write(&path, "another's").unwrap();
    drop(opened);
    assert_eq!(fs::read(&path).unwrap(), b"another's");
    let (made, resize) = unprepared();
    assert_eq!(made.facts().size, 5_000);
    assert_eq!(fs::read(&path).unwrap(), b"another's");
    resize.unwrap().run().unwrap();
    drop(made);
    assert_eq!(fs::read(&path).unwrap(), [0; 5_000]);
}

#[test]
fn a_target_with_blocks_keeps_them_for_who_writes_over_them() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk");
    for size in [40_000_usize, 60_000, 90_000] {
        fs::write(&path, [7; 60_000]).unwrap();
        let intent = Intent::target(size as u64).overwriting(true);
        let facts = device(&path, "", intent).unwrap().facts();
        assert_eq!((facts.size, facts.zeroed), (size as u64, false));
        let mut left = vec![7; size.min(60_000)];
        left.resize(size, 0);
        assert_eq!(fs::read(&path).unwrap(), left);
    }
    // Hardly any blocks: the rest is known to be zero when it is emptied.
    for held in [0, 1] {
        fs::write(&path, vec![7; held]).unwrap();
        let facts = device(&path, "", Intent::target(1 << 20).overwriting(true)).unwrap().facts();
        assert_eq!((facts.size, facts.zeroed), (1 << 20, true));
        assert_eq!(fs::read(&path).unwrap(), vec![0; 1 << 20]);
    }
}

#[test]
fn direct_files_tell_their_alignment_and_reach_an_odd_end() {
    let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Auto }).unwrap();
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk");
    runtime.block_on(move || async move {
        let even = match device(&path, "direct=on", Intent::target(1 << 20)) {
            Ok(device) => device,
            Err(error) => return eprintln!("no direct I/O here: {error}"),
        };
        let facts = even.facts();
        assert!(facts.block.minimum >= 512 && facts.block.preferred >= facts.block.minimum);
        // A payload in the middle of other memory is not aligned.
        let crooked = Data::copy_of(&[3; 5000]).slice(77, 4096);
        even.write(4096, crooked).await.unwrap();
        assert_eq!(even.read(4096, 4096).await.unwrap().bytes(), [3; 4096]);
        let lease = even.file_at(4096, 8192, LeaseAccess::Write).unwrap();
        assert_eq!((lease.at, lease.len), (4096, 8192), "the kernel shares direct files too");
        drop((even, lease));

        let odd = device(&path, "direct=on", Intent::target((1 << 20) + 77)).unwrap();
        assert_eq!(odd.facts().block.minimum, 1);
        odd.write(1 << 20, Data::copy_of(&[4; 77])).await.unwrap();
        odd.write(100, Data::copy_of(&[5; 8000])).await.unwrap();
        odd.write(4096, Data::copy_of(&[6; 4096])).await.unwrap();
        odd.flush().await.unwrap();
        assert_eq!(odd.read(1 << 20, 77).await.unwrap().bytes(), [4; 77]);
        let read = odd.read(0, 8192).await.unwrap();
        assert_eq!(&read.bytes()[100..4096], [5; 3996]);
        assert_eq!(&read.bytes()[4096..], [6; 4096]);
        assert_eq!(fs::read(&path).unwrap().len(), (1 << 20) + 77);
    });
}

#[test]
fn changes_by_both_routes_take_turns_on_the_same_pages() {
    everywhere(|folder| async move {
        let path = folder.join("disk");
        let target = device(&path, "", Intent::target(1 << 20).direct(DirectMode::Auto)).unwrap();
        let inner = target.inner();
        if inner.storage.past.is_none() {
            return;
        }
        let page = || Data::from(Reservation::unpooled(64 << 10).into_buf());
        let crooked = |at| target.submit(Request::write(at, Data::copy_of(&[9; 50])));
        let waits = async |pending: &mut PendingRequest| {
            blockhaul_io::timeout(Duration::from_millis(20), pending).await.is_err()
        };
        let turn = inner.turn(WriteRoute::Past, 4096, 4096).await;
        let mut cached = crooked(5000);
        assert!(waits(&mut cached).await);
        crooked(4000).await.unwrap();
        drop(turn);
        cached.await.unwrap();

        let turn = inner.turn(WriteRoute::Cache, 70_000, 50).await;
        let mut past = target.submit(Request::write(64 << 10, page()));
        assert!(waits(&mut past).await);
        target.submit(Request::write(128 << 10, page())).await.unwrap();
        drop(turn);
        past.await.unwrap();
        target.flush().await.unwrap();
    });
}

#[test]
fn auto_goes_past_the_page_cache_for_what_is_not_in_it() {
    everywhere(|folder| async move {
        let path = folder.join("disk");
        let size = (1 << 20) + 77;
        let target = device(&path, "", Intent::target(size).direct(DirectMode::Auto)).unwrap();
        let past = !target.facts().takes_parked;
        assert_eq!(past, target.inner().storage.past.is_some());
        assert_eq!(target.facts().block.minimum, 1);
        let counters = Arc::new(RouteCounters::default());
        let room = Reservation::unpooled(1 << 20).counted(&counters);
        let mut buf = room.into_buf();
        buf.fill(7);
        target.write(0, buf.into()).await.unwrap();
        target.write(1 << 20, Data::copy_of(&[8; 77])).await.unwrap();
        // Unaligned in memory, and unaligned on the disk.
        target.write(8192, Data::copy_of(&[9; 5000]).slice(77, 4096)).await.unwrap();
        target.write(20_001, Data::copy_of(&[9; 50])).await.unwrap();
        target.flush().await.unwrap();
        let direct = if past { 1 << 20 } else { 0 };
        assert_eq!(counters.get(PayloadRoute::DirectWrite), direct);

        let file = fs::File::open(&path).unwrap();
        let file = blockhaul_io::File::new(file.into());
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let source = device(&path, "", Intent::READ.direct(DirectMode::Auto)).unwrap();
        assert!(source.facts().takes_parked);
        let read = || {
            let room = Reservation::unpooled(1 << 20).counted(&counters);
            source.submit(Request::read(0, room))
        };
        let Ok(Reply::Data(data)) = read().await else { panic!("no data") };
        assert_eq!(counters.get(PayloadRoute::DirectRead), direct);
        if past {
            assert_eq!(file.cached(0, 1 << 20), Some(0), "the page cache stays as it was");
        }
        let mut expected = vec![7; 1 << 20];
        expected[8192..12_288].fill(9);
        expected[20_001..20_051].fill(9);
        assert!(data.bytes() == expected);
        // The end is not a whole block.
        assert_eq!(source.read(1 << 20, 77).await.unwrap().bytes(), [8; 77]);
        // Cached data is read from the cache.
        fs::read(&path).unwrap();
        let Ok(Reply::Data(data)) = read().await else { panic!("no data") };
        assert!(data.bytes() == expected);
        assert_eq!(counters.get(PayloadRoute::DirectRead), direct);
    });
}

#[test]
fn a_lease_is_the_file_itself() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk");
    fs::write(&path, [1; 10_000]).unwrap();
    let device = device(&path, "", Intent::READ).unwrap();
    let lease = device.file_at(9_000, 5_000, LeaseAccess::Read).unwrap();
    assert_eq!((lease.at, lease.len), (9_000, 1_000));
    assert!(device.file_at(10_000, 1, LeaseAccess::Read).is_none());
    assert!(device.file_at(0, 1, LeaseAccess::Write).is_none(), "not open for writing");
}

#[test]
fn what_cannot_be_opened_says_why_and_what_to_do() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = |name: &str| dir.path().join(name);
    let pipe = at("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
    let cases = [
        (at("absent"), Intent::READ, Kind::NotFound, "check the name"),
        (at("absent"), Intent::WRITE, Kind::NotFound, "truncate"),
        (at("dangling"), Intent::READ, Kind::NotFound, "check the name"),
        (at("no/folder"), Intent::target(1), Kind::NotFound, "create its directory"),
        (dir.path().into(), Intent::READ, Kind::Usage, "is a directory"),
        (pipe, Intent::READ, Kind::Usage, "is a pipe"),
        (at("socket"), Intent::WRITE, Kind::Usage, "nbd+unix"),
        ("/dev/null".into(), Intent::target(1), Kind::Usage, "character device"),
        // Not even the superuser may write to this one.
        ("/sys/kernel/notes".into(), Intent::WRITE, Kind::Refused, "read-only"),
        (PathBuf::new(), Intent::READ, Kind::Usage, "file:PATH"),
    ];
    for (path, intent, kind, part) in cases {
        let error = open_error(&path, "", intent);
        let text = error.to_string();
        assert!(text.contains(part), "{}: {text}", path.display());
        assert_eq!(error.kind(), kind, "{text}");
        assert!(text.contains(&*path.to_string_lossy()), "names the path: {text}");
    }
}

#[test]
fn two_names_of_one_file_have_one_identity() {
    let dir: TempDir = tempfile::tempdir_in("/var/tmp").unwrap();
    let one = dir.path().join("one");
    let two = dir.path().join("two");
    fs::write(&one, "x").unwrap();
    fs::hard_link(&one, &two).unwrap();
    std::os::unix::fs::symlink("one", dir.path().join("three")).unwrap();
    assert_eq!(identity(&one), identity(&two));
    assert_eq!(identity(&one), identity(&dir.path().join("three")));
    assert_ne!(identity(&one), identity(dir.path()));
    assert_eq!(identity(&dir.path().join("four")), None);
}

#[test]
fn a_backend_opens_on_a_worker_by_its_description() {
    let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Auto }).unwrap();
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("a disk");
    fs::write(&path, "hello").unwrap();
    let typed = format!("file:{}", path.display().to_string().replace(' ', "%20"));
    runtime.block_on(move || async move {
        let registry = blockhaul_catalog::Registry {
            backends: crate::all(),
            path: crate::PATH_SCHEME,
            ..blockhaul_catalog::Registry::default()
        };
        for word in [OsStr::new(&typed), path.as_os_str()] {
            let spec = blockhaul_catalog::DeviceSpec::parse(word).unwrap();
            let stack = registry.open(&spec, Vec::new(), Intent::READ).await.unwrap();
            assert_eq!(stack.device().read(0, 5).await.unwrap().bytes(), b"hello");
        }
    });
}

/// A block device over a file; gone when dropped.
struct Loop {
    node: PathBuf,
    _dir: TempDir,
}

impl Loop {
    fn new(size: u64, sector: u32) -> Option<Loop> {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("backing");
        fs::File::create(&path).unwrap().set_len(size).unwrap();
        let mut losetup = std::process::Command::new("losetup");
        losetup.args(["--find", "--show", "--sector-size", &sector.to_string()]).arg(&path);
        let made = losetup.output().ok().filter(|output| output.status.success())?;
        let node = String::from_utf8(made.stdout).unwrap().trim().into();
        Some(Loop { node, _dir: dir })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let ended = std::process::Command::new("losetup").arg("-d").arg(&self.node).status();
        assert!(ended.unwrap().success());
    }
}

#[test]
fn block_devices_are_read_written_and_zeroed() {
    for (engine, sector) in [(IoEngine::Auto, 512), (IoEngine::Threads, 4096)] {
        let Some(disk) = Loop::new(96 << 20, sector) else {
            return eprintln!("no block device can be made here: not checked");
        };
        let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine }).unwrap();
        let node = disk.node.clone();
        runtime.block_on(move || async move {
            for query in ["", "direct=on"] {
                // The descriptor of the last round is closed when its last request has ended.
                let begun = std::time::Instant::now();
                let device = loop {
                    match device(&node, query, Intent::target(1 << 20)) {
                        Ok(device) => break device,
                        Err(error) if begun.elapsed().as_secs() >= 10 => panic!("{error}"),
                        Err(_) => blockhaul_io::sleep(std::time::Duration::from_millis(5)).await,
                    }
                };
                let facts = device.facts();
                assert_eq!((facts.size, facts.zeroed), (96 << 20, false), "a disk keeps its size");
                let minimum = if query.is_empty() { 1 } else { sector };
                assert_eq!(facts.block.minimum, minimum, "{query}");
                for flags in [
                    RequestFlags::empty(),
                    RequestFlags::NO_HOLE,
                    RequestFlags::FUA,
                    RequestFlags::FAST,
                ] {
                    let blocks = [0, 1, 20_000, 20_001];
                    for block in blocks {
                        let data = Data::copy_of(&[9; 4096]);
                        device.write(block * 4096, data).await.unwrap();
                    }
                    let zero = Request::zero(4096, 20_000 * 4096).with(flags);
                    device.submit(zero).await.unwrap();
                    for (block, byte) in blocks.into_iter().zip([9, 0, 0, 9]) {
                        let read = device.read(block * 4096, 4096).await.unwrap();
                        assert_eq!(read.bytes(), [byte; 4096], "{block} {flags:?} {query}");
                    }
                }
                let whole = all_extents(&device, 0, 96 << 20).await;
                assert_eq!(whole, Extents::one(96 << 20, 0));
                device.trim(0, 1 << 20).await.unwrap();
                device.flush().await.unwrap();
            }
            // Through the page cache, offsets need no alignment, for zeroing neither.
            let device = device(&node, "", Intent::WRITE).unwrap();
            device.write(1_000, Data::copy_of(&[9; 3_000])).await.unwrap();
            device.zero(1_500, 100).await.unwrap();
            let read = device.read(1_499, 102).await.unwrap();
            assert!(read.bytes()[0] == 9 && read.bytes()[101] == 9);
            assert_eq!(read.bytes()[1..101], [0; 100]);
        });
        assert_eq!(identity(&disk.node).map(|identity| identity.1), Some(0));
    }
}

/// Another program: its open file descriptions are separate from those of this process's devices.
fn other_program(path: &Path) -> fs::File {
    fs::File::options().read(true).write(true).open(path).unwrap()
}

#[test]
fn two_programs_do_not_write_to_one_file() {
    everywhere(|folder| async move {
        let path = folder.join("disk");
        fs::write(&path, [7; 4096]).unwrap();
        let other = other_program(&path);
        // 201: allows no other writer; 101: writes, like qemu-nbd.
        for byte in [201, 101] {
            blockhaul_os::lock_shared(&other, byte).unwrap();
            let error = open_error(&path, "", Intent::WRITE);
            assert_eq!(error.kind(), blockhaul_block::Kind::InUse);
            assert!(error.remedy().is_some_and(|remedy| remedy.contains("lock=off")), "{error}");
            // Nor is it emptied, for a copy.
            open_error(&path, "", Intent::target(8192));
            assert_eq!(fs::read(&path).unwrap(), [7; 4096]);
            drop(device(&path, "", Intent::READ).unwrap());
            drop(device(&path, "lock=off", Intent::WRITE).unwrap());
            blockhaul_os::unlock(&other, byte).unwrap();
        }
        // A program that only denies truncation allows other writers.
        blockhaul_os::lock_shared(&other, 203).unwrap();
        drop(device(&path, "", Intent::WRITE).unwrap());
        open_error(&path, "", Intent::target(8192));
    });
}

#[test]
fn a_writer_is_seen_by_other_programs_until_its_last_device_is_gone() {
    everywhere(|folder| async move {
        let path = folder.join("disk");
        fs::write(&path, [7; 4096]).unwrap();
        let other = other_program(&path);
        let locked = || blockhaul_os::locked_by_others(&other, 201).unwrap();
        let reader = device(&path, "", Intent::READ).unwrap();
        assert!(!locked());
        let first = device(&path, "", Intent::WRITE).unwrap();
        assert!(locked());
        let second = device(&path, "", Intent::WRITE).unwrap();
        drop(first);
        assert!(locked(), "the second still writes");
        assert!(!blockhaul_os::locked_by_others(&other, 101).unwrap(), "QEMU may read it");
        drop(second);
        assert!(!locked());
        drop(reader);
    });
}
