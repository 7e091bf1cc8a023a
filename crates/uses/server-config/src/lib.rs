//! The configuration file of a server, in TOML: exports, listeners, TLS, limits, metrics, and the rights and rates of
//! clients. Nothing is opened here.
//!
//! - `definition`: a [`ServerConfigFile`] as data. `reader`: [`ServerConfigFile::parse`]. `table`: keys and values
//!   of one table. `error`: a [`ConfigFileError`] names file, line, key and guess.
//! - `difference`: what a running server changes when its file has changed ([`ConfigDifference`]).
//! - `client_pattern`: which clients a rule is about ([`AddressRange`]).

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod client_pattern;
mod definition;
mod difference;
mod error;
mod reader;
mod table;

pub use client_pattern::{AddressRange, ClientPattern};
pub use definition::{
    ClientRights, ConfiguredExport, ConfiguredLimit, ListenTable, MetricsTable, ServerConfigFile,
    TlsTable,
};
pub use difference::ConfigDifference;
pub use error::ConfigFileError;
