//! Messages waiting to be sent: many leave in one vectored send.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use crate::lend::{Lending, Lent};
use crate::seal::{Outgoing, SEAL_MAX, Sealer};
use crate::{Data, Parked, Stream};

/// Slices per send: more does not fit into socket buffers anyway.
const SLICES: usize = 64;
/// Headers are collected in blocks of this size.
const HEADS: usize = 4096;

enum Piece {
    Heads(Vec<u8>),
    Data(Data),
    Parked(Parked),
    Lent(Lending),
}

impl Piece {
    /// The bytes, if they are in memory.
    fn bytes(&self) -> Option<&[u8]> {
        match self {
            Piece::Heads(bytes) => Some(bytes),
            Piece::Data(data) => Some(data.bytes()),
            Piece::Parked(_) | Piece::Lent(_) => None,
        }
    }
}

/// The queue of one connection.
#[derive(Default)]
pub struct SendQueue {
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that have been sent.
    sent: usize,
    queued: usize,
    /// An empty block to collect headers in.
    spare: Option<Vec<u8>>,
    /// The stream is protected: what is sent must be sealed.
    secured: Option<Box<Outgoing>>,
}

impl SendQueue {
    /// Bytes waiting.
    pub fn queued(&self) -> usize {
        self.queued + self.secured.as_ref().map_or(0, |outgoing| outgoing.waiting())
    }

    /// From here on what is sent is protected. The queue must be empty.
    pub fn secure(&mut self, sealer: Box<dyn Sealer>) {
        debug_assert!(self.pieces.is_empty());
        self.secured = Some(Box::new(Outgoing::new(sealer)));
    }

    /// Queues a header.
    pub fn head(&mut self, head: &[u8]) {
        self.queued += head.len();
        if let Some(Piece::Heads(bytes)) = self.pieces.back_mut()
            && bytes.len() + head.len() <= HEADS
        {
            bytes.extend_from_slice(head);
            return;
        }
        let mut bytes = self.spare.take().unwrap_or_else(|| Vec::with_capacity(HEADS));
        bytes.extend_from_slice(head);
        self.pieces.push_back(Piece::Heads(bytes));
    }

    /// Queues a payload.
    pub fn data(&mut self, data: Data) {
        if data.is_empty() {
            return;
        }
        self.queued += data.len();
        // What is sealed must be looked at.
        let parked = if self.secured.is_some() { Err(data) } else { data.take_parked() };
        self.pieces.push_back(parked.map_or_else(Piece::Data, Piece::Parked));
    }

    /// Queues a payload whose pages may be sent by reference: where they are, the caller keeps what it
    /// gets until the peer has said that it has the bytes.
    pub fn lend(&mut self, data: Data) -> Option<Lent> {
        if self.secured.is_some() || data.is_empty() {
            self.data(data);
            return None;
        }
        match Lending::begin(data) {
            Ok((lending, lent)) => {
                self.queued += lending.len();
                self.pieces.push_back(Piece::Lent(lending));
                Some(lent)
            }
            Err(data) => {
                self.data(data);
                None
            }
        }
    }

    /// Sends what the socket takes; true when nothing is left.
    pub fn send(&mut self, stream: &Stream) -> io::Result<bool> {
        if self.secured.is_some() {
            return self.send_sealed(stream);
        }
        while let Some(first) = self.pieces.front_mut() {
            let sent = match first {
                Piece::Parked(parked) => parked.drain_to_stream(stream),
                Piece::Lent(lending) => {
                    if !lending.load() {
                        self.send_as_copy();
                        continue;
                    }
                    lending.drain_to_stream(stream)
                }
                _ => self.send_memory(stream),
            };
            match sent {
                Ok(sent) => self.advance(sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Sends everything.
    pub async fn send_all(&mut self, stream: &Stream) -> io::Result<()> {
        while !self.send(stream)? {
            stream.writable().await?;
        }
        Ok(())
    }

    /// Says on a protected stream that nothing more comes, behind what is queued, as far as the socket
    /// takes it without waiting.
    pub fn close(&mut self, stream: &Stream) {
        if !matches!(self.send(stream), Ok(true)) {
            return;
        }
        if let Some(outgoing) = &mut self.secured
            && outgoing.close().is_ok()
        {
            // Only politeness: the peer may have gone.
            let _ = outgoing.send(stream, false);
            outgoing.clear();
        }
    }

    fn send_sealed(&mut self, stream: &Stream) -> io::Result<bool> {
        let Some(mut outgoing) = self.secured.take() else { return Ok(true) };
        let sent = self.seal_and_send(&mut outgoing, stream);
        self.secured = Some(outgoing);
        match sent {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn seal_and_send(&mut self, outgoing: &mut Outgoing, stream: &Stream) -> io::Result<()> {
        loop {
            outgoing.send(stream, !self.pieces.is_empty())?;
            if self.pieces.is_empty() {
                return Ok(());
            }
            let mut slices = [IoSlice::new(&[]); SLICES];
            let (mut count, mut taken) = (0, 0);
            let in_memory = self.pieces.iter().map_while(Piece::bytes);
            for (slice, bytes) in slices.iter_mut().zip(in_memory) {
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
        }
    }

    /// The payload at the front cannot be lent after all.
    fn send_as_copy(&mut self) {
        match self.pieces.pop_front() {
            Some(Piece::Lent(lending)) => {
                self.pieces.push_front(Piece::Data(lending.into_data()));
            }
            Some(other) => self.pieces.push_front(other),
            None => {}
        }
    }

    /// One vectored send of what is in memory at the front.
    fn send_memory(&self, stream: &Stream) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let mut count = 0;
        let in_memory = self.pieces.iter().map_while(Piece::bytes);
        for (slice, bytes) in slices.iter_mut().zip(in_memory) {
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
            Some(Piece::Parked(parked)) => Some(parked.held() == 0),
            Some(Piece::Lent(lending)) => Some(lending.is_sent()),
            _ => None,
        };
        if let Some(whole) = sent_whole {
            if whole {
                self.pieces.pop_front();
            }
            return;
        }
        self.sent += sent;
        while let Some(len) = self.pieces.front().and_then(Piece::bytes).map(<[u8]>::len) {
            if self.sent < len {
                break;
            }
            self.sent -= len;
            if let Some(Piece::Heads(mut bytes)) = self.pieces.pop_front() {
                bytes.clear();
                if bytes.capacity() <= HEADS {
                    self.spare = Some(bytes);
                }
            }
        }
    }

    /// Forgets everything: the connection is gone.
    pub fn clear(&mut self) {
        self.pieces.clear();
        (self.sent, self.queued) = (0, 0);
        if let Some(outgoing) = &mut self.secured {
            outgoing.clear();
        }
    }
}
