//! The contract of devices, with plugins of each kind.

use std::ffi::OsStr;
use std::time::Duration;

use blockhaul_catalog::{DeviceSpec, Intent};
use blockhaul_io::IoEngine;
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};
use blockhaul_testkit::tools::ScratchDir;

use crate::registry;

/// Callbacks with flags.
const SECOND: &str = "
API_VERSION = 2
def pread(h, buf, offset, flags): buf[:] = disk[offset:offset + len(buf)]
def pwrite(h, buf, offset, flags): disk[offset:offset + len(buf)] = buf
def flush(h, flags): pass
def trim(h, count, offset, flags): pass
def zero(h, count, offset, flags): disk[offset:offset + count] = bytes(count)
def cache(h, count, offset, flags): pass
def extents(h, count, offset, flags): return [(offset, count, 0)]
def can_fua(h): return nbdkit.FUA_NATIVE
def can_multi_conn(h): return True
";
/// Those of the first version.
const FIRST: &str = "
def pread(h, count, offset): return disk[offset:offset + count]
def pwrite(h, buf, offset): disk[offset:offset + len(buf)] = buf
def flush(h): pass
def zero(h, count, offset, may_trim): nbdkit.set_error(errno.EOPNOTSUPP); raise RuntimeError()
";
/// Coroutines, whose answers come in any order.
const COROUTINES: &str = "
import asyncio, random
API_VERSION = 2
async def pread(h, buf, offset, flags):
    await asyncio.sleep(random.random() / 1000)
    buf[:] = disk[offset:offset + len(buf)]
async def pwrite(h, buf, offset, flags):
    data = bytes(buf)
    await asyncio.sleep(random.random() / 1000)
    disk[offset:offset + len(data)] = data
async def flush(h, flags): await asyncio.sleep(0)
def block_size(h): return 512, 4096, 1 << 20
";

/// A disk that all processes of a plugin share.
const IN_A_FILE: &str = "
API_VERSION = 2
import os
path = __file__ + '.raw'
def thread_model(): return nbdkit.THREAD_MODEL_PARALLEL
def open(readonly):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 20)
    return fd
def close(fd): os.close(fd)
def pread(fd, buf, offset, flags): os.preadv(fd, [buf], offset)
def pwrite(fd, buf, offset, flags): os.pwrite(fd, buf, offset)
def flush(fd, flags): os.fdatasync(fd)
def can_multi_conn(fd): return True
";

fn check(name: &str, callbacks: &str, options: ConformOptions) {
    check_with(name, callbacks, "", options);
}

/// `settings` follow the script's name.
fn check_with(name: &str, callbacks: &str, settings: &'static str, options: ConformOptions) {
    let script = format!(
        "import errno\nimport nbdkit\ndisk = bytearray(1 << 20)\n\
         def open(readonly): return 1\ndef get_size(h): return len(disk)\n{callbacks}"
    );
    conform::check(name, options, move || {
        let script = script.clone();
        async move {
            let scratch = ScratchDir::new().unwrap();
            let path = scratch.file("disk.py");
            std::fs::write(&path, script).unwrap();
            let spec =
                DeviceSpec::parse(OsStr::new(&format!("python:{}{settings}", path.display())))?;
            let stack = registry().0.open(&spec, Vec::new(), Intent::WRITE).await?;
            Ok::<_, blockhaul_block::Error>(Subject::from(stack).keep(scratch))
        }
    });
}

fn zeroes() -> ConformOptions {
    // One engine: the other one waits for the same sockets, and each check starts an interpreter.
    let rounds = 2;
    let engines = vec![IoEngine::Threads];
    ConformOptions {
        rounds,
        engines,
        submit_max: Duration::from_millis(100),
        ..ConformOptions::default()
    }
    .content(InitialContent::Zeroes)
}

#[test]
fn one_request_at_a_time() {
    check("python", SECOND, zeroes());
}

#[test]
fn parallel_requests() {
    let parallel = "def thread_model(): return nbdkit.THREAD_MODEL_PARALLEL\n";
    let options = ConformOptions { engines: vec![IoEngine::Uring, IoEngine::Threads], ..zeroes() };
    check("python, parallel", &format!("{SECOND}{parallel}"), options);
}

#[test]
fn one_request_at_a_time_for_each_handle() {
    let model = "def thread_model(): return nbdkit.THREAD_MODEL_SERIALIZE_REQUESTS\n";
    check("python, serialized", &format!("{SECOND}{model}"), zeroes());
}

#[test]
fn the_first_version() {
    check("python, version 1", FIRST, zeroes());
}

#[test]
fn coroutines() {
    check("python, coroutines", COROUTINES, zeroes());
}

#[test]
fn several_processes() {
    check_with("python, processes", IN_A_FILE, "?@processes=3", zeroes());
}
