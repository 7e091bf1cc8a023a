//! Tests of the client.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod blocking;
mod common;
mod conformance;
mod faults;
mod handshakes;
mod stress;
mod tls;
