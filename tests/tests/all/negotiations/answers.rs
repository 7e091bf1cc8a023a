//! What the protocol document allows a server to answer to a request, with a model of what is stored.

use blockhaul_wire::{ReplyForm, magic};

use super::judge::READ_ONLY;
use super::requests::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE, Request};
use super::{SIZE, ask};

const EPERM: u32 = 1;
const EIO: u32 = 5;
const ENOMEM: u32 = 12;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;
const ESHUTDOWN: u32 = 108;

/// The document's list.
const ERRORS: [u32; 8] = [EPERM, EIO, ENOMEM, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP, ESHUTDOWN];

/// Flags of an export.
const CAN_FUA: u16 = 1 << 3;
const CAN_TRIM: u16 = 1 << 5;
const CAN_ZERO: u16 = 1 << 6;
const CAN_FAST_ZERO: u16 = 1 << 11;

/// Bytes that a read or write may have.
const LONGEST: u64 = 32 << 20;

/// One message of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    Simple { error: u32, data: Vec<u8> },
    Chunk { flags: u16, kind: u16, payload: Vec<u8> },
}

/// What a reply says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Told {
    pub error: u32,
    /// Pieces of data and holes, by their offset.
    pieces: Vec<(u64, Vec<u8>)>,
    /// Contexts, with lengths and states.
    status: Vec<(u32, Vec<(u64, u64)>)>,
}

/// Numbers of a payload, from its start on.
struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn next(&mut self, len: usize) -> Result<u64, String> {
        let (number, rest) = self.0.split_at_checked(len).ok_or("a payload that is too short")?;
        self.0 = rest;
        Ok(number.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}

/// Reads a whole reply, judging its form.
pub fn told(request: &Request, replies: ReplyForm, messages: &[Message]) -> Result<Told, String> {
    let mut told = Told::default();
    for (index, message) in messages.iter().enumerate() {
        let is_last = index + 1 == messages.len();
        match message {
            Message::Simple { error, data } => {
                ask!(replies != ReplyForm::Extended, "a simple reply with extended headers");
                let chunks_due =
                    replies == ReplyForm::Structured && request.command == magic::CMD_READ;
                ask!(!chunks_due, "a simple reply to a read, with structured replies");
                let status = request.command == magic::CMD_BLOCK_STATUS && *error == 0;
                ask!(!status, "a simple reply to block status");
                told.error = *error;
                if request.command == magic::CMD_READ && *error == 0 {
                    told.pieces.push((request.offset, data.clone()));
                }
            }
            Message::Chunk { flags, kind, payload } => {
                ask!(*flags == u16::from(is_last), "flags {flags:#x} on chunk {index}");
                told.chunk(request, replies, *kind, payload)
                    .map_err(|why| format!("chunk of kind {kind:#x}: {why}"))?;
            }
        }
    }
    ask!(told.error == 0 || ERRORS.contains(&told.error), "error number {}", told.error);
    Ok(told)
}

impl Told {
    fn chunk(
        &mut self,
        request: &Request,
        replies: ReplyForm,
        kind: u16,
        payload: &[u8],
    ) -> Result<(), String> {
        let mut numbers = Numbers(payload);
        let reads = request.command == magic::CMD_READ;
        let status = request.command == magic::CMD_BLOCK_STATUS;
        match kind {
            magic::REPLY_NONE => {}
            magic::REPLY_OFFSET_DATA if reads => {
                let at = numbers.next(8)?;
                ask!(!numbers.0.is_empty(), "no data");
                self.pieces.push((at, numbers.0.to_vec()));
                numbers.0 = &[];
            }
            magic::REPLY_OFFSET_HOLE if reads => {
                let at = numbers.next(8)?;
                let len = numbers.next(4)?;
                ask!(len > 0 && len <= request.length, "a hole of {len}");
                self.pieces.push((at, vec![0; len as usize]));
            }
            magic::REPLY_BLOCK_STATUS if status && replies == ReplyForm::Structured => {
                let id = numbers.next(4)? as u32;
                self.status.push((id, extents(&mut numbers, 4)?));
            }
            magic::REPLY_BLOCK_STATUS_EXT if status && replies == ReplyForm::Extended => {
                let id = numbers.next(4)? as u32;
                let count = numbers.next(4)?;
                let extents = extents(&mut numbers, 8)?;
                ask!(extents.len() as u64 == count, "{} extents of {count}", extents.len());
                self.status.push((id, extents));
            }
            magic::REPLY_ERROR | magic::REPLY_ERROR_OFFSET => {
                let error = numbers.next(4)? as u32;
                let len = numbers.next(2)? as usize;
                let text = numbers.0.split_at_checked(len).ok_or("a text longer than the chunk")?;
                ask!(std::str::from_utf8(text.0).is_ok(), "a text that is none");
                numbers.0 = text.1;
                if kind == magic::REPLY_ERROR_OFFSET {
                    numbers.next(8)?;
                }
                ask!(error != 0 && self.error == 0, "errors {} and {error}", self.error);
                self.error = error;
            }
            _ => return Err("not for this command".to_string()),
        }
        ask!(numbers.0.is_empty(), "{} bytes are left over", numbers.0.len());
        Ok(())
    }

    /// The bytes that a read has brought: each exactly once.
    pub fn bytes(&self, request: &Request) -> Result<Vec<u8>, String> {
        let mut pieces = self.pieces.clone();
        pieces.sort_by_key(|piece| piece.0);
        let mut bytes = Vec::new();
        let mut at = request.offset;
        for (start, piece) in &pieces {
            ask!(*start == at, "bytes from {start} on instead of {at}");
            at += piece.len() as u64;
            bytes.extend(piece);
        }
        ask!(at == request.offset + request.length, "bytes up to {at}");
        Ok(bytes)
    }
}

fn extents(numbers: &mut Numbers, width: usize) -> Result<Vec<(u64, u64)>, String> {
    let mut extents = Vec::new();
    while !numbers.0.is_empty() {
        extents.push((numbers.next(width)?, numbers.next(width)?));
    }
    ask!(!extents.is_empty(), "no extents");
    Ok(extents)
}

/// What is stored, by the answers up to now.
pub struct Model {
    pub bytes: Vec<u8>,
}

/// What holds for the requests of a connection.
pub struct Session {
    pub replies: ReplyForm,
    /// Of the export.
    pub flags: u16,
    /// Numbers of the selected contexts.
    pub contexts: Vec<u32>,
}

impl Session {
    /// Error numbers that a request may be answered with, and whether it may succeed.
    fn allowed(&self, request: &Request) -> (Vec<u32>, bool) {
        let mut errors = Vec::new();
        let command = request.command;
        let flags = request.flags;
        let changes =
            [magic::CMD_WRITE, magic::CMD_WRITE_ZEROES, magic::CMD_TRIM].contains(&command);
        let beyond = request.offset.checked_add(request.effect()).is_none_or(|end| end > SIZE);
        if changes && self.flags & READ_ONLY != 0 {
            errors.push(EPERM);
        }
        if command != magic::CMD_FLUSH && beyond {
            errors.extend([EINVAL].iter().chain(changes.then_some(&ENOSPC)));
        }
        let lacks = |can: u16| self.flags & can == 0;
        let long = [magic::CMD_READ, magic::CMD_WRITE].contains(&command);
        let wrong = flags & !self.flags_of(command) != 0
            || command > magic::CMD_BLOCK_STATUS
            || (long && request.length > LONGEST)
            || (command == magic::CMD_TRIM && lacks(CAN_TRIM))
            || (command == magic::CMD_WRITE_ZEROES && lacks(CAN_ZERO))
            || (command == magic::CMD_BLOCK_STATUS && self.selects_wrongly(request));
        if wrong {
            errors.push(EINVAL);
        }
        let must_fail = !errors.is_empty();
        if command != magic::CMD_FLUSH && request.effect() == 0 {
            // Not defined.
            errors.push(EINVAL);
        }
        if flags & FUA != 0 && lacks(CAN_FUA) {
            // Not to be asked for, and without meaning for what changes nothing.
            errors.push(EINVAL);
        }
        if flags & FAST_ZERO != 0 && command == magic::CMD_WRITE_ZEROES {
            errors.push(if lacks(CAN_FAST_ZERO) { EINVAL } else { ENOTSUP });
        }
        (errors, !must_fail)
    }

    fn selects_wrongly(&self, request: &Request) -> bool {
        let Some(filter) = &request.filter else { return self.contexts.is_empty() };
        let ids = &filter.contexts;
        let twice = ids.iter().enumerate().any(|(at, id)| ids[..at].contains(id));
        filter.broken || twice || ids.is_empty() || ids.iter().any(|id| !self.contexts.contains(id))
    }

    /// Flags that a command may have.
    fn flags_of(&self, command: u16) -> u16 {
        let extended = if self.replies == ReplyForm::Extended { PAYLOAD_LEN } else { 0 };
        let chunks = if self.replies == ReplyForm::Simple { 0 } else { DF };
        FUA | match command {
            magic::CMD_READ => chunks,
            magic::CMD_WRITE => extended,
            magic::CMD_WRITE_ZEROES => NO_HOLE | FAST_ZERO,
            magic::CMD_BLOCK_STATUS => REQ_ONE | extended,
            _ => 0,
        }
    }

    /// Whether a request may be answered so; what it has changed is changed in the model; of
    /// trims see [`Model::trimmed`].
    pub fn judge(
        &self,
        request: &Request,
        messages: &[Message],
        model: &mut Model,
    ) -> Result<(), String> {
        let told = told(request, self.replies, messages)?;
        let (errors, may_succeed) = self.allowed(request);
        if told.error != 0 {
            ask!(errors.contains(&told.error), "error {}", told.error);
            return Ok(());
        }
        ask!(may_succeed, "success, where {errors:?} is due");
        match request.command {
            magic::CMD_READ => {
                let one = self.replies == ReplyForm::Simple || request.flags & DF == 0;
                ask!(one || told.pieces.len() == 1, "{} pieces", told.pieces.len());
                let bytes = told.bytes(request)?;
                let due = model.range(request);
                let wrong = bytes.iter().zip(&*due).position(|(here, there)| here != there);
                ask!(wrong.is_none(), "byte {wrong:?} is wrong");
            }
            magic::CMD_WRITE => model.range(request).copy_from_slice(&request.payload),
            magic::CMD_WRITE_ZEROES => model.range(request).fill(0),
            magic::CMD_BLOCK_STATUS => self.status(request, &told.status, model)?,
            _ => {}
        }
        Ok(())
    }

    fn status(
        &self,
        request: &Request,
        status: &[(u32, Vec<(u64, u64)>)],
        model: &Model,
    ) -> Result<(), String> {
        let asked = request.filter.as_ref().map_or(&self.contexts, |filter| &filter.contexts);
        let told: Vec<_> = status.iter().map(|(id, _)| *id).collect();
        ask!(told == *asked, "contexts {told:?} instead of {asked:?}");
        let end = request.offset + request.effect();
        for (_, extents) in status {
            let one = request.flags & REQ_ONE != 0;
            ask!(!one || extents.len() == 1, "{} extents", extents.len());
            let mut at = request.offset;
            for (len, state) in extents {
                ask!(*len > 0 && *state < 4, "an extent of {len} in state {state}");
                ask!(at < end, "an extent behind what was asked for");
                ask!(*len <= SIZE - at, "an extent beyond the end");
                let bytes = &model.bytes[at as usize..(at + len) as usize];
                let zeroes = bytes.iter().all(|byte| *byte == 0);
                ask!(*state & 2 == 0 || zeroes, "data where zeroes are told, {len} at {at}");
                at += len;
            }
            ask!(!one || at <= end, "an extent longer than asked for");
        }
        Ok(())
    }
}

impl Model {
    fn range(&mut self, request: &Request) -> &mut [u8] {
        &mut self.bytes[request.offset as usize..][..request.length as usize]
    }

    /// What a trim has left: of each byte the old one, or zero.
    pub fn trimmed(&mut self, request: &Request, now: &[u8]) -> Result<(), String> {
        let range = self.range(request);
        let wrong = range.iter().zip(now).position(|(old, now)| *now != 0 && now != old);
        ask!(wrong.is_none() && now.len() == range.len(), "byte {wrong:?} of a trim");
        range.copy_from_slice(now);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(flags: u16, kind: u16, payload: &[u8]) -> Message {
        Message::Chunk { flags, kind, payload: payload.to_vec() }
    }

    fn data(flags: u16, at: u64, bytes: &[u8]) -> Message {
        chunk(flags, magic::REPLY_OFFSET_DATA, &[&at.to_be_bytes(), bytes].concat())
    }

    fn hole(flags: u16, at: u64, len: u32) -> Message {
        let payload = [&at.to_be_bytes()[..], &len.to_be_bytes()].concat();
        chunk(flags, magic::REPLY_OFFSET_HOLE, &payload)
    }

    fn status(flags: u16, numbers: &[u32]) -> Message {
        let payload: Vec<_> = numbers.iter().flat_map(|number| number.to_be_bytes()).collect();
        chunk(flags, magic::REPLY_BLOCK_STATUS, &payload)
    }

    fn error(number: u32) -> Message {
        chunk(1, magic::REPLY_ERROR, &[&number.to_be_bytes()[..], &[0, 0]].concat())
    }

    fn judge(command: u16, flags: u16, messages: &[Message]) -> bool {
        let offset = 100;
        let length = 8;
        let payload = vec![];
        let request = Request { command, flags, cookie: 0, offset, length, payload, filter: None };
        let session = Session { replies: ReplyForm::Structured, flags: 1, contexts: vec![3] };
        let mut model = Model { bytes: vec![0; SIZE as usize] };
        model.bytes[100..104].copy_from_slice(b"data");
        session.judge(&request, messages, &mut model).is_ok()
    }

    #[test]
    fn wrong_reads_are_found() {
        let is_right = |flags, messages: &[Message]| judge(magic::CMD_READ, flags, messages);
        let none = chunk(1, magic::REPLY_NONE, &[]);
        assert!(is_right(0, &[data(1, 100, b"data\0\0\0\0")]));
        assert!(is_right(0, &[hole(0, 104, 4), data(0, 100, b"data"), none.clone()]));
        assert!(!is_right(0, &[data(0, 100, b"data\0\0\0\0")]), "no end");
        assert!(!is_right(0, &[data(1, 100, b"data"), hole(1, 104, 4)]), "two ends");
        assert!(!is_right(0, &[data(3, 100, b"data\0\0\0\0")]), "an unknown flag");
        assert!(!is_right(0, &[data(1, 100, b"Data\0\0\0\0")]), "another byte");
        assert!(!is_right(0, &[data(1, 100, b"data")]), "too few bytes");
        assert!(!is_right(0, &[data(0, 100, b"data\0"), hole(1, 104, 4)]), "a byte twice");
        assert!(!is_right(0, &[data(0, 100, b"data"), hole(1, 104, 5)]), "beyond the range");
        assert!(!is_right(DF, &[data(0, 100, b"data"), hole(1, 104, 4)]), "in pieces, with DF");
        assert!(!is_right(0, &[Message::Simple { error: 0, data: b"data".to_vec() }]));
        assert!(!is_right(0, &[error(EINVAL)]), "an error without a reason");
        assert!(!is_right(REQ_ONE, &[data(1, 100, b"data\0\0\0\0")]), "another command's flag");
        assert!(is_right(REQ_ONE, &[error(EINVAL)]));
        assert!(!is_right(REQ_ONE, &[error(11)]), "no number of the document's");
    }

    #[test]
    fn wrong_block_status_is_found() {
        let is_right =
            |flags, messages: &[Message]| judge(magic::CMD_BLOCK_STATUS, flags, messages);
        assert!(is_right(0, &[status(1, &[3, 4, 0, 4, 3])]));
        assert!(is_right(0, &[status(1, &[3, 4, 0, 1000, 3])]), "the last may be longer");
        assert!(is_right(REQ_ONE, &[status(1, &[3, 4, 0])]));
        assert!(!is_right(REQ_ONE, &[status(1, &[3, 4, 0, 4, 3])]), "two");
        assert!(!is_right(REQ_ONE, &[status(1, &[3, 9, 0])]), "longer than asked for");
        assert!(!is_right(0, &[status(1, &[3, 8, 3])]), "data where zeroes are told");
        assert!(!is_right(0, &[status(1, &[3, 8, 0, 8, 3])]), "an extent behind the range");
        assert!(!is_right(0, &[status(1, &[3, 0, 0])]), "an empty one");
        assert!(!is_right(0, &[status(1, &[4, 8, 0])]), "another context");
        assert!(!is_right(0, &[status(1, &[3, 1 << 30, 0])]), "beyond the end");
        assert!(!is_right(0, &[status(0, &[3, 8, 0]), status(1, &[3, 8, 0])]), "twice");
    }
}
