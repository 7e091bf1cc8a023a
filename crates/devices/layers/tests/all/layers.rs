//! The function of each layer, besides the contract.

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockhaul_block::{
    Can, ContextSet, Device, DeviceExt, Error, Facts, HOLE, Kind, LeaseAccess, OpKind,
    PendingRequest, Reply, Request, RequestFlags, Result, ZERO,
};
use blockhaul_catalog::{Layer, Registry};
use blockhaul_io::{Data, Reservation, Runtime, RuntimeConfig, WorkerHandle};
use blockhaul_layers::{SharedThrottle, ThrottledConnection};

fn on_workers<F>(check: fn() -> F)
where
    F: Future<Output = ()> + 'static,
{
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(check);
}

fn layer(text: &str) -> Result<Arc<dyn Layer>> {
    Registry { layers: crate::common::kinds(), ..Registry::default() }.layer(text)
}

/// A device of 1 MiB of memory under a layer.
fn over_memory(text: &str) -> Arc<dyn Device> {
    layer(text).unwrap().wrap(blockhaul_backends::memory(1 << 20)).unwrap()
}

fn refused(text: &str) -> Error {
    layer(text).err().unwrap()
}

fn read(at: u64, len: usize) -> Request {
    Request::read(at, Reservation::unpooled(len))
}

#[test]
fn every_layer_has_a_name_of_its_own_and_declares_its_options() {
    let layers = crate::common::kinds();
    let gates = blockhaul_nbdkit_devices::gates::all();
    let registry = Registry { layers, gates, ..Registry::default() };
    let all = registry.layers_and_gates();
    for (index, kind) in all.iter().enumerate() {
        assert!(all[..index].iter().all(|other| other.name() != kind.name()));
        assert!(!kind.summary().is_empty());
        for param in kind.params() {
            assert!(param.doc.ends_with('.'), "{} {}", kind.name(), param.name);
            // A default is a value that could be typed.
            if let Some(default) = param.default {
                let typed = [(param.name.to_string(), default.to_string())];
                blockhaul_catalog::ParamValues::check(kind.name(), kind.params(), &typed).unwrap();
            }
        }
        let unknown = registry.layer_or_gate(&format!("{}?colour=red", kind.name())).err();
        assert_eq!(unknown.map(|error| error.kind()), Some(Kind::Usage));
    }
}

#[test]
fn offset_shows_a_part() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1 << 20);
        let part = layer("offset?offset=4k&range=64k").unwrap().wrap(memory.clone()).unwrap();
        assert_eq!(part.facts().size, 64 << 10);
        part.write(10, Data::copy_of(b"here")).await.unwrap();
        part.flush().await.unwrap();
        assert_eq!(memory.read(4096 + 10, 4).await.unwrap().bytes(), b"here");
        memory.zero(0, 4096).await.unwrap();
        let found = part.extents(0, 64 << 10, ContextSet::first()).await.unwrap();
        assert_eq!(found[0].total(), 64 << 10);
        let page = u64::from(memory.facts().allocation_unit);
        assert_eq!(found[0].runs()[0].len, page - 4096, "up to the end of the page below");

        let rest = layer("offset?offset=1048575").unwrap().wrap(memory.clone()).unwrap();
        assert_eq!(rest.facts().size, 1);
        for (text, part) in [
            ("offset?offset=2M", "beyond the end"),
            ("offset?offset=512k&range=513k", "exceeds the"),
        ] {
            let error = layer(text).unwrap().wrap(memory.clone()).err().unwrap();
            assert!(error.to_string().contains(part), "{error}");
            assert_eq!(error.kind(), Kind::Usage);
        }
    });
}

/// Returns the requested range of a lease.
struct Lessor(Arc<Facts>, blockhaul_io::File);

impl Device for Lessor {
    fn facts(&self) -> Arc<Facts> {
        self.0.clone()
    }

    fn submit(&self, _request: Request) -> PendingRequest {
        Error::new(Kind::Io, "not asked for here").into()
    }

    fn file_at(
        &self,
        at: u64,
        len: u64,
        _access: LeaseAccess,
    ) -> Option<blockhaul_block::FileRange> {
        Some(blockhaul_block::FileRange { file: self.1.clone(), at, len, past_cache: false })
    }
}

#[test]
fn only_layers_that_leave_requests_alone_pass_leases_on() {
    let file = blockhaul_io::File::new(tempfile::tempfile().unwrap().into());
    let lessor = || Arc::new(Lessor(Arc::new(Facts::new("lessor", 1000)), file.clone()));
    let wrap = |text: &str| layer(text).unwrap().wrap(lessor()).unwrap();
    let lease = wrap("offset?offset=100&range=50").file_at(20, 80, LeaseAccess::Write).unwrap();
    assert_eq!((lease.at, lease.len), (120, 30));
    assert!(wrap("readonly").file_at(0, 10, LeaseAccess::Read).is_some());
    assert!(wrap("readonly").file_at(0, 10, LeaseAccess::Write).is_none());
    for text in ["delay?read=1s", "rate?rate=1M", "error", "log?file=/dev/null", "stats"] {
        assert!(wrap(text).file_at(0, 10, LeaseAccess::Read).is_none(), "{text}");
    }
}

#[test]
fn readonly_refuses_and_says_so_in_the_facts() {
    on_workers(|| async {
        let device = over_memory("readonly");
        assert!(!device.facts().can.intersects(Can::CHANGES));
        assert!(device.facts().can.contains(Can::EXTENTS | Can::FLUSH));
        let error = device.write(0, Data::copy_of(b"x")).await.unwrap_err();
        assert_eq!(error.kind(), Kind::ReadOnly);
        assert_eq!(device.read(0, 1).await.unwrap().bytes(), [0]);
    });
}

#[test]
fn delayed_requests_wait_side_by_side_from_the_moment_of_submit() {
    on_workers(|| async {
        let device = over_memory("delay?read=1h");
        drop(device.submit(read(0, 512)));
        device.write(0, Data::copy_of(b"not delayed")).await.unwrap();
        let delay = Duration::from_millis(60);
        let count = 1000;
        let device = over_memory("delay?read=60ms");
        let started = Instant::now();
        let out: Vec<_> = (0..count).map(|index| device.submit(read(index * 512, 512))).collect();
        for pending in out {
            pending.await.unwrap();
        }
        let took = started.elapsed();
        assert!(took >= delay, "{took:?}");
        assert!(took < delay * count as u32, "{took:?}: as one after the other");
    });
}

#[test]
fn with_exclusive_everything_waits_for_extents_and_they_for_everything() {
    on_workers(|| async {
        let layer = layer("delay?extents=40ms&read=10ms&exclusive=on").unwrap();
        let device = layer.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        // Another handle of the same layer value uses the same lock, on another worker, too.
        let other = layer.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        let started = Instant::now();
        let before = device.submit(read(0, 512));
        let extents = device.submit(Request::extents(0, 4096, ContextSet::first()));
        let behind = device.submit(Request::flush());
        let elsewhere =
            WorkerHandle::to(1).spawn(move || async move { other.read(0, 512).await.map(drop) });
        before.await.unwrap();
        let ended = |what: &str, least: u64| {
            let took = started.elapsed();
            assert!(took >= Duration::from_millis(least), "{what} after {took:?}");
        };
        ended("the read before", 10);
        behind.await.unwrap();
        ended("the flush behind the extents", 50);
        extents.await.unwrap();
        elsewhere.await.unwrap().unwrap();
        // Without the lock, a flush and 64 reads at once still work.
        let out: Vec<_> = (0..64).map(|at| device.submit(read(at, 1))).collect();
        for pending in out {
            pending.await.unwrap();
        }
    });
}

#[test]
fn a_rate_holds_over_all_handles_and_in_order() {
    on_workers(|| async {
        let layer = layer("rate?rate=1M&burst=64k").unwrap();
        let one = layer.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        let two = layer.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        let started = Instant::now();
        // 384 KiB in all, 64 of them at once: 320 KiB at 1 MiB/s are 312 ms.
        let mut out = Vec::new();
        for index in 0..3 {
            out.push((2 * index, one.submit(read(0, 64 << 10))));
            let data = Data::copy_of(&[1; 64 << 10]);
            out.push((2 * index + 1, two.submit(Request::write(0, data))));
        }
        for (index, pending) in out {
            pending.await.unwrap();
            let due = Duration::from_millis(62 * index);
            assert!(started.elapsed() >= due, "request {index} after {:?}", started.elapsed());
        }
        // Requests without payload pass: at this rate it would take 12 days.
        let slow = over_memory("rate?rate=1&burst=1");
        slow.zero(0, 1 << 20).await.unwrap();
    });
}

#[test]
fn a_rate_can_be_changed_while_requests_wait() {
    on_workers(|| async {
        let bucket = Arc::new(blockhaul_layers::Bucket::new(1, 0));
        let layer = blockhaul_layers::RateLayer::new(bucket.clone());
        let device = layer.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        let started = Instant::now();
        let pending = device.submit(read(0, 1 << 20));
        blockhaul_io::sleep(Duration::from_millis(20)).await;
        bucket.set(1 << 40, 0);
        pending.await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(60), "at the old rate it takes 12 days");
    });
    for text in ["rate", "rate?rate=0"] {
        assert!(refused(text).to_string().contains("rate=100M"), "{text}");
    }
    // The largest numbers are numbers, and larger ones are none.
    for text in ["rate?rate=16E", "rate?rate=1&burst=18446744073709551615"] {
        assert!(refused(text).to_string().contains("more than 2^63 - 1 bytes"), "{text}");
    }
    on_workers(|| async {
        let most = i64::MAX;
        let device = over_memory(&format!("rate?rate={most}&burst={most}"));
        device.submit(read(0, 1 << 20)).await.unwrap();
    });
}

/// A client with long requests, and one that leaves, keep no other one from the limits that they have together.
#[test]
fn a_shared_throttle_serves_each_connection_in_turn() {
    on_workers(|| async {
        let throttle = Arc::new(SharedThrottle::new(Some(1 << 20), Some(1000)));
        let device = |connection: &Arc<ThrottledConnection>| {
            throttle.wrap(blockhaul_backends::memory(64 << 20), connection.clone())
        };
        let [greedy, modest] = [(); 2].map(|()| Arc::<ThrottledConnection>::default());
        let (long, short) = (device(&greedy), device(&modest));
        // A minute for all of them.
        let pending: Vec<_> = (0..16).map(|_| long.submit(read(0, 4 << 20))).collect();
        let started = Instant::now();
        for _ in 0..3 {
            short.submit(read(0, 16 << 10)).await.unwrap();
        }
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        greedy.leave();
        for one in pending {
            assert_eq!(one.await.unwrap_err().kind(), Kind::ShuttingDown);
        }
        // What was written is carried out.
        long.zero(0, 4 << 10).await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        // The limit holds: a tenth of a second of it may be there.
        let started = Instant::now();
        let pending = [(); 4].map(|()| short.submit(read(0, 128 << 10)));
        for one in pending {
            one.await.unwrap();
        }
        assert!(started.elapsed() >= Duration::from_millis(390), "{:?}", started.elapsed());
    });
}

#[test]
fn each_limit_of_throttle_holds_for_its_requests_and_over_a_group() {
    on_workers(|| async {
        // One request at once, then one in 50 ms.
        let options = "throttle?group=g&iops-write=20&iops-write-max=1&iops-size=4k";
        let wrap = |layer: Arc<dyn Layer>| layer.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        let [one, two] = [options, options].map(|text| wrap(layer(text).unwrap()));
        let started = Instant::now();
        for (index, device) in [&one, &two, &one, &two].into_iter().enumerate() {
            // Reads have no limit.
            device.submit(read(0, 1 << 20)).await.unwrap();
            let data = Data::copy_of(&[1; 4 << 10]);
            device.submit(Request::write(0, data)).await.unwrap();
            let due = Duration::from_millis(49 * index as u64);
            assert!(started.elapsed() >= due, "request {index} after {:?}", started.elapsed());
        }
        // As much as three requests.
        one.zero(0, 12 << 10).await.unwrap();
        assert!(started.elapsed() >= Duration::from_millis(295), "{:?}", started.elapsed());
        assert!(refused("throttle?group=g&iops-write=30").to_string().contains("other limits"));
        drop((one, two));
        // The group has gone with them.
        let device = wrap(layer("throttle?group=g&bps-read=1").unwrap());
        device.submit(Request::write(0, Data::copy_of(&[1; 4 << 10]))).await.unwrap();
    });
    assert!(refused("throttle").to_string().contains("iops-total=100"));
    assert!(refused("throttle?bps-read-max=1").to_string().contains("requires bps-read"));
}

#[test]
fn errors_come_where_and_as_often_as_they_are_asked_for() {
    on_workers(|| async {
        let kinds = [
            ("EIO", Kind::Io),
            ("ENOSPC", Kind::NoSpace),
            ("EPERM", Kind::ReadOnly),
            ("EINVAL", Kind::Invalid),
            ("ENOMEM", Kind::NoMemory),
            ("ESHUTDOWN", Kind::ShuttingDown),
        ];
        for (name, kind) in kinds {
            let device = over_memory(&format!("error?error={name}"));
            let error = device.flush().await.unwrap_err();
            assert_eq!(error.kind(), kind);
            assert!(error.to_string().contains(name), "{error}");
        }

        let device = over_memory("error?write=100%");
        device.read(0, 1).await.unwrap();
        device.write(0, Data::copy_of(b"x")).await.unwrap_err();
        assert_eq!(device.read(0, 1).await.unwrap().bytes(), [0], "it never reached the device");

        let device = over_memory("error?at=8k,4k");
        for (at, len, fails) in
            [(0, 8192, false), (0, 8193, true), (12_287, 1, true), (12_288, 9, false)]
        {
            assert_eq!(device.read(at, len).await.is_err(), fails, "{len} at {at}");
        }
        device.flush().await.unwrap();

        let device = over_memory("error?read=100%&after=2&count=3");
        let mut failed = Vec::new();
        for _ in 0..7 {
            failed.push(device.read(0, 1).await.is_err());
            device.flush().await.unwrap();
        }
        assert_eq!(failed, [false, false, true, true, true, false, false]);
    });
}

#[test]
fn shares_of_errors_are_kept_and_seeds_repeat_them() {
    on_workers(|| async {
        let mut runs = Vec::new();
        for text in ["error?read=25%&seed=7", "error?read=25%&seed=7", "error?read=25%&seed=8"] {
            let device = over_memory(text);
            let mut failed = Vec::new();
            for _ in 0..1000 {
                failed.push(device.read(0, 1).await.is_err());
            }
            let count = failed.iter().filter(|&&failed| failed).count();
            assert!((200..300).contains(&count), "{count} of 1000");
            runs.push(failed);
        }
        assert_eq!(runs[0], runs[1]);
        assert_ne!(runs[0], runs[2]);
    });
    assert!(refused("error?at=x").to_string().contains("at: "));
    assert!(refused("error?error=EBADF").to_string().contains("ESHUTDOWN"));
}

/// A device whose flush lasts until it is released.
struct HeldFlush {
    below: Arc<dyn Device>,
    flush: Mutex<Option<blockhaul_io::Ticket<()>>>,
}

impl Device for HeldFlush {
    fn facts(&self) -> Arc<Facts> {
        self.below.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let held = match request.kind() {
            OpKind::Flush => self.flush.lock().unwrap().take(),
            _ => None,
        };
        let below = self.below.submit(request);
        match held {
            None => below,
            Some(held) => PendingRequest::start(async move {
                held.await.unwrap();
                below.await
            }),
        }
    }
}

#[test]
fn the_log_has_a_line_for_begin_and_end_of_each_request() {
    on_workers(|| async {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = layer(&format!("log?file={}", path.display())).unwrap();
        let failing =
            layer("error?trim=100%").unwrap().wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        let (let_go, held) = blockhaul_io::ticket();
        let flush = Mutex::new(Some(held));
        let device = log.wrap(Arc::new(HeldFlush { below: failing, flush })).unwrap();
        let flush = device.submit(Request::flush());
        device.read(512, 1024).await.unwrap();
        device
            .submit(Request::zero(0, 4096).with(blockhaul_block::RequestFlags::FUA))
            .await
            .unwrap();
        device.trim(0, 10).await.unwrap_err();
        device.extents(0, 4096, ContextSet::first()).await.unwrap();
        blockhaul_io::sleep(Duration::from_millis(20)).await;
        let_go.complete(());
        flush.await.unwrap();
        let text = fs::read_to_string(path).unwrap();
        // Times differ from run to run.
        let lines: Vec<_> =
            text.lines().map(|line| line.split(" us=").next().unwrap_or(line)).collect();
        assert_eq!(
            lines,
            [
                "1 flush begin",
                "2 read offset=512 length=1024 begin",
                "2 read offset=512 length=1024 ok hole",
                "3 zero offset=0 length=4096 flags=FUA begin",
                "3 zero offset=0 length=4096 flags=FUA ok",
                "4 trim offset=0 length=10 begin",
                "4 trim offset=0 length=10 error=\"EIO from the error layer\"",
                "5 extents offset=0 length=4096 begin",
                "5 extents offset=0 length=4096 ok extents=1",
                "1 flush ok",
            ]
        );
        let micros: u64 = text.trim().rsplit("us=").next().unwrap().parse().unwrap();
        assert!(micros >= 20_000, "the flush took {micros} us");
    });
    assert_eq!(refused("log?file=/no/such/folder/log").kind(), Kind::NotFound);
}

#[test]
fn stats_count_and_are_printed_at_the_end() {
    on_workers(|| async {
        let stats = blockhaul_layers::StatsLayer::new();
        let inner =
            layer("error?trim=100%").unwrap().wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        let inner = layer("delay?read=5ms").unwrap().wrap(inner).unwrap();
        let one = stats.wrap(inner.clone()).unwrap();
        let two = stats.wrap(inner).unwrap();
        for device in [&one, &two] {
            device.write(0, Data::copy_of(&[1; 1000])).await.unwrap();
            device.read(0, 500).await.unwrap();
            device.trim(0, 100).await.unwrap_err();
        }
        let read = stats.counts(OpKind::Read);
        assert_eq!((read.requests, read.errors, read.bytes), (2, 0, 1000));
        assert!(read.total_us >= 10_000 && read.longest_us >= 5_000, "{read:?}");
        let trim = stats.counts(OpKind::Trim);
        assert_eq!((trim.requests, trim.errors, trim.bytes), (2, 2, 0));
        assert_eq!(stats.counts(OpKind::Zero), blockhaul_layers::OperationCounts::default());

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats");
        let printing = layer(&format!("stats?file={}", path.display())).unwrap();
        let device = printing.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        device.write(0, Data::copy_of(&[1; 1000])).await.unwrap();
        drop(printing);
        assert_eq!(fs::read_to_string(&path).unwrap(), "", "a handle is still there");
        drop(device);
        let text = fs::read_to_string(&path).unwrap();
        let row: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(row[..4], ["write", "1", "0", "1000"]);
        assert_eq!(text.lines().count(), 2, "only what was asked for");
    });
}

#[test]
fn layers_stack() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1 << 20);
        memory.write(4096, Data::copy_of(b"abc")).await.unwrap();
        let part = layer("offset?offset=4k").unwrap().wrap(memory).unwrap();
        let device = layer("readonly").unwrap().wrap(part).unwrap();
        assert_eq!(device.read(0, 3).await.unwrap().bytes(), b"abc");
        let found = device.extents(512 << 10, 4096, ContextSet::first()).await.unwrap();
        assert_eq!(found[0].runs()[0].state, HOLE | ZERO);
    });
}

#[test]
fn only_the_named_contexts_are_shown() {
    on_workers(|| async {
        let both = over_memory("allocation-depth");
        let names = |text: &str| {
            let device = layer(text).unwrap().wrap(both.clone()).unwrap();
            (device.facts().contexts.clone(), device)
        };
        let depth = "qemu:allocation-depth".to_string();
        let base = "base:allocation".to_string();
        assert_eq!(names("contexts").0, std::slice::from_ref(&base));
        let (all, device) = names(&format!("contexts?show={depth}"));
        assert_eq!(all, [base, depth.clone()]);
        let context = device.facts().context(&depth).unwrap();
        let reply = device.submit(Request::extents(0, 4096, context)).await.unwrap();
        assert!(format!("{reply:?}").contains("state: 1"), "{reply:?}");
        let absent = layer("contexts?show=qemu:dirty-bitmap:x").unwrap().wrap(both.clone());
        let error = absent.err().unwrap();
        assert!(error.remedy().unwrap().contains(&depth), "{error}");
    });
}

/// Records the kind and the flags of each request.
struct RequestRecorder(Mutex<Vec<(OpKind, RequestFlags)>>);

impl Device for RequestRecorder {
    fn facts(&self) -> Arc<Facts> {
        let mut facts = Facts::new("recorder", 1 << 20);
        facts.can |= Can::ZERO | Can::FUA;
        Arc::new(facts)
    }

    fn submit(&self, request: Request) -> PendingRequest {
        self.0.lock().unwrap().push((request.kind(), request.flags));
        PendingRequest::ready(Ok(Reply::Done))
    }
}

#[test]
fn writes_of_zeroes_become_zero_requests() {
    on_workers(|| async {
        for (text, flags) in [
            ("detect-zeroes", RequestFlags::NO_HOLE),
            ("detect-zeroes?unmap=on", RequestFlags::empty()),
        ] {
            let seen = Arc::new(RequestRecorder(Mutex::default()));
            let device = layer(text).unwrap().wrap(seen.clone()).unwrap();
            for byte in [0, 1] {
                let data = Data::copy_of(&[byte; 4096]);
                device.submit(Request::write(0, data).with(RequestFlags::FUA)).await.unwrap();
            }
            let expected =
                [(OpKind::Zero, flags | RequestFlags::FUA), (OpKind::Write, RequestFlags::FUA)];
            assert_eq!(*seen.0.lock().unwrap(), expected, "{text}");
        }
    });
}
