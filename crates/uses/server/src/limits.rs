//! What clients may cost: each limit with its name, its default and its reason.

use std::time::Duration;

use blockhaul_catalog::{parse_duration, parse_size};

/// The largest minimum block that the document allows: a request of one block must be possible.
pub(crate) const PAYLOAD_LEAST: u32 = 64 << 10;

/// Limits of a server. Every queue, list and wait that a client can influence has one;
/// [`Limits::TABLE`] has them by name.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Open connections: each costs a descriptor and about 20 KiB at rest.
    pub connections: usize,
    /// Connections that have not finished their handshake. Above, the oldest of them is cut, if it had a
    /// second; until then others wait to be accepted.
    pub handshakes: usize,
    /// Time for the handshake, so that silent clients do not pile up; zero: none.
    pub handshake: Duration,
    /// Options in one handshake; [`blockhaul_wire::limits::OPTIONS_PER_EXPORT`] more for each export that was
    /// listed.
    pub options: u32,
    /// Queries in one option about metadata contexts.
    pub queries: usize,
    /// Bytes of an export's name.
    pub name: usize,
    /// Exports in a list.
    pub exports: usize,
    /// Requests of one connection in progress. Bytes bound reads and writes; this bounds the rest.
    pub requests: usize,
    /// Requests of all connections in progress. Above, a connection has one at a time. Divided among
    /// the workers, which do not ask each other.
    pub requests_all: usize,
    /// Bytes of requests of one connection in progress, replies that the client has not read
    /// included. At least the largest request, else it could never be served.
    pub client_bytes: u64,
    /// Bytes of requests of all connections in progress: the size of the pool that
    /// [`Config::pool`](crate::Config::pool) should have.
    pub all_bytes: u64,
    /// Longest read or write in bytes: what is announced as the maximum block size, if the device's
    /// own is not smaller. Less than 64 KiB counts as that much.
    pub payload: u32,
    /// Time after which a client that does not read its replies, or send the payload of its request, is
    /// cut, if other clients wait for the memory that holds, or it asks for nothing any more; zero:
    /// never.
    pub stalled: Duration,
    /// Extents in one reply to block status.
    pub extents: usize,
    /// Time that a stop waits for requests which devices hold.
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

/// More than any server of disks has clients; with less than 100 MiB at rest.
const CONNECTIONS: usize = 4096;
/// A handshake takes some milliseconds: this many at a time are a hundred thousand a second. Each may
/// hold an option of 128 KiB.
const HANDSHAKES: usize = 512;
/// nbdkit has none by default; a person who types may take this long, a program never does.
const HANDSHAKE_TIME: Duration = Duration::from_secs(30);
/// More than clients have in flight (fio's and QEMU's most are 128 and 16), and some MiB of tasks.
const REQUESTS: usize = 1024;
/// What 64 clients may have at most; about 64 MiB of tasks.
const REQUESTS_ALL: usize = 64 << 10;
/// 1024 requests of 128 KiB, the most that common clients keep under way, and room for more.
const BYTES: u64 = 256 << 20;
/// Two clients at their most, or many that want less.
const BYTES_ALL: u64 = 512 << 20;
/// Longest request, in bytes, that has memory of its own when others hold all: each connection has room for
/// one, as far as there is any.
pub(crate) const SMALL: u64 = 16 << 10;
/// What there is of it, as a part of the pool: enough for as many connections as there may be.
pub(crate) const ASIDE_PART: u64 = BYTES_ALL / (CONNECTIONS as u64 * SMALL);
/// Longer than any pause of a client that means to read on.
const STALLED: Duration = Duration::from_secs(10);
/// Half a megabyte in the 32-bit form: a large answer, but one that clients can read in one go while
/// others are served.
const EXTENTS: usize = 64 << 10;
/// Longer than storage takes that is alive.
const DRAIN: Duration = Duration::from_secs(30);

/// A limit that can be set by name.
pub struct Limit {
    /// Its name.
    pub name: &'static str,
    /// One line for the help.
    pub what: &'static str,
    /// How it is written, and where it is kept.
    value: Value,
}

/// How a limit is written, and its place.
enum Value {
    /// A number between two bounds.
    Count(u64, u64, fn(&mut Limits) -> Place<'_>),
    /// Bytes, between two bounds.
    Size(u64, u64, fn(&mut Limits) -> Place<'_>),
    /// A time; 0 for none.
    Time(fn(&mut Limits) -> &mut Duration),
}

/// Where a number is kept.
enum Place<'a> {
    U32(&'a mut u32),
    U64(&'a mut u64),
    Usize(&'a mut usize),
}

impl Limits {
    /// All of them, for help and parsing.
    pub const TABLE: &[Limit] = &[
        Limit {
            name: "connections",
            what: "clients at a time; above, those that have not finished their handshake go first",
            value: Value::Count(1, 1 << 20, |limits| Place::Usize(&mut limits.connections)),
        },
        Limit {
            name: "handshakes",
            what: "handshakes at a time; above, the oldest is cut once it had a second",
            value: Value::Count(1, 1 << 20, |limits| Place::Usize(&mut limits.handshakes)),
        },
        Limit {
            name: "handshake-time",
            what: "time for a handshake, TLS included (--timeout); 0 for any",
            value: Value::Time(|limits| &mut limits.handshake),
        },
        Limit {
            name: "options",
            what: "options in a handshake; 8 more for each export that was listed",
            value: Value::Count(1, 1 << 20, |limits| Place::U32(&mut limits.options)),
        },
        Limit {
            name: "queries",
            what: "metadata contexts that one option may ask for",
            value: Value::Count(0, blockhaul_wire::limits::QUERIES as u64, |limits| {
                Place::Usize(&mut limits.queries)
            }),
        },
        Limit {
            name: "name",
            what: "bytes of an export's name",
            value: Value::Count(0, blockhaul_wire::limits::STRING as u64, |limits| {
                Place::Usize(&mut limits.name)
            }),
        },
        Limit {
            name: "exports",
            what: "exports in a list",
            value: Value::Count(0, 1 << 20, |limits| Place::Usize(&mut limits.exports)),
        },
        Limit {
            name: "requests",
            what: "requests of a client in progress (--threads)",
            value: Value::Count(1, 1 << 16, |limits| Place::Usize(&mut limits.requests)),
        },
        Limit {
            name: "requests-all",
            what: "requests of all clients in progress; above, each client has one at a time",
            value: Value::Count(1, 1 << 24, |limits| Place::Usize(&mut limits.requests_all)),
        },
        Limit {
            name: "bytes",
            what: "bytes of a client's requests in progress and of replies it has not read",
            value: Value::Size(1 << 20, 1 << 40, |limits| Place::U64(&mut limits.client_bytes)),
        },
        Limit {
            name: "bytes-all",
            what: "the same of all clients (--memory)",
            value: Value::Size(64 << 20, 1 << 40, |limits| Place::U64(&mut limits.all_bytes)),
        },
        Limit {
            name: "payload",
            what: "longest read or write",
            value: Value::Size(
                PAYLOAD_LEAST as u64,
                blockhaul_wire::limits::PAYLOAD_HARD as u64,
                |limits| Place::U32(&mut limits.payload),
            ),
        },
        Limit {
            name: "extents",
            what: "extents in a reply",
            value: Value::Count(1, blockhaul_wire::limits::EXTENTS as u64, |limits| {
                Place::Usize(&mut limits.extents)
            }),
        },
        Limit {
            name: "stalled",
            what: "time after which a client that reads or sends too slowly is cut, where others need its \
                   memory; 0 for never",
            value: Value::Time(|limits| &mut limits.stalled),
        },
    ];

    /// Sets a limit from `NAME=VALUE`.
    ///
    /// # Errors
    /// What is wrong with it, for whoever typed it.
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
            Value::Time(place) => {
                let time = parse_duration(value).map_err(|error| wrong(&error.text()))?;
                *place(self) = time;
                return Ok(());
            }
            Value::Count(least, most, place) => {
                let number =
                    value.parse().map_err(|_| wrong(&format!("{value:?} is no number")))?;
                (number, least, most, place)
            }
            Value::Size(least, most, place) => {
                let size = parse_size(value).map_err(|error| wrong(&error.text()))?;
                (size, least, most, place)
            }
        };
        if !(*least..=*most).contains(&number) {
            return Err(wrong(&format!("{value} is not between {least} and {most}")));
        }
        let fits = match place(self) {
            Place::U64(place) => {
                *place = number;
                true
            }
            Place::U32(place) => u32::try_from(number).map(|number| *place = number).is_ok(),
            Place::Usize(place) => usize::try_from(number).map(|number| *place = number).is_ok(),
        };
        fits.then_some(()).ok_or_else(|| wrong(&format!("{value} is too much")))
    }
}

impl Limit {
    /// Its default, as it is typed.
    pub fn default(&self) -> String {
        let mut limits = Limits::default();
        let number = |place| match place {
            Place::U32(number) => u64::from(*number),
            Place::U64(number) => *number,
            Place::Usize(number) => *number as u64,
        };
        match &self.value {
            Value::Count(_, _, place) => number(place(&mut limits)).to_string(),
            Value::Size(_, _, place) => format!("{}M", number(place(&mut limits)) >> 20),
            Value::Time(place) => format!("{}s", place(&mut limits).as_secs()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("connections=-1", "no number"),
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
