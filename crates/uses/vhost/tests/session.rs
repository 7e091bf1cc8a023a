//! A front end and a guest's driver in the test: every request gets its answer, whatever the guest and
//! the front end do.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::io::{IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockhaul_block::{Device, OpKind, fence};
use blockhaul_io::{IoEngine, Pool, Runtime, Stream, Ticket};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::until;
use blockhaul_vhost::{RequestWatcher, VhostConfig, protocol, serve};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const SIZE: u64 = 1 << 20;
/// Descriptors of each ring.
const RING: u16 = 32;
/// Where the guest's memory begins, for the guest and the front end alike.
const BASE: u64 = 0x1_0000_0000;
const MEMORY: u64 = 4 << 20;
/// Memory of a queue: descriptors, available ring, used ring, headers and states.
const QUEUE: u64 = 0x8000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADERS: u64 = 0x3000;
const STATES: u64 = 0x4000;
/// Memory for data.
const DATA: u64 = 0x10_0000;

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const ID: u32 = 8;
const DISCARD: u32 = 11;
const ZERO: u32 = 13;

const PATIENCE: Duration = Duration::from_secs(20);

struct Nobody;

impl RequestWatcher for Nobody {
    fn begun(&self) {}
    fn ended(&self) {}
    fn answered(&self, _kind: OpKind, _bytes: Option<u64>) {}
    fn took(&self, _kind: OpKind, _time: Duration, _count: u64) {}
}

/// The server's side.
struct Server {
    runtime: Runtime,
    faults: Arc<FaultDevice>,
    model: Arc<ModelDevice>,
    device: Arc<dyn Device>,
    /// A larger device takes the place of `device`.
    grown: Arc<AtomicBool>,
}

impl Server {
    fn start(seed: u64, engine: IoEngine) -> Server {
        let runtime = Runtime::start(&blockhaul_io::RuntimeConfig { workers: 2, engine }).unwrap();
        let model = Model::with_facts(Model::all_facts(SIZE));
        let model = ModelDevice::new(model, CompletionOrder::Shuffled(seed));
        let faults = FaultDevice::over(model.clone(), seed);
        let device = fence(faults.clone());
        Server { runtime, faults, model, device, grown: Arc::default() }
    }

    /// Serves a new connection; returns the front end's socket, and the end.
    fn connect(&self) -> (UnixStream, Ticket<Result<(), String>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let device = self.device.clone();
        let grown = self.grown.clone();
        let ended = self.runtime.remote().spawn(move || async move {
            let larger = Model::with_facts(Model::all_facts(2 * SIZE));
            let larger = fence(ModelDevice::new(larger, CompletionOrder::Immediate));
            let config = VhostConfig {
                device,
                flushes: Arc::default(),
                pool: Pool::new(64 << 20),
                name: "a disk with a long name".into(),
                watch: Arc::new(Nobody),
                reopen: Some(Box::new(move || {
                    let device = grown.load(Ordering::SeqCst).then(|| larger.clone());
                    Box::pin(std::future::ready(device))
                })),
            };
            serve(Arc::new(Stream::new(theirs.into()).unwrap()), config).await
        });
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        (ours, ended)
    }

    fn ended(&self, ended: Ticket<Result<(), String>>) -> Result<(), String> {
        self.runtime.block_on(move || ended).unwrap()
    }
}

/// The front end, and the driver in its guest.
struct Guest {
    socket: UnixStream,
    memory: OwnedFd,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    available: [u16; 2],
    used: [u16; 2],
    event_idx: bool,
}

fn numbers<const N: usize>(numbers: [u64; N]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

fn state(queue: u32, number: u32) -> Vec<u8> {
    [queue.to_ne_bytes(), number.to_ne_bytes()].concat()
}

impl Guest {
    fn new(socket: UnixStream) -> Guest {
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, MEMORY).unwrap();
        let kicks = Guest::events();
        let calls = Guest::events();
        Guest { socket, memory, kicks, calls, available: [0; 2], used: [0; 2], event_idx: false }
    }

    fn events() -> Vec<OwnedFd> {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        vec![event(), event()]
    }

    /// Sends a message.
    fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let len = u32::try_from(payload.len()).unwrap();
        let mut bytes: Vec<u8> =
            [request, 1, len].iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        // The server may have ended the session already.
        let _ = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    /// The payload of a reply.
    fn reply(&mut self, request: u32) -> Vec<u8> {
        let mut header = [0; 12];
        self.socket.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_ne_bytes(*header[at..].first_chunk().unwrap());
        assert_eq!((word(0), word(4)), (request, 5));
        let mut payload = vec![0; word(8) as usize];
        self.socket.read_exact(&mut payload).unwrap();
        payload
    }

    fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(request, payload, &[]);
        self.reply(request)
    }

    fn number(&mut self, request: u32) -> u64 {
        u64::from_ne_bytes(*self.ask(request, &[]).first_chunk().unwrap())
    }

    /// Negotiates, and starts both queues.
    fn set_up(&mut self, event_idx: bool) {
        self.event_idx = event_idx;
        self.send(3, &[], &[]);
        let offered = self.number(1);
        let protocol = self.number(15);
        assert!(protocol & 0x1 != 0 && protocol & 0x200 != 0, "{protocol:#x}");
        self.send(16, &numbers([protocol & !8]), &[]);
        assert!(self.number(17) >= 2);
        let features = if event_idx { offered } else { offered & !(1 << 29) };
        self.send(2, &numbers([features]), &[]);
        let table = numbers([1, BASE, MEMORY, BASE, 0]);
        self.send(5, &table, &[self.memory.as_fd()]);
        for queue in 0..2 {
            self.start(queue);
        }
    }

    fn start(&self, queue: u32) {
        let at = BASE + u64::from(queue) * QUEUE;
        self.send(8, &state(queue, RING.into()), &[]);
        self.send(10, &state(queue, self.available[queue as usize].into()), &[]);
        let address = numbers([queue.into(), at, at + USED, at + AVAILABLE, 0]);
        self.send(9, &address, &[]);
        self.send(12, &numbers([queue.into()]), &[self.kicks[queue as usize].as_fd()]);
        self.send(13, &numbers([queue.into()]), &[self.calls[queue as usize].as_fd()]);
        self.send(18, &state(queue, 1), &[]);
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        assert_eq!(pwrite(&self.memory, bytes, at).unwrap(), bytes.len());
    }

    fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert_eq!(pread(&self.memory, &mut bytes, at).unwrap(), len);
        bytes
    }

    fn get_u16(&self, at: u64) -> u16 {
        u16::from_le_bytes(*self.get(at, 2).first_chunk().unwrap())
    }

    fn descriptor(&self, queue: u64, index: u16, at: u64, len: u32, flags: u16) {
        let mut bytes = (BASE + at).to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend((index + 1).to_le_bytes());
        self.put(queue * QUEUE + u64::from(index) * 16, &bytes);
    }

    /// Makes a request available, whose data is in parts of these lengths from [`DATA`] on.
    fn submit(&mut self, queue: usize, head: u16, kind: u32, sector: u64, parts: &[u32]) {
        let number = queue as u64;
        let start = number * QUEUE;
        let header = start + HEADERS + u64::from(head) * 16;
        self.put(header, &[&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat());
        self.descriptor(number, head, header, 16, 1);
        let written = if matches!(kind, READ | ID) { 2 } else { 0 };
        let mut index = head + 1;
        let mut at = DATA;
        for &part in parts {
            self.descriptor(number, index, at, part, 1 | written);
            (index, at) = (index + 1, at + u64::from(part));
        }
        let state = start + STATES + u64::from(head);
        self.put(state, &[0xff]);
        self.descriptor(number, index, state, 1, 2);
        self.make_available(queue, head);
    }

    fn make_available(&mut self, queue: usize, head: u16) {
        let ring = queue as u64 * QUEUE + AVAILABLE;
        let slot = u64::from(self.available[queue] % RING);
        self.put(ring + 4 + 2 * slot, &head.to_le_bytes());
        self.available[queue] = self.available[queue].wrapping_add(1);
        self.put(ring + 2, &self.available[queue].to_le_bytes());
        rustix::io::write(&self.kicks[queue], &1_u64.to_ne_bytes()).unwrap();
    }

    /// Waits until the next chain is used; returns its head.
    fn wait(&mut self, queue: usize) -> u16 {
        let ring = queue as u64 * QUEUE + USED;
        let begun = Instant::now();
        // The driver wants to know about the next used chain, and then looks for it.
        let wanted = queue as u64 * QUEUE + AVAILABLE + 4 + 2 * u64::from(RING);
        self.put(wanted, &self.used[queue].to_le_bytes());
        while self.get_u16(ring + 2) == self.used[queue] {
            assert!(begun.elapsed() < PATIENCE, "no answer in queue {queue}");
            let mut fds = [PollFd::new(&self.calls[queue], PollFlags::IN)];
            let time = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
            assert_eq!(poll(&mut fds, Some(&time)).unwrap(), 1, "no notification");
            let _ = rustix::io::read(&self.calls[queue], &mut [0; 8]);
        }
        let slot = u64::from(self.used[queue] % RING);
        self.used[queue] = self.used[queue].wrapping_add(1);
        self.get_u16(ring + 4 + 8 * slot)
    }

    /// Carries out one request; returns its status.
    fn run(&mut self, queue: usize, kind: u32, sector: u64, parts: &[u32]) -> u8 {
        self.submit(queue, 0, kind, sector, parts);
        assert_eq!(self.wait(queue), 0);
        self.get(queue as u64 * QUEUE + STATES, 1)[0]
    }

    fn range(&mut self, queue: usize, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
        self.put(
            DATA,
            &[&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat(),
        );
        self.run(queue, kind, 0, &[16])
    }
}

#[test]
fn requests_do_what_they_say() {
    for (engine, event_idx) in [(IoEngine::Auto, true), (IoEngine::Threads, false)] {
        let server = Server::start(seed(), engine);
        let (socket, ended) = server.connect();
        let mut guest = Guest::new(socket);
        guest.set_up(event_idx);
        let mut random = Rng::new(seed());
        let pattern: Vec<u8> = (0..4096).map(|_| random.number() as u8).collect();
        guest.put(DATA, &pattern);
        assert_eq!(guest.run(1, WRITE, 8, &[512, 3584]), 0);
        assert_eq!(server.model.bytes()[4096..8192], pattern);
        guest.put(DATA, &[0; 4096]);
        assert_eq!(guest.run(0, READ, 8, &[1000, 24, 1, 3071]), 0);
        assert_eq!(guest.get(DATA, 4096), pattern);
        assert_eq!(guest.run(0, READ, 100, &[512]), 0);
        assert_eq!(guest.get(DATA, 512), [0; 512]);
        assert_eq!(guest.run(0, FLUSH, 0, &[]), 0);
        assert!(server.model.seen().iter().any(|seen| seen.kind == OpKind::Flush));
        assert_eq!(guest.range(0, ZERO, 8, 2, 0), 0);
        assert_eq!(server.model.bytes()[4096..5120], [0; 1024]);
        assert_eq!(server.model.bytes()[5120..8192], pattern[1024..]);
        assert_eq!(guest.range(1, ZERO, 10, 2, 1), 0);
        assert_eq!(server.model.bytes()[5120..6144], [0; 1024]);
        assert_eq!(guest.range(1, DISCARD, 12, 2, 0), 0);
        assert!(server.model.seen().iter().any(|seen| seen.kind == OpKind::Trim));
        assert_eq!(guest.run(1, ID, 0, &[20]), 0);
        assert_eq!(guest.get(DATA, 20), b"a disk with a long n");
        // What is not valid.
        let last = SIZE / 512;
        assert_eq!(guest.run(0, READ, last - 1, &[1024]), 1, "beyond the end");
        assert_eq!(guest.run(0, READ, u64::MAX / 512, &[512]), 1);
        assert_eq!(guest.run(0, READ, 0, &[100]), 1, "no whole sector");
        assert_eq!(guest.run(0, WRITE, 0, &[]), 1, "no data");
        assert_eq!(guest.range(0, ZERO, last, 1, 0), 1);
        assert_eq!(guest.range(0, DISCARD, 0, 1, 1), 2);
        assert_eq!(guest.run(0, 77, 0, &[]), 2);
        server
            .faults
            .add(FaultRule::new(FaultEffect::Fail(blockhaul_block::Kind::Io)).kind(OpKind::Read));
        assert_eq!(guest.run(0, READ, 0, &[512]), 1, "the device fails");
        // The positions of both queues, after which they can be started again.
        let base = guest.ask(11, &state(0, 0));
        assert_eq!(base, state(0, guest.available[0].into()));
        server.faults.heal();
        guest.start(0);
        assert_eq!(guest.run(0, READ, 0, &[512]), 0);
        drop(guest);
        server.ended(ended).unwrap();
    }
}

#[test]
fn many_requests_are_in_flight_and_each_is_answered_once() {
    let server = Server::start(seed(), IoEngine::Auto);
    server.faults.delay_up_to(Duration::from_millis(2));
    let (socket, _ended) = server.connect();
    let mut guest = Guest::new(socket);
    guest.set_up(true);
    for _ in 0..50 {
        for queue in 0..2 {
            for head in (0..RING).step_by(4) {
                guest.submit(queue, head, READ, u64::from(head), &[512, 512]);
            }
        }
        for queue in 0..2 {
            let mut heads: Vec<_> = (0..RING).step_by(4).map(|_| guest.wait(queue)).collect();
            heads.sort_unstable();
            assert_eq!(heads, (0..RING).step_by(4).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_server_that_starts_again_repeats_what_was_in_flight() {
    let before = Server::start(1, IoEngine::Auto);
    let after = Server::start(2, IoEngine::Auto);
    let asked = [&numbers([0, 0])[..], &2_u16.to_ne_bytes(), &RING.to_ne_bytes()].concat();
    let (socket, _ended) = before.connect();
    let mut guest = Guest::new(socket);
    // A file of the test: its server must accept any.
    let table = memfd_create("table", MemfdFlags::CLOEXEC).unwrap();
    let len = u64::from_ne_bytes(*guest.ask(31, &asked).first_chunk().unwrap());
    ftruncate(&table, len).unwrap();
    let given = [&numbers([len, 0])[..], &asked[16..]].concat();
    guest.send(16, &numbers([0x1201]), &[]);
    guest.send(32, &given, &[table.as_fd()]);
    guest.set_up(true);
    before.faults.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Write));
    guest.put(DATA, &[7; 512]);
    assert_eq!(guest.run(0, READ, 9, &[512]), 0);
    guest.put(DATA, &[7; 512]);
    guest.submit(0, 4, WRITE, 3, &[512]);
    guest.submit(0, 8, WRITE, 4, &[512]);
    until("two writes hang", || before.faults.hanging() == 2);
    let (socket, _ended) = after.connect();
    guest.socket = socket;
    // The first server still has the other descriptors.
    guest.kicks = Guest::events();
    guest.send(32, &given, &[table.as_fd()]);
    // As QEMU does after a lost connection: what is used is what was done.
    guest.available[0] = guest.used[0];
    guest.set_up(true);
    let mut heads = [guest.wait(0), guest.wait(0)];
    heads.sort_unstable();
    assert_eq!(heads, [4, 8]);
    assert_eq!(after.model.bytes()[3 * 512..5 * 512], [7; 1024]);
    guest.available[0] = guest.used[0];
    assert_eq!(guest.run(0, READ, 3, &[512]), 0, "the queue continues");
    before.faults.release();
}

#[test]
fn a_disk_that_grows_is_announced() {
    let server = Server::start(1, IoEngine::Auto);
    let (socket, _ended) = server.connect();
    let mut guest = Guest::new(socket);
    guest.set_up(true);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    guest.send(21, &[], &[theirs.as_fd()]);
    let config = |guest: &mut Guest| {
        let mut asked = state(0, 8);
        asked.extend([0; 12]);
        let reply = guest.ask(24, &asked);
        u64::from_le_bytes(*reply[12..].first_chunk().unwrap())
    };
    assert_eq!(config(&mut guest), SIZE / 512);
    assert_eq!(guest.run(0, READ, SIZE / 512, &[512]), 1);
    server.grown.store(true, Ordering::SeqCst);
    let mut message = [0; 12];
    ours.read_exact(&mut message).unwrap();
    assert_eq!(message, *protocol::config_changed());
    assert_eq!(config(&mut guest), 2 * SIZE / 512);
    assert_eq!(guest.run(0, READ, SIZE / 512, &[512]), 0);
}

/// Iterations of a random test.
fn iterations() -> u32 {
    if std::env::var_os("BLOCKHAUL_LONG").is_some() { 2000 } else { 60 }
}

#[test]
fn rings_of_any_content_harm_nobody() {
    let number = seed();
    let mut random = Rng::new(seed());
    println!("BLOCKHAUL_SEED={number}");
    let server = Server::start(number, IoEngine::Auto);
    for _ in 0..iterations() {
        let (socket, ended) = server.connect();
        let mut guest = Guest::new(socket);
        guest.set_up(random.number().is_multiple_of(2));
        for _ in 0..20 {
            let head = (random.number() % 40) as u16;
            let parts = [(random.number() % 3000) as u32, (random.number() % 600) as u32];
            guest.submit(
                0,
                head % 24,
                (random.number() % 15) as u32,
                random.number() % 4000,
                &parts,
            );
            // Descriptors, headers and positions that no driver writes.
            for _ in 0..random.number() % 4 {
                let at = random.number() % (HEADERS + 0x400);
                let bytes = match random.number() % 3 {
                    0 => random.number().to_le_bytes(),
                    1 => (BASE + random.number() % (2 * MEMORY)).to_le_bytes(),
                    _ => (random.number() % 64).to_le_bytes(),
                };
                guest.put(at, &bytes);
            }
            guest.make_available(0, head);
        }
        // The queue stops when it is asked to.
        guest.ask(11, &state(0, 0));
        drop(guest);
        server.ended(ended).unwrap();
    }
}

#[test]
fn messages_of_any_content_end_a_session_at_most() {
    let number = seed();
    let mut random = Rng::new(seed());
    println!("BLOCKHAUL_SEED={number}");
    let server = Server::start(number, IoEngine::Auto);
    for _ in 0..iterations() {
        let (socket, ended) = server.connect();
        let mut guest = Guest::new(socket);
        guest.set_up(true);
        for _ in 0..random.number() % 12 {
            let len = [0, 8, 12, 20, 40, 40, 72][(random.number() % 7) as usize];
            let payload: Vec<u8> = (0..len)
                .flat_map(|_| match random.number() % 4 {
                    0 => vec![random.number() as u8],
                    1 => vec![(random.number() % 4) as u8],
                    _ => vec![0],
                })
                .take(len)
                .collect();
            let request = (random.number() % 42) as u32;
            let fds = [guest.memory.as_fd(), guest.kicks[0].as_fd()];
            let count = (random.number() % 3) as usize;
            guest.send(request, &payload, &fds[..count]);
        }
        // Half of a message.
        if random.number().is_multiple_of(2) {
            let _ = rustix::io::write(&guest.socket, &[5, 0, 0, 0, 1]);
        }
        drop(guest);
        // Either is fine, but it ends.
        let _ = server.ended(ended);
    }
    let (socket, _ended) = server.connect();
    let mut guest = Guest::new(socket);
    guest.set_up(true);
    assert_eq!(guest.run(0, READ, 0, &[512]), 0);
}

#[test]
fn memory_that_loses_its_pages_ends_its_session_alone() {
    let server = Server::start(7, IoEngine::Auto);
    let (other, _ended) = server.connect();
    let mut other = Guest::new(other);
    other.set_up(true);
    other.put(DATA, &[0xaa; 4096]);
    assert_eq!(other.run(0, WRITE, 0, &[4096]), 0);
    // The rings stay, and data is lost; or all of it.
    for (left, kind) in [(DATA, WRITE), (DATA, READ), (0, READ)] {
        let (socket, ended) = server.connect();
        let mut guest = Guest::new(socket);
        guest.set_up(true);
        assert_eq!(guest.run(1, READ, 0, &[4096]), 0);
        if left > 0 {
            ftruncate(&guest.memory, left).unwrap();
            guest.submit(0, 0, kind, 0, &[4096]);
        } else {
            guest.submit(0, 0, kind, 0, &[4096]);
            ftruncate(&guest.memory, left).unwrap();
            rustix::io::write(&guest.kicks[1], &1_u64.to_ne_bytes()).unwrap();
        }
        let why = server.ended(ended).unwrap_err();
        assert!(why.contains("shorter"), "{why}");
        // The socket is closed, and the zeroes in place of the data are written nowhere.
        assert_eq!(guest.socket.read(&mut [0; 64]).unwrap(), 0);
        assert_eq!(server.model.bytes()[..4096], [0xaa; 4096], "{kind} with {left} bytes left");
        assert_eq!(other.run(0, READ, 0, &[4096]), 0);
        assert_eq!(other.get(DATA, 4096), [0xaa; 4096]);
    }
}

#[test]
fn a_table_that_loses_its_pages_ends_its_session_alone() {
    let server = Server::start(7, IoEngine::Auto);
    let (socket, ended) = server.connect();
    let mut guest = Guest::new(socket);
    let table = memfd_create("table", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&table, 64 << 10).unwrap();
    let about = [&numbers([64 << 10, 0])[..], &2_u16.to_ne_bytes(), &RING.to_ne_bytes()].concat();
    guest.send(32, &about, &[table.as_fd()]);
    guest.set_up(true);
    assert_eq!(guest.run(0, READ, 0, &[4096]), 0);
    ftruncate(&table, 0).unwrap();
    guest.submit(0, 0, READ, 0, &[4096]);
    let why = server.ended(ended).unwrap_err();
    assert!(why.contains("shorter"), "{why}");
    let (socket, _ended) = server.connect();
    let mut other = Guest::new(socket);
    other.set_up(true);
    assert_eq!(other.run(0, READ, 0, &[512]), 0);
}
