//! Events: what all clients of the monitor protocol receive.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use blockhaul_io::{Notify, Ticket};
use serde_json::{Value, json};

use crate::input::line;

/// The names of all events.
pub const EVENTS: &[&str] = &[
    "BLOCK_EXPORT_DELETED",
    "BLOCK_JOB_CANCELLED",
    "BLOCK_JOB_COMPLETED",
    "BLOCK_JOB_ERROR",
    "BLOCK_JOB_PENDING",
    "BLOCK_JOB_READY",
    "JOB_STATUS_CHANGE",
];

/// Bytes that may wait for a client that does not read; more end its connection.
const WAITING_MAX: usize = 4 << 20;

/// Lines that wait to be sent to one client.
#[derive(Default)]
pub struct Outbox {
    waiting: Mutex<Waiting>,
    changed: Notify,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<String>,
    bytes: usize,
    /// The client has agreed on capabilities: it gets events.
    agreed: bool,
    /// No more lines follow.
    closed: bool,
    /// The client does not read.
    lost: bool,
}

impl Outbox {
    /// Sends a value after those before it.
    pub fn push(&self, value: &Value) {
        self.push_line(line(value));
    }

    fn push_line(&self, line: String) {
        let mut waiting = self.lock();
        waiting.bytes = waiting.bytes.saturating_add(line.len());
        if waiting.bytes > WAITING_MAX {
            waiting.lost = true;
            waiting.lines.clear();
        } else {
            waiting.lines.push_back(line);
        }
        drop(waiting);
        self.changed.notify();
    }

    /// The client gets events from now on.
    pub fn agree(&self) {
        self.lock().agreed = true;
    }

    /// Whether it does.
    pub fn has_agreed(&self) -> bool {
        self.lock().agreed
    }

    /// No more lines follow.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify();
    }

    /// Whether the client is to be given up.
    pub fn is_lost(&self) -> bool {
        self.lock().lost
    }

    /// A ticket for the next change; take it before [`Outbox::take`].
    pub fn listen(&self) -> Ticket<()> {
        self.changed.listen()
    }

    /// What is to be sent, all together; an error at the end.
    pub fn take(&self) -> Result<String, ()> {
        let mut waiting = self.lock();
        let text: String = waiting.lines.drain(..).collect();
        waiting.bytes = 0;
        if text.is_empty() && (waiting.closed || waiting.lost) { Err(()) } else { Ok(text) }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect("no panic under this lock")
    }
}

/// All clients.
#[derive(Default)]
pub struct Hub(Mutex<Vec<Weak<Outbox>>>);

impl Hub {
    /// One more client.
    pub fn join(&self, outbox: &Arc<Outbox>) {
        let mut all = self.0.lock().expect("no panic under this lock");
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(outbox));
    }

    /// No more lines follow for any client.
    pub fn close(&self) {
        let all = self.0.lock().expect("no panic under this lock").clone();
        all.iter().filter_map(Weak::upgrade).for_each(|outbox| outbox.close());
    }

    /// Tells all clients about an event.
    pub fn tell(&self, event: &str, data: Value) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let timestamp = json!({ "seconds": now.as_secs(), "microseconds": now.subsec_micros() });
        let line = line(&json!({ "timestamp": timestamp, "event": event, "data": data }));
        let all = self.0.lock().expect("no panic under this lock").clone();
        for outbox in all.iter().filter_map(Weak::upgrade) {
            if outbox.has_agreed() {
                outbox.push_line(line.clone());
            }
        }
    }
}
