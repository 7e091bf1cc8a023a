//! What happens when old contents cannot be saved.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhaul_block::{Device, DeviceExt as _, Facts, Kind, Op, PendingRequest, Request};
use blockhaul_io::Data;
use blockhaul_snapshot::{BLOCK_MAX, OnFailure, PointOptions, Snapshot, ViewTrim};

use crate::support::{BLOCK, begun, on_worker, read, write};

/// A disk whose reads wait until the flag is set.
struct SlowToRead(Arc<dyn Device>, Arc<AtomicBool>);

impl Device for SlowToRead {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if !matches!(request.op, Op::Read(_)) {
            return self.0.submit(request);
        }
        let (inner, may_read) = (self.0.clone(), self.1.clone());
        PendingRequest::start(async move {
            while !may_read.load(Ordering::Relaxed) {
                blockhaul_io::sleep(Duration::from_millis(5)).await;
            }
            inner.submit(request).await
        })
    }
}

async fn full_disk() -> Arc<dyn Device> {
    let memory = blockhaul_backends::memory(8 * BLOCK);
    write(&memory, 0, &[7; 8 * BLOCK as usize]).await;
    memory
}

#[test]
fn a_full_store_breaks_the_snapshot_and_not_the_guest() {
    on_worker(|| async {
        let memory = full_disk().await;
        let options = PointOptions { max: 2 * BLOCK, ..PointOptions::default() };
        let (snapshot, live) = begun(&memory, &options).await;
        let view = snapshot.view(Vec::new(), ViewTrim::Releases).unwrap();
        write(&live, 0, &[1; 2 * BLOCK as usize]).await;
        assert_eq!(read(&view, 0, 4).await, [7; 4]);
        write(&live, 4 * BLOCK, b"too much").await;
        assert_eq!(read(&live, 4 * BLOCK, 8).await, b"too much");
        let lost = view.read(0, 512).await.unwrap_err();
        assert!(lost.to_string().contains("the snapshot is lost"), "{lost}");
        assert!(snapshot.stats().broken.unwrap().contains("131072 bytes"));
    });
}

#[test]
fn a_full_store_fails_the_write_if_the_snapshot_matters_more() {
    on_worker(|| async {
        let memory = full_disk().await;
        let on_failure = OnFailure::FailWrite;
        let options = PointOptions { max: 2 * BLOCK, on_failure, ..PointOptions::default() };
        let (snapshot, live) = begun(&memory, &options).await;
        let view = snapshot.view(Vec::new(), ViewTrim::Releases).unwrap();
        write(&live, 0, &[1; 2 * BLOCK as usize]).await;
        let refused = live.write(4 * BLOCK, Data::copy_of(b"too much")).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::NoSpace);
        assert!(refused.is_before_flush(), "a refused write with FUA is no failed flush");
        assert_eq!(read(&live, 4 * BLOCK, 1).await, [7], "nothing was written");
        assert_eq!(read(&view, 0, 8 * BLOCK as usize).await, [7; 8 * BLOCK as usize]);
        // Space that the reader frees is used again.
        view.trim(0, BLOCK).await.unwrap();
        write(&live, 4 * BLOCK, b"fits").await;
        assert_eq!(read(&view, 4 * BLOCK, 4).await, [7; 4]);
    });
}

#[test]
fn a_guest_does_not_wait_longer_than_allowed() {
    on_worker(|| async {
        let may_read = Arc::<AtomicBool>::default();
        let disk: Arc<dyn Device> = Arc::new(SlowToRead(full_disk().await, may_read.clone()));
        let options =
            PointOptions { guest_timeout: Duration::from_millis(20), ..PointOptions::default() };
        let (snapshot, live) = begun(&disk, &options).await;
        let view = snapshot.view(Vec::new(), ViewTrim::Releases).unwrap();
        write(&live, 0, b"in time").await;
        assert!(snapshot.stats().broken.unwrap().contains("0.02 s"));
        assert!(view.read(0, 512).await.is_err());
        may_read.store(true, Ordering::Relaxed);
    });
}

#[test]
fn options_out_of_range_are_refused() {
    for block in [0, 512, 5000, 2 * BLOCK_MAX] {
        let options = PointOptions { block, ..PointOptions::default() };
        let refused = Snapshot::new(1 << 20, &options).map(drop).unwrap_err();
        assert_eq!(refused.kind(), Kind::Usage, "{block}");
    }
    let directory = Some("/no/such/folder".into());
    let refused = Snapshot::new(1 << 20, &PointOptions { directory, ..PointOptions::default() });
    assert!(refused.map(drop).unwrap_err().to_string().contains("/no/such/folder"));
}
