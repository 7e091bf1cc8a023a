//! Plugins in several processes (`@processes`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use blockhaul_block::{Device, Kind, Request};
use blockhaul_catalog::Intent;
use blockhaul_testkit::tools::ScratchDir;

use crate::{Plugin, SOON, read, registry, run, spec, write};

/// A disk in a file. Reads return the number of the process in their first 4 bytes; some offsets end
/// the process that reads them.
const COMPUTES: &str = "
import errno, hashlib, os, struct, time
import nbdkit
API_VERSION = 2
def thread_model(): return nbdkit.THREAD_MODEL_PARALLEL
def config(key, value):
    global path
    path = value
def open(readonly): return os.open(path, os.O_RDWR)
def close(fd): os.close(fd)
def get_size(fd): return 1 << 20
def pread(fd, buf, offset, flags):
    if offset == 4096: os._exit(5)
    if offset == 8192: os.kill(os.getpid(), 9)
    if offset == 12288:
        while not os.path.exists(path + '.go'): time.sleep(0.01)
    data, end = b'', time.monotonic() + 0.01
    while time.monotonic() < end: data = hashlib.sha256(data).digest()
    os.preadv(fd, [buf], offset)
    if offset == 0: buf[:4] = struct.pack('<I', os.getpid())
def pwrite(fd, buf, offset, flags): os.pwrite(fd, buf, offset)
def flush(fd, flags): os.fdatasync(fd)
";

async fn start(more: &str, options: &str) -> (Plugin, ScratchDir) {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.file("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let script = format!("{COMPUTES}{more}");
    let options = format!("?file={}&{options}", path.display());
    (Plugin::of(&script, &options).await.unwrap(), scratch)
}

/// The number of the process that answers a read.
async fn process(device: &Arc<dyn Device>) -> u32 {
    u32::from_le_bytes(read(device, 0, 4).await.unwrap().try_into().unwrap())
}

/// The processes that answer `count` reads at the same time.
async fn processes(device: &Arc<dyn Device>, count: usize) -> BTreeSet<u32> {
    let tasks: Vec<_> = (0..count)
        .map(|_| {
            let device = device.clone();
            blockhaul_io::spawn(async move { process(&device).await })
        })
        .collect();
    let mut found = BTreeSet::new();
    for task in tasks {
        found.insert(task.await);
    }
    found
}

/// Reads until `count` processes answer.
async fn wait_for(device: &Arc<dyn Device>, count: usize) -> BTreeSet<u32> {
    let begun = Instant::now();
    loop {
        let found = processes(device, 4 * count).await;
        if found.len() == count {
            return found;
        }
        assert!(begun.elapsed() < SOON, "{found:?}");
    }
}

#[test]
fn requests_are_shared_by_all_processes() {
    run(|| async {
        let (plugin, scratch) = start("", "@processes=3").await;
        let device = plugin.device().await.unwrap();
        assert_eq!(processes(&device, 12).await.len(), 3);
        // Two clients with one request each do not meet in one process.
        let other = plugin.device().await.unwrap();
        let slow = device.submit(Request::read(12288, blockhaul_io::Reservation::unpooled(4)));
        for _ in 0..6 {
            process(&other).await;
        }
        std::fs::write(scratch.file("disk.raw.go"), "").unwrap();
        slow.await.unwrap();
        assert_eq!(plugin.exports.state().unwrap().matches("process ").count(), 3);
    });
}

#[test]
fn what_one_process_writes_all_read_and_a_flush_reaches_all() {
    run(|| async {
        let more = "
import errno
def flush(fd, flags):
    with __builtins__.open(path + '.flushed', 'a') as file: file.write(f'{os.getpid()}\\n')
";
        let (plugin, scratch) = start(more, "@processes=3").await;
        let device = plugin.device().await.unwrap();
        write(&device, 65536, &[7; 4096]).await.unwrap();
        for _ in 0..6 {
            assert_eq!(read(&device, 65536, 4096).await.unwrap(), [7; 4096]);
        }
        device.submit(Request::flush()).await.unwrap();
        let flushed = std::fs::read_to_string(scratch.file("disk.raw.flushed")).unwrap();
        let flushed: BTreeSet<u32> = flushed.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(flushed, wait_for(&device, 3).await);
    });
}

#[test]
fn the_end_of_a_process_fails_its_requests_alone_and_a_new_one_takes_its_place() {
    run(|| async {
        for (at, how) in [(4096, "exit status: 5"), (8192, "signal: 9")] {
            let (plugin, _scratch) = start("", "@processes=2").await;
            let device = plugin.device().await.unwrap();
            let before = wait_for(&device, 2).await;
            let error = read(&device, at, 512).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Io);
            assert!(error.to_string().contains(how), "{error}");
            // The same handle goes on, at once and then with both processes.
            process(&device).await;
            let after = wait_for(&device, 2).await;
            assert_eq!(before.intersection(&after).count(), 1, "{before:?} {after:?}");
            let state = plugin.exports.state().unwrap();
            assert!(state.contains("started 2 times"), "{state}");
            // No write was lost.
            device.submit(Request::flush()).await.unwrap();
        }
    });
}

#[test]
fn requests_wait_for_a_new_process_when_all_have_ended() {
    run(|| async {
        let (plugin, _scratch) = start("", "@processes=2").await;
        let device = plugin.device().await.unwrap();
        let before = wait_for(&device, 2).await;
        let crashes = [4096, 4096].map(|at| {
            let room = blockhaul_io::Reservation::unpooled(512);
            device.submit(Request::read(at, room))
        });
        for crash in crashes {
            assert_eq!(crash.await.unwrap_err().kind(), Kind::Io);
        }
        let after = BTreeSet::from([process(&device).await]);
        assert!(before.is_disjoint(&after), "{before:?} {after:?}");
    });
}

#[test]
fn flushes_fail_when_a_process_has_ended_with_writes_that_were_not_flushed() {
    run(|| async {
        for multi in ["", "def can_multi_conn(fd): return True\n"] {
            let (plugin, _scratch) = start(multi, "@processes=2").await;
            let device = plugin.device().await.unwrap();
            let other = plugin.device().await.unwrap();
            write(&device, 65536, &[1; 512]).await.unwrap();
            write(&device, 65536, &[1; 512]).await.unwrap();
            device.submit(Request::flush()).await.unwrap();
            read(&device, 4096, 512).await.unwrap_err();
            device.submit(Request::flush()).await.unwrap();
            wait_for(&device, 2).await;
            // One write to each process.
            for _ in 0..2 {
                write(&device, 65536, &[2; 512]).await.unwrap();
            }
            read(&device, 8192, 512).await.unwrap_err();
            for _ in 0..2 {
                let error = device.submit(Request::flush()).await.unwrap_err().to_string();
                assert!(error.contains("writes that were not flushed"), "{error}");
            }
            let flush = other.submit(Request::flush()).await;
            assert_eq!(flush.is_ok(), multi.is_empty(), "a flush covers other clients or not");
            read(&device, 0, 512).await.unwrap();
        }
    });
}

#[test]
fn other_thread_models_are_refused() {
    run(|| async {
        for (model, refused) in [
            ("def thread_model(): return nbdkit.THREAD_MODEL_SERIALIZE_ALL_REQUESTS", true),
            ("def thread_model(): return nbdkit.THREAD_MODEL_SERIALIZE_REQUESTS", true),
            ("def thread_model(): return nbdkit.THREAD_MODEL_SERIALIZE_CONNECTIONS", true),
            (
                "del thread_model\nasync def pread(fd, buf, offset, flags): buf[:] = bytes(len(buf))",
                false,
            ),
        ] {
            let script = format!("{COMPUTES}{model}\n");
            let started = Plugin::of(&script, "?file=/dev/null&@processes=2").await;
            match started.err() {
                Some(error) if refused => {
                    assert_eq!(error.kind(), Kind::Usage);
                    let error = error.to_string();
                    assert!(error.contains("@processes needs a plugin whose"), "{error}");
                }
                error => assert!(!refused && error.is_none(), "{model}: {error:?}"),
            }
        }
    });
}

#[test]
fn processes_that_show_different_disks_are_refused() {
    run(|| async {
        let more = "def get_size(fd): return os.getpid() * 512\n";
        let (plugin, _scratch) = start(more, "@processes=2").await;
        let error = plugin.device().await.err().unwrap().to_string();
        assert!(error.contains("disagree about the disk"), "{error}");
    });
}

#[test]
fn devices_of_the_program_itself_use_all_processes() {
    run(|| async {
        let scratch = ScratchDir::new().unwrap();
        let script = scratch.file("disk.py");
        let disk = scratch.file("disk.raw");
        std::fs::write(&script, COMPUTES).unwrap();
        std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let spec = spec(&script, &format!("?file={}&@processes=2", disk.display()));
        let stack = registry().0.open(&spec, Vec::new(), Intent::WRITE).await.unwrap();
        let device = stack.device().clone();
        let error = read(&device, 8192, 512).await.unwrap_err().to_string();
        assert!(error.contains("signal: 9"), "{error}");
        wait_for(&device, 2).await;
    });
}
