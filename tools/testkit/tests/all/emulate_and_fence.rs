//! `blockhaul_block::emulate` adds missing abilities and reports them; `blockhaul_block::fence`
//! rejects everything that the facts do not allow, in both directions.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, DeviceExt, Extents, Facts, Kind, OpKind,
    PendingRequest, Reply, Request, RequestFlags, fence,
};
use blockhaul_io::{Data, IoEngine, Reservation, Runtime, RuntimeConfig};
use blockhaul_testkit::conform::{self, ConformOptions};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice, RequestRecord};

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce() -> F + Send + 'static) {
    let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Threads }).unwrap();
    runtime.block_on(test);
}

/// A model without some abilities, and the emulation over it.
fn lacking(lacking: Can, change: impl FnOnce(&mut Facts)) -> (Arc<ModelDevice>, Arc<dyn Device>) {
    let mut facts = Model::all_facts(1 << 20);
    facts.can -= lacking;
    if lacking.contains(Can::EXTENTS) {
        facts.contexts.clear();
    }
    change(&mut facts);
    let model = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Deferred);
    (model.clone(), fence(blockhaul_block::emulate::emulate(model)))
}

fn seen(kind: OpKind, at: u64, len: u64) -> RequestRecord {
    RequestRecord { kind, at, len, flags: RequestFlags::empty() }
}

#[test]
fn every_set_of_abilities_keeps_the_contract() {
    let abilities =
        [Can::FLUSH, Can::FUA, Can::TRIM, Can::ZERO | Can::FAST_ZERO, Can::CACHE, Can::EXTENTS];
    let options = ConformOptions {
        only: vec![
            "the_facts_are_consistent",
            "each_request_completes",
            "zero_makes_the_range_read_as_zeroes",
            "fua_is_durable_on_completion",
            "data_is_never_called_zero_or_hole",
            "the_fence_refuses_what_the_facts_forbid",
            "a_pool_of_one_request_is_enough",
            "random_requests_match_the_model",
        ],
        engines: vec![IoEngine::Threads],
        rounds: 3,
        steps: 60,
        ..ConformOptions::default()
    };
    for set in 0..1 << abilities.len() {
        let chosen = abilities.iter().enumerate().filter(|(bit, _)| set & (1 << bit) != 0);
        let can = chosen.fold(Can::WRITE, |can, (_, ability)| can | *ability);
        conform::check(&format!("{can:?}"), options.clone(), move || async move {
            let mut facts = Model::all_facts(50_000);
            facts.can = can;
            if !can.contains(Can::EXTENTS) {
                facts.contexts.clear();
            }
            let model = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Deferred);
            Ok(model as Arc<dyn Device>)
        });
    }
}

#[test]
fn what_is_supplied_is_told_and_nothing_is_pretended() {
    run(|| async {
        let (_, device) = lacking(Can::ZERO | Can::FAST_ZERO | Can::FUA | Can::EXTENTS, |_| ());
        let facts = device.facts();
        assert_eq!(facts.emulated, Can::ZERO | Can::FUA | Can::EXTENTS);
        assert!(facts.can.contains(facts.emulated) && !facts.can.contains(Can::FAST_ZERO));
        assert_eq!(facts.contexts, [BASE_ALLOCATION]);
        let (_, device) = lacking(Can::FLUSH | Can::FUA | Can::TRIM | Can::CACHE, |_| ());
        assert_eq!(device.facts().emulated, Can::empty());
        let flushed = device.flush().await.unwrap_err();
        assert_eq!(flushed.kind(), Kind::Invalid);
        let (_, device) = lacking(Can::CHANGES, |_| ());
        assert_eq!(device.facts().emulated, Can::empty(), "a read-only device needs no zero");
    });
}

#[test]
fn zero_is_written_in_pieces_within_the_limits() {
    run(|| async {
        let (model, device) = lacking(Can::ZERO | Can::FAST_ZERO, |facts| {
            facts.block.maximum = 10_000;
            facts.block.minimum = 512;
        });
        model.model().bytes_mut().fill(7);
        let fast =
            device.submit(Request::zero(512, 512).with(RequestFlags::FAST)).await.unwrap_err();
        assert_eq!(fast.kind(), Kind::Unsupported);
        device.zero(512, 100_352).await.unwrap();
        let seen = model.seen();
        assert!(seen.iter().all(|seen| seen.kind == OpKind::Write && seen.len <= 10_000));
        assert!(seen.iter().all(|seen| seen.at % 512 == 0 && seen.len % 512 == 0));
        assert_eq!(seen.iter().map(|seen| seen.len).sum::<u64>(), 100_352);
        let bytes = model.bytes();
        assert!(bytes[512..][..100_352].iter().all(|&byte| byte == 0));
        assert_eq!((bytes[511], bytes[512 + 100_352]), (7, 7));
    });
}

#[test]
fn partial_blocks_are_read_changed_and_written_back() {
    run(|| async {
        let (model, device) = lacking(Can::empty(), |facts| facts.block.minimum = 512);
        model.model().bytes_mut().fill(7);
        assert_eq!(device.facts().block.minimum, 1);
        device.write(1000, Data::copy_of(&[1; 2000])).await.unwrap();
        device.zero(5000, 10).await.unwrap();
        let bytes = model.bytes();
        let right = bytes.iter().enumerate().all(|(at, &byte)| match at {
            1000..3000 => byte == 1,
            5000..5010 => byte == 0,
            _ => byte == 7,
        });
        assert!(right);
        let seen = model.seen();
        assert!(seen.iter().all(|seen| seen.at % 512 == 0 && seen.len % 512 == 0), "{seen:?}");
        let whole = seen.iter().find(|seen| seen.kind == OpKind::Write && seen.len > 512);
        assert_eq!(whole.map(|seen| (seen.at, seen.len)), Some((1024, 1536)), "not read before");
        assert_eq!(device.read(999, 3).await.unwrap().bytes(), [7, 1, 1]);
    });
}

/// The partial block at the end is reached by a request that ends there, and no other way.
#[test]
fn the_partial_block_at_the_end_is_reached_by_one_shorter_request() {
    run(|| async {
        const SIZE: u64 = 5000;
        let (model, device) = lacking(Can::empty(), |facts| {
            facts.size = SIZE;
            facts.block.minimum = 512;
        });
        model.model().bytes_mut().fill(7);
        assert_eq!(device.facts().tail, 392);
        device.write(4000, Data::copy_of(&[1; 1000])).await.unwrap();
        device.write(4700, Data::copy_of(&[2; 10])).await.unwrap();
        device.zero(4998, 2).await.unwrap();
        device.submit(Request::trim(4608, 392)).await.unwrap();
        let bytes = model.bytes();
        let right = bytes.iter().enumerate().take(4608).all(|(at, &byte)| match at {
            4000.. => byte == 1,
            _ => byte == 7,
        });
        assert!(right);
        assert_eq!(device.read(4999, 1).await.unwrap().bytes().len(), 1);
        let ends = |seen: &RequestRecord| {
            seen.at.is_multiple_of(512)
                && (seen.len.is_multiple_of(512) || seen.at + seen.len == SIZE)
        };
        assert!(model.seen().iter().all(ends), "{:?}", model.seen());
        let whole = model
            .seen()
            .iter()
            .any(|seen| seen.kind == OpKind::Write && seen.at == 4096 && seen.len == 904);
        assert!(whole, "not read before: {:?}", model.seen());
        let raw = fence(model.clone());
        for (at, len, kind) in [
            (4608, 391, Some(Kind::Invalid)),
            (4609, 391, Some(Kind::Invalid)),
            (4608, 392, None),
            (0, SIZE, None),
        ] {
            let read = raw.submit(Request::read(at, Reservation::unpooled(len as usize))).await;
            assert_eq!(read.err().map(|error| error.kind()), kind, "{len} at {at}");
        }
    });
}

/// A partial block is rewritten while all of it is written: the rest of the block is what the full
/// write says, whichever of the two is carried out first.
#[test]
fn rewriting_a_part_of_a_block_undoes_no_write_of_the_whole() {
    run(|| async {
        for seed in 1..=200 {
            let mut random = blockhaul_testkit::rng::Rng::new(seed);
            let mut facts = Model::all_facts(1 << 20);
            facts.block.minimum = 512;
            let model = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Deferred);
            let slow = FaultDevice::over(model.clone(), seed);
            slow.reorder(6);
            let device = fence(blockhaul_block::emulate::emulate(slow));
            for round in 0..8_u8 {
                let whole = 2 * round + 1;
                let part = 2 * round + 2;
                let at = 512 + random.below(500);
                let len = 1 + random.below(12);
                let mut requests = vec![
                    Request::write(0, Data::copy_of(&[whole; 1536])),
                    Request::write(at, Data::copy_of(&vec![part; len as usize])),
                ];
                if random.chance(50) {
                    requests.swap(0, 1);
                }
                let pending: Vec<_> =
                    requests.into_iter().map(|request| device.submit(request)).collect();
                // In any order: one may wait for another whose caller does not poll yet.
                for pending in pending.into_iter().rev() {
                    pending.await.unwrap();
                }
                let bytes = model.bytes();
                for (place, &byte) in bytes[..1536].iter().enumerate() {
                    let inside = (at..at + len).contains(&(place as u64));
                    let right = byte == whole || (inside && byte == part);
                    assert!(right, "seed {seed}, round {round}: {byte} at {place}");
                }
            }
        }
    });
}

#[test]
fn fua_is_a_flush_after_the_request() {
    run(|| async {
        let (model, device) = lacking(Can::FUA, |_| ());
        let write = Request::write(0, Data::zeroes(512)).with(RequestFlags::FUA);
        device.submit(write).await.unwrap();
        device.submit(Request::trim(0, 512).with(RequestFlags::FUA)).await.unwrap();
        device.write(512, Data::zeroes(512)).await.unwrap();
        let expected = [
            seen(OpKind::Write, 0, 512),
            seen(OpKind::Flush, 0, 0),
            seen(OpKind::Trim, 0, 512),
            seen(OpKind::Flush, 0, 0),
            seen(OpKind::Write, 512, 512),
        ];
        assert_eq!(model.seen(), expected);
    });
}

#[test]
fn an_emulated_request_fails_as_its_parts_and_is_drained_first() {
    run(|| async {
        let mut facts = Model::all_facts(1 << 20);
        facts.can = Can::WRITE | Can::FLUSH;
        facts.contexts.clear();
        facts.block.maximum = 65_536;
        let model = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
        let faults = FaultDevice::over(model, 1);
        faults.add(FaultRule::new(FaultEffect::Fail(Kind::NoSpace)).kind(OpKind::Write).nth(2));
        faults.reorder(30);
        let device = fence(blockhaul_block::emulate::emulate(faults.clone()));
        let error = device.zero(0, 1 << 20).await.unwrap_err();
        assert_eq!(error.kind(), Kind::NoSpace);
        assert_eq!(faults.in_flight(), 0, "all writes are over when the zeroing is");
        assert!(faults.seen().len() < 16, "no further writes after the failure");
        faults.heal();
        faults.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Flush));
        let write = Request::write(0, Data::zeroes(1)).with(RequestFlags::FUA);
        assert_eq!(device.submit(write).await.unwrap_err().kind(), Kind::Io);
    });
}

#[test]
fn errors_say_on_which_device_and_in_which_request() {
    run(|| async {
        let (_, device) = lacking(Can::empty(), |facts| facts.name = "disk".into());
        let error = device.read(1 << 20, 10).await.unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("disk: read of 10 bytes at offset 1048576: "), "{text}");
        assert_eq!(error.request(), Some((OpKind::Read, 1 << 20, 10)));
    });
}

/// A request and a reply to it.
type Case = (fn() -> Request, fn() -> Reply);

/// Returns the reply that it was made with.
struct Answers(Arc<Facts>, fn() -> Reply);

impl Device for Answers {
    fn facts(&self) -> Arc<Facts> {
        self.0.clone()
    }

    fn submit(&self, _request: Request) -> PendingRequest {
        PendingRequest::ready(Ok((self.1)()))
    }
}

#[test]
fn answers_that_do_not_fit_are_errors() {
    run(|| async {
        let data = || Reply::Data(Data::zeroes(511));
        let done = || Reply::Done;
        let hole = || Reply::Hole;
        let empty = || Reply::Extents(vec![Extents::new()]);
        let long = || Reply::Extents(vec![Extents::one(513, 0)]);
        let read = || Request::read(0, Reservation::unpooled(512));
        let write = || Request::write(0, Data::zeroes(512));
        let ask = || Request::extents(0, 512, ContextSet::first());
        let cases: [Case; 8] = [
            (read, data),
            (read, done),
            (read, long),
            (write, data),
            (write, hole),
            (Request::flush, hole),
            (ask, empty),
            (ask, long),
        ];
        for (request, reply) in cases {
            let device = fence(Arc::new(Answers(Arc::new(Model::all_facts(4096)), reply)));
            let error = device.submit(request()).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Io);
            assert!(error.to_string().contains("wrong kind or length"), "{error}");
        }
        let right = fence(Arc::new(Answers(Arc::new(Model::all_facts(4096)), hole)));
        assert!(matches!(right.submit(read()).await, Ok(Reply::Hole)));
    });
}
