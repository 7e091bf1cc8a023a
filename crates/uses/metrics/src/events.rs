//! Snapshots for the page: once, and as server-sent events, one a second.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockhaul_io::{Notify, Stream};
use serde_json::Value;

use crate::http::{self, PATIENCE};

/// A function that returns the state of a command as JSON.
pub type StateSource = Arc<dyn Fn() -> Value + Send + Sync>;

/// Interval of events.
const INTERVAL: Duration = Duration::from_secs(1);
/// Viewers share a snapshot that is not older than this.
const FRESH: Duration = Duration::from_millis(250);
/// Maximum number of viewers.
pub const VIEWERS_MAX: usize = 8;
/// Maximum time for viewers to get the last event.
const LAST: Duration = Duration::from_secs(1);
/// Time after which a browser connects again.
const RETRY: &str = "retry: 2000\n\n";

/// The snapshots of a command, and those who view them.
pub struct Events {
    state: StateSource,
    shared: Mutex<Option<(Instant, Arc<str>)>>,
    viewers: AtomicUsize,
    ended: AtomicBool,
    /// The command has ended.
    end: Notify,
    /// A viewer has left.
    left: Notify,
}

impl Events {
    /// The events of this source.
    pub fn new(state: StateSource) -> Arc<Events> {
        Arc::new(Events {
            state,
            shared: Mutex::default(),
            viewers: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            end: Notify::default(),
            left: Notify::default(),
        })
    }

    /// A new snapshot, as one line of JSON. That of many clients takes long: not on the worker.
    pub async fn snapshot(self: &Arc<Self>) -> Arc<str> {
        let events = self.clone();
        let made = blockhaul_io::offload(move || {
            let text: Arc<str> = (events.state)().to_string().into();
            let known = (blockhaul_io::now(), text.clone());
            *events.shared.lock().expect("no panic under this lock") = Some(known);
            text
        });
        // Lost only when the program ends.
        made.await.unwrap_or_else(|_| "null".into())
    }

    /// A snapshot for one of several viewers.
    async fn recent(self: &Arc<Self>) -> Arc<str> {
        let known = self.shared.lock().expect("no panic under this lock").clone();
        match known {
            Some((made, text)) if blockhaul_io::elapsed(made) < FRESH => text,
            _ => self.snapshot().await,
        }
    }

    /// The place of one more viewer; `None`: there are too many.
    pub fn place(self: &Arc<Self>) -> Option<ViewerSlot> {
        let place = ViewerSlot(self.clone());
        // A place that is too many gives itself back.
        (self.viewers.fetch_add(1, Ordering::Relaxed) < VIEWERS_MAX).then_some(place)
    }

    /// Sends a viewer an event each second, and a last one when the command ends. A viewer that is
    /// slow to take one gets no more.
    pub async fn stream(self: &Arc<Self>, peer: &Stream, _place: ViewerSlot) {
        let head = http::events_head() + RETRY;
        if !sent(peer, &head).await {
            return;
        }
        loop {
            // Before the check, so that an end in between is not missed.
            let end = self.end.listen();
            let last = self.ended.load(Ordering::Relaxed);
            let text = if last { self.snapshot().await } else { self.recent().await };
            let kind = if last { "event: end\n" } else { "" };
            if !sent(peer, &format!("{kind}data: {text}\n\n")).await || last {
                return;
            }
            // Late is the normal case.
            let _ = blockhaul_io::timeout(INTERVAL, end).await;
        }
    }

    /// Sends all viewers the last event, and waits for them for a limited time.
    pub async fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.end.notify();
        let gone = async {
            loop {
                let left = self.left.listen();
                if self.viewers.load(Ordering::Relaxed) == 0 {
                    return;
                }
                // Its other end is here.
                let _ = left.await;
            }
        };
        let _ = blockhaul_io::timeout(LAST, gone).await;
    }
}

async fn sent(peer: &Stream, text: &str) -> bool {
    matches!(blockhaul_io::timeout(PATIENCE, peer.send_all(text.as_bytes())).await, Ok(Ok(())))
}

/// The place of a viewer.
pub struct ViewerSlot(Arc<Events>);

impl Drop for ViewerSlot {
    fn drop(&mut self) {
        self.0.viewers.fetch_sub(1, Ordering::Relaxed);
        self.0.left.notify();
    }
}
