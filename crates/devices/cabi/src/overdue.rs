//! Callbacks that exceed their time limit (`@timeout`): the caller stops waiting, and the plugin
//! counts as hanging until the callback returns.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::context::{self, CallStage, CallWatch};
use crate::plugin::{HangingCalls, Plugin};

/// The time limit of a job that calls a plugin.
#[derive(Clone)]
pub(crate) struct CallTimeout {
    pub(crate) limit: Duration,
    watch: Arc<CallWatch>,
    hanging: HangingCalls,
}

impl CallTimeout {
    /// For a job of this plugin; none without a limit.
    pub(crate) fn of(plugin: &Plugin) -> Option<CallTimeout> {
        let limit = plugin.host.timeout?;
        Some(CallTimeout { limit, watch: Arc::default(), hanging: plugin.hanging.clone() })
    }

    /// Runs the job, on the plugin's thread.
    pub(crate) fn during<R>(overdue: Option<&CallTimeout>, job: impl FnOnce() -> R) -> R {
        let Some(overdue) = overdue else { return job() };
        let (result, given_up) = context::watched(&overdue.watch, job);
        if given_up {
            overdue.hanging.fetch_sub(1, Ordering::Relaxed);
        }
        result
    }

    /// Waits for the job's result. The error is its stage when the time is over.
    pub(crate) async fn wait<F: Future>(&self, job: F) -> Result<F::Output, CallStage> {
        match blockhaul_io::timeout(self.limit, job).await {
            Ok(output) => Ok(output),
            Err(blockhaul_io::TimeoutError) => {
                // Before it can be decremented.
                self.hanging.fetch_add(1, Ordering::Relaxed);
                let stage = self.watch.give_up();
                if stage == CallStage::Over {
                    self.hanging.fetch_sub(1, Ordering::Relaxed);
                }
                Err(stage)
            }
        }
    }
}
