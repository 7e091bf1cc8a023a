//! Requests to read ahead that nobody waits for.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, Request};
use blockhaul_io::{Ticket, WorkerHandle};

/// Maximum time that the end of the program waits for a hint.
const HINT_TIME: Duration = Duration::from_secs(30);

/// Submits a hint; the ticket reports whether it succeeded.
///
/// The workers do not end before the hint has completed: it may hold the device below, and layers
/// there may write data back when their last handle is dropped.
pub(crate) fn hint(device: Arc<dyn Device>, at: u64, len: u64) -> Ticket<bool> {
    let (completer, ticket) = blockhaul_io::ticket();
    let pending = match device.submit(Request::cache(at, len)).now() {
        Ok(outcome) => {
            completer.complete(outcome.is_ok());
            return ticket;
        }
        Err(pending) => pending,
    };
    let (over, ended) = blockhaul_io::ticket();
    drop(blockhaul_io::start(async move {
        let outcome = blockhaul_io::timeout(HINT_TIME, pending).await;
        drop(device);
        completer.complete(matches!(outcome, Ok(Ok(_))));
        over.complete(());
    }));
    WorkerHandle::to(blockhaul_io::worker()).spawn_last(move || async move {
        let _ = ended.await;
    });
    ticket
}
