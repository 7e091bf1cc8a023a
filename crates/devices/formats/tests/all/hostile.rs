//! Images that nobody's program writes: each is refused with a clear error, in bounded time and
//! memory.

use std::path::PathBuf;

use blockhaul_testkit::tools::ScratchDir;

use crate::common::{error, read_all, write};

const CLUSTER: usize = 64 << 10;

/// An image of version 3 with clusters of 64 KiB: header, L1 table, L2 table, and one cluster of
/// data with ones, in this order.
pub struct Image(pub Vec<u8>);

/// Offsets of tables in it.
pub const L1: usize = CLUSTER;
pub const L2: usize = 2 * CLUSTER;
pub const DATA: usize = 3 * CLUSTER;
/// Size of the disk.
pub const SIZE: u64 = 10 * CLUSTER as u64;

impl Image {
    pub fn new() -> Image {
        let mut image = Image(vec![0; 4 * CLUSTER]);
        image.0[..4].copy_from_slice(b"QFI\xfb");
        image.word(4, 3).word(20, 16).long(24, SIZE).word(36, 1).long(40, L1 as u64);
        image.long(48, 0).word(96, 4).word(100, 104);
        image.long(L1, L2 as u64 | 1 << 63).long(L2, DATA as u64 | 1 << 63);
        image.0[DATA..].fill(1);
        image
    }

    pub fn word(&mut self, at: usize, value: u32) -> &mut Image {
        self.0[at..at + 4].copy_from_slice(&value.to_be_bytes());
        self
    }

    pub fn long(&mut self, at: usize, value: u64) -> &mut Image {
        self.0[at..at + 8].copy_from_slice(&value.to_be_bytes());
        self
    }

    /// Appends a header extension after the header, which has no other.
    fn extension(&mut self, kind: u32, data: &[u8]) -> &mut Image {
        self.word(104, kind).word(108, data.len() as u32);
        self.0[112..112 + data.len()].copy_from_slice(data);
        self
    }
}

/// A directory with the image; the description of the device.
fn stored(image: &Image) -> (ScratchDir, String) {
    let scratch = ScratchDir::new().unwrap();
    let path: PathBuf = scratch.file("image");
    write(&path, &image.0);
    let spec = format!("qcow2:{}", path.display());
    (scratch, spec)
}

/// The error for an image that was changed.
fn refused(change: impl FnOnce(&mut Image)) -> String {
    refused_with("", change)
}

fn refused_with(options: &str, change: impl FnOnce(&mut Image)) -> String {
    let mut image = Image::new();
    change(&mut image);
    let (_scratch, spec) = stored(&image);
    error(&(spec + options))
}

#[track_caller]
fn check(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    assert!(text.len() < 500, "{text}");
}

#[test]
fn the_image_is_in_order_before_it_is_changed() {
    let (_scratch, spec) = stored(&Image::new());
    let mut wanted = vec![0; SIZE as usize];
    wanted[..CLUSTER].fill(1);
    assert!(read_all(&spec).unwrap() == wanted);
    // Marked as dirty, with lazy refcounts, and as corrupt.
    for (incompatible, compatible) in [(1, 1), (2, 0), (3, 1)] {
        let mut image = Image::new();
        image.long(72, incompatible).long(80, compatible);
        let (_scratch, spec) = stored(&image);
        assert!(read_all(&spec).unwrap() == wanted);
    }
}

#[test]
fn headers_out_of_range_are_refused() {
    check(&refused(|image| image.0.truncate(60)), &["ends within its header"]);
    check(&refused(|image| image.0.clear()), &["does not begin as a qcow2 image"]);
    check(&refused(|image| image.0[0] = 0), &["does not begin as a qcow2 image", "file:PATH"]);
    check(&refused(|image| drop(image.word(4, 4))), &["version 4"]);
    for bits in [0, 8, 22, 64, u32::MAX] {
        check(&refused(|image| drop(image.word(20, bits))), &["cluster size", "damaged"]);
    }
    check(&refused(|image| drop(image.word(32, 1))), &["AES", "encrypted"]);
    check(&refused(|image| drop(image.word(32, 2))), &["LUKS", "qemu-nbd"]);
    check(&refused(|image| drop(image.word(96, 7))), &["refcounts"]);
    for len in [0, 96, 103, 105, 1 << 20, u32::MAX] {
        check(&refused(|image| drop(image.word(100, len))), &["header length"]);
    }
    check(&refused(|image| drop(image.long(24, 1 << 63))), &["disk size"]);
}

fn drop(_image: &mut Image) {}

#[test]
fn unknown_features_have_the_names_that_the_image_gives_them() {
    let mut table = vec![0; 48];
    table[1] = 9;
    table[2..9].copy_from_slice(b"sharing");
    let text =
        refused(|image| drop(image.long(72, 1 << 9 | 1 << 40).extension(0x6803_f857, &table)));
    check(&text, &["\"sharing\" (bit 9)", "bit 40", "qemu-nbd"]);
}

#[test]
fn features_that_contradict_the_header_are_refused() {
    check(&refused(|image| drop(image.long(72, 1 << 3))), &["compression type"]);
    let text = refused(|image| {
        image.word(100, 112).0[104] = 9;
        image.long(72, 1 << 3);
    });
    check(&text, &["compression type 9"]);
    let text = refused(|image| drop(image.long(72, 1 << 4).word(20, 12)));
    check(&text, &["extended L2 entries", "4096"]);
    check(&refused(|image| drop(image.long(72, 1 << 2))), &["data-file=DEVICE"]);
}

#[test]
fn a_huge_disk_in_a_short_file_is_refused_before_memory_is_taken() {
    let text = refused(|image| {
        // 2 EiB, in 200 bytes.
        image.long(24, 2 << 60).word(20, 21).word(36, 4 << 20).long(40, 2 << 20).0.truncate(200);
    });
    check(&text, &["L1 table", "exceeds the 200 bytes of the file"]);
    let text = refused(|image| {
        drop(image.long(24, 2 << 60).word(20, 21).word(36, u32::MAX).long(40, 2 << 20));
    });
    check(&text, &["L1 table", "at most 32 MiB"]);
    check(
        &refused(|image| drop(image.long(24, 1 << 50))),
        &["needs an L1 table of 2097152 entries"],
    );
    check(&refused(|image| drop(image.word(56, u32::MAX))), &["refcount table"]);
}

#[test]
fn tables_outside_the_file_or_between_clusters_are_refused() {
    for offset in [1, L1 as u64 + 512, u64::MAX] {
        check(&refused(|image| drop(image.long(40, offset))), &["L1 table", "multiple"]);
    }
    let far = (u64::MAX << 16) & !(1 << 63);
    check(&refused(|image| drop(image.long(40, far))), &["L1 table", "exceeds"]);
    for entry in [DATA as u64 + 512, 1 << 40, 1, 1 << 60, 4 * CLUSTER as u64] {
        check(&refused(|image| drop(image.long(L1, entry))), &["L1 entry 0", "damaged"]);
    }
    for entry in [DATA as u64 + 512, 1 << 40, 2, 1 << 60, 4 * CLUSTER as u64] {
        let text = refused(|image| drop(image.long(L2 + 8, entry)));
        check(&text, &["cluster at offset 65536", "damaged"]);
    }
}

#[test]
fn an_l2_table_may_be_anything_and_is_still_bounded() {
    // The L1 table as its own L2 table, the header as one, and data.
    for (table, fine) in [(L1 as u64, true), (1 << 63, true), (DATA as u64, false)] {
        let mut image = Image::new();
        image.long(L1, table);
        let (_scratch, spec) = stored(&image);
        match read_all(&spec) {
            Ok(bytes) => assert!(fine && bytes.len() as u64 == SIZE, "{table:#x}"),
            Err(error) => {
                check(&error.to_string(), &["damaged", if fine { "never" } else { "L2" }])
            }
        }
    }
}

#[test]
fn compressed_bombs_end_at_a_cluster() {
    let packed = miniz(&vec![7; 16 << 20]);
    let mut image = Image::new();
    image.0.extend_from_slice(&packed);
    let sectors = packed.len() as u64 / 512 + 1;
    let end = 4 * CLUSTER as u64;
    image.long(L2, 1 << 62 | sectors << 54 | end);
    let (_scratch, spec) = stored(&image);
    assert!(read_all(&spec).unwrap()[..CLUSTER] == vec![7; CLUSTER]);
    // Data that is none, and data beyond the end.
    let text = refused(|image| drop(image.long(L2, 1 << 62 | 3 << 54 | DATA as u64)));
    check(&text, &["cannot unpack", "offset 0 of the disk"]);
    let text = refused(|image| drop(image.long(L2, 1 << 62 | end)));
    check(&text, &["compressed data beyond the end"]);
}

/// Zeroes as a stored deflate stream would be too long: QEMU's zlib is not here, so a fixed block
/// of repetitions is written by hand.
fn miniz(content: &[u8]) -> Vec<u8> {
    let mut bits = Bits::default();
    bits.put(1, 1);
    bits.put(1, 2);
    bits.literal(content[0]);
    let mut left = content.len() - 1;
    while left >= 258 {
        // Length 258 is code 285, 8 bits; distance 1 is code 0, 5 bits.
        bits.code(0b1100_0101, 8);
        bits.code(0, 5);
        left -= 258;
    }
    (0..left).for_each(|_| bits.literal(content[0]));
    bits.code(0, 7);
    bits.bytes
}

/// Writes bits as deflate orders them (RFC 1951 3.1.1).
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    used: u32,
}

impl Bits {
    fn put(&mut self, value: u32, count: u32) {
        for bit in 0..count {
            if self.used.is_multiple_of(8) {
                self.bytes.push(0);
            }
            *self.bytes.last_mut().unwrap() |= ((value >> bit & 1) as u8) << (self.used % 8);
            self.used += 1;
        }
    }

    /// A Huffman code: its first bit first.
    fn code(&mut self, code: u32, count: u32) {
        (0..count).rev().for_each(|bit| self.put(code >> bit & 1, 1));
    }

    /// A byte below 144 in a block with fixed codes.
    fn literal(&mut self, byte: u8) {
        self.code(0x30 + u32::from(byte), 8);
    }
}

#[test]
fn names_and_extensions_beyond_the_first_cluster_are_refused() {
    let text = refused(|image| drop(image.long(8, 200).word(16, 1024)));
    check(&text, &["name of the backing file", "1023"]);
    let text = refused(|image| drop(image.long(8, CLUSTER as u64 - 4).word(16, 5)));
    check(&text, &["name of the backing file"]);
    check(&refused(|image| drop(image.long(8, u64::MAX).word(16, 1))), &["name of the backing"]);
    let text = refused(|image| drop(image.word(104, 0xe279_2aca).word(108, u32::MAX)));
    check(&text, &["extension 0xe2792aca at offset 104"]);
    let text = refused_with("?names=allow", |image| {
        image.long(8, 200).word(16, 3).0[200..203].copy_from_slice(&[0xff, 0xfe, 0]);
    });
    check(&text, &["not UTF-8", "backing=DEVICE"]);
}

#[test]
fn snapshots_are_searched_within_bounds() {
    let snapshot = |change: fn(&mut Image)| refused_with("?snapshot=a", change);
    check(&snapshot(|_| {}), &["no snapshot \"a\"", "has none"]);
    check(&snapshot(|image| drop(image.word(60, u32::MAX).long(64, L2 as u64))), &["snapshots"]);
    check(&snapshot(|image| drop(image.word(60, 1).long(64, L2 as u64 + 8))), &["snapshot table"]);
    check(&snapshot(|image| drop(image.word(60, 1).long(64, 1 << 40))), &["snapshot table"]);
    // Each entry of zeroes has 40 bytes; they exceed the file.
    check(&snapshot(|image| drop(image.word(60, 65536).long(64, L2 as u64))), &["snapshot"]);
    let text = snapshot(|image| {
        image.word(60, 1).long(64, L2 as u64).word(L2 + 36, u32::MAX);
    });
    check(&text, &["snapshot table", "exceeds"]);
    let text = snapshot(|image| {
        image.word(60, 1).long(64, L2 as u64).long(L2, 1 << 50).word(L2 + 8, 1);
        image.word(L2 + 12, 1).word(L2 + 36, 0).0[L2 + 40] = b'a';
    });
    check(&text, &["L1 table", "exceeds"]);
}

#[test]
fn damaged_bitmaps_are_left_out() {
    let directory = |count: u32, len: u64, offset: u64| {
        let mut data = count.to_be_bytes().to_vec();
        data.extend_from_slice(&[0; 4]);
        data.extend_from_slice(&len.to_be_bytes());
        data.extend_from_slice(&offset.to_be_bytes());
        data
    };
    let l2 = L2 as u64;
    for (count, len, offset) in [
        (1, u64::MAX, l2),
        (u32::MAX, 64, l2),
        (2, 24, l2),
        (1, 64, l2 + 1),
        (1, 64, 1 << 40),
        (3, 65536, l2),
    ] {
        let mut image = Image::new();
        image.long(88, 1).extension(0x2385_2875, &directory(count, len, offset));
        let (_scratch, spec) = stored(&image);
        assert_eq!(crate::common::facts(&spec).contexts.len(), 2, "{count} {len} {offset}");
    }
}
