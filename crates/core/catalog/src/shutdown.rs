//! How storage, gates and plugins stop the server that they belong to.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_io::Ticket;

/// Asks the program to stop its server. The program that made the handle decides what to do. A
/// program with several servers makes one handle for each.
///
/// Requests to the default handle are only logged.
#[derive(Clone, Default)]
pub struct Shutdown(Option<Arc<ShutdownAction>>);

/// The effect of a request.
type ShutdownAction = dyn Fn(&str) + Send + Sync;

impl Shutdown {
    /// A handle that calls `act` with the reason of each request. `act` may be called on any
    /// thread, also concurrently, and must not block.
    pub fn calling(act: impl Fn(&str) + Send + Sync + 'static) -> Shutdown {
        Shutdown(Some(Arc::new(act)))
    }

    /// A handle, and a ticket that yields the reason of the first request. The ticket is lost if no
    /// handle is left.
    pub fn channel() -> (Shutdown, Ticket<String>) {
        let (completer, requested) = blockhaul_io::ticket();
        let first = Mutex::new(Some(completer));
        let act = move |reason: &str| {
            let first = first.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(completer) = first {
                completer.complete(reason.to_string());
            }
        };
        (Shutdown::calling(act), requested)
    }

    /// Asks the server to stop. Returns at once, on any thread; the server may stop later or never.
    /// `reason` is a phrase for the log.
    pub fn request(&self, reason: &str) {
        match &self.0 {
            Some(act) => {
                log::debug!("the server is asked to stop: {reason}");
                act(reason);
            }
            None => log::debug!("there is no server to stop: {reason}"),
        }
    }
}

impl fmt::Debug for Shutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Shutdown" } else { "Shutdown(nobody)" })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn the_first_reason_counts_and_every_request_is_heard() {
        let (shutdown, requested) = Shutdown::channel();
        let other = shutdown.clone();
        std::thread::spawn(move || other.request("one")).join().unwrap();
        shutdown.request("two");
        let runtime = blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig {
            workers: 1,
            ..blockhaul_io::RuntimeConfig::default()
        });
        let reason = runtime.unwrap().block_on(move || requested);
        assert_eq!(reason.as_deref(), Ok("one"));

        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let shutdown = Shutdown::calling(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        shutdown.request("one");
        shutdown.request("two");
        assert_eq!(count.load(Ordering::Relaxed), 2);
        Shutdown::default().request("nobody hears it");
    }
}
