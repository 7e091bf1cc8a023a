//! `sample:SIZE`: a computed disk image with realistic runs of data, zeroes and holes.
//!
//! There is no state: the disk is divided into regions of one power-of-two size, and a region into
//! halves recursively, each step decided by a hash of the path to it. A part has a share of data;
//! when it is halved, either both halves get the same share or one gets as much as it can hold and
//! the other the rest. A part without data is a hole or allocated zeroes, a part full of data is
//! text or noise. So the share is kept down to a block, run lengths follow a power law, and any
//! offset is found in some twenty steps.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, PendingRequest, Reply,
    Request, RequestFlags, Result, ZERO,
};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};

use crate::support::{fill, operand};

/// Minimum run in bytes.
const BLOCK: u64 = 4096;
/// Maximum region in bytes; the longest uniform part is half of it.
const REGION_MAX: u64 = 128 << 20;
/// Minimum number of regions of a disk, so that the share of data also applies to small disks.
const REGIONS_MIN: u64 = 8;
/// Maximum number of parts checked per extents request: below a millisecond.
const STEPS_MAX: usize = 8 << 10;

/// A share of 1, in the unit of shares.
const ALL: u64 = 1 << 32;
/// Of 256 halvings, how many give both halves the same share.
const EVEN: u64 = 90;
/// Of 256 parts without data, how many are allocated zeroes rather than holes.
const ALLOCATED: u64 = 64;
/// Of 256 parts full of data, how many are text rather than noise.
const TEXT: u64 = 128;

/// The backend `sample:SIZE`.
pub struct SampleBackend;

impl Backend for SampleBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["sample"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "a simulated disk: data, zeroes and holes of various lengths, the same for the same parameters; \
         read-only"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy 'sample:1G?data=10%&seed=7' disk.raw && blockhaul map --totals disk.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        &[
            Param {
                name: "data",
                kind: ParamKind::Share,
                default: Some("30%"),
                doc: "Share of the disk that is data.",
            },
            Param {
                name: "seed",
                kind: ParamKind::Number,
                default: Some("1"),
                doc: "Seed of the content.",
            },
        ]
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(std::future::ready(open(&target)))
    }
}

fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    operand::source_only(target)?;
    let size = operand::size(target)?;
    let (Some(data), Some(seed)) = (target.args.share("data"), target.args.number("seed")) else {
        return Err(Error::new(Kind::Usage, "sample: data and seed are needed"));
    };
    let facts = Facts {
        can: Can::CACHE | Can::EXTENTS | Can::FLUSH | Can::MULTI_CONN,
        allocation_unit: BLOCK as u32,
        contexts: vec![BASE_ALLOCATION.to_string()],
        ..Facts::new(operand::name(target), size)
    };
    let layout = SampleLayout::new(size, data, seed);
    Ok(OpenedDevice::from(
        Arc::new(SampleDevice { facts: Arc::new(facts), layout }) as Arc<dyn Device>
    ))
}

struct SampleDevice {
    facts: Arc<Facts>,
    layout: SampleLayout,
}

impl Device for SampleDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        let layout = self.layout;
        match op {
            Op::Read(_) if layout.empty(at, len) => PendingRequest::ready(Ok(Reply::Hole)),
            Op::Read(room) => fill::read(at, room, move |at, out| layout.read(at, out)),
            Op::Extents(contexts) => {
                let mut extents = layout.extents(at, len);
                if flags.contains(RequestFlags::ONE_EXTENT) {
                    extents.first_only();
                }
                let lists = contexts.iter().map(|_| extents.clone()).collect();
                PendingRequest::ready(Ok(Reply::Extents(lists)))
            }
            _ => PendingRequest::ready(Ok(Reply::Done)),
        }
    }
}

/// The contents of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SampleContent {
    Hole,
    Zeroes,
    Text,
    Noise,
}

/// The numbers that determine everything.
#[derive(Debug, Clone, Copy)]
struct SampleLayout {
    /// Size of a region in bytes, a power of two.
    region: u64,
    /// Share of data, [`ALL`] is 1.
    share: u64,
    seed: u64,
}

impl SampleLayout {
    fn new(size: u64, data: f64, seed: u64) -> SampleLayout {
        let most = (size / REGIONS_MIN).clamp(BLOCK, REGION_MAX);
        let region = 1 << most.ilog2();
        // `data` is from 0 to 1: the product fits.
        let share = (data * ALL as f64).round() as u64;
        SampleLayout { region, share: share.min(ALL), seed: mix(seed) }
    }

    /// The part that contains `at`: its contents, and its end.
    fn part(&self, at: u64) -> (SampleContent, u64) {
        let mut start = at - at % self.region;
        let mut size = self.region;
        let mut share = self.share;
        let mut path = mix(self.seed ^ start);
        while 0 < share && share < ALL && size > BLOCK {
            size /= 2;
            let right = at >= start + size;
            if path & 0xff >= EVEN {
                let more = (2 * share).min(ALL);
                let more_is_right = path & 0x100 != 0;
                share = if right == more_is_right { more } else { 2 * share - more };
            }
            start += if right { size } else { 0 };
            path = mix(path ^ u64::from(right));
        }
        let dice = path >> 9 & 0xff;
        let content = if path >> 32 < share {
            if dice < TEXT { SampleContent::Text } else { SampleContent::Noise }
        } else if dice < ALLOCATED {
            SampleContent::Zeroes
        } else {
            SampleContent::Hole
        };
        (content, start.saturating_add(size))
    }

    /// Whether the range is all zero.
    fn empty(&self, at: u64, len: u64) -> bool {
        let (mut at, end) = (at, at + len);
        while at < end {
            match self.part(at) {
                (SampleContent::Hole | SampleContent::Zeroes, until) => at = until,
                _ => return false,
            }
        }
        true
    }

    fn read(&self, at: u64, out: &mut [u8]) {
        let mut at = at;
        let mut out = out;
        while !out.is_empty() {
            let (content, until) = self.part(at);
            let len = usize::try_from(until - at).unwrap_or(usize::MAX).min(out.len());
            let (here, rest) = out.split_at_mut(len);
            match content {
                SampleContent::Hole | SampleContent::Zeroes => here.fill(0),
                SampleContent::Text => words(at, here, |word| text(self.seed, word)),
                SampleContent::Noise => words(at, here, |word| mix(self.seed ^ word)),
            }
            at += len as u64;
            out = rest;
        }
    }

    fn extents(&self, at: u64, len: u64) -> Extents {
        let mut extents = Extents::new();
        let (mut at, end) = (at, at + len);
        for _ in 0..STEPS_MAX {
            if at >= end {
                break;
            }
            let (content, until) = self.part(at);
            let state = match content {
                SampleContent::Hole => HOLE | ZERO,
                SampleContent::Zeroes => ZERO,
                SampleContent::Text | SampleContent::Noise => 0,
            };
            extents.push(until.min(end) - at, state);
            at = until;
        }
        extents
    }
}

/// Fills `out` with the bytes from offset `at` on of a disk whose word number `n` is `word(n)`.
fn words(at: u64, out: &mut [u8], word: impl Fn(u64) -> u64) {
    let mut number = at / 8;
    let skip = (at % 8) as usize;
    let mut out = out;
    if skip > 0 {
        let head = (8 - skip).min(out.len());
        out[..head].copy_from_slice(&word(number).to_le_bytes()[skip..skip + head]);
        out = &mut out[head..];
        number += 1;
    }
    let (whole, tail) = out.as_chunks_mut::<8>();
    for chunk in whole {
        *chunk = word(number).to_le_bytes();
        number += 1;
    }
    if !tail.is_empty() {
        let len = tail.len();
        tail.copy_from_slice(&word(number).to_le_bytes()[..len]);
    }
}

/// Pieces of text; six bits choose one, so that text shrinks to about an eighth when compressed.
static PIECES: [[u8; 8]; 64] = pieces();

const fn pieces() -> [[u8; 8]; 64] {
    let text = b"the disk of data and a block is read from there, so that each \
                 file has its own place; what was written once must be found \
                 again, with time and name and owner.\nerror=0 level=info user=\
                 root host=node path=/var/lib/images/disk0.img size=4096 offs\
                 et=512 state=clean mode=0644 count=1 flags=none uuid=6f1c9a2e\
                 -4b7d-11ee begin end true false { \"key\": \"value\" } <row id\
                 =\"7\">text</row>\nint main(void) { return 0; } /* end of file\
                 */ import sys, os; def run(self): pass # and so on, and on.\n\
                 0123456789 abcdefghijklmnopqrstuvwxyz, last line of the page.\n";
    assert!(text.len() >= 512, "64 pieces of 8 bytes");
    let mut pieces = [[0; 8]; 64];
    let mut at = 0;
    while at < 512 {
        pieces[at / 8][at % 8] = text[at];
        at += 1;
    }
    pieces
}

fn text(seed: u64, word: u64) -> u64 {
    // One hash serves eight words.
    let choice = mix(seed ^ !(word / 8)) >> (word % 8 * 6) & 63;
    u64::from_le_bytes(PIECES[choice as usize])
}

/// Mixes all bits of a number into all bits of the result (the finalizer of SplitMix64).
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_runs(layout: &SampleLayout, size: u64) -> Extents {
        let mut all = Extents::new();
        let mut at = 0;
        while at < size {
            let found = layout.extents(at, size - at);
            found.runs().iter().for_each(|run| all.push(run.len, run.state));
            at += found.total();
        }
        all
    }

    fn share(extents: &Extents, state: u64) -> f64 {
        let bytes: u64 =
            extents.runs().iter().filter(|run| run.state == state).map(|run| run.len).sum();
        bytes as f64 / extents.total() as f64
    }

    #[test]
    fn the_share_of_data_is_kept_and_lengths_are_mixed() {
        for (size, data) in [(1 << 20, 0.5), (100 << 20, 0.3), (2 << 30, 0.3), (4 << 30, 0.07)] {
            let runs = all_runs(&SampleLayout::new(size, data, 1), size);
            let got = share(&runs, 0);
            assert!((got - data).abs() < 0.03, "{got} of {size} bytes, wanted {data}");
        }
        let runs = all_runs(&SampleLayout::new(2 << 30, 0.3, 1), 2 << 30);
        assert!(share(&runs, ZERO) > 0.02 && share(&runs, HOLE | ZERO) > 0.3, "all three kinds");
        let count = |low: u64, high: u64| {
            runs.runs().iter().filter(|run| (low..high).contains(&run.len)).count()
        };
        assert!(
            count(4096, 4097) > 10 && count(1 << 20, 8 << 20) > 10 && count(16 << 20, 1 << 30) > 5
        );
        for (data, state) in [(0.0, 0), (1.0, ZERO), (1.0, ZERO | HOLE)] {
            assert_eq!(share(&all_runs(&SampleLayout::new(8 << 20, data, 1), 8 << 20), state), 0.0);
        }
    }

    #[test]
    fn any_offset_gives_the_same_bytes_and_extents_tell_the_truth() {
        let size = 3 << 20;
        let layout = SampleLayout::new(size, 0.4, 7);
        let mut whole = vec![0; size as usize];
        layout.read(0, &mut whole);
        let mut random = 1_u64;
        for _ in 0..2000 {
            random = mix(random);
            let at = random % size;
            let len = (random >> 32) % 9000 % (size - at) + 1;
            let mut part = vec![0xee; len as usize];
            layout.read(at, &mut part);
            let expected = &whole[at as usize..(at + len) as usize];
            assert!(part == expected, "{len} bytes at {at}");
            assert_eq!(layout.empty(at, len), expected.iter().all(|&b| b == 0), "{len} at {at}");
        }
        let runs = all_runs(&layout, size);
        assert_eq!(runs.total(), size);
        for (at, run) in runs.ranges(0) {
            let bytes = &whole[at as usize..(at + run.len) as usize];
            for block in bytes.chunks(4096) {
                assert_eq!(block.iter().all(|&b| b == 0), run.state & ZERO != 0, "block in {at}");
            }
        }
    }

    #[test]
    fn seeds_differ_and_the_last_byte_of_the_largest_disk_is_there() {
        let one = SampleLayout::new(1 << 30, 0.3, 1);
        let two = SampleLayout::new(1 << 30, 0.3, 2);
        assert_ne!(all_runs(&one, 1 << 30), all_runs(&two, 1 << 30));
        let huge = SampleLayout::new(i64::MAX as u64, 0.3, 1);
        let mut last = [0; 9];
        huge.read(i64::MAX as u64 - 9, &mut last);
        assert!(huge.extents(i64::MAX as u64 - 9, 9).total() == 9);
    }

    #[test]
    fn half_of_the_data_is_text_that_compresses() {
        let layout = SampleLayout::new(64 << 20, 1.0, 3);
        let mut printable = 0;
        let mut block = vec![0; 4096];
        for at in (0..64 << 20).step_by(4096) {
            layout.read(at, &mut block);
            printable += usize::from(block.iter().all(|&b| b == b'\n' || (32..127).contains(&b)));
        }
        let share = printable as f64 / 16384.0;
        assert!((0.2..0.8).contains(&share), "{share}");
    }
}
