//! Counts bytes by their route from the source to the target.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_io::{PayloadRoute, RouteCounters};

/// Bytes by route since the copy began. Repeated requests count each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RouteBytes {
    /// Not written: already zero on the target.
    pub skip: u64,
    /// Zeroed on the target without a payload; also in `zeroes_written` if the target cannot zero.
    pub zero: u64,
    /// Trimmed on the target.
    pub trim: u64,
    /// Shared between two files (reflink).
    pub reflink: u64,
    /// Copied by the kernel or the file system's server (copy_file_range).
    pub copy_file_range: u64,
    /// From the page cache to a socket, within the kernel.
    pub file_to_socket: u64,
    /// From socket to socket, within the kernel.
    pub socket_to_socket: u64,
    /// From a socket to the page cache, within the kernel.
    pub socket_to_file: u64,
    /// From page cache to page cache, within the kernel.
    pub file_to_file: u64,
    /// Read into memory and written from there.
    pub memory: u64,
    /// Of `memory`: sent to a socket by reference (vmsplice).
    pub vmsplice: u64,
    /// Of `memory`: read with direct I/O.
    pub direct_read: u64,
    /// Of `memory`: written with direct I/O.
    pub direct_write: u64,
    /// Zeroes written as data, as far as checked: 4096-byte blocks within other data, and zeroing
    /// on a target that cannot zero.
    pub zeroes_written: u64,
    /// Data not checked for zeroes.
    pub unseen: u64,
}

impl RouteBytes {
    /// The difference to `before`.
    pub(crate) fn since(&self, before: &RouteBytes) -> RouteBytes {
        RouteBytes {
            skip: self.skip.saturating_sub(before.skip),
            zero: self.zero.saturating_sub(before.zero),
            trim: self.trim.saturating_sub(before.trim),
            reflink: self.reflink.saturating_sub(before.reflink),
            copy_file_range: self.copy_file_range.saturating_sub(before.copy_file_range),
            file_to_socket: self.file_to_socket.saturating_sub(before.file_to_socket),
            socket_to_socket: self.socket_to_socket.saturating_sub(before.socket_to_socket),
            socket_to_file: self.socket_to_file.saturating_sub(before.socket_to_file),
            file_to_file: self.file_to_file.saturating_sub(before.file_to_file),
            memory: self.memory.saturating_sub(before.memory),
            vmsplice: self.vmsplice.saturating_sub(before.vmsplice),
            direct_read: self.direct_read.saturating_sub(before.direct_read),
            direct_write: self.direct_write.saturating_sub(before.direct_write),
            zeroes_written: self.zeroes_written.saturating_sub(before.zeroes_written),
            unseen: self.unseen.saturating_sub(before.unseen),
        }
    }

    /// All counters with their names.
    pub fn named(&self) -> [(&'static str, u64); 15] {
        [
            ("skip", self.skip),
            ("zero", self.zero),
            ("trim", self.trim),
            ("reflink", self.reflink),
            ("copy-file-range", self.copy_file_range),
            ("file-to-socket", self.file_to_socket),
            ("socket-to-socket", self.socket_to_socket),
            ("socket-to-file", self.socket_to_file),
            ("file-to-file", self.file_to_file),
            ("memory", self.memory),
            ("vmsplice", self.vmsplice),
            ("direct-read", self.direct_read),
            ("direct-write", self.direct_write),
            ("zeroes-written", self.zeroes_written),
            ("unseen", self.unseen),
        ]
    }
}

/// The nonzero ones: `zero 4096, memory 65536`.
impl fmt::Display for RouteBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = self.named().map(|(name, bytes)| match name {
            "unseen" => ("not checked for zeroes", bytes),
            name => (name, bytes),
        });
        let mut used = named.into_iter().filter(|(_, bytes)| *bytes > 0);
        match used.next() {
            None => f.write_str("none"),
            Some((name, bytes)) => {
                write!(f, "{name} {bytes}")?;
                used.try_for_each(|(name, bytes)| write!(f, ", {name} {bytes}"))
            }
        }
    }
}

/// Counters behind [`RouteBytes`].
#[derive(Debug, Default)]
pub(crate) struct CopyRouteCounters {
    /// Shared with buffers.
    pub(crate) tally: Arc<RouteCounters>,
    pub(crate) reflink: AtomicU64,
    pub(crate) copy_file_range: AtomicU64,
    pub(crate) trim: AtomicU64,
    pub(crate) zeroes_written: AtomicU64,
    /// Data that was checked for zeroes before it was written.
    pub(crate) seen: AtomicU64,
}

/// Adds `bytes`.
pub(crate) fn add(counter: &AtomicU64, bytes: u64) {
    counter.fetch_add(bytes, Ordering::Relaxed);
}

impl CopyRouteCounters {
    /// All counters, of a copy that has written `data`, zeroed `zero` and skipped `skip` bytes.
    pub(crate) fn routes(&self, data: u64, zero: u64, skip: u64) -> RouteBytes {
        let bytes = |route| self.tally.get(route);
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let reflink = load(&self.reflink);
        let copy_file_range = load(&self.copy_file_range);
        let file_to_socket = bytes(PayloadRoute::FileToSocket);
        let socket_to_socket = bytes(PayloadRoute::SocketToSocket);
        let socket_to_file = bytes(PayloadRoute::SocketToFile);
        let file_to_file = bytes(PayloadRoute::FileToFile);
        // Within the kernel; more than `data` if requests were repeated.
        let moved = [
            reflink,
            copy_file_range,
            file_to_socket,
            socket_to_socket,
            socket_to_file,
            file_to_file,
        ];
        RouteBytes {
            skip,
            zero,
            trim: load(&self.trim),
            reflink,
            copy_file_range,
            file_to_socket,
            socket_to_socket,
            socket_to_file,
            file_to_file,
            memory: data.saturating_sub(moved.iter().sum()),
            vmsplice: bytes(PayloadRoute::Vmsplice),
            direct_read: bytes(PayloadRoute::DirectRead),
            direct_write: bytes(PayloadRoute::DirectWrite),
            zeroes_written: load(&self.zeroes_written),
            unseen: data.saturating_sub(load(&self.seen)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_did_not_move_went_through_memory() {
        let counters = CopyRouteCounters::default();
        counters.tally.add(PayloadRoute::SocketToSocket, 1000);
        counters.tally.add(PayloadRoute::DirectWrite, 50);
        add(&counters.reflink, 100);
        add(&counters.seen, 20);
        let routes = counters.routes(1200, 7, 0);
        assert_eq!((routes.memory, routes.unseen), (100, 1180));
        let text = "zero 7, reflink 100, socket-to-socket 1000, memory 100, direct-write 50, \
                    not checked for zeroes 1180";
        assert_eq!(routes.to_string(), text);
        assert_eq!(RouteBytes::default().to_string(), "none");
    }
}
