//! Components of tests: a model device, the conformance suite of the device contract, random
//! requests, faults, power cuts, scripted peers, disk images, and a finder of peer programs.

pub mod arbitrary;
pub mod conform;
pub mod crash;
pub mod fault;
pub mod history;
pub mod image;
pub mod model;
pub mod mutate;
pub mod peer;
pub mod rng;
pub mod tools;
