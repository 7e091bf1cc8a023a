//! A session whose requests come from the test instead of the kernel: every request gets the one reply that
//! it should, whatever its bytes are.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_block::{Kind, OpKind, fence};
use blockhaul_fuse::protocol::{HEADER, REPLY_HEADER};
use blockhaul_fuse::{
    DiskMount, Files, HandleReopener, HandleSource, MountConfig, MountEnd, PageCacheMode,
    Permissions, Session,
};
use blockhaul_io::{IoEngine, Runtime, Ticket};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::until;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const SIZE: u64 = 1 << 20;
/// Time after which a reply is missing.
const LIMIT: Duration = Duration::from_secs(60);
const DISK: u64 = 2;
/// Of a session: half of it is for reads.
const MEMORY: u64 = 64 << 20;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const FSYNC: u32 = 20;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
const FALLOCATE: u32 = 43;
const LSEEK: u32 = 46;

/// The kernel's side of a session on two workers.
struct Kernel {
    socket: OwnedFd,
    ended: Ticket<std::io::Result<MountEnd>>,
    runtime: Runtime,
    device: Arc<ModelDevice>,
    faults: Arc<FaultDevice>,
    unique: u64,
}

impl Kernel {
    fn start(seed: u64, engine: IoEngine) -> Kernel {
        Kernel::with(seed, engine, Vec::new())
    }

    /// With further disks.
    fn with(seed: u64, engine: IoEngine, further: Vec<DiskMount>) -> Kernel {
        // Each message arrives whole, as from the kernel.
        let (socket, other) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::io::ioctl_fionbio(&other, true).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT)).unwrap();
        let runtime = Runtime::start(&blockhaul_io::RuntimeConfig { workers: 2, engine }).unwrap();
        let model = Model::with_facts(Model::all_facts(SIZE));
        let device = ModelDevice::new(model, CompletionOrder::Shuffled(seed));
        let faults = FaultDevice::over(device.clone(), seed);
        let permissions = Permissions { uid: 0, gid: 0, write: true, others: false };
        let session = Session::new(MountConfig {
            disks: [DiskMount {
                name: "disk".into(),
                device: fence(faults.clone()),
                write: true,
                source: None,
            }]
            .into_iter()
            .chain(further)
            .collect(),
            files: Files {
                info: Some(Arc::new(|_| "{}\n".into())),
                permissions,
                time: Duration::ZERO,
            },
            cache: PageCacheMode::Open,
            memory: MEMORY,
        });
        let ended = runtime.remote().spawn(move || session.serve(other));
        Kernel { socket, ended, runtime, device, faults, unique: 0 }
    }

    /// Sends a request of these arguments, whose header says `wrong` more bytes than there are.
    fn send(&mut self, opcode: u32, node: u64, arguments: &[u8], wrong: u32) -> u64 {
        self.unique += 2;
        let len = u32::try_from(HEADER + arguments.len()).unwrap() + wrong;
        let mut bytes = Vec::new();
        bytes.extend(len.to_ne_bytes());
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(self.unique.to_ne_bytes());
        bytes.extend(node.to_ne_bytes());
        bytes.extend([0; 16]);
        bytes.extend(arguments);
        rustix::net::send(&self.socket, &bytes, SendFlags::empty()).unwrap();
        self.unique
    }

    /// The next reply: its number, its error, its body.
    fn reply(&self) -> (u64, i32, Vec<u8>) {
        self.reply_to(&"the request")
    }

    /// The next reply to one of these requests.
    #[track_caller]
    fn reply_to(&self, requests: &dyn Debug) -> (u64, i32, Vec<u8>) {
        let mut bytes = vec![0; 2 << 20];
        let got = rustix::net::recv(&self.socket, &mut bytes, RecvFlags::empty());
        let (got, _) = got.unwrap_or_else(|error| panic!("no reply to {requests:?}: {error}"));
        bytes.truncate(got);
        let len = u32::from_ne_bytes(*bytes[..4].first_chunk().unwrap());
        assert_eq!(len as usize, bytes.len(), "the header has the reply's length");
        let error = i32::from_ne_bytes(*bytes[4..8].first_chunk().unwrap());
        assert!((-4095..=0).contains(&error), "{error}");
        let unique = u64::from_ne_bytes(*bytes[8..16].first_chunk().unwrap());
        (unique, error, bytes.split_off(REPLY_HEADER))
    }

    fn ask(&mut self, opcode: u32, node: u64, arguments: &[u8]) -> (i32, Vec<u8>) {
        let unique = self.send(opcode, node, arguments, 0);
        let (answered, error, body) = self.reply();
        assert_eq!(answered, unique);
        (error, body)
    }

    /// Closes the connection, as an unmount does.
    fn end(self) -> MountEnd {
        let Kernel { socket, ended, runtime, .. } = self;
        drop(socket);
        runtime.block_on(|| ended).unwrap().unwrap()
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn read(at: u64, len: u32) -> Vec<u8> {
    [&[0; 8][..], &at.to_ne_bytes(), &words(&[len, 0, 0, 0, 0, 0])].concat()
}

fn write(at: u64, data: &[u8]) -> Vec<u8> {
    [&read(at, u32::try_from(data.len()).unwrap()), data].concat()
}

fn allocate(at: u64, len: u64, mode: u32) -> Vec<u8> {
    [&[0; 8][..], &at.to_ne_bytes(), &len.to_ne_bytes(), &words(&[mode, 0])].concat()
}

#[test]
fn reads_and_writes_are_those_of_a_disk() {
    for engine in [IoEngine::Threads, IoEngine::Auto] {
        let seed = seed();
        println!("BLOCKHAUL_SEED={seed:#x}");
        let mut rng = Rng::new(seed);
        let mut kernel = Kernel::start(seed, engine);
        let mut model = vec![0; SIZE as usize];
        for _ in 0..1000 {
            let at = rng.below(SIZE + 1000);
            let len = rng.between(1, 100 << 10);
            let inside = SIZE.saturating_sub(at).min(len);
            let place = at.min(SIZE) as usize..(at.min(SIZE) + inside) as usize;
            match rng.below(4) {
                0 => {
                    let mode = *rng.pick(&[1 | 2, 1 | 16, 16, 0]);
                    let (error, _) = kernel.ask(FALLOCATE, DISK, &allocate(at, len, mode));
                    let fits = mode == 16 && at + len <= SIZE;
                    let done = mode == 3 || mode == 17 || fits;
                    assert_eq!(error, if done { 0 } else { -95 }, "{at}+{len}, {mode}");
                    if done {
                        model[place].fill(0);
                    }
                }
                1 => {
                    let (error, body) = kernel.ask(READ, DISK, &read(at, len as u32));
                    assert!(error == 0 && body == model[place], "{at}+{len}: {error}");
                }
                2 => {
                    let mut data = vec![0; len as usize];
                    rng.fill(&mut data);
                    let (error, body) = kernel.ask(WRITE, DISK, &write(at, &data));
                    assert_eq!(error, if inside == 0 { -28 } else { 0 });
                    if inside > 0 {
                        assert_eq!(body[..4], (inside as u32).to_ne_bytes());
                        model[place].copy_from_slice(&data[..inside as usize]);
                    }
                }
                _ => assert_eq!(kernel.ask(FSYNC, DISK, &[0; 16]).0, 0),
            }
        }
        let device = kernel.device.clone();
        let ended = kernel.end();
        assert!(device.bytes() == model);
        assert!(ended.flush.is_ok() && ended.held == 0);
        let seen = device.seen();
        let unflushed = seen.iter().rev().take_while(|op| op.kind != OpKind::Flush);
        // Reads may follow the last flush.
        assert!(unflushed.clone().all(|op| op.kind == OpKind::Read), "not flushed at the end");
        assert!(seen.iter().any(|op| op.kind == OpKind::Flush));
    }
}

#[test]
fn every_request_gets_one_reply_whatever_its_bytes_are() {
    let seed = seed();
    println!("BLOCKHAUL_SEED={seed:#x}");
    let mut rng = Rng::new(seed);
    let mut kernel = Kernel::start(seed, IoEngine::Auto);
    kernel.faults.delay_up_to(Duration::from_micros(300));
    kernel.faults.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Read).percent(10));
    for _ in 0..200 {
        let mut expected = BTreeMap::new();
        // A socket refuses what it has no room for, other than the kernel: the replies of a round must fit.
        let mut room = 1 << 17;
        for _ in 0..20 {
            let opcode =
                *rng.pick(&[1, 3, SETATTR, 14, READ, 17, 18, 25, 27, 28, 29, LSEEK, 47, 99]);
            let opcode = if rng.chance(30) { rng.below(60) as u32 } else { opcode };
            let node = rng.below(5);
            let mut arguments = vec![0; rng.below(140) as usize];
            rng.fill(&mut arguments);
            if rng.chance(50) && arguments.len() > 40 {
                // A range that is not absurd.
                arguments[8..16].copy_from_slice(&rng.below(SIZE).to_ne_bytes());
                let len = rng.below(room);
                arguments[16..20].copy_from_slice(&(len as u32).to_ne_bytes());
                room -= len;
            }
            let wrong = if rng.chance(5) { 8 } else { 0 };
            let unique = kernel.send(opcode, node, &arguments, wrong);
            let silent = match opcode {
                FORGET | BATCH_FORGET => wrong == 0,
                INTERRUPT => wrong == 0 && arguments.len() >= 8,
                _ => false,
            };
            if !silent {
                assert!(expected.insert(unique, opcode).is_none());
            }
        }
        for _ in 0..expected.len() {
            let (unique, ..) = kernel.reply_to(&expected);
            assert!(expected.remove(&unique).is_some(), "a second reply to {unique}");
        }
    }
    let mut attr = [0; 16];
    attr[8] = 1;
    let (error, body) = kernel.ask(3, DISK, &attr);
    assert_eq!((error, body.len()), (0, 104), "it still answers");
    assert_eq!(kernel.end().held, 0);
}

#[test]
fn a_failed_flush_stays_failed_and_is_reported_at_the_end() {
    let mut kernel = Kernel::start(1, IoEngine::Auto);
    assert_eq!(kernel.ask(WRITE, DISK, &write(0, b"some")).0, 0);
    kernel.faults.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Flush).times(1));
    assert_eq!(kernel.ask(FSYNC, DISK, &[0; 16]).0, -5);
    assert_eq!(kernel.ask(FSYNC, DISK, &[0; 16]).0, -5, "a second one is not a success");
    assert!(kernel.end().flush.is_err());
}

#[test]
fn a_failed_write_from_the_page_cache_is_reported_at_the_end() {
    for (flags, at) in [(0_u8, 0), (1, 0), (1, SIZE)] {
        let mut kernel = Kernel::start(1, IoEngine::Auto);
        if at < SIZE {
            kernel
                .faults
                .add(FaultRule::new(FaultEffect::Fail(Kind::NoSpace)).kind(OpKind::Write).times(1));
        }
        let mut cached = write(at, b"some");
        // FUSE_WRITE_CACHE in the flags of the write.
        cached[20] = flags;
        assert_eq!(kernel.ask(WRITE, DISK, &cached).0, -28, "no space");
        assert_eq!(kernel.ask(WRITE, DISK, &write(4096, b"more")).0, 0);
        assert_eq!(
            kernel.ask(FSYNC, DISK, &[0; 16]).0,
            0,
            "the data is dropped, not to be flushed"
        );
        let ended = kernel.end();
        assert!(ended.flush.is_ok());
        assert_eq!(
            ended.written_back.is_err(),
            flags == 1,
            "the program got the error, or none did"
        );
    }
}

#[test]
fn the_owner_can_let_others_write() {
    let mut kernel = Kernel::start(1, IoEngine::Auto);
    let mut chmod = |node, mode: u32| {
        let rest = [0; 44];
        let set = [&words(&[1, 0])[..], &[0; 16], &rest, &words(&[mode, 0, 0, 0, 0])].concat();
        let (error, body) = kernel.ask(SETATTR, node, &set);
        // The attributes begin with the time for which they are valid; the mode is behind 60 bytes of them.
        (error, body.get(76..80).map(|mode| u32::from_ne_bytes(*mode.first_chunk().unwrap())))
    };
    assert_eq!(chmod(DISK, 0o100_606), (0, Some(0o100_606)));
    assert_eq!(chmod(DISK, 0o100_755).0, -1, "it is no program");
    assert_eq!(chmod(1, 0o40_777).0, -1, "the directory stays");
    assert_eq!(chmod(DISK, 0o100_440), (0, Some(0o100_440)));
}

#[test]
fn a_read_can_be_interrupted_and_a_write_cannot() {
    let mut kernel = Kernel::start(1, IoEngine::Auto);
    kernel.faults.add(FaultRule::new(FaultEffect::Hang));
    let read = kernel.send(READ, DISK, &read(0, 512), 0);
    let write = kernel.send(WRITE, DISK, &write(0, b"some"), 0);
    until("the device has both", || kernel.faults.hanging() == 2);
    for asked in [write, read] {
        kernel.send(INTERRUPT, 0, &asked.to_ne_bytes(), 0);
    }
    let (unique, error, _) = kernel.reply();
    assert_eq!((unique, error), (read, -4), "EINTR");
    kernel.faults.heal();
    assert_eq!(kernel.faults.release(), 2);
    let (unique, error, _) = kernel.reply();
    assert_eq!((unique, error), (write, 0), "and no second reply to the read");
    assert_eq!(kernel.ask(FSYNC, DISK, &[0; 16]).0, 0);
    assert_eq!(kernel.end().held, 0);
}

#[test]
fn reads_can_be_interrupted_while_others_have_all_memory() {
    let mut kernel = Kernel::start(1, IoEngine::Auto);
    kernel.faults.add(FaultRule::new(FaultEffect::Hang));
    let reads = MEMORY / SIZE;
    let all: Vec<u64> =
        (0..reads).map(|_| kernel.send(READ, DISK, &read(0, SIZE as u32), 0)).collect();
    let write = kernel.send(WRITE, DISK, &write(0, b"some"), 0);
    until("half of the memory is for reads", || kernel.faults.hanging() as u64 == reads / 2 + 1);
    let mut rest: BTreeSet<u64> = all.iter().copied().collect();
    for asked in all {
        kernel.send(INTERRUPT, 0, &asked.to_ne_bytes(), 0);
        let (unique, error, _) = kernel.reply();
        assert!(rest.remove(&unique), "a second reply to {unique}");
        assert_eq!(error, -4, "EINTR");
    }
    kernel.faults.heal();
    kernel.faults.release();
    let (unique, error, _) = kernel.reply();
    assert_eq!((unique, error), (write, 0), "and no second reply to any read");
    assert_eq!(kernel.ask(READ, DISK, &read(0, 4)), (0, b"some".to_vec()));
    let device = kernel.device.clone();
    assert_eq!(kernel.end().held, 0);
    let reads_seen = device.seen().iter().filter(|op| op.kind == OpKind::Read).count() as u64;
    assert_eq!(reads_seen, reads / 2 + 1, "what was interrupted before is not read");
}

#[test]
fn each_disk_has_its_own_name_size_content_and_flushes() {
    let model = |size| {
        ModelDevice::new(Model::with_facts(Model::all_facts(size)), CompletionOrder::Immediate)
    };
    let [second, third] = [model(8192), model(4096)];
    let shown = |name: &str, device: &Arc<ModelDevice>, write| DiskMount {
        name: name.into(),
        device: fence(device.clone()),
        write,
        source: None,
    };
    let further = vec![shown("b", &second, true), shown("c", &third, false)];
    let mut kernel = Kernel::with(1, IoEngine::Auto, further);
    let size = |body: &[u8]| u64::from_ne_bytes(*body[48..].first_chunk().unwrap());
    for (name, node, expected) in [("disk", 2, SIZE), ("b", 3, 8192), ("c", 4, 4096)] {
        let (error, body) = kernel.ask(LOOKUP, 1, &[name.as_bytes(), &[0]].concat());
        let found = u64::from_ne_bytes(*body.first_chunk().unwrap());
        assert_eq!((error, found, size(&body)), (0, node, expected), "{name}");
    }
    assert_eq!(kernel.ask(LOOKUP, 1, b"d\0").0, -2, "ENOENT");
    assert_eq!(kernel.ask(WRITE, 3, &write(8000, b"second")).0, 0);
    assert_eq!(kernel.ask(WRITE, DISK, &write(8000, b"first")).0, 0);
    assert_eq!(kernel.ask(OPEN, 4, &words(&[2, 0])).0, -30, "EROFS");
    assert_eq!(kernel.ask(READ, 3, &read(8000, 6)), (0, b"second".to_vec()));
    assert_eq!(kernel.ask(READ, 4, &read(4000, 500)), (0, vec![0; 96]));
    // A flush that failed stays failed for its own disk.
    kernel.faults.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Flush).times(1));
    assert_eq!(kernel.ask(FSYNC, DISK, &[0; 16]).0, -5);
    assert_eq!(kernel.ask(FSYNC, 3, &[0; 16]).0, 0);
    assert_eq!(kernel.ask(WRITE, 3, &write(0, b"later")).0, 0);
    let first = kernel.device.clone();
    assert!(kernel.end().flush.is_err());
    let has = |device: &ModelDevice, at: usize, text: &[u8]| {
        assert_eq!(device.bytes()[at..][..text.len()], *text);
    };
    has(&first, 8000, b"first");
    has(&second, 8000, b"second");
    has(&second, 0, b"later");
    assert!(second.seen().last().is_some_and(|op| op.kind == OpKind::Flush), "at the end");
    assert!(third.seen().iter().all(|op| op.kind == OpKind::Read));
}

#[test]
fn a_disk_gets_its_new_size_and_a_flush_of_the_former_handle_that_fails_counts() {
    let facts = |size| Model::with_facts(Model::all_facts(size));
    let old = ModelDevice::new(facts(4096), CompletionOrder::Immediate);
    let new = ModelDevice::new(facts(8192), CompletionOrder::Immediate);
    let faults = FaultDevice::over(old.clone(), 1);
    let grown = Arc::new(AtomicBool::new(false));
    let opened = Arc::new(AtomicUsize::new(0));
    let reopen: HandleReopener = {
        let (grown, opened) = (grown.clone(), opened.clone());
        let (old, new) = (fence(faults.clone()), fence(new.clone()));
        Arc::new(move || {
            opened.fetch_add(1, Ordering::SeqCst);
            let device = if grown.load(Ordering::SeqCst) { new.clone() } else { old.clone() };
            Box::pin(async move { Ok(device) })
        })
    };
    let shown = DiskMount {
        name: "b".into(),
        device: fence(faults.clone()),
        write: true,
        source: Some(HandleSource { reopen, one_for_each_worker: true }),
    };
    let mut kernel = Kernel::with(1, IoEngine::Auto, vec![shown]);
    let size = |kernel: &mut Kernel| {
        let (error, body) = kernel.ask(3, 3, &[0; 16]);
        assert_eq!(error, 0);
        u64::from_ne_bytes(*body[24..].first_chunk().unwrap())
    };
    assert_eq!(size(&mut kernel), 4096);
    assert_eq!(opened.load(Ordering::SeqCst), 1, "the second worker has a handle of its own");
    assert_eq!(kernel.ask(WRITE, 3, &write(0, b"some")).0, 0);
    faults.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Flush));
    grown.store(true, Ordering::SeqCst);
    until("the kernel has the new size", || size(&mut kernel) != 4096);
    assert_eq!(kernel.ask(WRITE, 3, &write(8000, b"more")).0, 0);
    assert_eq!(new.bytes()[8000..8004], *b"more");
    assert_eq!(kernel.ask(FSYNC, 3, &[0; 16]).0, -5, "the former handle has reported lost data");
    assert!(kernel.end().flush.is_err());
}
