//! Allocated blocks: asked for once, checked, and right after writes.

use std::time::{Duration, Instant};

use blockhaul_block::{ContextSet, Device, DeviceExt as _, Request};
use blockhaul_catalog::Intent;
use blockhaul_io::{Data, Reservation};

use crate::support::{Lab, open, run};

const QUERY: &str = "QueryAllocatedBlocks";

/// Bytes of data among all.
async fn data_of(device: &dyn Device, from: u64) -> u64 {
    let mut at = from;
    let mut data = 0;
    let size = device.facts().size;
    while at < size {
        let lists = device.extents(at, size - at, ContextSet::first()).await.unwrap();
        data += lists[0].runs().iter().filter(|run| run.state == 0).map(|run| run.len).sum::<u64>();
        at += lists[0].total();
    }
    data
}

#[test]
fn each_part_is_asked_once_for_all_handles() {
    let lab = Lab::new("query=30ms");
    lab.pattern("p.vmdk", "size=64G stride=10M data=45");
    let spec = lab.spec("p.vmdk", "");
    let found = run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        let mut tasks = Vec::new();
        for _ in 0..4 {
            let handle = stack.another().await.unwrap();
            tasks.push(blockhaul_io::start(async move { data_of(&*handle, 0).await }));
        }
        let mut found = Vec::new();
        for task in tasks {
            found.push(task.await);
        }
        found.push(data_of(&**stack.device(), 0).await);
        found
    });
    // 72 of 160 units of each stride; the last one has 96 units.
    let expected = 6554 * 72 * 65536;
    assert_eq!(found, [expected; 5]);
    assert_eq!((lab.calls(QUERY), lab.calls("ConnectEx")), (2, 1));
    lab.assert_clean();
}

#[test]
fn the_first_answer_needs_one_call_and_opening_none() {
    let lab = Lab::new("query=3s");
    lab.pattern("p.vmdk", "size=256G stride=1M data=50");
    let spec = lab.spec("p.vmdk", "");
    let asked = run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        stack.device().read(1 << 20, 4096).await.unwrap();
        let begun = Instant::now();
        let lists = stack.device().extents(0, 1 << 30, ContextSet::first()).await.unwrap();
        assert_eq!(lists[0].len(), 2048);
        begun.elapsed()
    });
    assert!(asked < Duration::from_millis(5900), "two calls take 6 s: {asked:?}");
    // One more may have been asked ahead.
    assert!(lab.calls(QUERY) <= 2);
    lab.assert_clean();
}

#[test]
fn a_failing_query_is_repeated() {
    let lab = Lab::new("fail=QueryAllocatedBlocks:1:1\nfail=QueryAllocatedBlocks:2:overlap");
    lab.pattern("p.vmdk", "size=1G stride=1M data=50");
    let spec = lab.spec("p.vmdk", "");
    let data = run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        data_of(&**stack.device(), 0).await
    });
    assert_eq!((data, lab.calls(QUERY)), (512 << 20, 3));
    lab.assert_clean();
}

#[test]
fn a_range_whose_query_fails_is_data() {
    let wrong = ["14009", "past-end", "overlap"];
    for what in wrong {
        let lab = Lab::new(&format!("fail=QueryAllocatedBlocks:1-3:{what}"));
        lab.pattern("p.vmdk", "size=64G stride=1M data=50");
        let spec = lab.spec("p.vmdk", "");
        let data = run(move || async move {
            let stack = open(&spec, Intent::READ).await.unwrap();
            data_of(&**stack.device(), 0).await
        });
        assert_eq!((data, lab.calls(QUERY)), (48 << 30, 4), "{what}");
        lab.assert_clean();
    }
}

#[test]
fn a_disk_that_cannot_be_queried_is_data_and_is_not_asked_again() {
    let lab = Lab::new("fail=QueryAllocatedBlocks:1-:6");
    lab.pattern("p.vmdk", "size=1G stride=1M data=50");
    let spec = lab.spec("p.vmdk", "");
    let data = run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        data_of(&**stack.device(), 0).await + data_of(&**stack.device(), 0).await
    });
    assert_eq!((data, lab.calls(QUERY)), (2 << 30, 1));
}

#[test]
fn written_blocks_are_data_without_another_query() {
    let lab = Lab::new("query=100ms\nexclusive=off");
    lab.zeroes("w.vmdk", (1 << 30) + 512);
    let spec = lab.spec("w.vmdk", "");
    let found = run(move || async move {
        let stack = open(&spec, Intent::WRITE).await.unwrap();
        let device = stack.device();
        let other = stack.another().await.unwrap();
        // During the query, through another handle.
        let asked = blockhaul_io::start({
            let device = device.clone();
            async move { data_of(&*device, 0).await }
        });
        blockhaul_io::sleep(Duration::from_millis(20)).await;
        other.write(10 << 20, Data::zeroes(4096)).await.unwrap();
        let during = asked.await;
        other.write((20 << 20) - 512, Data::zeroes(1024)).await.unwrap();
        device.flush().await.unwrap();
        (during, data_of(&**device, 0).await)
    });
    // The tail of 512 bytes is always data.
    assert_eq!(found, (65536 + 512, 3 * 65536 + 512));
    assert_eq!(lab.calls(QUERY), 1);
    lab.assert_clean();
}

#[test]
fn small_disks_are_data_and_need_no_query() {
    let lab = Lab::new("");
    lab.zeroes("s.vmdk", 1024);
    let spec = lab.spec("s.vmdk", "");
    let data = run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        data_of(&**stack.device(), 0).await
    });
    assert_eq!((data, lab.calls(QUERY)), (1024, 0));
}

#[test]
fn a_client_that_leaves_during_a_query_leaves_nothing_behind() {
    let lab = Lab::new("query=100ms");
    lab.pattern("p.vmdk", "size=128G stride=1M data=50");
    let spec = lab.spec("p.vmdk", "");
    run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        let leaving = stack.another().await.unwrap();
        let pending =
            leaving.submit(blockhaul_block::Request::extents(0, 1 << 30, ContextSet::first()));
        drop((pending, leaving));
        // The other client gets the answer of that query.
        let other = data_of(&**stack.device(), 120 << 30).await;
        assert_eq!(other, 4 << 30);
        assert_eq!(data_of(&**stack.device(), 0).await, 64 << 30);
    });
    assert_eq!(lab.calls(QUERY), 4);
    lab.assert_clean();
}

#[test]
fn one_link_of_a_chain_has_holes_that_may_hold_data_elsewhere() {
    let lab = Lab::new("");
    lab.zeroes("s.vmdk", 1 << 20);
    let spec = lab.spec("s.vmdk", "&single-link=on");
    let state = run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        let lists = stack.device().extents(0, 1 << 20, ContextSet::first()).await.unwrap();
        lists[0].runs()[0].state
    });
    assert_eq!(state, blockhaul_block::HOLE);
}

#[test]
fn a_saved_map_is_used_for_the_same_disk_only() {
    let lab = Lab::new("fail=QueryAllocatedBlocks:2-4:1");
    lab.pattern("p.vmdk", "size=64G stride=1M data=50");
    let remote = "&server=esx&user=root&password=x&vm=one";
    let ask = |more: String| {
        let save = lab.path("map");
        let spec = lab.spec("p.vmdk", &format!("{remote}&save={}{more}", save.display()));
        let data = run(move || async move {
            let stack = open(&spec, Intent::READ).await?;
            Ok::<u64, blockhaul_block::Error>(data_of(&**stack.device(), 0).await)
        });
        data.map(|data| (data >> 30, lab.calls(QUERY)))
    };
    assert!(ask(String::new()).unwrap_err().text().contains("snapshot= or change-id="));
    // The second part is data because its query failed, and is not saved.
    assert_eq!(ask("&snapshot=s1".into()).unwrap(), (48, 4));
    std::fs::remove_file(lab.path("counters")).unwrap();
    lab.set("");
    assert_eq!(ask("&snapshot=s1".into()).unwrap(), (32, 1));
    std::fs::remove_file(lab.path("counters")).unwrap();
    assert_eq!(ask("&snapshot=s1".into()).unwrap(), (32, 0));
    std::fs::remove_file(lab.path("counters")).unwrap();
    assert_eq!(ask("&snapshot=s2".into()).unwrap(), (32, 2));
    let spec = lab.spec("p.vmdk", "&save=map");
    run(move || async move {
        let error = open(&spec, Intent::WRITE).await.err().unwrap();
        assert!(error.text().contains("read-only"), "{error}");
    });
}

/// Reads one after the other while the extents of a disk are asked for ahead; returns the slowest of
/// the reads that began in that time.
fn slowest_read_during_a_query(lab: &Lab) -> Duration {
    lab.pattern("p.vmdk", "size=96G stride=1M data=50");
    let spec = lab.spec("p.vmdk", "");
    run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        let reader = stack.another().await.unwrap();
        let reads = blockhaul_io::start(async move {
            let begun = Instant::now();
            let mut slowest = Duration::ZERO;
            // The first query is waited for, and has no other handle yet.
            while begun.elapsed() < Duration::from_millis(3500) {
                let before = Instant::now();
                reader.read(1 << 20, 4096).await.unwrap();
                if begun.elapsed() > Duration::from_millis(1500) {
                    slowest = slowest.max(before.elapsed());
                }
            }
            slowest
        });
        blockhaul_io::sleep(Duration::from_millis(1200)).await;
        // The disk is busy when the first query begins, also if the task above waits for a processor.
        let read = Request::read(2 << 20, Reservation::unpooled(4096));
        let under_way = stack.device().submit(read);
        for part in 0..3 {
            data_of(&**stack.device(), part << 35).await;
        }
        under_way.await.unwrap();
        reads.await
    })
}

#[test]
fn reads_go_on_during_a_query_where_the_library_allows_it() {
    let mut seen = Vec::new();
    // A read may wait for a processor; a library that holds up reads does so each time.
    for _ in 0..4 {
        let lab = Lab::new("query=600ms\nexclusive=off\nlatency=20ms");
        let slowest = slowest_read_during_a_query(&lab);
        // Two for the clients, and one for the queries.
        assert_eq!((lab.calls("Open"), lab.calls("Close"), lab.calls(QUERY)), (3, 3, 3));
        lab.assert_clean();
        if slowest < Duration::from_millis(300) {
            return;
        }
        seen.push(slowest);
    }
    panic!("{seen:?}");
}

#[test]
fn a_library_that_holds_up_reads_is_noticed() {
    let lab = Lab::new("query=600ms\nlatency=20ms");
    let slowest = slowest_read_during_a_query(&lab);
    assert!(slowest > Duration::from_millis(400), "{slowest:?}");
    assert_eq!((lab.calls("Open"), lab.calls("Close"), lab.calls(QUERY)), (3, 3, 3));
    lab.assert_clean();
}
