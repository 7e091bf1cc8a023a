//! Limits of clients: each with its name, its default and its reason.

use std::time::Duration;

use blockhaul_catalog::{format_size, parse_duration, parse_size};
use blockhaul_io::Pool;

/// The largest minimum block that the document allows: a request of one block must be possible.
pub(crate) const PAYLOAD_LEAST: u32 = 64 << 10;

/// Limits of a server. Every queue, list and wait that a client can influence has one;
/// [`Limits::TABLE`] lists them by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Open connections: each uses a descriptor and about 20 KiB when idle.
    pub connections: usize,
    /// Connections in their handshake. Above this, the oldest of them is cut if it had a second;
    /// until then others wait to be accepted.
    pub handshakes: usize,
    /// Maximum time for the handshake, so that silent clients do not accumulate; zero: no limit.
    pub handshake: Duration,
    /// Options in one handshake; [`blockhaul_wire::limits::OPTIONS_PER_EXPORT`] more for each
    /// export that was listed.
    pub options: u32,
    /// Queries in one option about metadata contexts.
    pub queries: usize,
    /// Length of an export's name in bytes.
    pub name: usize,
    /// Exports in a list.
    pub exports: usize,
    /// Requests of one connection in progress. Bytes limit reads and writes; this limits the rest.
    pub requests: usize,
    /// Requests of all connections in progress. Above this, a connection has one at a time. Divided
    /// evenly among the workers.
    pub requests_all: usize,
    /// Bytes of requests of one connection in progress, including replies that the client has not
    /// read. At least the largest request, which otherwise could never be served.
    pub client_bytes: u64,
    /// Bytes of requests of all connections in progress: the size for
    /// [`ServerConfig::pool`](crate::ServerConfig::pool).
    pub all_bytes: u64,
    /// Maximum read or write in bytes: advertised as the maximum block size, unless the device's
    /// own is smaller. Less than 64 KiB counts as 64 KiB.
    pub payload: u32,
    /// Time after which a client that does not read its replies, or send the payload of its
    /// request, is cut, if other clients wait for the memory that it holds, or it has no more
    /// requests; zero: never.
    pub stalled: Duration,
    /// Extents in one block status reply.
    pub extents: usize,
    /// Maximum time that a stop waits for requests in flight at devices.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: CONNECTIONS,
            handshakes: HANDSHAKES,
            handshake: HANDSHAKE_TIME,
            options: blockhaul_wire::limits::OPTIONS,
            queries: blockhaul_wire::limits::QUERIES,
            name: blockhaul_wire::limits::STRING,
            exports: blockhaul_wire::limits::EXPORTS,
            requests: REQUESTS,
            requests_all: REQUESTS_ALL,
            client_bytes: BYTES,
            all_bytes: BYTES_ALL,
            payload: blockhaul_wire::limits::PAYLOAD,
            stalled: STALLED,
            extents: EXTENTS,
            drain: DRAIN,
        }
    }
}

/// More clients than any disk server has; less than 100 MiB when idle.
const CONNECTIONS: usize = 4096;
/// A handshake takes some milliseconds: this many at a time are a hundred thousand per second. Each
/// may hold an option of 128 KiB.
const HANDSHAKES: usize = 512;
/// nbdkit has none by default; a user who types may take this long, a program never does.
const HANDSHAKE_TIME: Duration = Duration::from_secs(30);
/// More than clients have in flight (the maximum of fio is 128, of QEMU 16), and some MiB of tasks.
const REQUESTS: usize = 1024;
/// The maximum of 64 clients; about 64 MiB of tasks.
const REQUESTS_ALL: usize = 64 << 10;
/// 1024 requests of 128 KiB, the most that common clients have in flight, and some more.
const BYTES: u64 = 256 << 20;
/// Two clients at their maximum, or many that need less.
const BYTES_ALL: u64 = 512 << 20;
/// Largest request in bytes that has reserved memory when others hold the pool: each connection can
/// have one, as long as there is any.
pub(crate) const SMALL: u64 = 16 << 10;
/// The amount of that memory, as a fraction of the pool: enough for the maximum number of
/// connections.
pub(crate) const ASIDE_PART: u64 = BYTES_ALL / (CONNECTIONS as u64 * SMALL);
/// Longer than any pause of a client that will continue to read.
const STALLED: Duration = Duration::from_secs(10);
/// Half a megabyte in the 32-bit form: a large reply, but one that clients can read at once while
/// others are served.
const EXTENTS: usize = 64 << 10;
/// Longer than working storage takes.
const DRAIN: Duration = Duration::from_secs(30);

/// A limit that can be set by name.
pub struct Limit {
    /// Its name.
    pub name: &'static str,
    /// One line for the help.
    pub what: &'static str,
    /// Its format and location.
    value: LimitValue,
}

/// The format and location of a limit.
enum LimitValue {
    /// A number within two bounds.
    Count(u64, u64, fn(&mut Limits) -> LimitField<'_>),
    /// Bytes, within two bounds.
    Size(u64, u64, fn(&mut Limits) -> LimitField<'_>),
    /// A time; 0 for none.
    Time(fn(&mut Limits) -> &mut Duration),
}

/// Location of a number.
enum LimitField<'a> {
    U32(&'a mut u32),
    U64(&'a mut u64),
    Usize(&'a mut usize),
}

impl Limits {
    /// All limits, for help and parsing.
    pub const TABLE: &[Limit] = &[
        Limit {
            name: "connections",
            what: "connections at a time; above this, clients in their handshake are disconnected first",
            value: LimitValue::Count(1, 1 << 20, |limits| {
                LimitField::Usize(&mut limits.connections)
            }),
        },
        Limit {
            name: "handshakes",
            what: "handshakes at a time; above this, the oldest is disconnected after a second",
            value: LimitValue::Count(1, 1 << 20, |limits| {
                LimitField::Usize(&mut limits.handshakes)
            }),
        },
        Limit {
            name: "handshake-time",
            what: "time for a handshake, including TLS (--timeout); 0 for no limit",
            value: LimitValue::Time(|limits| &mut limits.handshake),
        },
        Limit {
            name: "options",
            what: "options in a handshake; 8 more for each export listed",
            value: LimitValue::Count(1, 1 << 20, |limits| LimitField::U32(&mut limits.options)),
        },
        Limit {
            name: "queries",
            what: "metadata contexts requested in one option",
            value: LimitValue::Count(0, blockhaul_wire::limits::QUERIES as u64, |limits| {
                LimitField::Usize(&mut limits.queries)
            }),
        },
        Limit {
            name: "name",
            what: "bytes of an export name",
            value: LimitValue::Count(0, blockhaul_wire::limits::STRING as u64, |limits| {
                LimitField::Usize(&mut limits.name)
            }),
        },
        Limit {
            name: "exports",
            what: "exports in a list",
            value: LimitValue::Count(0, 1 << 20, |limits| LimitField::Usize(&mut limits.exports)),
        },
        Limit {
            name: "requests",
            what: "requests in flight of a connection (--threads)",
            value: LimitValue::Count(1, 1 << 16, |limits| LimitField::Usize(&mut limits.requests)),
        },
        Limit {
            name: "requests-all",
            what: "requests in progress of all connections; above this, one per connection",
            value: LimitValue::Count(1, 1 << 24, |limits| {
                LimitField::Usize(&mut limits.requests_all)
            }),
        },
        Limit {
            name: "bytes",
            what: "bytes of the requests in progress of one connection and of its unread replies",
            value: LimitValue::Size(1 << 20, 1 << 40, |limits| {
                LimitField::U64(&mut limits.client_bytes)
            }),
        },
        Limit {
            name: "bytes-all",
            what: "the same for all connections (--memory)",
            value: LimitValue::Size(64 << 20, 1 << 40, |limits| {
                LimitField::U64(&mut limits.all_bytes)
            }),
        },
        Limit {
            name: "payload",
            what: "largest read or write",
            value: LimitValue::Size(
                // nbd: read.df-64k
                PAYLOAD_LEAST as u64,
                blockhaul_wire::limits::PAYLOAD_HARD as u64,
                |limits| LimitField::U32(&mut limits.payload),
            ),
        },
        Limit {
            name: "extents",
            what: "extents in a reply",
            value: LimitValue::Count(1, blockhaul_wire::limits::EXTENTS as u64, |limits| {
                LimitField::Usize(&mut limits.extents)
            }),
        },
        Limit {
            name: "stalled",
            what: "time after which a client that reads or sends too slowly is disconnected, if others \
                   need its memory; 0 for never",
            value: LimitValue::Time(|limits| &mut limits.stalled),
        },
    ];

    /// Names of the limits of all clients together, which a running server cannot change.
    pub const OF_ALL: &[&str] = &["bytes-all", "requests-all"];

    /// Checks limits against each other.
    ///
    /// # Errors
    /// A message for the user, if a client could never make a request of the largest payload.
    pub fn check(&self) -> Result<(), String> {
        let least = Pool::cost(self.payload as usize);
        if self.client_bytes >= least {
            return Ok(());
        }
        let least = format_size(least);
        Err(format!("bytes: the longest request needs {least}; use more, or a smaller payload"))
    }

    /// Sets a limit from `NAME=VALUE`.
    ///
    /// # Errors
    /// A message about what is invalid, for the user.
    pub fn set(&mut self, text: &str) -> Result<(), String> {
        let Some((name, value)) = text.split_once('=') else {
            return Err(format!("{text:?} is not NAME=VALUE"));
        };
        let Some(limit) = Self::TABLE.iter().find(|limit| limit.name == name) else {
            let known: Vec<_> = Self::TABLE.iter().map(|limit| limit.name).collect();
            return Err(format!("unknown limit {name:?}; known are {}", known.join(", ")));
        };
        let wrong = |why: &dyn std::fmt::Display| format!("{name}: {why}");
        let (number, least, most, place) = match &limit.value {
            LimitValue::Time(place) => {
                let time = parse_duration(value).map_err(|error| wrong(&error.text()))?;
                *place(self) = time;
                return Ok(());
            }
            LimitValue::Count(least, most, place) => {
                let number =
                    value.parse().map_err(|_| wrong(&format!("{value:?} is not a number")))?;
                (number, least, most, place)
            }
            LimitValue::Size(least, most, place) => {
                let size = parse_size(value).map_err(|error| wrong(&error.text()))?;
                (size, least, most, place)
            }
        };
        if !(*least..=*most).contains(&number) {
            return Err(wrong(&format!("{value} is not between {least} and {most}")));
        }
        let fits = match place(self) {
            LimitField::U64(place) => {
                *place = number;
                true
            }
            LimitField::U32(place) => u32::try_from(number).map(|number| *place = number).is_ok(),
            LimitField::Usize(place) => {
                usize::try_from(number).map(|number| *place = number).is_ok()
            }
        };
        fits.then_some(()).ok_or_else(|| wrong(&format!("{value} is too large")))
    }
}

impl Limit {
    /// Its default, as typed.
    pub fn default(&self) -> String {
        let mut limits = Limits::default();
        let number = |place| match place {
            LimitField::U32(number) => u64::from(*number),
            LimitField::U64(number) => *number,
            LimitField::Usize(number) => *number as u64,
        };
        match &self.value {
            LimitValue::Count(_, _, place) => number(place(&mut limits)).to_string(),
            LimitValue::Size(_, _, place) => format!("{}M", number(place(&mut limits)) >> 20),
            LimitValue::Time(place) => format!("{}s", place(&mut limits).as_secs()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // nbd: read.df-64k
    #[test]
    fn limits_are_set_by_name_and_have_bounds() {
        let mut limits = Limits::default();
        for good in ["connections=7", "payload=1M", "stalled=0", "handshake-time=250ms", "name=0"] {
            limits.set(good).unwrap();
        }
        assert_eq!((limits.connections, limits.payload, limits.name), (7, 1 << 20, 0));
        assert_eq!(
            (limits.stalled, limits.handshake),
            (Duration::ZERO, Duration::from_millis(250))
        );
        for (bad, word) in [
            ("connections", "NAME=VALUE"),
            ("conections=1", "known are connections,"),
            ("connections=0", "between 1 and"),
            ("connections=-1", "not a number"),
            ("name=4097", "between 0 and 4096"),
            ("payload=1", "between 65536 and"),
            ("payload=65M", "between"),
            ("bytes=99999999999999999999", "bytes:"),
            ("stalled=soon", "stalled:"),
        ] {
            let why = limits.set(bad).unwrap_err();
            assert!(why.contains(word), "{bad}: {why}");
        }
    }

    #[test]
    fn defaults_are_written_as_they_are_read() {
        for limit in Limits::TABLE {
            let mut limits = Limits::default();
            limits.set(&format!("{}={}", limit.name, limit.default())).unwrap();
            assert_eq!(format!("{limits:?}"), format!("{:?}", Limits::default()), "{}", limit.name);
        }
    }
}
