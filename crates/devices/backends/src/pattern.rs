//! `pattern:SIZE`: each 8 bytes contain their own offset, big-endian, like nbdkit's pattern plugin.
//! Optionally with holes at regular distances.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, PendingRequest, Reply,
    Request, Result, ZERO,
};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};

use crate::support::{fill, operand};

/// The backend `pattern:SIZE`.
pub struct PatternBackend;

impl Backend for PatternBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["pattern"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "each 8 bytes contain their own offset, big-endian; read-only"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul serve 'pattern:1G?data=1M&hole=3M' --run 'blockhaul map --totals "$uri"'
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[
                Param {
                    name: "data",
                    kind: ParamKind::Size,
                    default: Some("0"),
                    doc: "Bytes of data between two holes; 0: no holes.",
                },
                Param {
                    name: "hole",
                    kind: ParamKind::Size,
                    default: Some("0"),
                    doc: "Bytes of each hole.",
                },
            ]
        }
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(std::future::ready(open(&target)))
    }
}

fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    operand::source_only(target)?;
    let size = operand::size(target)?;
    let [data, hole] = ["data", "hole"].map(|name| target.args.size(name).unwrap_or(0));
    if (data == 0) != (hole == 0) || data.checked_add(hole).is_none() {
        let text =
            "pattern: data= and hole= require each other: they are the lengths of data and holes";
        return Err(Error::new(Kind::Usage, text));
    }
    let facts = Facts {
        can: Can::CACHE | Can::EXTENTS | Can::FLUSH | Can::MULTI_CONN,
        contexts: vec![BASE_ALLOCATION.to_string()],
        ..Facts::new(operand::name(target), size)
    };
    Ok(OpenedDevice::from(Arc::new(PatternDevice {
        facts: Arc::new(facts),
        layout: PatternLayout { data, hole },
    }) as Arc<dyn Device>))
}

struct PatternDevice {
    facts: Arc<Facts>,
    layout: PatternLayout,
}

/// Alternating lengths of data and hole; both 0: all is data.
#[derive(Clone, Copy)]
struct PatternLayout {
    data: u64,
    hole: u64,
}

/// Maximum number of runs in one extents reply.
const RUNS_MAX: usize = 64 << 10;

impl PatternLayout {
    /// The length of the run from `at` on, and whether it is a hole.
    fn run(self, at: u64) -> (u64, bool) {
        if self.data == 0 {
            return (u64::MAX, false);
        }
        let place = at % (self.data + self.hole);
        if place < self.data {
            (self.data - place, false)
        } else {
            (self.data + self.hole - place, true)
        }
    }

    fn extents(self, mut at: u64, mut left: u64) -> Extents {
        let mut list = Extents::new();
        while left > 0 && list.len() < RUNS_MAX {
            let (len, hole) = self.run(at);
            let len = len.min(left);
            list.push(len, if hole { HOLE | ZERO } else { 0 });
            left -= len;
            // Inside the device.
            at += len;
        }
        list
    }

    /// Writes the bytes from offset `at` on.
    fn fill(self, mut at: u64, mut out: &mut [u8]) {
        while !out.is_empty() {
            let (len, hole) = self.run(at);
            let len = usize::try_from(len).unwrap_or(usize::MAX).min(out.len());
            let (part, rest) = out.split_at_mut(len);
            if hole {
                part.fill(0);
            } else {
                pattern(at, part);
            }
            out = rest;
            at += len as u64;
        }
    }
}

impl Device for PatternDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let layout = self.layout;
        match request.op {
            Op::Read(_) if matches!(layout.run(request.at), (len, true) if len >= request.len) => {
                PendingRequest::ready(Ok(Reply::Hole))
            }
            Op::Read(room) => fill::read(request.at, room, move |at, out| layout.fill(at, out)),
            Op::Extents(contexts) => PendingRequest::ready(Ok(Reply::Extents(
                contexts.iter().map(|_| layout.extents(request.at, request.len)).collect(),
            ))),
            _ => PendingRequest::ready(Ok(Reply::Done)),
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
    fn holes_come_in_turn_with_data_and_the_data_stays_where_it_is() {
        let layout = PatternLayout { data: 1000, hole: 500 };
        let mut whole = vec![0; 10_000];
        pattern(0, &mut whole);
        for (at, byte) in whole.iter_mut().enumerate() {
            *byte = if at % 1500 < 1000 { *byte } else { 0 };
        }
        for at in [0, 1, 999, 1000, 1499, 1500, 2000] {
            let mut out = vec![0; 5000];
            layout.fill(at as u64, &mut out);
            assert!(out == whole[at..at + 5000], "{at}");
            let list = layout.extents(at as u64, 5000);
            assert_eq!(list.total(), 5000);
            for (start, run) in list.ranges(at as u64) {
                assert_eq!(run.state == HOLE | ZERO, start % 1500 >= 1000, "{start}");
            }
        }
        assert_eq!(layout.extents(0, u64::MAX).len(), RUNS_MAX);
        assert_eq!(PatternLayout { data: 0, hole: 0 }.extents(5, 7), Extents::one(7, 0));
    }

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
