//! `evil`: flips bits in reads, depending on a seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, Error, Facts, HOLE, Hints, Op, PendingRequest, Reply,
    Request, Result, ZERO,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};
use blockhaul_io::{Buf, Data, Reservation};

use blockhaul_layers::support::{layer, param, param_or, usage};

/// The layer `evil`.
pub static EVIL: LayerKind = LayerKind {
    name: "evil",
    summary: "flips some bits of data that is read, to test error detection",
    manual: "Written data is stored correctly; data that is read has wrong bits. `evil=stuck-bits`: some \
bits of the device are stuck, high or low, always the same ones. `evil=cosmic-rays`: each bit \
may be flipped whenever it is read. `evil=stuck-wires`: bits at certain places of every reply \
are stuck, whatever its offset. `evil-probability` is the probability for each bit, as 1e-6, \
1%, 1:1000000 or 1/1000000. `evil-stuck-probability` is the probability that a stuck bit is \
read as stuck.

With the same `evil-seed` the same bits are stuck, and flips affect the same reads, counted \
from the start; without a seed they differ each time. Holes are not changed unless `noextents` \
is below.",
    example: r#"
blockhaul copy sample:64M disk.raw
blockhaul serve --layer 'evil?evil-probability=1e-6&evil-seed=1' disk.raw \
  --run 'blockhaul compare disk.raw "$uri"; test $? = 1'
"#,
    needs_content: false,
    writes_below: true,
    transparent: false,
    params: &[
        param_or(
            "evil",
            ParamKind::Choice(&["stuck-bits", "cosmic-rays", "stuck-wires"]),
            "stuck-bits",
            "Kind of the errors.",
        ),
        param(
            "evil-probability",
            ParamKind::Text,
            "Probability for each bit [default: 1e-8, for stuck-wires 1e-6].",
        ),
        param_or("evil-stuck-probability", ParamKind::Text, "1", "Probability that a stuck bit is read as \
                                                                  stuck."),
        param("evil-seed", ParamKind::Number, "Seed that selects the bits."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

/// Length in bits of the stretches in which stuck bits are chosen.
const STRETCH: u64 = 8 * (64 << 10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BitErrorMode {
    StuckBits,
    CosmicRays,
    StuckWires,
}

#[derive(Debug, Clone, Copy)]
struct BitErrorConfig {
    mode: BitErrorMode,
    chance: f64,
    shows: f64,
    seed: u64,
}

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let (mode, usual) = match args.text("evil") {
        Some("cosmic-rays") => (BitErrorMode::CosmicRays, 1e-8),
        Some("stuck-wires") => (BitErrorMode::StuckWires, 1e-6),
        _ => (BitErrorMode::StuckBits, 1e-8),
    };
    let chance = args.text("evil-probability").map(|text| chance("evil-probability", text));
    let shows = chance_of("evil-stuck-probability", args.text("evil-stuck-probability"))?;
    let seed = match args.number("evil-seed") {
        Some(seed) => seed,
        None => {
            let mut bytes = [0; 8];
            rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(
                |errno| blockhaul_block::Error::system("evil: no random seed", errno.into()),
            )?;
            u64::from_ne_bytes(bytes)
        }
    };
    let chance = chance.transpose()?.unwrap_or(usual);
    let evil = BitErrorConfig { mode, chance, shows: shows.unwrap_or(1.0), seed };
    layer(move |inner| Ok(Arc::new(EvilDevice::new(inner, evil))))
}

fn chance_of(name: &str, text: Option<&str>) -> Result<Option<f64>> {
    text.map(|text| chance(name, text)).transpose()
}

/// Parses a probability: a number, a percentage, or a ratio.
fn chance(name: &str, text: &str) -> Result<f64> {
    let split = |by| text.split_once(by).map(|(top, bottom): (&str, &str)| (top, bottom));
    let (top, bottom) = match (split(':').or_else(|| split('/')), text.strip_suffix('%')) {
        (Some(parts), _) => parts,
        (None, Some(percent)) => (percent, "100"),
        (None, None) => (text, "1"),
    };
    let parse = |text: &str| text.parse::<f64>().ok();
    let value = parse(top).zip(parse(bottom)).map(|(top, bottom)| top / bottom);
    match value {
        Some(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err(usage(format!(
            "evil: {name}={text} is not a probability: give 0.001, 1e-6, 1%, 1:1000 or 1/1000"
        ))),
    }
}

struct EvilDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    evil: BitErrorConfig,
    /// The device reports holes.
    base: Option<ContextSet>,
    /// Number of reads so far.
    reads: AtomicU64,
}

impl EvilDevice {
    fn new(inner: Arc<dyn Device>, evil: BitErrorConfig) -> EvilDevice {
        let below = inner.facts();
        // Read data is changed in memory, also zeroes outside holes.
        let kept = Hints::TAKES_PARKED | Hints::FLUSH_FAILURES_STAY | Hints::EXTENTS;
        let facts = Facts::over(&below).keeping(&below, kept);
        let tells = facts.can.contains(Can::EXTENTS) && !facts.emulated.contains(Can::EXTENTS);
        let base = tells.then(|| facts.context(BASE_ALLOCATION)).flatten();
        EvilDevice { inner, facts: Arc::new(facts), evil, base, reads: AtomicU64::new(0) }
    }

    fn read(&self, at: u64, mut room: Reservation) -> PendingRequest {
        let len = room.len() as u64;
        let count = self.reads.fetch_add(1, Ordering::Relaxed);
        let wrong = self.evil.wrong_bits(at, len, count);
        if wrong.is_empty() {
            return self.inner.submit(Request::read(at, room));
        }
        let inner = self.inner.clone();
        let base = self.base;
        let kept = room.keep();
        let pending = self.inner.submit(Request::read(at, room.in_memory()));
        PendingRequest::start(async move {
            let mut buf = match pending.await? {
                Reply::Hole if base.is_some() => return Ok(Reply::Hole),
                Reply::Hole => {
                    let room = kept.again().await.map_err(|error| {
                        blockhaul_block::Error::new(blockhaul_block::Kind::NoMemory, "no memory")
                            .because(error)
                    })?;
                    let mut buf = room.into_buf();
                    buf.fill(0);
                    buf
                }
                Reply::Data(data) => own(data),
                _ => return Err(Error::misfit()),
            };
            let wrong = match base {
                None => wrong,
                Some(base) => outside_holes(&inner, base, at, len, wrong).await?,
            };
            for BitError { bit, how } in wrong {
                let byte = &mut buf[(bit / 8) as usize];
                let mask = 1 << (bit % 8);
                match how {
                    BitErrorKind::High => *byte |= mask,
                    BitErrorKind::Low => *byte &= !mask,
                    BitErrorKind::Flipped => *byte ^= mask,
                }
            }
            Ok(Reply::Data(buf.into()))
        })
    }
}

/// The payload as writable memory.
fn own(data: Data) -> Buf {
    data.try_into_buf().unwrap_or_else(|data| {
        let mut buf = Reservation::unpooled(data.len()).into_buf();
        buf.copy_from_slice(data.bytes());
        buf
    })
}

/// The bits that are not in holes of the device.
async fn outside_holes(
    inner: &Arc<dyn Device>,
    base: ContextSet,
    at: u64,
    len: u64,
    wrong: Vec<BitError>,
) -> Result<Vec<BitError>> {
    let mut kept = Vec::with_capacity(wrong.len());
    let mut left = wrong.into_iter().peekable();
    while let Some(first) = left.peek() {
        let from = at + first.bit / 8;
        let asked = Request::extents(from, at + len - from, base);
        let Reply::Extents(lists) = inner.submit(asked).await? else { return Err(Error::misfit()) };
        let list = lists.first().filter(|list| !list.is_empty()).ok_or_else(Error::misfit)?;
        let mut end = from;
        for run in list.runs() {
            end += run.len;
            let is_hole = run.state & (HOLE | ZERO) != 0;
            while let Some(wrong) = left.next_if(|wrong| at + wrong.bit / 8 < end) {
                if !is_hole {
                    kept.push(wrong);
                }
            }
        }
    }
    Ok(kept)
}

impl Device for EvilDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        match request.op {
            Op::Read(room) => self.read(request.at, room),
            _ => self.inner.submit(request),
        }
    }
}

/// A wrong bit, counted from the start of the reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BitError {
    bit: u64,
    how: BitErrorKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BitErrorKind {
    High,
    Low,
    Flipped,
}

impl BitErrorConfig {
    /// The wrong bits of a read, in order; `count`: the number of the read.
    fn wrong_bits(&self, at: u64, len: u64, count: u64) -> Vec<BitError> {
        let mut wrong = Vec::new();
        if self.chance <= 0.0 {
            return wrong;
        }
        // Which stuck bits show differs from read to read.
        let mut shown = SplitMix64::new(self.seed ^ 0x5eed, count);
        let mut shows = || self.shows >= 1.0 || shown.unit() < self.shows;
        match self.mode {
            BitErrorMode::CosmicRays => {
                let mut rng = SplitMix64::new(self.seed, count);
                rng.choose(self.chance, 8 * len, |bit, _| {
                    wrong.push(BitError { bit, how: BitErrorKind::Flipped });
                });
            }
            BitErrorMode::StuckWires => {
                SplitMix64::new(self.seed, 0).choose(self.chance, 8 * len, |bit, high| {
                    let how = if high { BitErrorKind::High } else { BitErrorKind::Low };
                    if shows() {
                        wrong.push(BitError { bit, how });
                    }
                });
            }
            BitErrorMode::StuckBits => {
                let start = at.saturating_mul(8);
                let end = (at + len).saturating_mul(8);
                for stretch in start / STRETCH..end.div_ceil(STRETCH) {
                    let base = stretch * STRETCH;
                    SplitMix64::new(self.seed, stretch).choose(
                        self.chance,
                        STRETCH,
                        |bit, high| {
                            let place = base + bit;
                            if (start..end).contains(&place) && shows() {
                                let how = if high { BitErrorKind::High } else { BitErrorKind::Low };
                                wrong.push(BitError { bit: place - start, how });
                            }
                        },
                    );
                }
            }
        }
        wrong
    }
}

/// Seeded random numbers: Steele, Lea and Flood's splitmix64.
struct SplitMix64(u64);

impl SplitMix64 {
    fn new(seed: u64, stream: u64) -> SplitMix64 {
        let mut rng = SplitMix64(seed);
        let first = rng.next();
        SplitMix64(first ^ stream.wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 up to 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Chooses each of `count` things with the same probability, and flips a coin for each; the
    /// time depends on how many are chosen: the gaps between them are geometrically distributed.
    fn choose(&mut self, chance: f64, count: u64, mut chosen: impl FnMut(u64, bool)) {
        let none = (-chance).ln_1p();
        let mut next = 0_u64;
        loop {
            if chance < 1.0 {
                let gap = ((1.0 - self.unit()).ln() / none).floor();
                // A gap beyond all counts becomes the largest number.
                next = next.saturating_add(gap as u64);
            }
            if next >= count {
                return;
            }
            let high = self.next() & 1 == 1;
            chosen(next, high);
            next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_are_read_as_people_write_them() {
        for (text, value) in
            [("0.5", 0.5), ("1e-6", 1e-6), ("1%", 0.01), ("1:1000", 0.001), ("3/100", 0.03)]
        {
            assert!((chance("p", text).unwrap() - value).abs() < 1e-12, "{text}");
        }
        for wrong in ["", "2", "-1", "x", "1:0", "1:x", "nan", "120%"] {
            assert!(chance("p", wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn about_as_many_bits_are_chosen_as_should_be() {
        for chance in [1e-4, 0.01, 0.5, 1.0] {
            let mut total = 0_u64;
            let mut high = 0_u64;
            let mut last = None;
            SplitMix64::new(7, 9).choose(chance, 1 << 22, |bit, is_high| {
                assert!(last < Some(bit) && bit < 1 << 22);
                last = Some(bit);
                total += 1;
                high += u64::from(is_high);
            });
            let expected = chance * f64::from(1 << 22);
            assert!((total as f64 - expected).abs() <= 6.0 * expected.sqrt(), "{chance}: {total}");
            assert!(high * 3 > total && high * 3 < total * 2, "{high} of {total}");
        }
    }

    #[test]
    fn the_same_bits_are_stuck_however_they_are_read() {
        let evil =
            BitErrorConfig { mode: BitErrorMode::StuckBits, chance: 1e-4, shows: 1.0, seed: 3 };
        let all = evil.wrong_bits(0, 1 << 20, 0);
        assert!(all.len() > 500);
        let at = 123_457;
        let part = evil.wrong_bits(at, 200_000, 5);
        let inside = all.iter().filter(|w| (8 * at..8 * (at + 200_000)).contains(&w.bit));
        assert!(inside.map(|w| BitError { bit: w.bit - 8 * at, ..*w }).eq(part));
        let other = BitErrorConfig { seed: 4, ..evil }.wrong_bits(0, 1 << 20, 0);
        assert_ne!(all, other);
        let half = BitErrorConfig { shows: 0.5, ..evil }.wrong_bits(0, 1 << 20, 0);
        assert!(half.len() * 3 > all.len() && half.len() * 3 < all.len() * 2);
        let rays = BitErrorConfig { mode: BitErrorMode::CosmicRays, ..evil };
        assert_ne!(rays.wrong_bits(0, 1 << 20, 0), rays.wrong_bits(0, 1 << 20, 1));
        assert_eq!(rays.wrong_bits(0, 1 << 20, 1), rays.wrong_bits(0, 1 << 20, 1));
        let wires = BitErrorConfig { mode: BitErrorMode::StuckWires, ..evil };
        assert_eq!(wires.wrong_bits(0, 1 << 20, 0), wires.wrong_bits(999, 1 << 20, 1));
    }
}
