//! Tests that cannot run here say so, and are counted by `cargo xtask test`.

use std::fmt::{self, Display};
use std::fs::OpenOptions;
use std::io::{self, Write as _};

/// Names a file that gets a line for each skipped test: its name, a tab and the reason.
pub const LIST: &str = "BLOCKHAUL_SKIPPED";

/// Why a test cannot run here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkipReason(pub(super) String);

impl SkipReason {
    /// What is missing.
    pub fn new(text: impl Into<String>) -> SkipReason {
        SkipReason(text.into())
    }
}

impl Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Prints why the test of this thread, or a part of it, is skipped. The output is not captured.
///
/// # Panics
/// With `BLOCKHAUL_REQUIRE=1`, which demands a machine that can run all tests.
#[track_caller]
pub fn skip(reason: impl Display) {
    assert!(!set("BLOCKHAUL_REQUIRE"), "{reason}");
    record(&reason);
}

/// As [`skip`], for what every machine with the peers has.
///
/// # Panics
/// As [`skip`], and if peers are required: `CI=true` or `BLOCKHAUL_REQUIRE_PEERS=1`.
#[track_caller]
pub fn skip_or_fail(reason: &SkipReason) {
    assert!(!set("CI") && !set("BLOCKHAUL_REQUIRE_PEERS"), "{reason}");
    skip(reason);
}

/// Whether long tests run: with `BLOCKHAUL_LONG=1`.
pub fn long() -> bool {
    std::env::var_os("BLOCKHAUL_LONG").is_some()
}

/// Whether a test runs that takes long. It is listed as skipped else.
pub fn runs_long() -> bool {
    if !long() {
        record(&"a long test: set BLOCKHAUL_LONG=1");
    }
    long()
}

fn record(reason: &dyn Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // One line.
    let reason = reason.to_string().split_ascii_whitespace().collect::<Vec<_>>().join(" ");
    // Ignore a closed standard error.
    let _ = writeln!(io::stderr(), "{test}: skipped: {reason}");
    let Some(list) = std::env::var_os(LIST) else { return };
    let opened = OpenOptions::new().create(true).append(true).open(&list);
    let line = format!("{test}\t{reason}\n");
    let written = opened.and_then(|mut file| file.write_all(line.as_bytes()));
    written.unwrap_or_else(|error| panic!("{LIST}={}: {error}", list.display()));
}

fn set(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| value == "1" || value == "true")
}
