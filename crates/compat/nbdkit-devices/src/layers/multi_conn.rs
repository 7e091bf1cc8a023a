//! `multi-conn`: whether a flush on one connection covers the others.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use blockhaul_block::{
    Can, Device, Error, Facts, FileRange, LeaseAccess, Op, PendingRequest, Reply, Request, Result,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use blockhaul_layers::support::FlushRecord;
use blockhaul_layers::support::PerDisk;
use blockhaul_layers::support::masked;
use blockhaul_layers::support::{opened, param_or};

/// The layer `multi-conn`.
pub static MULTI_CONN: LayerKind = LayerKind {
    name: "multi-conn",
    summary: "sets whether a flush on one connection covers all connections, or ensures it",
    manual: "Clients use several connections for one export only if a flush on one covers the writes of the \
others. `mode=auto` ensures that if the device does not; `emulate` ensures it always. A flush \
then flushes every handle that has changed something since its last flush (`track-dirty=on`), \
or every handle. `plugin` leaves it to the device. `disable` does not advertise multi-conn. \
The last mode advertises it and does nothing else: for devices where each connection writes \
and flushes only its own ranges, or where data need not be durable.

With `auto` and `emulate`, after a flush or a FUA request of one handle has failed, those of \
all handles fail until the device is opened again.",
    example: r#"
blockhaul serve --layer 'multi-conn?mode=disable' memory:1G \
  --run 'blockhaul info --isnt multi-conn "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        param_or(
            "mode",
            ParamKind::Choice(&["auto", "emulate", "plugin", "disable", "unsafe"]),
            "auto",
            "How to handle multi-conn.",
        ),
        param_or("track-dirty", ParamKind::Switch, "on", "Flush only handles that have changed something."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let mode = args.text("mode").unwrap_or("auto").to_string();
    let track = args.switch("track-dirty");
    let disks = PerDisk::<OpenHandles>::default();
    opened(move |below| {
        let handles = disks.of_name(&below, || Ok(OpenHandles::default()))?;
        let inner = below.device;
        let native = inner.facts().can.contains(Can::MULTI_CONN);
        match mode.as_str() {
            "disable" => return Ok(masked(inner, |facts| facts.can -= Can::MULTI_CONN)),
            "unsafe" => return Ok(masked(inner, |facts| facts.can |= Can::MULTI_CONN)),
            "plugin" => return Ok(inner),
            "auto" if native => return Ok(inner),
            _ => {}
        }
        let mut facts = Facts::same(&inner.facts());
        facts.can |= Can::MULTI_CONN;
        facts.emulated |= Can::MULTI_CONN;
        let changes = AtomicU64::new(0);
        let flushed = AtomicU64::new(0);
        let inner = handles.flushes.guard(inner);
        let handle = Arc::new(DeviceHandle { inner, changes, flushed, track });
        handles.lock().push(Arc::downgrade(&handle));
        Ok(Arc::new(MultiConnDevice { handle, facts: Arc::new(facts), handles: handles.clone() }))
    })
}

/// A handle on the device.
struct DeviceHandle {
    inner: Arc<dyn Device>,
    /// Number of completed changes.
    changes: AtomicU64,
    /// Number of those that a flush has covered.
    flushed: AtomicU64,
    track: bool,
}

/// All open handles of a disk.
#[derive(Default)]
struct OpenHandles {
    open: Mutex<Vec<Weak<DeviceHandle>>>,
    flushes: Arc<FlushRecord>,
}

impl OpenHandles {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<DeviceHandle>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> Vec<Arc<DeviceHandle>> {
        let mut all = self.lock();
        all.retain(|handle| handle.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    }
}

struct MultiConnDevice {
    handle: Arc<DeviceHandle>,
    facts: Arc<Facts>,
    handles: Arc<OpenHandles>,
}

impl Device for MultiConnDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        match request.op {
            Op::Write(_) | Op::Zero | Op::Trim => self.change(request),
            Op::Flush => self.flush_all(),
            _ => self.handle.inner.submit(request),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        match access {
            LeaseAccess::Read => self.handle.inner.file_at(at, len, access),
            // Writes that bypass the layer would go unnoticed.
            LeaseAccess::Write => None,
        }
    }
}

impl MultiConnDevice {
    /// Counts a change before its completion is visible, so that every later flush covers it.
    fn change(&self, request: Request) -> PendingRequest {
        match self.handle.inner.submit(request).now() {
            Ok(outcome) => {
                self.handle.changes.fetch_add(1, Ordering::SeqCst);
                PendingRequest::ready(outcome)
            }
            Err(pending) => {
                let handle = self.handle.clone();
                PendingRequest::start(async move {
                    let outcome = pending.await;
                    handle.changes.fetch_add(1, Ordering::SeqCst);
                    outcome
                })
            }
        }
    }

    fn flush_all(&self) -> PendingRequest {
        // Even if nothing has changed since.
        if let Err(error) = self.handles.flushes.check() {
            return error.into();
        }
        let mut out = Vec::new();
        for handle in self.handles.open() {
            let changes = handle.changes.load(Ordering::SeqCst);
            if !handle.track || changes > handle.flushed.load(Ordering::SeqCst) {
                out.push((handle.inner.submit(Request::flush()), handle, changes));
            }
        }
        let flushes = self.handles.flushes.clone();
        PendingRequest::start(async move {
            let mut failed: Option<Error> = None;
            for (flush, handle, changes) in out {
                match flush.await {
                    Ok(_) => drop(handle.flushed.fetch_max(changes, Ordering::SeqCst)),
                    Err(error) => {
                        // Whatever the error: the handle's writes may be lost.
                        flushes.fail(&error);
                        failed.get_or_insert(error);
                    }
                }
            }
            failed.map_or(Ok(Reply::Done), Err)
        })
    }
}
