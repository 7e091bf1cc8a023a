//! Errors: what the caller can do, what was tried, on what, where, and why.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use crate::OpKind;

/// Result of an operation on devices.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the caller can do about an error. Names the remedy, not the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The device is read-only: choose another, or open it for writing.
    ReadOnly,
    /// The storage failed on this range; other ranges may work.
    Io,
    /// Not enough memory now; a smaller or later request may work.
    NoMemory,
    /// The request is wrong: fix the caller.
    Invalid,
    /// The storage is full: free some space.
    NoSpace,
    /// The request is too large for one reply: split it.
    TooLarge,
    /// The device cannot do this: use another way.
    Unsupported,
    /// The device is shutting down: connect elsewhere or later.
    ShuttingDown,
    /// The connection was lost: reconnect; whether the request took effect is unknown.
    Disconnected,
    /// No reply in time; whether the request took effect is unknown.
    TimedOut,
    /// The named object does not exist.
    NotFound,
    /// Access was refused.
    Refused,
    /// Another device or program uses the storage: close it there first, or choose another.
    InUse,
    /// The user's input is invalid.
    Usage,
}

/// Error numbers of NBD (its document, "Error values"); Linux uses the same.
const NUMBERS: [(u32, Kind); 9] = [
    (1, Kind::ReadOnly),
    (5, Kind::Io),
    (12, Kind::NoMemory),
    (22, Kind::Invalid),
    (28, Kind::NoSpace),
    (75, Kind::TooLarge),
    (95, Kind::Unsupported),
    (108, Kind::ShuttingDown),
    (110, Kind::TimedOut),
];

impl Kind {
    /// The number for other programs. A kind without its own number is an I/O error.
    pub fn number(self) -> u32 {
        match self {
            Kind::Disconnected | Kind::TimedOut | Kind::NotFound => 5,
            Kind::Refused | Kind::InUse => 1,
            Kind::Usage => 22,
            kind => NUMBERS.iter().find(|row| row.1 == kind).map_or(5, |row| row.0),
        }
    }

    /// The kind of another program's number; an unknown number counts as a storage failure.
    pub fn from_number(number: u32) -> Kind {
        NUMBERS.iter().find(|row| row.0 == number).map_or(Kind::Io, |row| row.1)
    }
}

/// An error. One allocation; cheap to clone.
#[derive(Clone)]
pub struct Error(Arc<ErrorDetails>);

#[derive(Clone)]
struct ErrorDetails {
    kind: Kind,
    text: Cow<'static, str>,
    during: Option<(OpKind, u64, u64)>,
    device: Option<Arc<str>>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
    os_error: Option<i32>,
    /// Empty: the text says everything that is known.
    remedy: Option<Cow<'static, str>>,
    before_flush: bool,
}

impl Error {
    /// An error of this kind; the text says what failed, lower case, no full stop.
    pub fn new(kind: Kind, text: impl Into<Cow<'static, str>>) -> Error {
        Error(Arc::new(ErrorDetails {
            kind,
            text: text.into(),
            during: None,
            device: None,
            source: None,
            os_error: None,
            remedy: None,
            before_flush: false,
        }))
    }

    /// A device has violated the contract: a reply of the wrong kind or length.
    pub fn misfit() -> Error {
        Error::new(
            Kind::Io,
            "the device returned a reply of the wrong kind or length (a bug in the device \
                              or plugin)",
        )
    }

    /// A failed system call; the kind is derived from the error number.
    pub fn system(text: impl Into<Cow<'static, str>>, error: std::io::Error) -> Error {
        use std::io::ErrorKind;
        let kind = match error.raw_os_error() {
            Some(libc_number) => match libc_number {
                // EFBIG and EDQUOT: the file system has no space, either.
                27 | 122 => Kind::NoSpace,
                // EROFS and EACCES.
                30 => Kind::ReadOnly,
                13 => Kind::Refused,
                2 => Kind::NotFound,
                // EPIPE, ECONNRESET, ECONNABORTED, ENOTCONN.
                32 | 103 | 104 | 107 => Kind::Disconnected,
                number => Kind::from_number(number.unsigned_abs()),
            },
            None => match error.kind() {
                ErrorKind::NotFound => Kind::NotFound,
                ErrorKind::InvalidInput => Kind::Invalid,
                ErrorKind::TimedOut => Kind::TimedOut,
                _ => Kind::Io,
            },
        };
        let os_error = error.raw_os_error();
        Error::new(kind, text).because(error).change(|inner| inner.os_error = os_error)
    }

    /// The same error with its cause.
    #[must_use]
    pub fn because(self, source: impl StdError + Send + Sync + 'static) -> Error {
        self.change(|inner| inner.source = Some(Arc::new(source)))
    }

    /// The same error with the request in which it happened, unless already set.
    #[must_use]
    pub fn during(self, kind: OpKind, at: u64, len: u64) -> Error {
        if self.0.during.is_some() {
            return self;
        }
        self.change(|inner| inner.during = Some((kind, at, len)))
    }

    /// The same error with the device on which it happened, unless already set.
    #[must_use]
    pub fn on(self, device: &Arc<str>) -> Error {
        if self.0.device.is_some() {
            return self;
        }
        self.change(|inner| inner.device = Some(device.clone()))
    }

    /// The same error with what the user can do about it: an imperative, lower case, no full stop.
    #[must_use]
    pub fn with_remedy(self, remedy: impl Into<Cow<'static, str>>) -> Error {
        let remedy = remedy.into();
        self.change(|inner| inner.remedy = Some(remedy))
    }

    /// The same error with a remedy, unless it [is complete](Error::is_complete).
    #[must_use]
    pub fn or_remedy(self, remedy: &'static str) -> Error {
        if self.is_complete() { self } else { self.with_remedy(remedy) }
    }

    /// The same error, whose text says everything that is known: nobody adds a remedy.
    #[must_use]
    pub fn complete(self) -> Error {
        self.with_remedy("")
    }

    /// The same error as one of a plugin or script: what is known of an I/O error is what that says.
    #[must_use]
    pub fn of_plugin(self) -> Error {
        if self.kind() == Kind::Io { self.complete() } else { self }
    }

    /// The same error with another kind.
    #[must_use]
    pub fn with_kind(self, kind: Kind) -> Error {
        self.change(|inner| inner.kind = kind)
    }

    /// An error of the same kind, with the same error number and remedy, and with this text, which
    /// contains [that of this one](Error::text) or [all of it](Error::located).
    #[must_use]
    pub fn reworded(&self, text: impl Into<Cow<'static, str>>) -> Error {
        let ErrorDetails { kind, os_error, ref remedy, .. } = *self.0;
        let remedy = remedy.clone();
        Error::new(kind, text).change(|inner| {
            inner.os_error = os_error;
            inner.remedy = remedy;
        })
    }

    /// The same error, for a request that failed before any flush: earlier writes are as safe as
    /// before, even if the request has [`RequestFlags::FUA`](crate::RequestFlags::FUA).
    #[must_use]
    pub fn before_flush(self) -> Error {
        if self.0.before_flush {
            return self;
        }
        self.change(|inner| inner.before_flush = true)
    }

    /// Whether the request failed before any flush ([`Error::before_flush`]). False if that is
    /// unknown.
    pub fn is_before_flush(&self) -> bool {
        self.0.before_flush
    }

    fn change(mut self, change: impl FnOnce(&mut ErrorDetails)) -> Error {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// What the caller can do about it.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The request in which it happened: kind, offset, length.
    pub fn request(&self) -> Option<(OpKind, u64, u64)> {
        self.0.during
    }

    /// What the user can do about it, if that is known where the error arose. A front end has
    /// remedies for kinds of errors, for those that are not [complete](Error::is_complete).
    pub fn remedy(&self) -> Option<&str> {
        self.0.remedy.as_deref().filter(|remedy| !remedy.is_empty())
    }

    /// Whether there is nothing to add: the error has a remedy, or its text says everything that is
    /// known.
    pub fn is_complete(&self) -> bool {
        self.0.remedy.is_some()
    }

    /// The error number of the system call that failed, if one did.
    pub fn os_error(&self) -> Option<i32> {
        self.0.os_error
    }

    /// The device on which it happened.
    pub fn device(&self) -> Option<&Arc<str>> {
        self.0.device.as_ref()
    }

    /// The message with device and place, without remedy.
    pub fn located(&self) -> String {
        let device = self.0.device.as_ref().map(|device| format!("{device}: ")).unwrap_or_default();
        let place = match self.0.during {
            Some((OpKind::Flush, ..)) => "flush: ".to_string(),
            Some((kind, at, len)) => format!("{kind} of {len} bytes at offset {at}: "),
            None => String::new(),
        };
        device + &place + &self.text()
    }

    /// The message without device, place and remedy, as a server sends it to its client.
    pub fn text(&self) -> String {
        match &self.0.source {
            Some(source) => format!("{}: {}", self.0.text, blockhaul_io::plain(source.as_ref())),
            None => self.0.text.to_string(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.located())?;
        match self.remedy() {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({self})", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_ref().map(|source| source.as_ref() as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_what_where_and_why_once() {
        let device: Arc<str> = "file:disk.raw".into();
        let error = Error::system("cannot read", std::io::Error::from_raw_os_error(5))
            .during(OpKind::Read, 8192, 4096)
            .during(OpKind::Write, 1, 1)
            .on(&device)
            .on(&"other".into());
        assert_eq!(
            error.to_string(),
            "file:disk.raw: read of 4096 bytes at offset 8192: cannot read: Input/output error"
        );
        assert_eq!(error.kind(), Kind::Io);
    }

    #[test]
    fn a_remedy_is_a_field_that_other_words_keep() {
        let full = Error::system("cannot write", std::io::Error::from_raw_os_error(27));
        assert_eq!((full.remedy(), full.is_complete(), full.os_error()), (None, false, Some(27)));
        let advised = full.with_remedy("choose another place").on(&"disk.raw".into());
        assert_eq!(
            advised.to_string(),
            "disk.raw: cannot write: File too large; choose another place"
        );
        assert_eq!(advised.text(), "cannot write: File too large");
        let wrapped = advised.reworded(format!("no point in time: {}", advised.located()));
        assert_eq!(
            wrapped.to_string(),
            "no point in time: disk.raw: cannot write: File too large; choose another place"
        );
        assert_eq!((wrapped.kind(), wrapped.os_error()), (Kind::NoSpace, Some(27)));
        let complete = Error::new(Kind::Io, "the plugin says no").complete().or_remedy("never");
        assert_eq!((complete.remedy(), complete.is_complete()), (None, true));
        assert_eq!(complete.to_string(), "the plugin says no");
        assert!(Error::new(Kind::Io, "EIO").of_plugin().is_complete());
        assert!(!Error::new(Kind::NoSpace, "ENOSPC").of_plugin().is_complete());
    }

    #[test]
    fn numbers_and_kinds_agree() {
        for (number, kind) in NUMBERS.iter().filter(|row| row.1 != Kind::TimedOut) {
            assert_eq!(Kind::from_number(*number), *kind);
            assert_eq!(kind.number(), *number);
        }
        assert_eq!(Kind::from_number(77), Kind::Io);
        assert_eq!(Kind::TimedOut.number(), 5);
    }
}
