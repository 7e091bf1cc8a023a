//! The options and the summary of a copy.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::DigestAlgorithm;
use crate::journal::JournalOptions;
use crate::manifest::BLOCK;
use crate::rate::RateLimit;
use crate::route_counters::RouteBytes;
use crate::segment::SEGMENT;

/// Smallest allowed request size in bytes.
pub const MIN_REQUEST: u32 = 4096;
/// Largest allowed request size in bytes.
pub const MAX_REQUEST: u32 = 32 << 20;
/// Maximum number of lanes to try if the number is not given.
const CONNECTIONS_MAX: usize = 16;

/// How to copy. The defaults are nbdcopy's, except for the number of connections, which does not
/// depend on the number of cores, and the request size.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Lanes: connections to each side; at least 1.
    pub connections: usize,
    /// Find the best number of lanes, from 1 to `connections_max`, starting with one per processor and at
    /// most `connections`, or with `connections` if requests take long. Otherwise use `connections`.
    pub adaptive_connections: bool,
    /// Maximum number of lanes of `adaptive_connections`; never less than `connections`.
    pub connections_max: usize,
    /// When to use more than one lane with devices whose connections are separate.
    pub multi_conn: MultiConn,
    /// Maximum requests in flight per lane; at least 1.
    pub requests: usize,
    /// Find the best number of requests in flight, up to `requests`; otherwise use `requests`.
    pub adaptive: bool,
    /// Bytes per read and write; a power of two from [`MIN_REQUEST`] to [`MAX_REQUEST`].
    pub request_size: u32,
    /// Find the best request size, from 64 KiB to 8 MiB, starting with `request_size`; otherwise
    /// use `request_size`.
    pub adaptive_size: bool,
    /// Maximum bytes in flight per lane.
    pub queue_size: u64,
    /// Zero runs of at least this many bytes, aligned to it, instead of writing them; a power of
    /// two of at least 512, or 0: do not check for zeroes.
    pub sparse: u32,
    /// If the source reports extents, check only a sample for zeroes: one request in 16 and, where
    /// zeroes are found, the rest of that segment and the next one. Data that is not inspected may
    /// stay in the kernel.
    pub sampled: bool,
    /// Keep the target allocated: zeroes do not make holes.
    pub allocated: bool,
    /// Assume that the target reads as zeroes: zeroes need not be written.
    pub target_is_zero: bool,
    /// Do not verify that assumption on a sample.
    pub trust_zero: bool,
    /// Request extents of both sides: what is data, and what is already zero on the target.
    pub extents: bool,
    /// Zero everything that is zero, segment by segment, without asking the target: for tools that
    /// must send the same requests.
    pub zero_all: bool,
    /// The ranges of the source to copy, to the same place on the target: offsets and lengths in
    /// bytes, ascending and disjoint. `None`: everything.
    pub ranges: Option<Arc<[(u64, u64)]>>,
    /// Copy only the part of that which this bitmap of the source selects.
    pub bitmap: Option<BitmapSelection>,
    /// Flush the target before returning.
    pub flush: bool,
    /// Discard at the source what is safe on the target, while the copy runs: written, flushed, and
    /// recorded if there is a journal. Flushes the target, about each second without a journal. The
    /// source must be writable and able to trim, the target able to flush; see [`check_discard`]. Until
    /// all else is copied, a block of the target has a marker, which shows that both are still those disks.
    ///
    /// [`check_discard`]: crate::check_discard
    pub discard_source: bool,
    /// Discard without a marker on the target: the source is a snapshot, and the disk itself stays.
    pub no_marker: bool,
    /// One request at a time, in order.
    pub synchronous: bool,
    /// Bytes of a segment; best a power of two of at least [`MAX_REQUEST`], anything from 64 KiB
    /// works.
    pub segment: u64,
    /// Use smaller segments if a disk has too few of them for all connections.
    pub spread: bool,
    /// How often a request is retried, and a lost connection redialled, before the copy fails; 0:
    /// never.
    pub retries: u32,
    /// Delay before a lost connection is redialled a second time; doubles each time, up to
    /// [`RETRY_DELAY_MAX`]. Failures on a working connection are retried sooner.
    pub retry_delay: Duration,
    /// Called with what has become durable on the target. Flushes the target, about each second
    /// without a journal.
    pub durable: Option<DurableCallback>,
    /// Write a journal, so that a copy that was killed can continue.
    pub journal: Option<JournalOptions>,
    /// Whether the kernel may copy between two files.
    pub by_kernel: KernelCopyMode,
    /// A limit for all lanes together; the caller can change it through its own handle.
    pub rate: Option<Arc<RateLimit>>,
    /// Compute the digest of the copied data: while copying if that is cheap, otherwise by reading
    /// the source once more.
    pub digest: Option<DigestAlgorithm>,
}

/// What [`DurableCallback`] calls.
type DurableListener = dyn Fn(&[(u64, u64)]) + Send + Sync;

/// Is called, from any worker, with ranges that were written and then flushed: start and end in bytes.
/// Must not block. A range may be reported more than once.
#[derive(Clone)]
pub struct DurableCallback(pub Arc<DurableListener>);

impl std::fmt::Debug for DurableCallback {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("DurableCallback")
    }
}

/// When to use several connections to a server. Whether the server promises that all its
/// connections show one disk (NBD's multi-conn) is in the facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MultiConn {
    /// If the server promises it, or the further connection shows the same data as the first one
    /// read and wrote.
    #[default]
    Auto,
    /// Even if the server does not promise it, without a check.
    Always,
    /// Only if the server promises it.
    Advertised,
}

/// Whether the kernel may copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelCopyMode {
    /// If it is cheaper than reading and writing: reflink; otherwise copy_file_range between files
    /// of a network file system, and between others if it was measured to be faster.
    #[default]
    Auto,
    /// Never.
    Never,
    /// No reflink, but copy_file_range between any two files. For tests.
    CopyRange,
}

/// A metadata context that selects what to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BitmapSelection {
    /// Its name; the source must have been opened with it.
    pub context: String,
    /// Copy what has any of these flags set.
    pub mask: u64,
}

/// Default size of a copy's buffers in bytes: less than 64 MiB with the rest of the program and the
/// data read back after a lost connection.
const MEMORY: u64 = 36 << 20;

/// What a verification or a digest needs at least, in bytes: a block of each side.
const READING: u64 = 2 * BLOCK;

impl EngineOptions {
    /// Bytes of buffers that a copy can use, for [`blockhaul_io::Pool::new`]: the full window of
    /// every lane and two spare requests for each, but at most 36 MiB unless lanes or window exceed
    /// the defaults, and at least 512 KiB, so that the result can be verified.
    pub fn memory(&self) -> u64 {
        let usual = EngineOptions::default();
        let requests = 2 * u64::from(self.request_size);
        let lanes = u64::try_from(self.connections).unwrap_or(u64::MAX);
        let whole = self.queue_size.saturating_add(requests).saturating_mul(lanes);
        let is_usual = self.connections <= usual.connections && self.queue_size <= usual.queue_size;
        let most = if is_usual { MEMORY.max(requests.saturating_mul(lanes)) } else { u64::MAX };
        whole.min(most).max(READING)
    }
}

/// Maximum time between retries: the copy notices within half a minute that a server is back.
pub const RETRY_DELAY_MAX: Duration = Duration::from_secs(30);

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            connections: 4,
            adaptive_connections: true,
            connections_max: CONNECTIONS_MAX,
            multi_conn: MultiConn::Auto,
            requests: 64,
            adaptive: true,
            // A fifth faster than nbdcopy's 256 KiB between two qemu-nbd, elsewhere the same; the
            // largest size that stays in the kernel.
            request_size: 512 << 10,
            adaptive_size: true,
            queue_size: 16 << 20,
            sparse: 4096,
            sampled: true,
            allocated: false,
            target_is_zero: false,
            trust_zero: false,
            extents: true,
            zero_all: false,
            ranges: None,
            bitmap: None,
            flush: false,
            discard_source: false,
            no_marker: false,
            synchronous: false,
            segment: SEGMENT,
            spread: true,
            retries: 0,
            retry_delay: Duration::from_secs(1),
            durable: None,
            journal: None,
            by_kernel: KernelCopyMode::Auto,
            rate: None,
            digest: None,
        }
    }
}

/// The result of a copy.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct CopySummary {
    /// Bytes to copy.
    pub size: u64,
    /// Bytes written as data.
    pub data: u64,
    /// Bytes zeroed on the target.
    pub zeroed: u64,
    /// Bytes that were already zero on the target.
    pub skipped: u64,
    /// Bytes that an earlier run had copied.
    pub resumed: u64,
    /// Bytes discarded at the source.
    pub discarded: u64,
    /// Bytes that could not be discarded there, because it failed or refused to.
    pub not_discarded: u64,
    /// Number of lanes used.
    pub lanes: usize,
    /// Requests that all lanes together could have in flight at the end.
    pub requests: usize,
    /// Request size in bytes at the end.
    pub request_size: u64,
    /// Bytes by route.
    pub routes: RouteBytes,
    /// What was retried.
    pub retried: RetryCounts,
    /// The requested digest, in hexadecimal.
    pub digest: Option<String>,
    /// Elapsed time.
    pub elapsed: Duration,
    /// Warnings of a copy that succeeded; each was logged when it arose.
    pub warnings: Vec<String>,
    /// The journal stays, and records that everything is copied: something was discarded at the source.
    pub journal_stays: bool,
}

/// Retries of a copy that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RetryCounts {
    /// Repeated requests to the source.
    pub source_requests: u64,
    /// Repeated requests to the target.
    pub target_requests: u64,
    /// Replaced connections to the source.
    pub source_connections: u64,
    /// Replaced connections to the target.
    pub target_connections: u64,
    /// Bytes written over lost connections that were read back and compared.
    pub checked: u64,
    /// Bytes written again because they were missing, or may not have been durable.
    pub rewritten: u64,
}

impl RetryCounts {
    /// The difference to `before`.
    fn since(self, before: RetryCounts) -> RetryCounts {
        RetryCounts {
            source_requests: self.source_requests - before.source_requests,
            target_requests: self.target_requests - before.target_requests,
            source_connections: self.source_connections - before.source_connections,
            target_connections: self.target_connections - before.target_connections,
            checked: self.checked - before.checked,
            rewritten: self.rewritten - before.rewritten,
        }
    }

    /// Whether anything had to be repeated. Reading back a journal's last segments successfully
    /// does not count.
    pub fn is_trouble(&self) -> bool {
        *self != RetryCounts { checked: self.checked, ..RetryCounts::default() }
    }
}

impl CopySummary {
    /// The difference to `before`; request size, connections and warnings are the current ones.
    pub(crate) fn since(self, before: &CopySummary) -> CopySummary {
        CopySummary {
            size: self.size.saturating_sub(before.size),
            data: self.data - before.data,
            zeroed: self.zeroed - before.zeroed,
            skipped: self.skipped - before.skipped,
            resumed: self.resumed - before.resumed,
            discarded: self.discarded - before.discarded,
            not_discarded: self.not_discarded - before.not_discarded,
            routes: self.routes.since(&before.routes),
            retried: self.retried.since(before.retried),
            warnings: self.warnings.get(before.warnings.len()..).unwrap_or_default().to_vec(),
            ..self
        }
    }
}

/// A number with its noun: `1 request`, `2 requests`.
fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

impl fmt::Display for RetryCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sides = [
            (self.source_requests, self.source_connections, "source"),
            (self.target_requests, self.target_connections, "target"),
        ];
        let mut between = "retried ";
        for (requests, connections, side) in sides {
            let repeated = match (requests, connections) {
                (0, 0) => continue,
                (requests, 0) => counted(requests, "request"),
                (0, connections) => counted(connections, "connection"),
                _ => format!(
                    "{} and {}",
                    counted(requests, "request"),
                    counted(connections, "connection")
                ),
            };
            write!(f, "{between}{repeated} of the {side}")?;
            between = ", ";
        }
        match (self.checked, self.rewritten) {
            (0, 0) => Ok(()),
            (checked, rewritten) => {
                let between = if between == ", " { "; " } else { "" };
                write!(f, "{between}read back {checked} bytes, rewrote {rewritten}")
            }
        }
    }
}

impl fmt::Display for CopySummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What this run has done.
        let done = self.data + self.zeroed + self.skipped;
        write!(
            f,
            "{} bytes: {} data, {} zeroed, {} skipped, {}, {} of {} bytes, {:.3} s, {:.1} MiB/s",
            self.size,
            self.data,
            self.zeroed,
            self.skipped,
            counted(self.lanes as u64, "connection"),
            counted(self.requests as u64, "request"),
            self.request_size,
            self.elapsed.as_secs_f64(),
            done as f64 / self.elapsed.as_secs_f64().max(1e-6) / f64::from(1 << 20)
        )?;
        if self.resumed > 0 {
            write!(f, "; {} bytes of an earlier run", self.resumed)?;
        }
        if self.discarded + self.not_discarded > 0 {
            write!(f, "; {} bytes discarded at the source", self.discarded)?;
        }
        if self.not_discarded > 0 {
            write!(f, ", {} could not be", self.not_discarded)?;
        }
        write!(f, "; routes: {}", self.routes)?;
        if self.retried == RetryCounts::default() {
            Ok(())
        } else {
            write!(f, "; {}", self.retried)
        }
    }
}
