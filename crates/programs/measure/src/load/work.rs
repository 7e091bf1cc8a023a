//! What a run does: how many requests of which kind, on how many connections.

use std::time::Duration;

use blockhaul_io::Data;
use clap::ValueEnum;

use crate::random::RandomGenerator;

/// In which order places are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AccessOrder {
    /// Random offsets
    #[default]
    Random,
    /// Ascending offsets
    Sequential,
}

/// What is to be done, on all connections.
#[derive(Clone, Debug)]
pub(super) struct LoadWork {
    /// Bytes of a request.
    pub(super) size: u64,
    pub(super) requests: usize,
    pub(super) connections: usize,
    pub(super) order: AccessOrder,
    /// Requests of 100 that read.
    pub(super) reads: u64,
    /// Bytes from the beginning of the device that are used, if not all.
    pub(super) span: Option<u64>,
    pub(super) seed: u64,
    pub(super) count: Option<u64>,
    pub(super) time: Duration,
}

impl LoadWork {
    /// Bytes of a device of `size` bytes that are used.
    pub(super) fn span_of(&self, size: u64) -> u64 {
        self.span.map_or(size, |span| span.min(size))
    }

    /// Whether any request writes.
    pub(super) fn writes(&self) -> bool {
        self.reads < 100
    }
}

/// What a request writes. Not zeroes, which some servers look for.
pub(super) fn payload(work: &LoadWork) -> Data {
    if !work.writes() {
        return Data::zeroes(0);
    }
    let mut bytes = vec![0; work.size as usize];
    RandomGenerator::new(work.seed).fill(&mut bytes);
    Data::copy_of(&bytes)
}
