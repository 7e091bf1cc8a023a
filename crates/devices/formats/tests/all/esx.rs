//! Extents of ESX, which QEMU reads and does not make: written by hand, and read by both.

use crate::common::{Qemu, error, read_all, write};

const SECTOR: usize = 512;

/// An extent that is filled sector by sector.
struct Extent(Vec<u8>);

impl Extent {
    fn new(sectors: usize) -> Extent {
        Extent(vec![0; sectors * SECTOR])
    }

    fn word(&mut self, at: usize, value: u32) -> &mut Extent {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    fn long(&mut self, at: usize, value: u64) -> &mut Extent {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
        self
    }

    fn fill(&mut self, sector: usize, sectors: usize, byte: u8) -> &mut Extent {
        self.0[sector * SECTOR..(sector + sectors) * SECTOR].fill(byte);
        self
    }
}

/// Writes the extent with a descriptor, and compares what we read with what QEMU reads.
fn check(
    qemu: &Qemu,
    kind: &str,
    create: &str,
    sectors: usize,
    extent: &Extent,
    bytes: &[(usize, u8)],
) {
    write(&qemu.file("extent.vmdk"), &extent.0);
    let descriptor = format!(
        "# Disk DescriptorFile\nversion=1\nCID=00000001\nparentCID=ffffffff\ncreateType=\"{create}\"\n\n\
         # Extent description\nRW {sectors} {kind} \"extent.vmdk\"\n"
    );
    write(&qemu.file("disk.vmdk"), descriptor.as_bytes());
    qemu.img(&["convert", "-f", "vmdk", "-O", "raw", "disk.vmdk", "converted"]);
    let wanted = std::fs::read(qemu.file("converted")).unwrap();
    for (at, byte) in bytes {
        assert_eq!(wanted[*at], *byte, "QEMU reads {at}");
    }
    let spec = format!("vmdk:{}?names=allow", qemu.file("disk.vmdk").display());
    assert!(read_all(&spec).unwrap() == wanted, "{kind}");
}

#[test]
fn sparse_extents_of_esx_have_the_bytes_that_qemu_shows() {
    let Some(qemu) = Qemu::find() else { return };
    let mut extent = Extent::new(110);
    extent.0[..4].copy_from_slice(b"COWD");
    // Version, flags, sectors, sectors of a grain, place and length of the directory.
    extent.word(4, 1).word(8, 3).word(12, 8192).word(16, 1).word(20, 4).word(24, 2);
    extent.word(4 * SECTOR, 5).word(4 * SECTOR + 4, 37);
    let [first, second] = [5 * SECTOR, 37 * SECTOR];
    extent
        .word(first, 100)
        .word(first + 4, 101)
        .word(first + 4095 * 4, 102)
        .word(second + 7 * 4, 103);
    extent.fill(100, 1, 1).fill(101, 1, 2).fill(102, 1, 3).fill(103, 1, 4);
    let bytes = [(0, 1), (512, 2), (4095 * 512, 3), (4096 * 512, 0), (4103 * 512, 4)];
    check(&qemu, "VMFSSPARSE", "vmfsSparse", 8192, &extent, &bytes);
}

/// A seSparse extent of 40 MiB: tables cover 16 MiB each.
fn se() -> Extent {
    const TABLES: usize = 20;
    const GRAINS: usize = 400;
    let mut extent = Extent::new(GRAINS + 8 * 10);
    let fields = [
        (0, 0xcafe_babe),
        (1, 0x2_0000_0001),
        (2, 81920),
        (3, 8),
        (4, 64),
        (10, 1),
        (11, 1),
        (12, 2),
        (13, 1),
        (14, 3),
        (15, 1),
        (16, 4),
        (17, 1),
        (18, TABLES as u64),
        (19, 192),
        (20, 300),
        (21, 1),
        (22, 310),
        (23, 1),
        (24, GRAINS as u64),
        (25, 80),
    ];
    for (number, value) in fields {
        extent.long(number * 8, value);
    }
    extent.long(SECTOR, 0xcafe_cafe);
    let table = 0x1000_0000_0000_0000_u64;
    // The first and the last part of the disk have a table.
    extent.long(4 * SECTOR, table).long(4 * SECTOR + 16, table | 1);
    let grain = |number: u64| 3 << 60 | (number & 0xfff) << 48 | number >> 12;
    let first = TABLES * SECTOR;
    extent.long(first, grain(0)).long(first + 8, 1 << 60).long(first + 16, 2 << 60);
    extent.long(first + 4095 * 8, grain(2));
    extent.long((TABLES + 64) * SECTOR, grain(5));
    extent.fill(GRAINS, 8, 1).fill(GRAINS + 16, 8, 2).fill(GRAINS + 40, 8, 3);
    extent
}

#[test]
fn space_efficient_extents_have_the_bytes_that_qemu_shows() {
    let Some(qemu) = Qemu::find() else { return };
    let bytes = [(0, 1), (4096, 0), (4095 * 4096, 2), (16 << 20, 0), (32 << 20, 3)];
    check(&qemu, "SESPARSE", "seSparse", 81920, &se(), &bytes);
    let spec = format!("vmdk:{}?names=allow", qemu.file("disk.vmdk").display());
    let mut journal = se();
    journal.0[SECTOR + 24] = 1;
    write(&qemu.file("extent.vmdk"), &journal.0);
    assert!(error(&spec).contains("journal"));
    for (at, value, part) in [
        (8, 7, "version 0x7"),
        (32, 0, "tables of 0 bytes"),
        (16, 1 << 60, "sectors in the header"),
        (128, 1 << 40, "directory of grains"),
        (4 * SECTOR, 5, "in the directory of grains"),
        (20 * SECTOR, 5, "of grain 0"),
        (20 * SECTOR, 3 << 60 | 9999, "not within"),
    ] {
        let mut bad = se();
        bad.long(at, value);
        write(&qemu.file("extent.vmdk"), &bad.0);
        let text = error(&spec);
        assert!(text.contains(part), "{at}: {text}");
    }
}
