//! Programs that scenarios need and no system ships: a driver of QEMU's jobs, a web server for
//! files, a proxy that delays, many idle connections, and fixed workloads for counting instructions. They are
//! subcommands of `bench helper`, which people do not see.

pub mod delay;
pub mod http;
pub mod idle;
pub mod job;
pub mod work;

use std::path::PathBuf;

use clap::Subcommand;

use blockhaul_measure::Result;

/// Which helper.
#[derive(Debug, Subcommand)]
pub enum HelperCommand {
    /// Runs a job of qemu-storage-daemon to its end
    Job(job::QmpJobArgs),
    /// Serves the files of a folder over HTTP on the loopback address until it is killed
    Http {
        /// The folder
        dir: PathBuf,
        /// TCP port
        #[arg(long)]
        port: u16,
    },
    /// Passes connections from a TCP port of the loopback address to another, with a delay, until it is killed
    Delay {
        /// The port of the server
        to: u16,
        /// TCP port for clients
        #[arg(long)]
        port: u16,
        /// Time that a response takes longer, in milliseconds
        #[arg(long)]
        delay_ms: u64,
    },
    /// Opens connections to an NBD server and keeps them for a while
    Idle {
        /// The server
        uri: String,
        /// How many
        #[arg(long)]
        connections: u32,
        /// How long they are kept once they are all open, in milliseconds
        #[arg(long, default_value = "300")]
        keep_ms: u64,
    },
    /// Carries out a fixed workload
    Work {
        /// Which
        #[arg(value_enum)]
        kind: work::WorkloadKind,
        /// How often
        count: u32,
    },
}

impl HelperCommand {
    /// Does it.
    pub fn run(&self) -> Result<()> {
        match self {
            HelperCommand::Job(job) => job.run(),
            HelperCommand::Http { dir, port } => http::serve(dir, *port),
            HelperCommand::Delay { to, port, delay_ms } => {
                delay::serve(*port, *to, std::time::Duration::from_millis(*delay_ms))
            }
            HelperCommand::Idle { uri, connections, keep_ms } => {
                idle::keep(uri, *connections, std::time::Duration::from_millis(*keep_ms))
            }
            HelperCommand::Work { kind, count } => work::run(*kind, *count),
        }
    }
}
