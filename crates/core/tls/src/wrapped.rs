//! Sessions that use OpenSSL's record layer: TLS 1.2, and suites that `records` does not support.

use std::io::{self, IoSlice, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_io::{OpenedRecord, RECORD_MAX, StreamOpener, StreamSealer};
use openssl::ssl::{Error, ErrorCode, SslStream};

/// Length of a record header.
const HEADER: usize = 5;
/// Maximum contents of a record.
const PLAIN_MAX: usize = 16 << 10;

/// Bytes between OpenSSL and the I/O.
#[derive(Default)]
pub(crate) struct Pipe {
    /// Received bytes.
    pub(crate) incoming: Vec<u8>,
    /// How many of them OpenSSL has taken.
    pub(crate) taken: usize,
    /// Bytes to send.
    pub(crate) outgoing: Vec<u8>,
}

impl Pipe {
    /// Received bytes that were not taken yet.
    pub(crate) fn rest(&self) -> &[u8] {
        &self.incoming[self.taken..]
    }
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let rest = &self.incoming[self.taken..];
        if rest.is_empty() {
            self.incoming.clear();
            self.taken = 0;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let len = rest.len().min(into.len());
        into[..len].copy_from_slice(&rest[..len]);
        self.taken += len;
        Ok(len)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The halves of a session.
pub(crate) fn halves(session: SslStream<Pipe>) -> (WrappedOpener, WrappedSealer) {
    let session = Arc::new(Mutex::new(session));
    (WrappedOpener(session.clone()), WrappedSealer { session, plain: Vec::new() })
}

/// The receiving half.
pub(crate) struct WrappedOpener(Arc<Mutex<SslStream<Pipe>>>);

impl StreamOpener for WrappedOpener {
    fn open(
        &mut self,
        sealed: &mut [u8],
        plain: &mut [u8],
        beyond: &mut [u8],
    ) -> io::Result<OpenedRecord> {
        let Some([_, _, _, high, low]) = sealed.first_chunk::<HEADER>() else {
            return Ok(OpenedRecord::default());
        };
        let used = HEADER + usize::from(u16::from_be_bytes([*high, *low]));
        if used > RECORD_MAX {
            let text = "the other side sent a TLS record of an impossible length";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let Some(record) = sealed.get(..used) else { return Ok(OpenedRecord::default()) };
        let mut session = lock(&self.0);
        session.get_mut().incoming.extend_from_slice(record);
        let mut len = 0;
        let mut end = false;
        loop {
            let into = if len < plain.len() {
                &mut plain[len..]
            } else {
                &mut beyond[len - plain.len()..]
            };
            match session.ssl_read(into) {
                Ok(0) => break,
                Ok(read) => len += read,
                Err(error) if error.code() == ErrorCode::WANT_READ => break,
                Err(error) if error.code() == ErrorCode::ZERO_RETURN => {
                    end = true;
                    break;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(OpenedRecord { used, len, end })
    }
}

/// The sending half.
pub(crate) struct WrappedSealer {
    session: Arc<Mutex<SslStream<Pipe>>>,
    /// Buffer for small pieces.
    plain: Vec<u8>,
}

impl StreamSealer for WrappedSealer {
    fn seal(&mut self, plain: &[IoSlice<'_>], sealed: &mut [u8]) -> io::Result<usize> {
        self.plain.clear();
        plain.iter().for_each(|part| self.plain.extend_from_slice(part));
        let mut session = lock(&self.session);
        for part in self.plain.chunks(PLAIN_MAX) {
            let mut written = 0;
            while written < part.len() {
                written += session.ssl_write(&part[written..]).map_err(failed)?;
            }
        }
        take(session.get_mut(), sealed)
    }

    fn close(&mut self, sealed: &mut [u8]) -> io::Result<usize> {
        let mut session = lock(&self.session);
        // Incomplete, as the peer has not closed its side; that is not awaited.
        session.shutdown().map_err(failed)?;
        take(session.get_mut(), sealed)
    }
}

fn take(pipe: &mut Pipe, sealed: &mut [u8]) -> io::Result<usize> {
    let len = pipe.outgoing.len();
    let Some(into) = sealed.get_mut(..len) else {
        return Err(io::Error::other("TLS records do not fit"));
    };
    into.copy_from_slice(&pipe.outgoing);
    pipe.outgoing.clear();
    Ok(len)
}

fn lock(session: &Mutex<SslStream<Pipe>>) -> MutexGuard<'_, SslStream<Pipe>> {
    session.lock().expect("no panic under this lock")
}

fn failed(error: Error) -> io::Error {
    let text = format!("TLS: {}", crate::error::reason(&error));
    io::Error::new(io::ErrorKind::InvalidData, text)
}
