//! Runs every fuzz target on a stable toolchain: its corpus, then seeded mutations of it.
//!
//! `BLOCKHAUL_FUZZ_SECONDS` is the time for each target [default: 2], `BLOCKHAUL_FUZZ_SEED` the seed
//! [default: a fixed one], `BLOCKHAUL_FUZZ_TARGET` the only target [default: all]. A failure prints the
//! target, the seed and the input.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{TARGETS, Target};

/// Maximum input in bytes: the handshakes' loops are quadratic with small cuts.
const MAX_LEN: usize = 4096;

struct XorShift(u64);

impl XorShift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Numbers that parsers compare with.
const INTERESTING: [u64; 14] = [
    0,
    1,
    7,
    8,
    12,
    16,
    4096,
    4097,
    65_536,
    32 << 20,
    64 << 20,
    u32::MAX as u64,
    1 << 63,
    u64::MAX,
];

fn mutate(random: &mut XorShift, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut data = corpus[random.below(corpus.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(data.len() + 1);
        match random.below(8) {
            0 if at < data.len() => data[at] ^= 1 << random.below(8),
            1 if at < data.len() => data[at] = random.next() as u8,
            2 => data.truncate(at),
            3 => {
                let len = random.below(16);
                data.splice(at..at, (0..len).map(|_| random.next() as u8));
            }
            4 => {
                // An interesting number in 2, 4 or 8 bytes.
                let number = INTERESTING[random.below(INTERESTING.len())].to_be_bytes();
                let number = &number[8 - (2 << random.below(3))..];
                let end = data.len().min(at + number.len());
                data.splice(at..end, number.iter().copied());
            }
            5 => {
                // A piece of another input.
                let other = &corpus[random.below(corpus.len())];
                let start = random.below(other.len() + 1);
                let len = random.below(other.len() - start + 1);
                data.splice(at..at, other[start..start + len].iter().copied());
            }
            6 => {
                let end = at + random.below(data.len() - at + 1);
                data.drain(at..end);
            }
            _ => {
                // Repeat a piece.
                let end = at + random.below(data.len() - at + 1);
                let piece = data[at..end].to_vec();
                data.splice(end..end, piece);
            }
        }
        data.truncate(MAX_LEN);
    }
    data
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} has no inputs", folder.display());
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

fn hex(data: &[u8]) -> String {
    data.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")))
}

/// Runs one target for a time, at least over its corpus.
fn fuzz(name: &str, target: fn(&[u8]), seed: u64, time: Duration) {
    let corpus = corpus(name);
    // Each target has its own sequence, so that adding a target changes no other.
    let own =
        name.bytes().fold(seed, |seed, byte| seed.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte));
    let mut random = XorShift(own.max(1));
    let end = Instant::now() + time;
    let mut inputs = corpus.iter().cloned().collect::<std::collections::VecDeque<_>>();
    let mut runs = 0u64;
    while !inputs.is_empty() || !runs.is_multiple_of(64) || Instant::now() < end {
        let data = inputs.pop_front().unwrap_or_else(|| mutate(&mut random, &corpus));
        let result = std::panic::catch_unwind(|| target(&data));
        assert!(
            result.is_ok(),
            "target {name} failed in run {runs}: BLOCKHAUL_FUZZ_SEED={seed}, input {}",
            hex(&data)
        );
        runs += 1;
    }
    println!("{name}: {runs} runs, corpus of {}", corpus.len());
}

#[test]
fn every_target_holds() {
    let seed = number("BLOCKHAUL_FUZZ_SEED").unwrap_or(0x6e62_645f_7769_7265);
    let time = Duration::from_secs(number("BLOCKHAUL_FUZZ_SECONDS").unwrap_or(2));
    let only = std::env::var("BLOCKHAUL_FUZZ_TARGET").ok();
    let chosen = |target: &&Target| only.as_ref().is_none_or(|name| name == target.0);
    let targets: Vec<&Target> = TARGETS.iter().filter(chosen).collect();
    assert!(!targets.is_empty(), "no fuzz target is called {only:?}");
    let next = AtomicUsize::new(0);
    // A panic in one of the threads ends the test with its message.
    std::thread::scope(|threads| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            threads.spawn(|| {
                while let Some(&&(name, target)) = targets.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    fuzz(name, target, seed, time);
                }
            });
        }
    });
}
