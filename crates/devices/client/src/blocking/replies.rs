//! Replies: payloads go where they belong, and complete replies to the threads that wait for them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, MutexGuard};
use std::time::Duration;

use blockhaul_wire::transmission::{ReadRange, ReceiveResult, TransmissionEvent};

use super::connection::{BlockingConnection, BlockingConnectionState, CompleteReply, OwnRequest};
use super::receiver::Receiver;
use super::stop::{CallStop, ContinueCallback, LOOK};
use crate::reply::wrong;

/// Pause of a thread that waits until others have taken their replies.
const PAUSE: Duration = Duration::from_millis(5);

/// The right to receive. It goes to the next thread when it is dropped.
pub(super) struct ReceiveTurn<'a> {
    blocking: &'a BlockingConnection,
    receiver: Option<Receiver>,
}

impl<'a> ReceiveTurn<'a> {
    pub(super) fn new(blocking: &'a BlockingConnection, receiver: Receiver) -> ReceiveTurn<'a> {
        ReceiveTurn { blocking, receiver: Some(receiver) }
    }

    pub(super) fn receiver(&mut self) -> &mut Receiver {
        self.receiver.get_or_insert_with(Receiver::new)
    }
}

impl Drop for ReceiveTurn<'_> {
    fn drop(&mut self) {
        let mut state = self.blocking.lock();
        state.receiver = self.receiver.take();
        let next = state.waiting.pop_front();
        drop(state);
        if let Some(next) = next {
            next.notify_one();
        }
    }
}

impl BlockingConnectionState {
    /// The first of these requests whose reply is complete.
    fn take_finished<'a>(
        &mut self,
        mine: &mut VecDeque<OwnRequest<'a>>,
    ) -> Option<(OwnRequest<'a>, CompleteReply)> {
        let place = |mine: &OwnRequest<'_>| {
            self.finished.iter().position(|finished| finished.cookie == mine.cookie)
        };
        let (index, at) =
            mine.iter().enumerate().find_map(|(index, mine)| Some((index, place(mine)?)))?;
        Some((mine.remove(index)?, self.finished.swap_remove(at)))
    }

    /// A request has its complete reply.
    fn finish(&mut self, finished: CompleteReply, is_mine: bool) {
        if finished.slot.abandoned {
            return;
        }
        if !is_mine {
            finished.slot.owner.notify_one();
        }
        self.finished.push(finished);
    }
}

impl BlockingConnection {
    /// Waits until one of these requests is complete; the other threads' replies are taken in, too.
    pub(super) fn receive<'a>(
        &self,
        owner: &Arc<Condvar>,
        mine: &mut VecDeque<OwnRequest<'a>>,
        go_on: ContinueCallback<'_>,
    ) -> Result<(OwnRequest<'a>, CompleteReply), CallStop> {
        let mut state = self.lock();
        loop {
            if let Some(finished) = state.take_finished(mine) {
                return Ok(finished);
            }
            if let Some(error) = &state.broken {
                return Err(error.clone().into());
            }
            if let Some(receiver) = state.receiver.take() {
                drop(state);
                self.messages(&mut ReceiveTurn::new(self, receiver), mine, go_on)?;
                state = self.lock();
                continue;
            }
            state.waiting.push_back(owner.clone());
            let waited = owner.wait_timeout(state, LOOK).expect("no panic under this lock");
            state = waited.0;
            state.waiting.retain(|waiting| !Arc::ptr_eq(waiting, owner));
            if waited.1.timed_out() {
                drop(state);
                if !go_on() {
                    return Err(CallStop::Interrupted);
                }
                state = self.lock();
            }
        }
    }

    /// Processes messages until one of these requests is complete.
    fn messages(
        &self,
        turn: &mut ReceiveTurn<'_>,
        mine: &mut VecDeque<OwnRequest<'_>>,
        go_on: ContinueCallback<'_>,
    ) -> Result<(), CallStop> {
        loop {
            let ended = self.message(turn.receiver(), mine, go_on)?;
            if ended.is_some_and(|cookie| mine.iter().any(|mine| mine.cookie == cookie)) {
                return Ok(());
            }
        }
    }

    /// Receives until the next event; returns the cookie of the request that it completes.
    pub(super) fn message(
        &self,
        receiver: &mut Receiver,
        mine: &mut VecDeque<OwnRequest<'_>>,
        go_on: ContinueCallback<'_>,
    ) -> Result<Option<u64>, CallStop> {
        let received = self.event(receiver, mine, go_on);
        if let Err(CallStop::Failed(error)) = &received {
            self.break_off(error);
        }
        received
    }

    fn event(
        &self,
        receiver: &mut Receiver,
        mine: &mut VecDeque<OwnRequest<'_>>,
        go_on: ContinueCallback<'_>,
    ) -> Result<Option<u64>, CallStop> {
        loop {
            let mut state = self.lock();
            let received = state.transmission.receive(receiver.bytes());
            let ReceiveResult { used, messages, event } =
                received.map_err(|error| wrong(&error))?;
            receiver.consume(used);
            self.traffic.received(used, messages);
            match event {
                TransmissionEvent::NeedMore | TransmissionEvent::Contents(_) => {
                    let between = state.transmission.is_between_messages();
                    drop(state);
                    receiver.fill(&self.socket, between, &mut *go_on)?;
                }
                TransmissionEvent::Payload(range) => {
                    self.payload(state, receiver, (range, mine), go_on)?;
                    return Ok(None);
                }
                TransmissionEvent::Hole(range) => {
                    self.to_place(state, range, mine, |place| place.map(|into| into.fill(0)));
                    return Ok(None);
                }
                TransmissionEvent::End { cookie, request: slot, result } => {
                    let is_mine = mine.iter().any(|mine| mine.cookie == cookie);
                    state.finish(CompleteReply { cookie, slot, result }, is_mine);
                    return Ok(Some(cookie));
                }
            }
        }
    }

    /// Receives bytes of a payload.
    fn payload(
        &self,
        state: MutexGuard<'_, BlockingConnectionState>,
        receiver: &mut Receiver,
        (range, mine): (ReadRange, &mut VecDeque<OwnRequest<'_>>),
        go_on: ContinueCallback<'_>,
    ) -> Result<(), CallStop> {
        let received = self.to_place(state, range, mine, |place| match place {
            Some(into) => receiver.payload(&self.socket, into, go_on),
            None => receiver.skip(&self.socket, range.len, go_on),
        })?;
        self.traffic.received_more(received as u64);
        self.lock().transmission.took(received as u64);
        Ok(())
    }

    /// Calls `fill` with the memory for this range of a read, which is nowhere if nobody waits for it.
    fn to_place<R>(
        &self,
        mut state: MutexGuard<'_, BlockingConnectionState>,
        range: ReadRange,
        mine: &mut VecDeque<OwnRequest<'_>>,
        fill: impl FnOnce(Option<&mut [u8]>) -> R,
    ) -> R {
        let span = range.at as usize..(range.at + range.len) as usize;
        let slot = state.transmission.get_mut(range.cookie).filter(|slot| !slot.abandoned);
        let Some(slot) = slot else {
            drop(state);
            return fill(None);
        };
        let stored = slot.stored.take();
        let total = slot.facts.len as usize;
        drop(state);
        let mine = mine.iter_mut().find(|mine| mine.cookie == range.cookie);
        if let (Some(mine), None) = (mine, &stored) {
            return fill(Some(&mut mine.into[span]));
        }
        // The request is another thread's, or was when its first bytes arrived.
        let mut stored = stored.unwrap_or_else(|| vec![0; total]);
        let filled = fill(Some(&mut stored[span]));
        if let Some(slot) = self.lock().transmission.get_mut(range.cookie) {
            slot.stored = Some(stored);
        }
        filled
    }

    /// Nobody waits for these replies any more.
    pub(super) fn abandon(&self, cookies: impl Iterator<Item = u64>) {
        let mut state = self.lock();
        for cookie in cookies {
            match state.transmission.get_mut(cookie) {
                Some(slot) => slot.abandoned = true,
                None => state.finished.retain(|finished| finished.cookie != cookie),
            }
        }
    }

    /// Waits until nothing is in flight and nothing is left to send.
    pub(super) fn drained(&self, go_on: ContinueCallback<'_>) -> Result<(), CallStop> {
        self.send(&[], &[], go_on).map_err(|(stop, _)| stop)?;
        loop {
            let mut state = self.lock();
            if let Some(error) = &state.broken {
                return Err(error.clone().into());
            }
            let receiver = state.receiver.take();
            let waits = state.transmission.in_flight() > 0;
            let idle = state.finished.is_empty();
            drop(state);
            let Some(receiver) = receiver else {
                std::thread::sleep(PAUSE);
                continue;
            };
            let mut turn = ReceiveTurn::new(self, receiver);
            match (waits || !turn.receiver().bytes().is_empty(), idle) {
                (true, _) => drop(self.message(turn.receiver(), &mut VecDeque::new(), go_on)?),
                (false, true) => return Ok(()),
                (false, false) => {
                    drop(turn);
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }
}
