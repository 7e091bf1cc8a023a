//! Tests of the protocol.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod golden;
mod handshake;
mod malformed;
mod roundtrip;
