//! Messages to send: many leave in one vectored send.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use crate::context::moved;
use crate::memory::{LentPayload, PayloadLoan};
use crate::seal::{SEAL_MAX, SealedSender, StreamSealer};
use crate::{Data, ParkedPayload, Stream};

/// Slices per send: heads and payloads of 64 short replies.
const SLICES: usize = 128;
/// Bytes sent before other tasks of the worker run: a peer that receives as fast as this sends
/// would block even the other direction of its own connection.
const SHARE: usize = 1 << 20;
/// Header memory that an empty queue keeps.
const HEADS: usize = 4096;

enum SendItem {
    /// This many bytes of headers.
    Heads(usize),
    Data(Data),
    Parked(ParkedPayload),
    Lent(PayloadLoan),
}

/// The queue of one connection.
#[derive(Default)]
pub struct SendQueue {
    pieces: VecDeque<SendItem>,
    /// The bytes of all headers in `pieces`, from `heads_start` on.
    heads: Vec<u8>,
    heads_start: usize,
    /// Bytes of the first piece that have been sent.
    sent: usize,
    queued: usize,
    /// The stream is protected: sent bytes must be sealed.
    secured: Option<Box<SealedSender>>,
    /// Why a payload cannot be sent.
    lost: Option<io::Error>,
}

impl SendQueue {
    /// Number of waiting bytes.
    pub fn queued(&self) -> usize {
        self.queued + self.secured.as_ref().map_or(0, |outgoing| outgoing.waiting())
    }

    /// Protects the stream from here on. The queue must be empty.
    pub fn secure(&mut self, sealer: Box<dyn StreamSealer>) {
        debug_assert!(self.pieces.is_empty());
        self.secured = Some(Box::new(SealedSender::new(sealer)));
    }

    /// Queues a header.
    pub fn head(&mut self, head: &[u8]) {
        self.queued += head.len();
        // Discard sent headers, at the latest when they are half of the total.
        if self.heads_start > HEADS && self.heads_start > self.heads.len() / 2 {
            self.heads.drain(..self.heads_start);
            self.heads_start = 0;
        }
        if self.heads.capacity() == 0 {
            self.heads.reserve(HEADS);
        }
        self.heads.extend_from_slice(head);
        match self.pieces.back_mut() {
            Some(SendItem::Heads(len)) => *len += head.len(),
            _ => self.pieces.push_back(SendItem::Heads(head.len())),
        }
    }

    /// Queues a payload.
    pub fn data(&mut self, data: Data) {
        if data.is_empty() {
            return;
        }
        self.queued += data.len();
        // Sealing needs the bytes in memory.
        let parked = if self.secured.is_some() { Err(data) } else { data.take_parked() };
        if let Err(data) = &parked
            && let Err(error) = data.load()
        {
            self.lost = Some(error);
            return;
        }
        self.pieces.push_back(parked.map_or_else(SendItem::Data, SendItem::Parked));
    }

    /// Queues a payload whose pages may be sent by reference: if so, the caller keeps the returned
    /// value until the peer has confirmed the bytes.
    pub fn lend(&mut self, data: Data) -> Option<LentPayload> {
        if self.secured.is_some() || data.is_empty() {
            self.data(data);
            return None;
        }
        match PayloadLoan::begin(data) {
            Ok((lending, lent)) => {
                self.queued += lending.len();
                self.pieces.push_back(SendItem::Lent(lending));
                Some(lent)
            }
            Err(data) => {
                self.data(data);
                None
            }
        }
    }

    /// Sends what the socket takes, and not much more than a share of 1 MiB; true if nothing is
    /// left. Otherwise the caller continues when the stream is writable.
    ///
    /// # Errors
    /// The connection's, or that of a payload whose storage failed: its header may have been sent,
    /// so that the connection cannot be used any more.
    pub fn send(&mut self, stream: &Stream) -> io::Result<bool> {
        if let Some(error) = self.lost.take() {
            return Err(error);
        }
        if self.secured.is_some() {
            return self.send_sealed(stream);
        }
        let mut share = SHARE;
        while let Some(first) = self.pieces.front_mut() {
            if share == 0 {
                return Ok(false);
            }
            let sent = match first {
                SendItem::Parked(parked) => parked.drain_to_stream(stream),
                SendItem::Lent(lending) => {
                    if !lending.load() {
                        self.send_as_copy();
                        continue;
                    }
                    lending.drain_to_stream(stream)
                }
                _ => self.send_memory(stream),
            };
            match sent {
                Ok(sent) => {
                    self.advance(sent);
                    moved(sent);
                    share = share.saturating_sub(sent);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(false);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Sends everything.
    ///
    /// # Errors
    /// Those of sending. A part may be sent.
    pub async fn send_all(&mut self, stream: &Stream) -> io::Result<()> {
        while !self.send(stream)? {
            stream.writable().await?;
        }
        Ok(())
    }

    /// Sends the closing message of a protected stream after what is queued, as far as the socket
    /// takes it without waiting.
    pub fn close(&mut self, stream: &Stream) {
        if !matches!(self.send(stream), Ok(true)) {
            return;
        }
        if let Some(outgoing) = &mut self.secured
            && outgoing.close().is_ok()
        {
            // Optional: the peer may be gone.
            let _ = outgoing.send(stream, false);
            outgoing.clear();
        }
    }

    fn send_sealed(&mut self, stream: &Stream) -> io::Result<bool> {
        let Some(mut outgoing) = self.secured.take() else { return Ok(true) };
        let sent = self.seal_and_send(&mut outgoing, stream);
        self.secured = Some(outgoing);
        match sent {
            Ok(whole) => Ok(whole),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn seal_and_send(&mut self, outgoing: &mut SealedSender, stream: &Stream) -> io::Result<bool> {
        let mut share = SHARE;
        loop {
            outgoing.send(stream, !self.pieces.is_empty())?;
            if self.pieces.is_empty() || share == 0 {
                return Ok(self.pieces.is_empty());
            }
            let mut slices = [IoSlice::new(&[]); SLICES];
            let mut count = 0;
            let mut taken = 0;
            for (slice, bytes) in slices.iter_mut().zip(self.in_memory()) {
                let bytes = if count == 0 { &bytes[self.sent..] } else { bytes };
                let part = bytes.len().min(SEAL_MAX - taken);
                *slice = IoSlice::new(&bytes[..part]);
                count += 1;
                taken += part;
                if taken == SEAL_MAX {
                    break;
                }
            }
            outgoing.seal(&slices[..count])?;
            self.advance(taken);
            moved(taken);
            share = share.saturating_sub(taken);
        }
    }

    /// The bytes of the pieces at the front that are in memory, including those already sent.
    fn in_memory(&self) -> impl Iterator<Item = &[u8]> {
        let mut heads = &self.heads[self.heads_start..];
        self.pieces.iter().map_while(move |piece| match piece {
            SendItem::Heads(len) => {
                let (bytes, rest) = heads.split_at(*len);
                heads = rest;
                Some(bytes)
            }
            SendItem::Data(data) => Some(data.bytes()),
            SendItem::Parked(_) | SendItem::Lent(_) => None,
        })
    }

    /// The payload at the front cannot be lent after all.
    fn send_as_copy(&mut self) {
        match self.pieces.pop_front() {
            Some(SendItem::Lent(lending)) => {
                self.pieces.push_front(SendItem::Data(lending.into_data()));
            }
            Some(other) => self.pieces.push_front(other),
            None => {}
        }
    }

    /// One vectored send of what is in memory at the front.
    fn send_memory(&self, stream: &Stream) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let mut count = 0;
        for (slice, bytes) in slices.iter_mut().zip(self.in_memory()) {
            let sent = if count == 0 { self.sent } else { 0 };
            *slice = IoSlice::new(&bytes[sent..]);
            count += 1;
        }
        let more = self.pieces.len() > count;
        stream.try_send(&slices[..count], more)
    }

    fn advance(&mut self, sent: usize) {
        self.queued -= sent;
        let sent_whole = match self.pieces.front() {
            Some(SendItem::Parked(parked)) => Some(parked.held() == 0),
            Some(SendItem::Lent(lending)) => Some(lending.is_sent()),
            _ => None,
        };
        if let Some(whole) = sent_whole {
            if whole {
                self.pieces.pop_front();
            }
            return;
        }
        self.sent += sent;
        loop {
            let (len, heads) = match self.pieces.front() {
                Some(SendItem::Heads(len)) => (*len, true),
                Some(SendItem::Data(data)) => (data.len(), false),
                _ => break,
            };
            if self.sent < len {
                break;
            }
            self.sent -= len;
            self.pieces.pop_front();
            if heads {
                self.heads_start += len;
            }
        }
        if self.heads_start == self.heads.len() {
            self.forget_heads();
        }
    }

    /// No header is left.
    fn forget_heads(&mut self) {
        self.heads.clear();
        self.heads_start = 0;
        if self.heads.capacity() > HEADS {
            self.heads = Vec::new();
        }
    }

    /// Drops everything: the connection is gone.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.forget_heads();
        (self.sent, self.queued) = (0, 0);
        if let Some(outgoing) = &mut self.secured {
            outgoing.clear();
        }
    }
}
