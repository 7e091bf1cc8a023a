//! What a format says about a disk: where its bytes are, and how compressed ones are unpacked.

use blockhaul_block::Result;

use super::pages::TableLookup;

/// Where a part of the disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskPlace {
    /// Plain bytes of a file of the image, at this offset.
    Data { file: usize, at: u64 },
    /// A compressed block of the disk, at this offset of a file; it has at most `most` bytes there,
    /// if it is in order.
    Packed { file: usize, at: u64, most: u32 },
    /// Nowhere: it reads as zeroes. `stored` tells whether space of the file is reserved for it.
    Zero { stored: bool },
    /// In the backing device, or nowhere if there is none.
    Below,
}

/// A run of bytes of the disk in one place.
pub(crate) type Run = crate::assembly::DiskRun<DiskPlace>;

/// Where the bytes of a disk are.
pub(crate) trait BlockMap: Send + Sync {
    /// The place of the byte at `at`, which is within the disk, and the number of bytes from there
    /// on that follow it in the same place, at least 1. `None` if a page of a table must be read
    /// first, which `look` has noted.
    ///
    /// # Errors
    /// If an entry of a table is impossible.
    fn find(&self, at: u64, look: &mut TableLookup<'_>) -> Result<Option<(u64, DiskPlace)>>;

    /// Whether plain bytes of a file may be holes of that file, so that its extents are asked for.
    fn is_flat(&self, _file: usize) -> bool {
        false
    }
}

/// How compressed blocks are found and unpacked.
pub(crate) trait BlockUnpacker: Send + Sync {
    /// Length in bytes of the header before the compressed bytes.
    fn header(&self) -> usize;

    /// The number of compressed bytes behind a header.
    ///
    /// # Errors
    /// What is wrong with the header of the block at this offset of the disk.
    fn len(&self, header: &[u8], at: u64) -> Result<usize, String>;

    /// Unpacks into a block.
    ///
    /// # Errors
    /// What is wrong with the compressed bytes.
    fn unpack(&self, packed: &[u8], out: &mut [u8]) -> Result<(), String>;
}
