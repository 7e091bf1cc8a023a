//! Tests of the engine.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod copy;
mod digests;
mod discards;
mod errors;
mod extents;
mod flushes;
mod long_path;
mod resume;
mod retry;
mod runs;
mod server;
