//! Failed flushes remain failed.
//!
//! Storage may report lost data once: Linux reports a failed writeback to the first fsync of each open
//! file. [`FailedFlush`] remembers the report. [`Flushes`] applies it to all handles of a storage.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use blockhaul_io::{Completer, Ticket};

use crate::{Device, Error, Kind, OpKind, Outcome, PendingRequest, Request, Result};

/// The first failed flush of a storage since it was opened, if any.
#[derive(Debug, Default)]
pub struct FailedFlush(OnceLock<(Instant, String)>);

impl FailedFlush {
    /// Remembers the error of a flush. Only the first one counts.
    pub fn note(&self, error: &Error) {
        self.0.get_or_init(|| (blockhaul_io::now(), error.text()));
    }

    /// Whether a flush may still succeed.
    ///
    /// # Errors
    /// [`Kind::Io`] after a failed flush. The text says what failed, how long ago, and what to do.
    pub fn check(&self) -> Result<()> {
        let Some((when, why)) = self.0.get() else { return Ok(()) };
        let age = blockhaul_io::elapsed(*when).as_secs();
        let text = format!(
            "a flush failed {age} s ago ({why}), and what was written before it may be lost: open the \
             storage again and write that data again"
        );
        Err(Error::new(Kind::Io, text))
    }
}

/// Flushes and FUA requests to one storage by all its handles, for a caller that serves several
/// clients.
///
/// After a failed one all others fail. A success waits for the requests that overlap it and fails
/// if one of them does: the storage may have reported lost data only to that one.
#[derive(Default)]
pub struct Flushes {
    failed: FailedFlush,
    state: Mutex<FlushState>,
}

#[derive(Default)]
struct FlushState {
    next: u64,
    /// Requests that the device has, by number.
    held: BTreeSet<u64>,
    /// Successes that wait until the device has no request below a number.
    waiting: Vec<(u64, Completer<()>)>,
}

/// A flush or FUA request that the device has ([`Flushes::begin`]).
pub struct DurableRequest {
    flushes: Arc<Flushes>,
    number: u64,
    kind: OpKind,
}

impl Flushes {
    /// Registers a flush or FUA request of this kind that is about to be submitted.
    ///
    /// # Errors
    /// Those of [`FailedFlush::check`]: the request must not be submitted.
    pub fn begin(self: &Arc<Flushes>, kind: OpKind) -> Result<DurableRequest> {
        self.failed.check()?;
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.held.insert(number);
        drop(state);
        Ok(DurableRequest { flushes: self.clone(), number, kind })
    }

    /// Submits a flush or FUA request to a device, unless one has failed before: what completes at once, or the
    /// request. Errors name the request and the device. `alone` is as for [`DurableRequest::end`].
    ///
    /// # Errors
    /// `Err` is a request that is still in flight.
    pub fn submit(
        self: &Arc<Flushes>,
        device: &dyn Device,
        request: Request,
        alone: bool,
    ) -> Result<Outcome, PendingRequest> {
        let (kind, at, len) = (request.kind(), request.at, request.len);
        let name = device.facts().name.clone();
        let located = move |error: Error| error.during(kind, at, len).on(&name);
        let durable = match self.begin(kind) {
            Ok(durable) => durable,
            Err(error) => return Ok(Err(located(error))),
        };
        match device.submit(request).now() {
            Ok(outcome) => match durable.end_now(outcome, alone) {
                Ok(outcome) => Ok(outcome.map_err(located)),
                Err((durable, outcome)) => Err(PendingRequest::start(async move {
                    durable.end(outcome, alone).await.map_err(located)
                })),
            },
            Err(pending) => Err(PendingRequest::start(async move {
                durable.end(pending.await, alone).await.map_err(located)
            })),
        }
    }

    fn state(&self) -> MutexGuard<'_, FlushState> {
        self.state.lock().expect("no panic under this lock")
    }
}

impl DurableRequest {
    /// The outcome for the caller, from that of the device. `alone`: the device itself tracks
    /// overlapping requests ([`crate::Facts::flush_failures_stay`]), so no request is waited for.
    ///
    /// # Errors
    /// That of the device, or that of a flush that has failed meanwhile.
    pub async fn end(self, outcome: Outcome, alone: bool) -> Outcome {
        let waits = self.over(&outcome, alone);
        if let Some(ticket) = waits {
            // Without a value if the last of them is dropped with the program.
            let _ = ticket.await;
        }
        outcome.and_then(|reply| self.flushes.failed.check().map(|()| reply))
    }

    /// The same without waiting; returns the outcome if waiting is necessary.
    ///
    /// # Errors
    /// `Err` is a request that must wait for others: give it to [`DurableRequest::end`].
    pub fn end_now(
        self,
        outcome: Outcome,
        alone: bool,
    ) -> Result<Outcome, (DurableRequest, Outcome)> {
        if !alone && outcome.is_ok() && self.flushes.state().held.len() > 1 {
            return Err((self, outcome));
        }
        drop(self.over(&outcome, true));
        Ok(outcome.and_then(|reply| self.flushes.failed.check().map(|()| reply)))
    }

    /// Removes the request from the list. The caller must wait for the returned ticket.
    fn over(&self, outcome: &Outcome, alone: bool) -> Option<Ticket<()>> {
        if let Err(error) = outcome
            && is_failed_flush(self.kind, error)
        {
            self.flushes.failed.note(error);
        }
        let mut state = self.flushes.state();
        state.held.remove(&self.number);
        let end = state.next;
        let overlapped = !alone && outcome.is_ok() && !state.held.is_empty();
        let waits = overlapped.then(|| {
            let (completer, ticket) = blockhaul_io::ticket();
            state.waiting.push((end, completer));
            ticket
        });
        let first = state.held.first().copied().unwrap_or(u64::MAX);
        let due: Vec<_> = state.waiting.extract_if(.., |(end, _)| *end <= first).collect();
        drop(state);
        due.into_iter().for_each(|(_, completer)| completer.complete(()));
        waits
    }
}

impl Drop for DurableRequest {
    /// A dropped request must not block others.
    fn drop(&mut self) {
        if self.flushes.state().held.contains(&self.number) {
            let lost = Error::new(Kind::Disconnected, "the request got lost");
            drop(self.over(&Err(lost), true));
        }
    }
}

/// Whether this failed flush or FUA request casts doubt on earlier writes.
fn is_failed_flush(kind: OpKind, error: &Error) -> bool {
    // An unsupported request was never started.
    let refused = matches!(error.kind(), Kind::Unsupported | Kind::Invalid | Kind::ReadOnly);
    !error.is_before_flush() && (kind == OpKind::Flush || !refused)
}
