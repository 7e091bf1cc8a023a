//! Received bytes that were not consumed yet: protocols parse their messages from here.

use std::cell::RefCell;
use std::io::{self, IoSliceMut};
use std::sync::Arc;

use crate::context::moved;
use crate::seal::{RECORD_PLAIN_MAX, SealedReceiver, StreamOpener};
use crate::{Data, ParkedPayload, Reservation, Stream};

/// Bytes per receive while messages are small: many messages per system call. This is enough for several
/// writes, so that the peer's socket has space and the peer sends more while these are carried out.
/// Writes of 16 KiB, 32 in flight: 136,000 a second; with 64 KiB 109,000; received one by one 89,000.
const STAGE: usize = 128 << 10;
/// The same until this many bytes arrive at once: idle peers cost little memory.
const STAGE_FIRST: usize = 4 << 10;
/// Bytes per receive while large payloads arrive: payload bytes in the stage are copied once more,
/// so few, but enough for the headers between payloads.
const STAGE_LARGE: usize = 4 << 10;
/// Minimum length of a large payload, if payloads are copied from the stage.
const LARGE: usize = 16 << 10;
/// Minimum length of a large payload, if payloads are slices of the stage and not copied.
const LARGE_LENT: usize = (32 << 10) + 1;

/// Payload bytes received before other tasks of the worker run: a peer that sends as fast as this
/// receives never runs out, and would delay their processing and all sending.
const SHARE: usize = 1 << 20;

thread_local! {
    /// Memory for decrypted bytes: idle protected streams have none of their own.
    static OPENED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A window of received bytes in front of a stream.
pub struct RecvWindow {
    /// Empty only if a receive was abandoned, and while a protected stream is idle.
    stage: Arc<Vec<u8>>,
    /// Payloads may be slices of the stage: so far none was held until the next receive.
    lends: bool,
    start: usize,
    end: usize,
    /// The last receive was short: the socket is probably empty.
    drained: bool,
    /// Bytes to receive beyond the current need.
    ahead: usize,
    /// Bytes to receive while payloads are parked: one header without payload bytes, which would
    /// have to be copied into the pipe.
    header: usize,
    /// The rest of the share.
    share: usize,
    /// The stream is protected: received bytes must be decrypted.
    secured: Option<Box<SealedReceiver>>,
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

    /// Protects the stream from here on; `first` holds the first protected bytes. The unprotected
    /// contents of the window must have been consumed: they are dropped.
    pub fn secure(&mut self, opener: Box<dyn StreamOpener>, first: &[u8]) {
        (self.start, self.end) = (0, 0);
        self.secured = Some(Box::new(SealedReceiver::new(opener, first)));
    }

    /// Sets the length in bytes of the header before a payload.
    pub fn expect_headers_of(&mut self, len: usize) {
        self.header = len;
    }

    /// Maximum number of bytes in the window.
    pub fn capacity(&self) -> usize {
        self.stage.len()
    }

    /// Makes space for a message of `size` bytes.
    pub fn grow(&mut self, size: usize) {
        let stage = own(&mut self.stage, &mut self.lends);
        stage.resize(size.max(stage.len()), 0);
    }

    /// The bytes that were received and not consumed.
    pub fn bytes(&self) -> &[u8] {
        &self.stage[self.start..self.end]
    }

    /// Consumes `count` bytes at the front.
    pub fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Receives more bytes; false at the end of the stream.
    ///
    /// # Errors
    /// Those of receiving and of opening a TLS record.
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
            // Dropping the future in between leaves a window at its end: the connection must be
            // dropped with the message.
            let taken = std::mem::take(stage);
            let start = self.start;
            let end = self.end;
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

    /// The same for a protected stream.
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
                // As for sealed bytes: an idle stream holds no memory.
                (self.start, self.end) = (0, 0);
                OPENED.set(std::mem::take(stage));
            }
            if !incoming.receive(stream).await? {
                return Ok(false);
            }
        }
    }

    /// The next payload as a slice of the window's memory; `None` if it has not arrived completely.
    /// For devices that are done with it at once, like a cache with a small write: once a payload
    /// is still held at the next receive, the window leaves its memory to the holder and hands out
    /// no more slices. So they never hold more memory than the window itself.
    pub fn payload_here(&mut self, len: usize) -> Option<Data> {
        if !self.lends || len > self.end - self.start {
            return None;
        }
        let data = Data::received(self.stage.clone(), self.start, len);
        self.consume(len);
        self.expect_payloads_of(len);
        Some(data)
    }

    /// Another such payload may follow.
    fn expect_payloads_of(&mut self, len: usize) {
        let large = if self.lends { LARGE_LENT } else { LARGE };
        self.ahead = if len >= large { STAGE_LARGE } else { STAGE };
    }

    /// Lets other tasks run when a share was received.
    async fn take_turns(&mut self, len: usize) {
        moved(len);
        self.share = self.share.saturating_sub(len);
        if self.share == 0 {
            self.share = SHARE;
            crate::yield_now().await;
        }
    }

    /// Fills a payload: first from the window, then from the stream directly; bytes after it are
    /// kept in the window. False if the stream ends before that.
    ///
    /// # Errors
    /// Those of receiving and of opening a TLS record. A part of the payload may be filled.
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

    /// Receives a payload of `room.len()` bytes: parked in the kernel if the reservation allows it,
    /// otherwise in memory. `None` if the stream ends before that.
    ///
    /// # Errors
    /// Those of receiving, of opening a TLS record, and of splice(2).
    pub async fn payload_or_parked(
        &mut self,
        stream: &Stream,
        room: Reservation,
    ) -> io::Result<Option<Data>> {
        let begun = if self.secured.is_some() { Err(room) } else { ParkedPayload::begin(room) };
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
        // No progress although the socket is ready: the pipe has no slot left.
        let mut stuck = false;
        while parked.missing() > 0 {
            match parked.fill_from_stream(stream) {
                Ok(0) => return Ok(None),
                Ok(_) => stuck = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if stuck && !parked.next_pipe() {
                        return self.copy_rest(stream, parked).await;
                    }
                    if stuck {
                        stuck = false;
                        continue;
                    }
                    stream.readable().await?;
                    stuck = true;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some(parked.into()))
    }

    /// Copies a payload that does not fit into its pipe after all.
    async fn copy_rest(
        &mut self,
        stream: &Stream,
        parked: ParkedPayload,
    ) -> io::Result<Option<Data>> {
        let (mut buf, filled) = parked.into_buf()?;
        let whole = self.payload(stream, &mut buf[filled..]).await?;
        Ok(whole.then(|| buf.into()))
    }

    /// Skips `count` bytes of the stream. False if it ends before that.
    ///
    /// # Errors
    /// Those of receiving and of opening a TLS record.
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

/// The stage for writing: if a payload still refers to it, the payload keeps it and this is a copy.
fn own<'a>(stage: &'a mut Arc<Vec<u8>>, lends: &mut bool) -> &'a mut Vec<u8> {
    *lends &= Arc::strong_count(stage) == 1;
    Arc::make_mut(stage)
}
