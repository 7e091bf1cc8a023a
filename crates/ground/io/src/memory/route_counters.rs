//! How payloads travelled: counters that whoever reserves memory for them lends to it.
//!
//! The route of a payload is decided where it passes, by sockets, files and pipes that know nothing of
//! each other. So its [`Reservation`](crate::Reservation) carries the caller's counters along.

use std::sync::atomic::{AtomicU64, Ordering};

/// A way for the bytes of a payload that is not plain memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// From a disk to memory past the page cache.
    DirectRead,
    /// From memory to a disk past the page cache.
    DirectWrite,
}

impl PayloadRoute {
    const COUNT: usize = 7;
}

/// Bytes that went each [`PayloadRoute`].
#[derive(Debug, Default)]
pub struct RouteCounters([AtomicU64; PayloadRoute::COUNT]);

impl RouteCounters {
    /// Counts `bytes` more.
    pub fn add(&self, route: PayloadRoute, bytes: usize) {
        self.0[route as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes so far.
    pub fn get(&self, route: PayloadRoute) -> u64 {
        self.0[route as usize].load(Ordering::Relaxed)
    }
}
