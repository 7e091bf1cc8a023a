//! What protects a stream's bytes on their way: the two halves of TLS, as the rest sees them. They do
//! no I/O; [`RecvWindow`](crate::RecvWindow) and [`SendQueue`](crate::SendQueue) feed them.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};

use crate::Stream;

/// Most bytes of one record, header included (RFC 5246, section 6.2.3; TLS 1.3 allows less).
pub const RECORD_MAX: usize = 5 + (16 << 10) + 2048;
/// Room for what one record may carry.
pub const RECORD_PLAIN_MAX: usize = 17 << 10;

/// Bytes received at a time: several records, and few enough to stay in the cache until they are
/// opened.
const RECEIVE: usize = 128 << 10;
/// Most bytes sealed at a time. Sealed bytes cannot be taken back, so this is also what a client that
/// does not read can pin besides its share of the pool.
pub const SEAL_MAX: usize = 128 << 10;
/// Room for what [`SEAL_MAX`] bytes become, and for a few messages of the protocol itself.
pub const SEALED_MAX: usize = SEAL_MAX + (SEAL_MAX / (16 << 10) + 8) * 512;

/// The receiving half of a protected stream.
pub trait Opener: Send {
    /// Opens the first record of `sealed`, if it is there as a whole: fills `plain`, then `beyond`,
    /// which have room for [`RECORD_PLAIN_MAX`] bytes together. `sealed` may be changed; what was
    /// used of it is not looked at again.
    ///
    /// # Errors
    /// The stream cannot be used any more: a forged or damaged record, a breach of the protocol, a
    /// failure that the peer reports.
    fn open(
        &mut self,
        sealed: &mut [u8],
        plain: &mut [u8],
        beyond: &mut [u8],
    ) -> io::Result<Opened>;
}

/// What became of a record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Opened {
    /// Bytes of `sealed` that were used; 0 if its first record is not complete.
    pub used: usize,
    /// Bytes that the record carried: none in records of the protocol itself.
    pub len: usize,
    /// The peer said that nothing more comes.
    pub end: bool,
}

/// The sending half of a protected stream.
pub trait Sealer: Send {
    /// Makes records of all of `plain`, at most [`SEAL_MAX`] bytes, at the front of `sealed`, which has
    /// [`SEALED_MAX`] bytes. Returns their length.
    ///
    /// # Errors
    /// The stream cannot be used any more.
    fn seal(&mut self, plain: &[IoSlice<'_>], sealed: &mut [u8]) -> io::Result<usize>;

    /// Makes the message that nothing more comes, in the same way.
    ///
    /// # Errors
    /// The stream cannot be used any more.
    fn close(&mut self, sealed: &mut [u8]) -> io::Result<usize>;
}

/// The receiving half with bytes that were received but not opened yet.
pub(crate) struct Incoming {
    opener: Box<dyn Opener>,
    /// None while nothing is here, or [`RECEIVE`] bytes at least.
    sealed: Vec<u8>,
    start: usize,
    end: usize,
    /// The last receive filled less than it could have: the socket is probably empty.
    drained: bool,
    ended: bool,
}

impl Incoming {
    /// `first` has come already.
    pub(crate) fn new(opener: Box<dyn Opener>, first: &[u8]) -> Incoming {
        let mut sealed = first.to_vec();
        if !first.is_empty() {
            sealed.resize(RECEIVE.max(first.len()), 0);
        }
        Incoming { opener, sealed, start: 0, end: first.len(), drained: true, ended: false }
    }

    /// Opens records that are here until one carries something. 0: none does.
    pub(crate) fn open(&mut self, plain: &mut [u8], beyond: &mut [u8]) -> io::Result<usize> {
        while !self.ended {
            let here = &mut self.sealed[self.start..self.end];
            let opened = self.opener.open(here, plain, beyond)?;
            self.start += opened.used;
            self.ended |= opened.end;
            if opened.len > 0 || opened.used == 0 {
                return Ok(opened.len);
            }
        }
        Ok(0)
    }

    /// Whether to receive more means to wait, for all that is known, with nothing here.
    pub(crate) fn rests(&self) -> bool {
        self.drained && self.start == self.end && !self.ended
    }

    /// Receives more; false at the end of the stream.
    pub(crate) async fn receive(&mut self, stream: &Stream) -> io::Result<bool> {
        if self.ended {
            return Ok(false);
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.sealed.len() - self.end < RECORD_MAX {
            self.sealed.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.drained {
            if self.end == 0 {
                self.give_back();
            }
            stream.readable().await?;
        }
        if self.sealed.is_empty() {
            self.sealed = RECEIVED.take();
            self.sealed.resize(RECEIVE, 0);
        }
        let space = &mut self.sealed[self.end..];
        let room = space.len();
        let received = stream.recv(&mut [IoSliceMut::new(space)]).await?;
        self.drained = received < room;
        self.end += received;
        Ok(received > 0)
    }

    /// Who waits for a client that rests keeps no memory for what it may send.
    fn give_back(&mut self) {
        let empty = std::mem::take(&mut self.sealed);
        if !empty.is_empty() {
            RECEIVED.set(empty);
        }
    }
}

/// The sending half with bytes that were sealed but not sent yet.
pub(crate) struct Outgoing {
    sealer: Box<dyn Sealer>,
    /// None, or a block of [`SEALED_MAX`] bytes.
    sealed: Vec<u8>,
    sent: usize,
    end: usize,
}

thread_local! {
    /// Memory for sealed bytes: one block in the cache, not one for each connection.
    static SPARE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// The same for what is received.
    static RECEIVED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Outgoing {
    pub(crate) fn new(sealer: Box<dyn Sealer>) -> Outgoing {
        Outgoing { sealer, sealed: Vec::new(), sent: 0, end: 0 }
    }

    /// Bytes that wait to be sent.
    pub(crate) fn waiting(&self) -> usize {
        self.end - self.sent
    }

    /// Seals `plain`, when nothing waits.
    pub(crate) fn seal(&mut self, plain: &[IoSlice<'_>]) -> io::Result<()> {
        debug_assert_eq!(self.waiting(), 0);
        self.take_spare();
        (self.sent, self.end) = (0, self.sealer.seal(plain, &mut self.sealed)?);
        Ok(())
    }

    /// Seals the goodbye, when nothing waits.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        debug_assert_eq!(self.waiting(), 0);
        self.take_spare();
        (self.sent, self.end) = (0, self.sealer.close(&mut self.sealed)?);
        Ok(())
    }

    /// Sends what waits; fails with `WouldBlock` when the socket takes no more for now. With `more`
    /// something follows at once.
    pub(crate) fn send(&mut self, stream: &Stream, more: bool) -> io::Result<()> {
        while self.waiting() > 0 {
            let bytes = &self.sealed[self.sent..self.end];
            self.sent += stream.try_send(&[IoSlice::new(bytes)], more)?;
        }
        if !more {
            self.clear();
        }
        Ok(())
    }

    /// Forgets what waits.
    pub(crate) fn clear(&mut self) {
        (self.sent, self.end) = (0, 0);
        let empty = std::mem::take(&mut self.sealed);
        if !empty.is_empty() {
            SPARE.set(empty);
        }
    }

    fn take_spare(&mut self) {
        if self.sealed.is_empty() {
            self.sealed = SPARE.take();
        }
        self.sealed.resize(SEALED_MAX, 0);
    }
}
