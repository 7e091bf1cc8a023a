//! `random:SIZE`: pseudo-random bytes, the same on every read.

use blockhaul_block::Result;
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};

use crate::support::computed::computed;
use crate::support::operand;

/// The backend `random:SIZE`.
pub struct RandomBackend;

impl Backend for RandomBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["random"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "incompressible bytes, the same for the same seed; read-only"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul serve 'random:64M?seed=3' --run 'blockhaul checksum "$uri"'
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[Param {
                name: "seed",
                kind: ParamKind::Number,
                default: Some("1"),
                doc: "Seed of the random numbers.",
            }]
        }
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(std::future::ready(open(&target)))
    }
}

fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    operand::source_only(target)?;
    let size = operand::size(target)?;
    let seed = target.args.number("seed").unwrap_or(1);
    Ok(computed(target, size, move |at, out| fill(seed, at, out)))
}

/// Bytes from `at` on: word N depends only on the seed and N.
fn fill(seed: u64, at: u64, out: &mut [u8]) {
    let mut number = at / 8;
    let skip = (at % 8) as usize;
    let (head, rest) = out.split_at_mut(if skip == 0 { 0 } else { (8 - skip).min(out.len()) });
    if !head.is_empty() {
        head.copy_from_slice(&word(seed, number)[skip..skip + head.len()]);
        number += 1;
    }
    for piece in rest.chunks_mut(8) {
        piece.copy_from_slice(&word(seed, number)[..piece.len()]);
        number += 1;
    }
}

/// A pseudo-random word (SplitMix64).
fn word(seed: u64, number: u64) -> [u8; 8] {
    let mut mixed = seed
        .wrapping_mul(0xd134_2543_de82_ef95)
        .wrapping_add(number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ mixed >> 31).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_depend_on_place_and_seed_alone() {
        let bytes = |seed, at, len| {
            let mut out = vec![0; len];
            fill(seed, at, &mut out);
            out
        };
        let all = bytes(1, 0, 4096);
        for (at, len) in [(0, 1), (1, 3), (7, 9), (8, 8), (1001, 2000)] {
            assert_eq!(bytes(1, at as u64, len), &all[at..at + len]);
        }
        assert_ne!(bytes(2, 0, 4096), all);
        let ones: u32 = all.iter().map(|byte| byte.count_ones()).sum();
        assert!((4096 * 4 - 600..4096 * 4 + 600).contains(&ones), "{ones} of {} bits", 4096 * 8);
    }
}
