//! Events, which all clients of the monitor protocol receive, and the lines that wait for each client.

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
pub struct LineQueue {
    waiting: Mutex<QueuedLines>,
    changed: Notify,
}

#[derive(Default)]
struct QueuedLines {
    lines: VecDeque<String>,
    bytes: usize,
    /// The client has agreed on capabilities: it gets events.
    agreed: bool,
    /// No more lines follow.
    closed: bool,
    /// The client does not read.
    lost: bool,
}

impl LineQueue {
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

    /// Whether the client gets events.
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

    /// A ticket for the next change; take it before [`LineQueue::take`].
    pub fn listen(&self) -> Ticket<()> {
        self.changed.listen()
    }

    /// All lines that wait, as one text; an error after the last one.
    pub fn take(&self) -> Result<String, ()> {
        let mut waiting = self.lock();
        let text: String = waiting.lines.drain(..).collect();
        waiting.bytes = 0;
        if text.is_empty() && (waiting.closed || waiting.lost) { Err(()) } else { Ok(text) }
    }

    fn lock(&self) -> MutexGuard<'_, QueuedLines> {
        self.waiting.lock().expect("no panic under this lock")
    }
}

/// The queues of all clients.
#[derive(Default)]
pub struct LineQueues(Mutex<Vec<Weak<LineQueue>>>);

impl LineQueues {
    /// Adds the queue of a client.
    pub fn add(&self, queue: &Arc<LineQueue>) {
        let mut all = self.0.lock().expect("no panic under this lock");
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(queue));
    }

    /// No more lines follow for any client.
    pub fn close(&self) {
        let all = self.0.lock().expect("no panic under this lock").clone();
        all.iter().filter_map(Weak::upgrade).for_each(|queue| queue.close());
    }

    /// Sends an event to all clients that have agreed on capabilities.
    pub fn send_event(&self, event: &str, data: Value) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let timestamp = json!({ "seconds": now.as_secs(), "microseconds": now.subsec_micros() });
        let line = line(&json!({ "timestamp": timestamp, "event": event, "data": data }));
        let all = self.0.lock().expect("no panic under this lock").clone();
        for queue in all.iter().filter_map(Weak::upgrade) {
            if queue.has_agreed() {
                queue.push_line(line.clone());
            }
        }
    }
}
