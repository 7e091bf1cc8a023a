//! Error numbers of the wire ("Error values"). They are the protocol's own, not the host's.

use std::fmt;

/// An error in a reply. Success is not a value: it is `None` instead of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Errno {
    /// `NBD_EPERM`, 1: not permitted, for example a write to a read-only export.
    Perm,
    /// `NBD_EIO`, 5: input or output error.
    Io,
    /// `NBD_ENOMEM`, 12: no memory. Servers should avoid it.
    NoMem,
    /// `NBD_EINVAL`, 22: invalid request.
    Inval,
    /// `NBD_ENOSPC`, 28: no space left, or a write beyond the end.
    NoSpc,
    /// `NBD_EOVERFLOW`, 75: too long; only for DF reads and for oversized effects.
    Overflow,
    /// `NBD_ENOTSUP`, 95: only for FAST_ZERO.
    NotSup,
    /// `NBD_ESHUTDOWN`, 108: the server is stopping.
    Shutdown,
    /// A number that the document does not define; treat it like [`Errno::Inval`]. Only made by
    /// parsing.
    Other(u32),
}

impl Errno {
    /// The error of a wire number; `None` for 0, which is success.
    pub const fn from_wire(number: u32) -> Option<Errno> {
        Some(match number {
            0 => return None,
            1 => Errno::Perm,
            5 => Errno::Io,
            12 => Errno::NoMem,
            22 => Errno::Inval,
            28 => Errno::NoSpc,
            75 => Errno::Overflow,
            95 => Errno::NotSup,
            108 => Errno::Shutdown,
            other => Errno::Other(other),
        })
    }

    /// The wire number, never 0 for an error that [`Errno::from_wire`] made.
    pub const fn to_wire(self) -> u32 {
        match self {
            Errno::Perm => 1,
            Errno::Io => 5,
            Errno::NoMem => 12,
            Errno::Inval => 22,
            Errno::NoSpc => 28,
            Errno::Overflow => 75,
            Errno::NotSup => 95,
            Errno::Shutdown => 108,
            Errno::Other(number) => number,
        }
    }

    /// The document's errors only: an unknown number becomes [`Errno::Inval`], as clients should
    /// treat it.
    pub const fn known(self) -> Errno {
        match self {
            Errno::Other(_) => Errno::Inval,
            known => known,
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Errno::Perm => "operation not permitted",
            Errno::Io => "input/output error",
            Errno::NoMem => "cannot allocate memory",
            Errno::Inval => "invalid argument",
            Errno::NoSpc => "no space left on device",
            Errno::Overflow => "value too large",
            Errno::NotSup => "operation not supported",
            Errno::Shutdown => "server is shutting down",
            Errno::Other(number) => return write!(f, "unknown error {number}"),
        })
    }
}

/// The wire number of a reply: 0 for success.
pub(crate) const fn to_wire(error: Option<Errno>) -> u32 {
    match error {
        None => 0,
        Some(error) => error.to_wire(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_the_wire() {
        for number in 1..=200 {
            assert_eq!(Errno::from_wire(number).unwrap().to_wire(), number);
        }
        assert_eq!(Errno::from_wire(0), None);
        assert_eq!(Errno::from_wire(108), Some(Errno::Shutdown));
    }

    #[test]
    fn unknown_numbers_count_as_invalid() {
        let error = Errno::from_wire(30).unwrap();
        assert_eq!(error.known(), Errno::Inval);
        assert_eq!(error.to_string(), "unknown error 30");
    }
}
