//! Moves of simulated machines, in virtual time.

mod simulation;
