//! What a client may cost: each limit with its reason.

use std::time::Duration;

/// The largest minimum block that the document allows: a request of one block must be possible.
pub(crate) const PAYLOAD_LEAST: u32 = 64 << 10;

/// Limits of a server. Every queue and wait that a client can influence has one.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Open connections: each costs a descriptor and about 100 KiB at rest.
    pub connections: usize,
    /// Time for the handshake, so that silent clients do not pile up; zero: none.
    pub handshake: Duration,
    /// Requests of one connection in progress. Bytes bound reads and writes; this bounds the rest.
    pub requests: usize,
    /// Bytes of requests of one connection in progress, replies that the client has not read
    /// included. At least the largest request, else it could never be served.
    pub client_bytes: u64,
    /// Longest read or write in bytes: what is announced as the maximum block size, if the device's
    /// own is not smaller. Less than 64 KiB counts as that much.
    pub payload: u32,
    /// Time without a byte after which a client that does not read its replies is cut, if other
    /// clients wait for the memory they hold, or it asks for nothing any more; zero: never.
    pub stalled: Duration,
    /// Extents in one reply to block status.
    pub extents: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 4096,
            handshake: Duration::from_secs(30),
            requests: 1024,
            // 1024 requests of 128 KiB, the most that common clients keep under way, and room for more.
            client_bytes: 256 << 20,
            payload: 32 << 20,
            // Longer than any pause of a client that means to read on.
            stalled: Duration::from_secs(10),
            // Half a megabyte in the 32-bit form: a large answer, but one that clients can read in
            // one go while others are served.
            extents: 64 << 10,
        }
    }
}
