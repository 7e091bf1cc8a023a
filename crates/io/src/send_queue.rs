//! Messages waiting to be sent: many leave in one vectored send.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use crate::{Data, Stream};

/// Slices per send: more does not fit into socket buffers anyway.
const SLICES: usize = 64;
/// Headers are collected in blocks of this size.
const HEADS: usize = 4096;

enum Piece {
    Heads(Vec<u8>),
    Data(Data),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Piece::Heads(bytes) => bytes,
            Piece::Data(data) => data.bytes(),
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
}

impl SendQueue {
    /// Bytes waiting.
    pub fn queued(&self) -> usize {
        self.queued
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
        if !data.is_empty() {
            self.queued += data.len();
            self.pieces.push_back(Piece::Data(data));
        }
    }

    /// Sends what the socket takes; true when nothing is left.
    pub fn send(&mut self, stream: &Stream) -> io::Result<bool> {
        while !self.pieces.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = self.pieces.len().min(SLICES);
            for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
                *slice = IoSlice::new(piece.bytes());
            }
            slices[0] = IoSlice::new(&self.pieces[0].bytes()[self.sent..]);
            let sent = match stream.try_send(&slices[..count]) {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            };
            self.advance(sent);
        }
        Ok(true)
    }

    fn advance(&mut self, sent: usize) {
        self.queued -= sent;
        self.sent += sent;
        while let Some(first) = self.pieces.front() {
            let len = first.bytes().len();
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
    }
}
