//! Tests of the server.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod flushes;
mod load;
mod panics;
mod semantics;
