//! What a connection has sent and received.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes and messages of a connection, from its first on. Messages are those of the NBD protocol: requests,
/// simple replies, chunks, and those of the handshake that are sent or taken in together. Bytes are those of
/// messages, without what TLS adds.
#[derive(Debug, Default)]
pub struct Traffic {
    bytes_sent: AtomicU64,
    messages_sent: AtomicU64,
    bytes_received: AtomicU64,
    messages_received: AtomicU64,
}

/// Figures of a [`Traffic`] at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrafficFigures {
    /// Bytes sent, or queued to be sent.
    pub bytes_sent: u64,
    /// Messages sent, or queued to be sent.
    pub messages_sent: u64,
    /// Bytes received.
    pub bytes_received: u64,
    /// Messages received.
    pub messages_received: u64,
}

impl Traffic {
    /// The figures now.
    pub fn figures(&self) -> TrafficFigures {
        let get = |of: &AtomicU64| of.load(Ordering::Relaxed);
        TrafficFigures {
            bytes_sent: get(&self.bytes_sent),
            messages_sent: get(&self.messages_sent),
            bytes_received: get(&self.bytes_received),
            messages_received: get(&self.messages_received),
        }
    }

    /// A message of this length is sent.
    pub(crate) fn sent(&self, bytes: usize) {
        self.bytes_sent.fetch_add(bytes as u64, Ordering::Relaxed);
        self.messages_sent.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes were received; the heads of this number of messages are among them.
    pub(crate) fn received(&self, bytes: usize, messages: u64) {
        if bytes > 0 {
            self.received_more(bytes as u64);
            self.messages_received.fetch_add(messages, Ordering::Relaxed);
        }
    }

    /// A payload was received.
    pub(crate) fn received_more(&self, bytes: u64) {
        self.bytes_received.fetch_add(bytes, Ordering::Relaxed);
    }
}
