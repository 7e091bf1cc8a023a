//! A request in flight.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use blockhaul_io::{Completer, LostCompletion, Task, Ticket};

use crate::{Error, Kind, OpKind, Reply};

/// How a request ended.
pub type Outcome = Result<Reply, Error>;

/// A request that has started. Awaiting it yields the outcome; dropping it detaches.
#[must_use = "a request's outcome must be looked at"]
pub struct PendingRequest {
    state: PendingState,
    /// What the fence knows about the request, for messages and to check the reply.
    check: Option<ReplyCheck>,
}

enum PendingState {
    Ready(Option<Outcome>),
    Task(Task<Outcome>),
    Future(RequestFuture),
    Finishing(RequestWork),
    Ticket(Ticket<Outcome>),
}

type RequestFuture = Pin<Box<dyn Future<Output = Outcome>>>;

/// Work that its `PendingRequest` polls, and that a task finishes if the `PendingRequest` is dropped.
struct RequestWork(Option<RequestFuture>);

impl Drop for RequestWork {
    fn drop(&mut self) {
        if let Some(work) = self.0.take() {
            drop(blockhaul_io::spawn(work));
        }
    }
}

pub(crate) struct ReplyCheck {
    pub(crate) device: Arc<str>,
    pub(crate) kind: OpKind,
    pub(crate) at: u64,
    pub(crate) len: u64,
}

impl PendingRequest {
    /// A request that is already complete.
    pub fn ready(outcome: Outcome) -> PendingRequest {
        PendingRequest { state: PendingState::Ready(Some(outcome)), check: None }
    }

    /// A request that a task carries out; it runs up to its first wait before this returns.
    pub fn start(work: impl Future<Output = Outcome> + 'static) -> PendingRequest {
        PendingRequest { state: PendingState::Task(blockhaul_io::start(work)), check: None }
    }

    /// A request that the kernel already carries out, and that needs no work but to return its
    /// outcome (a read): without its own task. `outcome` is polled only by the caller.
    pub fn under_way(outcome: impl Future<Output = Outcome> + 'static) -> PendingRequest {
        PendingRequest { state: PendingState::Future(Box::pin(outcome)), check: None }
    }

    /// A request that the kernel already carries out, but that may leave work to do (the rest of a
    /// partial write). Without its own task, unless it is dropped early: then a task finishes it.
    pub fn finishing(outcome: impl Future<Output = Outcome> + 'static) -> PendingRequest {
        let work = RequestWork(Some(Box::pin(outcome)));
        PendingRequest { state: PendingState::Finishing(work), check: None }
    }

    /// The same request with a guard that is dropped when it has completed, whether polled or not.
    /// A completed request needs none. If the caller keeps the `PendingRequest` without polling it, the
    /// guard may stay until it does.
    pub fn guarded<G: 'static>(self, guard: impl FnOnce() -> G) -> PendingRequest {
        if matches!(self.state, PendingState::Ready(_)) {
            return self;
        }
        let guard = guard();
        PendingRequest::finishing(async move {
            let outcome = self.await;
            drop(guard);
            outcome
        })
    }

    /// A request that is completed from outside, on any thread.
    pub fn completer() -> (Completer<Outcome>, PendingRequest) {
        let (completer, ticket) = blockhaul_io::ticket();
        (completer, PendingRequest { state: PendingState::Ticket(ticket), check: None })
    }

    /// The outcome if it is ready without waiting, else the request.
    ///
    /// # Errors
    /// `Err` is the request itself, which is still in flight.
    pub fn now(mut self) -> Result<Outcome, PendingRequest> {
        match &mut self.state {
            PendingState::Ready(outcome) => match outcome.take() {
                Some(outcome) => Ok(self.checked(outcome)),
                None => Err(self),
            },
            _ => Err(self),
        }
    }

    pub(crate) fn with_check(mut self, check: ReplyCheck) -> PendingRequest {
        self.check = Some(check);
        self
    }

    /// The same, unless a valid outcome is ready, as for most requests of a fast device.
    pub(crate) fn checked_as(
        self,
        kind: OpKind,
        len: u64,
        check: impl FnOnce() -> ReplyCheck,
    ) -> PendingRequest {
        match &self.state {
            PendingState::Ready(Some(outcome @ Ok(_))) if fits(outcome, kind, len) => self,
            _ => self.with_check(check()),
        }
    }

    fn checked(&self, outcome: Outcome) -> Outcome {
        let Some(check) = &self.check else { return outcome };
        let outcome =
            if fits(&outcome, check.kind, check.len) { outcome } else { Err(Error::misfit()) };
        outcome.map_err(|error| error.during(check.kind, check.at, check.len).on(&check.device))
    }
}

/// The completer was dropped.
fn got_lost(lost: LostCompletion) -> Error {
    Error::new(Kind::Disconnected, "the request got lost").because(lost)
}

/// Whether an outcome is valid for such a request.
fn fits(outcome: &Outcome, kind: OpKind, len: u64) -> bool {
    match (outcome, kind) {
        (Err(_), _) => true,
        (Ok(Reply::Data(data)), OpKind::Read) => data.len() as u64 == len,
        (Ok(Reply::Hole), OpKind::Read) => true,
        (Ok(Reply::Extents(lists)), OpKind::Extents) => lists.iter().all(|list| {
            let covered = list.total();
            covered > 0 && covered <= len
        }),
        (Ok(Reply::Done), kind) => !matches!(kind, OpKind::Read | OpKind::Extents),
        _ => false,
    }
}

impl Future for PendingRequest {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let outcome = match &mut self.state {
            PendingState::Ready(outcome) => outcome.take().expect("a request completes once"),
            PendingState::Task(task) => match task.poll_or_lost(cx) {
                Poll::Ready(Ok(outcome)) => outcome,
                Poll::Ready(Err(lost)) => Err(got_lost(lost)),
                Poll::Pending => return Poll::Pending,
            },
            PendingState::Future(future) => match future.as_mut().poll(cx) {
                Poll::Ready(outcome) => outcome,
                Poll::Pending => return Poll::Pending,
            },
            PendingState::Finishing(RequestWork(work)) => {
                let left = work.as_mut().expect("a request completes once");
                match left.as_mut().poll(cx) {
                    Poll::Ready(outcome) => {
                        *work = None;
                        outcome
                    }
                    Poll::Pending => return Poll::Pending,
                }
            }
            PendingState::Ticket(ticket) => match Pin::new(ticket).poll(cx) {
                Poll::Ready(Ok(outcome)) => outcome,
                Poll::Ready(Err(lost)) => Err(got_lost(lost)),
                Poll::Pending => return Poll::Pending,
            },
        };
        Poll::Ready(self.checked(outcome))
    }
}

impl From<Outcome> for PendingRequest {
    fn from(outcome: Outcome) -> PendingRequest {
        PendingRequest::ready(outcome)
    }
}

impl From<Error> for PendingRequest {
    fn from(error: Error) -> PendingRequest {
        PendingRequest::ready(Err(error))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_finishes_a_request_runs_once_whether_somebody_waits_or_not() {
        let runtime = blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig {
            workers: 1,
            ..Default::default()
        })
        .unwrap();
        let ended = runtime.block_on(|| async {
            let ended = Rc::new(Cell::new(0));
            let request = || {
                let ended = ended.clone();
                PendingRequest::finishing(async move {
                    blockhaul_io::sleep(Duration::from_millis(1)).await;
                    ended.set(ended.get() + 1);
                    Ok(Reply::Done)
                })
            };
            assert!(matches!(request().await, Ok(Reply::Done)));
            drop(request());
            let mut polled = request();
            assert!(blockhaul_io::timeout(Duration::ZERO, &mut polled).await.is_err());
            drop(polled);
            while ended.get() < 3 {
                blockhaul_io::sleep(Duration::from_millis(1)).await;
            }
            blockhaul_io::sleep(Duration::from_millis(20)).await;
            ended.get()
        });
        assert_eq!(ended, 3);
    }
}
