//! What the log says of requests that devices fail, and of clients that break the protocol or are not
//! let in, or ask for what cannot be opened: a few lines a second for each connection and for all that end
//! so, and how many there were besides.

use std::cell::Cell;
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind};
use blockhaul_wire::request::Header;

use crate::connection::Connection;
use crate::records::{Asked, record};

/// Lines for a connection in [`SPAN`]: enough to see what is wrong, and no way to fill a disk.
const LINES: u32 = 5;
/// Lines for all connections that end badly in [`SPAN`], and as many for exports that cannot be opened.
const ENDED: u32 = 20;
/// See [`LINES`].
const SPAN: Duration = Duration::from_secs(1);

/// What was said of a connection's requests, or of connections.
#[derive(Default)]
pub(crate) struct Complaints {
    begun: Cell<Option<Instant>>,
    said: Cell<u32>,
    unsaid: Cell<u64>,
}

impl Complaints {
    /// Says that a request of a connection has failed, unless that is no news: devices are asked for
    /// what they cannot do.
    pub(crate) fn failed(&self, connection: &Connection, header: &Header, why: &Error) {
        let (id, peer) = (connection.id, &connection.peer);
        let Asked { request, offset, length } = Asked::of(header);
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

    /// Says that a client has sent an option that was malformed or out of place.
    pub(crate) fn odd(&self, connection: &Connection, option: &str, why: &str) {
        let (id, peer) = (connection.id, &connection.peer);
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

    /// Says why a connection ended, other than politely.
    pub(crate) fn ended(&self, connection: &Connection, error: &str, refused: bool) {
        let (id, peer) = (connection.id, &connection.peer);
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

    /// Says why an export cannot be opened that a client asks for: by any name that it makes up.
    pub(crate) fn unopened(&self, connection: &Connection, export: &str, why: &Error) {
        let (client, error) = (&connection.peer, why.text());
        let shown = blockhaul_wire::printable(export.as_bytes(), 256);
        let (level, more) = match self.may_speak(ENDED) {
            true => (log::Level::Warn, self.unsaid.take()),
            false => (log::Level::Info, 0),
        };
        let rest = if more == 0 { String::new() } else { format!("; {more} more before") };
        log::log!(
            level,
            connection = connection.id,
            client,
            user = connection.user(),
            // It has none yet: the one that it asks for.
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
        let (complaints, spoken) = loop {
            let complaints = Complaints::default();
            let spoken: Vec<_> = (0..100)
                .filter(|_| complaints.may_speak(LINES))
                .map(|_| complaints.begun.get())
                .collect();
            // Again where this thread was kept from running for a whole span.
            if spoken.iter().all(|begun| *begun == complaints.begun.get()) {
                break (complaints, spoken.len());
            }
        };
        assert_eq!(spoken, LINES as usize);
        assert_eq!(complaints.unsaid.get(), 95);
        // Later there is room again.
        complaints.begun.set(Instant::now().checked_sub(SPAN));
        assert!(complaints.may_speak(LINES));
    }
}
