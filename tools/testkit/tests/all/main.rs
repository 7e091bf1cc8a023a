//! Tests of what tests use: the model, the conformance suite, faults, and scripted peers.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod conform_broken;
mod conform_huge;
mod conform_model;
mod emulate_and_fence;
mod faults_and_crashes;
mod peers;
mod switch;
