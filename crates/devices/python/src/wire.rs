//! The messages between this program and `host/host.py`. Both ends are parts of this program, so there
//! are no versions. Numbers are little-endian.
//!
//! | request | bytes | answer | bytes |
//! |---|---|---|---|
//! | operation, flags | 1, 1 | cookie | 8 |
//! | link: which socket the answer goes to | 2 | error number, 0 for none | 4 |
//! | handle | 4 | kind, flags | 2, 2 |
//! | cookie | 8 | length of the payload | 4 |
//! | offset, length | 8, 8 | 0 | 4 |
//! | offset of the buffer in the shared memory | 8 | | |
//! | length of the payload, 0 | 4, 4 | | |

use blockhaul_block::{Error, Kind, OpKind, RequestFlags, Result};

/// Size of an answer without its payload, in bytes.
pub(crate) const ANSWER: usize = 24;
/// Longest payload of an answer in bytes: as many extents as the host sends, and more than it sends
/// of anything else.
pub(crate) const PAYLOAD_MAX: usize = 2 << 20;

/// nbdkit's flags of callbacks.
const MAY_TRIM: u8 = 1;
const FUA: u8 = 2;
const REQ_ONE: u8 = 4;
const FAST_ZERO: u8 = 8;

/// What the host is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum HostCommand {
    Read = 1,
    Write,
    Flush,
    Trim,
    Zero,
    Cache,
    Extents,
    Start = 16,
    Enter,
    List,
    Open,
    Close,
    Leave,
    Cancel,
    End,
}

impl HostCommand {
    pub(crate) fn of(kind: OpKind) -> HostCommand {
        match kind {
            OpKind::Read => HostCommand::Read,
            OpKind::Write => HostCommand::Write,
            OpKind::Zero => HostCommand::Zero,
            OpKind::Trim => HostCommand::Trim,
            OpKind::Flush => HostCommand::Flush,
            OpKind::Cache => HostCommand::Cache,
            OpKind::Extents => HostCommand::Extents,
        }
    }
}

/// A request to the host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostRequest {
    pub(crate) op: HostCommand,
    pub(crate) flags: u8,
    pub(crate) handle: u32,
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) memory: u64,
}

impl HostRequest {
    /// One without a range.
    pub(crate) fn new(op: HostCommand, handle: u32, at: u64) -> HostRequest {
        HostRequest { op, flags: 0, handle, at, len: 0, memory: 0 }
    }

    /// Appends the message. `payload` is short enough for 32 bits (checked by its makers).
    pub(crate) fn encode(&self, link: u16, cookie: u64, payload: &[u8], out: &mut Vec<u8>) {
        let len = u32::try_from(payload.len()).expect("texts of this program are short");
        out.extend_from_slice(&[self.op as u8, self.flags]);
        out.extend_from_slice(&link.to_le_bytes());
        out.extend_from_slice(&self.handle.to_le_bytes());
        for number in [cookie, self.at, self.len, self.memory] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(payload);
    }
}

/// The flags of a callback for those of a request; `fua`: the plugin does FUA itself.
pub(crate) fn flags(kind: OpKind, flags: RequestFlags, fua: bool) -> u8 {
    let mut bits = 0;
    let mut set = |yes: bool, bit: u8| bits |= if yes { bit } else { 0 };
    set(fua, FUA);
    set(kind == OpKind::Zero && !flags.contains(RequestFlags::NO_HOLE), MAY_TRIM);
    set(flags.contains(RequestFlags::FAST), FAST_ZERO);
    set(flags.contains(RequestFlags::ONE_EXTENT), REQ_ONE);
    bits
}

/// What a message of the host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageKind {
    /// The answer to a request.
    Answer,
    /// A line for the log.
    Debug,
    /// The plugin asks the server to stop.
    Shutdown,
    /// The plugin disconnects a client: the number of its visit, and whether at once.
    Disconnect,
    /// A buffer that was kept is free: where it is in the memory.
    Freed,
}

/// A message of the host.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HostMessage<'a> {
    pub(crate) kind: MessageKind,
    /// The request's cookie, or another number.
    pub(crate) number: u64,
    /// The error number, or 0.
    pub(crate) status: u32,
    /// The plugin still uses the buffer of the request.
    pub(crate) kept: bool,
    pub(crate) payload: &'a [u8],
}

/// The first message in what was received, and its length; `None`: it is not complete.
///
/// # Errors
/// The host, or a plugin in its process, writes something else.
pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(HostMessage<'_>, usize)>> {
    let wrong =
        || Error::new(Kind::Io, "the Python process sends something that is no message").complete();
    let Some((head, rest)) = bytes.split_at_checked(ANSWER) else { return Ok(None) };
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let number = u64::from(word(0)) | u64::from(word(4)) << 32;
    let kind = match u16::from_le_bytes([head[12], head[13]]) {
        0 => MessageKind::Answer,
        1 => MessageKind::Debug,
        2 => MessageKind::Shutdown,
        3 => MessageKind::Disconnect,
        4 => MessageKind::Freed,
        _ => return Err(wrong()),
    };
    let len = word(16) as usize;
    if len > PAYLOAD_MAX {
        return Err(wrong());
    }
    let Some(payload) = rest.get(..len) else { return Ok(None) };
    let message = HostMessage { kind, number, status: word(8), kept: head[14] & 1 != 0, payload };
    Ok(Some((message, ANSWER + len)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_size_that_the_host_expects() {
        let mut out = Vec::new();
        let ask = HostRequest {
            op: HostCommand::Read,
            flags: 2,
            handle: 7,
            at: 1 << 40,
            len: 4096,
            memory: 8192,
        };
        ask.encode(3, 5, b"xy", &mut out);
        assert_eq!(out.len(), 48 + 2);
        assert_eq!(out[..8], [1, 2, 3, 0, 7, 0, 0, 0]);
        assert_eq!((out[8], out[21], out[25], out[33], out[40]), (5, 1, 16, 32, 2));
        assert_eq!(flags(OpKind::Zero, RequestFlags::FAST, true), 2 | 1 | 8);
        assert_eq!(flags(OpKind::Zero, RequestFlags::NO_HOLE, false), 0);
    }

    #[test]
    fn messages_are_whole_or_not_there() {
        let mut bytes = vec![0; ANSWER];
        bytes[0] = 9;
        bytes[8] = 28;
        bytes[14] = 1;
        bytes[16] = 2;
        bytes.extend_from_slice(b"abc");
        let (message, len) = decode(&bytes).unwrap().unwrap();
        let kind = MessageKind::Answer;
        assert_eq!(
            message,
            HostMessage { kind, number: 9, status: 28, kept: true, payload: b"ab" }
        );
        assert_eq!(len, ANSWER + 2);
        for short in 0..ANSWER + 2 {
            assert!(decode(&bytes[..short]).unwrap().is_none(), "{short}");
        }
        for (at, byte) in [(12, 9), (19, 1)] {
            let mut bad = bytes.clone();
            bad[at] = byte;
            assert!(decode(&bad).is_err());
        }
    }
}
