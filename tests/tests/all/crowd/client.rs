//! A client with several requests at once.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::rng::Rng;
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, CommandFlags, ReplyForm, magic};

use super::model::{Model, STRIPE};

/// Requests of a client at once.
const DEPTH: usize = 6;
/// Flags of exports: `NBD_FLAG_SEND_FUA`, `…_TRIM`, `…_WRITE_ZEROES`, `NBD_FLAG_CAN_MULTI_CONN`.
const FUA: u16 = 1 << 3;
const TRIM: u16 = 1 << 5;
const ZEROES: u16 = 1 << 6;
const MULTI_CONN: u16 = 1 << 8;
/// `NBD_STATE_ZERO`.
const ZERO: u64 = 1 << 1;
/// Errors that come of layers that fail on purpose, and of the server's end.
const EIO: u32 = 5;
const ESHUTDOWN: u32 = 108;

/// What was asked for.
enum Asked {
    /// Bytes `at` of a stripe, not older than this version.
    Read {
        stripe: usize,
        since: usize,
        at: usize,
    },
    /// A change that makes a version of a stripe; a trim makes it or leaves the bytes as they were.
    Change {
        stripe: usize,
        version: usize,
        trim: bool,
    },
    /// Extents of a stripe, not older than this version.
    Extents {
        stripe: usize,
        since: usize,
    },
    Flush,
}

/// What came.
#[derive(Default)]
struct Reply {
    cookie: u64,
    error: u32,
    pieces: Vec<(u64, Vec<u8>)>,
    extents: Vec<(u64, u64)>,
}

pub struct Client {
    talk: Conversation,
    flags: u16,
    extents: bool,
}

impl Client {
    /// Connects and gets the disk.
    pub fn connect(socket: &Path) -> Result<Client, String> {
        let mut talk = Conversation::connect(socket)?;
        talk.patience(Duration::from_secs(60))?;
        talk.hello(3)?;
        talk.negotiate(ReplyForm::Structured)?;
        let extents = !talk.select("", &["base:allocation"])?.is_empty();
        let flags = talk.go("")?.flags;
        Ok(Client { talk, flags, extents })
    }

    /// The whole disk; requests that fail are repeated on a `fragile` stack.
    pub fn all(&mut self, size: u64, fragile: bool) -> Result<Vec<u8>, String> {
        let mut all = Vec::new();
        while (all.len() as u64) < size {
            let at = all.len() as u64;
            let len = (size - at).min(1 << 18);
            all.extend(self.read(at, len, fragile)?);
        }
        Ok(all)
    }

    fn read(&mut self, at: u64, len: u64, fragile: bool) -> Result<Vec<u8>, String> {
        for _ in 0..100 {
            let header = self.talk.request(CommandCode::Read, at, len);
            let answer = self.talk.ask(&header, &[])?;
            if answer.error == 0 || !fragile {
                return answer.bytes(at, len as usize);
            }
        }
        Err("a read always fails".into())
    }

    /// As many and as long reads as the server takes from one client.
    pub fn at_full_size(&mut self, size: u64, fragile: bool) -> Result<(), String> {
        let headers: Vec<_> =
            (0..64).map(|_| self.talk.request(CommandCode::Read, 0, size)).collect();
        for header in &headers {
            self.talk.send_request(header, &[])?;
        }
        for _ in &headers {
            let reply = self.reply()?;
            if reply.error != 0 && !fragile {
                return Err(format!("a read of everything: error {}", reply.error));
            }
        }
        Ok(())
    }

    /// The next reply; none: the connection is lost. One that does not come is an error.
    fn next(&mut self) -> Result<Option<Reply>, String> {
        match self.reply() {
            Ok(reply) => Ok(Some(reply)),
            // EAGAIN: the time is over.
            Err(why) if why.contains("os error 11") => Err(format!("no reply: {why}")),
            Err(_) => Ok(None),
        }
    }

    /// The next reply, to whatever request.
    fn reply(&mut self) -> Result<Reply, String> {
        let mut reply = Reply::default();
        loop {
            match self.talk.receive_u32()? {
                magic::SIMPLE_REPLY => {
                    reply.error = self.talk.receive_u32()?;
                    reply.cookie = self.talk.receive_u64()?;
                    return Ok(reply);
                }
                magic::STRUCTURED_REPLY => {}
                other => return Err(format!("a reply begins with {other:#x}")),
            }
            let flags = self.talk.receive_u16()?;
            let kind = self.talk.receive_u16()?;
            reply.cookie = self.talk.receive_u64()?;
            let len = self.talk.receive_u32()? as usize;
            let payload = self.talk.receive(len)?;
            let number = |bytes: &[u8]| {
                bytes.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
            };
            match kind {
                magic::REPLY_NONE => {}
                magic::REPLY_OFFSET_DATA => {
                    reply.pieces.push((number(&payload[..8]), payload[8..].to_vec()));
                }
                magic::REPLY_OFFSET_HOLE => {
                    let zeroes = vec![0; number(&payload[8..12]) as usize];
                    reply.pieces.push((number(&payload[..8]), zeroes));
                }
                magic::REPLY_BLOCK_STATUS => {
                    let runs = payload[4..].chunks(8);
                    reply.extents =
                        runs.map(|run| (number(&run[..4]), number(&run[4..]))).collect();
                }
                _ => reply.error = number(&payload[..4]) as u32,
            }
            if flags & 1 != 0 {
                return Ok(reply);
            }
        }
    }
}

/// Reads and writes until it is over, over as many connections as that takes.
pub fn busy(
    socket: &Path,
    model: &Model,
    number: usize,
    seed: u64,
    over: &AtomicBool,
) -> Result<(), String> {
    let rng = &mut Rng::new(seed);
    while !over.load(Ordering::Relaxed) {
        let Ok(mut client) = Client::connect(socket) else {
            // It is stopped, or has sent this one away.
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let mut session = Session { model, number, asked: HashMap::new() };
        let ended = session.run(&mut client, rng, over);
        session.lost();
        ended?;
    }
    Ok(())
}

struct Session<'a> {
    model: &'a Model,
    number: usize,
    asked: HashMap<u64, Asked>,
}

impl Session<'_> {
    /// Until it is over, or the connection is lost, or thrown away.
    fn run(&mut self, client: &mut Client, rng: &mut Rng, over: &AtomicBool) -> Result<(), String> {
        let life = rng.between(10, 400);
        for _ in 0..life {
            if over.load(Ordering::Relaxed) {
                break;
            }
            let Some((header, payload)) = self.ask(client, rng) else { continue };
            if client.talk.send_request(&header, &payload).is_err() {
                return Ok(());
            }
            let few = rng.below(DEPTH as u64) as usize;
            while self.asked.len() > few {
                let Some(reply) = client.next()? else { return Ok(()) };
                self.heard(reply)?;
            }
        }
        if rng.chance(60) {
            while !self.asked.is_empty() {
                let Some(reply) = client.next()? else { return Ok(()) };
                self.heard(reply)?;
            }
        }
        client.talk.end();
        Ok(())
    }

    /// What was not answered may or may not happen.
    fn lost(&mut self) {
        for (_, asked) in self.asked.drain() {
            if let Asked::Change { stripe, .. } = asked {
                self.model.with(stripe, |stripe| {
                    stripe.lost = true;
                    stripe.mixed = true;
                });
            }
        }
    }

    /// Whether one of the requests under way changes a stripe.
    fn changes(&self, index: usize) -> bool {
        self.asked
            .values()
            .any(|asked| matches!(asked, Asked::Change { stripe, .. } if *stripe == index))
    }

    /// A request that may be made now.
    fn ask(&mut self, client: &mut Client, rng: &mut Rng) -> Option<(RequestHeader, Vec<u8>)> {
        let index = rng.below(self.model.len() as u64) as usize;
        let mine = self.model.writer(index) == self.number;
        let start = index as u64 * STRIPE;
        if rng.chance(5) {
            let header = client.talk.request(CommandCode::Flush, 0, 0);
            self.asked.insert(header.cookie, Asked::Flush);
            return Some((header, Vec::new()));
        }
        let lost = self.model.with(index, |stripe| stripe.lost);
        if !mine || lost || rng.chance(40) {
            if !mine && client.flags & MULTI_CONN == 0 {
                return None;
            }
            let (len, since) = self.model.with(index, |stripe| (stripe.len(), stripe.now()));
            if client.extents && rng.chance(20) {
                let header = client.talk.request(CommandCode::BlockStatus, start, len as u64);
                self.asked.insert(header.cookie, Asked::Extents { stripe: index, since });
                return Some((header, Vec::new()));
            }
            let at = rng.below(len as u64) as usize;
            let some = rng.between(1, (len - at) as u64);
            let header = client.talk.request(CommandCode::Read, start + at as u64, some);
            self.asked.insert(header.cookie, Asked::Read { stripe: index, since, at });
            return Some((header, Vec::new()));
        }
        if self.changes(index) {
            return None;
        }
        Some(self.change(client, index, rng))
    }

    /// A change of a stripe of one's own, of which none is under way.
    fn change(
        &mut self,
        client: &mut Client,
        index: usize,
        rng: &mut Rng,
    ) -> (RequestHeader, Vec<u8>) {
        let kind = match rng.below(10) {
            0 | 1 if client.flags & ZEROES != 0 => CommandCode::WriteZeroes,
            2 if client.flags & TRIM != 0 => CommandCode::Trim,
            _ => CommandCode::Write,
        };
        let trim = kind == CommandCode::Trim;
        let (header, bytes) = self.model.with(index, |stripe| {
            let all = trim || stripe.mixed || rng.chance(40);
            let at = if all { 0 } else { rng.below(stripe.len() as u64) };
            let left = stripe.len() as u64 - at;
            let len = if all { left } else { rng.between(1, left) };
            let mut bytes = vec![0; len as usize];
            if kind == CommandCode::Write {
                rng.fill(&mut bytes);
            }
            let version = stripe.change(at as usize, &bytes);
            let header = client.talk.request(kind, index as u64 * STRIPE + at, len);
            self.asked.insert(header.cookie, Asked::Change { stripe: index, version, trim });
            (header, bytes)
        });
        let mut flags = CommandFlags::NONE;
        if client.flags & FUA != 0 && rng.chance(10) {
            flags |= CommandFlags::FUA;
        }
        if kind == CommandCode::WriteZeroes && rng.chance(30) {
            flags |= CommandFlags::NO_HOLE;
        }
        let payload = if kind == CommandCode::Write { bytes } else { Vec::new() };
        (RequestHeader { flags, ..header }, payload)
    }

    /// Compares a reply with what may be.
    fn heard(&mut self, reply: Reply) -> Result<(), String> {
        let asked = self.asked.remove(&reply.cookie);
        let asked = asked.ok_or_else(|| format!("a reply to {}", reply.cookie))?;
        if ![0, EIO, ESHUTDOWN].contains(&reply.error) {
            return Err(format!("error {}", reply.error));
        }
        match asked {
            Asked::Flush => Ok(()),
            Asked::Change { stripe, version, trim } => {
                self.model.with(stripe, |stripe| {
                    if reply.error == 0 && !trim {
                        stripe.answered(version)
                    } else {
                        stripe.mixed = true;
                    }
                });
                Ok(())
            }
            _ if reply.error != 0 => Ok(()),
            Asked::Read { stripe, since, at } => self.model.with(stripe, |seen| {
                let start = stripe as u64 * STRIPE;
                for (place, bytes) in &reply.pieces {
                    let from = (place - start) as usize;
                    seen.check(since, from, bytes).map_err(|why| {
                        format!("client {}, stripe {stripe} from {at}: {why}", self.number)
                    })?;
                }
                Ok(())
            }),
            Asked::Extents { stripe, since } => self.model.with(stripe, |seen| {
                let mut at = 0;
                for (len, state) in &reply.extents {
                    let end = (at + *len as usize).min(seen.len());
                    if state & ZERO != 0 {
                        let zeroes = vec![0; end - at];
                        seen.check(since, at, &zeroes).map_err(|why| {
                            format!("client {}, zeroes in stripe {stripe}: {why}", self.number)
                        })?;
                    }
                    at = end;
                }
                Ok(())
            }),
        }
    }
}
