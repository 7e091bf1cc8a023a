//! Tests of layers.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod again;
mod cache;
mod changed;
#[path = "../common/mod.rs"]
mod common;
mod conformance;
mod cow;
mod damaged;
mod extents_cache;
mod flushes;
mod layers;
mod luks;
mod manual;
mod packed;
#[path = "../common/peers.rs"]
mod peers;
mod stacks;
