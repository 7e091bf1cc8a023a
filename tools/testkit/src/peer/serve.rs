//! A complete plain server over a model, one request after the other, with the given faults.

use blockhaul_block::{Can, ContextSet, Extents, Facts, Op, Reply, Request, RequestFlags};
use blockhaul_io::{Data, Reservation};
use blockhaul_wire::request::{RequestHeader, StatusFilter};
use blockhaul_wire::{CommandCode, CommandFlags, ExportFlags, ReplyForm, RequestForm, magic};

use super::conversation::{Conversation, ScriptResult};
use super::offer::{HandshakeFault, HandshakeStyle, Offer, ReplyFaultKind};
use crate::model::lock;

/// Transmission flags for these abilities.
fn export_flags(facts: &Facts, structured: bool, extended: bool) -> u16 {
    let can = |ability| facts.can.contains(ability);
    ExportFlags::HAS_FLAGS
        .with(ExportFlags::READ_ONLY, !can(Can::WRITE))
        .with(ExportFlags::SEND_FLUSH, can(Can::FLUSH))
        .with(ExportFlags::SEND_FUA, can(Can::WRITE | Can::FUA))
        .with(ExportFlags::ROTATIONAL, facts.rotational)
        .with(ExportFlags::SEND_TRIM, can(Can::WRITE | Can::TRIM))
        .with(ExportFlags::SEND_WRITE_ZEROES, can(Can::WRITE | Can::ZERO))
        .with(ExportFlags::SEND_FAST_ZERO, can(Can::WRITE | Can::ZERO | Can::FAST_ZERO))
        .with(ExportFlags::SEND_CACHE, can(Can::CACHE))
        .with(ExportFlags::CAN_MULTI_CONN, can(Can::MULTI_CONN))
        .with(ExportFlags::SEND_DF, structured)
        .with(ExportFlags::BLOCK_STATUS_PAYLOAD, extended && can(Can::EXTENTS))
        .bits()
}

/// One connection of a plain server: handshake and requests until the client disconnects.
///
/// # Errors
/// A protocol violation of the client, or its disconnection in the middle of a message.
pub fn serve(conversation: &mut Conversation, number: usize, offer: &Offer) -> ScriptResult {
    if number >= offer.connections_max {
        return conversation.hang();
    }
    let mut session = ScriptSession { talk: conversation, offer, selected: ContextSet::empty() };
    if !session.handshake()? {
        return Ok(());
    }
    session.transmit()
}

struct ScriptSession<'a> {
    talk: &'a mut Conversation,
    offer: &'a Offer,
    /// Negotiated contexts; the wire number is the index.
    selected: ContextSet,
}

impl ScriptSession<'_> {
    /// Whether requests follow.
    fn handshake(&mut self) -> ScriptResult<bool> {
        use HandshakeFault as Fault;
        let talk = &mut *self.talk;
        let fault = self.offer.handshake.as_ref();
        match fault {
            Some(Fault::Silent) => return talk.hang().map(|()| false),
            Some(Fault::CloseAtOnce) => return Ok(false),
            Some(Fault::NotNbd) => {
                // Like a server of another protocol that sends first.
                talk.send(b"220 mail.example ready for you\r\n")?;
                return talk.hang().map(|()| false);
            }
            Some(Fault::WrongSecondMagic) => {
                let first = magic::INIT_PASSWD.to_be_bytes();
                talk.send(&[first, 0x1122_3344_5566_7788_u64.to_be_bytes()].concat())?;
                return talk.hang().map(|()| false);
            }
            Some(Fault::HalfGreeting) => {
                talk.send(&magic::INIT_PASSWD.to_be_bytes())?;
                talk.send(b"IHAV")?;
                return Ok(false);
            }
            _ => {}
        }
        let facts = self.offer.facts();
        if self.offer.style == HandshakeStyle::Oldstyle {
            let mut bytes = magic::INIT_PASSWD.to_be_bytes().to_vec();
            bytes.extend_from_slice(&magic::CLISERV.to_be_bytes());
            bytes.extend_from_slice(&self.offer.size().to_be_bytes());
            bytes.extend_from_slice(&0_u16.to_be_bytes());
            bytes.extend_from_slice(&export_flags(&facts, false, false).to_be_bytes());
            bytes.resize(bytes.len() + magic::RESERVED_ZEROES, 0);
            talk.send(&bytes)?;
            return Ok(true);
        }
        let flags = if self.offer.style == HandshakeStyle::Newstyle { 0 } else { 3 };
        let client = talk.greet(flags)?;
        self.options(client & 2 != 0)
    }

    fn options(&mut self, no_zeroes: bool) -> ScriptResult<bool> {
        use HandshakeFault as Fault;
        let facts = self.offer.facts();
        let mut number = 0;
        loop {
            let (code, payload) = self.talk.receive_option()?;
            number += 1;
            match &self.offer.handshake {
                Some(Fault::StopAtOption(at)) if *at == number => {
                    return self.talk.hang().map(|()| false);
                }
                Some(Fault::CloseAtOption(at)) if *at == number => return Ok(false),
                Some(Fault::WrongReplyMagic) => {
                    self.talk.send(&[0x5a; 20])?;
                    return self.talk.hang().map(|()| false);
                }
                Some(Fault::AnswerToAnother) => {
                    self.talk.reply_option(code ^ 0x40, magic::REP_ACK, &[])?;
                    return self.talk.hang().map(|()| false);
                }
                Some(Fault::HugeAnswer) => {
                    let mut head = magic::OPTION_REPLY.to_be_bytes().to_vec();
                    for number in [code, magic::REP_INFO, u32::MAX] {
                        head.extend_from_slice(&number.to_be_bytes());
                    }
                    self.talk.send(&head)?;
                    return self.talk.hang().map(|()| false);
                }
                Some(Fault::Slow(pause)) => std::thread::sleep(*pause),
                _ => {}
            }
            if code == magic::OPT_EXPORT_NAME {
                if self.talk.replies == ReplyForm::Extended {
                    return Err("EXPORT_NAME after extended headers".to_string());
                }
                let flags = export_flags(&facts, self.talk.replies != ReplyForm::Simple, false);
                let mut bytes = self.offer.size().to_be_bytes().to_vec();
                bytes.extend_from_slice(&flags.to_be_bytes());
                if !no_zeroes {
                    bytes.resize(bytes.len() + magic::RESERVED_ZEROES, 0);
                }
                self.talk.send(&bytes)?;
                return Ok(true);
            }
            if self.offer.style == HandshakeStyle::Newstyle {
                return Ok(false);
            }
            if self.option(&facts, code, &payload)? {
                return Ok(code == magic::OPT_GO);
            }
        }
    }

    /// Replies to one option; true if it was the last.
    fn option(&mut self, facts: &Facts, code: u32, payload: &[u8]) -> ScriptResult<bool> {
        let offer = self.offer;
        match code {
            magic::OPT_ABORT => {
                // Clients may disconnect without waiting for the reply.
                let _ = self.talk.reply_option(code, magic::REP_ACK, &[]);
                return Ok(true);
            }
            magic::OPT_STRUCTURED_REPLY if offer.structured => {
                if self.talk.replies == ReplyForm::Simple {
                    self.talk.replies = ReplyForm::Structured;
                }
                self.talk.reply_option(code, magic::REP_ACK, &[])?;
            }
            magic::OPT_EXTENDED_HEADERS if offer.extended => {
                self.talk.reply_option(code, magic::REP_ACK, &[])?;
                self.talk.replies = ReplyForm::Extended;
                self.talk.headers = RequestForm::Extended;
            }
            magic::OPT_LIST => {
                self.talk.reply_option(code, magic::REP_SERVER, &[0; 4])?;
                self.talk.reply_option(code, magic::REP_ACK, &[])?;
            }
            magic::OPT_SET_META_CONTEXT | magic::OPT_LIST_META_CONTEXT
                if self.talk.replies != ReplyForm::Simple && facts.can.contains(Can::EXTENTS) =>
            {
                self.contexts(facts, code, payload)?;
            }
            magic::OPT_GO | magic::OPT_INFO if offer.style == HandshakeStyle::Fixed => {
                return self.go(facts, code);
            }
            _ => self.talk.reply_option(code, magic::REP_ERR_UNSUP, &[])?,
        }
        Ok(false)
    }

    fn contexts(&mut self, facts: &Facts, code: u32, payload: &[u8]) -> ScriptResult {
        let queries = queries(payload).ok_or("a context option that makes no sense")?;
        let setting = code == magic::OPT_SET_META_CONTEXT;
        let mut selected = ContextSet::empty();
        for (index, name) in facts.contexts.iter().enumerate() {
            let wanted = queries.iter().any(|query| query == name);
            if wanted || (!setting && queries.is_empty()) {
                selected = selected.with(index);
                let mut answer = (index as u32).to_be_bytes().to_vec();
                answer.extend_from_slice(name.as_bytes());
                self.talk.reply_option(code, magic::REP_META_CONTEXT, &answer)?;
            }
        }
        if setting {
            self.selected = selected;
        }
        self.talk.reply_option(code, magic::REP_ACK, &[])
    }

    fn go(&mut self, facts: &Facts, code: u32) -> ScriptResult<bool> {
        use HandshakeFault as Fault;
        let fault = self.offer.handshake.as_ref();
        if let Some(Fault::Refuse(reply, text)) = fault {
            self.talk.reply_option(code, *reply, text.as_bytes())?;
            return Ok(false);
        }
        if fault == Some(&Fault::UnknownInfo) {
            self.talk.reply_option(code, magic::REP_INFO, &[0x77, 0x77, 1, 2, 3])?;
        }
        if fault != Some(&Fault::NoExportInfo) {
            let structured = self.talk.replies != ReplyForm::Simple;
            let extended = self.talk.replies == ReplyForm::Extended;
            let mut info = magic::INFO_EXPORT.to_be_bytes().to_vec();
            info.extend_from_slice(&self.offer.size().to_be_bytes());
            info.extend_from_slice(&export_flags(facts, structured, extended).to_be_bytes());
            self.talk.reply_option(code, magic::REP_INFO, &info)?;
        }
        let block = facts.block;
        let sizes = match fault {
            Some(Fault::BlockSizes(minimum, preferred, maximum)) => {
                [*minimum, *preferred, *maximum]
            }
            _ => [block.minimum, block.preferred, block.maximum],
        };
        let mut info = magic::INFO_BLOCK_SIZE.to_be_bytes().to_vec();
        sizes.iter().for_each(|size| info.extend_from_slice(&size.to_be_bytes()));
        self.talk.reply_option(code, magic::REP_INFO, &info)?;
        self.talk.reply_option(code, magic::REP_ACK, &[])?;
        Ok(code == magic::OPT_GO)
    }

    fn transmit(&mut self) -> ScriptResult {
        loop {
            let Some((request, payload)) = self.talk.receive_request()? else { return Ok(()) };
            if request.command == CommandCode::Disconnect {
                return Ok(());
            }
            std::thread::sleep(self.offer.delay);
            let how = self.offer.how(request.command);
            let answer = match self.carry_out(&request, payload) {
                Ok((reply, contexts)) => self.answer(&request, reply, contexts, how),
                Err(error) => self.talk.done(&request, error),
            };
            if !self.send(&request, answer, how)? {
                return Ok(());
            }
        }
    }

    /// Sends the reply, possibly with its fault; false if the connection must end.
    fn send(
        &mut self,
        request: &RequestHeader,
        mut answer: Vec<u8>,
        how: Option<&ReplyFaultKind>,
    ) -> ScriptResult<bool> {
        match how {
            Some(ReplyFaultKind::Silence) => return Ok(true),
            Some(ReplyFaultKind::Hang) => return self.talk.hang().map(|()| false),
            Some(ReplyFaultKind::Close) => return Ok(false),
            Some(ReplyFaultKind::CloseInHead) => {
                self.talk.send(&answer[..answer.len().min(10)])?;
                return Ok(false);
            }
            Some(ReplyFaultKind::CloseInPayload) => {
                self.talk.send(&answer[..answer.len() - answer.len().min(200) / 2])?;
                return Ok(false);
            }
            Some(ReplyFaultKind::WrongCookie) => {
                let wrong = (request.cookie ^ 0x5555_0000_0000).to_be_bytes();
                // The cookie has the same position in all forms.
                answer[8..16].copy_from_slice(&wrong);
            }
            Some(ReplyFaultKind::Garbage) => {
                self.talk.send_garbage(request.cookie, answer.len().max(64))?;
                return Ok(true);
            }
            Some(ReplyFaultKind::Twice) => answer = [&answer[..], &answer[..]].concat(),
            Some(ReplyFaultKind::Slow { first, piece }) => {
                std::thread::sleep(*first);
                self.talk.send_slowly(&answer, 64, *piece)?;
                return Ok(true);
            }
            _ => {}
        }
        self.talk.send(&answer)?;
        Ok(true)
    }

    /// Carries out the request, and returns its contexts; an error is the wire number.
    fn carry_out(
        &self,
        request: &RequestHeader,
        payload: Vec<u8>,
    ) -> Result<(Reply, ContextSet), u32> {
        let flags = |table: &[(CommandFlags, RequestFlags)]| {
            let mut flags = RequestFlags::empty();
            for (theirs, ours) in table {
                flags.set(*ours, request.flags.contains(*theirs));
            }
            flags
        };
        let fua = (CommandFlags::FUA, RequestFlags::FUA);
        let at = request.offset;
        let len = request.length;
        let ours = match request.command {
            CommandCode::Read => {
                let len = usize::try_from(len).ok().filter(|&len| len <= 64 << 20).ok_or(22_u32)?;
                Request::read(at, Reservation::unpooled(len))
            }
            CommandCode::Write => Request::write(at, Data::copy_of(&payload)).with(flags(&[fua])),
            CommandCode::Flush => Request::flush(),
            CommandCode::Trim => Request::trim(at, len).with(flags(&[fua])),
            CommandCode::Cache => Request::cache(at, len),
            CommandCode::WriteZeroes => Request::zero(at, len).with(flags(&[
                fua,
                (CommandFlags::NO_HOLE, RequestFlags::NO_HOLE),
                (CommandFlags::FAST_ZERO, RequestFlags::FAST),
            ])),
            CommandCode::BlockStatus if !self.selected.is_empty() => {
                let one = flags(&[(CommandFlags::REQ_ONE, RequestFlags::ONE_EXTENT)]);
                let (len, contexts) = if payload.is_empty() {
                    (len, self.selected)
                } else {
                    let selected = self.selected;
                    let known = |id| selected.contains(id as usize);
                    let filter = StatusFilter::parse(&payload, known).map_err(|_| 22_u32)?;
                    let ids = filter.contexts.iter();
                    let set = ids.fold(ContextSet::empty(), |set, &id| set.with(id as usize));
                    (filter.length, set)
                };
                Request::extents(at, len, contexts).with(one)
            }
            _ => return Err(22),
        };
        if len == 0 && request.command != CommandCode::Flush {
            return Err(22);
        }
        let mut model = lock(&self.offer.model);
        let writable = model.facts().can.contains(Can::WRITE);
        if ours.kind().changes() && !writable {
            return Err(1);
        }
        let contexts = if let Op::Extents(contexts) = ours.op { contexts } else { self.selected };
        let reply = model.apply(ours).map_err(|error| error.kind().number())?;
        Ok((reply, contexts))
    }

    /// The bytes of a reply, including faults in its contents.
    fn answer(
        &self,
        request: &RequestHeader,
        reply: Reply,
        contexts: ContextSet,
        how: Option<&ReplyFaultKind>,
    ) -> Vec<u8> {
        if let Some(ReplyFaultKind::Error(number)) = how {
            return self.talk.done(request, *number);
        }
        let chunks = self.talk.replies != ReplyForm::Simple;
        if let Some(how) = how.filter(|_| chunks)
            && let Some(answer) = self.wrong_chunks(request, &reply, how)
        {
            return answer;
        }
        match reply {
            Reply::Done => self.talk.done(request, 0),
            Reply::Data(data) if chunks => self.data(request, 1, request.offset, data.bytes()),
            Reply::Data(data) => [&self.talk.simple(request.cookie, 0), data.bytes()].concat(),
            Reply::Hole if chunks => self.hole(request),
            Reply::Hole => {
                let zeroes = vec![0; request.length as usize];
                [self.talk.simple(request.cookie, 0), zeroes].concat()
            }
            Reply::Extents(lists) => {
                let lists: Vec<_> = contexts.iter().zip(lists).collect();
                self.status(request, &lists, how)
            }
        }
    }

    /// A chunk of data.
    fn data(&self, request: &RequestHeader, flags: u16, at: u64, bytes: &[u8]) -> Vec<u8> {
        let payload = [&at.to_be_bytes()[..], bytes].concat();
        self.talk.chunk(request, flags, magic::REPLY_OFFSET_DATA, &payload)
    }

    fn hole(&self, request: &RequestHeader) -> Vec<u8> {
        let len = (request.length as u32).to_be_bytes();
        let payload = [&request.offset.to_be_bytes()[..], &len].concat();
        self.talk.chunk(request, 1, magic::REPLY_OFFSET_HOLE, &payload)
    }

    /// Replies in chunks that are wrong or unusual; `None` if that does not apply.
    fn wrong_chunks(
        &self,
        request: &RequestHeader,
        reply: &Reply,
        how: &ReplyFaultKind,
    ) -> Option<Vec<u8>> {
        let talk = &self.talk;
        let at = request.offset;
        let whatever = match how {
            ReplyFaultKind::ErrorAt(number, at, text) => {
                let mut payload = number.to_be_bytes().to_vec();
                payload.extend_from_slice(&(text.len() as u16).to_be_bytes());
                payload.extend_from_slice(text.as_bytes());
                payload.extend_from_slice(&at.to_be_bytes());
                Some(talk.chunk(request, 1, magic::REPLY_ERROR_OFFSET, &payload))
            }
            ReplyFaultKind::ErrorZero => Some(talk.chunk(request, 1, magic::REPLY_ERROR, &[0; 6])),
            ReplyFaultKind::UnknownError => {
                let payload = [&5_u32.to_be_bytes()[..], &[0, 2], b"??"].concat();
                Some(talk.chunk(request, 1, magic::REPLY_ERROR_BIT | 77, &payload))
            }
            ReplyFaultKind::UnknownChunk => Some(talk.chunk(request, 1, 77, b"what is this")),
            ReplyFaultKind::Oversized => {
                let kind = magic::REPLY_OFFSET_DATA;
                Some(talk.chunk_head(request, 1, kind, (1 << 31) - 1))
            }
            ReplyFaultKind::NeverDone => Some(talk.chunk(request, 0, magic::REPLY_NONE, &[])),
            ReplyFaultKind::WrongOffset if talk.replies == ReplyForm::Extended => {
                let moved = RequestHeader { offset: at ^ 0x1000, ..*request };
                match reply {
                    Reply::Data(data) => Some(self.data(&moved, 1, at, data.bytes())),
                    _ => Some(talk.done(&moved, 0)),
                }
            }
            _ => None,
        };
        if whatever.is_some() {
            return whatever;
        }
        let Reply::Data(data) = reply else { return None };
        let bytes = data.bytes();
        let half = bytes.len() / 2;
        let second = at + half as u64;
        Some(match how {
            ReplyFaultKind::OutsideRange => self.data(request, 1, at.wrapping_sub(4096), bytes),
            ReplyFaultKind::Missing => self.data(request, 1, at, &bytes[..half]),
            ReplyFaultKind::Overlap => {
                let first = self.data(request, 0, at, bytes);
                [first, self.data(request, 1, second, &bytes[half..])].concat()
            }
            ReplyFaultKind::Backwards => {
                let last = self.data(request, 0, second, &bytes[half..]);
                let first = self.data(request, 0, at, &bytes[..half]);
                let end = talk.chunk(request, 1, magic::REPLY_NONE, &[]);
                if half == 0 { [last, end].concat() } else { [last, first, end].concat() }
            }
            ReplyFaultKind::Hole => self.hole(request),
            ReplyFaultKind::SimpleInstead => [&talk.simple(request.cookie, 0), bytes].concat(),
            ReplyFaultKind::ErrorHalfway(number) => {
                let first = self.data(request, 0, at, &bytes[..half]);
                [first, talk.done(request, *number)].concat()
            }
            _ => return None,
        })
    }

    /// One chunk of block status for each context.
    fn status(
        &self,
        request: &RequestHeader,
        lists: &[(usize, Extents)],
        how: Option<&ReplyFaultKind>,
    ) -> Vec<u8> {
        let extended = self.talk.replies == ReplyForm::Extended;
        if how == Some(&ReplyFaultKind::NoStatus) {
            return self.talk.chunk(request, 1, magic::REPLY_NONE, &[]);
        }
        let mut answer = Vec::new();
        for (index, list) in lists {
            let id = if how == Some(&ReplyFaultKind::WrongContext) { 4711 } else { *index as u32 };
            let mut runs: Vec<(u64, u64)> = match how {
                Some(ReplyFaultKind::EmptyExtent) => vec![(0, 0)],
                Some(ReplyFaultKind::NoExtents) => Vec::new(),
                Some(ReplyFaultKind::LongExtent) => vec![(1 << 31, 0)],
                _ => list.runs().iter().map(|run| (run.len, run.state)).collect(),
            };
            runs.truncate(1 << 16);
            let mut payload = id.to_be_bytes().to_vec();
            if extended {
                payload.extend_from_slice(&(runs.len() as u32).to_be_bytes());
            }
            for (len, state) in runs {
                if extended {
                    payload.extend_from_slice(&len.to_be_bytes());
                    payload.extend_from_slice(&state.to_be_bytes());
                } else {
                    payload.extend_from_slice(&(len as u32).to_be_bytes());
                    payload.extend_from_slice(&(state as u32).to_be_bytes());
                }
            }
            let long = magic::REPLY_BLOCK_STATUS_EXT;
            let kind = if extended { long } else { magic::REPLY_BLOCK_STATUS };
            answer.extend_from_slice(&self.talk.chunk(request, 0, kind, &payload));
        }
        answer.extend_from_slice(&self.talk.chunk(request, 1, magic::REPLY_NONE, &[]));
        answer
    }
}

/// The queries of a context option.
fn queries(payload: &[u8]) -> Option<Vec<String>> {
    let mut rest = payload;
    let name = number(&mut rest)?;
    take(&mut rest, name)?;
    let count = number(&mut rest)?;
    let mut queries = Vec::new();
    for _ in 0..count {
        let len = number(&mut rest)?;
        queries.push(std::str::from_utf8(take(&mut rest, len)?).ok()?.to_string());
    }
    rest.is_empty().then_some(queries)
}

fn number(rest: &mut &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(take(rest, 4)?.try_into().ok()?))
}

fn take<'a>(rest: &mut &'a [u8], len: u32) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(len as usize)?;
    *rest = left;
    Some(taken)
}
