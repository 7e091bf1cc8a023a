//! How much of an image is read: a line in the log at intervals, because the device exists at the end only.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time between lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// The part of an image that is read and verified.
pub(super) struct ReadProgress {
    name: Arc<str>,
    done: u64,
    total: u64,
    /// The time of the next line.
    due: Instant,
}

impl ReadProgress {
    /// For the image of a device with this name.
    pub(super) fn new(name: &Arc<str>) -> ReadProgress {
        ReadProgress { name: name.clone(), done: 0, total: 0, due: blockhaul_io::now() + INTERVAL }
    }

    /// Sets the bytes of all blobs.
    pub(super) fn set_total(&mut self, total: u64) {
        self.total = total;
    }

    /// Adds bytes that were read; the line, if it is time for one.
    pub(super) fn add(&mut self, bytes: u64, now: Instant) -> Option<String> {
        self.done += bytes;
        if now < self.due {
            return None;
        }
        self.due = now + INTERVAL;
        let [done, total] = [self.done, self.total].map(|bytes| bytes >> 20);
        Some(format!("{}: {done} of {total} MiB of the image are read", self.name))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn lines_come_at_intervals_with_the_bytes_of_the_total() {
        let mut progress = ReadProgress::new(&"oci://h/a:1".into());
        progress.set_total(30 << 20);
        let begun = progress.due - INTERVAL;
        assert_eq!(progress.add(1 << 20, begun), None);
        let line = progress.add(9 << 20, begun + INTERVAL).unwrap();
        assert_eq!(line, "oci://h/a:1: 10 of 30 MiB of the image are read");
        assert_eq!(progress.add(1 << 20, begun + INTERVAL), None);
        let line = progress.add(1 << 20, begun + 3 * INTERVAL).unwrap();
        assert!(line.contains(" 12 of 30 MiB"), "{line}");
    }
}
