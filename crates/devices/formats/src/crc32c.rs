//! CRC-32C (Castagnoli), as iSCSI defines it (RFC 3720 12.1).

/// The polynomial, bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// For each byte, what it does to the remainder, 1 to 8 bytes later.
const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    let mut first = 0_u32;
    while byte < 256 {
        let mut rest = first;
        let mut bit = 0;
        while bit < 8 {
            rest = if rest & 1 == 1 { rest >> 1 ^ POLYNOMIAL } else { rest >> 1 };
            bit += 1;
        }
        tables[0][byte] = rest;
        byte += 1;
        first += 1;
    }
    let mut later = 1;
    while later < 8 {
        byte = 0;
        while byte < 256 {
            let before = tables[later - 1][byte];
            tables[later][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        later += 1;
    }
    tables
}

/// A checksum of bytes in several pieces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Crc32c(u32);

impl Crc32c {
    pub(crate) fn new() -> Crc32c {
        Crc32c(!0)
    }

    /// Adds bytes.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let (eights, rest) = bytes.as_chunks::<8>();
        for eight in eights {
            let [a, b, c, d] = (self.0
                ^ u32::from_le_bytes([eight[0], eight[1], eight[2], eight[3]]))
            .to_le_bytes();
            let of = |later: usize, byte: u8| TABLES[later][usize::from(byte)];
            self.0 = of(7, a) ^ of(6, b) ^ of(5, c) ^ of(4, d);
            self.0 ^= of(3, eight[4]) ^ of(2, eight[5]) ^ of(1, eight[6]) ^ of(0, eight[7]);
        }
        for &byte in rest {
            let [low, ..] = self.0.to_le_bytes();
            self.0 = self.0 >> 8 ^ TABLES[0][usize::from(low ^ byte)];
        }
    }

    pub(crate) fn sum(self) -> u32 {
        !self.0
    }
}

/// The checksum of a structure that contains it in the four bytes at `field`, which count as zero.
pub(crate) fn of_structure(bytes: &[u8], field: usize) -> u32 {
    let mut crc = Crc32c::new();
    let (before, rest) = bytes.split_at(field.min(bytes.len()));
    crc.add(before);
    crc.add(&[0; 4]);
    crc.add(rest.get(4..).unwrap_or_default());
    crc.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checks_of_the_standard_match() {
        let of = |bytes: &[u8]| {
            let mut crc = Crc32c::new();
            crc.add(bytes);
            crc.sum()
        };
        // RFC 3720 B.4.
        assert_eq!(of(&[0; 32]), 0x8a91_36aa);
        assert_eq!(of(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(of(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(of(b"123456789"), 0xe306_9283);
        assert_eq!(of_structure(b"1234\x01\x02\x03\x045", 4), of(b"1234\0\0\0\x005"));
    }
}
