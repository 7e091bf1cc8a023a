//! Tests of the client.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod blocking;
#[path = "../common/mod.rs"]
mod common;
mod conformance;
mod handshakes;
mod stress;
