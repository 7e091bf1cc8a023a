//! `rate`: limits the bytes per second of reads and writes, over all handles of the layer together.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_block::{Device, Error, Facts, Kind, Op, PendingRequest, Request, Result};
use blockhaul_catalog::{Layer, LayerKind, Param, ParamKind, ParamValues};
use blockhaul_io::{TokenBucket, Turn};

/// Maximum sleep before the rate is checked again for changes.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The layer `rate`.
pub static RATE: LayerKind = LayerKind {
    name: "rate",
    summary: "limits the rate of reads and writes together, in bytes per second",
    manual: "All connections together read and write at most this many bytes per second; requests pass in \
the order in which they arrive. Zero and trim requests are not counted.",
    example: r#"
blockhaul copy --source-layer 'rate?rate=100M' sample:64M null:
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        Param { name: "rate", kind: ParamKind::Rate, default: None, doc: "Bytes per second." },
        Param {
            name: "burst",
            kind: ParamKind::Size,
            default: None,
            doc: "Bytes that may pass at once after a pause [default: those of 100 ms].",
        },
    ],
    changeable: &["rate", "burst"],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let (rate, burst) = limits(args)?;
    Ok(Arc::new(RateLayer::new(Arc::new(Bucket::new(rate, burst)))))
}

/// Rate and burst.
fn limits(args: &ParamValues) -> Result<(u64, u64)> {
    let Some(rate) = args.rate("rate").filter(|&rate| rate > 0) else {
        let text = "rate: requires a rate above 0, for example rate=100M";
        return Err(Error::new(Kind::Usage, text));
    };
    Ok((rate, args.size("burst").unwrap_or(rate / 10)))
}

/// A rate layer over a bucket that its owner can change.
pub struct RateLayer {
    bucket: Arc<Bucket>,
}

impl RateLayer {
    /// A layer whose handles share this bucket.
    pub fn new(bucket: Arc<Bucket>) -> RateLayer {
        RateLayer { bucket }
    }
}

impl Layer for RateLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(RateDevice { inner, bucket: self.bucket.clone() }))
    }

    fn change(&self, args: &ParamValues) -> Result<()> {
        let (rate, burst) = limits(args)?;
        self.bucket.set(rate, burst);
        Ok(())
    }
}

struct RateDevice {
    inner: Arc<dyn Device>,
    bucket: Arc<Bucket>,
}

impl Device for RateDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if !matches!(request.op, Op::Read(_) | Op::Write(_)) {
            return self.inner.submit(request);
        }
        let turn = self.bucket.draw(request.len);
        if self.bucket.wait(turn).is_none() {
            return self.inner.submit(request);
        }
        let inner = self.inner.clone();
        let bucket = self.bucket.clone();
        PendingRequest::start(async move {
            while let Some(wait) = bucket.wait(turn) {
                blockhaul_io::sleep(wait).await;
            }
            inner.submit(request).await
        })
    }
}

/// The bytes of a rate layer: one bucket for all its handles, which others may change.
#[derive(Debug)]
pub struct Bucket(Mutex<TokenBucket>);

impl Bucket {
    /// A full bucket: `rate` bytes per second (0: nothing passes), `burst` bytes at once.
    pub fn new(rate: u64, burst: u64) -> Bucket {
        Bucket(Mutex::new(TokenBucket::new(rate, burst)))
    }

    /// Changes the rate, in bytes per second, and the bytes that may pass at once, also for requests that
    /// wait. At 0 nothing passes.
    pub fn set(&self, rate: u64, burst: u64) {
        self.lock().set(rate, burst, blockhaul_io::now());
    }

    /// A place in the queue for `len` bytes.
    pub(crate) fn draw(&self, len: u64) -> Turn {
        self.lock().draw(len, blockhaul_io::now())
    }

    /// A place whose turn it is; `None`: there is none for `len` bytes.
    pub(crate) fn draw_now(&self, len: u64) -> Option<Turn> {
        let (mut bucket, now) = (self.lock(), blockhaul_io::now());
        let turn = bucket.draw(len, now);
        let waits = bucket.wait(turn, now).is_some();
        if waits {
            bucket.give_back(turn, now);
        }
        (!waits).then_some(turn)
    }

    /// Gives back a place whose request does not go on.
    pub(crate) fn give_back(&self, turn: Turn) {
        self.lock().give_back(turn, blockhaul_io::now());
    }

    /// Tokens that may pass at once.
    pub(crate) fn burst(&self) -> u64 {
        self.lock().burst()
    }

    /// How long to wait before asking again; `None`: it is this one's turn.
    pub(crate) fn wait(&self, turn: Turn) -> Option<Duration> {
        let wait = self.lock().wait(turn, blockhaul_io::now());
        wait.map(|wait| wait.min(LOOK_AGAIN))
    }

    fn lock(&self) -> MutexGuard<'_, TokenBucket> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
