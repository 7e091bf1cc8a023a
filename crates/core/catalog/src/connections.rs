//! Settings of the connections that devices make.

use std::time::Duration;

/// Settings of the connections that devices make to servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionSettings {
    /// Time without a byte after which a connection is dropped, and maximum time of a handshake; zero:
    /// never.
    pub timeout: Duration,
    /// Bytes per second below which a connection is dropped; 0: no minimum.
    pub min_rate: u64,
    /// Metadata contexts that servers are asked for besides `base:allocation`.
    pub contexts: Vec<String>,
}

impl ConnectionSettings {
    /// The default settings with another timeout; zero: none.
    pub fn with_timeout(timeout: Duration) -> ConnectionSettings {
        ConnectionSettings { timeout, ..ConnectionSettings::default() }
    }
}

impl Default for ConnectionSettings {
    /// A timeout of 60 s, no minimum rate, and no more contexts.
    fn default() -> ConnectionSettings {
        ConnectionSettings { timeout: Duration::from_secs(60), min_rate: 0, contexts: Vec::new() }
    }
}
