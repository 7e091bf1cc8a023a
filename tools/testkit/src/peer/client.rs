//! The client side of a conversation: a plain client for tests of servers, message by message.

use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, CommandFlags, ReplyForm, RequestForm, magic};

use super::conversation::{Conversation, ScriptResult, array};

/// One reply to an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionReply {
    /// `REP_…` as in [`blockhaul_wire::magic`].
    pub kind: u32,
    /// Its payload.
    pub payload: Vec<u8>,
}

impl OptionReply {
    /// Whether it is an error.
    pub fn is_error(&self) -> bool {
        self.kind & magic::REP_ERROR_BIT != 0
    }
}

/// A server's description of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportDescription {
    /// Size in bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Minimum, preferred and maximum block size, if reported.
    pub block_sizes: Option<(u32, u32, u32)>,
}

/// A whole reply.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerReply {
    /// The wire error number; 0 for success.
    pub error: u32,
    /// The server's explanation.
    pub text: String,
    /// Pieces of data, by their offset in the export.
    pub data: Vec<(u64, Vec<u8>)>,
    /// Holes: offset and length.
    pub holes: Vec<(u64, u64)>,
    /// Block status: context ID, and pairs of length and state.
    pub status: Vec<(u32, Vec<(u64, u64)>)>,
    /// Number of messages.
    pub messages: usize,
}

impl PeerReply {
    /// The bytes of `len` bytes at `at`, each of which must have come exactly once.
    ///
    /// # Errors
    /// An error reply, bytes outside of the range, missing or twice.
    pub fn bytes(&self, at: u64, len: usize) -> ScriptResult<Vec<u8>> {
        if self.error != 0 {
            return Err(format!("error {}: {}", self.error, self.text));
        }
        let mut bytes: Vec<Option<u8>> = vec![None; len];
        let holes = self.holes.iter().map(|(at, len)| (*at, vec![0; *len as usize]));
        for (start, piece) in self.data.iter().cloned().chain(holes) {
            for (offset, byte) in (start..).zip(piece) {
                let index = offset.checked_sub(at).and_then(|index| usize::try_from(index).ok());
                let place = index.and_then(|index| bytes.get_mut(index));
                let place = place.ok_or_else(|| format!("byte {offset} was not asked for"))?;
                if place.replace(byte).is_some() {
                    return Err(format!("byte {offset} came twice"));
                }
            }
        }
        let all: Option<Vec<u8>> = bytes.into_iter().collect();
        all.ok_or_else(|| "some bytes did not come".to_string())
    }
}

impl Conversation {
    /// Closes the connection.
    pub fn end(&mut self) {
        // The other side may be gone already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Receives a newstyle server's greeting and replies with these flags; returns the server's.
    ///
    /// # Errors
    /// If the server does not speak newstyle.
    pub fn hello(&mut self, flags: u32) -> ScriptResult<u16> {
        self.expect(&magic::INIT_PASSWD.to_be_bytes())?;
        self.expect(&magic::IHAVEOPT.to_be_bytes())?;
        let server = self.receive_u16()?;
        self.send(&flags.to_be_bytes())?;
        Ok(server)
    }

    /// Sends an option.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn send_option(&mut self, code: u32, payload: &[u8]) -> ScriptResult {
        let head = [code.to_be_bytes(), (payload.len() as u32).to_be_bytes()].concat();
        self.send(&[&magic::IHAVEOPT.to_be_bytes()[..], &head, payload].concat())
    }

    /// Receives one reply to an option.
    ///
    /// # Errors
    /// If none arrives, or something else.
    pub fn receive_option_reply(&mut self, code: u32) -> ScriptResult<OptionReply> {
        self.expect(&magic::OPTION_REPLY.to_be_bytes())?;
        let about = self.receive_u32()?;
        let kind = self.receive_u32()?;
        let len = self.receive_u32()?;
        if about != code {
            return Err(format!("a reply to option {about} instead of {code}"));
        }
        if len > 1 << 20 {
            return Err(format!("a reply of {len} bytes to option {code}"));
        }
        Ok(OptionReply { kind, payload: self.receive(len as usize)? })
    }

    /// Sends an option and receives all replies to it, up to ACK or an error.
    ///
    /// # Errors
    /// When the server is gone or sends something else.
    pub fn option(&mut self, code: u32, payload: &[u8]) -> ScriptResult<Vec<OptionReply>> {
        self.send_option(code, payload)?;
        let mut replies = Vec::new();
        loop {
            let reply = self.receive_option_reply(code)?;
            let last = reply.kind == magic::REP_ACK || reply.is_error();
            replies.push(reply);
            if last {
                return Ok(replies);
            }
            if replies.len() > 100_000 {
                return Err(format!("replies to option {code} never end"));
            }
        }
    }

    /// Whether the server accepts an option.
    ///
    /// # Errors
    /// Like [`Conversation::option`].
    pub fn agrees(&mut self, code: u32, payload: &[u8]) -> ScriptResult<bool> {
        Ok(self.option(code, payload)?.last().is_some_and(|reply| !reply.is_error()))
    }

    /// The whole handshake: greeting, the form of replies asked for (the server must agree), GO.
    ///
    /// # Errors
    /// When the server refuses any of it.
    pub fn open(&mut self, export: &str, replies: ReplyForm) -> ScriptResult<ExportDescription> {
        self.hello(3)?;
        self.negotiate(replies)?;
        self.go(export)
    }

    /// Requests a form of replies, which the server must accept.
    ///
    /// # Errors
    /// If it does not.
    pub fn negotiate(&mut self, replies: ReplyForm) -> ScriptResult {
        let code = match replies {
            ReplyForm::Simple => return Ok(()),
            ReplyForm::Structured => magic::OPT_STRUCTURED_REPLY,
            ReplyForm::Extended => magic::OPT_EXTENDED_HEADERS,
        };
        if !self.agrees(code, &[])? {
            return Err(format!("the server refuses {replies:?}"));
        }
        self.replies = replies;
        if replies == ReplyForm::Extended {
            self.headers = RequestForm::Extended;
        }
        Ok(())
    }

    /// Selects contexts by name; returns their IDs.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn select(&mut self, export: &str, contexts: &[&str]) -> ScriptResult<Vec<u32>> {
        let mut payload = string(export);
        payload.extend_from_slice(&(contexts.len() as u32).to_be_bytes());
        contexts.iter().for_each(|context| payload.extend_from_slice(&string(context)));
        let replies = self.option(magic::OPT_SET_META_CONTEXT, &payload)?;
        let last = replies.last().ok_or("no reply")?;
        if last.is_error() {
            return Err(format!("contexts are refused: {:#x}", last.kind));
        }
        let named = replies.iter().filter(|reply| reply.kind == magic::REP_META_CONTEXT);
        let ids = named.map(|reply| reply.payload.get(..4).map(|id| u32::from_be_bytes(array(id))));
        ids.collect::<Option<_>>().ok_or_else(|| "a context without an id".to_string())
    }

    /// Enters transmission by GO.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn go(&mut self, export: &str) -> ScriptResult<ExportDescription> {
        let mut payload = string(export);
        payload.extend_from_slice(&[0, 1]);
        payload.extend_from_slice(&magic::INFO_BLOCK_SIZE.to_be_bytes());
        let replies = self.option(magic::OPT_GO, &payload)?;
        let mut exported = None;
        let mut block_sizes = None;
        for reply in replies {
            let payload = reply.payload;
            match reply.kind {
                magic::REP_INFO if payload.len() == 12 && payload[..2] == [0, 0] => {
                    let size = u64::from_be_bytes(array(&payload[2..10]));
                    exported = Some((size, u16::from_be_bytes(array(&payload[10..]))));
                }
                magic::REP_INFO if payload.len() == 14 && payload[..2] == [0, 3] => {
                    let number = |at: usize| u32::from_be_bytes(array(&payload[at..at + 4]));
                    block_sizes = Some((number(2), number(6), number(10)));
                }
                kind if kind & magic::REP_ERROR_BIT != 0 => {
                    let text = String::from_utf8_lossy(&payload);
                    return Err(format!("export {export:?} is refused: {kind:#x} {text}"));
                }
                _ => {}
            }
        }
        let (size, flags) = exported.ok_or("the server did not tell size and flags")?;
        Ok(ExportDescription { size, flags, block_sizes })
    }

    /// A request with a unique cookie.
    pub fn request(&mut self, command: CommandCode, offset: u64, length: u64) -> RequestHeader {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut flags = CommandFlags::NONE;
        if command == CommandCode::Write && self.headers == RequestForm::Extended {
            flags = CommandFlags::PAYLOAD_LEN;
        }
        RequestHeader { flags, command, cookie, offset, length }
    }

    /// Sends a request and its payload.
    ///
    /// # Errors
    /// When the server is gone, or the length does not fit.
    pub fn send_request(&mut self, request: &RequestHeader, payload: &[u8]) -> ScriptResult {
        let head = request.encode(self.headers).map_err(|error| error.to_string())?;
        self.send(&[&head[..], payload].concat())
    }

    /// Sends a request and receives its reply, which must be the next one.
    ///
    /// # Errors
    /// When the server is gone or sends something else. An error reply is none here.
    pub fn ask(&mut self, request: &RequestHeader, payload: &[u8]) -> ScriptResult<PeerReply> {
        self.send_request(request, payload)?;
        self.receive_answer(request)
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// When the server fails or answers wrongly.
    pub fn read(&mut self, at: u64, len: usize) -> ScriptResult<Vec<u8>> {
        let request = self.request(CommandCode::Read, at, len as u64);
        self.ask(&request, &[])?.bytes(at, len)
    }

    /// Writes bytes; returns the wire error number, 0 for success.
    ///
    /// # Errors
    /// If the server's reply is invalid.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> ScriptResult<u32> {
        let request = self.request(CommandCode::Write, at, bytes.len() as u64);
        Ok(self.ask(&request, bytes)?.error)
    }

    /// Receives the whole reply to a request, which must be the next one.
    ///
    /// # Errors
    /// When something else comes.
    pub fn receive_answer(&mut self, request: &RequestHeader) -> ScriptResult<PeerReply> {
        let mut answer = PeerReply::default();
        loop {
            answer.messages += 1;
            let magic = self.receive_u32()?;
            if magic == magic::SIMPLE_REPLY && self.replies != ReplyForm::Extended {
                answer.error = self.receive_u32()?;
                self.same_cookie(request)?;
                if request.command == CommandCode::Read {
                    if self.replies != ReplyForm::Simple {
                        return Err("a simple reply to a read".to_string());
                    }
                    if answer.error == 0 {
                        let bytes = self.receive(request.length as usize)?;
                        answer.data.push((request.offset, bytes));
                    }
                }
                return Ok(answer);
            }
            let due = match self.replies {
                ReplyForm::Simple => magic::SIMPLE_REPLY,
                ReplyForm::Structured => magic::STRUCTURED_REPLY,
                ReplyForm::Extended => magic::EXTENDED_REPLY,
            };
            if magic != due {
                return Err(format!("a reply starts with {magic:#x} instead of {due:#x}"));
            }
            let flags = self.receive_u16()?;
            let kind = self.receive_u16()?;
            self.same_cookie(request)?;
            let len = if self.replies == ReplyForm::Extended {
                let offset = self.receive_u64()?;
                if offset != request.offset {
                    return Err(format!("offset {offset} instead of {}", request.offset));
                }
                self.receive_u64()?
            } else {
                self.receive_u32()?.into()
            };
            if len > 128 << 20 {
                return Err(format!("a chunk of {len} bytes"));
            }
            let payload = self.receive(len as usize)?;
            answer.take(kind, &payload).ok_or_else(|| {
                format!("a chunk of kind {kind:#x} with {len} bytes makes no sense: {payload:02x?}")
            })?;
            if flags & 1 != 0 {
                return Ok(answer);
            }
        }
    }

    fn same_cookie(&mut self, request: &RequestHeader) -> ScriptResult {
        let cookie = self.receive_u64()?;
        if cookie == request.cookie {
            return Ok(());
        }
        Err(format!("a reply to request {cookie} instead of {}", request.cookie))
    }
}

impl PeerReply {
    fn take(&mut self, kind: u16, payload: &[u8]) -> Option<()> {
        let number = |at: usize, len: usize| {
            let bytes = payload.get(at..at + len)?;
            Some(bytes.iter().fold(0_u64, |number, &byte| number << 8 | u64::from(byte)))
        };
        match kind {
            magic::REPLY_NONE => payload.is_empty().then_some(()),
            magic::REPLY_OFFSET_DATA => {
                self.data.push((number(0, 8)?, payload.get(8..)?.to_vec()));
                (payload.len() > 8).then_some(())
            }
            magic::REPLY_OFFSET_HOLE => {
                self.holes.push((number(0, 8)?, number(8, 4)?));
                (payload.len() == 12).then_some(())
            }
            magic::REPLY_BLOCK_STATUS | magic::REPLY_BLOCK_STATUS_EXT => {
                let (head, wide) = if kind == magic::REPLY_BLOCK_STATUS { (4, 4) } else { (8, 8) };
                let runs = payload.get(head..)?.chunks(2 * wide).enumerate();
                let pairs: Option<Vec<_>> = runs
                    .map(|(index, _)| {
                        let at = head + index * 2 * wide;
                        Some((number(at, wide)?, number(at + wide, wide)?))
                    })
                    .collect();
                let pairs = pairs.filter(|pairs| !pairs.is_empty())?;
                let counted =
                    kind == magic::REPLY_BLOCK_STATUS || number(4, 4)? == pairs.len() as u64;
                self.status.push((number(0, 4)? as u32, pairs));
                counted.then_some(())
            }
            kind if kind & magic::REPLY_ERROR_BIT != 0 => {
                self.error = number(0, 4)? as u32;
                let text = payload.get(6..6 + number(4, 2)? as usize)?;
                self.text = String::from_utf8_lossy(text).into_owned();
                (self.error != 0).then_some(())
            }
            _ => None,
        }
    }
}

/// A string with its length before it.
fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}
