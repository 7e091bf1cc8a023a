//! From a request to its outcome: submitted to the device on this worker or on an idle one,
//! completed at once or later.

use std::rc::Rc;
use std::time::Instant;

use blockhaul_block::{Op, OpKind, PendingRequest, Request, RequestFlags};
use blockhaul_io::WorkerHandle;

use super::{SEND_AT, Session};
use crate::reply::ReplyContext;

/// Of requests that complete at once, one in this many is timed.
const TIMED: u8 = 16;
/// Writes from this length on take much longer than passing them to another worker.
const LARGE: usize = 128 << 10;

impl Session {
    /// Submits a request to the device; the reply is queued when it completes.
    pub(super) fn submit(self: &Rc<Self>, mut asked: ReplyContext, request: Request) {
        let kind = request.kind();
        let timed = self.begin(kind);
        // nbd: fua.durable, command-flags.fua, flush.covers-completed, flush.durable
        let durable = kind == OpKind::Flush || request.flags.contains(RequestFlags::FUA);
        let large = matches!(&request.op, Op::Write(data) if data.len() >= LARGE);
        let submitted = if durable {
            self.flushes.submit(&*self.device, request, self.flush_failures_stay)
        } else {
            match large.then(|| self.helper()).flatten() {
                Some(worker) => Err(self.delegate(&worker, request)),
                // nbd: write.before-reply, zeroes.before-reply
                None => self.device.submit(request).now(),
            }
        };
        if kind == OpKind::Read {
            self.reads_at_once.set(submitted.is_ok());
        }
        match submitted {
            Ok(outcome) => {
                self.writes_at_once.set(self.writes_at_once.get() || large);
                self.answered_at_once(kind, timed);
                self.complete(&mut asked, outcome);
                if self.out.borrow().queued() >= SEND_AT {
                    self.send();
                }
            }
            Err(pending) => {
                let ticket = self.in_flight.add(asked.header);
                self.connection.counters.in_progress(self.in_flight.count());
                self.server.all_in_flight.add();
                let session = self.clone();
                drop(blockhaul_io::start(async move {
                    let outcome = pending.await;
                    // A request that was given up has its reply, and its connection has ended.
                    if let Some(time) = session.in_flight.finish(ticket) {
                        session.connection.counters.in_progress(session.in_flight.count());
                        session.server.control.times().took(kind, time, 1);
                        session.server.all_in_flight.remove(1, session.limits.requests_all);
                        session.complete(&mut asked, outcome);
                        session.to_send.notify();
                        session.progress.notify();
                    }
                }));
            }
        }
    }

    /// An idle worker for a large write while this one receives the next request: worthwhile if the
    /// device writes on the worker itself, and more has arrived.
    fn helper(&self) -> Option<WorkerHandle> {
        let more = self.writes_at_once.get() && self.stream.has_more();
        more.then(blockhaul_io::idle_worker).flatten()
    }

    fn delegate(&self, worker: &WorkerHandle, request: Request) -> PendingRequest {
        let (completer, pending) = PendingRequest::completer();
        let device = self.device.clone();
        drop(worker.spawn(move || async move {
            completer.complete(device.submit(request).await);
        }));
        pending
    }

    /// The current time, if the next request of this kind is to be timed even if it completes at
    /// once: reading the clock costs as much as counting ten requests.
    fn begin(&self, kind: OpKind) -> Option<Instant> {
        self.untimed[kind as usize].get().is_multiple_of(TIMED).then(blockhaul_io::now)
    }

    fn answered_at_once(&self, kind: OpKind, timed: Option<Instant>) {
        let untimed = &self.untimed[kind as usize];
        match timed {
            None => untimed.set(untimed.get() + 1),
            Some(begun) => {
                // The first one counts only for itself.
                let count = 1 + u64::from(untimed.get().saturating_sub(1));
                self.server.control.times().took(kind, blockhaul_io::elapsed(begun), count);
                untimed.set(1);
            }
        }
    }
}
