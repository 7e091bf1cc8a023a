//! Our record layer next to OpenSSL's, with random records, renewed keys, and streams that somebody
//! has changed: both read the same, and refuse the same. `BLOCKHAUL_SEED` repeats a failure.

use std::io::IoSlice;

use blockhaul_io::{
    RECORD_MAX, RECORD_PLAIN_MAX, SEAL_MAX, SEALED_MAX, StreamOpener, StreamSealer,
};
use blockhaul_testkit::rng::Rng;

use super::tests::shaken;
use super::*;
use crate::handshake::TlsSession;

/// Lengths at the edges of records.
const EDGES: [usize; 8] =
    [0, 1, 2, PLAIN_MAX - 1, PLAIN_MAX, PLAIN_MAX + 1, 2 * PLAIN_MAX, 3 * PLAIN_MAX - 1];

fn rng() -> Rng {
    let seed = blockhaul_testkit::rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    Rng::new(seed)
}

/// Some bytes in parts of any length.
fn parts(rng: &mut Rng) -> Vec<Vec<u8>> {
    let mut left = SEAL_MAX;
    let mut parts = Vec::new();
    for _ in 0..rng.between(1, 6) {
        let len = match rng.below(3) {
            0 => *rng.pick(&EDGES),
            1 => rng.below(300) as usize,
            _ => rng.below(40_000) as usize,
        };
        let len = len.min(left);
        left -= len;
        let mut part = vec![0; len];
        rng.fill(&mut part);
        parts.push(part);
    }
    parts
}

fn sealed(sealer: &mut dyn StreamSealer, parts: &[Vec<u8>]) -> Vec<u8> {
    let slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut sealed = vec![0; SEALED_MAX];
    let len = sealer.seal(&slices, &mut sealed).unwrap();
    sealed.truncate(len);
    sealed
}

/// What a stream holds: its bytes, whether it ends properly, and whether it is refused.
#[derive(Debug, Default, PartialEq, Eq)]
struct StreamContents {
    bytes: Vec<u8>,
    end: bool,
    refused: bool,
}

/// Opens all whole records, each into a buffer with some bytes `first` and the rest beyond.
fn read(opener: &mut dyn StreamOpener, stream: &[u8], rng: &mut Rng) -> StreamContents {
    let mut stream = stream.to_vec();
    let mut rest = &mut stream[..];
    let mut buffer = vec![0; RECORD_PLAIN_MAX];
    let mut read = StreamContents::default();
    loop {
        let first = rng.below(RECORD_PLAIN_MAX as u64 + 1) as usize;
        let (plain, beyond) = buffer.split_at_mut(first);
        let Ok(opened) = opener.open(rest, plain, beyond) else {
            return StreamContents { refused: true, ..read };
        };
        if opened.used == 0 {
            return read;
        }
        read.bytes.extend_from_slice(&buffer[..opened.len]);
        if opened.end {
            return StreamContents { end: true, ..read };
        }
        rest = &mut rest[opened.used..];
    }
}

/// The records of a stream.
fn records(mut stream: &[u8]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    while let [_, _, _, high, low, ..] = *stream {
        let (record, rest) = stream.split_at(HEADER + usize::from(u16::from_be_bytes([high, low])));
        records.push(record.to_vec());
        stream = rest;
    }
    records
}

/// Asks the peer for new keys, and renews ours.
fn asking(sealer: &mut RecordSealer) -> Vec<u8> {
    let mut record = vec![0; SEALED_MAX];
    let len = sealer.message(HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 1], &mut record).unwrap();
    sealer.keys.update().unwrap();
    record.truncate(len);
    record
}

#[test]
fn random_records_and_renewed_keys_are_read_by_both() {
    let mut rng = rng();
    let mut renewals = 0;
    for round in 0..60 {
        let (server, client) = shaken(false);
        let limit = *rng.pick(&[1, 3, 50, KEY_RECORDS]);
        let (mut ours, mut theirs): (Halves, TlsSession) = if round % 2 == 0 {
            (client.finish_halves(limit), server.finish_wrapped())
        } else {
            (server.finish_halves(limit), client.finish_wrapped())
        };
        let first = ours.0.keys.secret.clone();
        for _ in 0..rng.between(1, 30) {
            let sent = parts(&mut rng);
            let due = StreamContents { bytes: sent.concat(), ..StreamContents::default() };
            match rng.below(5) {
                0 => {
                    let record = asking(&mut ours.1);
                    assert_eq!(
                        read(&mut *theirs.opener, &record, &mut rng),
                        StreamContents::default()
                    );
                }
                1 | 2 => {
                    let stream = sealed(&mut ours.1, &sent);
                    assert_eq!(read(&mut *theirs.opener, &stream, &mut rng), due);
                }
                _ => {
                    let stream = sealed(&mut *theirs.sealer, &sent);
                    assert_eq!(read(&mut ours.0, &stream, &mut rng), due);
                }
            }
        }
        // OpenSSL has renewed its keys because we have asked it to.
        renewals += u64::from(ours.0.keys.secret != first);
    }
    assert!(renewals > 10, "{renewals}");
}

type Halves = (RecordOpener, RecordSealer);

/// What somebody does to the records of a stream.
#[derive(Debug, Clone, Copy)]
enum RecordChange {
    Drop(usize),
    Repeat(usize),
    Swap(usize, usize),
    /// This record moves to the end.
    Delay(usize),
    /// The stream ends within this record, after so many bytes.
    Cut(usize, usize),
    /// This byte of a record has another bit.
    Flip(usize, usize, u8),
    /// A record loses its last byte, and its header says so.
    Shorten(usize),
    /// Two records become one with both lengths.
    Join(usize),
}

impl RecordChange {
    /// A change of records with these lengths.
    fn any(rng: &mut Rng, lengths: &[usize]) -> RecordChange {
        let one = rng.below(lengths.len() as u64) as usize;
        let other = rng.below(lengths.len() as u64) as usize;
        let byte = rng.below(lengths[one] as u64) as usize;
        match rng.below(8) {
            0 => RecordChange::Drop(one),
            1 => RecordChange::Repeat(one),
            2 => RecordChange::Swap(one, other),
            3 => RecordChange::Delay(one),
            4 => RecordChange::Cut(one, byte),
            // Bytes of the version are not looked at, or are, as the reader likes.
            5 if !(1..3).contains(&byte) => RecordChange::Flip(one, byte, 1 << rng.below(8)),
            6 => RecordChange::Shorten(one),
            _ => RecordChange::Join(one),
        }
    }

    fn apply(self, mut records: Vec<Vec<u8>>) -> Vec<u8> {
        match self {
            RecordChange::Drop(at) => drop(records.remove(at)),
            RecordChange::Repeat(at) => records.insert(at, records[at].clone()),
            RecordChange::Swap(one, other) => records.swap(one, other),
            RecordChange::Delay(at) => {
                let late = records.remove(at);
                records.push(late);
            }
            RecordChange::Cut(at, byte) => {
                records.truncate(at + 1);
                records[at].truncate(byte);
            }
            RecordChange::Flip(at, byte, bit) => {
                records[at][byte] ^= bit;
                if (3..HEADER).contains(&byte) {
                    // A reader that waits for the end of a longer record gets it. Ours refuses one that is
                    // too long for TLS 1.3 by its header.
                    records.push(vec![0; RECORD_MAX]);
                }
            }
            RecordChange::Shorten(at) => {
                records[at].pop();
                set_len(&mut records[at]);
            }
            RecordChange::Join(at) => {
                if at + 1 < records.len() && records[at].len() + records[at + 1].len() < PLAIN_MAX {
                    let next = records.remove(at + 1);
                    records[at].extend_from_slice(&next);
                    set_len(&mut records[at]);
                }
            }
        }
        records.concat()
    }
}

fn set_len(record: &mut [u8]) {
    let body = u16::try_from(record.len() - HEADER).unwrap();
    record[3..HEADER].copy_from_slice(&body.to_be_bytes());
}

#[test]
fn changed_streams_are_read_alike_and_never_as_something_else() {
    let refused = changed_streams(rng(), 250);
    assert!(refused > 80, "{refused}: too few changes are noticed");
}

/// The length of the last record but one becomes larger than that of a record of TLS 1.3, and than the rest.
#[test]
fn a_changed_length_at_the_end_of_a_stream_is_refused_by_both() {
    assert_eq!(changed_streams(Rng::new(16_520_390_528_169_499_162), 1), 1);
}

/// Changes streams at random; returns how many of them were refused.
fn changed_streams(mut rng: Rng, rounds: u32) -> u64 {
    let mut refused = 0;
    for round in 0..rounds {
        let sent: Vec<_> = (0..rng.between(2, 6)).map(|_| parts(&mut rng)).collect();
        let limit = *rng.pick(&[2, KEY_RECORDS]);
        // The same records for a reader of each kind: the lengths are the same.
        let streams = [true, false].map(|is_ours| {
            let (server, client) = shaken(false);
            let mut sealer = client.finish_halves(limit).1;
            let records: Vec<_> =
                sent.iter().flat_map(|parts| records(&sealed(&mut sealer, parts))).collect();
            let opener: Box<dyn StreamOpener> = if is_ours {
                Box::new(server.finish_halves(limit).0)
            } else {
                server.finish_wrapped().opener
            };
            (records, opener)
        });
        let lengths: Vec<_> = streams[0].0.iter().map(Vec::len).collect();
        if lengths.is_empty() {
            continue;
        }
        let change = RecordChange::any(&mut rng, &lengths);
        let due = sent.iter().flatten().flatten().copied().collect::<Vec<u8>>();
        let [ours, theirs] = streams
            .map(|(records, mut opener)| read(&mut *opener, &change.apply(records), &mut rng));
        assert!(due.starts_with(&ours.bytes), "{change:?}: other bytes");
        assert!(
            ours == theirs,
            "round {round}: {change:?} of {lengths:?}: {} {} bytes, {} {}",
            ours.bytes.len(),
            theirs.bytes.len(),
            ours.refused,
            theirs.refused
        );
        refused += u64::from(ours.refused);
    }
    refused
}
