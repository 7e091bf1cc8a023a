//! What a reader of the view sees.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, DeviceExt as _, HOLE, Kind, Reply, Request, ZERO,
};
use blockhaul_io::{Data, Reservation};
use blockhaul_snapshot::{PointOptions, ViewTrim};

use crate::support::{BLOCK, begun, on_worker, read, write};

async fn runs(device: &Arc<dyn Device>) -> Vec<(u64, u64)> {
    let facts = device.facts();
    let base = facts.context(BASE_ALLOCATION).unwrap();
    let lists = device.extents(0, facts.size, base).await.unwrap();
    lists[0].runs().iter().map(|run| (run.len, run.state)).collect()
}

#[test]
fn holes_stay_holes_and_what_is_zeroed_stays_data() {
    on_worker(|| async {
        let memory = blockhaul_backends::memory(8 * BLOCK);
        write(&memory, 0, &[7; 2 * BLOCK as usize]).await;
        let (snapshot, live) = begun(&memory, &PointOptions::default()).await;
        let view = snapshot.view(Vec::new(), ViewTrim::Releases).unwrap();
        let hole = HOLE | ZERO;
        let expected = [(2 * BLOCK, 0), (6 * BLOCK, hole)];
        assert_eq!(runs(&view).await, expected);
        live.zero(0, BLOCK).await.unwrap();
        write(&live, 5 * BLOCK + 1, b"new").await;
        assert_eq!(runs(&view).await, expected, "of the point in time");
        assert_eq!(read(&view, 0, 3).await, [7; 3]);
        assert_eq!(read(&live, 0, 3).await, [0; 3]);
        assert_eq!(read(&view, 5 * BLOCK, 8).await, [0; 8]);
        assert_eq!(snapshot.stats().kept, BLOCK, "zeroes need no space");
    });
}

#[test]
fn a_view_is_read_only_and_frees_what_is_trimmed() {
    on_worker(|| async {
        let memory = blockhaul_backends::memory(8 * BLOCK);
        write(&memory, 0, &[7; 8 * BLOCK as usize]).await;
        let (snapshot, live) = begun(&memory, &PointOptions::default()).await;
        let view = snapshot.view(Vec::new(), ViewTrim::Releases).unwrap();
        let strict = snapshot.view(Vec::new(), ViewTrim::Refused).unwrap();
        assert!(!strict.facts().can.intersects(Can::CHANGES));
        let refused = view.write(0, Data::copy_of(b"x")).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::ReadOnly);
        write(&live, 0, &[1; 4 * BLOCK as usize]).await;
        assert_eq!(snapshot.stats().kept, 4 * BLOCK);
        // Whole blocks only.
        view.trim(1, 2 * BLOCK).await.unwrap();
        assert_eq!(snapshot.stats().kept, 3 * BLOCK);
        assert_eq!(read(&view, 0, 4).await, [7; 4]);
        let gone = view.read(BLOCK, 512).await.unwrap_err();
        assert!(gone.to_string().contains("discarded by its reader"), "{gone}");
        // What is released before it is overwritten is never saved.
        view.trim(6 * BLOCK, 2 * BLOCK).await.unwrap();
        write(&live, 6 * BLOCK, &[2; BLOCK as usize]).await;
        assert_eq!(snapshot.stats().saved, 4 * BLOCK);
    });
}

#[test]
fn a_reply_is_not_changed_by_later_writes() {
    on_worker(|| async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, vec![7; 4 * BLOCK as usize]).unwrap();
        let registry = blockhaul_catalog::Registry {
            backends: blockhaul_backends::all(),
            path: blockhaul_backends::PATH_SCHEME,
            ..blockhaul_catalog::Registry::default()
        };
        let spec = blockhaul_catalog::DeviceSpec::Path(path);
        let opened = registry.open(&spec, Vec::new(), blockhaul_catalog::Intent::WRITE).await;
        let disk = opened.unwrap().device().clone();
        let (snapshot, live) = begun(&disk, &PointOptions::default()).await;
        let view = snapshot.view(Vec::new(), ViewTrim::Releases).unwrap();
        // As a server does that sends the bytes on without looking at them.
        let room = Reservation::unpooled(BLOCK as usize).parkable();
        let Reply::Data(held) = view.submit(Request::read(0, room)).await.unwrap() else {
            panic!("data");
        };
        assert!(!held.is_parked());
        write(&live, 0, &[1; BLOCK as usize]).await;
        assert!(held.bytes().iter().all(|byte| *byte == 7), "the guest's write changed the reply");
    });
}

#[test]
fn an_ended_snapshot_costs_nothing_and_shows_nothing() {
    on_worker(|| async {
        let memory = blockhaul_backends::memory(4 * BLOCK);
        write(&memory, 0, &[7; 4 * BLOCK as usize]).await;
        let (snapshot, live) = begun(&memory, &PointOptions::default()).await;
        let view = snapshot.view(Vec::new(), ViewTrim::Releases).unwrap();
        snapshot.end();
        write(&live, 0, &[1; BLOCK as usize]).await;
        assert_eq!(snapshot.stats().saved, 0);
        assert_eq!(view.read(0, 512).await.unwrap_err().kind(), Kind::ShuttingDown);
    });
}

/// Zeroes at the end of a saved block are not written to the file of saved contents.
#[test]
fn blocks_of_any_size_are_shown_to_their_end() {
    on_worker(|| async {
        const SIZE: u64 = 2 << 20;
        for block in [4096, BLOCK, 512 << 10, 1 << 20, 16 << 20] {
            let memory = blockhaul_backends::memory(SIZE);
            write(&memory, 0, b"before").await;
            let options =
                PointOptions { block, guest_timeout: Duration::ZERO, ..PointOptions::default() };
            let (snapshot, live) = begun(&memory, &options).await;
            let view = snapshot.view(Vec::new(), ViewTrim::Refused).unwrap();
            write(&live, 0, b"after!").await;
            let seen = read(&view, 0, SIZE as usize).await;
            assert_eq!(&seen[..6], b"before", "blocks of {block} bytes");
            assert!(seen[6..].iter().all(|&byte| byte == 0), "blocks of {block} bytes");
        }
    });
}
