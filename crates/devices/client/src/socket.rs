//! Sockets that are used without a worker, and the errors of connections that end.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::time::Duration;

use blockhaul_block::{Error, Kind};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

/// Sends the bytes that the socket takes now; returns their number, 0 if it takes none.
pub(crate) fn send_now(socket: impl AsFd, bufs: &[IoSlice<'_>]) -> Result<usize, Error> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        let mut control = SendAncillaryBuffer::new(&mut [] as &mut [MaybeUninit<u8>]);
        match sendmsg(&socket, bufs, &mut control, flags) {
            Ok(sent) => return Ok(sent),
            Err(Errno::AGAIN) => return Ok(0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(lost("cannot send", error.into())),
        }
    }
}

/// The stream has ended or failed.
pub(crate) fn lost(what: &'static str, error: io::Error) -> Error {
    Error::new(Kind::Disconnected, what).because(error)
}

/// The server has closed the connection between messages.
pub(crate) fn closed() -> Error {
    Error::new(Kind::Disconnected, "the server closed the connection")
}

/// The server has closed the connection within a message.
pub(crate) fn cut_off() -> Error {
    Error::new(Kind::Disconnected, "the server closed the connection in the middle of a reply")
}

/// The server is silent; `requests` are in flight.
pub(crate) fn silence(timeout: Duration, requests: &str) -> Error {
    let time = timeout.as_secs_f32();
    let text = format!("no byte from the server for {time} s with {requests} in flight");
    Error::new(Kind::TimedOut, text)
}
