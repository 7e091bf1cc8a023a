//! Records that a guest writes to its disk one after another, and what of them a copy of the disk has.
//!
//! Sector 0 has the number of the newest record. It is written when that record is durable, so that a copy that is as
//! after a power loss has every record up to this number.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::super::guest::Shell;

/// Bytes of a record: a sector with number and checksum, and random data.
const RECORD: u64 = 16 << 10;
const SECTOR: usize = 512;

/// Writes records until `/tmp/stop` exists, and lists those that are durable.
const WRITER: &str = "number=0; : > /tmp/durable; while [ ! -e /tmp/stop ]; do number=$((number + 1)); \
    dd if=/dev/urandom of=/tmp/data bs=15872 count=1 iflag=fullblock; set -- $(crc32 < /tmp/data); \
    printf \"record %d %s \" $number $1 > /tmp/head; dd if=/tmp/head of=/tmp/sector bs=512 conv=sync; \
    cat /tmp/sector /tmp/data > /tmp/record; \
    dd if=/tmp/record of=/dev/vda bs=16k seek=$number conv=notrunc,fsync && \
    dd if=/tmp/sector of=/dev/vda bs=512 conv=notrunc,fsync && echo $1 >> /tmp/durable; \
    usleep 300000; done";

/// Large random data beyond the records, which each call replaces.
const BULK: &str = "dd if=/dev/urandom of=/dev/vda bs=1M seek=256 count=96 conv=notrunc,fsync";
const BULK_DIGEST: &str = "bs=1M skip=256 count=96 2> /dev/null | md5sum";

/// What a guest has written.
pub struct Records {
    guest: Shell,
    /// Checksums of the records that the guest reports as durable, the first one first.
    sums: Vec<u32>,
    /// Digest of the bulk.
    bulk: String,
}

/// What a guest had written when a backup began.
pub struct Expectation {
    /// Records that were durable.
    durable: usize,
    bulk: String,
}

impl Records {
    /// The guest begins to write.
    pub fn begin(mut guest: Shell) -> Records {
        guest.run(&format!("sh -c '({WRITER}) > /dev/null 2>&1 &'"));
        let mut records = Records { guest, sums: Vec::new(), bulk: String::new() };
        records.write_bulk();
        records
    }

    /// The guest writes 96 MiB more, over those of the last call.
    pub fn write_bulk(&mut self) {
        self.guest.run(BULK);
        let printed = self.guest.run(&format!("dd if=/dev/vda {BULK_DIGEST}"));
        self.bulk = digest(&printed);
    }

    /// What a backup that begins now has at least.
    pub fn expect(&mut self) -> Expectation {
        self.ask();
        Expectation { durable: self.sums.len(), bulk: self.bulk.clone() }
    }

    /// Asks the guest for the checksums of new records.
    fn ask(&mut self) {
        let next = self.sums.len() + 1;
        let printed = self.guest.run(&format!("tail -n +{next} /tmp/durable"));
        // The last line may not be complete.
        let lines = printed.rsplit_once('\n').map_or("", |(lines, _)| lines);
        self.sums.extend(lines.split_whitespace().map(|sum| number(sum).unwrap()));
    }

    /// Checks a copy of the disk: every record that was durable when the backup began is there, no record is
    /// missing or damaged before the newest one, and nothing is behind it but the record that was being written.
    /// Gives the number of records.
    #[track_caller]
    pub fn check(&mut self, copy: &Path, expected: &Expectation) -> usize {
        self.ask();
        let file = File::open(copy).unwrap();
        let (newest, newest_sum) = header(&file, 0).expect("sector 0 has the number of a record");
        let durable = expected.durable;
        assert!(durable <= newest && newest <= self.sums.len() + 1, "{newest} of {durable}");
        for number in 1..=newest {
            // The guest may not have listed the newest one yet.
            let sum = self.sums.get(number - 1).copied().unwrap_or(newest_sum);
            let at = number as u64 * RECORD;
            assert_eq!(header(&file, at), Some((number, sum)), "record {number}");
            assert_eq!(checksum(&read(&file, at, RECORD)[SECTOR..]), sum, "record {number}");
        }
        let behind = read(&file, (newest as u64 + 2) * RECORD, 1 << 20);
        assert!(behind.iter().all(|byte| *byte == 0), "data behind record {newest}");
        newest
    }

    /// The shell line that prints the digest of the bulk of a copy, and the digest.
    pub fn bulk_check(copy: &str, expected: &Expectation) -> (String, String) {
        (format!("dd if={copy} {BULK_DIGEST}"), expected.bulk.clone())
    }

    /// The guest stops writing; gives the number of its records.
    pub fn end(&mut self) -> usize {
        self.guest.run("touch /tmp/stop; sleep 2");
        self.ask();
        self.sums.len()
    }
}

/// The digest in the last line, behind the reports of dd.
fn digest(text: &str) -> String {
    text.lines().last().unwrap().split_whitespace().next().unwrap().into()
}

fn read(file: &File, at: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

/// Number and checksum in the sector at `at`.
fn header(file: &File, at: u64) -> Option<(usize, u32)> {
    let sector = read(file, at, SECTOR as u64);
    let text = String::from_utf8(sector).ok()?;
    let mut words = text.strip_prefix("record ")?.split(' ');
    Some((words.next()?.parse().ok()?, number(words.next()?)?))
}

/// The number that `crc32` has printed.
fn number(text: &str) -> Option<u32> {
    u32::from_str_radix(text, 16).ok()
}

/// The checksum of `crc32`.
fn checksum(bytes: &[u8]) -> u32 {
    let shift = |rest: u32| (rest >> 1) ^ if rest & 1 == 1 { 0xEDB8_8320 } else { 0 };
    let table: Vec<u32> = (0..256).map(|byte| (0..8).fold(byte, |rest, _| shift(rest))).collect();
    let step = |sum: u32, byte: &u8| (sum >> 8) ^ table[(sum as u8 ^ byte) as usize];
    !bytes.iter().fold(!0, step)
}

#[test]
fn checksums_are_those_of_crc32() {
    assert_eq!((checksum(b""), checksum(b"123456789")), (0, 0xCBF4_3926));
}
