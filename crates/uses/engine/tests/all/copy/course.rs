//! The course of a copy: errors, cancels, a small pool, a rate limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_block::{Device, Facts, Kind, OpKind, PendingRequest, Request};
use blockhaul_engine::{CopyProgress, EngineOptions, copy};
use blockhaul_io::Pool;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::rng::Rng;

use super::{content, dirty, on_worker, run, source_of, stack};

#[test]
fn an_error_names_its_place_and_nothing_is_left_in_flight() {
    for (on_source, kind) in [(true, OpKind::Read), (false, OpKind::Write), (false, OpKind::Zero)] {
        on_worker(move || async move {
            let bytes = content(&mut Rng::new(7), 20 << 20);
            let source = FaultDevice::over(source_of(&bytes, false), 1);
            let target = FaultDevice::over(dirty(20 << 20), 2);
            let bad = if on_source { &source } else { &target };
            bad.add(
                FaultRule::new(FaultEffect::Fail(Kind::NoSpace))
                    .kind(kind)
                    .range(9 << 20..12 << 20),
            );
            target.delay_up_to(std::time::Duration::from_millis(2));
            let result =
                run(&stack(source.clone()), &stack(target.clone()), &EngineOptions::default())
                    .await;
            let error = result.unwrap_err();
            assert_eq!(error.kind(), Kind::NoSpace);
            let (failed, at, len) = error.error.request().unwrap();
            assert_eq!(failed, kind);
            assert!(at < 12 << 20 && at + len > 9 << 20, "{error}");
            assert_eq!((source.in_flight(), target.in_flight()), (0, 0), "drained");
        });
    }
}

/// Cancels the copy at one of its requests.
struct Cancels {
    inner: Arc<dyn Device>,
    left: AtomicU64,
    progress: Arc<CopyProgress>,
}

impl Device for Cancels {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.progress.cancel();
        }
        self.inner.submit(request)
    }
}

#[test]
fn a_cancelled_copy_stops_after_what_is_in_flight() {
    on_worker(|| async {
        let size = 64 << 20;
        let target = FaultDevice::over(dirty(size), 2);
        target.delay_up_to(std::time::Duration::from_millis(5));
        let source = stack(source_of(&vec![7; size], false));
        let progress = Arc::new(CopyProgress::new());
        let pool = Pool::new(8 << 20);
        let inner = target.clone();
        let left = 20.into();
        let end = stack(Arc::new(Cancels { inner, left, progress: progress.clone() }));
        let error =
            copy(&source, &end, &EngineOptions::default(), &pool, &progress).await.unwrap_err();
        assert_eq!(error.kind(), Kind::ShuttingDown);
        assert!(progress.snapshot().done() < size as u64);
        assert_eq!((target.in_flight(), pool.reserved()), (0, 0));
    });
}

#[test]
fn a_pool_of_one_request_is_enough() {
    on_worker(|| async {
        let bytes = content(&mut Rng::new(3), 9 << 20);
        let target = dirty(9 << 20);
        let pool = Pool::new(512 << 10);
        let source = stack(source_of(&bytes, false));
        let end = stack(target.clone());
        let progress = Arc::new(CopyProgress::new());
        let options = EngineOptions::default();
        let work = copy(&source, &end, &options, &pool, &progress);
        let done = blockhaul_io::timeout(std::time::Duration::from_secs(120), work).await;
        done.expect("no deadlock").unwrap();
        assert!(target.bytes() == bytes);
    });
}

#[test]
fn all_lanes_together_keep_to_the_rate_and_to_its_change() {
    on_worker(|| async {
        let size = 4 << 20;
        let target = dirty(size);
        let rate = Arc::new(blockhaul_engine::RateLimit::new(8 << 20, 0));
        let options = EngineOptions {
            segment: 1 << 20,
            request_size: 64 << 10,
            rate: Some(rate.clone()),
            ..EngineOptions::default()
        };
        let source = stack(source_of(&vec![7; size], false));
        let end = stack(target.clone());
        let summary = run(&source, &end, &options).await.unwrap();
        let seconds = summary.elapsed.as_secs_f64();
        // Half a second's worth, less the burst.
        assert!(seconds > 0.35, "{seconds}");
        // Very slow at first: that would take weeks.
        rate.set(1, 0);
        drop(blockhaul_io::spawn(async move {
            blockhaul_io::sleep(std::time::Duration::from_millis(150)).await;
            rate.set(0, 0);
        }));
        let summary = run(&source, &end, &options).await.unwrap();
        let seconds = summary.elapsed.as_secs_f64();
        assert!(seconds > 0.1, "{seconds}");
    });
}
