//! A connected socket with the messages of the protocol, for either role.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{ReplyForm, RequestForm, magic};

use crate::rng::Rng;

/// The result of a step of a script, or an error.
pub type ScriptResult<T = ()> = Result<T, String>;

/// Default timeout of a peer: longer than anything in a working test takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connected socket, and what was negotiated on it.
pub struct Conversation {
    pub(super) stream: UnixStream,
    /// The form of requests.
    pub headers: RequestForm,
    /// The form of replies.
    pub replies: ReplyForm,
    pub(super) next_cookie: u64,
}

impl Conversation {
    /// Takes ownership of a connected socket.
    ///
    /// # Errors
    /// If its timeouts cannot be set.
    pub fn new(stream: UnixStream) -> ScriptResult<Conversation> {
        let mut conversation = Conversation {
            stream,
            headers: RequestForm::Compact,
            replies: ReplyForm::Simple,
            next_cookie: 1,
        };
        conversation.patience(PATIENCE)?;
        Ok(conversation)
    }

    /// Connects to a server.
    ///
    /// # Errors
    /// If there is no listener.
    pub fn connect(path: &Path) -> ScriptResult<Conversation> {
        let stream = UnixStream::connect(path);
        Conversation::new(
            stream.map_err(|error| format!("cannot connect to {}: {error}", path.display()))?,
        )
    }

    /// Sets the timeout for the other side.
    ///
    /// # Errors
    /// If the socket refuses it.
    pub fn patience(&mut self, limit: Duration) -> ScriptResult {
        let set = self.stream.set_read_timeout(Some(limit));
        let set = set.and_then(|()| self.stream.set_write_timeout(Some(limit)));
        set.map_err(|error| format!("cannot set a time limit: {error}"))
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// When the other side is gone or does not take them in time.
    pub fn send(&mut self, bytes: &[u8]) -> ScriptResult {
        let sent = self.stream.write_all(bytes);
        sent.map_err(|error| format!("cannot send {} bytes: {error}", bytes.len()))
    }

    /// Sends bytes in pieces of `piece` bytes with pauses between them.
    ///
    /// # Errors
    /// As [`Conversation::send`].
    pub fn send_slowly(&mut self, bytes: &[u8], piece: usize, pause: Duration) -> ScriptResult {
        for piece in bytes.chunks(piece.max(1)) {
            self.send(piece)?;
            std::thread::sleep(pause);
        }
        Ok(())
    }

    /// Sends `len` random bytes.
    ///
    /// # Errors
    /// As [`Conversation::send`].
    pub fn send_garbage(&mut self, seed: u64, len: usize) -> ScriptResult {
        let mut bytes = vec![0; len];
        Rng::new(seed).fill(&mut bytes);
        self.send(&bytes)
    }

    /// Receives exactly `len` bytes.
    ///
    /// # Errors
    /// If fewer arrive before the end or in time.
    pub fn receive(&mut self, len: usize) -> ScriptResult<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut got = 0;
        while got < len {
            match self.stream.read(&mut bytes[got..]) {
                Ok(0) => return Err(format!("the connection ended after {got} of {len} bytes")),
                Ok(count) => got += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("after {got} of {len} bytes: {error}")),
            }
        }
        Ok(bytes)
    }

    /// Receives these bytes.
    ///
    /// # Errors
    /// If others arrive, or none.
    pub fn expect(&mut self, expected: &[u8]) -> ScriptResult {
        let found = self.receive(expected.len())?;
        if found == expected {
            return Ok(());
        }
        Err(format!("{found:02x?} instead of {expected:02x?}"))
    }

    /// Waits for the other side to close; bytes before that are dropped and counted.
    ///
    /// # Errors
    /// If it stays open for longer than the timeout.
    pub fn expect_close(&mut self) -> ScriptResult<usize> {
        let mut dropped = 0;
        let mut bytes = [0; 4096];
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(dropped),
                Ok(count) => dropped += count,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(dropped),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("the connection stays open: {error}")),
            }
            if Instant::now() > deadline {
                return Err("the connection stays open and busy".to_string());
            }
        }
    }

    /// Sends nothing, and waits until the other side is gone, however long that takes.
    ///
    /// # Errors
    /// When the socket does not take it.
    pub fn hang(&mut self) -> ScriptResult {
        let unlimited = self.stream.set_read_timeout(None);
        unlimited.map_err(|error| format!("cannot lift the time limit: {error}"))?;
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A reset, or the end of the test.
                Err(_) => return Ok(()),
            }
        }
    }

    /// Shuts down the sending direction; data can still be received.
    pub fn shut(&mut self) {
        // The other side may be gone already.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }

    /// Receives a number.
    ///
    /// # Errors
    /// As [`Conversation::receive`].
    pub fn receive_u16(&mut self) -> ScriptResult<u16> {
        Ok(u16::from_be_bytes(array(&self.receive(2)?)))
    }

    /// Receives a number.
    ///
    /// # Errors
    /// As [`Conversation::receive`].
    pub fn receive_u32(&mut self) -> ScriptResult<u32> {
        Ok(u32::from_be_bytes(array(&self.receive(4)?)))
    }

    /// Receives a number.
    ///
    /// # Errors
    /// As [`Conversation::receive`].
    pub fn receive_u64(&mut self) -> ScriptResult<u64> {
        Ok(u64::from_be_bytes(array(&self.receive(8)?)))
    }

    /// Server side: sends the greeting of a newstyle server and receives the client's flags.
    ///
    /// # Errors
    /// When the client is gone.
    pub fn greet(&mut self, flags: u16) -> ScriptResult<u32> {
        let magics = [magic::INIT_PASSWD.to_be_bytes(), magic::IHAVEOPT.to_be_bytes()].concat();
        self.send(&[&magics[..], &flags.to_be_bytes()].concat())?;
        self.receive_u32()
    }

    /// Server side: receives an option: its code and its payload.
    ///
    /// # Errors
    /// When none comes, or something else.
    pub fn receive_option(&mut self) -> ScriptResult<(u32, Vec<u8>)> {
        self.expect(&magic::IHAVEOPT.to_be_bytes())?;
        let code = self.receive_u32()?;
        let len = self.receive_u32()?;
        if len > 1 << 20 {
            return Err(format!("option {code} has {len} bytes"));
        }
        Ok((code, self.receive(len as usize)?))
    }

    /// Server side: answers an option.
    ///
    /// # Errors
    /// When the client is gone.
    pub fn reply_option(&mut self, code: u32, kind: u32, payload: &[u8]) -> ScriptResult {
        let len = payload.len() as u32;
        let head = [code.to_be_bytes(), kind.to_be_bytes(), len.to_be_bytes()].concat();
        self.send(&[&magic::OPTION_REPLY.to_be_bytes()[..], &head, payload].concat())
    }

    /// Server side: receives a request and its payload; `None` when the client has closed before one.
    ///
    /// # Errors
    /// When something else comes.
    pub fn receive_request(&mut self) -> ScriptResult<Option<(RequestHeader, Vec<u8>)>> {
        let mut first = [0; 1];
        loop {
            match self.stream.read(&mut first) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(format!("no request came: {error}")),
            }
        }
        let rest = self.receive(self.headers.len() - 1)?;
        let bytes = [&first[..], &rest].concat();
        let parsed = RequestHeader::parse(&bytes, self.headers);
        let parsed = parsed.map_err(|error| format!("not a request: {error}"))?;
        let (header, _) = parsed.ok_or("a whole header does not suffice")?;
        let payload = header.payload_len(self.headers);
        if payload > 64 << 20 {
            return Err(format!("a request with {payload} bytes"));
        }
        let payload = self.receive(payload as usize)?;
        Ok(Some((header, payload)))
    }

    /// Server side: the bytes of a reply message without data, in the negotiated form.
    pub fn done(&self, request: &RequestHeader, error: u32) -> Vec<u8> {
        match self.replies {
            ReplyForm::Simple => self.simple(request.cookie, error),
            _ if error == 0 => self.chunk(request, 1, magic::REPLY_NONE, &[]),
            _ => {
                let payload = [&error.to_be_bytes()[..], &[0, 0]].concat();
                self.chunk(request, 1, magic::REPLY_ERROR, &payload)
            }
        }
    }

    /// Server side: the bytes of a simple reply's head.
    pub fn simple(&self, cookie: u64, error: u32) -> Vec<u8> {
        let head = [magic::SIMPLE_REPLY.to_be_bytes(), error.to_be_bytes()].concat();
        [&head[..], &cookie.to_be_bytes()].concat()
    }

    /// Server side: the bytes of a chunk, structured or extended as negotiated.
    pub fn chunk(&self, request: &RequestHeader, flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
        let head = self.chunk_head(request, flags, kind, payload.len() as u64);
        [&head[..], payload].concat()
    }

    /// Server side: the bytes of a chunk's head that says `len` bytes follow.
    pub fn chunk_head(&self, request: &RequestHeader, flags: u16, kind: u16, len: u64) -> Vec<u8> {
        let extended = self.replies == ReplyForm::Extended;
        let magic = if extended { magic::EXTENDED_REPLY } else { magic::STRUCTURED_REPLY };
        let mut head = magic.to_be_bytes().to_vec();
        head.extend_from_slice(&flags.to_be_bytes());
        head.extend_from_slice(&kind.to_be_bytes());
        head.extend_from_slice(&request.cookie.to_be_bytes());
        if extended {
            head.extend_from_slice(&request.offset.to_be_bytes());
            head.extend_from_slice(&len.to_be_bytes());
        } else {
            head.extend_from_slice(&(len as u32).to_be_bytes());
        }
        head
    }
}

/// The bytes as an array; the caller has received that many.
pub(super) fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("as many bytes as were received")
}
