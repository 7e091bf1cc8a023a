//! Tests of workers, drivers, files and sockets.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod drivers;
mod failed_ring;
mod lend;
mod lost_payload;
mod park;
#[cfg(feature = "simulation")]
mod simulation;
