//! Tests of the simulator, and its scenarios.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod oracle;
mod scenarios;
mod waiting;
