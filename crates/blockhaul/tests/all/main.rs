//! The library as other programs use it: its examples, and a crate of another workspace.

#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod examples;
mod outside;
