//! Limits log lines about requests that devices fail, clients that violate the protocol or are
//! rejected, and exports that cannot be opened: a few lines per second for each connection and for
//! all that end that way, and the number of lines left out.

use std::cell::Cell;
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind};
use blockhaul_wire::request::RequestHeader;

use crate::connection::Connection;
use crate::log_fields::{RequestFields, record};

/// Maximum lines for a connection in [`SPAN`]: enough to see the problem, and too few to fill a
/// disk.
const LINES: u32 = 5;
/// Maximum lines for all connections that end badly in [`SPAN`], and the same for exports that
/// cannot be opened.
const ENDED: u32 = 20;
/// See [`LINES`].
const SPAN: Duration = Duration::from_secs(1);

/// Lines logged about a connection's requests, or about connections.
#[derive(Default)]
pub(crate) struct LogLimit {
    begun: Cell<Option<Instant>>,
    said: Cell<u32>,
    unsaid: Cell<u64>,
}

impl LogLimit {
    /// Logs a failed request of a connection, unless it is merely unsupported: clients send what
    /// devices cannot do.
    pub(crate) fn failed(&self, connection: &Connection, header: &RequestHeader, why: &Error) {
        let id = connection.id;
        let peer = &connection.peer;
        let RequestFields { request, offset, length } = RequestFields::of(header);
        if why.kind() == Kind::Unsupported || !self.may_speak(LINES) {
            record!(Debug, connection, request, offset, length, error = why.text(); "{why}");
            return;
        }
        let error = why.text();
        let more = self.unsaid.take();
        if more == 0 {
            record!(Warn, connection, request, offset, length, error; "connection {id} from {peer}: {why}");
        } else {
            record!(
                Warn, connection, request, offset, length, error, more;
                "connection {id} from {peer}: {why}; {more} more failed before"
            );
        }
    }

    /// Logs an option that was malformed or unexpected.
    pub(crate) fn odd(&self, connection: &Connection, option: &str, why: &str) {
        let id = connection.id;
        let peer = &connection.peer;
        let error = why;
        if !self.may_speak(ENDED) {
            record!(Info, connection, error; "connection {id} from {peer}: refused {option}: {why}");
            return;
        }
        let more = self.unsaid.take();
        if more == 0 {
            record!(Warn, connection, error; "connection {id} from {peer}: refused {option}: {why}");
        } else {
            record!(
                Warn, connection, error, more;
                "connection {id} from {peer}: refused {option}: {why}; {more} more before"
            );
        }
    }

    /// Logs why a connection ended, other than by the client's request.
    pub(crate) fn ended(&self, connection: &Connection, error: &str, refused: bool) {
        let id = connection.id;
        let peer = &connection.peer;
        let what = if refused { "refused connection" } else { "connection" };
        if !self.may_speak(ENDED) {
            record!(Info, connection, error; "{what} {id} from {peer}: {error}");
            return;
        }
        let more = self.unsaid.take();
        if more == 0 {
            record!(Warn, connection, error; "{what} {id} from {peer}: {error}");
        } else {
            record!(
                Warn, connection, error, more;
                "{what} {id} from {peer}: {error}; {more} more ended so before"
            );
        }
    }

    /// Logs why a requested export cannot be opened; the client may have made up its name.
    pub(crate) fn unopened(&self, connection: &Connection, export: &str, why: &Error) {
        let client = &connection.peer;
        let error = why.text();
        let shown = blockhaul_wire::printable(export.as_bytes(), 256);
        let (level, more) = if self.may_speak(ENDED) {
            (log::Level::Warn, self.unsaid.take())
        } else {
            (log::Level::Info, 0)
        };
        let rest = if more == 0 { String::new() } else { format!("; {more} more before") };
        log::log!(
            level,
            connection = connection.id,
            client,
            user = connection.user(),
            // It has no export yet: use the requested one.
            export,
            error,
            more = (more > 0).then_some(more);
            "cannot open export \"{shown}\" for {client}: {why}{rest}"
        );
    }

    fn may_speak(&self, most: u32) -> bool {
        let now = blockhaul_io::now();
        if self.begun.get().is_none_or(|begun| now.duration_since(begun) >= SPAN) {
            self.begun.set(Some(now));
            self.said.set(0);
        }
        let speaks = self.said.get() < most;
        if speaks {
            self.said.set(self.said.get() + 1);
        } else {
            self.unsaid.set(self.unsaid.get().saturating_add(1));
        }
        speaks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_a_few_lines_and_the_rest_is_counted() {
        let (log_limit, spoken) = loop {
            let log_limit = LogLimit::default();
            let spoken: Vec<_> = (0..100)
                .filter(|_| log_limit.may_speak(LINES))
                .map(|_| log_limit.begun.get())
                .collect();
            // Again if this thread did not get to run for a whole span.
            if spoken.iter().all(|begun| *begun == log_limit.begun.get()) {
                break (log_limit, spoken.len());
            }
        };
        assert_eq!(spoken, LINES as usize);
        assert_eq!(log_limit.unsaid.get(), 95);
        // Later, lines are allowed again.
        log_limit.begun.set(Instant::now().checked_sub(SPAN));
        assert!(log_limit.may_speak(LINES));
    }
}
