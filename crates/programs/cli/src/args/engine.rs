//! Options on how work is carried out.

use clap::Args;

/// How work is carried out: for every command that moves much.
#[derive(Debug, Args)]
pub struct Engine {
    /// How to talk to the kernel: uring, threads (epoll and threads), or auto, which takes io_uring
    /// where it is allowed
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Tuning")]
    pub engine: blockhaul_io::Engine,

    /// Move every byte through memory: no splice, no reflink, no copying by the kernel. For comparing,
    /// and should a kernel do it wrong
    #[arg(long, help_heading = "Tuning")]
    pub no_zero_copy: bool,
}

impl Engine {
    /// How to run `workers` threads, 0 for one per core.
    pub fn config(&self, workers: usize) -> blockhaul_io::Config {
        if self.no_zero_copy {
            blockhaul_io::disable_parking();
        }
        blockhaul_io::Config { workers, engine: self.engine }
    }
}
