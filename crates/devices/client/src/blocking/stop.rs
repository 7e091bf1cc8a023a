//! Why a call has no result, and how the thread that waits says that it wants none any more.

use std::time::Duration;

use blockhaul_block::Error;

/// Interval at which a waiting thread asks whether to go on.
pub const LOOK: Duration = Duration::from_millis(100);

/// Called by a thread that waits, each [`LOOK`] and after signals; false: it does not want to wait any more.
pub type ContinueCallback<'a> = &'a mut dyn FnMut() -> bool;

/// Why a call has no result.
#[derive(Debug)]
pub enum CallStop {
    /// It has failed.
    Failed(Error),
    /// The thread did not want to wait any more. A change may still happen.
    Interrupted,
    /// The connection was given away ([`BlockingConnection::retire`](super::BlockingConnection::retire)); the request
    /// was not sent.
    Retired,
}

impl From<Error> for CallStop {
    fn from(error: Error) -> CallStop {
        CallStop::Failed(error)
    }
}
