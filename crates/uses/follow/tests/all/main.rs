//! Moves of simulated machines, in virtual time.
#![allow(clippy::unwrap_used)]

mod simulation;
