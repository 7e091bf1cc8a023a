//! What threads ask for: long reads and writes in parts, some of which are in flight at a time.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar};

use blockhaul_block::{Error, Kind, OpKind, Reply, Request, RequestFlags};

use super::connection::{BlockingConnection, CompleteReply, OwnRequest};
use super::stop::{CallStop, ContinueCallback};
use crate::device::{RequestMessage, RequestPayload};

/// Bytes of a part of a long read or write, unless the server accepts less.
const PART: u64 = 8 << 20;
/// Parts of one call in flight.
const PARTS: usize = 4;
/// A read is not made shorter than this for the sake of several parts: while the bytes of one are received, the
/// server gets those of the next.
const SHARE: u64 = 256 << 10;

/// A read that has begun.
pub struct BlockingRead<'a> {
    blocking: &'a BlockingConnection,
    owner: Arc<Condvar>,
    at: u64,
    len: u64,
    /// Requests in flight: cookie and length.
    started: VecDeque<(u64, usize)>,
    /// Bytes of them.
    asked: u64,
    /// Length of a part.
    part: usize,
}

impl BlockingConnection {
    /// Whether this request can be sent as it is: the server offers it, and it complies with its block
    /// sizes. Reads and writes may be longer than one request.
    pub fn takes(&self, kind: OpKind, at: u64, len: u64, flags: RequestFlags) -> bool {
        self.export.takes(kind, at, len, flags)
    }

    /// Begins to read `len` bytes at `at`; [`BlockingConnection::takes`] has said that it is possible.
    ///
    /// # Errors
    /// As [`BlockingRead::finish`].
    pub fn start_read(
        &self,
        at: u64,
        len: u64,
        go_on: ContinueCallback<'_>,
    ) -> Result<BlockingRead<'_>, CallStop> {
        let owner = Arc::new(Condvar::new());
        let blocking = self;
        let started = VecDeque::new();
        let part = self.part_of(len);
        let mut reading = BlockingRead { blocking, owner, at, len, started, asked: 0, part };
        reading.ask(0, go_on)?;
        Ok(reading)
    }

    /// Writes `data` at `at`.
    ///
    /// # Errors
    /// [`CallStop::Failed`] with the error of the server or of the connection; the other kinds of [`CallStop`].
    pub fn write(
        &self,
        at: u64,
        data: &[u8],
        flags: RequestFlags,
        go_on: ContinueCallback<'_>,
    ) -> Result<(), CallStop> {
        let owner = Arc::new(Condvar::new());
        let mut parts = data.chunks(self.part());
        let mut mine = VecDeque::new();
        let mut next = at;
        let mut failed = None;
        let done = loop {
            let more = failed.is_none() && mine.len() < PARTS;
            if let Some(part) = more.then(|| parts.next()).flatten() {
                match self.start_write(&owner, next, part, (flags, &mut *go_on)) {
                    Ok(cookie) => mine.push_back(OwnRequest { cookie, into: &mut [] }),
                    Err(stop) => break Err(stop),
                }
                next = next.saturating_add(part.len() as u64);
                continue;
            }
            if mine.is_empty() {
                break Ok(());
            }
            match self.receive(&owner, &mut mine, &mut *go_on) {
                // Writes in flight are awaited also after an error.
                Ok((_, finished)) => failed = failed.or(self.finish(finished).err()),
                Err(stop) => break Err(stop),
            }
        };
        self.abandon(mine.iter().map(|mine| mine.cookie));
        done?;
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn start_write(
        &self,
        owner: &Arc<Condvar>,
        at: u64,
        data: &[u8],
        (flags, go_on): (RequestFlags, ContinueCallback<'_>),
    ) -> Result<u64, CallStop> {
        let message = RequestMessage::new(OpKind::Write, at, data.len() as u64, flags);
        self.start(owner, message, data, go_on)
    }

    /// Carries out a request that is neither a read nor a write.
    ///
    /// # Errors
    /// As [`BlockingConnection::write`].
    pub fn request(
        &self,
        request: Request,
        go_on: ContinueCallback<'_>,
    ) -> Result<Reply, CallStop> {
        let mut message = self.export.message(request);
        let bytes = match std::mem::replace(&mut message.payload, RequestPayload::None) {
            RequestPayload::None => Vec::new(),
            RequestPayload::Bytes(bytes) => bytes,
            RequestPayload::Data(_) => {
                let text = "a write has a method of its own";
                return Err(Error::new(Kind::Invalid, text).into());
            }
        };
        let owner = Arc::new(Condvar::new());
        let cookie = self.start(&owner, message, &bytes, &mut *go_on)?;
        let mut mine = VecDeque::from([OwnRequest { cookie, into: &mut [] }]);
        match self.receive(&owner, &mut mine, go_on) {
            Ok((_, finished)) => Ok(self.finish(finished)?),
            Err(stop) => {
                self.abandon(std::iter::once(cookie));
                Err(stop)
            }
        }
    }

    /// The outcome of a reply that is complete, with the name of the device and the place in errors.
    fn finish(&self, finished: CompleteReply) -> Result<Reply, Error> {
        let facts = finished.slot.facts;
        facts.outcome(finished.result).map_err(|error| {
            if error.kind() == Kind::ShuttingDown {
                self.lock().refused.get_or_insert_with(|| error.clone());
            }
            facts.locate(error, &self.export.facts)
        })
    }

    /// A read is complete: the bytes that another thread has received go to their place.
    fn finish_read(&self, mine: OwnRequest<'_>, finished: CompleteReply) -> Result<(), Error> {
        if let Some(stored) = &finished.slot.stored {
            mine.into.copy_from_slice(stored);
        }
        self.finish(finished).map(drop)
    }

    /// The length of the parts of a read: all of it is in flight, if possible.
    fn part_of(&self, len: u64) -> usize {
        let step = u64::from(self.export.facts.block.minimum.max(4096));
        let share = len.div_ceil(PARTS as u64).max(SHARE).checked_next_multiple_of(step);
        share
            .and_then(|share| usize::try_from(share).ok())
            .map_or(self.part(), |share| share.min(self.part()))
    }

    /// The length of parts.
    fn part(&self) -> usize {
        let block = self.export.facts.block;
        let maximum = u64::from(block.maximum).min(PART);
        let minimum = u64::from(block.minimum.max(1));
        usize::try_from((maximum - maximum % minimum).max(1)).unwrap_or(1)
    }
}

impl BlockingRead<'_> {
    /// Sends requests, as many as may be in flight; `flying` are already.
    fn ask(&mut self, flying: usize, go_on: ContinueCallback<'_>) -> Result<(), CallStop> {
        let mut requests = Vec::new();
        let mut lengths = Vec::new();
        let mut asked = self.asked;
        while asked < self.len && flying + self.started.len() + lengths.len() < PARTS {
            let at = self.at.saturating_add(asked);
            let left = self.len - asked;
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(self.part);
            requests.push(RequestMessage::new(OpKind::Read, at, len as u64, RequestFlags::empty()));
            lengths.push(len);
            asked += len as u64;
        }
        if requests.is_empty() {
            return Ok(());
        }
        let cookies = self.blocking.start_all(&self.owner, requests, go_on)?;
        self.started.extend(cookies.into_iter().zip(lengths));
        self.asked = asked;
        Ok(())
    }

    /// Receives the bytes, and sends the rest of the requests. `into` has the length that was asked for.
    ///
    /// # Errors
    /// As [`BlockingConnection::write`]; what `into` contains is then undefined.
    pub fn finish(mut self, into: &mut [u8], go_on: ContinueCallback<'_>) -> Result<(), CallStop> {
        if into.len() as u64 != self.len {
            return Err(Error::new(Kind::Invalid, "the memory has another length").into());
        }
        let mut mine = VecDeque::new();
        let received = self.receive_all(into, &mut mine, go_on);
        self.blocking.abandon(mine.iter().map(|mine| mine.cookie));
        received
    }

    fn receive_all<'b>(
        &mut self,
        into: &'b mut [u8],
        mine: &mut VecDeque<OwnRequest<'b>>,
        go_on: ContinueCallback<'_>,
    ) -> Result<(), CallStop> {
        let mut rest = into;
        let mut failed = None;
        loop {
            for (cookie, len) in self.started.drain(..) {
                // The lengths together are at most that of the whole.
                let (into, after) = std::mem::take(&mut rest).split_at_mut(len);
                mine.push_back(OwnRequest { cookie, into });
                rest = after;
            }
            if mine.is_empty() {
                return failed.map_or(Ok(()), |error: Error| Err(error.into()));
            }
            let (done, finished) = self.blocking.receive(&self.owner, mine, &mut *go_on)?;
            // After an error the rest is still awaited, and nothing is sent.
            match self.blocking.finish_read(done, finished) {
                Ok(()) if failed.is_none() => self.ask(mine.len(), &mut *go_on)?,
                Ok(()) => {}
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
    }
}

impl Drop for BlockingRead<'_> {
    fn drop(&mut self) {
        self.blocking.abandon(self.started.iter().map(|started| started.0));
    }
}
