//! `pattern:SIZE`: each 8 bytes hold their own offset, big-endian, as nbdkit's pattern plugin.

use std::sync::Arc;

use block::{
    BASE_ALLOCATION, Backend, Can, Device, Extents, Facts, Op, Opened, Opening, Pending, Reply,
    Request, Result, Target,
};

use crate::{fill, operand};

/// The backend `pattern:SIZE`.
pub struct Pattern;

impl Backend for Pattern {
    fn schemes(&self) -> &'static [&'static str] {
        &["pattern"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "each 8 bytes hold their own offset, big-endian; read-only"
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(std::future::ready(open(&target)))
    }
}

fn open(target: &Target) -> Result<Opened> {
    operand::source_only(target)?;
    let size = operand::size(target)?;
    let facts = Facts {
        can: Can::CACHE | Can::EXTENTS | Can::FLUSH | Can::MULTI_CONN,
        contexts: vec![BASE_ALLOCATION.to_string()],
        ..Facts::new(operand::name(target), size)
    };
    Ok(Opened::from(Arc::new(PatternDevice { facts: Arc::new(facts) }) as Arc<dyn Device>))
}

struct PatternDevice {
    facts: Arc<Facts>,
}

impl Device for PatternDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        match request.op {
            Op::Read(room) => fill::read(request.at, room, pattern),
            Op::Extents(contexts) => Pending::ready(Ok(Reply::Extents(
                contexts.iter().map(|_| Extents::one(request.len, 0)).collect(),
            ))),
            _ => Pending::ready(Ok(Reply::Done)),
        }
    }
}

/// Writes the pattern's bytes from offset `at` on.
fn pattern(at: u64, out: &mut [u8]) {
    let skip = (at % 8) as usize;
    let mut word = at - skip as u64;
    let mut out = out;
    if skip > 0 {
        let head = (8 - skip).min(out.len());
        out[..head].copy_from_slice(&word.to_be_bytes()[skip..skip + head]);
        out = &mut out[head..];
        word += 8;
    }
    let mut words = out.chunks_exact_mut(8);
    for chunk in &mut words {
        chunk.copy_from_slice(&word.to_be_bytes());
        word += 8;
    }
    let tail = words.into_remainder();
    tail.copy_from_slice(&word.to_be_bytes()[..tail.len()]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_right_at_every_alignment() {
        let expected = |offset: u64| (offset & !7).to_be_bytes()[(offset % 8) as usize];
        for base in [0, 1 << 40, (1 << 63) - 64] {
            for at in base..base + 17 {
                for len in 0..40 {
                    let mut out = vec![0; len];
                    pattern(at, &mut out);
                    for (index, &byte) in out.iter().enumerate() {
                        assert_eq!(byte, expected(at + index as u64), "{at}+{index}");
                    }
                }
            }
        }
    }
}
