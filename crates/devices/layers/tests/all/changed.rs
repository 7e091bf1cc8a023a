//! Layers that change, hide, refuse or compute, besides the contract.

use std::sync::Arc;

use crate::common::{layer, on_workers, read, refused, runs, stacked, write};
use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, DeviceExt, Error, Extents, Facts, HOLE, Kind, OpKind, Reply,
    Request, RequestFlags, Result, ZERO,
};
use blockhaul_catalog::{Layer, LayerBase};
use blockhaul_io::{Data, Reservation};
use blockhaul_layers::{PartitionTable, StatsLayer, TableFormat};

/// A device of 1 MiB of memory under layers.
fn over_memory(texts: &[&str]) -> Arc<dyn Device> {
    stacked(blockhaul_backends::memory(1 << 20), texts).unwrap()
}

/// Opens a layer over a device, as a stack does.
async fn open(text: &str, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
    let below = LayerBase::alone(blockhaul_block::emulate::emulate(device));
    layer(text)?.open(below).await
}

#[test]
fn masks_hide_replace_and_tame() {
    on_workers(|| async {
        let can = |texts: &[&str]| {
            let facts = over_memory(texts).facts();
            (facts.can, facts.emulated, facts.withheld)
        };
        assert_eq!(can(&["nozero"]).2, Can::ZERO);
        assert!(can(&["nozero?zeromode=emulate"]).1.contains(Can::ZERO));
        assert!(!can(&["nozero?zeromode=emulate"]).0.contains(Can::FAST_ZERO));
        assert_eq!(can(&["nozero?zeromode=plugin&fastzeromode=none"]).2, Can::FAST_ZERO);
        assert_eq!(can(&["fua"]).2, Can::FUA);
        assert!(can(&["fua?fuamode=emulate"]).1.contains(Can::FUA));
        assert!(!can(&["nocache"]).0.contains(Can::CACHE));
        assert!(!can(&["multi-conn?mode=disable"]).0.contains(Can::MULTI_CONN));
        assert!(can(&["noextents"]).1.contains(Can::EXTENTS));
        // Hidden abilities stay hidden under further layers.
        assert_eq!(can(&["nozero", "log?file=/dev/null", "offset?offset=1k"]).2, Can::ZERO);

        let device = over_memory(&["nozero?zeromode=notrim"]);
        write(&device, 0, &[1; 65536]).await;
        device.zero(0, 65536).await.unwrap();
        assert_eq!(runs(&device, 0, 65536).await, [(65536, 0)], "zeroed, and still allocated");
        let slow = over_memory(&["nozero?zeromode=plugin&fastzeromode=slow"]);
        let error = slow.submit(Request::zero(0, 4096).with(RequestFlags::FAST)).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);

        let device = over_memory(&["noextents"]);
        assert_eq!(runs(&device, 0, 1 << 20).await, [(1 << 20, 0)]);
    });
}

#[test]
fn all_of_a_disk_is_at_depth_1() {
    on_workers(|| async {
        let device = over_memory(&["allocation-depth", "allocation-depth"]);
        let facts = device.facts();
        assert_eq!(facts.contexts, [BASE_ALLOCATION, "qemu:allocation-depth"], "added once");
        write(&device, 0, &[1; 65536]).await;
        let ask = async |contexts| match device
            .submit(Request::extents(0, 1 << 20, contexts))
            .await
            .unwrap()
        {
            Reply::Extents(lists) => lists,
            other => panic!("{other:?}"),
        };
        let depth = facts.context("qemu:allocation-depth").unwrap();
        assert_eq!(ask(depth).await, [Extents::one(1 << 20, 1)]);
        let both = ask(facts.all_contexts()).await;
        assert_eq!(both[1], Extents::one(1 << 20, 1));
        assert_eq!(both[0].runs()[0].state, 0);
        assert_eq!(both[0].runs()[1].state, HOLE | ZERO);
    });
}

#[test]
fn extents_are_in_whole_blocks_of_the_size_that_is_told() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1000);
        write(&memory, 0, &[7; 1000]).await;
        let layers = ["truncate?truncate=4096", "blocksize?minimum=512"];
        let device = stacked(memory.clone(), &layers).unwrap();
        // Data ends at 1000.
        assert_eq!(runs(&device, 0, 4096).await, [(1024, 0), (3072, HOLE | ZERO)]);
        assert_eq!(runs(&device, 512, 600).await[0], (512, 0));
        assert_eq!(runs(&device, 3584, 416).await, [(416, HOLE | ZERO)]);
        let context = device.facts().all_contexts();
        let asked = Request::extents(512, 3488, context).with(RequestFlags::ONE_EXTENT);
        match device.submit(asked).await.unwrap() {
            Reply::Extents(lists) => assert_eq!(lists, [Extents::one(512, 0)]),
            other => panic!("{other:?}"),
        }
        // Blocks that do not divide the size are not told, nor enforced: the end could not be read.
        let layers = ["truncate?truncate=4000", "blocksize?minimum=512&error-policy=error"];
        let device = stacked(memory, &layers).unwrap();
        assert_eq!(device.facts().advertised.map(|sizes| sizes.minimum), Some(32));
        assert_eq!(runs(&device, 0, 4000).await, [(1024, 0), (2976, HOLE | ZERO)]);
        assert_eq!(read(&device, 3968, 32).await, [0; 32]);
        let odd = Request::read(16, Reservation::unpooled(32));
        assert_eq!(device.submit(odd).await.unwrap_err().kind(), Kind::Invalid);
    });
}

#[test]
fn hints_can_be_reads() {
    on_workers(|| async {
        let counter = StatsLayer::new();
        let counted = counter.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
        let device = layer("nocache?cachemode=emulate").unwrap().wrap(counted).unwrap();
        device.submit(Request::cache(0, 1 << 20)).await.unwrap();
        assert_eq!(counter.counts(OpKind::Read).bytes, 1 << 20);
        assert_eq!(counter.counts(OpKind::Cache).requests, 0);
    });
}

#[test]
fn fua_can_be_forced_and_dropped() {
    on_workers(|| async {
        for (text, flushes) in [("fua?fuamode=force", 2), ("fua?fuamode=discard", 0)] {
            let counter = StatsLayer::new();
            let counted = counter.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
            // Below, each durable write is a write and a flush, which can be counted.
            let device = stacked(counted, &["fua?fuamode=emulate", text]).unwrap();
            write(&device, 0, b"x").await;
            device.submit(Request::zero(0, 1).with(RequestFlags::FUA)).await.unwrap();
            device.flush().await.unwrap();
            assert_eq!(counter.counts(OpKind::Flush).requests, flushes, "{text}");
        }
    });
}

#[test]
fn a_flush_covers_every_handle_that_has_changed_something() {
    on_workers(|| async {
        let counters = [StatsLayer::new(), StatsLayer::new()];
        let layer = layer("multi-conn?mode=emulate").unwrap();
        let memory = blockhaul_backends::memory(1 << 20);
        let [one, other] =
            counters.each_ref().map(|c| layer.wrap(c.wrap(memory.clone()).unwrap()).unwrap());
        assert!(one.facts().emulated.contains(Can::MULTI_CONN));
        let flushes = || counters.each_ref().map(|c| c.counts(OpKind::Flush).requests);
        one.flush().await.unwrap();
        assert_eq!(flushes(), [0, 0]);
        write(&other, 0, b"x").await;
        one.flush().await.unwrap();
        one.flush().await.unwrap();
        assert_eq!(flushes(), [0, 1]);
        one.zero(0, 1).await.unwrap();
        drop(other);
        one.flush().await.unwrap();
        assert_eq!(flushes(), [1, 1]);
    });
}

#[test]
fn truncate_cuts_and_extends() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1000);
        write(&memory, 990, &[7; 10]).await;
        let larger = stacked(memory.clone(), &["truncate?round-up=512"]).unwrap();
        assert_eq!(larger.facts().size, 1024);
        let mut expected = vec![7; 10];
        expected.resize(34, 0);
        assert_eq!(read(&larger, 990, 34).await, expected);
        write(&larger, 995, &[&[1; 5][..], &[0; 20]].concat()).await;
        let full = larger.write(995, Data::copy_of(&[1; 6])).await.unwrap_err();
        assert_eq!(full.kind(), Kind::NoSpace);
        larger.zero(1000, 24).await.unwrap();
        assert_eq!(runs(&larger, 0, 1024).await, [(1000, 0), (24, HOLE | ZERO)]);
        let smaller = stacked(memory.clone(), &["truncate?truncate=900&round-down=256"]).unwrap();
        assert_eq!(smaller.facts().size, 768);
        assert!(smaller.read(767, 2).await.is_err());
        assert_eq!(stacked(memory, &["truncate?truncate=0"]).unwrap().facts().size, 0);
        assert_eq!(refused("truncate?round-up=0").kind(), Kind::Usage);
        assert_eq!(refused("truncate?truncate=7e&round-up=5e").kind(), Kind::Usage);
    });
}

#[test]
fn protected_ranges_keep_what_they_hold() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1 << 20);
        write(&memory, 500, &[5; 100]).await;
        let device = stacked(memory, &["protect?protect=512-1023,64k-"]).unwrap();
        write(&device, 0, &[1; 512]).await;
        for (at, len) in [(511, 2), (1023, 1), (0, 2000), (1 << 19, 1)] {
            let error = device.write(at, Data::copy_of(&vec![9; len])).await.unwrap_err();
            assert_eq!(error.kind(), Kind::ReadOnly);
        }
        assert_eq!(read(&device, 508, 8).await, [1, 1, 1, 1, 5, 5, 5, 5], "nothing was written");
        // Writing the same bytes is allowed, and zeroes over zeroes.
        write(&device, 510, &[5; 90]).await;
        device.zero(600, 400).await.unwrap();
        assert_eq!(device.zero(599, 2).await.unwrap_err().kind(), Kind::ReadOnly);
        assert_eq!(device.trim(1000, 1).await.unwrap_err().kind(), Kind::ReadOnly);
        device.trim(1024, 4096).await.unwrap();
        assert_eq!(refused("protect").kind(), Kind::Usage);
    });
}

#[test]
fn checkwrite_compares() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1 << 20);
        write(&memory, 1000, &[3; 600_000]).await;
        let readonly = layer("readonly").unwrap().wrap(memory).unwrap();
        let device = stacked(readonly, &["checkwrite"]).unwrap();
        write(&device, 1000, &[3; 600_000]).await;
        write(&device, 999, &[0, 3]).await;
        device.zero(0, 1000).await.unwrap();
        device.trim(700_000, 1000).await.unwrap();
        device.flush().await.unwrap();
        for request in [
            Request::write(0, Data::copy_of(&[1])),
            Request::write(1000, Data::copy_of(&[&[3; 599_999][..], &[4]].concat())),
            Request::zero(0, 1001),
            Request::trim(601_000 - 1, 2),
        ] {
            assert_eq!(device.submit(request).await.unwrap_err().kind(), Kind::Io);
        }
    });
}

#[test]
fn swab_swaps_words() {
    on_workers(|| async {
        for (bits, expected) in
            [(8, b"abcdefgh"), (16, b"badcfehg"), (32, b"dcbahgfe"), (64, b"hgfedcba")]
        {
            let memory = blockhaul_backends::memory(1 << 20);
            let device = stacked(memory.clone(), &[&format!("swab?swab-bits={bits}")]).unwrap();
            write(&device, 8, b"abcdefgh").await;
            assert_eq!(read(&memory, 8, 8).await, expected);
            // Parts of words are read, changed and written back.
            write(&device, 9, b"X").await;
            assert_eq!(read(&device, 8, 8).await, b"aXcdefgh");
        }
    });
}

#[test]
fn swab_calls_no_word_a_hole_that_has_data() {
    on_workers(|| async {
        // The words above cross block boundaries below.
        let layers = ["offset?offset=511", "swab?swab-bits=64"];
        let memory = blockhaul_backends::memory(1 << 20);
        write(&memory, 4095, b"x").await;
        let device = stacked(memory, &layers).unwrap();
        let mut at = 0;
        for (len, state) in runs(&device, 0, 64 << 10).await {
            let zero = read(&device, at, len as usize).await.iter().all(|&byte| byte == 0);
            assert!(zero || state == 0, "{at}+{len} is told as {state}");
            at += len;
        }
    });
}

#[test]
fn block_sizes_are_told_kept_to_and_enforced() {
    on_workers(|| async {
        let told = over_memory(&["blocksize?minimum=4k&preferred=64k&maximum=1M"]).facts();
        let sizes = told.advertised.map(|told| (told.minimum, told.preferred, told.maximum));
        assert_eq!(sizes, Some((4096, 65536, 1 << 20)));
        assert_eq!(told.block.minimum, 1, "others are served");
        let strict = over_memory(&["blocksize?minimum=512&maximum=4k&error-policy=error"]);
        for request in [Request::zero(1, 512), Request::read(0, Reservation::unpooled(8192))] {
            assert_eq!(strict.submit(request).await.unwrap_err().kind(), Kind::Invalid);
        }
        assert_eq!(read(&strict, 512, 4096).await, [0; 4096]);

        // The device refuses requests that are not in whole blocks of 4 KiB, 8 KiB at most.
        let counter = StatsLayer::new();
        let counted = counter.wrap(blockhaul_backends::memory((1 << 20) + 100)).unwrap();
        let picky = stacked(counted, &["blocksize?minimum=4k&maximum=8k&error-policy=error"]);
        let device = stacked(picky.unwrap(), &["blocksize?minblock=4k&maxdata=8k&maxlen=64k"]);
        let device = device.unwrap();
        assert_eq!(device.facts().size, 1 << 20);
        write(&device, 5000, &[8; 20_000]).await;
        assert_eq!(read(&device, 4999, 20_002).await, [&[0], &[8; 20_000][..], &[0]].concat());
        device.zero(6000, 500_000).await.unwrap();
        assert_eq!(read(&device, 5999, 2).await, [8, 0]);
        assert!(counter.counts(OpKind::Zero).requests >= 7);

        for wrong in [
            "blocksize?minimum=3",
            "blocksize?minimum=128k",
            "blocksize?minimum=4k&preferred=512",
            "blocksize?minimum=4k&maximum=5000",
            "blocksize?minblock=4k&maxdata=1k",
        ] {
            assert_eq!(refused(wrong).kind(), Kind::Usage, "{wrong}");
        }
    });
}

#[test]
fn sequential_readers_are_hinted_ahead() {
    on_workers(|| async {
        let counter = StatsLayer::new();
        let counted = counter.wrap(blockhaul_backends::memory(8 << 20)).unwrap();
        let device = layer("readahead?window=1M").unwrap().wrap(counted).unwrap();
        for at in (0..4 << 20).step_by(65536) {
            read(&device, at, 65536).await;
        }
        let hints = counter.counts(OpKind::Cache);
        assert!(hints.bytes >= 4 << 20 && hints.requests < 20, "{hints:?}");
        read(&device, 0, 512).await;
        read(&device, 1 << 20, 512).await;
        assert_eq!(counter.counts(OpKind::Cache), hints, "not for random readers");
    });
    assert!(refused_over_masked("readahead").contains("nocache"));
}

/// Why a layer is refused over a device without hints.
fn refused_over_masked(text: &'static str) -> String {
    stacked(blockhaul_backends::memory(1 << 20), &["nocache", text]).err().unwrap().to_string()
}

/// A device that reads from a slice, for partition tables.
fn disk(bytes: &[(u64, &[u8])], size: u64) -> Arc<dyn Device> {
    let mut facts = Facts::new("disk", size);
    facts.contexts = vec![BASE_ALLOCATION.to_string()];
    facts.can = Can::EXTENTS;
    let bytes = bytes.iter().map(|(at, bytes)| (*at, bytes.to_vec())).collect();
    Arc::new(Disk(Arc::new(facts), bytes))
}

struct Disk(Arc<Facts>, Vec<(u64, Vec<u8>)>);

impl Device for Disk {
    fn facts(&self) -> Arc<Facts> {
        self.0.clone()
    }

    fn submit(&self, request: Request) -> blockhaul_block::PendingRequest {
        let reply = match request.op {
            blockhaul_block::Op::Read(room) => {
                let mut buf = room.into_buf();
                buf.fill(0);
                for (index, byte) in buf.iter_mut().enumerate() {
                    let at = request.at + index as u64;
                    let found = self.1.iter().find_map(|(start, bytes)| {
                        bytes.get(usize::try_from(at.checked_sub(*start)?).ok()?)
                    });
                    *byte = found.copied().unwrap_or(0);
                }
                Reply::Data(buf.into())
            }
            _ => Reply::Extents(vec![Extents::one(request.len, 0)]),
        };
        blockhaul_block::PendingRequest::ready(Ok(reply))
    }
}

/// An entry of an MBR.
fn entry(kind: u8, start: u32, sectors: u32) -> Vec<u8> {
    let mut entry = vec![0, 0, 0, 0, kind, 0, 0, 0];
    entry.extend(start.to_le_bytes());
    entry.extend(sectors.to_le_bytes());
    entry
}

#[test]
fn partitions_of_an_mbr_are_found() {
    on_workers(|| async {
        let magic: &[u8] = &[0x55, 0xaa];
        let primary = [entry(0x83, 63, 100), entry(0x05, 1000, 500)].concat();
        let logical = |sectors, next| [entry(0x83, 8, sectors), entry(5, next, 1)].concat();
        let five = logical(10, 200);
        let six = logical(20, 0);
        let mark = &[0xfe; 4][..];
        let sector = |number: u64| number * 512;
        let table = |at: u64| sector(at) + 446;
        let bytes: Vec<(u64, &[u8])> = vec![
            (table(0), &primary),
            (510, magic),
            (table(1000), &five),
            (sector(1000) + 510, magic),
            (table(1200), &six),
            (sector(1200) + 510, magic),
            (sector(63), mark),
            (sector(1208), mark),
        ];
        let device = disk(&bytes, sector(2000));
        for (number, size) in [(1, 100), (5, 10), (6, 20)] {
            let part = open(&format!("partition?partition={number}"), device.clone()).await;
            assert_eq!(part.unwrap().facts().size, sector(size));
        }
        let part = open("partition?partition=6", device.clone()).await.unwrap();
        assert_eq!(read(&part, 0, 6).await, [0xfe, 0xfe, 0xfe, 0xfe, 0, 0]);
        let error = open("partition?partition=2", device.clone()).await.err().unwrap();
        assert!(error.to_string().contains("extended"), "{error}");
        // A chain that leads back to its start ends.
        for number in [3, 7, 8, 300, u64::MAX] {
            let error = open(&format!("partition?partition={number}"), device.clone()).await;
            let error = error.err().unwrap();
            assert_eq!(error.kind(), Kind::NotFound, "{number}");
            assert!(error.to_string().ends_with("the disk has 1, 5 and 6"), "{error}");
        }
        // Beyond the end of the disk.
        let small = disk(&bytes, sector(100));
        let error = open("partition?partition=1", small).await.err().unwrap();
        assert!(error.to_string().contains("exceeds the disk"), "{error}");
        for size in [0, 1, 511, 512, 513, 1024] {
            assert!(open("partition?partition=1", disk(&[], size)).await.is_err());
        }
        assert_eq!(refused("partition").kind(), Kind::Usage);
        assert_eq!(refused("partition?partition=0").kind(), Kind::Usage);
    });
}

#[test]
fn what_stands_for_a_gpt_is_no_partition() {
    on_workers(|| async {
        // A disk with a GPT for sectors of 4096 bytes.
        let mbr = [entry(0xee, 1, 1000)].concat();
        let bytes: Vec<(u64, &[u8])> = vec![(446, &mbr), (510, &[0x55, 0xaa]), (4096, b"EFI PART")];
        let device = disk(&bytes, 4096 * 1000);
        let own = "partition?partition=1&partition-sectorsize=512";
        let error = open(own, device).await.err().unwrap();
        assert!(error.to_string().contains("choose partition-sectorsize=4k"), "{error}");
        let alone = disk(&bytes[..2], 4096 * 1000);
        let error = open("partition?partition=1", alone).await.err().unwrap();
        assert!(error.to_string().contains("repair the GPT"), "{error}");
    });
}

#[test]
fn a_gpt_is_found_for_both_sizes_of_sectors() {
    on_workers(|| async {
        for sector in [512_u64, 4096] {
            let mut header = b"EFI PART".to_vec();
            header.resize(72, 0);
            header.extend(2_u64.to_le_bytes());
            header.extend([128_u32, 128].map(u32::to_le_bytes).concat());
            let mut entry = vec![1; 32];
            entry.extend([40_u64, 49].map(u64::to_le_bytes).concat());
            entry.resize(56, 0);
            entry.extend("root".encode_utf16().flat_map(u16::to_le_bytes));
            let device = disk(&[(sector, &header), (2 * sector + 128, &entry)], 1 << 20);
            let part = open("partition?partition=2", device.clone()).await.unwrap();
            assert_eq!(part.facts().size, 10 * sector);
            let table = PartitionTable::read(&device, None).await.unwrap().unwrap();
            assert_eq!(PartitionTable::find(&device).await.unwrap().as_ref(), Some(&table));
            assert_eq!((table.format, table.sector), (TableFormat::Gpt, sector));
            let found = &table.partitions[0];
            assert_eq!((found.number, found.start, found.sectors), (2, 40, 10));
            assert_eq!(found.name, "root");
        }
        // The boot sector of a file system has code where the entries of an MBR are.
        let code = disk(&[(446, &[0x33; 64]), (510, &[0x55, 0xaa])], 1 << 20);
        assert_eq!(PartitionTable::find(&code).await.unwrap(), None);
        assert!(PartitionTable::read(&code, None).await.unwrap().is_some());
    });
}

#[test]
fn hostile_gpts_are_refused() {
    on_workers(|| async {
        let gpt = |table: u64, entries: u32, size: u32, first: u64, last: u64| {
            let mut header = b"EFI PART".to_vec();
            header.resize(72, 0);
            header.extend(table.to_le_bytes());
            header.extend(entries.to_le_bytes());
            header.extend(size.to_le_bytes());
            let mut entry = vec![1; 32];
            entry.extend(first.to_le_bytes());
            entry.extend(last.to_le_bytes());
            disk(&[(512, &header), (1024, &entry)], 1 << 20)
        };
        let part = |device| open("partition?partition=1", device);
        assert_eq!(part(gpt(2, 128, 128, 40, 49)).await.unwrap().facts().size, 5120);
        for device in [
            gpt(2, 128, 128, 40, 39),
            gpt(2, 128, 128, 40, u64::MAX),
            gpt(2, 128, 128, u64::MAX, u64::MAX),
            gpt(2, 128, 128, 0, u64::MAX),
            gpt(2, 128, 128, 2047, 2048),
            gpt(u64::MAX, 128, 128, 40, 49),
            gpt(2, u32::MAX, 128, 40, 49),
            gpt(2, 0, 128, 40, 49),
            gpt(2, 128, 0, 40, 49),
            gpt(2, 128, 100, 40, 49),
            gpt(2, 128, u32::MAX, 40, 49),
            gpt(5000, 128, 128, 40, 49),
        ] {
            assert_eq!(part(device).await.err().unwrap().kind(), Kind::NotFound);
        }
    });
}

/// Zeroes fast, but only at its start.
struct FastAtFront(Arc<dyn Device>);

impl Device for FastAtFront {
    fn facts(&self) -> Arc<Facts> {
        let mut facts = Facts::clone(&self.0.facts());
        facts.can |= Can::FAST_ZERO;
        Arc::new(facts)
    }

    fn submit(&self, request: Request) -> blockhaul_block::PendingRequest {
        if request.flags.contains(RequestFlags::FAST) && request.at >= 4096 {
            return Error::new(Kind::Unsupported, "not fast here").into();
        }
        self.0.submit(Request { flags: request.flags - RequestFlags::FAST, ..request })
    }
}

#[test]
fn a_fast_zeroing_in_pieces_is_refused_as_a_whole_or_not_at_all() {
    on_workers(|| async {
        let memory = blockhaul_block::emulate::emulate(blockhaul_backends::memory(64 << 10));
        let device = Arc::new(FastAtFront(memory));
        let device = stacked(device, &["blocksize?maxlen=4k"]).unwrap();
        for (at, is_refused) in [(0, false), (4096, true)] {
            write(&device, 0, &[1; 32 << 10]).await;
            let zeroed = device.submit(Request::zero(at, 16 << 10).with(RequestFlags::FAST)).await;
            assert_eq!(zeroed.is_err(), is_refused);
            let expected = if is_refused { 1 } else { 0 };
            assert_eq!(read(&device, at, 16 << 10).await, [expected; 16 << 10]);
        }
    });
}

/// Refuses requests of more than 4 KiB.
struct ShortRequests(Arc<dyn Device>);

impl Device for ShortRequests {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts()
    }

    fn submit(&self, request: Request) -> blockhaul_block::PendingRequest {
        if request.len > 4096 {
            return Error::new(Kind::Invalid, "more than 4 KiB").into();
        }
        self.0.submit(request)
    }
}

#[test]
fn the_longest_request_is_the_longest_of_data_as_well() {
    on_workers(|| async {
        let memory = blockhaul_block::emulate::emulate(blockhaul_backends::memory(1 << 20));
        let device = stacked(Arc::new(ShortRequests(memory)), &["blocksize?maxlen=4k"]).unwrap();
        write(&device, 5000, &[1; 32 << 10]).await;
        assert_eq!(read(&device, 5000, 32 << 10).await, [1; 32 << 10]);
        device.submit(Request::cache(0, 64 << 10)).await.unwrap();
        device.submit(Request::zero(512 << 10, 64 << 10)).await.unwrap();
        // Extents of many requests are one reply.
        let contexts = device.facts().context(BASE_ALLOCATION).unwrap();
        let asked = Request::extents(0, 1 << 20, contexts);
        let Reply::Extents(lists) = device.submit(asked).await.unwrap() else { panic!() };
        assert_eq!(lists[0].total(), 256 << 10);
        let asked = Request::extents(0, 1 << 20, contexts).with(RequestFlags::ONE_EXTENT);
        let Reply::Extents(lists) = device.submit(asked).await.unwrap() else { panic!() };
        assert_eq!(lists[0].runs().len(), 1);
    });
}
