//! Payloads sent by reference: the peer reads what was sent, even if the memory is reused.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhaul_io::{
    Data, IoEngine, PayloadRoute, Pool, RouteCounters, Runtime, RuntimeConfig, SendQueue, Stream,
};

const LEN: usize = 200_000;

/// A payload of a pool that has memory for one only.
fn payload(pool: &Pool, counters: &Arc<RouteCounters>, byte: u8) -> Data {
    let mut buf = pool.try_reserve(LEN).expect("room").counted(counters).into_buf();
    buf.fill(byte);
    buf.into()
}

/// Memory for one payload, its counters, and the two ends of a connection.
fn ends() -> (Pool, Arc<RouteCounters>, Stream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let stream = Stream::new(ours.into()).unwrap();
    (Pool::new(Pool::cost(LEN)), Arc::new(RouteCounters::default()), stream, theirs)
}

fn on_worker<F: Future<Output = ()> + 'static>(check: fn() -> F) {
    for engine in [IoEngine::Auto, IoEngine::Threads] {
        Runtime::start(&RuntimeConfig { workers: 1, engine }).unwrap().block_on(check);
    }
}

/// Sends until the socket is full or nothing is left.
fn send(queue: &mut SendQueue, stream: &Stream) -> bool {
    queue.send(stream).unwrap()
}

#[test]
fn what_nobody_acknowledged_is_read_as_it_was_sent() {
    on_worker(|| async {
        let (pool, counters, stream, mut theirs) = ends();
        let mut queue = SendQueue::default();
        queue.head(b"head");
        let lent = queue.lend(payload(&pool, &counters, 1)).expect("worth it");
        assert!(send(&mut queue, &stream), "the socket takes it all");
        if counters.get(PayloadRoute::Vmsplice) == 0 {
            return eprintln!("vmsplice is refused here: not checked");
        }
        assert_eq!(counters.get(PayloadRoute::Vmsplice), LEN as u64);
        // The connection is dropped before a reply; another payload gets the same memory.
        drop(lent);
        assert_eq!(pool.reserved(), 0);
        let next = payload(&pool, &counters, 2);
        let mut read = vec![0; 4 + LEN];
        theirs.read_exact(&mut read).unwrap();
        assert!(read[..4] == *b"head" && read[4..].iter().all(|&byte| byte == 1));
        assert!(next.bytes().iter().all(|&byte| byte == 2));
    });
}

#[test]
fn what_comes_back_is_used_again_as_it_is() {
    on_worker(|| async {
        let (pool, counters, stream, mut theirs) = ends();
        let mut queue = SendQueue::default();
        let data = payload(&pool, &counters, 1);
        let place = data.bytes().as_ptr().addr();
        let lent = queue.lend(data).expect("worth it");
        assert!(send(&mut queue, &stream));
        let mut read = vec![0; LEN];
        theirs.read_exact(&mut read).unwrap();
        assert!(read.iter().all(|&byte| byte == 1));
        lent.returned();
        let again = pool.try_reserve(LEN).unwrap().into_buf();
        assert_eq!(again.as_ptr().addr(), place);
        assert!(again.iter().all(|&byte| byte == 1), "its pages were kept");
    });
}

#[test]
fn retired_memory_is_not_changed_in_place_and_lasts_for_its_holders() {
    let pool = Pool::new(Pool::cost(LEN));
    let counters = Arc::new(RouteCounters::default());
    let data = payload(&pool, &counters, 1);
    let mut queue = SendQueue::default();
    let lent = queue.lend(data.clone()).expect("worth it");
    drop(lent);
    queue.clear();
    // Another connection may still need the same payload.
    assert!(data.bytes().iter().all(|&byte| byte == 1));
    let data = data.try_into_buf().expect_err("a peer may be reading it");
    drop(data);
    assert!(pool.try_reserve(LEN).unwrap().into_buf().iter().all(|&byte| byte == 0));
}

#[test]
fn small_payloads_and_those_outside_of_memory_are_not_lent() {
    let mut queue = SendQueue::default();
    assert!(queue.lend(Data::copy_of(&[1; 5000])).is_none());
    assert!(queue.lend(Data::zeroes(100_000)).is_none());
    assert_eq!(queue.queued(), 105_000);
}

#[test]
fn a_full_socket_is_waited_for_and_everything_arrives_in_order() {
    on_worker(|| async {
        let counters = Arc::new(RouteCounters::default());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let stream = Stream::new(ours.into()).unwrap();
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).unwrap();
            all
        });
        let mut queue = SendQueue::default();
        let mut expected = Vec::new();
        let mut lent = Vec::new();
        for round in 0..40_u8 {
            let len = (64 << 10) + usize::from(round) * 9973;
            let mut buf = blockhaul_io::Reservation::unpooled(len).counted(&counters).into_buf();
            buf.iter_mut().enumerate().for_each(|(i, byte)| *byte = round ^ (i / 4099) as u8);
            // From the middle of the memory, too.
            let data = Data::from(buf).slice(usize::from(round), len - usize::from(round));
            expected.push(round);
            expected.extend_from_slice(data.bytes());
            queue.head(&[round]);
            lent.extend(queue.lend(data));
        }
        while !send(&mut queue, &stream) {
            stream.writable().await.unwrap();
        }
        assert_eq!(queue.queued(), 0);
        drop(stream);
        assert!(reader.join().unwrap() == expected);
        lent.into_iter().for_each(blockhaul_io::LentPayload::returned);
    });
}
