//! Replies: matches them with requests.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar};
use std::time::Duration;

use blockhaul_block::Error;
use blockhaul_wire::reply::{self, Chunk, ChunkKind, Header, Hole};
use blockhaul_wire::{Errno, Replies};

use super::connection::{Blocking, Mine, Part, Read, State};
use super::receiver::Receiver;
use super::stop::{GoOn, LOOK, Stop};
use crate::reply::{CHUNKS_MAX, Want, server_error, small_chunk, violation, wrong};

/// Pause of a thread that waits until others have taken their replies.
const PAUSE: Duration = Duration::from_millis(5);

/// The right to receive. It goes to the next thread when it is dropped.
pub(super) struct Turn<'a> {
    blocking: &'a Blocking,
    receiver: Option<Receiver>,
}

impl<'a> Turn<'a> {
    pub(super) fn new(blocking: &'a Blocking, receiver: Receiver) -> Turn<'a> {
        Turn { blocking, receiver: Some(receiver) }
    }

    pub(super) fn receiver(&mut self) -> &mut Receiver {
        self.receiver.get_or_insert_with(Receiver::new)
    }
}

impl Drop for Turn<'_> {
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

/// Where the bytes of a read go.
enum Place<'a> {
    /// To the thread that receives.
    Mine(&'a mut [u8]),
    /// To another thread.
    Stored,
    /// Nobody wants them.
    Nowhere,
}

impl State {
    /// The first of these requests whose reply is complete.
    fn finished<'a>(&mut self, mine: &mut VecDeque<Mine<'a>>) -> Option<(Mine<'a>, Part)> {
        let index = mine
            .iter()
            .position(|mine| self.in_flight.get(slot(mine.cookie)).is_some_and(|slot| slot.done))?;
        let mine = mine.remove(index)?;
        let part = self.in_flight.try_remove(slot(mine.cookie))?.part?;
        Some((mine, part))
    }
}

impl Blocking {
    /// Waits until one of these requests is complete; the other threads' replies are taken in, too.
    pub(super) fn receive<'a>(
        &self,
        owner: &Arc<Condvar>,
        mine: &mut VecDeque<Mine<'a>>,
        go_on: GoOn<'_>,
    ) -> Result<(Mine<'a>, Part), Stop> {
        let mut state = self.lock();
        loop {
            if let Some(finished) = state.finished(mine) {
                return Ok(finished);
            }
            if let Some(error) = &state.broken {
                return Err(error.clone().into());
            }
            if let Some(receiver) = state.receiver.take() {
                drop(state);
                self.messages(&mut Turn::new(self, receiver), mine, go_on)?;
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
                    return Err(Stop::Interrupted);
                }
                state = self.lock();
            }
        }
    }

    /// Takes in messages until one of these requests is complete.
    fn messages(
        &self,
        turn: &mut Turn<'_>,
        mine: &mut VecDeque<Mine<'_>>,
        go_on: GoOn<'_>,
    ) -> Result<(), Stop> {
        loop {
            let ended = self.message(turn.receiver(), mine, go_on)?;
            if ended.is_some_and(|cookie| mine.iter().any(|mine| mine.cookie == cookie)) {
                return Ok(());
            }
        }
    }

    /// Takes in one message; returns the cookie of the request that it completes.
    pub(super) fn message(
        &self,
        receiver: &mut Receiver,
        mine: &mut VecDeque<Mine<'_>>,
        go_on: GoOn<'_>,
    ) -> Result<Option<u64>, Stop> {
        let taken = self.take_in(receiver, mine, go_on);
        if let Err(Stop::Failed(error)) = &taken {
            self.break_off(error);
        }
        taken
    }

    fn take_in(
        &self,
        receiver: &mut Receiver,
        mine: &mut VecDeque<Mine<'_>>,
        go_on: GoOn<'_>,
    ) -> Result<Option<u64>, Stop> {
        receiver.skip(&self.socket, go_on)?;
        let header = self.header(receiver, go_on)?;
        let cookie = header.cookie();
        let (mut part, abandoned) = self.take(cookie)?;
        let mut stopped = false;
        let is_mine = mine.iter().any(|mine| mine.cookie == cookie);
        let taken = match mine.iter_mut().find(|mine| mine.cookie == cookie) {
            Some(mine) => {
                self.contents(receiver, header, (&mut part, Place::Mine(mine.into)), go_on)
            }
            None => {
                let place = if abandoned { Place::Nowhere } else { Place::Stored };
                // The message belongs to another thread, which needs all of it.
                let mut on = || {
                    stopped |= !go_on();
                    true
                };
                self.contents(receiver, header, (&mut part, place), &mut on)
            }
        };
        let ended = match header {
            Header::Simple { .. } => true,
            Header::Chunk(chunk) => chunk.is_done(),
        };
        self.put_back(cookie, part, ended, is_mine);
        taken?;
        if stopped { Err(Stop::Interrupted) } else { Ok(ended.then_some(cookie)) }
    }

    fn header(&self, receiver: &mut Receiver, go_on: GoOn<'_>) -> Result<Header, Stop> {
        loop {
            let parsed = Header::parse(receiver.bytes(), self.export.replies);
            if let Some((header, used)) = parsed.map_err(|error| wrong(&error))? {
                receiver.consume(used);
                self.traffic.received(used);
                return Ok(header);
            }
            receiver.fill(&self.socket, go_on)?;
        }
    }

    /// Takes in what follows a header.
    fn contents(
        &self,
        receiver: &mut Receiver,
        header: Header,
        to: (&mut Part, Place<'_>),
        go_on: GoOn<'_>,
    ) -> Result<(), Stop> {
        match header {
            Header::Simple { error, .. } => self.simple(receiver, error, to, go_on),
            Header::Chunk(chunk) => self.chunk(receiver, &chunk, to, go_on),
        }
    }

    fn simple(
        &self,
        receiver: &mut Receiver,
        error: Option<Errno>,
        (part, place): (&mut Part, Place<'_>),
        go_on: GoOn<'_>,
    ) -> Result<(), Stop> {
        if let Some(errno) = error {
            part.expected.error = Some(server_error(errno, ""));
            return Ok(());
        }
        if matches!(part.expected.want, Want::Extents { .. }) {
            return Err(violation("a simple reply to block status").into());
        }
        if part.read.is_none() {
            return Ok(());
        }
        // nbd: structured.simple-read-refused
        if self.export.replies != Replies::Simple {
            let text = "a simple reply to a read, with structured replies on";
            return Err(violation(text).into());
        }
        let all = (0, part.expected.len);
        self.data(receiver, all, (part, place), go_on)
    }

    fn chunk(
        &self,
        receiver: &mut Receiver,
        chunk: &Chunk,
        (part, place): (&mut Part, Place<'_>),
        go_on: GoOn<'_>,
    ) -> Result<(), Stop> {
        part.expected.chunks += 1;
        if part.expected.chunks > CHUNKS_MAX {
            return Err(violation("a reply in too many chunks").into());
        }
        // nbd: extended.offset-checked
        if chunk.offset.is_some_and(|offset| offset != part.expected.at) {
            return Err(violation("a reply with another offset than the request's").into());
        }
        match chunk.kind {
            ChunkKind::None => Ok(()),
            ChunkKind::OffsetData => {
                let mut prefix = [0; reply::DATA_PREFIX_LEN];
                self.whole(receiver, &mut prefix, go_on)?;
                let len = chunk.length.saturating_sub(prefix.len() as u64);
                let start = part.expected.place(u64::from_be_bytes(prefix), len);
                let start = start.ok_or_else(|| violation("data outside of the request"))?;
                self.data(receiver, (start, len), (part, place), go_on)
            }
            kind => {
                // Limited by the codec for every kind.
                let mut payload = vec![0; chunk.length as usize];
                self.whole(receiver, &mut payload, go_on)?;
                match kind {
                    ChunkKind::OffsetHole => hole(&payload, part, place),
                    kind => Ok(small_chunk(kind, &payload, &mut part.expected)?),
                }
            }
        }
    }

    /// Receives a small part of a message, which is on its way: does not stop before its end.
    fn whole(&self, receiver: &mut Receiver, into: &mut [u8], go_on: GoOn<'_>) -> Result<(), Stop> {
        self.traffic.received_more(into.len() as u64);
        receiver.payload(&self.socket, into, &mut || {
            // What the handler of a signal says is asked for again.
            go_on();
            true
        })
    }

    /// Receives data of a read; `start` and `len` are inside the request.
    fn data(
        &self,
        receiver: &mut Receiver,
        (start, len): (u64, u64),
        (part, place): (&mut Part, Place<'_>),
        go_on: GoOn<'_>,
    ) -> Result<(), Stop> {
        let total = part.expected.len as usize;
        let read = part.read.as_mut();
        let read = read.ok_or_else(|| violation("data in reply to another command than read"))?;
        read.cover(start, len);
        self.traffic.received_more(len);
        let range = start as usize..(start + len) as usize;
        match place {
            Place::Nowhere => {
                receiver.pass_over(len);
                Ok(())
            }
            Place::Mine(into) if read.stored.is_none() => {
                receiver.payload(&self.socket, &mut into[range], go_on)
            }
            Place::Mine(_) | Place::Stored => {
                let stored = read.stored.get_or_insert_with(|| vec![0; total]);
                receiver.payload(&self.socket, &mut stored[range], go_on)
            }
        }
    }

    /// Takes the reply of a request out of the table while a message is taken in.
    fn take(&self, cookie: u64) -> Result<(Part, bool), Error> {
        let mut state = self.lock();
        let found = state.in_flight.get_mut(slot(cookie)).filter(|slot| slot.cookie == cookie);
        let taken = found.and_then(|slot| {
            let part = if slot.done { None } else { slot.part.take() };
            part.map(|part| (part, slot.abandoned))
        });
        taken.ok_or_else(|| violation("a reply to a request that is not in flight"))
    }

    fn put_back(&self, cookie: u64, part: Part, ended: bool, is_mine: bool) {
        let mut state = self.lock();
        let Some(found) = state.in_flight.get_mut(slot(cookie)) else { return };
        (found.part, found.done) = (Some(part), ended);
        if ended && found.abandoned {
            state.in_flight.remove(slot(cookie));
        } else if ended && !is_mine {
            found.owner.notify_one();
        }
    }

    /// Nobody waits for these replies any more.
    pub(super) fn abandon(&self, cookies: impl Iterator<Item = u64>) {
        let mut state = self.lock();
        for cookie in cookies {
            let Some(found) = state.in_flight.get_mut(slot(cookie)) else { continue };
            found.abandoned = true;
            if found.done {
                state.in_flight.remove(slot(cookie));
            }
        }
    }

    /// Waits until nothing is in flight and nothing is left to send.
    pub(super) fn drained(&self, go_on: GoOn<'_>) -> Result<(), Stop> {
        self.send(&[], &[], go_on).map_err(|(stop, _)| stop)?;
        loop {
            let mut state = self.lock();
            if let Some(error) = &state.broken {
                return Err(error.clone().into());
            }
            let receiver = state.receiver.take();
            let waits = state.in_flight.iter().any(|(_, slot)| !slot.done);
            let idle = state.in_flight.is_empty();
            drop(state);
            let Some(receiver) = receiver else {
                std::thread::sleep(PAUSE);
                continue;
            };
            let mut turn = Turn::new(self, receiver);
            match (waits || !turn.receiver().is_empty(), idle) {
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

impl Read {
    /// Records a range that arrives.
    fn cover(&mut self, start: u64, len: u64) {
        self.covered.push((start, len));
    }
}

/// Takes in a hole.
fn hole(payload: &[u8], part: &mut Part, place: Place<'_>) -> Result<(), Stop> {
    let hole = Hole::parse(payload).map_err(|error| wrong(&error))?;
    let len = u64::from(hole.len);
    let start = part.expected.place(hole.at, len);
    let start = start.ok_or_else(|| violation("a hole outside of the request"))?;
    let total = part.expected.len as usize;
    let read = part.read.as_mut();
    let read = read.ok_or_else(|| violation("a hole in reply to another command than read"))?;
    read.cover(start, len);
    let range = start as usize..(start + len) as usize;
    match place {
        Place::Nowhere => {}
        Place::Mine(into) if read.stored.is_none() => into[range].fill(0),
        Place::Mine(_) | Place::Stored => {
            read.stored.get_or_insert_with(|| vec![0; total])[range].fill(0);
        }
    }
    Ok(())
}

/// The slot of a cookie's request in the table.
pub(super) fn slot(cookie: u64) -> usize {
    (cookie & u64::from(u32::MAX)) as usize
}
