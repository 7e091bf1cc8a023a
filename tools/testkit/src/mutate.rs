//! Changes valid bytes at random, for tests of what reads them: the seeded form of a fuzzer.

use blockhaul_block::{BASE_ALLOCATION, ContextSet, Device, DeviceExt as _, Result};

use crate::rng::Rng;

/// Most bytes that are read at either end of a device.
const READ_MAX: u64 = 1 << 20;

/// Most changes of one input.
const CHANGES: u64 = 5;
/// Longest inserted piece in bytes.
const PIECE: u64 = 16;
/// Numbers that parsers compare with.
const NUMBERS: [u64; 12] = [
    0,
    1,
    7,
    8,
    512,
    4096,
    65_536,
    i32::MAX as u64,
    u32::MAX as u64,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// A copy of `input` with one to five changes: flipped bits, other bytes, numbers at the edges of
/// their types in either byte order, inserted, removed, repeated and missing pieces.
pub fn mutated(rng: &mut Rng, input: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..rng.between(1, CHANGES) {
        change(rng, &mut bytes);
    }
    bytes
}

/// The same near the start or the end, where most formats have their headers.
pub fn mutated_at_edges(rng: &mut Rng, input: &[u8], edge: usize) -> Vec<u8> {
    let edge = edge.min(input.len());
    if rng.chance(70) {
        [mutated(rng, &input[..edge]), input[edge..].to_vec()].concat()
    } else {
        let (before, end) = input.split_at(input.len() - edge);
        [before, &mutated(rng, end)].concat()
    }
}

/// Reads the start, the end and the extents of a device that was opened over changed bytes.
///
/// # Errors
/// Those of the device: the caller expects them.
pub async fn look(device: &dyn Device) -> Result<()> {
    let facts = device.facts();
    let len = facts.size.min(READ_MAX);
    for at in [0, facts.size - len] {
        if len > 0 {
            device.read(at, usize::try_from(len).unwrap_or(0)).await?;
        }
    }
    if len > 0 && facts.contexts.first().is_some_and(|name| name == BASE_ALLOCATION) {
        device.extents(0, len, ContextSet::first()).await?;
    }
    Ok(())
}

fn change(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let len = bytes.len();
    let at = rng.below(len as u64 + 1) as usize;
    let end = at + rng.below((len - at) as u64 + 1) as usize;
    match rng.below(9) {
        0 | 1 if at < len => bytes[at] ^= 1 << rng.below(8),
        2 if at < len => bytes[at] = rng.number() as u8,
        3 | 4 => {
            let number = *rng.pick(&NUMBERS);
            let width = *rng.pick(&[2, 4, 8]);
            let field = if rng.chance(50) {
                number.to_be_bytes()[8 - width..].to_vec()
            } else {
                number.to_le_bytes()[..width].to_vec()
            };
            let end = len.min(at + width);
            bytes.splice(at..end, field);
        }
        5 => {
            let piece: Vec<u8> = (0..rng.below(PIECE)).map(|_| rng.number() as u8).collect();
            bytes.splice(at..at, piece);
        }
        6 => drop(bytes.drain(at..end.min(at + PIECE as usize))),
        7 => {
            let piece = bytes[at..end.min(at + 64)].to_vec();
            bytes.splice(at..at, piece);
        }
        _ => bytes.truncate(at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_copies_differ_and_the_same_seed_makes_the_same() {
        let input: Vec<u8> = (0..=255).collect();
        let copies = |seed| {
            let mut rng = Rng::new(seed);
            (0..100).map(|_| mutated(&mut rng, &input)).collect::<Vec<_>>()
        };
        let one = copies(1);
        let two = copies(1);
        assert_eq!(one, two);
        assert!(one.iter().filter(|copy| **copy != input).count() > 80);
        assert!(mutated(&mut Rng::new(3), &[]).len() <= 5 * PIECE as usize);
        let mut rng = Rng::new(9);
        let middle = input[64..192].to_vec();
        for _ in 0..100 {
            let copy = mutated_at_edges(&mut rng, &input, 64);
            assert!(copy.windows(128).any(|window| window == middle));
        }
    }
}
