//! What ends the rounds of a move.

use serde::Deserialize;

/// When a move ends its rounds.
#[derive(Debug, Clone, PartialEq)]
pub struct FollowLimits {
    /// Seconds of downtime that are allowed.
    pub downtime: f64,
    /// Maximum number of rounds before the last one.
    pub rounds: u32,
    /// Seconds since 1970 at which rounds end.
    pub until: Option<f64>,
    /// What is read again after the last round.
    pub verify: VerifyScope,
}

/// What is read again after the last round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VerifyScope {
    /// Nothing.
    None,
    /// What the last round has written.
    Written,
    /// All of both disks.
    All,
}
