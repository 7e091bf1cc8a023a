//! `scan`: sends hints for the whole device in the background, so that caches below fill before
//! clients read.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use blockhaul_block::{
    Can, Device, Facts, FileRange, LeaseAccess, Op, PendingRequest, Request, Result,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use crate::layers::hint::hint;
use blockhaul_layers::support::{opened, param_or, usage};

/// Pause between two rounds with `scan-forever`, and while nothing is open.
const PAUSE: Duration = Duration::from_secs(1);

/// The layer `scan`.
pub static SCAN: LayerKind = LayerKind {
    name: "scan",
    summary: "fills caches below by sending cache hints for the whole device in the background",
    manual: "While a client is connected, the device below gets cache hints from its start to its end, one \
after the other, `scan-size` at a time. With `scan-ahead=on`, parts that a client has already \
read past are skipped. A scan continues where the last client left, or starts again with \
`scan-clock=off`; `scan-forever=on` starts again at the end. The device or a layer below must \
act on hints, as for `readahead`.",
    example: r#"
blockhaul copy sample:64M disk.raw
blockhaul serve --layer 'scan?scan-size=4M' disk.raw --run 'blockhaul checksum "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        param_or(
            "scan-size",
            ParamKind::Size,
            "2M",
            "Size of each hint; a power of two, 512 to 32M.",
        ),
        param_or(
            "scan-ahead",
            ParamKind::Switch,
            "on",
            "Skip ranges that clients have already read.",
        ),
        param_or("scan-clock", ParamKind::Switch, "on", "Continue where the last scan stopped."),
        param_or("scan-forever", ParamKind::Switch, "off", "Start again when the end is reached."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let size = args.size("scan-size").unwrap_or(2 << 20);
    if !size.is_power_of_two() || !(512..=32 << 20).contains(&size) {
        return Err(usage("scan: scan-size must be a power of two from 512 to 32M"));
    }
    let ahead = args.switch("scan-ahead");
    let clock = args.switch("scan-clock");
    let forever = args.switch("scan-forever");
    let clock_hand = Arc::new(AtomicU64::new(0));
    opened(move |below| {
        let inner = below.device;
        let facts = inner.facts();
        if !facts.can.contains(Can::CACHE) {
            return Err(usage(format!(
                "scan: {} ignores cache hints: put nocache?cachemode=emulate below",
                facts.name
            )));
        }
        let round = Arc::new(ScanRound {
            size,
            ahead,
            forever,
            read: AtomicU64::new(0),
            hand: if clock { clock_hand.clone() } else { Arc::default() },
            over: AtomicBool::new(false),
        });
        Ok(Arc::new(ScanDevice { inner, round, started: Mutex::new(false) }))
    })
}

struct ScanRound {
    size: u64,
    ahead: bool,
    forever: bool,
    /// How far a client has read.
    read: AtomicU64,
    /// The next hint.
    hand: Arc<AtomicU64>,
    over: AtomicBool,
}

impl ScanRound {
    /// Holds the device below only while a hint is in flight: the device closes with the layer, and
    /// a cache below then writes its data back.
    async fn run(&self, inner: Weak<dyn Device>, size: u64) {
        while !self.over.load(Ordering::Relaxed) {
            let mut at = self.hand.load(Ordering::Relaxed);
            if self.ahead {
                let read = self.read.load(Ordering::Relaxed);
                at = at.max(read - read % self.size);
            }
            if at >= size {
                if !self.forever {
                    return;
                }
                self.hand.store(0, Ordering::Relaxed);
                self.read.store(0, Ordering::Relaxed);
                blockhaul_io::sleep(PAUSE).await;
                continue;
            }
            let len = self.size.min(size - at);
            self.hand.store(at + len, Ordering::Relaxed);
            let Some(device) = inner.upgrade() else { return };
            if hint(device, at, len).await != Ok(true) {
                // A failed hint does no harm, but there is no need to hurry.
                blockhaul_io::sleep(PAUSE).await;
            }
            // Clients come first.
            blockhaul_io::yield_now().await;
        }
    }
}

struct ScanDevice {
    inner: Arc<dyn Device>,
    round: Arc<ScanRound>,
    /// The background task runs; it is started by the first request, on a worker.
    started: Mutex<bool>,
}

impl Device for ScanDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if let (Op::Read(_), Some(end)) = (&request.op, request.end()) {
            self.round.read.store(end, Ordering::Relaxed);
        }
        let first = {
            let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
            !std::mem::replace(&mut *started, true)
        };
        if first {
            let round = self.round.clone();
            let inner = Arc::downgrade(&self.inner);
            let size = self.inner.facts().size;
            drop(blockhaul_io::spawn(async move { round.run(inner, size).await }));
        }
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}

impl Drop for ScanDevice {
    fn drop(&mut self) {
        self.round.over.store(true, Ordering::Relaxed);
    }
}
