//! Finder of peer programs (nbdkit, libnbd's tools, QEMU's, fio, mkfs.ext4, …) and helpers to run
//! them: scratch directories with short socket paths, servers that are started and stopped, runs
//! with a time limit, waits for a condition.
//!
//! Programs come from `target/peers` (see `cargo xtask peers`), else from the search path. If one
//! is missing or too old, a test prints the reason and is skipped; with `CI=true` or
//! `BLOCKHAUL_REQUIRE_PEERS=1` it fails instead. `BLOCKHAUL_PEERS` names another directory of
//! unpacked peers.
//!
//! ```no_run
//! use blockhaul_testkit::tools::{ScratchDir, PeerServer};
//!
//! fn copies_from_nbdkit() {
//!     let nbdkit = blockhaul_testkit::require_peer!("nbdkit");
//!     let nbdinfo = blockhaul_testkit::require_peer!("nbdinfo");
//!     let scratch = ScratchDir::new().unwrap();
//!     let server = PeerServer::nbdkit(&nbdkit, &scratch.socket("s"), &["pattern", "1G"]).unwrap();
//!     let mut command = nbdinfo.command();
//!     command.args(["--size", &server.uri("")]);
//!     let output = blockhaul_testkit::tools::output(&mut command, std::time::Duration::from_secs(10));
//!     assert_eq!(output.unwrap().stdout, b"1073741824\n");
//! }
//! ```

mod peer;
mod python;
mod run;
mod scratch;
mod server;
mod skip;
mod wait;

pub use self::peer::{PeerProgram, Version, among_peers};
pub use self::python::{npm_program, python_program, python_with};
pub use self::run::{is_running, output, status_kib, text, wait_within};
pub use self::scratch::ScratchDir;
pub use self::server::PeerServer;
pub use self::skip::{LIST, SkipReason, long, runs_long, skip, skip_or_fail};
pub use self::wait::{until, until_ok, until_some};
