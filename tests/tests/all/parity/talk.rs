//! The same conversation with two servers.

use blockhaul_testkit::peer::{Conversation, PeerReply};
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::PeerServer;
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, CommandFlags, ReplyForm, magic};

use super::lines::Line;

/// Contexts that are asked for.
const CONTEXTS: [&str; 3] = ["base:allocation", "qemu:allocation-depth", "nosuch:context"];

/// Flags of an export that only one server may advertise: whether seeking costs time, and whether
/// zeroing is tried without writing. nbdkit ends with a failed assertion when a client requests a
/// fast zero that it did not offer.
const MAY_DIFFER: u16 = 1 << 4 | 1 << 11;

/// Flags of an export.
const READ_ONLY: u16 = 1 << 1;
const FLUSH: u16 = 1 << 2;
const FUA: u16 = 1 << 3;
const TRIM: u16 = 1 << 5;
const ZEROES: u16 = 1 << 6;
const FAST_ZERO: u16 = 1 << 11;

/// What a client receives before its first request.
#[derive(Debug, PartialEq, Eq)]
struct Greeting {
    flags: u16,
    /// Kinds and payloads of replies to options, without texts.
    replies: Vec<(u32, Vec<u8>)>,
    /// Size.
    size: u64,
    /// The rest of the reply to GO.
    told: Vec<Vec<u8>>,
    contexts: usize,
}

impl Greeting {
    /// The smallest block: some filters refuse smaller ones, and layers above them may or may not help.
    fn least(&self) -> u64 {
        let sizes = self.told.iter().find(|told| told.starts_with(&[0, 3]));
        let least = sizes.and_then(|told| told.get(2..6));
        least.map_or(1, |least| least.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}

/// Opens a connection, asks for facts in all ways.
fn greet(server: &PeerServer, replies: ReplyForm) -> Result<(Conversation, Greeting, u16), String> {
    let mut talk = Conversation::connect(server.socket())?;
    let flags = talk.hello(3)?;
    talk.negotiate(replies)?;
    let mut seen = Vec::new();
    let mut ask = |talk: &mut Conversation, code, payload: &[u8]| -> Result<(), String> {
        for reply in talk.option(code, payload)? {
            // Texts of errors are for people.
            // Those of GO are compared.
            let payload = match reply.payload {
                _ if reply.is_error() => Vec::new(),
                payload if payload.len() == 12 && payload.starts_with(&[0, 0]) => Vec::new(),
                payload => payload,
            };
            seen.push((reply.kind, payload));
        }
        Ok(())
    };
    let mut list = vec![0; 4];
    list.extend(0_u32.to_be_bytes());
    // Without structured replies there are none, says the protocol; nbdkit lists them all the same.
    if replies != ReplyForm::Simple {
        ask(&mut talk, magic::OPT_LIST_META_CONTEXT, &list)?;
    }
    ask(&mut talk, magic::OPT_INFO, &[0, 0, 0, 0, 0, 1, 0, 3])?;
    let contexts = match replies {
        ReplyForm::Simple => 0,
        _ => talk.select("", &CONTEXTS)?.len(),
    };
    let mut told = Vec::new();
    let mut export = None;
    for reply in talk.option(magic::OPT_GO, &[0, 0, 0, 0, 0, 1, 0, 3])? {
        if reply.is_error() {
            return Err(format!("refused: {:x}", reply.kind));
        }
        match reply.payload.as_slice() {
            [0, 0, size @ .., high, low] if size.len() == 8 => {
                let size = size.iter().fold(0, |size, byte| size << 8 | u64::from(*byte));
                export = Some((size, u16::from_be_bytes([*high, *low])));
            }
            other => told.push(other.to_vec()),
        }
    }
    told.sort();
    let (size, of_export) = export.ok_or("no size")?;
    Ok((talk, Greeting { flags, replies: seen, size, told, contexts }, of_export))
}

/// Whether a server rejects clients.
pub fn refuses(server: &PeerServer) -> bool {
    greet(server, ReplyForm::Structured).is_err()
}

/// One connection to each, the same requests on both, which are added to `asked`; what is different. False:
/// what is stored need not be the same any more.
pub fn compare(
    ours: &PeerServer,
    theirs: &PeerServer,
    line: &Line,
    rng: &mut Rng,
    requests: usize,
    asked: &mut Vec<RequestHeader>,
) -> Result<bool, String> {
    let replies = *rng.pick(&[ReplyForm::Structured, ReplyForm::Structured, ReplyForm::Simple]);
    let ours_greeted = greet(ours, replies);
    let theirs_greeted = greet(theirs, replies);
    let ((mut ours, our_facts, here), (mut theirs, their_facts, there)) =
        match (ours_greeted, theirs_greeted) {
            (Ok(ours), Ok(theirs)) => (ours, theirs),
            (Err(_), Err(_)) => return Ok(true),
            (Err(why), _) => return Err(format!("no greeting here: {why}")),
            (_, Err(why)) => return Err(format!("no greeting there: {why}")),
        };
    let may_differ = MAY_DIFFER | line.flags_that_differ();
    if our_facts != their_facts {
        return Err(format!("told here: {our_facts:x?}\n     there: {their_facts:x?}"));
    }
    if (here ^ there) & !may_differ != 0 {
        return Err(format!("flags {here:#x} here, {there:#x} there"));
    }
    let size = our_facts.size;
    let loose = line.extents_differ();
    let both = here & there & !line.withheld();
    let least = our_facts.least();
    for _ in 0..requests {
        let (header, payload) =
            random(&mut ours, size, replies, both, (least, line.one_extent()), rng);
        asked.push(header);
        let here = ours.ask(&header, &payload);
        let there = theirs.ask(&header, &payload);
        theirs.request(CommandCode::Flush, 0, 0);
        let (here, there) = match (here, there) {
            // Both have hung up.
            (Err(_), Err(_)) => return Ok(true),
            // Zeroing need not be fast, and what is stored is different from now on.
            (Ok(here), Ok(there))
                if header.flags.contains(CommandFlags::FAST_ZERO)
                    && here.error != there.error
                    && [here.error, there.error].contains(&95) =>
            {
                return Ok(false);
            }
            (Ok(here), Ok(there)) => (here, there),
            (here, there) => {
                let of = |answer: &Result<PeerReply, String>| match answer {
                    Ok(answer) => format!("error {}", answer.error),
                    Err(why) => why.clone(),
                };
                return Err(format!("{header:?}: {} here, {} there", of(&here), of(&there)));
            }
        };
        differ(&header, &here, &there, faults(&header, size, both), asked, loose, line)
            .map_err(|why| format!("{header:?}: {why}"))?;
        // How much of what has failed was written is not said.
        let within = header.offset.saturating_add(header.length) <= size;
        if header.command == CommandCode::Write && [5, 28].contains(&here.error) && within {
            return Ok(false);
        }
        // After a failed flush, or a failed request with FUA, which may have flushed, flushes fail here.
        let flushes =
            header.command == CommandCode::Flush || header.flags.contains(CommandFlags::FUA);
        if flushes && [1, 5, 28].contains(&here.error) && within {
            return Ok(false);
        }
    }
    // Zeroes are where zeroes are reported.
    if our_facts.contexts > 0 && size > 0 && !line.stale_extents() {
        let header = ours.request(CommandCode::BlockStatus, 0, size);
        let answer = ours.ask(&header, &[])?;
        theirs.request(CommandCode::Flush, 0, 0);
        let mut at = 0;
        for (len, state) in answer.status.iter().flat_map(|(_, runs)| runs) {
            let end = at + (*len).min(size - at);
            while at < end {
                // Longer requests may be refused.
                let len = (end - at).min(64 << 10);
                // The last bytes of a size that is not in whole blocks cannot be read.
                if len % least != 0 {
                    break;
                }
                let bytes = ours.read(at, len as usize)?;
                theirs.request(CommandCode::Flush, 0, 0);
                if state & 2 != 0 && bytes.iter().any(|byte| *byte != 0) {
                    return Err(format!("no zeroes in the {len} bytes at {at}, {state}"));
                }
                at += len;
            }
        }
    }
    let mut at = 0;
    while at < size {
        let len = (size - at).min(1 << 20);
        let header = ours.request(CommandCode::Read, at, len);
        let here = ours.ask(&header, &[])?;
        let there = theirs.ask(&header, &[])?;
        differ(&header, &here, &there, 0, asked, loose, line)
            .map_err(|why| format!("in the end: {why}"))?;
        at += len;
    }
    // nbdkit's `cache` loses what was not flushed.
    if both & FLUSH != 0 {
        let header = ours.request(CommandCode::Flush, 0, 0);
        ours.ask(&header, &[])?;
        theirs.ask(&header, &[])?;
    }
    ours.end();
    theirs.end();
    Ok(true)
}

/// A request, with its payload.
fn random(
    talk: &mut Conversation,
    size: u64,
    replies: ReplyForm,
    both: u16,
    (least, one_extent): (u64, bool),
    rng: &mut Rng,
) -> (RequestHeader, Vec<u8>) {
    let command = match rng.below(20) {
        0..4 => CommandCode::Read,
        4..9 => CommandCode::Write,
        9..12 if both & (ZEROES | READ_ONLY) != 0 => CommandCode::WriteZeroes,
        9..12 => CommandCode::Write,
        12 | 13 if both & (TRIM | READ_ONLY) != 0 => CommandCode::Trim,
        14 if both & FLUSH != 0 => CommandCode::Flush,
        15 => CommandCode::Cache,
        16 if rng.chance(10) => CommandCode::Other(rng.between(8, 20) as u16),
        _ if replies == ReplyForm::Simple && rng.chance(90) => CommandCode::Read,
        _ => CommandCode::BlockStatus,
    };
    let grain = *rng.pick(&[1, 512, 4096, 65536]);
    let at = match rng.below(20) {
        0 => size,
        1 => size.saturating_sub(rng.below(5000)),
        2 => size + rng.below(5000),
        3 if rng.chance(20) => u64::MAX - rng.below(5000),
        _ => rng.below(size) / grain * grain,
    };
    let grain = *rng.pick(&[1, 512, 4096, 65536]);
    let len = match rng.below(20) {
        0 => rng.below(2),
        1 | 2 => size.saturating_sub(at),
        3 => size.saturating_sub(at) + rng.below(2),
        4 if command != CommandCode::Write && rng.chance(20) => {
            *rng.pick(&[u64::from(u32::MAX), 1 << 31, 65 << 20, (1 << 32) - 512, (1 << 32) - 65536])
        }
        5..8 => rng.below(size),
        _ => (rng.below(size.min(200_000)) / grain * grain).max(1),
    };
    let len = len.min(u64::from(u32::MAX));
    let (at, len) = match command {
        CommandCode::Flush => (0, 0),
        CommandCode::Write if len > 8 << 20 => (at, 1),
        _ => (at, len),
    };
    let at = at / least * least;
    let len = len / least * least;
    let mut header = talk.request(command, at, len);
    let flags = match rng.below(20) {
        0 => 1 << rng.below(16),
        1 if command == CommandCode::WriteZeroes => rng.below(32) as u16,
        2..8 if command == CommandCode::WriteZeroes => 1 << 1,
        8..10 if command == CommandCode::WriteZeroes => 1 << 4,
        2..5 => 1,
        5..8 if command == CommandCode::BlockStatus => 1 << 3,
        5..8 if command == CommandCode::Read && replies != ReplyForm::Simple => 1 << 2,
        _ => 0,
    };
    // What is not offered is not asked for: servers may or may not see it.
    let mut withheld = 0;
    withheld |= if both & FUA == 0 { 1 } else { 0 };
    withheld |= if one_extent { 0 } else { 1 << 3 };
    withheld |= if both & FAST_ZERO == 0 { 1 << 4 } else { 0 };
    let flags = flags & !withheld;
    header.flags = CommandFlags::from_bits(flags);
    let mut payload = Vec::new();
    if command == CommandCode::Write {
        payload = vec![0; len as usize];
        if rng.chance(80) {
            rng.fill(&mut payload);
        }
    }
    (header, payload)
}

/// In how many ways a request is wrong, of those that are told apart by numbers.
fn faults(header: &RequestHeader, size: u64, both: u16) -> usize {
    let changes =
        matches!(header.command, CommandCode::Write | CommandCode::WriteZeroes | CommandCode::Trim);
    let fua = if both & FUA == 0 { 0 } else { 1 };
    let allowed = match header.command {
        CommandCode::WriteZeroes => fua | 1 << 1 | 1 << 4,
        CommandCode::BlockStatus => fua | 1 << 3,
        CommandCode::Read => fua | 1 << 2,
        _ => fua,
    };
    let beyond = header.offset.checked_add(header.length).is_none_or(|end| end > size);
    let long = header.command == CommandCode::Read && header.length > 64 << 20;
    let flags = header.flags.bits() & !allowed != 0;
    let refused = changes && both & READ_ONLY != 0;
    [beyond, long, flags, refused].into_iter().filter(|fault| *fault).count()
}

/// Whether two answers differ where they may not.
fn differ(
    header: &RequestHeader,
    here: &PeerReply,
    there: &PeerReply,
    faults: usize,
    asked: &[RequestHeader],
    loose: bool,
    line: &Line,
) -> Result<(), String> {
    // What is wrong in two ways is refused for either, and empty changes are wrong in one here, in another
    // there.
    if here.error != 0 && there.error != 0 && (faults > 1 || header.length == 0) {
        return Ok(());
    }
    if here.error != there.error {
        let text = &here.text;
        return Err(format!("error {} here ({text}), {} there", here.error, there.error));
    }
    if here.error != 0 {
        return Ok(());
    }
    if header.command == CommandCode::Read {
        let len = header.length as usize;
        let here = here.bytes(header.offset, len)?;
        let there = there.bytes(header.offset, len)?;
        let made_up = line.made_up(header.offset);
        let differing =
            here.iter().zip(&there).skip(made_up).position(|(here, there)| here != there);
        if let Some(at) = differing.map(|at| at + made_up) {
            let place = header.offset + at as u64;
            let by = changed(asked, place);
            return Err(format!(
                "byte {place}: {:02x} here, {:02x} there{by}",
                here[at], there[at]
            ));
        }
    }
    if header.command == CommandCode::BlockStatus {
        if here.status.len() != there.status.len() {
            return Err(format!("contexts: {:?} here, {:?} there", here.status, there.status));
        }
        let one = header.flags.bits() & (1 << 3) != 0;
        for ((_, here), (_, there)) in here.status.iter().zip(&there.status) {
            let total = |runs: &[(u64, u64)]| runs.iter().map(|run| run.0).sum::<u64>();
            if one && (here.len() != 1 || total(here) > header.length) {
                return Err(format!("one extent was asked for: {here:?}"));
            }
            let upto = total(here).min(total(there)).min(header.length);
            let ours = joined(here, upto);
            let theirs = joined(there, upto);
            if ours != theirs && !loose {
                let place = header.offset + common(&ours, &theirs);
                if may_be_unwritten(asked, place) {
                    return Ok(());
                }
                let by = changed(asked, place);
                return Err(format!("extents at {place}: {ours:?} here, {theirs:?} there{by}"));
            }
        }
    }
    Ok(())
}

/// The length for which two lists of extents say the same.
fn common(one: &[(u64, u64)], other: &[(u64, u64)]) -> u64 {
    let mut len = 0;
    for (one, other) in one.iter().zip(other) {
        if one.1 == other.1 {
            len += one.0.min(other.0);
        }
        if one != other {
            break;
        }
    }
    len
}

/// Whether a byte may be in a range that is allocated, but not written: the kernel reports such a range as a
/// hole, or as data if it is in the page cache, also by reading ahead.
fn may_be_unwritten(asked: &[RequestHeader], place: u64) -> bool {
    asked.iter().any(|asked| {
        let blocks = asked.offset.saturating_sub(4096)..asked.offset.saturating_add(asked.length);
        asked.command == CommandCode::WriteZeroes
            && asked.flags.contains(CommandFlags::NO_HOLE)
            && blocks.contains(&place)
    })
}

/// The last requests that changed what is around a byte.
fn changed(asked: &[RequestHeader], place: u64) -> String {
    let near = |asked: &&RequestHeader| {
        let end = asked.offset.saturating_add(asked.length);
        let reads = [CommandCode::Read, CommandCode::BlockStatus, CommandCode::Cache];
        asked.offset <= place + 4096
            && place < end.saturating_add(4096)
            && !reads.contains(&asked.command)
    };
    let last: Vec<_> = asked.iter().rev().filter(near).take(4).collect();
    format!("; the last changes around it: {last:?}")
}

/// Extents up to a length, with none beside another of the same state.
fn joined(runs: &[(u64, u64)], upto: u64) -> Vec<(u64, u64)> {
    let mut left = upto;
    let mut all: Vec<(u64, u64)> = Vec::new();
    for (len, state) in runs {
        let len = (*len).min(left);
        left -= len;
        match all.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.1 == *state => last.0 += len,
            _ => all.push((len, *state)),
        }
    }
    all
}
