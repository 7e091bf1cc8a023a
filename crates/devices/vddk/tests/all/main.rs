//! Tests of `vddk:` with the simulated library, in this process.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod conformance;
mod errors;
mod extents;
mod handles;
mod support;
