//! The interface to the protection of a stream: the two halves of TLS. They do no I/O;
//! [`RecvWindow`](crate::RecvWindow) and [`SendQueue`](crate::SendQueue) do.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};

use crate::Stream;

/// Maximum size of one record, header included (RFC 5246, section 6.2.3; TLS 1.3 allows less).
pub const RECORD_MAX: usize = 5 + (16 << 10) + 2048;
/// Space for the contents of one record.
pub const RECORD_PLAIN_MAX: usize = 17 << 10;

/// Bytes per receive: several records, and few enough to stay in the cache until they are opened.
const RECEIVE: usize = 128 << 10;
/// Maximum bytes sealed at a time. Sealed bytes cannot be undone, so this is also what a client
/// that does not read can pin besides its share of the pool.
pub const SEAL_MAX: usize = 128 << 10;
/// Space for the records of [`SEAL_MAX`] bytes, and for a few messages of the protocol itself.
pub const SEALED_MAX: usize = SEAL_MAX + (SEAL_MAX / (16 << 10) + 8) * 512;

/// The receiving half of a protected stream.
pub trait StreamOpener: Send {
    /// Opens the first record of `sealed`, if it is complete: fills `plain`, then `beyond`, which
    /// have space for [`RECORD_PLAIN_MAX`] bytes together. `sealed` may be changed; its used part
    /// is not read again.
    ///
    /// # Errors
    /// The stream cannot be used any more: a forged or damaged record, a protocol violation, a
    /// failure that the peer reports.
    fn open(
        &mut self,
        sealed: &mut [u8],
        plain: &mut [u8],
        beyond: &mut [u8],
    ) -> io::Result<OpenedRecord>;
}

/// The result of opening a record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenedRecord {
    /// Bytes of `sealed` that were used; 0 if its first record is incomplete.
    pub used: usize,
    /// Bytes of content: none in records of the protocol itself.
    pub len: usize,
    /// The peer has closed its side.
    pub end: bool,
}

/// The sending half of a protected stream.
pub trait StreamSealer: Send {
    /// Seals all of `plain`, at most [`SEAL_MAX`] bytes, into records at the front of `sealed`,
    /// which has [`SEALED_MAX`] bytes. Returns their length.
    ///
    /// # Errors
    /// The stream cannot be used any more.
    fn seal(&mut self, plain: &[IoSlice<'_>], sealed: &mut [u8]) -> io::Result<usize>;

    /// Seals the closing message in the same way.
    ///
    /// # Errors
    /// The stream cannot be used any more.
    fn close(&mut self, sealed: &mut [u8]) -> io::Result<usize>;
}

/// The receiving half with bytes that were received but not opened yet.
pub(crate) struct SealedReceiver {
    opener: Box<dyn StreamOpener>,
    /// Empty while there are no bytes, or at least [`RECEIVE`] bytes.
    sealed: Vec<u8>,
    start: usize,
    end: usize,
    /// The last receive was short: the socket is probably empty.
    drained: bool,
    ended: bool,
}

impl SealedReceiver {
    /// `first` holds bytes that were already received.
    pub(crate) fn new(opener: Box<dyn StreamOpener>, first: &[u8]) -> SealedReceiver {
        let mut sealed = first.to_vec();
        if !first.is_empty() {
            sealed.resize(RECEIVE.max(first.len()), 0);
        }
        SealedReceiver { opener, sealed, start: 0, end: first.len(), drained: true, ended: false }
    }

    /// Opens the available records until one has content. 0: none has.
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

    /// Whether nothing is buffered and the next receive would probably wait.
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

    /// Frees the memory: an idle stream holds none.
    fn give_back(&mut self) {
        let empty = std::mem::take(&mut self.sealed);
        if !empty.is_empty() {
            RECEIVED.set(empty);
        }
    }
}

/// The sending half with bytes that were sealed but not sent yet.
pub(crate) struct SealedSender {
    sealer: Box<dyn StreamSealer>,
    /// Empty, or a block of [`SEALED_MAX`] bytes.
    sealed: Vec<u8>,
    sent: usize,
    end: usize,
}

thread_local! {
    /// Memory for sealed bytes: one block in the cache, not one per connection.
    static SPARE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// The same for received bytes.
    static RECEIVED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl SealedSender {
    pub(crate) fn new(sealer: Box<dyn StreamSealer>) -> SealedSender {
        SealedSender { sealer, sealed: Vec::new(), sent: 0, end: 0 }
    }

    /// Bytes that wait to be sent.
    pub(crate) fn waiting(&self) -> usize {
        self.end - self.sent
    }

    /// Seals `plain`; only if no bytes wait.
    pub(crate) fn seal(&mut self, plain: &[IoSlice<'_>]) -> io::Result<()> {
        debug_assert_eq!(self.waiting(), 0);
        self.take_spare();
        (self.sent, self.end) = (0, self.sealer.seal(plain, &mut self.sealed)?);
        Ok(())
    }

    /// Seals the closing message; only if no bytes wait.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        debug_assert_eq!(self.waiting(), 0);
        self.take_spare();
        (self.sent, self.end) = (0, self.sealer.close(&mut self.sealed)?);
        Ok(())
    }

    /// Sends the waiting bytes; `WouldBlock` if the socket takes no more now. `more`: more data
    /// follows at once.
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

    /// Drops the waiting bytes.
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
