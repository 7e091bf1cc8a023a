//! Connections whose requests are carried out by the threads that make them, with servers that are right,
//! slow, silent and wrong.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_block::{Contexts, Error, Flags, Kind, OpKind, Reply, Request};
use blockhaul_client::Options;
use blockhaul_client::blocking::{Blocking, Stop};
use blockhaul_client::options::Place;
use blockhaul_testkit::peer::{How, Scripted, Spoil};
use blockhaul_wire::{Command, Replies};

use crate::common::{
    CHUNKS, FORMS, SIZE, content, hasty, offer, on_worker, open_local, options, read, serve,
};

fn connect(uri: &str, options: Options) -> Blocking {
    let place = Place::parse(uri).unwrap();
    on_worker(move || async move {
        let Place { name, address, export, .. } = place;
        let opened = blockhaul_client::open(&name, &address, &export, &options).await.unwrap();
        opened.blocking().unwrap().unwrap_or_else(|_| panic!("there is no TLS"))
    })
}

fn get(blocking: &Blocking, at: u64, len: u64) -> Result<Vec<u8>, Error> {
    let mut into = vec![0; usize::try_from(len).unwrap()];
    let reading = blocking.start_read(at, len, &mut || true).map_err(error)?;
    reading.finish(&mut into, &mut || true).map_err(error)?;
    Ok(into)
}

fn error(stop: Stop) -> Error {
    match stop {
        Stop::Failed(error) => error,
        stop => panic!("{stop:?}"),
    }
}

/// The results of the second read, which is spoiled, and of the third one.
fn spoiled(replies: Replies, how: How) -> (Result<Vec<u8>, Error>, Result<Vec<u8>, Error>) {
    let offer = offer().replies(replies).spoil(Spoil::nth(Command::Read, 2, how));
    let server = Scripted::offer(offer);
    let blocking = connect(&server.uri(), options());
    assert_eq!(get(&blocking, 0, 512).unwrap(), content(0, 512));
    let second = get(&blocking, 8192, 4096);
    (second, get(&blocking, 100, 512))
}

// nbd: structured.simple-read-refused, extended.offset-checked, transmission.cookies-differ
#[test]
fn wrong_answers_end_the_connection() {
    let any = [
        (How::Close, Kind::Disconnected, "closed the connection"),
        (How::CloseInHead, Kind::Disconnected, "in the middle of a reply"),
        (How::CloseInPayload, Kind::Disconnected, "in the middle of a reply"),
        (How::WrongCookie, Kind::Io, "not in flight"),
        (How::Garbage, Kind::Io, "broke the protocol"),
    ];
    let chunks = [
        (How::ErrorZero, Kind::Io, "broke the protocol"),
        (How::UnknownChunk, Kind::Io, "unknown kind of chunk"),
        (How::Oversized, Kind::Io, "broke the protocol"),
        (How::OutsideRange, Kind::Io, "outside of the request"),
        (How::NeverDone, Kind::Io, "not the last"),
        (How::SimpleInstead, Kind::Io, "broke the protocol"),
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
    let (second, _) = spoiled(Replies::Extended, How::WrongOffset);
    assert!(second.unwrap_err().to_string().contains("another offset"));
}

// nbd: chunk.overlap-refused, read.incomplete-refused
#[test]
fn errors_and_gaps_end_the_request_only() {
    for replies in FORMS {
        let (second, third) = spoiled(replies, How::Error(28));
        let error = second.unwrap_err();
        assert_eq!(error.kind(), Kind::NoSpace);
        assert!(error.to_string().contains("read of 4096 bytes at offset 8192"), "{error}");
        assert_eq!(third.unwrap(), content(100, 512));
    }
    let chunks = [
        (How::ErrorAt(5, 8200, "no luck\n".into()), "no luck"),
        (How::UnknownError, "??"),
        (How::ErrorHalfway(5), "the server answers"),
        (How::Missing, "left out bytes"),
    ];
    for replies in CHUNKS {
        for (how, text) in &chunks {
            let (second, third) = spoiled(replies, how.clone());
            let error = second.unwrap_err();
            assert!(error.to_string().contains(text), "{how:?}: {error}");
            assert_eq!(third.unwrap(), content(100, 512), "{how:?}");
        }
        for how in [How::Backwards, How::Hole] {
            let (second, third) = spoiled(replies, how.clone());
            let expected = if how == How::Hole { vec![0; 4096] } else { content(8192, 4096) };
            assert_eq!(second.unwrap(), expected);
            assert_eq!(third.unwrap(), content(100, 512));
        }
    }
}

#[test]
fn a_server_that_is_silent_is_left() {
    let spoil = Spoil::nth(Command::Read, 1, How::Hang);
    let server = Scripted::offer(offer().spoil(spoil));
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
    let late = How::Slow { first: Duration::from_millis(400), piece: Duration::ZERO };
    let hows = [How::Silence, late];
    for (replies, how) in FORMS.into_iter().flat_map(|form| hows.clone().map(|how| (form, how))) {
        let spoil = Spoil::nth(Command::Read, 1, how);
        let server = Scripted::offer(offer().replies(replies).spoil(spoil));
        let blocking = connect(&server.uri(), options());
        let mut into = [0; 4096];
        let reading = blocking.start_read(0, 4096, &mut || true).unwrap();
        let stopped = reading.finish(&mut into, &mut || false);
        assert!(matches!(stopped, Err(Stop::Interrupted)), "{stopped:?}");
        assert_eq!(get(&blocking, 8192, 512).unwrap(), content(8192, 512), "{replies:?}");
    }
}

#[test]
fn threads_share_a_connection() {
    for replies in FORMS {
        let server = Scripted::offer(offer().replies(replies));
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
        let server = Scripted::offer(offer().replies(replies));
        let blocking = connect(&server.uri(), options());
        let mut go_on = || true;
        assert!(blocking.takes(OpKind::Write, 3000, 5, Flags::empty()));
        assert!(!blocking.takes(OpKind::Write, SIZE - 1, 2, Flags::empty()));
        blocking.write(3000, b"hello", Flags::empty(), &mut go_on).unwrap();
        blocking.request(Request::zero(5000, 100), &mut go_on).unwrap();
        blocking.request(Request::flush(), &mut go_on).unwrap();
        assert_eq!(get(&blocking, 3000, 5).unwrap(), b"hello");
        assert_eq!(get(&blocking, 5000, 100).unwrap(), [0; 100]);
        if blocking.takes(OpKind::Extents, 0, SIZE, Flags::empty()) {
            let asked = Request::extents(0, SIZE, Contexts::first());
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
                            blocking.write(at, &data, Flags::empty(), &mut || true).unwrap();
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
    let server = Scripted::offer(offer());
    let blocking = connect(&server.uri(), options());
    let stop = AtomicBool::new(false);
    let reads = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                match blocking.start_read(0, 512, &mut || true) {
                    Ok(reading) => reading.finish(&mut [0; 512], &mut || true).unwrap(),
                    Err(Stop::Retired) => return,
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
        assert!(matches!(blocking.retire(&mut || true), Err(Stop::Retired)));
        reader.join().unwrap();
        stop.store(true, Ordering::Relaxed);
        let found = on_worker(move || async move {
            let device = retired.device().unwrap();
            read(&*device, 100, 512).await.unwrap()
        });
        assert_eq!(found, content(100, 512));
    });
}
