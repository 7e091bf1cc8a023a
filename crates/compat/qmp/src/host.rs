//! The program around a monitor.

use std::pin::Pin;

use blockhaul_io::Listener;

/// The future of listeners that are bound on a worker.
pub type ListenerFuture = Pin<Box<dyn Future<Output = blockhaul_block::Result<Vec<Listener>>>>>;

/// The program around a monitor: the effects of commands outside of exports, jobs and bitmaps.
pub trait MonitorHost: Send + Sync {
    /// Begins the orderly stop of the program, for `quit`. The monitor still answers the command.
    fn stop(&self);

    /// Binds TCP port `port` (0: a free one) on all addresses of `host`, for `nbd-server-start`.
    /// `None`: on all addresses of this machine.
    ///
    /// # Errors
    /// The name of the host is unknown, or the system refuses an address or the port. The client gets the
    /// text of the error without its remedy.
    fn bind_tcp(&self, host: Option<String>, port: u16) -> ListenerFuture;
}
