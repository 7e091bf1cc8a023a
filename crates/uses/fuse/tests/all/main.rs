//! Tests of sessions of FUSE.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod parked;
mod session;
