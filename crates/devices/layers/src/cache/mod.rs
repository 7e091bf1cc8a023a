//! `cache`: blocks of a slow device in a temporary file.
//!
//! - `options`: the parsed options. `blocks`: where each block's data is. `store`: the file.
//!   `hold`: locks on parts of it.
//! - `read`, `write`: requests. `carry`: writes back and evicts.
//!
//! The rules: an absent or zero block is a hole in the file. A task that makes a block absent holds
//! it alone; a task that relies on a block in the file holds a part of it, or checks afterwards
//! whether any was made absent meanwhile. A block is dirty until the device below has replied.

mod blocks;
mod carry;
mod hold;
mod options;
mod read;
mod store;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, Facts, Hints, Kind, Op, PendingRequest, Reply,
    Request, RequestFlags, Result,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};
use blockhaul_io::WorkerHandle;

use crate::declared::{opened_keeping, param, param_or, usage};
use crate::lost_data;
use crate::per_disk::{KeptPerDisk, PerDisk};
use crate::scratch::ScratchMemory;
use options::{CacheMode, CacheOptions};
use store::CacheStore;

/// The layer `cache`.
pub static CACHE: LayerKind = LayerKind {
    name: "cache",
    summary: "keeps blocks of a slow device in a temporary file",
    manual: "Data that is written, hinted at or (with `cache-on-read`) read is stored in a sparse temporary \
file without a name, in blocks of `cache-min-block-size`, and read from there. All connections \
to an export share it. Do not use the layer over a plugin that gives each connection a disk of \
its own. A write to part of a block that is not in the cache reads the block first. Requests \
for a block that is being read wait for it.

`cache=writeback` replies to a write when it is in the cache. A flush writes changed blocks to \
the device below, in order of offset, and flushes that device. So does closing the layer, when \
its last connection closes or the server stops (not when it is killed); if that fails, the log \
says so and the exit status is 5. A write with FUA is written back at once. After the device \
below has failed a flush, all flushes and FUA requests fail until it is opened again. \
`cache=writethrough` replies when the device below has the data. `cache=unsafe` ignores \
flushes and writes to the device below only to make room: data that was not written back is \
lost on exit.

`cache-max-size` limits the cache: above `cache-high-threshold` percent, the least recently \
used blocks are evicted (changed ones after they were written back) until \
`cache-low-threshold` percent is reached; while it is full, requests for other blocks bypass \
it. The file is created in `dir`, or in the directory that TMPDIR names, or in /var/tmp. Its \
file system must support punching holes; when it is full, writes fail (ENOSPC). The list of \
blocks takes 32 to 80 bytes of memory for each run of adjacent blocks in the same state, and \
twice that with `cache-max-size`.

Changes to the device below that bypass the layer are not detected. For extents use \
`extents-cache`.",
    example: r#"
blockhaul serve --layer 'delay?read=5ms' --layer 'cache?cache-on-read=true' sample:16M \
  --run 'blockhaul checksum "$uri" && blockhaul checksum "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        param_or(
            "cache",
            ParamKind::Choice(&["writeback", "writethrough", "unsafe"]),
            "writeback",
            "When writes reach the device below.",
        ),
        param_or(
            "cache-on-read",
            ParamKind::Text,
            "false",
            "Also cache data that is read: true, false, or the absolute path of a file: while it exists.",
        ),
        param_or(
            "cache-min-block-size",
            ParamKind::Size,
            "64k",
            "Block size; a power of two, 4k to 16M, at least the block size of the file system.",
        ),
        param("cache-max-size", ParamKind::Size, "Maximum size of the cache [default: no limit]."),
        param_or(
            "cache-high-threshold",
            ParamKind::Number,
            "95",
            "Percentage of cache-max-size at which eviction starts.",
        ),
        param_or(
            "cache-low-threshold",
            ParamKind::Number,
            "80",
            "Percentage of cache-max-size at which eviction ends.",
        ),
        param("dir", ParamKind::Text, "Directory for the temporary file."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let options = CacheOptions::new(args)?;
    let disks = PerDisk::default();
    // What is not to be written back has to outlive the connections.
    let kept = KeptPerDisk::new(CacheStore::is_behind);
    opened_keeping(options.mode == CacheMode::Unsafe, move |below| {
        let facts = below.device.facts();
        let make = || CacheStore::new(&options, &facts);
        let store = match options.mode {
            CacheMode::Unsafe => kept.get(&below, make)?,
            CacheMode::Writeback | CacheMode::Writethrough => disks.of_name(&below, make)?,
        };
        // Once a flush below has failed, data written back may be lost: no later flush succeeds.
        let inner = store.flushes.guard(below.device);
        if facts.size != store.size {
            let text = format!("cache: {} does not have the size of the cached device", facts.name);
            return Err(usage(text));
        }
        let base = facts.context(BASE_ALLOCATION);
        let mut facts = facts_above(&facts, options.mode);
        facts.prefer(u32::try_from(options.block).unwrap_or(u32::MAX));
        let facts = Arc::new(facts);
        let scratch = ScratchMemory::for_device(&inner);
        let worker = WorkerHandle::to(blockhaul_io::worker());
        store.handles.fetch_add(1, Ordering::SeqCst);
        let failed = AtomicBool::new(false);
        let handle = CacheHandle { inner, store, scratch, base, worker, failed };
        Ok(Arc::new(CacheDevice { facts, handle: Arc::new(handle) }))
    })
}

/// The facts of the cache over a device with these facts.
fn facts_above(below: &Facts, mode: CacheMode) -> Facts {
    // Buffers are taken before the data arrives, written data is stored, and flushes are the
    // cache's own.
    let kept = Hints::ZEROED | Hints::IN_FLIGHT | Hints::EXTENTS;
    let mut facts = Facts::over(below).keeping(below, kept);
    facts.temporary |= mode == CacheMode::Unsafe;
    let mut supplied = Can::CACHE;
    if facts.can.contains(Can::WRITE) {
        // Extents of other contexts would not cover data that is not below yet.
        facts.contexts = vec![BASE_ALLOCATION.to_string()];
        if mode != CacheMode::Writethrough {
            supplied |= Can::WRITE | Can::FLUSH | Can::FUA | Can::ZERO | Can::FAST_ZERO;
        }
    }
    facts.can |= supplied;
    facts.emulated -= supplied;
    facts.withheld -= supplied;
    facts
}

struct CacheDevice {
    facts: Arc<Facts>,
    handle: Arc<CacheHandle>,
}

/// One handle.
struct CacheHandle {
    inner: Arc<dyn Device>,
    store: Arc<CacheStore>,
    scratch: ScratchMemory,
    /// `base:allocation` of the device below.
    base: Option<ContextSet>,
    /// The worker on which the handle was made, and on which it ends.
    worker: WorkerHandle,
    /// It closes, and could not write back what the device below lacks.
    failed: AtomicBool,
}

impl Device for CacheDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let handle = &self.handle;
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => handle.submit_read(at, room),
            Op::Write(data) => {
                let handle = handle.clone();
                PendingRequest::start(async move { handle.write(at, data, flags).await })
            }
            Op::Zero => {
                let handle = handle.clone();
                PendingRequest::start(async move { handle.zero(at, len, flags).await })
            }
            Op::Trim => {
                let handle = handle.clone();
                PendingRequest::start(async move { handle.trim(at, len, flags).await })
            }
            Op::Flush => match handle.store.mode {
                CacheMode::Unsafe => PendingRequest::ready(Ok(Reply::Done)),
                CacheMode::Writethrough => handle.inner.submit(Request::flush()),
                CacheMode::Writeback => {
                    let handle = handle.clone();
                    PendingRequest::start(async move { handle.flush().await })
                }
            },
            Op::Cache => {
                let handle = handle.clone();
                PendingRequest::start(async move { handle.cache(at, len).await })
            }
            Op::Extents(contexts) if !self.facts.can.contains(Can::WRITE) => {
                let asked = Request::extents(at, len, contexts).with(flags);
                handle.inner.submit(asked)
            }
            Op::Extents(contexts) => {
                let handle = handle.clone();
                PendingRequest::start(async move {
                    let one = flags.contains(RequestFlags::ONE_EXTENT);
                    let extents = handle.extents(at, at + len, one).await?;
                    Ok(Reply::Extents(contexts.iter().map(|_| extents.clone()).collect()))
                })
            }
        }
    }
}

impl Drop for CacheHandle {
    /// Writes back what the device below lacks when the last handle is dropped.
    fn drop(&mut self) {
        let last = self.store.handles.fetch_sub(1, Ordering::SeqCst) == 1;
        let store = self.store.clone();
        let failed = self.failed.load(Ordering::Relaxed);
        if !last || failed || store.mode != CacheMode::Writeback || !store.is_behind() {
            return;
        }
        store.handles.fetch_add(1, Ordering::SeqCst);
        let inner = self.inner.clone();
        let scratch = self.scratch.clone();
        let base = self.base;
        let worker = self.worker.clone();
        let lost = store.clone();
        let closing = CloseReport(Some(lost));
        let spawned = self.worker.spawn_last(move || async move {
            let mut closing = closing;
            let failed = AtomicBool::new(false);
            let handle = Arc::new(CacheHandle { inner, store, scratch, base, worker, failed });
            if let Err(error) = handle.flush().await {
                lost_data::lose_data();
                log::error!("cache: written data is lost: {error}");
                // It is not tried again.
                handle.failed.store(true, Ordering::Relaxed);
            }
            closing.0 = None;
            // Another handle may have written meanwhile: if this is the last one, it closes again.
            drop(handle);
        });
        if !spawned {
            log::debug!("cache: closed after the last worker");
        }
    }
}

/// Reports data that could not be written back.
struct CloseReport(Option<Arc<CacheStore>>);

impl Drop for CloseReport {
    fn drop(&mut self) {
        if self.0.as_ref().is_some_and(|store| store.is_behind()) {
            lost_data::lose_data();
            log::error!("cache: the program ended before all data was written back");
        }
    }
}

/// Whether the file system is full: the cache can be bypassed without losing data.
fn is_full(error: &blockhaul_block::Error) -> bool {
    error.kind() == Kind::NoSpace
}
