//! Tests of scenarios and their results.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod end_to_end;
mod figures;
