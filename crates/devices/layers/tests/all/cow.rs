//! `cow` never changes the device below, and reports holes.

use crate::common::{
    disk_of_clients, layer, on_workers, opened, read, refused, runs, stacked, write,
};
use blockhaul_block::{Can, DeviceExt, HOLE, ZERO};

const BLOCK: u64 = 64 << 10;

#[test]
fn changes_stay_in_the_overlay() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(10 * BLOCK + 100);
        write(&memory, 0, &[1; 3 * BLOCK as usize]).await;
        let readonly = layer("readonly").unwrap().wrap(memory.clone()).unwrap();
        let device = stacked(readonly, &["cow"]).unwrap();
        assert!(device.facts().can.contains(Can::WRITE | Can::TRIM | Can::MULTI_CONN));
        let hole = HOLE | ZERO;
        let rest = 7 * BLOCK + 100;
        assert_eq!(runs(&device, 0, 10 * BLOCK + 100).await, [(3 * BLOCK, 0), (rest, hole)]);
        // Parts of two blocks, one of them a hole below.
        write(&device, 3 * BLOCK - 2, b"over").await;
        assert_eq!(read(&device, 3 * BLOCK - 4, 8).await, b"\x01\x01over\0\0");
        assert_eq!(read(&memory, 3 * BLOCK - 4, 6).await, [1, 1, 1, 1, 0, 0]);
        // Whole blocks become holes, parts are written; the last block is whole up to the end.
        device.trim(BLOCK - 1, BLOCK + 2).await.unwrap();
        device.zero(10 * BLOCK, 100).await.unwrap();
        assert_eq!(read(&device, BLOCK - 2, 3).await, [1, 0, 0]);
        assert_eq!(read(&device, 2 * BLOCK, 2).await, [0, 1]);
        let found = runs(&device, 0, 10 * BLOCK + 100).await;
        assert_eq!(found, [(BLOCK, 0), (BLOCK, hole), (2 * BLOCK, 0), (rest - BLOCK, hole)]);
        // A former hole can be written again, and the rest of the block stays zero.
        write(&device, BLOCK + 5, b"x").await;
        assert_eq!(read(&device, BLOCK + 4, 3).await, b"\0x\0");
        device.zero(10, 10).await.unwrap();
        assert_eq!(read(&device, 9, 12).await, [&[1], &[0; 10][..], &[1]].concat());
        assert_eq!(read(&memory, BLOCK, BLOCK as usize).await, [1; BLOCK as usize]);
        device.flush().await.unwrap();
    });
}

#[test]
fn handles_share_the_overlay_and_layers_do_not() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1 << 20);
        let cow = layer("cow?cow-block-size=4k").unwrap();
        let [one, two] = [0, 1].map(|_| cow.wrap(memory.clone()).unwrap());
        let other = stacked(memory.clone(), &["cow"]).unwrap();
        write(&one, 5, b"shared").await;
        assert_eq!(read(&two, 5, 6).await, b"shared");
        assert_eq!(read(&other, 5, 6).await, [0; 6]);
        assert_eq!(read(&memory, 5, 6).await, [0; 6]);
    });
    for wrong in ["cow?cow-block-size=5k", "cow?cow-block-size=512", "cow?dir=/nonexistent"] {
        assert!(refused(wrong).to_string().starts_with("cow: "), "{wrong}");
    }
}

#[test]
fn changes_outlive_the_connections_to_an_export() {
    on_workers(|| async {
        for multi_conn in [true, false] {
            let disk = disk_of_clients(1 << 20, multi_conn);
            let cow = layer("cow").unwrap();
            let device = opened(&cow, &disk, "a").await;
            write(&device, 5, b"kept").await;
            device.flush().await.unwrap();
            drop(device);
            assert_eq!(read(&opened(&cow, &disk, "a").await, 5, 4).await, b"kept");
            assert_eq!(read(&opened(&cow, &disk, "b").await, 5, 4).await, [0; 4]);
            assert_eq!(read(&disk, 5, 4).await, [0; 4]);
        }
    });
}
