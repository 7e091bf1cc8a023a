//! Callbacks that take longer than they may (`@timeout`): who waits gives up, and the plugin is known to
//! have a callback that hangs for as long as it does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::context::{self, Stage, Watch};
use crate::plugin::{Hanging, Plugin};

/// The time for a job that calls a plugin.
#[derive(Clone)]
pub(crate) struct Overdue {
    pub(crate) limit: Duration,
    watch: Arc<Watch>,
    hanging: Hanging,
}

impl Overdue {
    /// For a job of this plugin; none where it has all the time in the world.
    pub(crate) fn of(plugin: &Plugin) -> Option<Overdue> {
        let limit = plugin.host.timeout?;
        Some(Overdue { limit, watch: Arc::default(), hanging: plugin.hanging.clone() })
    }

    /// Does the job, on the plugin's thread.
    pub(crate) fn during<R>(overdue: Option<&Overdue>, job: impl FnOnce() -> R) -> R {
        let Some(overdue) = overdue else { return job() };
        let (result, given_up) = context::watched(&overdue.watch, job);
        if given_up {
            overdue.hanging.fetch_sub(1, Ordering::Relaxed);
        }
        result
    }

    /// Waits for what the job completes. The error is where it is when its time is over.
    pub(crate) async fn wait<F: Future>(&self, job: F) -> Result<F::Output, Stage> {
        match blockhaul_io::timeout(self.limit, job).await {
            Ok(output) => Ok(output),
            Err(blockhaul_io::Elapsed) => {
                // Before it can be taken off.
                self.hanging.fetch_add(1, Ordering::Relaxed);
                let stage = self.watch.give_up();
                if stage == Stage::Over {
                    self.hanging.fetch_sub(1, Ordering::Relaxed);
                }
                Err(stage)
            }
        }
    }
}
