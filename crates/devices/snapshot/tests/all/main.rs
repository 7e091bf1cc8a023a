//! A snapshot shows the disk as it was, whatever is written meanwhile.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod bitmaps;
mod changes;
mod conformance;
mod limits;
mod random;
mod support;
mod view;
