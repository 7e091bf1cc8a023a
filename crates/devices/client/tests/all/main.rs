//! Tests of the client.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

#[path = "../common/mod.rs"]
mod common;
mod conformance;
mod handshakes;
mod stress;
