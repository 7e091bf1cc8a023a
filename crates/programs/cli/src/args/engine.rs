//! Options on how work is carried out.

use clap::Args;

/// How work is carried out: for every command that moves much.
#[derive(Debug, Clone, Default, Args)]
pub struct EngineArgs {
    /// How to perform I/O: uring, threads or auto
    ///
    /// uring is io_uring; threads is epoll and threads. auto uses io_uring if it is allowed.
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Tuning")]
    pub engine: blockhaul_io::IoEngine,

    /// Move every byte through memory: no splice, reflink or copy by the kernel
    ///
    /// For comparisons, and for kernels in which these are faulty.
    #[arg(long, help_heading = "Tuning")]
    pub no_zero_copy: bool,
}

impl EngineArgs {
    /// How to run `workers` threads, 0 for one per core.
    pub fn config(&self, workers: usize) -> blockhaul_io::RuntimeConfig {
        if self.no_zero_copy {
            blockhaul_io::disable_parking();
        }
        blockhaul_io::RuntimeConfig { workers, engine: self.engine }
    }
}
