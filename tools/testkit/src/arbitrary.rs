//! Random requests within a device's facts, as data: they can be printed, repeated and shrunk.

use std::fmt;
use std::ops::Range;

use blockhaul_block::{Can, ContextSet, Facts, Op, OpKind, Request, RequestFlags};
use blockhaul_io::{Buf, Data, Reservation};

use crate::rng::Rng;

/// One request of a random sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RandomStep {
    /// What.
    pub kind: OpKind,
    /// Offset in bytes.
    pub at: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
    /// How.
    pub flags: RequestFlags,
    /// What a write writes.
    pub fill: WriteFill,
    /// It is submitted while the steps before it, back to the last one that is not `together`, are
    /// in flight. Their ranges do not overlap, unless neither changes anything.
    pub together: bool,
}

/// The data of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteFill {
    /// Zeroes.
    Zeroes,
    /// One byte over and over.
    Byte(u8),
    /// Random bytes, none of them zero, of this seed.
    Random(u64),
    /// Zeroes except for some random bytes at the start and the end of each 4096, of this seed.
    Sparse(u64),
}

impl WriteFill {
    /// Fills memory.
    pub fn fill(self, bytes: &mut [u8]) {
        match self {
            WriteFill::Zeroes => bytes.fill(0),
            WriteFill::Byte(byte) => bytes.fill(byte),
            WriteFill::Random(seed) => {
                Rng::new(seed).fill(bytes);
                bytes.iter_mut().for_each(|byte| *byte = (*byte).max(1));
            }
            WriteFill::Sparse(seed) => {
                let mut rng = Rng::new(seed);
                bytes.fill(0);
                for page in bytes.chunks_mut(4096) {
                    let head = rng.below(9) as usize;
                    let tail = rng.below(9) as usize;
                    let len = page.len();
                    rng.fill(&mut page[..head.min(len)]);
                    rng.fill(&mut page[len - tail.min(len)..]);
                }
            }
        }
    }

    /// `len` bytes.
    pub fn bytes(self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }
}

impl RandomStep {
    /// The request, with memory outside any pool. `contexts` are those for extents.
    pub fn request(&self, contexts: ContextSet) -> Request {
        self.request_in(Reservation::unpooled(self.payload()), contexts)
    }

    /// The request with this reservation of [`RandomStep::payload`] bytes for its data.
    pub fn request_in(&self, room: Reservation, contexts: ContextSet) -> Request {
        let op = match self.kind {
            OpKind::Read => Op::Read(room),
            OpKind::Write => {
                let mut buf: Buf = room.into_buf();
                self.fill.fill(&mut buf);
                Op::Write(Data::from(buf))
            }
            OpKind::Zero => Op::Zero,
            OpKind::Trim => Op::Trim,
            OpKind::Flush => Op::Flush,
            OpKind::Cache => Op::Cache,
            OpKind::Extents => Op::Extents(contexts),
        };
        Request { op, at: self.at, len: self.len, flags: self.flags }
    }

    /// Bytes transferred with the request or its reply.
    pub fn payload(&self) -> usize {
        match self.kind {
            OpKind::Read | OpKind::Write => self.len as usize,
            _ => 0,
        }
    }

    /// End of the range.
    pub fn end(&self) -> u64 {
        self.at + self.len
    }

    fn conflicts(&self, other: &RandomStep) -> bool {
        let overlap = self.at < other.end() && other.at < self.end();
        overlap && (self.kind.changes() || other.kind.changes())
    }
}

impl fmt::Debug for RandomStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}+{}", self.kind, self.at, self.len)?;
        if !self.flags.is_empty() {
            write!(f, " {:?}", self.flags)?;
        }
        if self.kind == OpKind::Write {
            write!(f, " {:?}", self.fill)?;
        }
        f.write_str(if self.together { " (together with the step before)" } else { "" })
    }
}

/// Relative frequency of each kind of request.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "named as the requests")]
pub struct RequestWeights {
    pub read: u32,
    pub write: u32,
    pub zero: u32,
    pub trim: u32,
    pub flush: u32,
    pub cache: u32,
    pub extents: u32,
}

impl Default for RequestWeights {
    fn default() -> RequestWeights {
        RequestWeights { read: 30, write: 30, zero: 12, trim: 8, flush: 3, cache: 3, extents: 14 }
    }
}

/// Attempts to draw a step that does not overlap those in flight, before waiting for them instead.
const TRIES: usize = 6;

/// Makes random steps that the facts allow.
pub struct StepGenerator {
    can: Can,
    minimum: u64,
    preferred: u64,
    len_max: u64,
    kinds: Vec<(OpKind, u32)>,
    windows: Vec<Range<u64>>,
    together_max: usize,
    /// End of the previous range: many follow it directly.
    last_end: u64,
    rng: Rng,
}

impl StepGenerator {
    /// A generator over the whole device, requests up to 128 KiB.
    pub fn new(facts: &Facts, seed: u64) -> StepGenerator {
        let minimum = u64::from(facts.block.minimum.max(1));
        let whole = 0..facts.size - facts.size % minimum;
        let generator = StepGenerator {
            can: facts.can,
            minimum,
            preferred: u64::from(facts.block.preferred).max(minimum),
            len_max: u64::from(facts.block.maximum).min(128 << 10).max(minimum),
            kinds: Vec::new(),
            windows: vec![whole],
            together_max: 16,
            last_end: 0,
            rng: Rng::new(seed),
        };
        generator.weights(RequestWeights::default())
    }

    /// Only within these ranges, which must be non-empty and aligned to the minimum block.
    #[must_use]
    pub fn windows(mut self, windows: Vec<Range<u64>>) -> StepGenerator {
        self.windows = windows;
        self
    }

    /// With these weights; kinds that the facts do not allow are never drawn.
    #[must_use]
    pub fn weights(mut self, weights: RequestWeights) -> StepGenerator {
        let RequestWeights { read, write, zero, trim, flush, cache, extents } = weights;
        let all = [
            (OpKind::Read, read, Can::empty()),
            (OpKind::Write, write, Can::WRITE),
            (OpKind::Zero, zero, Can::WRITE | Can::ZERO),
            (OpKind::Trim, trim, Can::WRITE | Can::TRIM),
            (OpKind::Flush, flush, Can::FLUSH),
            (OpKind::Cache, cache, Can::CACHE),
            (OpKind::Extents, extents, Can::EXTENTS),
        ];
        let allowed = all.iter().filter(|(_, weight, can)| *weight > 0 && self.can.contains(*can));
        self.kinds = allowed.map(|&(kind, weight, _)| (kind, weight)).collect();
        self
    }

    /// Requests of at most this many bytes.
    #[must_use]
    pub fn len_max(mut self, len_max: u64) -> StepGenerator {
        self.len_max = len_max.max(self.minimum);
        self
    }

    /// At most this many requests in flight; 1 means one after the other.
    #[must_use]
    pub fn together_max(mut self, together_max: usize) -> StepGenerator {
        self.together_max = together_max;
        self
    }

    /// A sequence of `count` steps; empty if the device or all windows are.
    pub fn steps(&mut self, count: usize) -> Vec<RandomStep> {
        self.windows.retain(|window| !window.is_empty());
        let mut steps: Vec<RandomStep> = Vec::new();
        if self.windows.is_empty() || self.kinds.is_empty() {
            return steps;
        }
        let mut group = 0;
        for index in 0..count {
            let wanted = index > group && index - group < self.together_max && self.rng.chance(85);
            let mut step = self.step();
            for _ in 0..TRIES {
                if !wanted || !steps[group..].iter().any(|other| other.conflicts(&step)) {
                    step.together = wanted;
                    break;
                }
                step = self.step();
            }
            if !step.together {
                group = index;
            }
            if step.len > 0 {
                self.last_end = step.end();
            }
            steps.push(step);
        }
        steps
    }

    fn step(&mut self) -> RandomStep {
        let total: u64 = self.kinds.iter().map(|&(_, weight)| u64::from(weight)).sum();
        let mut drawn = self.rng.below(total);
        let mut kind = self.kinds[0].0;
        for &(next, weight) in &self.kinds {
            kind = next;
            if drawn < weight.into() {
                break;
            }
            drawn -= u64::from(weight);
        }
        let (at, len) = if kind == OpKind::Flush { (0, 0) } else { self.range() };
        let flags = self.flags(kind);
        let fill = self.fill();
        RandomStep { kind, at, len, flags, fill, together: false }
    }

    /// A range in a window: odd ones and aligned ones, small and large, often at an end.
    fn range(&mut self) -> (u64, u64) {
        let rng = &mut self.rng;
        let window = rng.pick(&self.windows).clone();
        let grain = if rng.chance(40) { self.preferred } else { self.minimum };
        let size = window.end - window.start;
        let bound = match rng.below(4) {
            0 => self.minimum,
            1 => 600,
            2 => 8192,
            _ => self.len_max,
        };
        let whole = |bytes: u64| (bytes / grain * grain).max(self.minimum);
        let len = whole(rng.between(1, bound.min(self.len_max))).min(size);
        let len = len - len % self.minimum;
        let slack = size - len;
        let skip = match rng.below(10) {
            0 => 0,
            1 => slack,
            2 | 3 if self.last_end >= window.start => slack.min(self.last_end - window.start),
            _ => rng.below(slack + 1) / grain * grain,
        };
        (window.start + skip, len)
    }

    fn flags(&mut self, kind: OpKind) -> RequestFlags {
        let mut flags = RequestFlags::empty();
        let mut sometimes = |flag, allowed: bool| {
            if allowed && self.rng.chance(15) {
                flags |= flag;
            }
        };
        sometimes(RequestFlags::FUA, kind.changes() && self.can.contains(Can::FUA));
        sometimes(RequestFlags::NO_HOLE, kind == OpKind::Zero);
        sometimes(RequestFlags::FAST, kind == OpKind::Zero && self.can.contains(Can::FAST_ZERO));
        sometimes(RequestFlags::ONE_EXTENT, kind == OpKind::Extents);
        flags
    }

    fn fill(&mut self) -> WriteFill {
        match self.rng.below(6) {
            0 => WriteFill::Zeroes,
            1 => WriteFill::Byte(self.rng.number() as u8),
            2 => WriteFill::Sparse(self.rng.number()),
            _ => WriteFill::Random(self.rng.number()),
        }
    }
}

/// Shortens a failing sequence: removes halves, quarters … single steps as long as `fails` reports
/// that the rest still fails, at most `tries` times.
pub async fn shrink(
    mut steps: Vec<RandomStep>,
    mut tries: usize,
    mut fails: impl AsyncFnMut(&[RandomStep]) -> bool,
) -> Vec<RandomStep> {
    let mut piece = steps.len() / 2;
    while piece > 0 {
        let mut start = 0;
        while start < steps.len() && tries > 0 {
            let end = (start + piece).min(steps.len());
            // A step that was together with a removed one stays together with the steps before that
            // one only if it overlaps none in between; awaiting is always valid.
            let mut fewer = [&steps[..start], &steps[end..]].concat();
            if let Some(next) = fewer.get_mut(start)
                && steps[start..end].iter().any(|step| !step.together)
            {
                next.together = false;
            }
            tries -= 1;
            if !fewer.is_empty() && fails(&fewer).await {
                steps = fewer;
            } else {
                start = end;
            }
        }
        piece /= 2;
    }
    steps
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::model::Model;

    #[test]
    fn steps_stay_within_the_facts() {
        for (seed, minimum) in [(1, 1), (2, 512), (3, 4096)] {
            let mut facts = Model::all_facts(100_001);
            facts.block.minimum = minimum;
            facts.block.maximum = 16 << 10;
            facts.can -= Can::FUA | Can::TRIM;
            let steps = StepGenerator::new(&facts, seed).steps(2000);
            let minimum = u64::from(minimum);
            for step in &steps {
                assert!(step.end() <= 100_001, "{step:?}");
                assert!(step.at % minimum == 0 && step.len % minimum == 0, "{step:?}");
                assert!(step.len <= 16 << 10, "{step:?}");
                assert!((step.len == 0) == (step.kind == OpKind::Flush), "{step:?}");
                assert!(step.kind != OpKind::Trim && !step.flags.contains(RequestFlags::FUA));
            }
            let last = 100_001 - 100_001 % minimum;
            assert!(steps.iter().any(|step| step.end() == last), "the end is reached");
            assert!(steps.iter().any(|step| step.together));
        }
    }

    #[test]
    fn steps_in_flight_do_not_overlap_what_changes() {
        let steps = StepGenerator::new(&Model::all_facts(64 << 10), 5).steps(3000);
        let mut group: Vec<RandomStep> = Vec::new();
        for step in steps {
            if !step.together {
                group.clear();
            }
            assert!(group.iter().all(|other| !other.conflicts(&step)));
            group.push(step);
            assert!(group.len() <= 16);
        }
    }

    #[test]
    fn an_empty_device_has_no_steps() {
        assert!(StepGenerator::new(&Model::all_facts(0), 1).steps(10).is_empty());
    }

    #[test]
    fn shrinking_finds_the_two_steps_that_matter() {
        let steps = StepGenerator::new(&Model::all_facts(1 << 20), 7).steps(200);
        let one = steps[31].at;
        let two = steps[144].at;
        let both = |steps: &[RandomStep]| {
            steps.iter().any(|step| step.at == one) && steps.iter().any(|step| step.at == two)
        };
        let shrunk = pin!(shrink(steps, 10_000, async |steps: &[RandomStep]| both(steps)));
        let Poll::Ready(shrunk) = shrunk.poll(&mut Context::from_waker(Waker::noop())) else {
            panic!("nothing to wait for")
        };
        assert!(both(&shrunk) && shrunk.len() <= 2, "{shrunk:?}");
    }
}
