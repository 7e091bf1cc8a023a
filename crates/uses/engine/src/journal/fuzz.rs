//! A fuzz target: any bytes as the contents of a journal. The checksums are made right, or nothing
//! behind them would be reached.

use super::format::{
    CHECK, HEADER, JournalContent, JournalIdentity, MAGIC, RECORD, check, recover,
};

/// Decodes a journal, and asks for all that it records: no panic, and what is recorded is in order.
pub fn journal(data: &[u8]) {
    let _ = JournalIdentity::decode(data);
    let (start, records) = data.split_at(data.len().min(HEADER - CHECK - MAGIC.len()));
    let mut bytes = [&MAGIC[..], start].concat();
    bytes.resize(HEADER - CHECK, 0);
    let sum = blake3::hash(&bytes);
    bytes.extend(&sum.as_bytes()[..CHECK]);
    let Ok((id, identity)) = JournalIdentity::decode(&bytes) else { return };
    assert!(identity.differs(&identity).is_none(), "a journal is not its own");
    for (body, index) in records.chunks_exact(RECORD - CHECK).zip(0..) {
        bytes.extend(body);
        bytes.extend(check(body, &id, index));
    }
    let records = recover(&bytes, &id);
    let recorded = JournalContent::of(&records, identity.discards);
    assert!(recorded.segments.is_sorted_by(|one, next| one.1 < next.0), "not ascending");
    for &(start, end) in &recorded.segments {
        assert!(start <= end);
        for segment in [start, end, end.saturating_add(1)] {
            let (reach, next) = (recorded.reach(segment), recorded.next(segment));
            assert!(reach.is_none_or(|reach| reach > segment));
            assert!(next.is_none_or(|next| next > segment));
        }
    }
}

#[cfg(test)]
mod tests {
    use blockhaul_testkit::mutate::mutated;
    use blockhaul_testkit::rng::{Rng, seed};

    /// `BLOCKHAUL_SEED` repeats a failure.
    #[test]
    fn any_bytes_are_a_journal_or_none() {
        let seed = seed();
        println!("BLOCKHAUL_SEED={seed}");
        let mut rng = Rng::new(seed);
        // The header, two texts of ten bytes in it, and 40 records.
        let mut start = vec![0; 16 + 5 * 8 + 32];
        start.extend([[0, 10].as_slice(), b"disk.raw 5", &[0, 10], b"nbd://host"].concat());
        start.resize(super::HEADER - super::CHECK - super::MAGIC.len(), 0);
        for number in 0..40_u32 {
            start.extend(u64::from(number * 3).to_be_bytes());
            start.extend((number / 4).to_be_bytes());
            start.extend((number % 3).to_be_bytes());
        }
        super::journal(&start);
        for _ in 0..300 {
            super::journal(&mutated(&mut rng, &start));
        }
    }
}
