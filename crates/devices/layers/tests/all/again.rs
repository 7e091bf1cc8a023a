//! `retry`, `retry-request`, `pause` and `scan`, besides the contract.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{layer, on_workers, read, refused, write};
use blockhaul_block::{
    Can, Device, DeviceExt, Error, Facts, Kind, OpKind, PendingRequest, Request, RequestFlags,
};
use blockhaul_catalog::{HandleOpener, Layer, LayerBase, OpenFuture};
use blockhaul_io::Data;
use blockhaul_layers::StatsLayer;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};

/// Memory behind connections that end after a number of requests, with this kind of error.
struct Fragile {
    memory: Arc<dyn Device>,
    left: Arc<AtomicU64>,
    kind: Kind,
}

impl Device for Fragile {
    fn facts(&self) -> Arc<Facts> {
        self.memory.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let left = |left: u64| left.checked_sub(1);
        match self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left) {
            Ok(_) => self.memory.submit(request),
            Err(_) => Error::new(self.kind, "the connection is gone").into(),
        }
    }
}

/// Opens further connections, each for the same number of requests.
struct Dialer {
    memory: Arc<dyn Device>,
    requests: u64,
    kind: Kind,
    dialed: AtomicU64,
}

impl HandleOpener for Dialer {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        self.dialed.fetch_add(1, Ordering::SeqCst);
        let left = Arc::new(AtomicU64::new(self.requests));
        let device = Arc::new(Fragile { memory: self.memory.clone(), left, kind: self.kind });
        Box::pin(std::future::ready(Ok(device as Arc<dyn Device>)))
    }
}

async fn fragile(text: &str, requests: u64, kind: Kind) -> (Arc<dyn Device>, Arc<Dialer>) {
    let memory = blockhaul_backends::memory(1 << 20);
    let dialer = Arc::new(Dialer { memory, requests, kind, dialed: AtomicU64::new(0) });
    let device = dialer.another().await.unwrap();
    let below = LayerBase { reopen: Some(dialer.clone()), ..LayerBase::alone(device) };
    (layer(text).unwrap().open(below).await.unwrap(), dialer)
}

#[test]
fn retry_opens_the_device_again() {
    on_workers(|| async {
        let (device, dialer) = fragile("retry?retry-delay=1ms", 7, Kind::Disconnected).await;
        for at in 0..50 {
            write(&device, at, &[at as u8]).await;
        }
        assert_eq!(read(&device, 0, 50).await, (0..50).collect::<Vec<u8>>());
        let dialed = dialer.dialed.load(Ordering::SeqCst);
        assert_eq!(dialed, 1 + 51 / 7);
        // Many that fail together share a connection.
        let (device, dialer) = fragile("retry?retry-delay=5ms", 40, Kind::Disconnected).await;
        let writes: Vec<_> =
            (0..60_u64).map(|at| device.submit(Request::write(at, Data::copy_of(&[1])))).collect();
        for pending in writes {
            pending.await.unwrap();
        }
        assert_eq!(dialer.dialed.load(Ordering::SeqCst), 2);
        // Permanent errors are not retried.
        let (device, dialer) = fragile("retry?retry-delay=1ms", 0, Kind::NoSpace).await;
        assert_eq!(device.flush().await.unwrap_err().kind(), Kind::NoSpace);
        assert_eq!(dialer.dialed.load(Ordering::SeqCst), 1);
        // It gives up after the last attempt.
        let text = "retry?retry-delay=1ms&retries=3";
        let (device, dialer) = fragile(text, 0, Kind::Io).await;
        let error = device.write(0, Data::copy_of(b"x")).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert_eq!(dialer.dialed.load(Ordering::SeqCst), 4);
        // A flush is repeated over a new connection only if the old one was lost.
        for (kind, dialed) in [(Kind::Disconnected, 4), (Kind::Io, 1), (Kind::TimedOut, 1)] {
            let (device, dialer) = fragile(text, 0, kind).await;
            assert_eq!(device.flush().await.unwrap_err().kind(), kind);
            assert_eq!(dialer.dialed.load(Ordering::SeqCst), dialed, "{kind:?}");
        }
        let (device, dialer) = fragile(text, 1, Kind::Disconnected).await;
        read(&device, 0, 1).await;
        device.flush().await.unwrap();
        assert_eq!(dialer.dialed.load(Ordering::SeqCst), 2);
        assert_eq!(refused("retry?errors=io,other").kind(), Kind::Usage);
    });
}

/// Opens nothing so many times, as long as a server has not been started again.
struct Late {
    dialer: Arc<Dialer>,
    absent: AtomicU64,
    kind: Kind,
}

impl HandleOpener for Late {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let left = |left: u64| left.checked_sub(1);
        match self.absent.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left) {
            Ok(_) => {
                let error = Error::new(self.kind, "nobody is there");
                Box::pin(std::future::ready(Err(error)))
            }
            Err(_) => self.dialer.another(),
        }
    }
}

#[test]
fn a_flush_waits_for_a_server_that_is_not_there_yet() {
    on_workers(|| async {
        // A socket that nobody listens on, and none.
        for kind in [Kind::Io, Kind::NotFound] {
            let memory = blockhaul_backends::memory(1 << 20);
            let kinds = Kind::Disconnected;
            let dialer = Dialer { memory, requests: 1, kind: kinds, dialed: AtomicU64::new(0) };
            let dialer = Arc::new(dialer);
            let first = dialer.another().await.unwrap();
            let late = Arc::new(Late { dialer, absent: AtomicU64::new(3), kind });
            let below = LayerBase { reopen: Some(late.clone()), ..LayerBase::alone(first) };
            let text = "retry?retry-delay=1ms&retry-exponential=off&retries=5";
            let device = layer(text).unwrap().open(below).await.unwrap();
            write(&device, 0, b"x").await;
            device.flush().await.unwrap();
            assert_eq!(late.absent.load(Ordering::SeqCst), 0, "{kind:?}");
            // One that comes too late has not failed a flush, either.
            late.absent.store(100, Ordering::SeqCst);
            assert!(device.flush().await.is_err(), "{kind:?}");
            late.absent.store(0, Ordering::SeqCst);
            device.flush().await.unwrap();
            assert_eq!(read(&device, 0, 1).await, b"x");
        }
    });
}

#[test]
fn retry_can_refuse_what_may_be_lost() {
    on_workers(|| async {
        let text = "retry?retry-delay=1ms&unflushed=fail";
        let (device, _) = fragile(text, 3, Kind::Disconnected).await;
        for at in 0..5 {
            write(&device, at, b"x").await;
        }
        // Three of them used a connection that has ended since.
        for _ in 0..3 {
            assert_eq!(device.flush().await.unwrap_err().kind(), Kind::Io);
        }
        let (device, _) = fragile(text, 3, Kind::Disconnected).await;
        write(&device, 0, b"x").await;
        device.flush().await.unwrap();
        for _ in 0..5 {
            read(&device, 0, 1).await;
        }
        device.flush().await.unwrap();
        let text = "retry?retry-delay=1ms&retry-readonly=on";
        let (device, _) = fragile(text, 1, Kind::Disconnected).await;
        write(&device, 0, b"x").await;
        read(&device, 0, 1).await;
        let error = device.write(0, Data::copy_of(b"x")).await.unwrap_err();
        assert_eq!(error.kind(), Kind::ReadOnly);
    });
}

#[test]
fn a_connection_that_is_made_again_may_have_lost_what_another_has_written() {
    on_workers(|| async {
        let layer = layer("retry?retry-delay=1ms&unflushed=fail").unwrap();
        let memory = blockhaul_backends::memory(1 << 20);
        assert!(memory.facts().can.contains(Can::MULTI_CONN));
        let open = async |requests| {
            let kind = Kind::Disconnected;
            let memory = memory.clone();
            let dialer = Dialer { memory, requests, kind, dialed: AtomicU64::new(0) };
            let first = dialer.another().await.unwrap();
            let below = LayerBase { reopen: Some(Arc::new(dialer)), ..LayerBase::alone(first) };
            layer.clone().open(below).await.unwrap()
        };
        let (one, other) = (open(2).await, open(1).await);
        write(&one, 0, b"x").await;
        // A connection that was there before the write flushes it.
        other.flush().await.unwrap();
        for device in [&one, &other, &one] {
            read(device, 0, 1).await;
            device.flush().await.unwrap();
        }
        write(&one, 0, b"x").await;
        // Nobody knows whether this is the server that has the write.
        open(1).await.flush().await.unwrap();
        read(&other, 0, 1).await;
        for device in [&one, &other] {
            assert_eq!(device.flush().await.unwrap_err().kind(), Kind::Io);
        }
    });
}

#[test]
fn a_flush_does_not_cover_a_write_that_ended_during_it() {
    on_workers(|| async {
        let faults = FaultDevice::over(blockhaul_backends::memory(1 << 20), 1);
        faults.add(FaultRule::new(FaultEffect::HangAfter).kind(OpKind::Flush).times(1));
        let dialer = Dialer {
            memory: faults.clone(),
            requests: 2,
            kind: Kind::Disconnected,
            dialed: AtomicU64::new(0),
        };
        let below = dialer.another().await.unwrap();
        let below = LayerBase { reopen: Some(Arc::new(dialer)), ..LayerBase::alone(below) };
        let text = "retry?retry-delay=1ms&unflushed=fail";
        let device = layer(text).unwrap().open(below).await.unwrap();
        let flush = device.submit(Request::flush());
        write(&device, 0, b"x").await;
        assert_eq!(faults.release(), 1);
        flush.await.unwrap();
        // The connection has ended: the server may have lost the write.
        assert_eq!(device.flush().await.unwrap_err().kind(), Kind::Io);
    });
}

/// Storage that reports lost data once, as the kernel does, and then reports success.
struct Forgetful {
    memory: Arc<dyn Device>,
    has_lost: AtomicBool,
    asked: AtomicU64,
}

impl Forgetful {
    fn new() -> Arc<Forgetful> {
        let memory = blockhaul_block::emulate::emulate(blockhaul_backends::memory(1 << 20));
        Arc::new(Forgetful { memory, has_lost: AtomicBool::new(true), asked: AtomicU64::new(0) })
    }
}

impl Device for Forgetful {
    fn facts(&self) -> Arc<Facts> {
        self.memory.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if request.kind() == OpKind::Flush || request.flags.contains(RequestFlags::FUA) {
            self.asked.fetch_add(1, Ordering::SeqCst);
            if self.has_lost.swap(false, Ordering::SeqCst) {
                return Error::new(Kind::Io, "writeback failed").into();
            }
        }
        self.memory.submit(request)
    }
}

const LAYERS: [&str; 9] = [
    "retry?retry-delay=1ms",
    "retry?retry-delay=1ms&unflushed=fail",
    "retry-request?delay=1ms",
    "cache",
    "cache?cache=writethrough",
    "multi-conn?mode=emulate",
    "multi-conn?mode=emulate&track-dirty=off",
    "fua?fuamode=emulate",
    "fua?fuamode=force",
];

#[test]
fn a_failed_flush_is_not_repeated_and_no_later_one_succeeds() {
    on_workers(|| async {
        for text in LAYERS {
            for first in [OpKind::Flush, OpKind::Write, OpKind::Zero] {
                let storage = Forgetful::new();
                let layer = layer(text).unwrap();
                let [one, two] = [0, 1].map(|_| layer.wrap(storage.clone()).unwrap());
                // With `force` the write fails.
                let written = one.write(0, Data::copy_of(&[1; 4096])).await;
                assert_eq!(written.is_err(), text.ends_with("force"), "{text}");
                if written.is_ok() {
                    let request = match first {
                        OpKind::Flush => Request::flush(),
                        OpKind::Write => Request::write(9, Data::copy_of(b"x")),
                        _ => Request::zero(0, 4096),
                    };
                    let flags = match first {
                        OpKind::Flush => RequestFlags::empty(),
                        _ => RequestFlags::FUA,
                    };
                    let error = one.submit(request.with(flags)).await.unwrap_err();
                    assert_eq!(error.kind(), Kind::Io, "{text}: {first:?}");
                }
                for device in [&two, &one] {
                    for request in [
                        Request::flush(),
                        Request::write(5, Data::copy_of(b"y")).with(RequestFlags::FUA),
                        Request::zero(0, 8192).with(RequestFlags::FUA),
                        Request::flush(),
                    ] {
                        let error = device.submit(request).await.unwrap_err();
                        assert_eq!(error.kind(), Kind::Io, "{text}: {first:?}: {error}");
                    }
                }
                assert_eq!(storage.asked.load(Ordering::SeqCst), 1, "{text}: {first:?}");
                // Reads, and writes without durability, still work.
                if !text.ends_with("force") {
                    write(&two, 70_000, b"z").await;
                    assert_eq!(read(&one, 70_000, 1).await, b"z");
                }
            }
        }
    });
}

#[test]
fn storage_that_is_opened_again_can_be_flushed() {
    on_workers(|| async {
        for text in LAYERS {
            let storage = Forgetful::new();
            let layer = layer(text).unwrap();
            let device = layer.wrap(storage.clone()).unwrap();
            let request = Request::write(0, Data::copy_of(b"x")).with(RequestFlags::FUA);
            device.submit(request).await.unwrap_err();
            device.flush().await.unwrap_err();
            drop(device);
            // A cache tries to write back at its end.
            while Arc::strong_count(&storage) > 1 {
                blockhaul_io::sleep(Duration::from_millis(1)).await;
            }
            let device = layer.wrap(storage.clone()).unwrap();
            write(&device, 0, b"y").await;
            device.flush().await.unwrap_or_else(|error| panic!("{text}: {error}"));
        }
    });
}

#[test]
fn retry_request_tries_again() {
    on_workers(|| async {
        for (text, works) in [
            ("retry-request?delay=1ms", true),
            ("retry-request?delay=1ms&retries=1", false),
            ("retry-request?delay=1ms&errors=timeout", false),
        ] {
            let flaky =
                layer("error?count=2").unwrap().wrap(blockhaul_backends::memory(1 << 20)).unwrap();
            let device = layer(text).unwrap().wrap(flaky).unwrap();
            let outcome = device.write(5, Data::copy_of(b"again")).await;
            assert_eq!(outcome.is_ok(), works, "{text}");
            if works {
                assert_eq!(read(&device, 5, 5).await, b"again");
            }
        }
    });
}

#[test]
fn pause_holds_requests_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let text = format!("pause?pause-control={}", path.display());
    on_workers(move || async move {
        let pause = layer(&text).unwrap();
        assert!(layer(&text).is_err(), "the socket is in use");
        let counter = StatsLayer::new();
        let counted = counter.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        let device = pause.wrap(counted).unwrap();
        write(&device, 0, b"before").await;
        let mut control = UnixStream::connect(&path).unwrap();
        let mut say = |byte: &[u8]| {
            control.write_all(byte).unwrap();
            let mut answer = [0];
            control.read_exact(&mut answer).unwrap();
            answer[0]
        };
        assert_eq!((say(b"?"), say(b"p")), (b'X', b'P'));
        let held: Vec<_> = (0..3).map(|at| device.submit(Request::zero(at, 1))).collect();
        blockhaul_io::sleep(Duration::from_millis(20)).await;
        assert_eq!(counter.counts(OpKind::Zero).requests, 0);
        assert_eq!(say(b"r"), b'R');
        for pending in held {
            pending.await.unwrap();
        }
        assert_eq!(read(&device, 0, 6).await, b"\0\0\0ore");
        drop((device, pause));
        assert!(!path.exists(), "the socket goes with the layer");
    });
    assert_eq!(refused("pause?paused=maybe").kind(), Kind::Usage);
    assert_eq!(refused("pause?pause-control=/nonexistent/x").kind(), Kind::NotFound);
}

#[test]
fn scan_hints_at_everything_once() {
    on_workers(|| async {
        let counter = StatsLayer::new();
        let counted = counter.wrap(blockhaul_backends::memory((8 << 20) + 5)).unwrap();
        let device = layer("scan?scan-size=1M&scan-ahead=off").unwrap().wrap(counted).unwrap();
        assert_eq!(counter.counts(OpKind::Cache).requests, 0);
        read(&device, 0, 1).await;
        while counter.counts(OpKind::Cache).bytes < (8 << 20) + 5 {
            blockhaul_io::sleep(Duration::from_millis(1)).await;
        }
        blockhaul_io::sleep(Duration::from_millis(5)).await;
        assert_eq!(counter.counts(OpKind::Cache).requests, 9);
    });
    for wrong in ["scan?scan-size=3k", "scan?scan-size=64M"] {
        assert_eq!(refused(wrong).kind(), Kind::Usage);
    }
}
