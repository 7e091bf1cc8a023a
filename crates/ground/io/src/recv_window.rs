//! Received bytes that have not been taken yet: a protocol reads its messages from here.

use std::cell::RefCell;
use std::io::{self, IoSliceMut};
use std::sync::Arc;

use crate::context::moved;
use crate::seal::{Incoming, Opener, RECORD_PLAIN_MAX};
use crate::{Data, Parked, Reservation, Stream};

/// Bytes asked for at a time when messages are small: many of them per system call.
const STAGE: usize = 64 << 10;
/// The same until so many have come at once: who sends little costs little memory.
const STAGE_FIRST: usize = 4 << 10;
/// Bytes asked for at a time while large payloads come: what is received here of a payload is copied
/// once more, so little, but enough for the headers that stand between payloads.
const STAGE_LARGE: usize = 4 << 10;
/// From here on a payload is large.
const LARGE: usize = 16 << 10;

/// Bytes of payloads that are received before others on the same worker have their turn: from who sends
/// as fast as this receives there is always more, and what they mean would wait, and what is to be sent.
const SHARE: usize = 1 << 20;

thread_local! {
    /// Memory for what was opened: protected streams that rest have none of their own.
    static OPENED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A window of received bytes in front of a stream.
pub struct RecvWindow {
    /// Empty only where a receive was given up in the middle, and while a protected stream rests.
    stage: Arc<Vec<u8>>,
    /// Payloads may be handed out within the stage: nobody has kept one yet until more was received.
    lends: bool,
    start: usize,
    end: usize,
    /// The last receive filled less than it could have: the socket is probably empty.
    drained: bool,
    /// Bytes asked for beyond what a caller wants now.
    ahead: usize,
    /// Bytes asked for while payloads are parked: a header, and no payload behind it, for that would
    /// have to be copied into its pipe.
    header: usize,
    /// What is left of the share.
    share: usize,
    /// The stream is protected: what is received must be opened.
    secured: Option<Box<Incoming>>,
}

impl Default for RecvWindow {
    fn default() -> RecvWindow {
        RecvWindow::new()
    }
}

impl RecvWindow {
    /// An empty window.
    pub fn new() -> RecvWindow {
        RecvWindow {
            stage: Arc::new(vec![0; STAGE_FIRST]),
            lends: true,
            start: 0,
            end: 0,
            drained: true,
            ahead: STAGE,
            header: 32,
            share: SHARE,
            secured: None,
        }
    }

    /// From here on what is received is protected; `first` of it has come already. What is in the
    /// window came without protection and must have been taken: it is dropped.
    pub fn secure(&mut self, opener: Box<dyn Opener>, first: &[u8]) {
        (self.start, self.end) = (0, 0);
        self.secured = Some(Box::new(Incoming::new(opener, first)));
    }

    /// Says how long the header in front of a payload is, in bytes.
    pub fn expect_headers_of(&mut self, len: usize) {
        self.header = len;
    }

    /// Most bytes that can be here at a time.
    pub fn capacity(&self) -> usize {
        self.stage.len()
    }

    /// Makes room for a message of `size` bytes.
    pub fn grow(&mut self, size: usize) {
        let stage = own(&mut self.stage, &mut self.lends);
        stage.resize(size.max(stage.len()), 0);
    }

    /// What has come and was not taken.
    pub fn bytes(&self) -> &[u8] {
        &self.stage[self.start..self.end]
    }

    /// Takes `count` bytes off the front.
    pub fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Receives more behind what is there; false at the end of the stream.
    pub async fn fill(&mut self, stream: &Stream) -> io::Result<bool> {
        if self.secured.is_some() {
            return self.fill_opened(stream).await;
        }
        if self.stage.is_empty() {
            return Ok(false);
        }
        let stage = own(&mut self.stage, &mut self.lends);
        if self.start > 0 && self.end + self.ahead > stage.len() {
            stage.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let most = (self.end + self.ahead).min(stage.len());
        let room = most - self.end;
        let received = if self.drained {
            // Dropped in the middle, this leaves a window at its end: whoever gives up a message gives
            // up its connection.
            let taken = std::mem::take(stage);
            let (start, end) = (self.start, self.end);
            (self.start, self.end) = (0, 0);
            let (received, taken) = stream.recv_later(taken, end, most).await;
            *stage = taken;
            (self.start, self.end) = (start, end);
            received?
        } else {
            stream.recv(&mut [IoSliceMut::new(&mut stage[self.end..most])]).await?
        };
        self.drained = received < room;
        self.end += received;
        if !self.drained && most == stage.len() && most < STAGE {
            stage.resize(STAGE, 0);
        }
        Ok(received > 0)
    }

    /// The same where the stream is protected.
    async fn fill_opened(&mut self, stream: &Stream) -> io::Result<bool> {
        let Some(incoming) = &mut self.secured else { return Ok(false) };
        let stage = own(&mut self.stage, &mut self.lends);
        let before = self.end - self.start;
        loop {
            if stage.is_empty() {
                *stage = OPENED.take();
            }
            if stage.len() - self.end < RECORD_PLAIN_MAX {
                stage.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
                // A message that needs nearly all of the window.
                stage.resize(stage.len().max(self.end + RECORD_PLAIN_MAX), 0);
            }
            let opened = incoming.open(&mut stage[self.end..], &mut [])?;
            self.end += opened;
            let here = self.end - self.start;
            if opened > 0 && here < self.ahead {
                continue;
            }
            if here > before {
                return Ok(true);
            }
            if here == 0 && incoming.rests() {
                // As for what is sealed: who waits keeps no memory for what may come.
                (self.start, self.end) = (0, 0);
                OPENED.set(std::mem::take(stage));
            }
            if !incoming.receive(stream).await? {
                return Ok(false);
            }
        }
    }

    /// The next payload as it is here, without a copy and in no memory but the window's; `None` if it
    /// has not come whole. For those whose device is done with it at once, as a cache is with a small
    /// write: once a payload is still held when more is received, the window leaves its memory to the
    /// holder, and no other is handed out. So that never keeps more than the window itself has.
    pub fn payload_here(&mut self, len: usize) -> Option<Data> {
        if !self.lends || len > self.end - self.start {
            return None;
        }
        let data = Data::received(self.stage.clone(), self.start, len);
        self.consume(len);
        self.expect_payloads_of(len);
        Some(data)
    }

    /// What comes behind a payload may be another like it.
    fn expect_payloads_of(&mut self, len: usize) {
        self.ahead = if len >= LARGE { STAGE_LARGE } else { STAGE };
    }

    /// Lets others have their turn when a share was received.
    async fn take_turns(&mut self, len: usize) {
        moved(len);
        self.share = self.share.saturating_sub(len);
        if self.share == 0 {
            self.share = SHARE;
            crate::yield_now().await;
        }
    }

    /// Fills a payload: first from what is here, then from the stream straight into place, with
    /// whatever comes behind it kept here. False if the stream ends before.
    pub async fn payload(&mut self, stream: &Stream, payload: &mut [u8]) -> io::Result<bool> {
        if self.stage.is_empty() && self.secured.is_none() {
            return Ok(false);
        }
        self.take_turns(payload.len()).await;
        let here = self.bytes().len().min(payload.len());
        payload[..here].copy_from_slice(&self.stage[self.start..self.start + here]);
        self.consume(here);
        let mut filled = here;
        self.expect_payloads_of(payload.len());
        if filled == payload.len() {
            return Ok(true);
        }
        let stage = own(&mut self.stage, &mut self.lends);
        let ahead = self.ahead.min(stage.len());
        if self.secured.is_some() && stage.len() < RECORD_PLAIN_MAX {
            stage.resize(RECORD_PLAIN_MAX, 0);
        }
        while filled < payload.len() {
            // The stage is empty now, or the payload would be full.
            let missing = payload.len() - filled;
            if let Some(incoming) = &mut self.secured {
                let opened = incoming.open(&mut payload[filled..], stage)?;
                filled += opened.min(missing);
                (self.start, self.end) = (0, opened.saturating_sub(missing));
                if opened == 0 && !incoming.receive(stream).await? {
                    return Ok(false);
                }
                continue;
            }
            let mut bufs =
                [IoSliceMut::new(&mut payload[filled..]), IoSliceMut::new(&mut stage[..ahead])];
            let received = stream.recv(&mut bufs).await?;
            if received == 0 {
                return Ok(false);
            }
            filled += received.min(missing);
            (self.start, self.end) = (0, received.saturating_sub(missing));
            self.drained = received < missing + ahead;
        }
        Ok(true)
    }

    /// Takes a payload of `room.len()` bytes: parked in the kernel if the room allows it, else in
    /// memory. `None` if the stream ends before.
    pub async fn payload_or_parked(
        &mut self,
        stream: &Stream,
        room: Reservation,
    ) -> io::Result<Option<Data>> {
        let begun = if self.secured.is_some() { Err(room) } else { Parked::begin(room) };
        let mut parked = match begun {
            Ok(parked) => parked,
            Err(room) => {
                let mut buf = room.into_buf();
                let whole = self.payload(stream, &mut buf).await?;
                return Ok(whole.then(|| buf.into()));
            }
        };
        self.take_turns(parked.missing()).await;
        let here = self.bytes().len().min(parked.missing());
        parked.fill_from_bytes(&self.stage[self.start..self.start + here])?;
        self.consume(here);
        self.ahead = self.header;
        self.drained = false;
        // An attempt that takes nothing although the socket is ready: the pipe has no slot left.
        let mut stuck = false;
        while parked.missing() > 0 {
            match parked.fill_from_stream(stream) {
                Ok(0) => return Ok(None),
                Ok(_) => stuck = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if stuck {
                        return self.copy_rest(stream, parked).await;
                    }
                    stream.readable().await?;
                    stuck = true;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some(parked.into()))
    }

    /// A payload that does not fit into its pipe after all.
    async fn copy_rest(&mut self, stream: &Stream, parked: Parked) -> io::Result<Option<Data>> {
        let (mut buf, filled) = parked.into_buf()?;
        let whole = self.payload(stream, &mut buf[filled..]).await?;
        Ok(whole.then(|| buf.into()))
    }

    /// Drops `count` bytes of the stream. False if it ends before.
    pub async fn skip(&mut self, stream: &Stream, mut count: u64) -> io::Result<bool> {
        loop {
            let here = (self.bytes().len() as u64).min(count);
            #[expect(
                clippy::cast_possible_truncation,
                reason = "bounded by the bytes that are here"
            )]
            self.consume(here as usize);
            count -= here;
            if count == 0 {
                return Ok(true);
            }
            if !self.fill(stream).await? {
                return Ok(false);
            }
        }
    }
}

/// The stage, to be changed: whoever still holds a payload within it keeps it, and this is a copy.
fn own<'a>(stage: &'a mut Arc<Vec<u8>>, lends: &mut bool) -> &'a mut Vec<u8> {
    *lends &= Arc::strong_count(stage) == 1;
    Arc::make_mut(stage)
}
