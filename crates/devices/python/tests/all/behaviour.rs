//! Requests in parallel, coroutines, connections and buffers.

use std::time::{Duration, Instant};

use blockhaul_block::{Can, ContextSet, Kind, Request, RequestFlags};
use blockhaul_testkit::tools::ScratchDir;

use crate::{Plugin, SOON, read, run, write};

const PARALLEL: &str = "
import threading
together, waiting, done = threading.Barrier(8), threading.Event(), threading.Event()
def thread_model(): return nbdkit.THREAD_MODEL_PARALLEL
def pread(h, buf, offset, flags):
    if offset == 4096: together.wait(60)
    if offset == 8192:
        waiting.set()
        assert done.wait(60)
    if offset == 12288: assert waiting.wait(60)
    if offset == 16384: done.set()
    buf[:] = bytes(len(buf))
";

#[test]
fn callbacks_that_wait_run_in_parallel_and_hold_up_nobody() {
    run(|| async {
        let plugin = Plugin::start(PARALLEL, "?@threads=8").await.unwrap();
        let device = plugin.device().await.unwrap();
        let one = |at| {
            let device = device.clone();
            blockhaul_io::spawn(async move { read(&device, at, 4096).await })
        };
        // Each waits for all others.
        let eight: Vec<_> = (0..8).map(|_| one(4096)).collect();
        for task in eight {
            task.await.unwrap();
        }
        let slow = one(8192);
        // It is under way, and waits for the last of these.
        for at in [12288, 0, 16384] {
            read(&device, at, 4096).await.unwrap();
        }
        slow.await.unwrap();
    });
}

#[test]
fn with_the_default_model_callbacks_do_not_overlap() {
    run(|| async {
        let script = "
busy = []
def pread(h, buf, offset, flags):
    busy.append(1)
    time.sleep(0.01)
    assert busy.pop() and not busy
    buf[:] = bytes(len(buf))
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let devices = [plugin.device().await.unwrap(), plugin.device().await.unwrap()];
        let tasks: Vec<_> = (0..20)
            .map(|index| {
                let device = devices[index % 2].clone();
                blockhaul_io::spawn(async move { read(&device, 0, 512).await })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
}

#[test]
fn a_thousand_coroutines_wait_at_the_same_time() {
    run(|| async {
        let script = "
import asyncio
async def pread(h, buf, offset, flags):
    await asyncio.sleep(1)
    buf[:] = bytes([offset // 512 % 251]) * len(buf)
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let device = plugin.device().await.unwrap();
        let begun = Instant::now();
        let tasks: Vec<_> = (0..1000_u64)
            .map(|index| {
                let device = device.clone();
                blockhaul_io::spawn(async move { read(&device, index * 512, 512).await })
            })
            .collect();
        for (index, task) in tasks.into_iter().enumerate() {
            assert_eq!(task.await.unwrap(), vec![(index % 251) as u8; 512]);
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    });
}

#[test]
fn the_coroutines_of_a_client_that_leaves_are_cancelled() {
    run(|| async {
        let script = "
import asyncio
cancelled = 0
async def pread(h, buf, offset, flags):
    global cancelled
    buf[:] = bytes([cancelled]) * len(buf)
    if offset:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled += 1
            raise
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let visit = plugin.visit().await.unwrap();
        let device = visit.open("", false).await.unwrap().unwrap().device;
        let waiting = device.submit(Request::read(512, blockhaul_io::Reservation::unpooled(512)));
        assert_eq!(read(&device, 0, 1).await.unwrap(), [0]);
        visit.gone();
        assert_eq!(waiting.await.unwrap_err().kind(), Kind::ShuttingDown);
        let other = plugin.device().await.unwrap();
        assert_eq!(read(&other, 0, 1).await.unwrap(), [1]);
    });
}

#[test]
fn a_handle_is_any_value() {
    run(|| async {
        // Also None, as nbdkit's manual says.
        let script = "
closed = []
def open(readonly): pass
def close(h): closed.append(h is None)
def pread(h, buf, offset, flags): buf[:] = bytes([h is None, *closed]).ljust(len(buf), b'.')
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let first = plugin.device().await.unwrap();
        assert_eq!(read(&first, 0, 4).await.unwrap(), b"\x01...");
        drop(first);
        let second = plugin.device().await.unwrap();
        // The first is closed when it has no requests any more.
        while read(&second, 0, 4).await.unwrap() != b"\x01\x01.." {
            blockhaul_io::sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn what_a_plugin_can_do_is_what_it_says() {
    run(|| async {
        let script = "
def can_flush(h): return True
def flush(h, flags): pass
def can_trim(h): return 1
def trim(h, count, offset, flags): pass
def can_extents(h): return True
def extents(h, count, offset, flags):
    assert flags == nbdkit.FLAG_REQ_ONE
    return iter([(0, 4096, nbdkit.EXTENT_HOLE), (4096, len(disk) - 4096, nbdkit.EXTENT_ZERO)])
def export_description(h): return 'what it is'
def block_size(h): return (512, 4096, 0xffffffff)
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let device = plugin.device().await.unwrap();
        let facts = device.facts();
        assert_eq!(
            facts.can,
            Can::WRITE | Can::FLUSH | Can::FUA | Can::ZERO | Can::FAST_ZERO | Can::EXTENTS,
            "1 is not True, as in nbdkit"
        );
        assert_eq!((facts.size, facts.description.as_str()), (1 << 20, "what it is"));
        assert_eq!(facts.advertised.unwrap().minimum, 512);
        let asked = Request::extents(512, 8192, ContextSet::first()).with(RequestFlags::ONE_EXTENT);
        let blockhaul_block::Reply::Extents(lists) = device.submit(asked).await.unwrap() else {
            panic!("no extents")
        };
        let runs: Vec<_> = lists[0].runs().iter().map(|run| (run.len, run.state)).collect();
        assert_eq!(runs, [(3584, 1)]);
    });
}

#[test]
fn zeroes_are_written_where_the_plugin_cannot_zero() {
    run(|| async {
        let script = "
calls = []
def zero(h, count, offset, flags): nbdkit.set_error(errno.EOPNOTSUPP)
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let device = plugin.device().await.unwrap();
        write(&device, 0, &[7; 700_000]).await.unwrap();
        device.submit(Request::zero(1, 600_000)).await.unwrap();
        let found = read(&device, 0, 700_000).await.unwrap();
        assert_eq!((found[0], found[600_001]), (7, 7));
        assert!(found[1..=600_000].iter().all(|byte| *byte == 0));
        let fast = device.submit(Request::zero(0, 512).with(RequestFlags::FAST)).await.unwrap_err();
        assert_eq!(fast.kind(), Kind::Unsupported);
    });
}

#[test]
fn a_buffer_that_a_plugin_keeps_is_not_used_again_before_it_lets_go() {
    run(|| async {
        let script = "
kept = []
def pread(h, buf, offset, flags):
    buf[:] = bytes([offset // 4096]) * len(buf)
    if offset == 4096: kept.append(buf[8:16])
    if offset == 8192: buf[0:8] = kept[0]
    if offset == 12288: kept.clear()
    if offset == 16384: kept.append(buf)
    if offset == 20480: kept[0][0]
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let device = plugin.device().await.unwrap();
        assert_eq!(read(&device, 4096, 4096).await.unwrap(), vec![1; 4096]);
        for _ in 0..20 {
            read(&device, 28672, 4096).await.unwrap();
        }
        let found = read(&device, 8192, 4096).await.unwrap();
        assert_eq!((found[0], found[8]), (1, 2), "the kept slice has its old contents");
        read(&device, 12288, 4096).await.unwrap();
        read(&device, 16384, 4096).await.unwrap();
        let error = read(&device, 20480, 4096).await.unwrap_err().to_string();
        assert!(error.contains("released memoryview"), "{error}");
    });
}

#[test]
fn buffers_are_aligned_for_direct_io() {
    run(|| async {
        let script = "
import ctypes
def pread(h, buf, offset, flags):
    assert not buf.readonly and buf.contiguous and buf.itemsize == 1
    at = ctypes.addressof(ctypes.c_char.from_buffer(buf))
    assert at % 4096 == 0, at
    buf[:] = bytes(len(buf))
def pwrite(h, buf, offset, flags): assert buf.readonly
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let device = plugin.device().await.unwrap();
        for len in [1, 512, 4096, 4097, 1 << 20] {
            assert_eq!(read(&device, 0, len).await.unwrap(), vec![0; len]);
        }
        write(&device, 0, &[1; 5000]).await.unwrap();
    });
}

#[test]
fn plugins_with_one_connection_at_a_time_get_no_second() {
    run(|| async {
        let script = "
def thread_model(): return nbdkit.THREAD_MODEL_SERIALIZE_CONNECTIONS
open_now = 0
def open(readonly):
    global open_now
    open_now += 1
    assert open_now == 1
    return 1
def close(h):
    global open_now
    open_now -= 1
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let first = plugin.device().await.unwrap();
        let second = blockhaul_io::timeout(Duration::from_millis(200), plugin.visit()).await;
        assert!(second.is_err(), "the second waits");
        drop(first);
        read(&plugin.device().await.unwrap(), 0, 1).await.unwrap();
    });
}

#[test]
fn a_handle_is_closed_before_the_process_ends() {
    const SYNC: &str = "def close(h): wait(); note('close')";
    const ASYNC: &str = "
import asyncio
async def pread(h, buf, offset, flags): buf[:] = bytes(len(buf))
async def close(h): await asyncio.sleep(PAUSE); note('close')
";
    let model =
        |name: &str| format!("def thread_model(): return nbdkit.THREAD_MODEL_{name}\n{SYNC}");
    run(move || async move {
        let kinds =
            [SYNC.to_owned(), model("PARALLEL"), model("SERIALIZE_REQUESTS"), ASYNC.to_owned()];
        for (kind, pause) in kinds.iter().flat_map(|kind| [(kind, "0"), (kind, "0.3")]) {
            let notes = ScratchDir::new().unwrap();
            let path = notes.file("notes");
            let script = format!(
                "import builtins
PAUSE = {pause}
def wait(): time.sleep(PAUSE)
def note(text): print(text, file=builtins.open({path:?}, 'a'))
def cleanup(): note('cleanup')
{kind}"
            );
            let plugin = Plugin::start(&script, "").await.unwrap();
            let device = plugin.device().await.unwrap();
            read(&device, 0, 1).await.unwrap();
            // The requests to close and to end arrive together.
            drop((device, plugin));
            let noted = async {
                loop {
                    let text = std::fs::read_to_string(&path).unwrap_or_default();
                    if text.contains("cleanup") {
                        return text;
                    }
                    blockhaul_io::sleep(Duration::from_millis(5)).await;
                }
            };
            let noted = blockhaul_io::timeout(SOON, noted).await.unwrap();
            assert_eq!(noted, "close\ncleanup\n", "{kind} {pause}");
        }
    });
}
