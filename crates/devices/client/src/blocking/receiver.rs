//! Bytes of the socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use blockhaul_block::Error;
use blockhaul_io::Stream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, Shutdown, recvmsg};

use super::stop::{CallStop, ContinueCallback, LOOK};
use crate::socket::{closed, cut_off, lost, send_now, silence};

/// Bytes received at once besides the payload of a read: some small replies. The bytes of a payload among
/// them are copied.
const WINDOW: usize = 32 << 10;

/// A socket whose receives wait, for at most [`LOOK`], and whose sends do not.
pub(super) struct TimedSocket {
    fd: OwnedFd,
    pub(super) timeout: Duration,
}

impl TimedSocket {
    pub(super) fn new(stream: &Stream, timeout: Duration) -> io::Result<TimedSocket> {
        let fd = stream.as_fd().try_clone_to_owned()?;
        rustix::io::ioctl_fionbio(&fd, false)?;
        set_socket_timeout(&fd, Timeout::Recv, Some(LOOK))?;
        Ok(TimedSocket { fd, timeout })
    }

    /// The socket as it was before.
    pub(super) fn released(&self) -> io::Result<OwnedFd> {
        set_socket_timeout(&self.fd, Timeout::Recv, None)?;
        rustix::io::ioctl_fionbio(&self.fd, true)?;
        self.fd.try_clone()
    }

    pub(super) fn shutdown(&self) {
        // Fails only if the connection has already ended.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Receives at least one byte; 0 is the end of the stream.
    ///
    /// # Errors
    /// Also if nothing comes in time.
    fn recv(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        go_on: ContinueCallback<'_>,
    ) -> Result<usize, CallStop> {
        let mut patience = SilenceTimer::new(self.timeout);
        loop {
            let mut control = RecvAncillaryBuffer::default();
            match recvmsg(&self.fd, bufs, &mut control, RecvFlags::empty()) {
                Ok(received) => return Ok(received.bytes),
                Err(Errno::AGAIN) => patience.check()?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(lost("cannot receive", error.into()).into()),
            }
            if !go_on() {
                return Err(CallStop::Interrupted);
            }
        }
    }

    /// Sends what the socket takes now; 0 if it takes nothing.
    pub(super) fn send(&self, bufs: &[IoSlice<'_>]) -> Result<usize, Error> {
        send_now(&self.fd, bufs)
    }

    /// Waits until the socket can be written, or, if asked for, read; for at most `time`. Returns whether
    /// it can be read.
    pub(super) fn wait_to_send(&self, or_read: bool, time: Duration) -> Result<bool, Error> {
        let mut wanted = PollFlags::OUT;
        wanted.set(PollFlags::IN, or_read);
        let mut fds = [PollFd::new(&self.fd, wanted)];
        let time = Timespec::try_from(time).ok();
        match poll(&mut fds, time.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(fds[0].revents().contains(PollFlags::IN)),
            Err(error) => Err(lost("cannot send", error.into())),
        }
    }
}

/// Time without a byte.
pub(super) struct SilenceTimer {
    timeout: Duration,
    since: Option<Instant>,
}

impl SilenceTimer {
    pub(super) fn new(timeout: Duration) -> SilenceTimer {
        SilenceTimer { timeout, since: None }
    }

    /// Nothing has moved for about [`LOOK`], or since the last call.
    ///
    /// # Errors
    /// If that has taken too long.
    pub(super) fn check(&mut self) -> Result<(), Error> {
        let since = *self.since.get_or_insert_with(blockhaul_io::now);
        if self.timeout.is_zero() || blockhaul_io::elapsed(since) + LOOK < self.timeout {
            return Ok(());
        }
        Err(silence(self.timeout, "requests"))
    }
}

/// What was received and not yet taken.
pub(super) struct Receiver {
    window: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Receiver {
    pub(super) fn new() -> Receiver {
        Receiver { window: vec![0; WINDOW].into(), start: 0, end: 0 }
    }

    /// What was received.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.window[self.start..self.end]
    }

    pub(super) fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// Receives more behind the bytes that are there, which are less than a head. The server may close the
    /// connection `between` messages.
    pub(super) fn fill(
        &mut self,
        socket: &TimedSocket,
        between: bool,
        go_on: ContinueCallback<'_>,
    ) -> Result<(), CallStop> {
        self.window.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let room = &mut self.window[self.end..];
        match socket.recv(&mut [IoSliceMut::new(room)], go_on)? {
            0 if self.end == 0 && between => Err(closed().into()),
            0 => Err(cut_off().into()),
            received => {
                self.end += received;
                Ok(())
            }
        }
    }

    /// Receives at least one byte of a payload; returns the number of bytes.
    pub(super) fn payload(
        &mut self,
        socket: &TimedSocket,
        into: &mut [u8],
        go_on: ContinueCallback<'_>,
    ) -> Result<usize, CallStop> {
        let here = self.bytes().len().min(into.len());
        if here > 0 {
            into[..here].copy_from_slice(&self.bytes()[..here]);
            self.consume(here);
            return Ok(here);
        }
        (self.start, self.end) = (0, 0);
        let len = into.len();
        let bufs = &mut [IoSliceMut::new(into), IoSliceMut::new(&mut self.window)];
        let received = socket.recv(bufs, go_on)?;
        if received == 0 {
            return Err(cut_off().into());
        }
        let taken = received.min(len);
        self.end = received - taken;
        Ok(taken)
    }

    /// The same for a payload of `len` bytes that nobody needs.
    pub(super) fn skip(
        &mut self,
        socket: &TimedSocket,
        len: u64,
        go_on: ContinueCallback<'_>,
    ) -> Result<usize, CallStop> {
        if self.bytes().is_empty() {
            self.fill(socket, false, go_on)?;
        }
        let here = usize::try_from(len).unwrap_or(usize::MAX).min(self.bytes().len());
        self.consume(here);
        Ok(here)
    }
}
