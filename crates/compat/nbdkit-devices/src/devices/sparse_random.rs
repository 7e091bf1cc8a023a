//! `sparse-random:SIZE`: runs of data and holes as on disks of virtual machines, reproducible by
//! seed, and identical to nbdkit's plugin of that name.
//!
//! Blocks of 4 KiB are data or holes according to a Markov chain with two states, whose
//! probabilities follow from the requested share of data and run length. The data of a block
//! depends on the seed and its offset. Both use xoshiro256** 1.0, seeded by SplitMix64 (Blackman
//! and Vigna).

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, PendingRequest, Reply,
    Request, RequestFlags, Result, ZERO,
};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};

use blockhaul_backends::support::{fill, operand};

/// Block size in bytes; a block is all data or all hole.
const BLOCK: u64 = 4096;
/// Maximum size of a disk: opening it computes all of its blocks, which takes seconds.
const SIZE_MAX: u64 = 16 << 40;
/// Maximum number of changes between data and hole, of 8 bytes each.
const CHANGES_MAX: usize = 16 << 20;
/// Maximum number of runs in one extents reply.
const RUNS_MAX: usize = 4096;

/// The backend `sparse-random:SIZE`.
pub struct SparseRandom;

impl Backend for SparseRandom {
    fn schemes(&self) -> &'static [&'static str] {
        &["sparse-random"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "runs of random data and holes, the same as those of nbdkit's plugin with the same seed; writes \
         succeed only if they do not change the content"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul serve 'sparse-random:1G?seed=5&percent=5' --run 'blockhaul copy "$uri" null:'
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[
                Param {
                    name: "seed",
                    kind: ParamKind::Number,
                    default: Some("1"),
                    doc: "Seed of the content, below 2^32.",
                },
                Param {
                    name: "percent",
                    kind: ParamKind::Text,
                    default: Some("10"),
                    doc: "Share of data, 0 to 100.",
                },
                Param {
                    name: "runlength",
                    kind: ParamKind::Size,
                    default: Some("16M"),
                    doc: "Average length of a run of data.",
                },
                Param {
                    name: "random-content",
                    kind: ParamKind::Switch,
                    default: Some("off"),
                    doc: "All bytes of data are random; off: all bytes of a block are the same.",
                },
            ]
        }
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            let made = blockhaul_io::offload(move || open(&target)).await;
            made.map_err(|_| Error::new(Kind::Io, "sparse-random: was not made"))?
        })
    }
}

fn wrong(text: String) -> Error {
    Error::new(Kind::Usage, format!("sparse-random: {text}"))
}

fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    operand::source_only(target)?;
    let size = operand::size(target)?;
    let args = &target.args;
    let seed = args.number("seed").unwrap_or(1);
    let seed = u32::try_from(seed).map_err(|_| wrong(format!("seed {seed} is not below 2^32")))?;
    let percent = args.text("percent").unwrap_or("10");
    let share = percent.strip_suffix('%').unwrap_or(percent).parse::<f64>().ok();
    let share = share.filter(|share| (0.0..=100.0).contains(share));
    let share = share.ok_or_else(|| wrong(format!("percent {percent:?} is not 0 to 100")))?;
    let runlength = args.size("runlength").filter(|&length| length > 0);
    let runlength = runlength.ok_or_else(|| wrong("runlength must be more than 0".into()))?;
    let facts = Facts {
        can: Can::all(),
        allocation_unit: BLOCK as u32,
        contexts: vec![BASE_ALLOCATION.to_string()],
        ..Facts::new(operand::name(target), size)
    };
    let disk = SparsePattern {
        seed: u64::from(seed),
        changes: changes(size, u64::from(seed), share, runlength)?,
        random: args.switch("random-content"),
    };
    let device = SparseRandomDevice { facts: Arc::new(facts), disk: Arc::new(disk) };
    Ok(OpenedDevice::from(Arc::new(device) as Arc<dyn Device>))
}

/// Block numbers at which data begins and ends, alternately.
fn changes(size: u64, seed: u64, percent: f64, runlength: u64) -> Result<Vec<u64>> {
    if percent == 0.0 {
        return Ok(Vec::new());
    }
    if percent == 100.0 {
        return Ok(vec![0]);
    }
    if size > SIZE_MAX {
        return Err(wrong(format!("more than {} TiB: use sample:", SIZE_MAX >> 40)));
    }
    // In this order, as the last bit of the result matters.
    let share = percent / 100.;
    let to_hole = 1. / (runlength as f64 / BLOCK as f64);
    let to_data = share * to_hole / (1. - share);
    let limits = [to_data, to_hole].map(|chance| chance * u64::MAX as f64);
    let mut random = Xoshiro::new(seed);
    let mut changes = Vec::new();
    for block in 0..size.div_ceil(BLOCK) {
        if random.next() as f64 <= limits[changes.len() % 2] {
            if changes.len() == CHANGES_MAX {
                return Err(wrong("too many runs: choose a larger runlength".into()));
            }
            changes.push(block + 1);
        }
    }
    Ok(changes)
}

struct SparseRandomDevice {
    facts: Arc<Facts>,
    disk: Arc<SparsePattern>,
}

struct SparsePattern {
    seed: u64,
    changes: Vec<u64>,
    random: bool,
}

impl SparsePattern {
    /// Whether the byte at an offset is data, and where that run ends.
    fn run(&self, at: u64) -> (bool, u64) {
        let passed = self.changes.partition_point(|&change| change <= at / BLOCK);
        let end = self.changes.get(passed).map_or(u64::MAX, |&change| change * BLOCK);
        (passed % 2 == 1, end)
    }

    /// The runs of a range: data or not, and the end.
    fn runs(&self, at: u64, end: u64) -> impl Iterator<Item = (bool, u64)> {
        let mut next = at;
        std::iter::from_fn(move || {
            let (data, until) = (next < end).then(|| self.run(next))?;
            next = until.min(end);
            Some((data, next))
        })
    }

    fn fill(&self, at: u64, out: &mut [u8]) {
        let mut at = at;
        let mut out = out;
        while !out.is_empty() {
            let skip = (at % BLOCK) as usize;
            let (here, rest) = out.split_at_mut(out.len().min(BLOCK as usize - skip));
            let mut random = Xoshiro::new(self.seed.wrapping_add(at - skip as u64));
            if !self.run(at).0 {
                here.fill(0);
            } else if !self.random {
                // A block of zeroes would be mistaken for a hole.
                here.fill((random.next() as u8).max(1));
            } else {
                for _ in 0..skip {
                    random.next();
                }
                here.fill_with(|| random.next() as u8);
            }
            at += here.len() as u64;
            out = rest;
        }
    }

    fn holds(&self, at: u64, bytes: &[u8]) -> bool {
        let mut block = [0; BLOCK as usize];
        let mut at = at;
        bytes.chunks(BLOCK as usize).all(|bytes| {
            let block = &mut block[..bytes.len()];
            self.fill(at, block);
            at += bytes.len() as u64;
            bytes == block
        })
    }
}

impl Device for SparseRandomDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        let done = |fits: bool| {
            if fits {
                PendingRequest::ready(Ok(Reply::Done))
            } else {
                Error::new(Kind::Io, "writes cannot change the content").into()
            }
        };
        match op {
            Op::Read(room) if self.disk.runs(at, at + len).all(|(data, _)| !data) => {
                drop(room);
                PendingRequest::ready(Ok(Reply::Hole))
            }
            Op::Read(room) => {
                let disk = self.disk.clone();
                fill::read(at, room, move |at, out| disk.fill(at, out))
            }
            Op::Write(data) => done(self.disk.holds(at, data.bytes())),
            Op::Zero | Op::Trim => done(self.disk.runs(at, at + len).all(|(data, _)| !data)),
            Op::Flush | Op::Cache => PendingRequest::ready(Ok(Reply::Done)),
            Op::Extents(contexts) => {
                let most = if flags.contains(RequestFlags::ONE_EXTENT) { 1 } else { RUNS_MAX };
                let mut extents = Extents::new();
                let mut start = at;
                for (data, end) in self.disk.runs(at, at + len).take(most) {
                    extents.push(end - start, if data { 0 } else { HOLE | ZERO });
                    start = end;
                }
                let lists = contexts.iter().map(|_| extents.clone()).collect();
                PendingRequest::ready(Ok(Reply::Extents(lists)))
            }
        }
    }
}

/// The generator xoshiro256** 1.0.
struct Xoshiro([u64; 4]);

impl Xoshiro {
    /// Seeded by SplitMix64.
    fn new(seed: u64) -> Xoshiro {
        let mut state = seed;
        Xoshiro(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    fn next(&mut self) -> u64 {
        let Xoshiro(s) = self;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }
}
