//! What the log says of requests that devices fail: a few lines a second for each connection, and how
//! many there were besides.

use std::cell::Cell;
use std::time::{Duration, Instant};

use block::{Error, Kind};

/// Lines for a connection in [`SPAN`]: enough to see what is wrong, and no way to fill a disk.
const LINES: u32 = 5;
/// See [`LINES`].
const SPAN: Duration = Duration::from_secs(1);

/// What was said of a connection's requests.
#[derive(Default)]
pub(crate) struct Complaints {
    begun: Cell<Option<Instant>>,
    said: Cell<u32>,
    unsaid: Cell<u64>,
}

impl Complaints {
    /// Says that a request of connection `id` has failed, unless that is no news: devices are asked
    /// for what they cannot do, and for what comes too late.
    pub(crate) fn failed(&self, id: u64, error: &Error) {
        if matches!(error.kind(), Kind::Unsupported | Kind::ShuttingDown) || !self.may_speak() {
            return log::debug!("{error}");
        }
        let target = format!("connection {id}");
        match self.unsaid.take() {
            0 => log::warn!(target: &target, "connection {id}: {error}"),
            more => {
                log::warn!(target: &target, "connection {id}: {error}; {more} more failed before")
            }
        }
    }

    fn may_speak(&self) -> bool {
        let now = Instant::now();
        if self.begun.get().is_none_or(|begun| now.duration_since(begun) >= SPAN) {
            self.begun.set(Some(now));
            self.said.set(0);
        }
        let speaks = self.said.get() < LINES;
        match speaks {
            true => self.said.set(self.said.get() + 1),
            false => self.unsaid.set(self.unsaid.get().saturating_add(1)),
        }
        speaks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_a_few_lines_and_the_rest_is_counted() {
        let complaints = Complaints::default();
        let spoken = (0..100).filter(|_| complaints.may_speak()).count();
        assert_eq!(spoken, LINES as usize);
        assert_eq!(complaints.unsaid.get(), 95);
        // Later there is room again.
        complaints.begun.set(Instant::now().checked_sub(SPAN));
        assert!(complaints.may_speak());
    }
}
