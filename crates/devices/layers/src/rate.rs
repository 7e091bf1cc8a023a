//! `rate`: limits the bytes per second of reads and writes, over all handles of the layer together.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockhaul_block::{Device, Error, Facts, Kind, Op, Pending, Request, Result};
use blockhaul_catalog::{Args, Layer, LayerKind, Param, ParamKind};

/// Maximum sleep before the rate is checked again for changes.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The layer `rate`.
pub static RATE: LayerKind = LayerKind {
    name: "rate",
    summary: "limits the bytes per second of reads and writes together",
    manual: "All connections together read and write at most so many bytes per second; \
     requests pass in the order in which they came. Zeroes and trims are not counted.",
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
            doc: "Bytes that may pass at once after a pause; without it, those of 100 ms.",
        },
    ],
    changeable: &["rate", "burst"],
    configure: |args| configure(args),
};

fn configure(args: &Args) -> Result<Arc<dyn Layer>> {
    let (rate, burst) = limits(args)?;
    Ok(Arc::new(RateLayer::new(Arc::new(Bucket::new(rate, burst)))))
}

/// Rate and burst.
fn limits(args: &Args) -> Result<(u64, u64)> {
    let Some(rate) = args.rate("rate").filter(|&rate| rate > 0) else {
        let text = "rate: needs a rate above 0, for example rate=100M";
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

    fn change(&self, args: &Args) -> Result<()> {
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

    fn submit(&self, request: Request) -> Pending {
        if !matches!(request.op, Op::Read(_) | Op::Write(_)) {
            return self.inner.submit(request);
        }
        let turn = self.bucket.draw(request.len);
        if self.bucket.wait(turn).is_none() {
            return self.inner.submit(request);
        }
        let (inner, bucket) = (self.inner.clone(), self.bucket.clone());
        Pending::start(async move {
            while let Some(wait) = bucket.wait(turn) {
                blockhaul_io::sleep(wait).await;
            }
            inner.submit(request).await
        })
    }
}

/// A token bucket: bytes are added at a rate, and a request waits for as many as it needs.
///
/// A request draws a number, the count of all bytes requested so far, and passes when as many have
/// been added; so requests pass in order of arrival, and a change of rate also applies to those
/// that wait.
#[derive(Debug)]
pub struct Bucket(Mutex<State>);

#[derive(Debug)]
struct State {
    rate: u64,
    burst: u64,
    /// Bytes requested since the start.
    asked: f64,
    /// Bytes added since the start, at most `burst` more than were requested.
    come: f64,
    updated: Instant,
}

impl Bucket {
    /// A full bucket: `rate` bytes per second (0: nothing passes), `burst` bytes at once.
    pub fn new(rate: u64, burst: u64) -> Bucket {
        let come = burst as f64;
        Bucket(Mutex::new(State { rate, burst, asked: 0.0, come, updated: blockhaul_io::now() }))
    }

    /// Changes the rate, in bytes per second, also for waiting requests; 0 stops them.
    pub fn set_rate(&self, rate: u64) {
        let burst = self.lock().burst;
        self.set(rate, burst);
    }

    /// Changes the rate, in bytes per second, and the burst.
    pub fn set(&self, rate: u64, burst: u64) {
        let mut state = self.lock();
        state.update(blockhaul_io::now());
        (state.rate, state.burst) = (rate, burst);
    }

    /// The rate in bytes per second.
    pub fn rate(&self) -> u64 {
        self.lock().rate
    }

    /// A place in the queue for `len` bytes.
    fn draw(&self, len: u64) -> f64 {
        let mut state = self.lock();
        state.update(blockhaul_io::now());
        state.asked += len as f64;
        state.asked
    }

    /// How long to wait before the next check; `None`: the request may pass.
    fn wait(&self, turn: f64) -> Option<Duration> {
        let mut state = self.lock();
        state.update(blockhaul_io::now());
        let missing = turn - state.come;
        // Less than a byte is a rounding error.
        if missing < 1.0 {
            return None;
        }
        let wait = Duration::try_from_secs_f64(missing / state.rate as f64);
        Some(wait.unwrap_or(LOOK_AGAIN).clamp(Duration::from_micros(50), LOOK_AGAIN))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn update(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.updated);
        let come = self.come + passed.as_secs_f64() * self.rate as f64;
        self.come = come.min(self.asked + self.burst as f64);
        self.updated = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_in_at_the_rate_and_no_more_than_the_burst_ahead() {
        let start = Instant::now();
        let (rate, burst) = (1_000_000, 64_000);
        let (asked, come) = (1e6, burst as f64);
        let mut state = State { rate, burst, asked, come, updated: start };
        for ms in 0..=1200 {
            state.update(start + Duration::from_millis(ms));
            let due = (64_000.0 + 1000.0 * ms as f64).min(1_064_000.0);
            assert!((state.come - due).abs() < 1.0, "{} instead of {due} in {ms} ms", state.come);
        }
    }
}
