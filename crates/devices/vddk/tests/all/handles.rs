//! Handles: opened and closed many times, errors of requests, and completions in any order.

use blockhaul_block::{Device as _, DeviceExt as _, Kind, Request};
use blockhaul_catalog::Intent;
use blockhaul_io::{Data, Reservation};

use crate::support::{Lab, open, run};

/// Descriptors and threads of this process.
fn resources() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

#[test]
fn a_thousand_opens_leave_nothing_behind() {
    let lab = Lab::new("");
    lab.pattern("p.vmdk", "size=1G stride=1M data=50");
    let spec = lab.spec("p.vmdk", "");
    run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        let mut before = None;
        for round in 0..1000 {
            let handle = stack.another().await.unwrap();
            handle.read(0, 4096).await.unwrap();
            drop(handle);
            if round == 100 {
                before = Some(resources());
            }
        }
        // The last ones are closed by their threads; other tests run meanwhile.
        let (fds, threads) = before.unwrap();
        let mut now = resources();
        for _ in 0..100 {
            if now.0 <= fds + 40 && now.1 <= threads + 40 {
                return;
            }
            blockhaul_io::sleep(std::time::Duration::from_millis(50)).await;
            now = resources();
        }
        panic!("descriptors and threads: {now:?}, and {:?} before", (fds, threads));
    });
    assert_eq!((lab.calls("Open"), lab.calls("Close"), lab.calls("ConnectEx")), (1001, 1001, 1));
    lab.assert_clean();
}

#[test]
fn the_library_is_started_and_ended_many_times() {
    let lab = Lab::new("");
    lab.pattern("p.vmdk", "size=1G stride=1M data=50");
    for _ in 0..20 {
        let spec = lab.spec("p.vmdk", "");
        run(move || async move {
            let stack = open(&spec, Intent::READ).await.unwrap();
            stack.device().read(0, 512).await.unwrap();
        });
        lab.assert_clean();
        std::fs::remove_file(lab.path("counters")).unwrap();
    }
}

#[test]
fn requests_are_answered_in_any_order() {
    let lab = Lab::new("jitter=5ms\nthreads=8");
    lab.pattern("p.vmdk", "size=1G stride=1M data=100");
    let spec = lab.spec("p.vmdk", "");
    run(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        let read = |at| stack.device().submit(Request::read(at, Reservation::unpooled(8192)));
        let pending: Vec<_> = (0..200).map(|index| (index * 8192, read(index * 8192))).collect();
        for (at, pending) in pending {
            let blockhaul_block::Reply::Data(data) = pending.await.unwrap() else { panic!() };
            assert_eq!(data.bytes()[8..16], (at + 8).to_le_bytes());
        }
    });
    let counters = lab.counters();
    assert!(counters["in-flight-most"].as_u64().unwrap() > 50, "{counters}");
    lab.assert_clean();
}

#[test]
fn errors_have_the_text_of_the_library() {
    let lab = Lab::new("fail=ReadAsync:2:7\nfail=WriteAsync:1:13\nlongest=1M");
    lab.zeroes("w.vmdk", 64 << 20);
    let spec = lab.spec("w.vmdk", "");
    run(move || async move {
        let stack = open(&spec, Intent::WRITE).await.unwrap();
        let device = stack.device();
        device.read(0, 4096).await.unwrap();
        let error = device.read(4096, 4096).await.unwrap_err().to_string();
        assert!(
            error.contains("cannot read: VixDiskLib_ReadAsync: A file access error"),
            "{error}"
        );
        assert!(error.contains("(error 7)") && error.contains("w.vmdk"), "{error}");
        let error = device.write(0, Data::zeroes(512)).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Refused);
        let error = device.read(0, 2 << 20).await.unwrap_err();
        assert_eq!(error.kind(), Kind::NoMemory);
        device.write(0, Data::zeroes(512)).await.unwrap();
    });
    lab.assert_clean();
}

#[test]
fn a_failed_flush_stays_failed_on_all_handles() {
    let lab = Lab::new("fail=Flush:2:1");
    lab.zeroes("w.vmdk", 1 << 20);
    let spec = lab.spec("w.vmdk", "");
    run(move || async move {
        let stack = open(&spec, Intent::WRITE).await.unwrap();
        let other = stack.another().await.unwrap();
        stack.device().write(0, Data::zeroes(512)).await.unwrap();
        stack.device().flush().await.unwrap();
        let error = other.flush().await.unwrap_err().to_string();
        assert!(error.contains("VixDiskLib_Flush: Unknown error (error 1)"), "{error}");
        assert!(stack.device().flush().await.is_err() && other.flush().await.is_err());
    });
    assert_eq!(lab.calls("Flush"), 2);
    lab.assert_clean();
}

#[test]
fn disks_of_several_machines_share_the_library_but_not_a_connection() {
    let lab = Lab::new("");
    lab.pattern("a.vmdk", "size=1G stride=1M data=50");
    lab.pattern("b.vmdk", "size=2G stride=1M data=50");
    let remote = |name, vm| lab.spec(name, &format!("&server=esx&user=root&password=x&vm={vm}"));
    let specs = [remote("a.vmdk", "one"), remote("b.vmdk", "one"), remote("b.vmdk", "two")];
    run(move || async move {
        let mut stacks = Vec::new();
        for spec in &specs {
            stacks.push(open(spec, Intent::READ).await.unwrap());
        }
        let sizes: Vec<_> = stacks.iter().map(|stack| stack.device().facts().size >> 30).collect();
        assert_eq!(sizes, [1, 2, 2]);
    });
    assert_eq!((lab.calls("InitEx"), lab.calls("ConnectEx"), lab.calls("Open")), (1, 2, 3));
    lab.assert_clean();
}

#[test]
fn a_local_disk_can_be_created() {
    let lab = Lab::new("");
    let spec = lab.spec("new.vmdk", "&create=on&create-size=3M&create-type=vmfs-thin");
    run(move || async move {
        let stack = open(&spec, Intent::WRITE).await.unwrap();
        assert_eq!(stack.device().facts().size, 3 << 20);
        stack.device().write(0, Data::zeroes(512)).await.unwrap();
    });
    lab.assert_clean();
}
