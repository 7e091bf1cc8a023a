//! A descriptor of the connection to the kernel.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};

use blockhaul_io::{Buf, Data, Interest};
use rustix::io::Errno as System;

use crate::protocol::{KernelErrno, WRITE_HEADER, reply_header};

/// Maximum length in bytes of arguments that are not data: a name, and what precedes it.
const ARGUMENTS_MAX: usize = 8 << 10;
/// Parts of a reply: its header, and zeroes in several parts.
const PARTS: usize = 1 + (1 << 20) / Data::ZEROES_MAX;

/// A descriptor through which one worker gets requests. Replies to them go through it, too.
pub(crate) struct Channel(OwnedFd);

/// Room for one request. The data of a write goes to memory of its own, aligned.
pub(crate) struct ChannelBuffer {
    head: [u8; WRITE_HEADER],
    /// Data of a write; none: it was given away.
    data: Option<Buf>,
    /// A request without data that is longer than `head`.
    long: Vec<u8>,
}

/// What came.
pub(crate) enum ChannelEvent {
    /// A request of so many bytes.
    Request(usize),
    /// The file system is unmounted.
    Unmounted,
}

impl ChannelBuffer {
    /// Room without memory for data yet.
    pub(crate) fn new() -> ChannelBuffer {
        ChannelBuffer { head: [0; WRITE_HEADER], data: None, long: Vec::new() }
    }

    /// Whether there is memory for data.
    pub(crate) fn has_room(&self) -> bool {
        self.data.is_some()
    }

    /// Gives it memory for data.
    pub(crate) fn provide(&mut self, data: Buf) {
        self.data = Some(data);
    }

    /// The memory with the data, which is to be replaced.
    pub(crate) fn take(&mut self) -> Option<Buf> {
        self.data.take()
    }

    /// The data.
    pub(crate) fn data(&self) -> &[u8] {
        self.data.as_deref().unwrap_or_default()
    }

    /// The request of `total` bytes, without the data of a write.
    pub(crate) fn request(&mut self, total: usize) -> &[u8] {
        // FUSE_WRITE is the only operation with data; its number is in the second word.
        const WRITE: [u8; 4] = 16_u32.to_ne_bytes();
        let head = &self.head[..total.min(WRITE_HEADER)];
        let rest = total.saturating_sub(WRITE_HEADER).min(ARGUMENTS_MAX);
        if rest == 0 || self.head[4..8] == WRITE {
            return head;
        }
        self.long.clear();
        self.long.extend_from_slice(head);
        let data = self.data.as_deref().unwrap_or_default();
        self.long.extend_from_slice(&data[..rest.min(data.len())]);
        &self.long
    }
}

impl Channel {
    /// Takes ownership of a descriptor, whose reads must not block.
    pub(crate) fn new(fd: OwnedFd) -> Channel {
        Channel(fd)
    }

    /// Gets a request that is there now; `WouldBlock` if there is none.
    pub(crate) fn try_receive(&self, inbox: &mut ChannelBuffer) -> io::Result<ChannelEvent> {
        let ChannelBuffer { head, data, .. } = inbox;
        let data = data.as_deref_mut().unwrap_or_default();
        loop {
            let mut parts = [IoSliceMut::new(head), IoSliceMut::new(data)];
            match rustix::io::readv(&self.0, &mut parts) {
                Ok(0) | Err(System::NODEV) => return Ok(ChannelEvent::Unmounted),
                Ok(total) => return Ok(ChannelEvent::Request(total)),
                // ENOENT: the request was given up while it was read.
                Err(System::INTR | System::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until there is a request, or the file system is unmounted.
    pub(crate) async fn readable(&self) -> io::Result<()> {
        blockhaul_io::ready(&self.0, Interest::Readable).await
    }

    /// Answers a request with a body.
    pub(crate) fn reply(&self, unique: u64, body: &[u8]) {
        let head = reply_header(unique, Ok(body.len()));
        self.send(unique, &[IoSlice::new(&head), IoSlice::new(body)]);
    }

    /// Answers a read with its data, which stays in the kernel if it is there.
    pub(crate) fn data(&self, unique: u64, data: Data) {
        let parked = match data.take_parked() {
            Ok(parked) => parked,
            Err(data) => {
                return match data.load() {
                    Ok(()) => self.reply(unique, data.bytes()),
                    Err(_) => self.fail(unique, KernelErrno::IO),
                };
            }
        };
        let head = reply_header(unique, Ok(parked.held()));
        match parked.drain_whole(&head, &self.0) {
            Ok(None) => {}
            Ok(Some(copy)) => self.reply(unique, &copy),
            Err(error) => {
                log::debug!("cannot splice a reply to the kernel: {error}");
                // If nobody waits for it any more, this has no effect.
                self.fail(unique, KernelErrno::IO);
            }
        }
    }

    /// Answers a request that failed.
    pub(crate) fn fail(&self, unique: u64, errno: KernelErrno) {
        self.send(unique, &[IoSlice::new(&reply_header(unique, Err(errno)))]);
    }

    /// Answers a request that succeeded or failed, without a body.
    pub(crate) fn done(&self, unique: u64, result: Result<(), KernelErrno>) {
        let head = reply_header(unique, result.map(|()| 0));
        self.send(unique, &[IoSlice::new(&head)]);
    }

    /// Answers a read with `len` zeroes; `len` is at most 1 MiB.
    pub(crate) fn zeroes(&self, unique: u64, len: usize) {
        let head = reply_header(unique, Ok(len));
        let mut parts = Vec::with_capacity(PARTS);
        parts.push(IoSlice::new(&head));
        let zeroes = Data::zeroes(len.min(Data::ZEROES_MAX));
        let mut left = len;
        while left > 0 {
            let part = left.min(Data::ZEROES_MAX);
            parts.push(IoSlice::new(&zeroes.bytes()[..part]));
            left -= part;
        }
        self.send(unique, &parts);
    }

    /// Sends a reply. One that the kernel does not take becomes an error, so that no program waits for ever.
    fn send(&self, unique: u64, parts: &[IoSlice<'_>]) {
        let Err(error) = self.try_send(parts) else { return };
        log::warn!("cannot answer the kernel: {error}");
        let head = reply_header(unique, Err(KernelErrno::IO));
        if let Err(error) = self.try_send(&[IoSlice::new(&head)]) {
            log::error!("request {unique} of the kernel stays without a reply: {error}");
        }
    }

    fn try_send(&self, parts: &[IoSlice<'_>]) -> Result<(), System> {
        loop {
            match rustix::io::writev(&self.0, parts) {
                Err(System::INTR) => {}
                // ENOENT: nobody waits for the reply any more. ENODEV: unmounted.
                Ok(_) | Err(System::NOENT | System::NODEV) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Read as _, Write as _};

    use blockhaul_io::{ParkedPayload, Reservation};

    use super::*;
    use crate::protocol::REPLY_HEADER;

    #[test]
    fn a_payload_in_the_kernel_is_copied_where_splice_is_refused() {
        let bytes: Vec<u8> = (0..300_000_u32).map(|i| i.to_le_bytes()[i as usize % 3]).collect();
        let mut source = tempfile::tempfile().unwrap();
        source.write_all(&bytes).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for append in [false, true] {
            let path = folder.path().join(append.to_string());
            // splice(2) writes to no file that is opened for appending.
            let mut options = std::fs::File::options();
            let target = options.append(append).write(true).create(true).open(&path).unwrap();
            let mut parked =
                ParkedPayload::begin(Reservation::unpooled(200_000).parkable()).unwrap();
            parked.fill_from_file(&source, 50_000).unwrap();
            let data = Data::from(parked);
            assert!(data.is_parked());
            Channel::new(target.into()).data(7, data);
            let mut written = Vec::new();
            std::fs::File::open(&path).unwrap().read_to_end(&mut written).unwrap();
            assert_eq!(written[..REPLY_HEADER], reply_header(7, Ok(200_000)), "{append}");
            assert!(written[REPLY_HEADER..] == bytes[50_000..250_000], "{append}");
        }
    }
}
