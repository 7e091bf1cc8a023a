//! A fuzz target: records on their way from one side to the other, changed as the input says.

use std::io::IoSlice;

use blockhaul_io::{RECORD_PLAIN_MAX, SEALED_MAX, StreamOpener, StreamSealer};

use super::{PeerRole, TlsCipherSuite, halves};

/// Most bytes that are sealed.
const TOTAL_MAX: usize = 64 << 10;
/// The suites.
const SUITES: [&str; 3] =
    ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"];

/// Takes bytes from the front of the input; zeroes behind its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let (byte, rest) = self.0.split_first().map_or((0, self.0), |(byte, rest)| (*byte, rest));
        self.0 = rest;
        byte
    }

    /// A number below `end`, which is not 0.
    fn below(&mut self, end: usize) -> usize {
        (usize::from(self.byte()) << 8 | usize::from(self.byte())) % end
    }
}

/// Seals some messages, changes the records, and opens them: what is opened is the beginning of what was
/// sealed, and all of it if nothing was changed.
///
/// # Panics
/// If this does not hold.
pub fn records(data: &[u8]) {
    let mut input = Input(data);
    let suite = TlsCipherSuite::named(SUITES[usize::from(input.byte()) % SUITES.len()])
        .expect("it is known");
    let limit = u64::from(input.byte()) + 1;
    let secret = |byte| vec![byte; (suite.digest)().size()];
    let (_, mut sealer) =
        halves(suite, PeerRole::Client, secret(1), secret(2), limit).expect("the keys are valid");
    let (mut opener, _) =
        halves(suite, PeerRole::Server, secret(2), secret(1), limit).expect("the keys are valid");
    let (mut due, mut records) = (Vec::new(), Vec::new());
    let mut sealed = vec![0; SEALED_MAX];
    for number in 0..=input.byte() % 8 {
        let part = vec![number; input.below(40_000)];
        if due.len() + part.len() > TOTAL_MAX || part.is_empty() {
            break;
        }
        let cut = input.below(part.len());
        let slices = [IoSlice::new(&part[..cut]), IoSlice::new(&part[cut..])];
        let len = sealer.seal(&slices, &mut sealed).expect("sealing has no reason to fail");
        records.extend_from_slice(&sealed[..len]);
        due.extend(part);
    }
    let before = records.clone();
    while !input.0.is_empty() && !records.is_empty() {
        let at = input.below(records.len());
        match input.byte() % 5 {
            0 => records[at] ^= input.byte(),
            1 => records.truncate(at),
            2 => drop(records.drain(at..(at + input.below(100)).min(records.len()))),
            3 => records.insert(at, input.byte()),
            // A piece is repeated.
            _ if records.len() < 2 * TOTAL_MAX => {
                let from = input.below(records.len());
                let piece = records[from..(from + input.below(20_000)).min(records.len())].to_vec();
                records.splice(at..at, piece);
            }
            _ => return,
        }
    }
    let unchanged = records == before;
    let mut plain = vec![0; RECORD_PLAIN_MAX];
    let first = input.below(RECORD_PLAIN_MAX);
    let (mut rest, mut all) = (&mut records[..], Vec::new());
    loop {
        let (into, beyond) = plain.split_at_mut(first);
        let Ok(opened) = opener.open(rest, into, beyond) else {
            assert!(!unchanged, "unchanged records are refused");
            break;
        };
        assert!(opened.used <= rest.len());
        all.extend_from_slice(&plain[..opened.len]);
        if opened.used == 0 || opened.end {
            break;
        }
        rest = &mut rest[opened.used..];
    }
    assert!(due.starts_with(&all), "{} other bytes were opened", all.len());
    assert!(!unchanged || all == due, "{} of {} bytes were opened", all.len(), due.len());
}

#[cfg(test)]
mod tests {
    use blockhaul_testkit::rng::{Rng, seed};

    /// `BLOCKHAUL_SEED` repeats a failure.
    #[test]
    fn changed_records_open_to_a_beginning() {
        let seed = seed();
        println!("BLOCKHAUL_SEED={seed}");
        let mut rng = Rng::new(seed);
        for _ in 0..300 {
            let len = rng.between(1, 60);
            let data: Vec<u8> = (0..len).map(|_| rng.number() as u8).collect();
            super::records(&data);
        }
    }
}
