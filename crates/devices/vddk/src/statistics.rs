//! Calls of the library's functions: how many, how long, how many bytes.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A function of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Init,
    Connect,
    Disconnect,
    Create,
    Open,
    Close,
    GetInfo,
    Read,
    Write,
    Wait,
    Flush,
    Query,
}

const NAMES: [&str; 12] = [
    "InitEx",
    "ConnectEx",
    "Disconnect",
    "Create",
    "Open",
    "Close",
    "GetInfo",
    "ReadAsync",
    "WriteAsync",
    "Wait",
    "Flush",
    "QueryAllocatedBlocks",
];

/// The calls of all functions.
#[derive(Debug, Default)]
pub(crate) struct Statistics([Calls; NAMES.len()]);

#[derive(Debug, Default)]
struct Calls {
    calls: AtomicU64,
    nanoseconds: AtomicU64,
    bytes: AtomicU64,
}

impl Statistics {
    /// Runs a call, and counts it. For transfers this is the time until they are under way.
    pub(crate) fn of<T>(&self, function: Function, call: impl FnOnce() -> T) -> T {
        let started = blockhaul_io::now();
        let result = call();
        let calls = &self.0[function as usize];
        calls.calls.fetch_add(1, Ordering::Relaxed);
        let taken = u64::try_from(blockhaul_io::elapsed(started).as_nanos()).unwrap_or(u64::MAX);
        calls.nanoseconds.fetch_add(taken, Ordering::Relaxed);
        result
    }

    /// Counts bytes of a transfer.
    pub(crate) fn bytes(&self, function: Function, bytes: u64) {
        self.0[function as usize].bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Functions that were called, for users: `Open 1 (0.2 s), ReadAsync 44 (0.1 s, 11534336 bytes)`.
    pub(crate) fn show(&self) -> String {
        let mut text = String::new();
        for (name, calls) in NAMES.iter().zip(&self.0) {
            let count = calls.calls.load(Ordering::Relaxed);
            if count == 0 {
                continue;
            }
            let time = Duration::from_nanos(calls.nanoseconds.load(Ordering::Relaxed));
            let separator = if text.is_empty() { "" } else { ", " };
            let _ = write!(text, "{separator}{name} {count} ({:.1} s", time.as_secs_f32());
            match calls.bytes.load(Ordering::Relaxed) {
                0 => text.push(')'),
                bytes => {
                    let _ = write!(text, ", {bytes} bytes)");
                }
            }
        }
        text
    }
}
