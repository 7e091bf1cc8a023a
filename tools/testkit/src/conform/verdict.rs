//! Results of checks, and how a check ends early.

/// The result of a check that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The sentence holds.
    Held,
    /// It does not apply, for this reason.
    Skipped(String),
}

/// The result of a check: an error says what is wrong.
pub(super) type CheckResult = Result<Verdict, String>;

/// Fails the check unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(crate) use ensure;

/// Leaves the check, which does not apply.
macro_rules! skip_if {
    ($condition:expr, $reason:expr) => {
        if $condition {
            return Ok($crate::conform::Verdict::Skipped($reason.to_string()));
        }
    };
}
pub(crate) use skip_if;
