//! The configuration file of a server, in TOML: exports, listeners, TLS, limits, metrics, and the rights and rates of
//! clients; and what a running server does when it changes.
//!
//! - `definition`: a [`ServerConfigFile`] as data. `reader`: [`ServerConfigFile::parse`]. `table`: keys and values
//!   of one table of TOML, and their lines, also for other files. `error`: a [`ConfigFileError`] names file, line, key
//!   and guess.
//! - `difference`: what a running server changes when its file has changed ([`ConfigDifference`]).
//! - `client_pattern`: which clients a rule is about ([`AddressRange`]). `access`: their rights and rates, before the
//!   exports of a server. `running`: the configuration of a running server ([`RunningConfig`]).

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod access;
mod client_pattern;
mod definition;
mod difference;
mod error;
mod reader;
mod running;
mod table;

pub use client_pattern::{AddressRange, ClientPattern};
pub use definition::{
    ClientRights, ConfiguredExport, ConfiguredLimit, ListenTable, MetricsTable, ServerConfigFile,
    TlsTable,
};
pub use difference::ConfigDifference;
pub use error::{ConfigErrorKind, ConfigFileError};
pub use running::RunningConfig;
pub use table::{TomlEntry, TomlText, toml_entry, toml_start, toml_word};
