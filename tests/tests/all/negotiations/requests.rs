//! Random requests, right and wrong.

use blockhaul_testkit::rng::Rng;
use blockhaul_wire::ReplyForm;
use blockhaul_wire::magic;

use super::SIZE;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 1 << 1;
pub const DF: u16 = 1 << 2;
pub const REQ_ONE: u16 = 1 << 3;
pub const FAST_ZERO: u16 = 1 << 4;
pub const PAYLOAD_LEN: u16 = 1 << 5;

/// A request as it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub command: u16,
    pub flags: u16,
    pub cookie: u64,
    pub offset: u64,
    /// As the header says it.
    pub length: u64,
    pub payload: Vec<u8>,
    /// The contexts that a payload selects.
    pub filter: Option<Filter>,
}

/// A payload by which BLOCK_STATUS selects contexts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    pub length: u64,
    pub contexts: Vec<u32>,
    /// Its bytes make no list of contexts.
    pub broken: bool,
}

impl Request {
    /// A random one for this form of messages.
    pub fn random(rng: &mut Rng, cookie: u64, replies: ReplyForm) -> Request {
        let command = match rng.below(20) {
            0..5 => magic::CMD_READ,
            5..9 => magic::CMD_WRITE,
            9..12 => magic::CMD_WRITE_ZEROES,
            12 => magic::CMD_TRIM,
            13 => magic::CMD_FLUSH,
            14 => magic::CMD_CACHE,
            15 if rng.chance(30) => *rng.pick(&[8, 9, 255, u16::MAX]),
            15..18 => magic::CMD_BLOCK_STATUS,
            _ => magic::CMD_READ,
        };
        let (offset, length) = range(rng, command, replies);
        let flags = flags(rng, command, replies);
        let mut request =
            Request { command, flags, cookie, offset, length, payload: vec![], filter: None };
        request.fill(rng, replies);
        request
    }

    /// Bytes of the effect.
    pub fn effect(&self) -> u64 {
        self.filter.as_ref().map_or(self.length, |filter| filter.length)
    }

    pub fn bytes(&self, replies: ReplyForm) -> Vec<u8> {
        let extended = replies == ReplyForm::Extended;
        let mut bytes = Vec::with_capacity(32 + self.payload.len());
        bytes.extend(if extended { magic::EXTENDED_REQUEST } else { magic::REQUEST }.to_be_bytes());
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend(self.command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(self.offset.to_be_bytes());
        if extended {
            bytes.extend(self.length.to_be_bytes());
        } else {
            bytes.extend((self.length as u32).to_be_bytes());
        }
        bytes.extend(&self.payload);
        bytes
    }

    /// What kind of request this is, for counting.
    pub fn label(&self) -> String {
        let name = match self.command {
            magic::CMD_READ => "READ",
            magic::CMD_WRITE => "WRITE",
            magic::CMD_FLUSH => "FLUSH",
            magic::CMD_TRIM => "TRIM",
            magic::CMD_CACHE => "CACHE",
            magic::CMD_WRITE_ZEROES => "WRITE_ZEROES",
            magic::CMD_BLOCK_STATUS => "BLOCK_STATUS",
            _ => "unknown command",
        };
        let end = self.offset.checked_add(self.effect());
        let place = match (self.effect(), end) {
            (0, _) if self.offset > SIZE => "empty, beyond",
            (0, _) => "empty",
            (_, Some(end)) if end <= SIZE => "within",
            _ => "beyond",
        };
        let long = if self.length > 32 << 20 { ", long" } else { "" };
        let filter = match &self.filter {
            Some(Filter { broken: true, .. }) => ", broken filter".to_string(),
            Some(filter) => format!(", filter {:?}", filter.contexts),
            None => String::new(),
        };
        format!("{name} flags {:#x}, {place}{long}{filter}", self.flags)
    }

    /// Gives it the payload that its header announces.
    fn fill(&mut self, rng: &mut Rng, replies: ReplyForm) {
        let flagged = replies == ReplyForm::Extended && self.flags & PAYLOAD_LEN != 0;
        if self.command == magic::CMD_BLOCK_STATUS && flagged {
            return self.select(rng);
        }
        if self.command == magic::CMD_WRITE || flagged {
            self.length = self.length.min(200_000);
            self.payload = vec![0; self.length as usize];
            if rng.chance(80) {
                rng.fill(&mut self.payload);
            }
        }
    }

    fn select(&mut self, rng: &mut Rng) {
        let lists: [&[u32]; 6] = [&[0], &[0], &[0], &[1], &[0, 0], &[]];
        let contexts = rng.pick(&lists).to_vec();
        self.payload = self.length.to_be_bytes().to_vec();
        contexts.iter().for_each(|id| self.payload.extend(id.to_be_bytes()));
        let broken = rng.chance(15);
        if broken {
            if rng.chance(50) {
                self.payload.push(0);
            } else {
                self.payload.truncate(rng.between(1, 7) as usize);
            }
        }
        self.filter = Some(Filter { length: self.length, contexts, broken });
        self.length = self.payload.len() as u64;
    }
}

fn range(rng: &mut Rng, command: u16, replies: ReplyForm) -> (u64, u64) {
    if command == magic::CMD_FLUSH && rng.chance(90) {
        return (0, 0);
    }
    let grain = *rng.pick(&[1, 512, 4096, 65536]);
    let at = match rng.below(20) {
        0 => SIZE,
        1 => SIZE - rng.below(5000),
        2 => SIZE + rng.below(5000),
        3 => u64::MAX - rng.below(5000),
        _ => rng.below(SIZE) / grain * grain,
    };
    let rest = SIZE.saturating_sub(at);
    let len = match rng.below(20) {
        0 => 0,
        1..3 => rest,
        3 => rest + rng.between(1, 600),
        4 if replies == ReplyForm::Extended => *rng.pick(&[1 << 32, 1 << 40, 1 << 63, u64::MAX]),
        4 | 5 => *rng.pick(&[u64::from(u32::MAX), 1 << 31, 33 << 20, 65 << 20]),
        6..9 => rng.below(SIZE),
        _ => (rng.below(100_000) / grain * grain).max(1).min(rest.max(1)),
    };
    (at, len)
}

fn flags(rng: &mut Rng, command: u16, replies: ReplyForm) -> u16 {
    // Set always with extended headers, says the document; servers take writes without it, too.
    let due = match (command, replies) {
        (magic::CMD_WRITE, ReplyForm::Extended) if rng.chance(95) => PAYLOAD_LEN,
        _ => 0,
    };
    due | match rng.below(20) {
        0 => 1 << rng.below(16),
        1 => rng.below(64) as u16,
        2..6 => FUA,
        6..10 if command == magic::CMD_READ && replies != ReplyForm::Simple => DF,
        6..10 if command == magic::CMD_WRITE_ZEROES => NO_HOLE,
        10..12 if command == magic::CMD_WRITE_ZEROES => FAST_ZERO,
        6..12 if command == magic::CMD_BLOCK_STATUS => REQ_ONE,
        12..16 if command == magic::CMD_BLOCK_STATUS && replies == ReplyForm::Extended => {
            PAYLOAD_LEN
        }
        _ => 0,
    }
}
