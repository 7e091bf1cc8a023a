//! What a handle says of itself, as facts of a device, and its extents.

use blockhaul_block::{
    BASE_ALLOCATION, BlockSizes, Can, Error, Extents, Facts, HOLE, Kind, Result, ZERO,
};
use serde::Deserialize;

/// Length of an extent in the answer of the host, in bytes.
const EXTENT: usize = 24;

/// How an ability is implemented (nbdkit's numbers).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PythonAbility {
    None,
    Emulate,
    Native,
}

impl PythonAbility {
    fn of(number: u8) -> PythonAbility {
        match number {
            0 => PythonAbility::None,
            1 => PythonAbility::Emulate,
            _ => PythonAbility::Native,
        }
    }
}

/// The answer to an open request.
#[derive(Deserialize)]
pub(crate) struct OpenReply {
    pub(crate) export: String,
    size: u64,
    description: String,
    block: Option<[u32; 3]>,
    write: bool,
    flush: bool,
    pub(crate) zero: bool,
    fast_zero: bool,
    trim: bool,
    fua: u8,
    cache: u8,
    extents: bool,
    rotational: bool,
    multi_conn: bool,
}

impl OpenReply {
    pub(crate) fn fua(&self) -> PythonAbility {
        PythonAbility::of(self.fua)
    }

    pub(crate) fn cache(&self) -> PythonAbility {
        PythonAbility::of(self.cache)
    }

    /// The facts of a handle. `served`: it is for a server's client; `single`: there is one
    /// connection at a time.
    pub(crate) fn facts(&self, name: &str, served: bool, single: bool) -> Result<Facts> {
        if i64::try_from(self.size).is_err() {
            return Err(
                Error::new(Kind::Io, format!("{name}: get_size: {} bytes", self.size)).complete()
            );
        }
        let mut facts = Facts::new(name, self.size);
        let mut can = Can::empty();
        if self.write {
            // Zeroes are also written if a plugin reports only when called that it cannot zero.
            can |= Can::WRITE | Can::ZERO;
            can.set(Can::FAST_ZERO, self.fast_zero);
            can.set(Can::TRIM, self.trim);
            can.set(Can::FUA, self.fua() != PythonAbility::None);
        }
        can.set(Can::FLUSH, self.flush);
        can.set(Can::CACHE, self.cache() != PythonAbility::None);
        can.set(Can::MULTI_CONN, self.multi_conn && !single);
        if self.extents {
            can |= Can::EXTENTS;
            facts.contexts = vec![BASE_ALLOCATION.to_string()];
        }
        facts.can = can;
        facts.rotational = self.rotational;
        facts.description.clone_from(&self.description);
        (facts.block, facts.advertised) = self.block_sizes(name, served)?;
        // Unknown; this claims nothing.
        facts.allocation_unit = facts.block.minimum.max(1);
        Ok(facts)
    }

    /// The limits enforced here, and those to advertise.
    fn block_sizes(&self, name: &str, served: bool) -> Result<(BlockSizes, Option<BlockSizes>)> {
        let reported = match self.block {
            None | Some([0, 0, 0]) => return Ok((BlockSizes::default(), None)),
            Some([minimum, preferred, maximum]) => {
                BlockSizes::declared(minimum, preferred, maximum).ok_or_else(|| {
                    let text = format!("{name}: block_size: {minimum}, {preferred}, {maximum}");
                    Error::new(Kind::Io, format!("{text} are no block sizes")).complete()
                })?
            }
        };
        Ok((reported.enforced(served, self.size), Some(reported)))
    }
}

/// The extents of the range from `at` up to the disk's `end`, from offsets, lengths and types.
pub(crate) fn extents(answer: &[u8], at: u64, end: u64) -> Result<Extents, &'static str> {
    let mut found = Extents::new();
    let mut next = None;
    for extent in answer.chunks_exact(EXTENT) {
        let number = |index: usize| {
            extent[index * 8..]
                .iter()
                .take(8)
                .rev()
                .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
        };
        let offset = number(0);
        let len = number(1);
        let state = number(2) & (HOLE | ZERO);
        if next.is_some_and(|next| next != offset) {
            return Err("the extents have gaps or are not in ascending order");
        }
        let stop = offset.checked_add(len).ok_or("an extent ends beyond 2^64")?;
        if len == 0 {
            continue;
        }
        if found.is_empty() && offset > at {
            return Err("the first extent begins behind the start of the request");
        }
        next = Some(stop);
        let from = offset.max(at);
        let to = stop.min(end);
        if from < to {
            found.push(to - from, state);
        }
    }
    if found.is_empty() { Err("no extent covers the request") } else { Ok(found) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn packed(extents: &[[u64; 3]]) -> Vec<u8> {
        extents.iter().flatten().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn extents_are_clipped_joined_and_checked() {
        let all =
            [[0, 1 << 20, 0], [1 << 20, 9 << 20, 3], [10 << 20, 0, 1], [10 << 20, 9 << 20, 1]];
        let found = extents(&packed(&all), 4096, 12 << 20).unwrap();
        let runs: Vec<_> = found.runs().iter().map(|run| (run.len, run.state)).collect();
        assert_eq!(runs, [((1 << 20) - 4096, 0), (9 << 20, 3), (2 << 20, 1)]);
        for bad in [&[][..], &[[0, 1, 0], [2, 1, 0]], &[[5000, 1, 0]], &[[1, u64::MAX, 0]]] {
            assert!(extents(&packed(bad), 4096, 8192).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn block_sizes_bind_this_program_and_are_advertised_to_clients() {
        let mut answers: OpenReply = serde_json::from_str(
            r#"{"export":"","size":1048576,"description":"","block":[512,4096,1048576],
            "write":true,"flush":true,"zero":false,"fast_zero":true,"trim":false,"fua":1,"cache":2,
            "extents":true,"rotational":false,"multi_conn":true}"#,
        )
        .unwrap();
        let own = answers.facts("x", false, false).unwrap();
        assert_eq!((own.block.minimum, own.block.maximum), (512, 1 << 20));
        let served = answers.facts("x", true, true).unwrap();
        assert_eq!((served.block.minimum, served.advertised.unwrap().minimum), (1, 512));
        assert!(own.can.contains(Can::MULTI_CONN) && !served.can.contains(Can::MULTI_CONN));
        assert!(own.can.contains(Can::ZERO | Can::FAST_ZERO | Can::FUA | Can::CACHE));
        answers.block = Some([3, 4096, 1 << 20]);
        assert!(answers.facts("x", true, true).is_err());
        answers.size = u64::MAX;
        assert!(answers.facts("x", true, true).is_err());
    }
}
