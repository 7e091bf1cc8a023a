//! Failures of a command: one line with what failed, where, why and a remedy; and the exit
//! statuses, which scripts can distinguish.

use std::fmt;

use blockhaul_block::{Error, Kind};

pub use blockhaul_io::plain;

/// The result of a command: its exit status, or why it failed.
pub type Outcome = Result<u8, Failure>;

/// The operation failed in a way not listed below.
pub const FAILED: u8 = 1;
/// The command line is invalid.
pub const USAGE: u8 = 2;
/// A device cannot be opened: not found, refused, not an NBD server, or of the wrong kind or size.
pub const OPEN: u8 = 3;
/// The source failed.
pub const SOURCE: u8 = 4;
/// The target failed.
pub const TARGET: u8 = 5;
/// The target is full.
pub const FULL: u8 = 6;
/// A connection was lost or timed out.
pub const LOST: u8 = 7;
/// Verification found source and target different.
pub const DIFFERENT: u8 = 8;

/// A server stopped while requests were still in flight at devices, or plugins or scripts had not
/// ended.
pub const HELD: u8 = 9;

/// The statuses, for help and manual.
pub const TABLE: &[(&str, &str)] = &[
    ("0", "success"),
    ("1", "a failure other than those below"),
    (
        "2",
        "the command line is invalid, or an argument has the wrong type (for example, a directory)",
    ),
    (
        "3",
        "a device cannot be opened: not found, refused, in use, not an NBD server, read-only, or the target \
         is smaller than the source; nothing was written, and no target was resized or emptied",
    ),
    ("4", "reading the source failed"),
    ("5", "writing the target failed"),
    ("6", "the target is full"),
    ("7", "a connection was lost or timed out"),
    ("8", "verification found that source and target, or device and manifest, differ"),
    (
        "128+N",
        "terminated by signal N: 130 for Ctrl-C, 143 for SIGTERM, 141 if standard output was closed before \
         the end of a copy. A shell reports 137 after SIGKILL; a copy with a journal can then be resumed",
    ),
    (
        "check",
        "as qemu-img check: 0 no faults, or all repaired, 1 the check is incomplete, 2 corruptions, 3 leaks",
    ),
    (
        "compare",
        "as qemu-img compare: 0 the same, 1 different, 2 cannot open, 3 cannot get extents, 4 cannot read",
    ),
    ("info", "as nbdinfo: 0 success or true, 2 the answer to --can or --is is no, 1 any failure"),
    (
        "ctl",
        "0 done; 1 the server failed; 2 unknown command, or invalid value; 3 no server listens on the \
         socket, or it has no such client, export or layer; 7 no reply in time",
    ),
    (
        "serve",
        "0 after a normal exit; 5 if a layer could not write back data that it had accepted (cache); 9 if \
         devices still held requests after --drain-timeout, or plugins or scripts had not ended; with --run, \
         the status of the command, or 128+N if signal N terminated it",
    ),
];

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    status: u8,
    text: String,
}

impl Failure {
    /// A failure with this exit status.
    pub fn new(status: u8, text: impl Into<String>) -> Failure {
        Failure { status, text: text.into() }
    }

    /// The command line is invalid.
    pub fn usage(text: impl Into<String>) -> Failure {
        Failure::new(USAGE, text)
    }

    /// A device could not be opened. `role`: "source", "target", "device".
    pub fn opening(role: &str, what: &str, error: &Error) -> Failure {
        let status = match error.kind() {
            Kind::Usage => USAGE,
            Kind::TimedOut => LOST,
            Kind::NoSpace => FULL,
            _ => OPEN,
        };
        let text = error.to_string();
        let what = &*crate::ends::shown(what);
        let place = if text.contains(what) || error.kind() == Kind::Usage {
            String::new()
        } else {
            format!("{what}: ")
        };
        let next = match error.kind() {
            Kind::Io if is_of_plugin(what) => "",
            kind => next(kind, &text, true),
        };
        Failure::new(status, format!("cannot open the {role}: {place}{text}{next}"))
    }

    /// The same failure with another status.
    #[must_use]
    pub fn with_status(self, status: u8) -> Failure {
        Failure { status, ..self }
    }

    /// The same failure with text appended.
    #[must_use]
    pub fn and(self, more: &str) -> Failure {
        Failure { text: self.text + more, ..self }
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        self.status
    }
}

/// The failure of a store.
pub fn stored(error: Error) -> Failure {
    let status = match error.kind() {
        Kind::Usage => USAGE,
        Kind::NoSpace => FULL,
        _ => OPEN,
    };
    let next =
        if error.kind() == Kind::NoSpace { "; free some space, then run it again" } else { "" };
    Failure::new(status, format!("{error}{next}"))
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text.trim())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let status = match error.kind() {
            Kind::Usage => USAGE,
            Kind::Disconnected | Kind::TimedOut => LOST,
            _ => FAILED,
        };
        let text = error.to_string();
        let next = next(error.kind(), &text, false);
        Failure::new(status, format!("{text}{next}"))
    }
}

/// The beginnings of devices that plugins and scripts implement.
const PLUGINS: [&str; 4] = ["sh:", "eval:", "python:", "nbdkit:"];

/// The remedy for an error, appended to its text.
pub fn next(kind: Kind, text: &str, opening: bool) -> &'static str {
    // Texts with their own remedy get no other one.
    let advises = [
        "choose ",
        "check ",
        "make ",
        "create its directory",
        "copy to ",
        "is this an NBD",
        "known are",
        "install ",
        "may be in a package",
        "leave ",
        "open it read-only",
    ];
    if advises.iter().any(|advice| text.contains(advice)) {
        return "";
    }
    let nbd = text.contains("connect to ") || text.contains("an export at ");
    let path = ["Too many levels of symbolic links", "Not a directory", "File name too long"];
    let path = path.iter().any(|error| text.contains(error));
    match kind {
        Kind::NotFound if text.contains("cannot look up host") => "; check the name of the host",
        Kind::NotFound if text.contains("no such export") => {
            "; list the exports with blockhaul info --list"
        }
        Kind::NotFound if nbd => "; check that the server runs, and where it listens",
        Kind::NotFound => "; check the name",
        Kind::Refused if nbd && text.contains("TLS is required") => {
            "; use an nbds URI, with a key or certificates"
        }
        Kind::Refused | Kind::Unsupported if nbd && text.contains("refused STARTTLS") => {
            "; give the server keys or certificates, or use an nbd URI if the network is trusted"
        }
        Kind::Refused if nbd && text.contains("has expired") => {
            "; the server needs a new certificate"
        }
        Kind::Refused if nbd && text.contains("certificate revoked") => {
            "; the server needs another certificate"
        }
        Kind::Refused if nbd && text.contains("certificate is not accepted") => {
            "; set its authority with tls-certificates=DIR, or its host name with tls-hostname=NAME"
        }
        // The error says who uses it.
        Kind::InUse => "",
        Kind::Refused if nbd => "; check what the server requires",
        Kind::Refused => "; use another user, or change the permissions",
        Kind::ReadOnly if opening => "; open it read-only, or change its permissions",
        Kind::ReadOnly => "; choose another target, or serve it for writing",
        // A limit of the file system or of the process (ulimit -f).
        Kind::NoSpace if text.contains("File too large") => {
            "; no file of this size is allowed there: choose another place, or raise ulimit -f"
        }
        Kind::NoSpace => "; free some space, then run it again",
        Kind::NoMemory => "; use less memory (--request-size, --queue-size)",
        Kind::TimedOut => "; check that the server is alive, or wait longer with --timeout",
        Kind::Disconnected if opening => "; check the messages of the server",
        Kind::Disconnected => "; check the messages of the server, then run it again",
        Kind::ShuttingDown => "; connect to another server, or try again later",
        Kind::Io if opening && nbd => "; check that an NBD server listens there",
        // It has printed why, on standard error.
        Kind::Io if text.contains("its process has ended with") => "; see its messages",
        _ if opening && path => "; check the path",
        // The plugin's message is all that is known.
        Kind::Io if is_of_plugin(text) => "",
        Kind::Io if opening => "; check the storage",
        Kind::Io => "; check the storage there, then run it again",
        Kind::Unsupported | Kind::Invalid | Kind::TooLarge | Kind::Usage => "",
    }
}

/// Whether an error is of a device that a plugin or a script implements.
fn is_of_plugin(text: &str) -> bool {
    text.split(": ").any(|part| PLUGINS.iter().any(|scheme| part.starts_with(scheme)))
}

/// A message of several lines, as one line.
pub fn joined(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_several_lines_become_one() {
        assert_eq!(joined("first\n  second\n\nthird"), "first second third");
    }

    #[test]
    fn advice_fits_the_error() {
        let at = "cannot connect to h port 1: ";
        for (kind, text, advice) in [
            (
                Kind::NotFound,
                format!("{at}cannot look up host \"h\""),
                "check the name of the host",
            ),
            (
                Kind::NotFound,
                "cannot open an export at h port 1: the server refused INFO: no such export".into(),
                "info --list",
            ),
            (Kind::NotFound, format!("{at}connect: No such file"), "where it listens"),
            (Kind::Io, "cannot open it: Not a directory".into(), "check the path"),
            (
                Kind::Io,
                "cannot open it: Too many levels of symbolic links".into(),
                "check the path",
            ),
            (Kind::Io, "cannot open it: Input/output error".into(), "check the storage"),
            (Kind::Io, "nbd+ssh://h/: Input/output error".into(), "check the storage"),
            (Kind::NoSpace, "cannot resize it: File too large".into(), "choose another place"),
            (Kind::NoSpace, "cannot write: No space left on device".into(), "free some space"),
        ] {
            let found = next(kind, &text, true);
            assert!(found.contains(advice), "{text}{found}");
        }
        // Its own message says what to check.
        let script = "sh:./disk.sh: ./disk.sh: get_size: printed \"1X\", which is no size";
        assert_eq!(next(Kind::Io, script, true), "");
    }

    #[test]
    fn opening_tells_kinds_apart_and_what_to_do() {
        let gone = Error::new(Kind::NotFound, "no such file").on(&"disk.raw".into());
        let failure = Failure::opening("source", "disk.raw", &gone);
        assert_eq!(failure.status(), OPEN);
        let text = "cannot open the source: disk.raw: no such file; check the name";
        assert_eq!(failure.to_string(), text);
        let late = Error::new(Kind::TimedOut, "no greeting within 30 s: is this an NBD server?");
        let failure = Failure::opening("source", "nbd://h", &late);
        assert_eq!(failure.status(), LOST);
        assert!(failure.to_string().starts_with("cannot open the source: nbd://h: no greeting"));
        let wrong = Error::new(Kind::Io, "./a.sh: get_size: printed 1X");
        let failure = Failure::opening("source", "sh:./a.sh", &wrong).to_string();
        assert_eq!(failure, "cannot open the source: sh:./a.sh: ./a.sh: get_size: printed 1X");
    }
}
