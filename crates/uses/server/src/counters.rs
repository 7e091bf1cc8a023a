//! Counters: requests per connection, and request times per worker. Only the worker that serves a
//! connection writes its counters, so that no locks are needed; readers add them up. Connections that
//! several workers serve have functions of their own.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockhaul_block::{LatencyCounters, LatencySnapshot, OpKind};
use blockhaul_wire::request::CommandCode;

/// Kinds of requests.
const KINDS: usize = OpKind::ALL.len();

/// Requests of a connection, or of several together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionCounts {
    /// Answered requests, in the order of [`OpKind::ALL`].
    pub requests: [u64; KINDS],
    /// Bytes of successful requests: read, written, zeroed, trimmed, cached; none for the others.
    pub bytes: [u64; KINDS],
    /// Requests answered with an error, including invalid commands.
    pub errors: u64,
    /// Requests in flight at devices.
    pub in_flight: u64,
}

impl AddAssign for ConnectionCounts {
    fn add_assign(&mut self, other: ConnectionCounts) {
        for kind in 0..KINDS {
            self.requests[kind] += other.requests[kind];
            self.bytes[kind] += other.bytes[kind];
        }
        self.errors += other.errors;
        self.in_flight += other.in_flight;
    }
}

/// The counters behind [`ConnectionCounts`].
#[derive(Debug, Default)]
pub(crate) struct ConnectionCounters {
    requests: [Counter; KINDS],
    bytes: [Counter; KINDS],
    errors: Counter,
    in_flight: Counter,
}

/// A number that one thread changes and all may read.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    fn add(&self, count: u64) {
        // Not a locked instruction: there is no other writer.
        self.set(self.get().wrapping_add(count));
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// For a counter that several threads change, all of them with this.
    fn add_among_many(&self, count: u64) {
        // Wraps around: a negative count is the complement.
        self.0.fetch_add(count, Ordering::Relaxed);
    }
}

impl ConnectionCounters {
    /// A request was answered; `bytes` is none for one that failed.
    pub(crate) fn answered(&self, kind: OpKind, bytes: Option<u64>) {
        self.requests[kind as usize].add(1);
        match bytes {
            Some(bytes) => self.bytes[kind as usize].add(bytes),
            None => self.errors.add(1),
        }
    }

    /// As [`ConnectionCounters::answered`], for a connection that several workers serve.
    pub(crate) fn answered_by_many(&self, kind: OpKind, bytes: Option<u64>) {
        self.requests[kind as usize].add_among_many(1);
        match bytes {
            Some(bytes) => self.bytes[kind as usize].add_among_many(bytes),
            None => self.errors.add_among_many(1),
        }
    }

    /// One more request is in progress, for a connection that several workers serve.
    pub(crate) fn one_more_in_progress(&self) {
        self.in_flight.add_among_many(1);
    }

    /// One of them has ended.
    pub(crate) fn one_less_in_progress(&self) {
        self.in_flight.add_among_many(u64::MAX);
    }

    /// A request was refused without further processing.
    pub(crate) fn refused(&self) {
        self.errors.add(1);
    }

    /// Sets the number of requests in progress.
    pub(crate) fn in_progress(&self, count: usize) {
        self.in_flight.set(count as u64);
    }

    pub(crate) fn counts(&self) -> ConnectionCounts {
        let mut bytes = self.bytes.each_ref().map(Counter::get);
        // The lengths of these are not transferred bytes.
        bytes[OpKind::Flush as usize] = 0;
        bytes[OpKind::Extents as usize] = 0;
        ConnectionCounts {
            requests: self.requests.each_ref().map(Counter::get),
            bytes,
            errors: self.errors.get(),
            in_flight: self.in_flight.get(),
        }
    }
}

/// The kind of a request; none for commands that do not reach a device.
pub(crate) fn kind(command: CommandCode) -> Option<OpKind> {
    Some(match command {
        CommandCode::Read => OpKind::Read,
        CommandCode::Write => OpKind::Write,
        CommandCode::WriteZeroes => OpKind::Zero,
        CommandCode::Trim => OpKind::Trim,
        CommandCode::Flush => OpKind::Flush,
        CommandCode::Cache => OpKind::Cache,
        CommandCode::BlockStatus => OpKind::Extents,
        CommandCode::Disconnect | CommandCode::Other(_) => return None,
    })
}

/// Times by kind of request. Each worker has one.
#[repr(align(64))]
#[derive(Debug, Default)]
pub(crate) struct RequestTimes([LatencyCounters; KINDS]);

impl RequestTimes {
    /// Records a request that took `time`, for `count` requests.
    pub(crate) fn took(&self, kind: OpKind, time: Duration, count: u64) {
        self.0[kind as usize].record(time, count);
    }

    /// The sum over all workers, by kind.
    pub(crate) fn sum<'a>(all: impl Iterator<Item = &'a RequestTimes>) -> [LatencySnapshot; KINDS] {
        let mut sum = [LatencySnapshot::default(); KINDS];
        for times in all {
            for (sum, times) in sum.iter_mut().zip(&times.0) {
                *sum += times.read();
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up() {
        let one = ConnectionCounters::default();
        let two = ConnectionCounters::default();
        one.answered(OpKind::Read, Some(4096));
        one.answered(OpKind::Read, None);
        one.in_progress(3);
        two.answered(OpKind::Write, Some(512));
        two.refused();
        let mut sum = one.counts();
        sum += two.counts();
        assert_eq!(sum.requests[OpKind::Read as usize], 2);
        assert_eq!(sum.bytes[OpKind::Read as usize], 4096);
        assert_eq!(sum.bytes[OpKind::Write as usize], 512);
        assert_eq!((sum.errors, sum.in_flight), (2, 3));
    }

    #[test]
    fn times_of_all_workers_are_summed_by_kind() {
        let one = RequestTimes::default();
        let two = RequestTimes::default();
        one.took(OpKind::Flush, Duration::from_micros(10), 16);
        one.took(OpKind::Flush, Duration::from_micros(11), 1);
        two.took(OpKind::Flush, Duration::from_secs(11), 1);
        let sum = RequestTimes::sum([&one, &two].into_iter());
        let flush = sum[OpKind::Flush as usize];
        assert_eq!((flush.classes[0], flush.classes[1], flush.classes[19]), (16, 1, 1));
        assert!((flush.seconds - 11.000_171).abs() < 1e-9, "{}", flush.seconds);
        assert_eq!(sum[OpKind::Read as usize].classes.iter().sum::<u64>(), 0);
    }
}
