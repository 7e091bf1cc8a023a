//! Runs our server, client and engine against each other in virtual time, on one thread, with faults
//! by a seed, and checks what must hold whatever happens. `docs/simulation.md` says how to use it and
//! how to add a scenario.
//!
//! - `ScenarioKind`: one kind of run; `SCENARIOS` lists them.
//! - `simulate`: one run. `shrink`: the same failure with fewer faults.
//! - `site`: a server on a machine that can lose power. `clients`: what uses a server. `oracle`: what
//!   a client may read.
//! - `meddler`: changes what client and server send.
//! - `per_client`: a disk that each client opens for itself.
//! - `job`: jobs of a disk in use. `desk`: what a server needs for them. `witness`: sees flushes.
//! - `noise`: how bad the network is.

#![cfg(feature = "simulation")]

mod clients;
mod copy;
mod desk;
mod hostile;
mod job;
mod meddler;
mod noise;
pub mod oracle;
mod per_client;
mod run;
mod serve;
mod shrink;
mod site;
mod witness;

use std::path::PathBuf;
use std::pin::Pin;

use blockhaul_io::simulation::Faults;
use blockhaul_testkit::rng::Rng;

pub use self::run::{SimulationResult, SimulationRun, simulate};
pub use self::shrink::{ShrinkResult, shrink};

/// One kind of run.
pub struct ScenarioKind {
    /// Its name on the command line.
    pub name: &'static str,
    /// One line for the help.
    pub summary: &'static str,
    start: fn(ScenarioSetup) -> ScenarioFuture,
}

/// What a run does, to its verdict: an error says which promise was broken.
type ScenarioFuture = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// What a scenario begins with.
struct ScenarioSetup {
    /// Decides what the scenario does; faults of the network have numbers of their own.
    rng: Rng,
    /// For sockets, journals and temporary files of this run.
    dir: PathBuf,
    /// How bad the network is.
    faults: Faults,
}

/// Every scenario, in the order of the help.
pub const SCENARIOS: &[ScenarioKind] = &[
    ScenarioKind {
        name: "copy",
        summary: "a copy with journal and retries; its machine, source and target lose power",
        start: |setting| Box::pin(copy::run(setting)),
    },
    ScenarioKind {
        name: "serve",
        summary: "clients of a server, with layers on both sides; the server and its disk fail",
        start: |setting| Box::pin(serve::run(setting)),
    },
    ScenarioKind {
        name: "job",
        summary: "backups, mirrors and bitmaps of a disk in use; servers and disks of both sides fail",
        start: |setting| Box::pin(job::run(setting)),
    },
    ScenarioKind {
        name: "hostile",
        summary: "peers that break the protocol, as clients and as servers, beside one that does not",
        start: |setting| Box::pin(hostile::run(setting)),
    },
];

/// The scenario of this name.
pub fn scenario(name: &str) -> Option<&'static ScenarioKind> {
    SCENARIOS.iter().find(|scenario| scenario.name == name)
}
