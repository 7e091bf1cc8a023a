//! Retry and reconnect: connections lost at any moment, servers that lose unflushed data, and which
//! errors are retried.

mod pipes;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockhaul_block::{Kind, OpKind, Result};
use blockhaul_catalog::Stack;
use blockhaul_engine::{CopyError, CopyProgress, CopySummary, EngineOptions, Side, copy};
use blockhaul_io::{IoEngine, Pool, Runtime, RuntimeConfig};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{Rng, seed};

use crate::server::Server;

fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    Runtime::start(&RuntimeConfig { workers: 2, engine: IoEngine::Auto }).unwrap().block_on(check);
}

fn content(rng: &mut Rng, size: usize) -> Vec<u8> {
    rng.disk(size, 200_000, 60)
}

fn disk(bytes: &[u8], seed: u64) -> Arc<ModelDevice> {
    let model = Model::new(bytes.len() as u64).with_content(bytes.to_vec());
    ModelDevice::new(model, CompletionOrder::Shuffled(seed))
}

async fn run(
    source: &Stack,
    target: &Stack,
    options: &EngineOptions,
) -> Result<CopySummary, CopyError> {
    let pool = Pool::new(8 << 20);
    let result = copy(source, target, options, &pool, &Arc::new(CopyProgress::new())).await;
    assert_eq!(pool.reserved(), 0, "all buffers are back");
    result
}

fn patient() -> EngineOptions {
    EngineOptions {
        retries: 8,
        retry_delay: Duration::from_millis(1),
        segment: 256 << 10,
        request_size: 16 << 10,
        connections: 3,
        ..EngineOptions::default()
    }
}

/// The same with a fixed number of requests, of which one is the last of its connection.
fn steady() -> EngineOptions {
    EngineOptions { adaptive_size: false, ..patient() }
}

#[test]
fn a_copy_survives_connections_that_die_at_any_moment() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let mut checked = 0;
        let mut rewritten = 0;
        for round in 0..120 {
            let size = rng.between(1, 3 << 20) as usize;
            let bytes = content(&mut rng, size);
            let mut from = Server::new(disk(&bytes, rng.number()), rng.number());
            let target_disk = disk(&vec![0xa5; size], rng.number());
            let mut to = Server::new(target_disk.clone(), rng.number());
            for server in [&mut from, &mut to] {
                server.promise = rng.chance(50);
                *server.fuse.get_mut() = rng.between(1, 60);
                *server.cuts_left.get_mut() = rng.between(0, 4);
                *server.refused_dials.get_mut() = rng.between(0, 2);
            }
            to.forgets = rng.chance(50);
            let forgets = to.forgets;
            let promise = to.promise;
            let options = EngineOptions {
                connections: rng.between(1, 4) as usize,
                flush: rng.chance(50),
                sparse: *rng.pick(&[0, 4096]),
                sampled: rng.chance(50),
                ..patient()
            };
            let (source, _) = from.open().await;
            let (target, _) = to.open().await;
            let told = format!(
                "seed {seed}, round {round}: {size} bytes, forgets {forgets}, promise {promise}, \
                 {options:?}"
            );
            let summary = run(&source, &target, &options).await;
            let summary = summary.unwrap_or_else(|error| panic!("{error}; {told}"));
            // Also requests that are carried out late.
            blockhaul_io::sleep(Duration::from_millis(5)).await;
            assert!(target_disk.bytes() == bytes, "{told}");
            let done = summary.data + summary.zeroed + summary.skipped;
            assert_eq!(done, size as u64, "each byte counts once; {told}");
            checked += summary.retried.checked;
            rewritten += summary.retried.rewritten;
        }
        assert!(checked > 0 && rewritten > 0, "{checked} {rewritten}");
    });
}

#[test]
fn the_first_connection_may_die_and_what_it_wrote_is_read_back() {
    on_worker(|| async {
        let bytes = content(&mut Rng::new(5), 2 << 20);
        let (source, _) = Server::new(disk(&bytes, 1), 1).open().await;
        let mut server = Server::new(disk(&vec![1; 2 << 20], 2), 2);
        server.forgets = true;
        (*server.fuse.get_mut(), *server.cuts_left.get_mut()) = (70, 1);
        let target_disk = server.disk.clone();
        let (target, server) = server.open().await;
        let options = EngineOptions { connections: 1, sparse: 0, ..steady() };
        let summary = run(&source, &target, &options).await.unwrap();
        assert!(target_disk.bytes() == bytes);
        assert_eq!((summary.retried.target_connections, summary.lanes), (1, 1));
        assert!(summary.retried.checked > 0 && summary.retried.rewritten > 0, "{summary}");
        let text = summary.to_string();
        assert!(
            text.contains(" and 1 connection of the target") && !text.contains("of the source"),
            "{text}"
        );
        assert_eq!(server.dials.load(Ordering::SeqCst), 1);
        // The verification begins on the lost connection, and makes its own.
        let pool = Pool::new(8 << 20);
        let progress = Arc::new(CopyProgress::new());
        blockhaul_engine::verify(&source, &target, &options, &pool, &progress).await.unwrap();
    });
}

#[test]
fn a_server_that_stays_away_ends_the_copy_with_what_was_tried() {
    on_worker(|| async {
        let bytes = vec![7; 1 << 20];
        let mut server = Server::new(disk(&bytes, 1), 1);
        (*server.fuse.get_mut(), *server.cuts_left.get_mut()) = (10, 1);
        *server.refused_dials.get_mut() = u64::MAX;
        let (source, server) = server.open().await;
        let target = Stack::over(disk(&vec![0; 1 << 20], 3));
        let options = EngineOptions { connections: 1, retries: 3, extents: false, ..steady() };
        let error = run(&source, &target, &options).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Disconnected);
        assert!(error.to_string().contains("4 attempts to reconnect failed"), "{error}");
        assert_eq!(error.error.request().unwrap().0, OpKind::Read);
        assert_eq!(error.side, Some(Side::Source));
        assert_eq!(server.dials.load(Ordering::SeqCst), 4);
    });
}

#[test]
fn another_disk_behind_the_same_name_is_refused() {
    on_worker(|| async {
        let mut server = Server::new(disk(&vec![7; 1 << 20], 1), 1);
        (*server.fuse.get_mut(), *server.cuts_left.get_mut()) = (10, 1);
        *server.size_later.get_mut().unwrap() = Some(4096);
        let (source, _) = server.open().await;
        let target = Stack::over(disk(&vec![0; 1 << 20], 3));
        let options = EngineOptions { connections: 1, extents: false, ..steady() };
        let error = run(&source, &target, &options).await.unwrap_err();
        assert!(error.to_string().contains("1048576 bytes on one connection and 4096"), "{error}");
    });
}

#[test]
fn a_source_that_holds_something_else_after_connecting_again_is_refused() {
    on_worker(|| async {
        for sparse in [4096, 0] {
            let mut server = Server::new(disk(&vec![7; 1 << 20], 1), 1);
            (*server.fuse.get_mut(), *server.cuts_left.get_mut()) = (30, 1);
            *server.disk_later.get_mut().unwrap() = Some(disk(&vec![8; 1 << 20], 1));
            let (source, _) = server.open().await;
            let target = Stack::over(disk(&vec![0; 1 << 20], 3));
            let options = EngineOptions { connections: 1, extents: false, sparse, ..steady() };
            let error = run(&source, &target, &options).await.unwrap_err();
            assert!(
                error.to_string().contains("the content of the source has changed"),
                "sparse {sparse}: {error}"
            );
        }
    });
}

/// Copies with this rule on one side; returns the result and how often the request at the rule's
/// place was sent.
fn with_rule(
    on_source: bool,
    rule: FaultRule,
    check: impl FnOnce(Result<CopySummary, CopyError>, usize) + Send + 'static,
) {
    on_worker(move || async move {
        let bytes = vec![7; 1 << 20];
        let source = FaultDevice::over(disk(&bytes, 1), 1);
        let target_disk = disk(&vec![0; 1 << 20], 2);
        let target = FaultDevice::over(target_disk.clone(), 2);
        let bad = if on_source { &source } else { &target };
        bad.add(rule);
        let options = EngineOptions { retries: 3, sparse: 0, flush: true, ..patient() };
        let ends = [&source, &target].map(|device| Stack::over(device.clone()));
        let result = run(&ends[0], &ends[1], &options).await;
        if result.is_ok() {
            assert!(target_disk.bytes() == bytes);
        }
        let kind = if on_source { OpKind::Read } else { OpKind::Write };
        let at_place =
            bad.seen().iter().filter(|seen| seen.kind == kind && seen.at == 512 << 10).count();
        check(result, at_place);
    });
}

#[test]
fn errors_that_may_pass_are_tried_again_and_others_are_not() {
    let place = (512 << 10)..(513 << 10);
    for (on_source, op) in [(true, OpKind::Read), (false, OpKind::Write)] {
        for then in [FaultEffect::Fail, FaultEffect::FailAfter, FaultEffect::FailHalfway] {
            for kind in [Kind::Io, Kind::NoMemory, Kind::Disconnected, Kind::TimedOut] {
                let rule = FaultRule::new(then(kind)).kind(op).range(place.clone()).times(2);
                with_rule(on_source, rule, move |result, sent| {
                    let retried = result.unwrap().retried;
                    let source = retried.source_requests;
                    let target = retried.target_requests;
                    assert_eq!((source, target), if on_source { (2, 0) } else { (0, 2) });
                    assert_eq!(sent, 3, "{kind:?}");
                });
            }
        }
        let rule = FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(op).range(place.clone());
        with_rule(on_source, rule, |result, sent| {
            assert_eq!(result.unwrap_err().kind(), Kind::Io);
            assert_eq!(sent, 4, "once and three times again");
        });
        for kind in [Kind::NoSpace, Kind::ReadOnly, Kind::Invalid, Kind::Refused] {
            let rule = FaultRule::new(FaultEffect::Fail(kind)).kind(op).range(place.clone());
            with_rule(on_source, rule, move |result, sent| {
                assert_eq!((result.unwrap_err().kind(), sent), (kind, 1));
            });
        }
    }
}

#[test]
fn what_a_failed_flush_may_have_lost_is_written_again() {
    let flush =
        |times| FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Flush).times(times);
    with_rule(false, flush(2), |result, _| {
        let summary = result.unwrap();
        assert!(summary.retried.rewritten > 0, "{summary}");
    });
    with_rule(false, flush(100), |result, _| {
        let error = result.unwrap_err();
        assert_eq!((error.kind(), error.error.request().unwrap().0), (Kind::Io, OpKind::Flush));
        assert_eq!(error.side, Some(Side::Target));
    });
}

#[test]
fn without_retries_the_first_failure_counts() {
    on_worker(|| async {
        let source = FaultDevice::over(disk(&vec![7; 1 << 20], 1), 1);
        source.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Read).nth(5));
        let ends = (Stack::over(source), Stack::over(disk(&vec![0; 1 << 20], 2)));
        let options = EngineOptions { retries: 0, ..patient() };
        assert_eq!(run(&ends.0, &ends.1, &options).await.unwrap_err().kind(), Kind::Io);
    });
}

#[test]
fn a_pause_ends_when_the_copy_is_cancelled() {
    on_worker(|| async {
        let source = FaultDevice::over(disk(&vec![7; 1 << 20], 1), 1);
        source.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Read));
        let ends = (Stack::over(source), Stack::over(disk(&vec![0; 1 << 20], 2)));
        let options = EngineOptions { retry_delay: Duration::from_secs(1000), ..patient() };
        let pool = Pool::new(8 << 20);
        let progress = Arc::new(CopyProgress::new());
        let watcher = progress.clone();
        drop(blockhaul_io::spawn(async move {
            blockhaul_io::sleep(Duration::from_millis(20)).await;
            watcher.cancel();
        }));
        let copied = copy(&ends.0, &ends.1, &options, &pool, &progress);
        let ended = blockhaul_io::timeout(Duration::from_secs(100), copied).await;
        ended.expect("soon").unwrap_err();
    });
}
