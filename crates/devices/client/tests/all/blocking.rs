//! Connections whose requests are carried out by the threads that make them, with servers that are right,
//! slow, silent and wrong.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_block::{ContextSet, Error, Kind, OpKind, Reply, Request, RequestFlags};
use blockhaul_client::ConnectOptions;
use blockhaul_client::blocking::{BlockingConnection, CallStop};
use blockhaul_client::options::ConnectTarget;
use blockhaul_testkit::peer::{ReplyFault, ReplyFaultKind, ScriptedServer};
use blockhaul_wire::{CommandCode, ReplyForm};

use crate::common::{
    CHUNKS, FORMS, SIZE, content, hasty, offer, on_worker, open_local, options, read, serve,
};

fn connect(uri: &str, options: ConnectOptions) -> BlockingConnection {
    let place = ConnectTarget::parse(uri).unwrap();
    on_worker(move || async move {
        let ConnectTarget { name, address, export, .. } = place;
        let opened = blockhaul_client::open(&name, &address, &export, &options).await.unwrap();
        opened.blocking().unwrap().unwrap_or_else(|_| panic!("there is no TLS"))
    })
}

fn get(blocking: &BlockingConnection, at: u64, len: u64) -> Result<Vec<u8>, Error> {
    let mut into = vec![0; usize::try_from(len).unwrap()];
    let reading = blocking.start_read(at, len, &mut || true).map_err(error)?;
    reading.finish(&mut into, &mut || true).map_err(error)?;
    Ok(into)
}

fn error(stop: CallStop) -> Error {
    match stop {
        CallStop::Failed(error) => error,
        stop => panic!("{stop:?}"),
    }
}

/// The results of the second read, which is spoiled, and of the third one.
fn spoiled(
    replies: ReplyForm,
    how: ReplyFaultKind,
) -> (Result<Vec<u8>, Error>, Result<Vec<u8>, Error>) {
    let offer = offer().replies(replies).spoil(ReplyFault::nth(CommandCode::Read, 2, how));
    let server = ScriptedServer::offer(offer);
    let blocking = connect(&server.uri(), options());
    assert_eq!(get(&blocking, 0, 512).unwrap(), content(0, 512));
    let second = get(&blocking, 8192, 4096);
    (second, get(&blocking, 100, 512))
}

// nbd: structured.simple-read-refused, extended.offset-checked, transmission.cookies-differ
#[test]
fn wrong_answers_end_the_connection() {
    let any = [
        (ReplyFaultKind::Close, Kind::Disconnected, "closed the connection"),
        (ReplyFaultKind::CloseInHead, Kind::Disconnected, "in the middle of a reply"),
        (ReplyFaultKind::CloseInPayload, Kind::Disconnected, "in the middle of a reply"),
        (ReplyFaultKind::WrongCookie, Kind::Io, "not in flight"),
        (ReplyFaultKind::Garbage, Kind::Io, "broke the protocol"),
    ];
    let chunks = [
        (ReplyFaultKind::ErrorZero, Kind::Io, "broke the protocol"),
        (ReplyFaultKind::UnknownChunk, Kind::Io, "unknown kind of chunk"),
        (ReplyFaultKind::Oversized, Kind::Io, "broke the protocol"),
        (ReplyFaultKind::OutsideRange, Kind::Io, "outside of the request"),
        (ReplyFaultKind::NeverDone, Kind::Io, "not the last"),
        (ReplyFaultKind::SimpleInstead, Kind::Io, "broke the protocol"),
    ];
    let wrong = FORMS.iter().flat_map(|form| any.iter().map(move |how| (*form, how.clone())));
    let more = CHUNKS.iter().flat_map(|form| chunks.iter().map(move |how| (*form, how.clone())));
    for (replies, (how, kind, text)) in wrong.chain(more) {
        let (second, third) = spoiled(replies, how.clone());
        for error in [second.unwrap_err(), third.unwrap_err()] {
            assert_eq!(error.kind(), kind, "{replies:?} {how:?}: {error}");
            assert!(error.to_string().contains(text), "{replies:?} {how:?}: {error}");
        }
    }
    let (second, _) = spoiled(ReplyForm::Extended, ReplyFaultKind::WrongOffset);
    assert!(second.unwrap_err().to_string().contains("another offset"));
}

// nbd: chunk.overlap-refused, read.incomplete-refused
#[test]
fn errors_and_gaps_end_the_request_only() {
    for replies in FORMS {
        let (second, third) = spoiled(replies, ReplyFaultKind::Error(28));
        let error = second.unwrap_err();
        assert_eq!(error.kind(), Kind::NoSpace);
        assert!(error.to_string().contains("read of 4096 bytes at offset 8192"), "{error}");
        assert_eq!(third.unwrap(), content(100, 512));
    }
    let chunks = [
        (ReplyFaultKind::ErrorAt(5, 8200, "no luck\n".into()), "no luck"),
        (ReplyFaultKind::UnknownError, "??"),
        (ReplyFaultKind::ErrorHalfway(5), "the server answers"),
        (ReplyFaultKind::Missing, "left out bytes"),
    ];
    for replies in CHUNKS {
        for (how, text) in &chunks {
            let (second, third) = spoiled(replies, how.clone());
            let error = second.unwrap_err();
            assert!(error.to_string().contains(text), "{how:?}: {error}");
            assert_eq!(third.unwrap(), content(100, 512), "{how:?}");
        }
        for how in [ReplyFaultKind::Backwards, ReplyFaultKind::Hole] {
            let (second, third) = spoiled(replies, how.clone());
            let expected =
                if how == ReplyFaultKind::Hole { vec![0; 4096] } else { content(8192, 4096) };
            assert_eq!(second.unwrap(), expected);
            assert_eq!(third.unwrap(), content(100, 512));
        }
    }
}

#[test]
fn a_server_that_is_silent_is_left() {
    let spoil = ReplyFault::nth(CommandCode::Read, 1, ReplyFaultKind::Hang);
    let server = ScriptedServer::offer(offer().spoil(spoil));
    let blocking = connect(&server.uri(), hasty());
    for at in [8192, 100] {
        let error = get(&blocking, at, 512).unwrap_err();
        assert_eq!(error.kind(), Kind::TimedOut, "{error}");
        assert!(error.to_string().contains("no byte from the server"), "{error}");
    }
}

#[test]
fn a_thread_stops_to_wait_and_the_connection_goes_on() {
    // A thread that waited for the reply would wait in vain for the first, and the second comes before that of
    // the next request, when nobody wants it.
    let late = ReplyFaultKind::Slow { first: Duration::from_millis(400), piece: Duration::ZERO };
    let hows = [ReplyFaultKind::Silence, late];
    for (replies, how) in FORMS.into_iter().flat_map(|form| hows.clone().map(|how| (form, how))) {
        let spoil = ReplyFault::nth(CommandCode::Read, 1, how);
        let server = ScriptedServer::offer(offer().replies(replies).spoil(spoil));
        let blocking = connect(&server.uri(), options());
        let mut into = [0; 4096];
        let reading = blocking.start_read(0, 4096, &mut || true).unwrap();
        let stopped = reading.finish(&mut into, &mut || false);
        assert!(matches!(stopped, Err(CallStop::Interrupted)), "{stopped:?}");
        assert_eq!(get(&blocking, 8192, 512).unwrap(), content(8192, 512), "{replies:?}");
    }
}

#[test]
fn threads_share_a_connection() {
    for replies in FORMS {
        let server = ScriptedServer::offer(offer().replies(replies));
        let blocking = connect(&server.uri(), options());
        std::thread::scope(|scope| {
            for first in 0..6 {
                let blocking = &blocking;
                scope.spawn(move || {
                    for turn in 0..200 {
                        let at = (first * 7919 + turn * 997) % (SIZE / 2);
                        let len = 1 + turn * 601;
                        assert_eq!(get(blocking, at, len).unwrap(), content(at, len));
                    }
                });
            }
        });
    }
}

#[test]
fn writes_and_other_requests_reach_the_server() {
    for replies in FORMS {
        let server = ScriptedServer::offer(offer().replies(replies));
        let blocking = connect(&server.uri(), options());
        let mut go_on = || true;
        assert!(blocking.takes(OpKind::Write, 3000, 5, RequestFlags::empty()));
        assert!(!blocking.takes(OpKind::Write, SIZE - 1, 2, RequestFlags::empty()));
        blocking.write(3000, b"hello", RequestFlags::empty(), &mut go_on).unwrap();
        blocking.request(Request::zero(5000, 100), &mut go_on).unwrap();
        blocking.request(Request::flush(), &mut go_on).unwrap();
        assert_eq!(get(&blocking, 3000, 5).unwrap(), b"hello");
        assert_eq!(get(&blocking, 5000, 100).unwrap(), [0; 100]);
        if blocking.takes(OpKind::Extents, 0, SIZE, RequestFlags::empty()) {
            let asked = Request::extents(0, SIZE, ContextSet::first());
            let Reply::Extents(lists) = blocking.request(asked, &mut go_on).unwrap() else {
                panic!("no extents")
            };
            assert!(lists[0].total() > 0);
        }
    }
}

#[test]
fn long_writes_and_reads_at_a_time_do_not_stop_each_other() {
    const LONG: u64 = 9 << 20;
    // This worker serves; the threads wait.
    on_worker(|| async {
        let device = open_local("memory:64m").await.unwrap();
        let serving = serve(device, Default::default(), Default::default(), 64 << 20);
        let uri = serving.uri();
        let threads = blockhaul_io::offload(move || {
            let blocking = connect(&uri, options());
            std::thread::scope(|scope| {
                for number in 0..4 {
                    let blocking = &blocking;
                    scope.spawn(move || {
                        let data = vec![number as u8 + 1; LONG as usize];
                        let at = number * (12 << 20);
                        for _ in 0..3 {
                            blocking.write(at, &data, RequestFlags::empty(), &mut || true).unwrap();
                            assert!(get(blocking, at, LONG).unwrap() == data);
                        }
                    });
                }
            });
        });
        threads.await.unwrap();
    });
}

#[test]
fn a_worker_goes_on_with_a_connection() {
    let server = ScriptedServer::offer(offer());
    let blocking = connect(&server.uri(), options());
    let stop = AtomicBool::new(false);
    let reads = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                match blocking.start_read(0, 512, &mut || true) {
                    Ok(reading) => reading.finish(&mut [0; 512], &mut || true).unwrap(),
                    Err(CallStop::Retired) => return,
                    Err(stop) => panic!("{stop:?}"),
                }
                reads.fetch_add(1, Ordering::Relaxed);
            }
            panic!("it was not given away");
        });
        while reads.load(Ordering::Relaxed) < 3 {
            std::thread::yield_now();
        }
        let retired = blocking.retire(&mut || true).unwrap();
        assert!(matches!(blocking.retire(&mut || true), Err(CallStop::Retired)));
        reader.join().unwrap();
        stop.store(true, Ordering::Relaxed);
        let found = on_worker(move || async move {
            let device = retired.device().unwrap();
            read(&*device, 100, 512).await.unwrap()
        });
        assert_eq!(found, content(100, 512));
    });
}
