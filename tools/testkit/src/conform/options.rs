//! How a device is checked.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_io::IoEngine;

/// How a subject is checked.
#[derive(Clone)]
pub struct ConformOptions {
    /// The initial contents of the device.
    pub content: InitialContent,
    /// Missing abilities are added by `blockhaul_block::emulate`, as callers do. Without it the
    /// device is checked with its own block sizes and only the fence before it; a [`Stack`](blockhaul_catalog::Stack) has its
    /// emulation in any case.
    pub emulate: bool,
    /// Written data can be read again. False for devices that discard writes.
    pub keeps_writes: bool,
    /// Each request takes at least this long, because the subject delays it: 64 in flight must not
    /// take much longer than one.
    pub latency: Option<Duration>,
    /// `submit` must return within this time, in the best of five attempts.
    pub submit_max: Duration,
    /// One request must complete within this.
    pub request_timeout: Duration,
    /// One check must end within this.
    pub check_timeout: Duration,
    /// Number of random sequences.
    pub rounds: usize,
    /// Number of requests in each of them.
    pub steps: usize,
    /// Checks to skip, with the reason; names as in the report.
    pub skip: Vec<(&'static str, &'static str)>,
    /// If not empty: only these checks.
    pub only: Vec<&'static str>,
    /// The seed of everything random; `None`: that of [`rng::seed`](crate::rng::seed).
    pub seed: Option<u64>,
    /// Engines to run on; uring is skipped if the kernel refuses it.
    pub engines: Vec<IoEngine>,
}

impl Default for ConformOptions {
    fn default() -> ConformOptions {
        ConformOptions {
            content: InitialContent::Any,
            emulate: true,
            keeps_writes: true,
            latency: None,
            submit_max: Duration::from_millis(50),
            request_timeout: Duration::from_secs(20),
            check_timeout: Duration::from_secs(120),
            rounds: 6,
            steps: 120,
            skip: Vec::new(),
            only: Vec::new(),
            seed: None,
            engines: vec![IoEngine::Uring, IoEngine::Threads],
        }
    }
}

impl ConformOptions {
    /// The same, without the check of this name.
    #[must_use]
    pub fn without(mut self, check: &'static str, reason: &'static str) -> ConformOptions {
        self.skip.push((check, reason));
        self
    }

    /// The same, without emulation.
    #[must_use]
    pub fn raw(mut self) -> ConformOptions {
        self.emulate = false;
        self
    }

    /// The same, for a device with these initial contents.
    #[must_use]
    pub fn content(mut self, content: InitialContent) -> ConformOptions {
        self.content = content;
        self
    }
}

/// The initial contents of a device.
#[derive(Clone)]
pub enum InitialContent {
    /// Anything, but the same on every read.
    Any,
    /// Zeroes.
    Zeroes,
    /// The byte at an offset.
    Oracle(Arc<dyn Fn(u64) -> u8 + Send + Sync>),
}

impl InitialContent {
    /// Contents by a function from offset to byte.
    pub fn oracle(byte: impl Fn(u64) -> u8 + Send + Sync + 'static) -> InitialContent {
        InitialContent::Oracle(Arc::new(byte))
    }
}
