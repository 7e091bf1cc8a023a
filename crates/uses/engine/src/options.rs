//! How to copy, and what came of it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::Algorithm;
use crate::journal::JournalOptions;
use crate::rate::Rate;
use crate::route_counters::Routes;

/// Bytes of a segment: the unit that is written by one lane (libnbd's THREAD_WORK_SIZE).
pub const SEGMENT: u64 = 128 << 20;
/// Smallest request size that may be asked for, in bytes.
pub const MIN_REQUEST: u32 = 4096;
/// Largest request size that may be asked for, in bytes.
pub const MAX_REQUEST: u32 = 32 << 20;

/// How to copy. The defaults are nbdcopy's but for the number of connections, which does not depend
/// on the number of cores, and the size of requests.
#[derive(Debug, Clone)]
pub struct Options {
    /// Lanes: connections to each side; at least 1.
    pub connections: usize,
    /// Find out how many lanes pay, from 1 up to 16, beginning with one per processor and at most
    /// `connections`; where requests take long, with these. Otherwise use as many as that.
    pub adaptive_connections: bool,
    /// When more than one lane is used with devices whose connections are of their own.
    pub multi_conn: MultiConn,
    /// Most requests in flight per lane; at least 1.
    pub requests: usize,
    /// Find out how many requests in flight pay, up to `requests`; otherwise always use that many.
    pub adaptive: bool,
    /// Bytes per read and write; a power of two from [`MIN_REQUEST`] to [`MAX_REQUEST`].
    pub request_size: u32,
    /// Find out what size of requests pays, from 64 KiB to 8 MiB, beginning with `request_size`; otherwise
    /// use that.
    pub adaptive_size: bool,
    /// Bytes in flight per lane.
    pub queue_size: u64,
    /// Runs of zeroes of at least this many bytes, so aligned, are zeroed instead of written; a power
    /// of two from 512 on, or 0: bytes are not looked at.
    pub sparse: u32,
    /// Look for zeroes only in a sample where the source told its extents: in one request in 16, and,
    /// where zeroes turn up, in the rest of that segment and in the next. What nobody looks at may
    /// stay in the kernel on its way.
    pub sampled: bool,
    /// Keep the target allocated: zeroes do not make holes.
    pub allocated: bool,
    /// The target is known to read as zeroes: zeroes need not be written.
    pub target_is_zero: bool,
    /// That is not to be checked on a sample.
    pub trust_zero: bool,
    /// Ask both sides for extents: what is data, and what the target has as zeroes already.
    pub extents: bool,
    /// Zero all that is zero, segment by segment, without asking the target what it has: for tools whose
    /// requests this one is to repeat.
    pub zero_all: bool,
    /// What of the source is copied, to the same place on the target: offsets and lengths in bytes,
    /// ascending, apart from each other. `None`: all.
    pub ranges: Option<Arc<[(u64, u64)]>>,
    /// Of that, copy only what this bitmap of the source says.
    pub bitmap: Option<Bitmap>,
    /// Make the target durable before returning.
    pub flush: bool,
    /// One request at a time, in order.
    pub synchronous: bool,
    /// Bytes of a segment; a power of two from [`MAX_REQUEST`] on is sensible, anything from 64 KiB on
    /// works.
    pub segment: u64,
    /// Make segments smaller where a disk has too few of them for all connections.
    pub spread: bool,
    /// How often a request is repeated, and a lost connection dialled again, before the copy fails;
    /// 0: never.
    pub retries: u32,
    /// Time before a lost connection is made a second time; doubles each time, up to
    /// [`RETRY_DELAY_MAX`]. What fails on a connection that stands is repeated sooner.
    pub retry_delay: Duration,
    /// Keep a journal, so that a copy that was killed goes on where it was.
    pub journal: Option<JournalOptions>,
    /// Whether the kernel may copy between two files by itself.
    pub by_kernel: ByKernel,
    /// A limit for all lanes together; keep a handle on it to change it.
    pub rate: Option<Arc<Rate>>,
    /// Compute the digest of what was copied: while copying where that is cheap, else by reading the
    /// source once more.
    pub digest: Option<Algorithm>,
}

/// When several connections to a server are used. Whether a server promises that all its connections
/// show one disk (NBD's multi-conn) is in the facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MultiConn {
    /// Where the server promises it, and else after the further connection was seen to show what was
    /// read and written over the first.
    #[default]
    Auto,
    /// Also where the server does not promise it, without a check.
    Always,
    /// Only where the server promises it.
    Advertised,
}

/// Whether the kernel may copy by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ByKernel {
    /// Where it is cheaper than reading and writing: reflink; else copy_file_range between files of a
    /// network's file system, and between others where it was found to be the faster way.
    #[default]
    Auto,
    /// Never.
    Never,
    /// No reflink, but copy_file_range between any two files. For tests.
    CopyRange,
}

/// A metadata context that says what to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bitmap {
    /// Its name; the source must have been opened with it.
    pub context: String,
    /// What has any of these flags set is copied.
    pub mask: u64,
}

/// Bytes of buffers that a copy uses by default: with what the program needs besides and what is read
/// back after a connection was lost, less than 64 MiB.
const MEMORY: u64 = 36 << 20;

impl Options {
    /// Bytes of buffers that a copy can make use of, for [`blockhaul_io::Pool::new`]: the window of every lane in
    /// full and two requests to spare for each, but not more than 36 MiB where neither lanes nor the
    /// window are larger than usual.
    pub fn memory(&self) -> u64 {
        let usual = Options::default();
        let requests = 2 * u64::from(self.request_size);
        let lanes = u64::try_from(self.connections).unwrap_or(u64::MAX);
        let whole = self.queue_size.saturating_add(requests).saturating_mul(lanes);
        match self.connections <= usual.connections && self.queue_size <= usual.queue_size {
            true => whole.min(MEMORY.max(requests.saturating_mul(lanes))),
            false => whole,
        }
    }
}

/// Longest time between repetitions: a server that is back is noticed within half a minute.
pub const RETRY_DELAY_MAX: Duration = Duration::from_secs(30);

impl Default for Options {
    fn default() -> Options {
        Options {
            connections: 4,
            adaptive_connections: true,
            multi_conn: MultiConn::Auto,
            requests: 64,
            adaptive: true,
            // Between two qemu-nbd a fifth faster than nbdcopy's 256 KiB, elsewhere the same; the
            // largest that stays in the kernel.
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
            synchronous: false,
            segment: SEGMENT,
            spread: true,
            retries: 0,
            retry_delay: Duration::from_secs(1),
            journal: None,
            by_kernel: ByKernel::Auto,
            rate: None,
            digest: None,
        }
    }
}

/// What a copy has done.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Bytes that were to be copied.
    pub size: u64,
    /// Bytes written as data.
    pub data: u64,
    /// Bytes zeroed on the target.
    pub zeroed: u64,
    /// Bytes that the target had as zeroes already.
    pub skipped: u64,
    /// Bytes that an earlier run had copied.
    pub resumed: u64,
    /// Lanes that were in use.
    pub lanes: usize,
    /// Requests that they could have in flight in the end, all together.
    pub requests: usize,
    /// Bytes of a request in the end.
    pub request_size: u64,
    /// Which ways the bytes went.
    pub routes: Routes,
    /// What did not work the first time.
    pub retried: Retried,
    /// The digest that was asked for, in hexadecimal.
    pub digest: Option<String>,
    /// Time it took.
    pub elapsed: Duration,
    /// What the user should know although the copy succeeded; has been logged as it arose.
    pub warnings: Vec<String>,
}

/// What was repeated in a copy that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retried {
    /// Requests to the source that were repeated.
    pub source_requests: u64,
    /// Requests to the target that were repeated.
    pub target_requests: u64,
    /// Connections to the source that were replaced.
    pub source_connections: u64,
    /// Connections to the target that were replaced.
    pub target_connections: u64,
    /// Bytes written over connections that were lost, which were read back and compared.
    pub checked: u64,
    /// Bytes that were written again because they were not there, or may not have been durable.
    pub rewritten: u64,
}

impl Retried {
    /// What was repeated since `before`.
    fn since(self, before: Retried) -> Retried {
        Retried {
            source_requests: self.source_requests - before.source_requests,
            target_requests: self.target_requests - before.target_requests,
            source_connections: self.source_connections - before.source_connections,
            target_connections: self.target_connections - before.target_connections,
            checked: self.checked - before.checked,
            rewritten: self.rewritten - before.rewritten,
        }
    }

    /// Whether anything had to be done twice. That a journal's last segments were read back, and
    /// found to be as they should, is no trouble.
    pub fn is_trouble(&self) -> bool {
        *self != Retried { checked: self.checked, ..Retried::default() }
    }
}

impl Summary {
    /// What was done since `before`; size of requests, connections and warnings are those of now.
    pub(crate) fn since(self, before: &Summary) -> Summary {
        Summary {
            size: self.size.saturating_sub(before.size),
            data: self.data - before.data,
            zeroed: self.zeroed - before.zeroed,
            skipped: self.skipped - before.skipped,
            resumed: self.resumed - before.resumed,
            routes: self.routes.since(&before.routes),
            retried: self.retried.since(before.retried),
            warnings: self.warnings.get(before.warnings.len()..).unwrap_or_default().to_vec(),
            ..self
        }
    }
}

impl fmt::Display for Retried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_trouble() {
            write!(
                f,
                "retried: {} requests and {} connections of the source, {} and {} of the target",
                self.source_requests,
                self.source_connections,
                self.target_requests,
                self.target_connections
            )?;
        }
        match (self.checked, self.rewritten) {
            (0, 0) => Ok(()),
            (checked, rewritten) => {
                let between = if self.is_trouble() { "; " } else { "" };
                write!(f, "{between}read back {checked} bytes, wrote {rewritten} again")
            }
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What this run has done.
        let done = self.data + self.zeroed + self.skipped;
        write!(
            f,
            "{} bytes: {} data, {} zeroed, {} skipped, {} lanes, {} requests of {} bytes, {:.3} s, \
             {:.1} MiB/s",
            self.size,
            self.data,
            self.zeroed,
            self.skipped,
            self.lanes,
            self.requests,
            self.request_size,
            self.elapsed.as_secs_f64(),
            done as f64 / self.elapsed.as_secs_f64().max(1e-6) / f64::from(1 << 20)
        )?;
        if self.resumed > 0 {
            write!(f, "; {} bytes of an earlier run", self.resumed)?;
        }
        write!(f, "; routes: {}", self.routes)?;
        match self.retried == Retried::default() {
            true => Ok(()),
            false => write!(f, "; {}", self.retried),
        }
    }
}
