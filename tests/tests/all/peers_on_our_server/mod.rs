//! Other people's clients on `blockhaul serve`: nbdcopy, qemu-img, qemu-io, fio, libnbd's shell and
//! nbdinfo. Where a peer's server has the same file, both have to give the same answer.

mod libnbd;
mod programs;

use std::fs;
use std::path::Path;

use blockhaul_testkit::image;
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::{PeerProgram, PeerServer, ScratchDir};
use blockhaul_tests::{assert_same, done, garbage, nonzero, peer, serve, text};

/// A random sparse image; prints its seed.
fn random_image(path: &Path, size: u64) {
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    image::sparse(path, size, seed).unwrap();
}
