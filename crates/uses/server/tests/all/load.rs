//! Many clients, greedy clients and the end of the server: memory stays bounded, no client blocks
//! others, and requests sent in time are carried out.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::common::{ESHUTDOWN, FORMS, Fixture, content, device, serve, serve_with};
use blockhaul_block::OpKind;
use blockhaul_io::{IoEngine, Listener};
use blockhaul_server::Limits;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::CompletionOrder;
use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::until;
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, ReplyForm, magic};

const SIZE: u64 = 8 << 20;

/// Longer than any test runs.
const NEVER: Duration = Duration::from_secs(3600);

/// Maximum duration of a stop with a patience of [`NEVER`], even on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// Sends `count` reads of `len` bytes without reading the replies, as many as the socket takes.
fn greedy(fixture: &Fixture, replies: ReplyForm, count: usize, len: u64) -> Conversation {
    let mut client = fixture.client(replies);
    client.patience(Duration::from_millis(200)).unwrap();
    let mut bytes = Vec::new();
    for _ in 0..count {
        let request = client.request(CommandCode::Read, 0, len);
        bytes.extend_from_slice(&request.encode(client.headers).unwrap());
    }
    // The server stops reading at some point; then this gives up.
    let _ = client.send(&bytes);
    client
}

/// Makes 128 reads of 32 KiB, one after the other: too long for the memory reserved for small
/// requests.
fn reads(fixture: &Fixture) {
    reads_pieces(fixture, 32 << 10);
}

/// Makes 128 reads of `len` bytes, one after the other.
fn reads_pieces(fixture: &Fixture, len: u64) {
    let mut client = fixture.client(ReplyForm::Structured);
    for at in (0..128).map(|nth| nth * len) {
        assert_eq!(client.read(at, len as usize).unwrap(), content(at, len as usize));
    }
}

#[test]
fn a_client_that_reads_nothing_pins_its_share_only() {
    let share = 8 << 20;
    for completion in [CompletionOrder::Immediate, CompletionOrder::Deferred] {
        // No client is cut while this runs.
        let limits = Limits { client_bytes: share, stalled: NEVER, ..Limits::default() };
        let fixture = serve(device(SIZE, completion), limits);
        let mut greedy: Vec<_> =
            FORMS.iter().map(|&replies| greedy(&fixture, replies, 500, 1 << 20)).collect();
        reads(&fixture);
        until("their answers wait", || fixture.pool.reserved() > 0);
        let peak = fixture.pool.peak();
        let most = 3 * share + (1 << 20);
        assert!(peak <= most, "{peak} bytes at most {most}");
        greedy.iter_mut().for_each(Conversation::end);
        fixture.wait_for_open(0);
        until("all memory is back", || fixture.pool.reserved() == 0);
    }
}

/// Sends 64 reads of 256 KiB at once. Returns the requests, after a write of one byte.
fn many_reads(client: &mut Conversation) -> Vec<RequestHeader> {
    let mut requests: Vec<_> =
        (0..64).map(|nth| client.request(CommandCode::Read, (nth % 32) << 18, 256 << 10)).collect();
    for read in &requests {
        client.send_request(read, &[]).unwrap();
    }
    let write = client.request(CommandCode::Write, 5, 1);
    client.send_request(&write, b"x").unwrap();
    requests.push(write);
    requests
}

#[test]
fn reads_that_complete_at_once_are_not_far_ahead_of_the_client() {
    // What the socket takes, and one or two that are queued: 9 where the socket takes 2 MiB.
    const AHEAD: usize = 32;
    // On a busy machine the server may take this client for one that reads nothing.
    until("the server waits for the client", || {
        let device = device(SIZE, CompletionOrder::Immediate);
        let fixture = serve(device.clone(), Limits::default());
        let mut client = fixture.client(ReplyForm::Extended);
        let requests = many_reads(&mut client);
        until("it is served", || !device.seen().is_empty());
        fixture.settle();
        let ahead = device.seen().len();
        for request in &requests {
            assert_eq!(client.receive_answer(request).unwrap().error, 0);
        }
        ahead <= AHEAD
    });
}

#[test]
fn requests_behind_reads_are_carried_out_though_the_client_reads_nothing() {
    let device = device(SIZE, CompletionOrder::Immediate);
    let fixture = serve(device.clone(), Limits::default());
    let mut client = fixture.client(ReplyForm::Structured);
    let requests = many_reads(&mut client);
    until("the write is carried out", || device.model().bytes()[5] == b'x');
    for request in &requests {
        assert_eq!(client.receive_answer(request).unwrap().error, 0);
    }
}

#[test]
fn a_client_that_reads_nothing_is_cut_when_others_need_its_memory() {
    let stalled = Duration::from_millis(300);
    let limits = Limits { client_bytes: 8 << 20, stalled, ..Limits::default() };
    let memory = 16 << 20;
    let fixture =
        serve_with(device(SIZE, CompletionOrder::Immediate), limits, memory, IoEngine::Auto);
    // Together they hold all of the memory: the first has half of it, each other one its share of
    // the other half, as if it were the last to connect.
    let greedy = [8, 12, 14, 16].map(|held: u64| {
        let greedy = greedy(&fixture, ReplyForm::Structured, 100, 1 << 20);
        until("it holds its part", || fixture.pool.reserved() >= held << 20);
        greedy
    });
    reads(&fixture);
    // A client that is cut releases its memory before it is counted.
    until("who reads has left, and some were cut", || fixture.server.served() > 1);
    assert!(fixture.pool.peak() <= memory);
    drop(greedy);
    fixture.wait_for_open(0);
}

#[test]
fn a_client_that_sends_too_slowly_is_cut_when_others_need_its_memory() {
    let limits =
        Limits { payload: 8 << 20, stalled: Duration::from_millis(300), ..Limits::default() };
    let fixture =
        serve_with(device(SIZE, CompletionOrder::Immediate), limits, 16 << 20, IoEngine::Auto);
    let begin = |fixture: &Fixture| {
        let mut client = fixture.client(ReplyForm::Structured);
        let write = client.request(CommandCode::Write, 0, SIZE);
        // The rest never comes.
        client.send_request(&write, b"begun").unwrap();
        client
    };
    let mut alone = begin(&fixture);
    until("memory is held for it", || fixture.pool.reserved() == SIZE);
    // Others are served for longer than it may take.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(500) {
        reads(&fixture);
    }
    until("nobody needs its memory", || fixture.pool.reserved() == SIZE);
    let mut second = begin(&fixture);
    until("all memory is held", || fixture.pool.reserved() == 2 * SIZE);
    reads(&fixture);
    alone.expect_close().unwrap();
    // It can use what the other has lost.
    second.end();
    fixture.wait_for_open(0);
    fixture.is_well();
}

#[test]
fn small_requests_do_not_wait_for_those_who_never_send_what_they_began() {
    // No client is cut while this runs.
    let limits = Limits { payload: 8 << 20, stalled: NEVER, ..Limits::default() };
    let memory = 16 << 20;
    let fixture =
        serve_with(device(SIZE, CompletionOrder::Immediate), limits, memory, IoEngine::Auto);
    let begun: Vec<_> = (0..20)
        .map(|_| {
            let mut client = fixture.client(ReplyForm::Simple);
            let write = client.request(CommandCode::Write, 0, SIZE);
            client.send_request(&write, b"begun").unwrap();
            client
        })
        .collect();
    until("all memory is held", || fixture.pool.reserved() == memory);
    for len in [512, 4096, 16 << 10] {
        reads_pieces(&fixture, len);
    }
    let mut writer = fixture.client(ReplyForm::Structured);
    assert_eq!(writer.write(4096, &content(4096, 4096)).unwrap(), 0);
    until("those who read have left, and nobody else", || {
        fixture.server.served() == 3 && fixture.server.open() == begun.len() + 1
    });
    drop((begun, writer));
    fixture.wait_for_open(0);
    assert_eq!(fixture.pool.reserved(), 0);
}

#[test]
fn a_client_that_leaves_without_reading_is_forgotten() {
    let stalled = Duration::from_millis(300);
    let limits = Limits { client_bytes: 8 << 20, stalled, ..Limits::default() };
    let fixture = serve(device(SIZE, CompletionOrder::Immediate), limits);
    let mut client = fixture.client(ReplyForm::Structured);
    for _ in 0..8 {
        let request = client.request(CommandCode::Read, 0, 1 << 20);
        client.send_request(&request, &[]).unwrap();
    }
    let bye = client.request(CommandCode::Disconnect, 0, 0);
    client.send_request(&bye, &[]).unwrap();
    fixture.wait_for_open(0);
    assert_eq!(fixture.pool.reserved(), 0);
}

#[test]
fn lists_of_extents_count_in_the_share() {
    let device = device(SIZE, CompletionOrder::Deferred);
    {
        // 64 Ki runs: every other piece of 128 bytes is zero.
        let mut model = device.model();
        for at in (0..SIZE).step_by(256) {
            model.apply(blockhaul_block::Request::zero(at, 128)).unwrap();
        }
    }
    let share = 4 << 20;
    let fixture = serve(device, Limits { client_bytes: share, ..Limits::default() });
    let (mut client, _) = fixture.client_with_contexts(ReplyForm::Extended, &["base:allocation"]);
    let status = client.request(CommandCode::BlockStatus, 0, SIZE);
    for _ in 0..64 {
        client.send_request(&status, &[]).unwrap();
    }
    until("answers wait", || fixture.pool.reserved() > 0);
    fixture.settle();
    assert!(fixture.pool.peak() <= share, "{}", fixture.pool.peak());
    for _ in 0..64 {
        let answer = client.receive_answer(&status).unwrap();
        assert_eq!(answer.status[0].1.len(), 65536);
        assert_eq!(answer.status[0].1[..2], [(128, 3), (128, 0)]);
    }
    until("all memory is back", || fixture.pool.reserved() == 0);
}

/// Sends 64 writes that take a while, then disconnects in some way.
fn writes_survive(leave: impl FnOnce(&mut Conversation)) -> u64 {
    let model = device(SIZE, CompletionOrder::Immediate);
    let slow = FaultDevice::over(model.clone(), 1);
    slow.add(FaultRule::new(FaultEffect::Delay(Duration::from_millis(100))));
    let fixture = serve(slow.clone(), Limits::default());
    let mut client = fixture.client(ReplyForm::Extended);
    let mut expected = content(0, SIZE as usize);
    for index in 0..64_u64 {
        let bytes = vec![200 + (index % 50) as u8; 32 << 10];
        let at = index * (100 << 10);
        expected[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        let request = client.request(CommandCode::Write, at, bytes.len() as u64);
        client.send_request(&request, &bytes).unwrap();
    }
    leave(&mut client);
    fixture.wait_for_open(0);
    assert_eq!(slow.in_flight(), 0, "a connection ends after its requests");
    assert!(model.bytes() == expected, "all writes were carried out");
    assert_eq!(fixture.pool.reserved(), 0);
    fixture.server.served()
}

#[test]
fn writes_are_carried_out_when_the_client_vanishes() {
    assert_eq!(writes_survive(Conversation::end), 1);
}

// nbd: disconnect.server-closes, disc.finish, disc.no-reply
#[test]
fn writes_are_carried_out_and_answered_when_the_client_says_goodbye() {
    writes_survive(|client| {
        let bye = client.request(CommandCode::Disconnect, 0, 0);
        client.send_request(&bye, &[]).unwrap();
        let answered = client.expect_close().unwrap();
        assert_eq!(answered, 64 * 32, "64 answers and nothing else");
    });
    writes_survive(|client| {
        client.shut();
        assert_eq!(client.expect_close().unwrap(), 64 * 32);
    });
}

#[test]
fn a_stop_does_not_wait_for_idle_clients() {
    for engine in [IoEngine::Auto, IoEngine::Threads] {
        let device = device(SIZE, CompletionOrder::Immediate);
        let fixture = serve_with(device, Limits::default(), 64 << 20, engine);
        let mut idle: Vec<_> = (0..40).map(|_| fixture.client(ReplyForm::Structured)).collect();
        let mut silent: Vec<_> = (0..10).map(|_| fixture.connect()).collect();
        fixture.wait_for_open(50);
        let started = Instant::now();
        assert_eq!(fixture.stop(NEVER), 0);
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        idle.iter_mut().chain(&mut silent).for_each(|client| {
            client.expect_close().unwrap();
        });
    }
}

// nbd: disconnect.only-as-allowed
#[test]
fn a_stop_finishes_what_is_in_progress() {
    let stuck = FaultDevice::over(device(SIZE, CompletionOrder::Immediate), 1);
    stuck.add(FaultRule::new(FaultEffect::Hang));
    let fixture = serve(stuck.clone(), Limits { drain: NEVER, ..Limits::default() });
    let mut client = fixture.client(ReplyForm::Structured);
    let mut idle = fixture.client(ReplyForm::Structured);
    let request = client.request(CommandCode::Read, 5, 1000);
    client.send_request(&request, &[]).unwrap();
    until("the device has it", || stuck.hanging() == 1);
    let left = std::thread::scope(|scope| {
        let stop = scope.spawn(|| fixture.stop(NEVER));
        // The stop has begun.
        idle.expect_close().unwrap();
        assert_eq!(stuck.release(), 1);
        stop.join().unwrap()
    });
    assert_eq!(left, 0);
    let answer = client.receive_answer(&request).unwrap();
    assert_eq!(answer.bytes(5, 1000).unwrap(), content(5, 1000));
    client.expect_close().unwrap();
}

// nbd: disconnect.server-stop
#[test]
fn a_stop_waits_for_devices_then_answers_for_them() {
    for replies in FORMS {
        let stuck = FaultDevice::over(device(SIZE, CompletionOrder::Immediate), 1);
        stuck.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Write));
        let drain = Duration::from_millis(500);
        let fixture = serve(stuck.clone(), Limits { drain, ..Limits::default() });
        let mut client = fixture.client(replies);
        // One that hangs does not delay others: they are finished, and answered, at once.
        let request = client.request(CommandCode::Write, 0, 3);
        client.send_request(&request, b"abc").unwrap();
        until("it hangs", || stuck.hanging() == 1);
        let mut other = fixture.client(replies);
        let _silent = fixture.connect();
        let started = Instant::now();
        assert_eq!(fixture.stop(NEVER), 1);
        let took = started.elapsed();
        assert!((drain..SOON).contains(&took), "{took:?}");
        let answer = client.receive_answer(&request).unwrap();
        assert_eq!(answer.error, ESHUTDOWN);
        client.expect_close().unwrap();
        other.expect_close().unwrap();
        // Its result is not sent.
        assert_eq!(stuck.release(), 1);
        fixture.wait_for_open(0);
    }
}

/// Reads at this offset block the worker itself until the test releases them.
struct Blocking {
    device: Arc<FaultDevice>,
    gate: Arc<Mutex<bool>>,
    opened: Condvar,
    blocked: AtomicBool,
}

impl Blocking {
    const AT: u64 = 4 << 20;

    fn open(&self) {
        *self.gate.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl blockhaul_block::Device for Blocking {
    fn facts(&self) -> Arc<blockhaul_block::Facts> {
        self.device.facts()
    }

    fn submit(&self, request: blockhaul_block::Request) -> blockhaul_block::PendingRequest {
        if request.at == Self::AT {
            self.blocked.store(true, Ordering::Relaxed);
            drop(self.opened.wait_while(self.gate.lock().unwrap(), |open| !*open).unwrap());
        }
        self.device.submit(request)
    }
}

/// A client with a request in flight at a device, and then with one that blocks the worker.
fn blocked() -> (Arc<Blocking>, Fixture, Conversation, [RequestHeader; 2]) {
    let stuck = FaultDevice::over(device(SIZE, CompletionOrder::Immediate), 1);
    stuck.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Write));
    let (gate, opened, blocked) = Default::default();
    let device = Arc::new(Blocking { device: stuck.clone(), gate, opened, blocked });
    let fixture = serve(device.clone(), Limits { drain: Duration::ZERO, ..Limits::default() });
    // The first worker is the stop's.
    let _other = fixture.client(ReplyForm::Structured);
    let mut client = fixture.client(ReplyForm::Structured);
    let held = client.request(CommandCode::Write, 0, 3);
    client.send_request(&held, b"abc").unwrap();
    until("it hangs", || stuck.hanging() == 1);
    let blocking = client.request(CommandCode::Read, Blocking::AT, 512);
    client.send_request(&blocking, &[]).unwrap();
    until("the worker is blocked", || device.blocked.load(Ordering::Relaxed));
    (device, fixture, client, [held, blocking])
}

#[test]
fn a_stop_waits_for_a_worker_that_stands_still_to_give_its_answers() {
    let (device, fixture, mut client, [held, blocking]) = blocked();
    let patience = Duration::from_millis(100);
    let left = std::thread::scope(|scope| {
        let stop = scope.spawn(|| fixture.stop(patience));
        std::thread::sleep(10 * patience);
        device.open();
        stop.join().unwrap()
    });
    assert_eq!(left, 1);
    assert_eq!(client.receive_answer(&blocking).unwrap().error, 0);
    assert_eq!(client.receive_answer(&held).unwrap().error, ESHUTDOWN);
    client.expect_close().unwrap();
}

#[test]
fn a_stop_does_not_wait_for_ever_for_a_worker_that_stands_still() {
    let (device, fixture, _client, _) = blocked();
    let started = Instant::now();
    let left = fixture.stop(Duration::from_millis(100));
    let took = started.elapsed();
    // Otherwise a failure would wait for the worker.
    device.open();
    assert_eq!(left, 1);
    assert!(took < SOON, "{took:?}");
    fixture.wait_for_open(0);
}

#[test]
fn a_stop_takes_devices_at_their_time_and_clients_not() {
    // The device needs longer than a client may take to read, and the client reads nothing.
    let slow = FaultDevice::over(device(SIZE, CompletionOrder::Immediate), 1);
    slow.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Read));
    let fixture = serve(slow.clone(), Limits { drain: NEVER, ..Limits::default() });
    let mut patient = fixture.client(ReplyForm::Structured);
    let mut idle = fixture.client(ReplyForm::Structured);
    let request = patient.request(CommandCode::Read, 5, 1000);
    patient.send_request(&request, &[]).unwrap();
    until("the device has it", || slow.hanging() == 1);
    let _greedy = greedy(&fixture, ReplyForm::Structured, 50, 1 << 20);
    until("the device has the other's, too", || slow.hanging() > 1);
    let patience = Duration::from_millis(200);
    let left = std::thread::scope(|scope| {
        let stop = scope.spawn(|| fixture.stop(patience));
        // The stop has begun.
        idle.expect_close().unwrap();
        std::thread::sleep(3 * patience);
        assert!(!stop.is_finished(), "the device has its time");
        slow.heal();
        let released = slow.release();
        let took = Instant::now();
        assert!(released > 1, "{released}");
        let left = stop.join().unwrap();
        let took = took.elapsed();
        assert!(took < SOON, "{took:?}");
        left
    });
    assert_eq!(left, 0);
    assert_eq!(patient.receive_answer(&request).unwrap().bytes(5, 1000).unwrap(), content(5, 1000));
    fixture.wait_for_open(0);
}

#[test]
fn a_stop_cuts_clients_that_read_nothing() {
    let fixture = serve(device(SIZE, CompletionOrder::Immediate), Limits::default());
    let _greedy = greedy(&fixture, ReplyForm::Structured, 100, 1 << 20);
    assert_eq!(fixture.stop(Duration::from_millis(200)), 0);
}

/// Bytes that have arrived in a TCP socket can be read after its shutdown, so that alone stops no
/// client that sends without a pause.
#[test]
fn a_stop_ends_clients_that_never_pause() {
    let fixture = serve(device(SIZE, CompletionOrder::Immediate), Limits::default());
    let server = fixture.server.clone();
    let address = fixture.runtime.block_on(move || async move {
        let listener = Listener::bind_tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = listener.local_tcp().unwrap();
        drop(blockhaul_io::spawn(server.listen(listener)));
        address
    });
    let mut client = TcpStream::connect(address).unwrap();
    client.read_exact(&mut [0; 18]).unwrap();
    client.write_all(&[0, 0, 0, 3]).unwrap();
    let option = [&magic::IHAVEOPT.to_be_bytes()[..], &[0, 0, 0, 1], &[0; 4]].concat();
    client.write_all(&option).unwrap();
    client.read_exact(&mut [0; 10]).unwrap();
    let mut read = magic::REQUEST.to_be_bytes().to_vec();
    read.extend_from_slice(&[0; 20]);
    read.extend_from_slice(&512_u32.to_be_bytes());
    let mut sender = client.try_clone().unwrap();
    let busy = Arc::new(AtomicBool::new(false));
    let sending = busy.clone();
    let writer = std::thread::spawn(move || {
        let batch = read.repeat(100);
        while sender.write_all(&batch).is_ok() {
            sending.store(true, Ordering::Relaxed);
        }
    });
    let reader = std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 20];
        while client.read(&mut bytes).is_ok_and(|count| count > 0) {}
    });
    until("it sends", || busy.load(Ordering::Relaxed));
    let started = Instant::now();
    assert_eq!(fixture.stop(NEVER), 0);
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    writer.join().unwrap();
    reader.join().unwrap();
}

#[test]
fn connections_are_limited_even_in_a_burst() {
    let limits = Limits { connections: 10, ..Limits::default() };
    let fixture = serve(device(SIZE, CompletionOrder::Immediate), limits);
    let clients: Vec<_> = (0..30).map(|_| fixture.connect()).collect();
    let mut served = Vec::new();
    for mut client in clients {
        if client.open("", ReplyForm::Simple).is_ok() {
            served.push(client);
        }
    }
    assert_eq!(served.len(), 10);
    fixture.wait_for_open(10);
    assert!(fixture.connect().open("", ReplyForm::Simple).is_err(), "who is served stays");
    for client in &mut served {
        assert_eq!(client.read(0, 100).unwrap(), content(0, 100));
    }
    served.truncate(5);
    // Dropping closes; places become free.
    fixture.wait_for_open(5);
    fixture.is_well();
}

#[test]
fn a_crowd_that_says_nothing_keeps_nobody_out() {
    for limits in [
        Limits { connections: 20, handshake: Duration::ZERO, ..Limits::default() },
        Limits { handshakes: 20, handshake: Duration::ZERO, ..Limits::default() },
    ] {
        let fixture = serve(device(SIZE, CompletionOrder::Immediate), limits);
        let mut client = fixture.client(ReplyForm::Structured);
        // A Unix socket's queue takes the rest.
        let mut crowd: Vec<_> = (0..35).map(|_| fixture.connect()).collect();
        for _ in 0..5 {
            fixture.is_well();
        }
        crowd.drain(..15).for_each(|mut silent| {
            // The oldest had to leave, greeted or not.
            silent.expect_close().unwrap();
        });
        // A connection counts until its task has ended, a moment after the client sees it closed.
        until("at most 21 connections are open", || fixture.server.open() <= 21);
        assert_eq!(client.read(7, 100).unwrap(), content(7, 100), "who is served stays");
    }
}

#[test]
fn requests_of_all_are_limited_and_each_client_has_one() {
    let stuck = FaultDevice::over(device(SIZE, CompletionOrder::Immediate), 1);
    stuck.add(FaultRule::new(FaultEffect::Hang));
    // Eight for each of the two workers.
    let fixture = serve(stuck.clone(), Limits { requests_all: 16, ..Limits::default() });
    let mut clients: Vec<_> = (0..40).map(|_| fixture.client(ReplyForm::Structured)).collect();
    for client in &mut clients {
        let flush = client.request(CommandCode::Flush, 0, 0);
        for _ in 0..20 {
            client.send_request(&flush, &[]).unwrap();
        }
    }
    until("each has one", || stuck.hanging() >= 40);
    fixture.settle();
    let most = stuck.in_flight_max();
    assert!((40..=40 + 16).contains(&most), "{most}");
    stuck.heal();
    stuck.release();
    for client in &mut clients {
        client.end();
    }
    fixture.wait_for_open(0);
    assert_eq!(stuck.in_flight(), 0);
}

#[test]
fn requests_in_progress_are_limited() {
    let stuck = FaultDevice::over(device(SIZE, CompletionOrder::Immediate), 1);
    stuck.add(FaultRule::new(FaultEffect::Hang));
    let fixture = serve(stuck.clone(), Limits { requests: 16, ..Limits::default() });
    let mut client = fixture.client(ReplyForm::Structured);
    let flush = client.request(CommandCode::Flush, 0, 0);
    for _ in 0..100 {
        client.send_request(&flush, &[]).unwrap();
    }
    until("they hang", || stuck.hanging() == 16);
    fixture.settle();
    assert_eq!(stuck.in_flight_max(), 16);
    // Nor after the client has disconnected.
    client.end();
    stuck.heal();
    stuck.release();
    fixture.wait_for_open(0);
    assert_eq!((stuck.in_flight_max(), stuck.in_flight()), (16, 0));
}

/// One reply in one chunk: its cookie, and the data of a read.
fn receive_any(client: &mut Conversation) -> (u64, Vec<u8>) {
    let magic = client.receive_u32().unwrap();
    if magic == magic::SIMPLE_REPLY {
        assert_eq!(client.receive_u32().unwrap(), 0);
        return (client.receive_u64().unwrap(), Vec::new());
    }
    assert_eq!(magic, magic::STRUCTURED_REPLY);
    assert_eq!(client.receive_u16().unwrap(), 1, "done");
    assert_eq!(client.receive_u16().unwrap(), magic::REPLY_OFFSET_DATA);
    let cookie = client.receive_u64().unwrap();
    let len = client.receive_u32().unwrap();
    (cookie, client.receive(len as usize).unwrap()[8..].to_vec())
}

// nbd: transmission.cookie, extended.cookie
#[test]
fn answers_come_in_any_order_each_to_its_request() {
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    let fixture = serve(device(SIZE, CompletionOrder::Shuffled(seed)), Limits::default());
    let mut client = fixture.client(ReplyForm::Structured);
    let mut rng = Rng::new(seed);
    let mut out_of_order = false;
    for _ in 0..10 {
        let mut waiting = HashMap::new();
        let mut order = Vec::new();
        for _ in 0..100 {
            let len = rng.between(1, 20_000);
            let at = rng.below(SIZE - len);
            let request = client.request(CommandCode::Read, at, len);
            client.send_request(&request, &[]).unwrap();
            waiting.insert(request.cookie, request);
            order.push(request.cookie);
        }
        let mut answered = Vec::new();
        while !waiting.is_empty() {
            let (cookie, bytes) = receive_any(&mut client);
            let request = waiting.remove(&cookie).expect("each is answered once");
            assert_eq!(bytes, content(request.offset, request.length as usize));
            answered.push(cookie);
        }
        out_of_order |= answered != order;
    }
    assert!(out_of_order, "the device shuffles");
}

// nbd: write.before-reply
/// Writers on all workers, each with its own range, each checking its contents.
#[test]
fn concurrent_writers_leave_each_other_alone() {
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    for engine in [IoEngine::Auto, IoEngine::Threads] {
        let model = device(SIZE, CompletionOrder::Shuffled(seed));
        let fixture = serve_with(model.clone(), Limits::default(), 64 << 20, engine);
        let part = (SIZE / 8) as usize;
        std::thread::scope(|scope| {
            for index in 0..8_usize {
                let mut client = fixture.client(FORMS[index % 3]);
                scope.spawn(move || {
                    let base = (index * part) as u64;
                    let mut mirror = content(base, part);
                    let mut rng = Rng::new(seed ^ index as u64);
                    for _ in 0..300 {
                        let len = rng.between(1, 70_000) as usize;
                        let at = rng.below((part - len) as u64) as usize;
                        let place = base + at as u64;
                        match rng.below(4) {
                            0 => {
                                let mut bytes = vec![0; len];
                                rng.fill(&mut bytes);
                                assert_eq!(client.write(place, &bytes).unwrap(), 0);
                                mirror[at..at + len].copy_from_slice(&bytes);
                            }
                            1 => {
                                let zero =
                                    client.request(CommandCode::WriteZeroes, place, len as u64);
                                assert_eq!(client.ask(&zero, &[]).unwrap().error, 0);
                                mirror[at..at + len].fill(0);
                            }
                            _ => {
                                let bytes = client.read(place, len).unwrap();
                                assert!(bytes == mirror[at..at + len], "{len} at {place}");
                            }
                        }
                    }
                    assert!(client.read(base, part).unwrap() == mirror);
                });
            }
        });
        fixture.wait_for_open(0);
        assert_eq!(fixture.pool.reserved(), 0);
    }
}
