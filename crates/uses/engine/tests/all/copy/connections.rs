//! Servers whose connections show one disk, and servers that show each connection another disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_block::{Can, Device, DeviceExt, Facts, PendingRequest, Request};
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, HandleOpener, Intent, OpenFuture, OpenedDevice, Registry,
    Stack,
};
use blockhaul_engine::{CopyProgress, EngineOptions, SEGMENT, verify};
use blockhaul_io::Pool;
use blockhaul_testkit::fault::FaultDevice;

use super::{on_worker, run, stack};

/// A store whose handles are connections without the multi-conn promise: all on one disk, or each
/// on its own.
struct Connections {
    disks: Vec<Arc<dyn Device>>,
    /// Next disk to hand out; the first handle is disk 0.
    next: AtomicUsize,
}

struct More(&'static Connections);

impl HandleOpener for More {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let index = self.0.next.fetch_add(1, Ordering::Relaxed) % self.0.disks.len();
        let disk = self.0.disks[index].clone();
        Box::pin(async move { Ok(disk) })
    }
}

impl Backend for &'static Connections {
    fn schemes(&self) -> &'static [&'static str] {
        &["connections"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "for tests"
    }

    fn open(&self, _: BackendTarget) -> OpenFuture<OpenedDevice> {
        let device = self.disks[0].clone();
        let more = Arc::new(More(self));
        Box::pin(async move { Ok(OpenedDevice { device, more: Some(more) }) })
    }
}

/// A device that does not promise that a flush covers other connections.
struct NoPromise(Arc<dyn Device>);

impl Device for NoPromise {
    fn facts(&self) -> Arc<Facts> {
        let mut facts = Facts::clone(&self.0.facts());
        facts.can -= Can::MULTI_CONN;
        facts.zeroed = false;
        Arc::new(facts)
    }

    fn submit(&self, request: Request) -> PendingRequest {
        self.0.submit(request)
    }
}

/// Sparse disks in memory of six segments.
async fn disks(count: usize) -> Vec<Arc<dyn Device>> {
    let registry = Registry { backends: blockhaul_backends::all(), ..Registry::default() };
    let spec = DeviceSpec::Scheme { scheme: "memory".into(), rest: "768M".into() };
    let mut disks: Vec<Arc<dyn Device>> = Vec::new();
    for _ in 0..count {
        let stack = registry.open(&spec, Vec::new(), Intent::WRITE).await.unwrap();
        disks.push(Arc::new(NoPromise(stack.device().clone())));
    }
    disks
}

/// A slow source with data at the start of each segment, and a target of these disks.
async fn ends(target_disks: &[Arc<dyn Device>], delay: Duration) -> (Stack, Stack) {
    let source = disks(1).await.remove(0);
    for segment in 0..6 {
        let data = blockhaul_io::Data::copy_of(&vec![segment as u8 + 1; 4 << 20]);
        source.write(segment * SEGMENT, data).await.unwrap();
    }
    let slow = FaultDevice::over(source, 1);
    slow.delay_up_to(delay);
    let store: &'static Connections =
        Box::leak(Box::new(Connections { disks: target_disks.to_vec(), next: 1.into() }));
    let registry = Registry { backends: vec![Arc::new(store)], ..Registry::default() };
    let spec = DeviceSpec::Scheme { scheme: "connections".into(), rest: String::new() };
    let target = registry.open(&spec, Vec::new(), Intent::WRITE).await.unwrap();
    (stack(slow), target)
}

async fn same_on(source: &Stack, disk: &Arc<dyn Device>) -> bool {
    let options = EngineOptions::default();
    let pool = Pool::new(16 << 20);
    let progress = Arc::new(CopyProgress::new());
    verify(source, &stack(disk.clone()), &options, &pool, &progress).await.is_ok()
}

/// Copies from a source that gets slower each time, until the further connections were used: a
/// worker that does not get to run uses none in a short copy.
fn slower_and_slower<F: Future<Output = bool> + 'static>(
    copies: impl Fn(Duration) -> F + Send + 'static,
) {
    on_worker(move || async move {
        let mut delay = Duration::from_millis(2);
        while !copies(delay).await {
            delay *= 2;
            assert!(delay < Duration::from_secs(2), "further connections are not used");
        }
    });
}

#[test]
fn connections_that_share_a_disk_are_all_used() {
    slower_and_slower(|delay| async move {
        let disks = disks(1).await;
        let (source, target) = ends(&disks, delay).await;
        let summary = run(&source, &target, &EngineOptions::default()).await.unwrap();
        assert!(same_on(&source, &disks[0]).await);
        assert!(summary.warnings.is_empty(), "{:?}", summary.warnings);
        summary.lanes > 1
    });
}

// nbd: flags.single-conn
#[test]
fn connections_that_each_have_a_disk_are_found_out() {
    slower_and_slower(|delay| async move {
        // Only disk 0 is to be filled; the others are handed to further connections.
        let disks = disks(2).await;
        let (source, target) = ends(&disks, delay).await;
        let summary =
            run(&source, &target, &EngineOptions { connections: 2, ..EngineOptions::default() })
                .await
                .unwrap();
        assert!(same_on(&source, &disks[0]).await, "everything is on the first disk");
        assert_eq!(summary.lanes, 1);
        summary.warnings.iter().any(|text| text.contains("a different disk on each connection"))
    });
}

#[test]
fn no_more_connections_are_tried_than_the_maximum() {
    slower_and_slower(|delay| async move {
        let disks = disks(1).await;
        let (source, target) = ends(&disks, delay).await;
        let usual = EngineOptions::default();
        if run(&source, &target, &usual).await.unwrap().lanes < 2 {
            return false;
        }
        let (source, target) = ends(&disks, delay).await;
        let one = EngineOptions { connections: 1, connections_max: 1, ..usual };
        assert_eq!(run(&source, &target, &one).await.unwrap().lanes, 1);
        true
    });
}
