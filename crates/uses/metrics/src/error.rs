//! Errors: destinations that are invalid, and destinations that cannot be used.

use std::error::Error;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use blockhaul_io::plain;

use crate::destination::ScrapeAddress;

/// Why a text is no [`Destination`](crate::Destination).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DestinationError {
    /// The name of the file does not end in `.prom`.
    FileName,
    /// The path of a Unix socket is empty.
    NoPath,
    /// The text has none of the forms of a destination.
    Form {
        /// The text.
        text: String,
    },
    /// The host is unknown.
    Lookup {
        /// The text.
        text: String,
        /// Why the lookup failed.
        reason: String,
    },
    /// The address is one that other machines reach.
    NotLoopback {
        /// The text.
        text: String,
    },
}

impl fmt::Display for DestinationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FileName => f.write_str(
                "textfile: requires a file name that ends in .prom: node_exporter reads no other files",
            ),
            Self::NoPath => f.write_str("unix: requires a path, as unix:PATH"),
            Self::Form { text } => write!(
                f,
                "{text:?} is neither HOST:PORT, as localhost:9100, nor unix:PATH, nor textfile:PATH"
            ),
            Self::Lookup { text, reason } => write!(
                f,
                "cannot look up the host of {text:?}: {reason}; check the name, or write 127.0.0.1"
            ),
            Self::NotLoopback { text } => write!(
                f,
                "{text:?} is not a loopback address (127.0.0.1, ::1, localhost): use a proxy to serve the \
                 metrics to other machines"
            ),
        }
    }
}

impl Error for DestinationError {}

/// Why metrics cannot be published.
#[derive(Debug)]
pub enum MetricsError {
    /// There is more than one address.
    SeveralAddresses,
    /// There is more than one file.
    SeveralFiles,
    /// The page has no address.
    PageWithoutAddress,
    /// A relative path has no directory to begin in.
    Directory {
        /// Why the current directory is unknown.
        error: io::Error,
    },
    /// The listener failed to start.
    Listen {
        /// The address to listen on.
        address: ScrapeAddress,
        /// Why it failed.
        error: io::Error,
    },
    /// The first version of the file could not be written.
    Write {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        error: io::Error,
    },
}

impl MetricsError {
    /// The remedy, if the error alone does not show it.
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Write { error, .. } if error.kind() == ErrorKind::NotFound => {
                Some("create its directory first")
            }
            _ => None,
        }
    }
}

impl fmt::Display for MetricsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SeveralAddresses => f.write_str("give at most one address"),
            Self::SeveralFiles => f.write_str("give at most one textfile:"),
            Self::PageWithoutAddress => f.write_str("the page requires an address to listen on"),
            Self::Directory { error } => f.write_str(&plain(error)),
            Self::Listen { address, error } => {
                write!(f, "cannot listen on {address}: {}", plain(error))
            }
            Self::Write { path, error } => {
                write!(f, "cannot write {}: {}", path.display(), plain(error))
            }
        }
    }
}

impl Error for MetricsError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Directory { error } | Self::Listen { error, .. } | Self::Write { error, .. } => {
                Some(error)
            }
            _ => None,
        }
    }
}
