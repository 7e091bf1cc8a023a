//! The contents of the target after a copy, and the requests that produced them.

use std::sync::Arc;

use blockhaul_block::{Can, Facts, Kind, OpKind};
use blockhaul_engine::{CopyProgress, EngineOptions, SEGMENT};
use blockhaul_io::{IoEngine, Pool};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{Rng, seed};

use super::{content, dirty, on_worker, run, runtime, source_of, stack};

#[test]
fn every_option_gives_the_same_bytes() {
    let seed = seed();
    for engine in [IoEngine::Auto, IoEngine::Threads] {
        runtime(engine).block_on(move || async move {
            let mut rng = Rng::new(seed);
            for round in 0..40 {
                let size = rng.between(1, 3 << 20) as usize;
                let bytes = content(&mut rng, size);
                let zeroed = rng.chance(30);
                let extra = if rng.chance(30) { rng.between(1, 9000) as usize } else { 0 };
                let target = if zeroed {
                    let model = Model::new((size + extra) as u64);
                    ModelDevice::new(model, CompletionOrder::Shuffled(rng.number()))
                } else {
                    dirty(size + extra)
                };
                let options = EngineOptions {
                    connections: rng.between(1, 5) as usize,
                    requests: rng.between(1, 20) as usize,
                    adaptive: rng.chance(50),
                    request_size: 4096 << rng.below(7),
                    queue_size: rng.between(1, 4 << 20),
                    sparse: *rng.pick(&[0, 512, 4096, 65536]),
                    sampled: rng.chance(50),
                    allocated: rng.chance(30),
                    target_is_zero: zeroed && rng.chance(50),
                    extents: rng.chance(70),
                    flush: rng.chance(50),
                    synchronous: rng.chance(10),
                    ..EngineOptions::default()
                };
                let source = source_of(&bytes, rng.chance(50));
                let told = format!("seed {seed}, round {round}: {size}+{extra} bytes, {options:?}");
                let summary = run(&stack(source), &stack(target.clone()), &options).await.unwrap();
                let copied = target.bytes();
                assert!(copied[..size] == bytes, "{told}");
                let rest = if zeroed { 0 } else { 0xa5 };
                assert!(copied[size..].iter().all(|&byte| byte == rest), "tail; {told}");
                assert_eq!(summary.data + summary.zeroed + summary.skipped, size as u64, "{told}");
            }
        });
    }
}

#[test]
fn zeroes_become_zero_requests_and_no_write_overlaps_another() {
    on_worker(|| async {
        let size = (SEGMENT + (40 << 20)) as usize;
        let mut bytes = vec![0; size];
        bytes[..1 << 20].fill(1);
        bytes[(SEGMENT as usize)..][..300_000].fill(2);
        let target = dirty(size);
        let options = EngineOptions { sampled: false, ..EngineOptions::default() };
        let summary =
            run(&stack(source_of(&bytes, false)), &stack(target.clone()), &options).await.unwrap();
        assert!(target.bytes() == bytes);
        // The source reports everything as data, so the zeroes were found by checking.
        assert!(summary.data < 2 << 20 && summary.zeroed > 150 << 20, "{summary}");
        let mut ranges: Vec<_> = target
            .seen()
            .iter()
            .filter(|seen| seen.kind.changes())
            .map(|seen| (seen.at, seen.at + seen.len))
            .collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "overlap");
        assert_eq!((ranges[0].0, ranges[ranges.len() - 1].1), (0, size as u64));
    });
}

#[test]
fn a_target_that_is_zero_gets_only_data() {
    on_worker(|| async {
        let mut bytes = vec![0; 8 << 20];
        bytes[3 << 20..4 << 20].fill(9);
        let target = ModelDevice::new(Model::new(8 << 20), CompletionOrder::Immediate);
        let options = EngineOptions { sampled: false, ..EngineOptions::default() };
        run(&stack(source_of(&bytes, false)), &stack(target.clone()), &options).await.unwrap();
        assert!(target.bytes() == bytes);
        assert!(target.seen().iter().all(|seen| seen.kind != OpKind::Zero));
    });
}

#[test]
fn looking_at_nothing_writes_whole_requests() {
    on_worker(|| async {
        let size = 32 << 20;
        let target = dirty(size);
        // A slow copy would try other sizes.
        let request_size = 1 << 20;
        let adaptive_size = false;
        let options =
            EngineOptions { sparse: 0, request_size, adaptive_size, ..EngineOptions::default() };
        let source = stack(source_of(&vec![0; size], false));
        run(&source, &stack(target.clone()), &options).await.unwrap();
        let writes: Vec<_> =
            target.seen().into_iter().filter(|s| s.kind == OpKind::Write).collect();
        assert_eq!(writes.len(), 32);
        assert!(writes.iter().all(|write| write.len == 1 << 20));
    });
}

#[test]
fn samples_find_zeroes_that_the_source_calls_data() {
    on_worker(|| async {
        let size = 64 << 20;
        let mut bytes = vec![7; size];
        bytes[24 << 20..].fill(0);
        let target = dirty(size);
        let source = stack(source_of(&bytes, false));
        let options = EngineOptions {
            connections: 1,
            requests: 1,
            adaptive_size: false,
            ..EngineOptions::default()
        };
        let summary = run(&source, &stack(target.clone()), &options).await.unwrap();
        assert!(target.bytes() == bytes);
        // At most 15 requests pass before a sample finds the zeroes.
        assert!(summary.zeroed >= (40 << 20) - 16 * (512 << 10), "{summary}");
        let all = EngineOptions { sparse: 0, ..options };
        let summary = run(&source, &stack(dirty(size)), &all).await.unwrap();
        assert_eq!(summary.zeroed, 0);
    });
}

#[test]
fn everything_is_looked_at_where_nobody_said_what_is_data() {
    on_worker(|| async {
        let size = 20 << 20;
        let mut bytes = vec![3; size];
        bytes[12 << 20..13 << 20].fill(0);
        let options =
            EngineOptions { extents: false, segment: 4 << 20, ..EngineOptions::default() };
        let target = dirty(size);
        let from = stack(source_of(&bytes, true));
        let to = stack(target.clone());
        let summary = run(&from, &to, &options).await.unwrap();
        assert_eq!((summary.routes.unseen, summary.zeroed), (0, 1 << 20));
        assert!(target.bytes() == bytes);
    });
}

#[test]
fn a_failed_question_for_extents_means_data() {
    on_worker(|| async {
        let bytes = content(&mut Rng::new(1), 5 << 20);
        let source = FaultDevice::over(source_of(&bytes, false), 1);
        source.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Extents));
        let target = dirty(5 << 20);
        run(&stack(source), &stack(target.clone()), &EngineOptions::default()).await.unwrap();
        assert!(target.bytes() == bytes);
    });
}

#[test]
fn targets_with_large_blocks_and_few_abilities_are_filled_exactly() {
    on_worker(|| async {
        let mut rng = Rng::new(5);
        for minimum in [1, 512, 4096, 65536] {
            let size = rng.between(1, 2 << 20) as usize;
            let bytes = content(&mut rng, size);
            let room = size.next_multiple_of(65536);
            let mut facts: Facts = Model::all_facts(room as u64);
            facts.can = Can::WRITE;
            facts.zeroed = false;
            facts.contexts.clear();
            facts.block.minimum = minimum;
            facts.block.maximum = 65536 * 2;
            let model = Model::with_facts(facts).with_content(vec![0x5a; room]);
            let target = ModelDevice::new(model, CompletionOrder::Immediate);
            let options = EngineOptions { flush: true, ..EngineOptions::default() };
            run(&stack(source_of(&bytes, true)), &stack(target.clone()), &options).await.unwrap();
            let copied = target.bytes();
            assert!(copied[..size] == bytes, "minimum {minimum}, {size} bytes");
            assert!(copied[size..].iter().all(|&byte| byte == 0x5a), "tail");
        }
    });
}

#[test]
fn pipes_are_copied_both_ways() {
    on_worker(|| async {
        let bytes = content(&mut Rng::new(11), (3 << 20) + 77);
        let options = EngineOptions::default();
        let pool = Pool::new(4 << 20);
        let progress = || Arc::new(CopyProgress::new());
        let (reader, writer) = std::io::pipe().unwrap();
        let expected = bytes.clone();
        let collect = std::thread::spawn(move || {
            let mut all = Vec::new();
            std::io::Read::read_to_end(&mut { reader }, &mut all).unwrap();
            assert!(all == expected);
        });
        let source = stack(source_of(&bytes, true));
        blockhaul_engine::copy_to_pipe(&source, writer.into(), &options, &pool, &progress())
            .await
            .unwrap();
        collect.join().unwrap();

        let (reader, writer) = std::io::pipe().unwrap();
        let sent = bytes.clone();
        let feed = std::thread::spawn(move || std::io::Write::write_all(&mut { writer }, &sent));
        let target = dirty(bytes.len() + 10);
        let end = stack(target.clone());
        let summary =
            blockhaul_engine::copy_from_pipe(reader.into(), &end, &options, &pool, &progress())
                .await
                .unwrap();
        feed.join().unwrap().unwrap();
        assert_eq!(summary.size, bytes.len() as u64);
        assert!(target.bytes()[..bytes.len()] == bytes);
        assert!(summary.zeroed > 0, "zeroes of a pipe are found: {summary}");

        let (reader, writer) = std::io::pipe().unwrap();
        let feed =
            std::thread::spawn(move || std::io::Write::write_all(&mut { writer }, &[1; 9000]));
        let small = stack(dirty(8192));
        let error =
            blockhaul_engine::copy_from_pipe(reader.into(), &small, &options, &pool, &progress())
                .await;
        assert_eq!(error.unwrap_err().kind(), Kind::NoSpace);
        feed.join().unwrap().unwrap();
        assert_eq!(pool.reserved(), 0);
    });
}

#[test]
fn without_a_look_at_bytes_holes_in_replies_are_written_where_a_tool_is_repeated() {
    on_worker(|| async {
        for zero_all in [true, false] {
            let target = FaultDevice::over(dirty(1 << 20), 1);
            let options =
                EngineOptions { extents: false, sparse: 0, zero_all, ..EngineOptions::default() };
            let source = stack(source_of(&vec![0; 1 << 20], true));
            run(&source, &stack(target.clone()), &options).await.unwrap();
            let changes = target.seen();
            let mut kinds = changes.iter().map(|seen| seen.kind).filter(|kind| kind.changes());
            let wanted = if zero_all { OpKind::Write } else { OpKind::Zero };
            assert!(kinds.all(|kind| kind == wanted), "{changes:?}");
        }
    });
}
