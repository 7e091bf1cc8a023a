//! The features of a plain server, and its faults.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::Facts;
use blockhaul_wire::{CommandCode, ReplyForm};

use crate::model::{Model, lock};

/// The features of the server, and its faults.
pub struct Offer {
    /// The content, shared by all connections.
    pub model: Arc<Mutex<Model>>,
    /// The form of its handshake.
    pub style: HandshakeStyle,
    /// Structured replies may be negotiated.
    pub structured: bool,
    /// Extended headers may be negotiated.
    pub extended: bool,
    /// Connections from this number on are left waiting, as by servers for one client at a time.
    pub connections_max: usize,
    /// How long each reply takes.
    pub delay: Duration,
    /// The fault in the handshake.
    pub handshake: Option<HandshakeFault>,
    /// Faults after the handshake.
    pub spoils: Vec<ReplyFault>,
}

/// The form of a server's handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandshakeStyle {
    /// Size and flags at once; nothing can be negotiated.
    Oldstyle,
    /// Only EXPORT_NAME; the connection ends at any other option.
    Newstyle,
    /// Options have replies, but GO is unknown.
    FixedWithoutGo,
    /// Like current servers.
    Fixed,
}

/// A fault in the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeFault {
    /// Not one byte is sent, the connection stays open.
    Silent,
    /// The connection is closed at once.
    CloseAtOnce,
    /// Something that is not NBD.
    NotNbd,
    /// `NBDMAGIC`, then something unknown.
    WrongSecondMagic,
    /// Half of the greeting, then the end.
    HalfGreeting,
    /// No reply to the option with this number (from 1), the connection stays open.
    StopAtOption(usize),
    /// The end instead of a reply to the option with this number (from 1).
    CloseAtOption(usize),
    /// A reply with a wrong magic number.
    WrongReplyMagic,
    /// A reply to another option than was sent.
    AnswerToAnother,
    /// A reply that claims 4 GiB - 1.
    HugeAnswer,
    /// GO is refused by this reply, with this text.
    Refuse(u32, String),
    /// GO succeeds without saying size and flags.
    NoExportInfo,
    /// GO sends an unknown information item; harmless.
    UnknownInfo,
    /// Invalid minimum, preferred and maximum block size.
    BlockSizes(u32, u32, u32),
    /// The size in place of the model's.
    Size(u64),
    /// Each byte takes this long.
    Slow(Duration),
}

/// A reply with a fault.
#[derive(Debug)]
pub struct ReplyFault {
    command: CommandCode,
    nth: u64,
    every: bool,
    how: ReplyFaultKind,
    seen: AtomicU64,
}

impl ReplyFault {
    /// The `nth` request of this command over all connections, from 1.
    pub fn nth(command: CommandCode, nth: u64, how: ReplyFaultKind) -> ReplyFault {
        ReplyFault { command, nth, every: false, how, seen: AtomicU64::new(0) }
    }

    /// All requests of this command from the `nth` on, from 1.
    pub fn from(command: CommandCode, nth: u64, how: ReplyFaultKind) -> ReplyFault {
        ReplyFault { every: true, ..ReplyFault::nth(command, nth, how) }
    }
}

/// The fault of a reply. Faults that need chunks have no effect if these were not negotiated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyFaultKind {
    /// None is sent; later requests are answered.
    Silence,
    /// None is sent, and nothing else any more; the connection stays open.
    Hang,
    /// The connection ends instead.
    Close,
    /// The connection ends after half of the head.
    CloseInHead,
    /// The connection ends in the middle of the data.
    CloseInPayload,
    /// A cookie that no request has.
    WrongCookie,
    /// Random bytes instead of a head.
    Garbage,
    /// The whole answer twice.
    Twice,
    /// It takes this long, and then arrives in pieces, with `piece` between them.
    Slow {
        /// Before the first byte.
        first: Duration,
        /// Between pieces of 64 bytes.
        piece: Duration,
    },
    /// An error of this number.
    Error(u32),
    /// Like `Error`, with a text and an offset. Chunks.
    ErrorAt(u32, u64, String),
    /// An error chunk that says success. Chunks.
    ErrorZero,
    /// An error chunk of an unknown kind: an error all the same. Chunks.
    UnknownError,
    /// A chunk of an unknown kind that is no error. Chunks.
    UnknownChunk,
    /// A chunk that claims 2 GiB - 1 of data. Chunks.
    Oversized,
    /// Data from before the requested range. Chunks; reads.
    OutsideRange,
    /// Only the first half of the data. Chunks; reads.
    Missing,
    /// Some of the data twice. Chunks; reads.
    Overlap,
    /// The data in several chunks, the last one first; valid. Chunks; reads.
    Backwards,
    /// A hole for all of it. Chunks; reads. Valid if there are only zeroes.
    Hole,
    /// A simple reply although chunks were negotiated. Chunks; reads.
    SimpleInstead,
    /// A chunk that is not the last, and then nothing. Chunks.
    NeverDone,
    /// Half of the data, then an error chunk. Chunks; reads.
    ErrorHalfway(u32),
    /// The answer's offset is not the request's. Extended headers.
    WrongOffset,
    /// Extents of a context that was not requested. BLOCK_STATUS.
    WrongContext,
    /// Extents of length 0. BLOCK_STATUS.
    EmptyExtent,
    /// No extent at all. BLOCK_STATUS.
    NoExtents,
    /// The last chunk without any extents: success that says nothing. BLOCK_STATUS.
    NoStatus,
    /// The only extent extends far beyond the request; allowed. BLOCK_STATUS.
    LongExtent,
}

impl Offer {
    /// All features of the protocol, without faults.
    pub fn new(model: Model) -> Offer {
        Offer {
            model: Arc::new(Mutex::new(model)),
            style: HandshakeStyle::Fixed,
            structured: true,
            extended: true,
            connections_max: usize::MAX,
            delay: Duration::ZERO,
            handshake: None,
            spoils: Vec::new(),
        }
    }

    /// The same with a fault.
    #[must_use]
    pub fn spoil(mut self, spoil: ReplyFault) -> Offer {
        self.spoils.push(spoil);
        self
    }

    /// The same with a fault in the handshake.
    #[must_use]
    pub fn handshake(mut self, fault: HandshakeFault) -> Offer {
        self.handshake = Some(fault);
        self
    }

    /// The same without extended headers, or without structured replies, too.
    #[must_use]
    pub fn replies(mut self, replies: ReplyForm) -> Offer {
        self.extended = replies == ReplyForm::Extended;
        self.structured = replies != ReplyForm::Simple;
        self
    }

    /// The same with another form of handshake.
    #[must_use]
    pub fn style(mut self, style: HandshakeStyle) -> Offer {
        self.style = style;
        self
    }

    pub(super) fn facts(&self) -> Arc<Facts> {
        lock(&self.model).facts()
    }

    pub(super) fn size(&self) -> u64 {
        match self.handshake {
            Some(HandshakeFault::Size(size)) => size,
            _ => self.facts().size,
        }
    }

    /// The fault for this request, if any.
    pub(super) fn how(&self, command: CommandCode) -> Option<&ReplyFaultKind> {
        let mut found = None;
        for spoil in self.spoils.iter().filter(|spoil| spoil.command == command) {
            let seen = spoil.seen.fetch_add(1, Ordering::SeqCst) + 1;
            if seen == spoil.nth || (spoil.every && seen > spoil.nth) {
                found = found.or(Some(&spoil.how));
            }
        }
        found
    }
}
