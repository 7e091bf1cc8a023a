//! Messages through the socket of a front end, with the descriptors that they carry.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use blockhaul_io::Interest;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::protocol::{FDS_MAX, HEADER, MessageHeader};

/// A message as it was received.
pub(crate) struct ReceivedMessage {
    pub(crate) header: MessageHeader,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Receives a message; none at the end of the stream.
///
/// # Errors
/// Those of the socket, an end in the middle of a message, and a malformed header.
pub(crate) async fn receive(socket: &impl AsFd) -> io::Result<Option<ReceivedMessage>> {
    let mut fds = Vec::new();
    let mut header = [0; HEADER];
    if !fill(socket, &mut header, &mut fds).await? {
        return Ok(None);
    }
    let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    let header = MessageHeader::parse(&header).map_err(invalid)?;
    let mut payload = vec![0; header.len];
    if !payload.is_empty() && !fill(socket, &mut payload, &mut fds).await? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(ReceivedMessage { header, payload, fds }))
}

/// Fills `bytes`; false at the end of the stream.
async fn fill(socket: &impl AsFd, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<bool> {
    let mut filled = 0;
    while filled < bytes.len() {
        match receive_part(socket.as_fd(), &mut bytes[filled..], fds) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => filled += received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                blockhaul_io::ready(socket, Interest::Readable).await?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn receive_part(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if fds.len() > FDS_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
    }
    Ok(received.bytes)
}

/// Sends a message, with a descriptor if there is one.
pub(crate) async fn send(
    socket: &impl AsFd,
    message: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut sent = 0;
    while sent < message.len() {
        let passed: Vec<_> = fd.filter(|_| sent == 0).into_iter().collect();
        match send_part(socket.as_fd(), &message[sent..], &passed) {
            Ok(more) => sent += more,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                blockhaul_io::ready(socket, Interest::Writable).await?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn send_part(socket: BorrowedFd<'_>, bytes: &[u8], passed: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !passed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(passed)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}
