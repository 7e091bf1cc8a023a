//! Counts payload bytes by route, for the caller that reserves their memory.
//!
//! Sockets, files and pipes that know nothing of each other decide the route of a payload. So its
//! [`Reservation`](crate::Reservation) carries the caller's counters.

use std::sync::atomic::{AtomicU64, Ordering};

/// A route of payload bytes other than plain memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PayloadRoute {
    /// From the page cache to a socket, by splice(2).
    FileToSocket,
    /// From a socket to a socket, by splice(2).
    SocketToSocket,
    /// From a socket to a file, by splice(2).
    SocketToFile,
    /// From the page cache to a file, by splice(2).
    FileToFile,
    /// From memory to a socket by reference, by vmsplice(2).
    Vmsplice,
    /// From a disk to memory with direct I/O.
    DirectRead,
    /// From memory to a disk with direct I/O.
    DirectWrite,
}

impl PayloadRoute {
    const COUNT: usize = 7;
}

/// Bytes per [`PayloadRoute`].
#[derive(Debug, Default)]
pub struct RouteCounters([AtomicU64; PayloadRoute::COUNT]);

impl RouteCounters {
    /// Adds `bytes`.
    pub fn add(&self, route: PayloadRoute, bytes: usize) {
        self.0[route as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes so far.
    pub fn get(&self, route: PayloadRoute) -> u64 {
        self.0[route as usize].load(Ordering::Relaxed)
    }
}
