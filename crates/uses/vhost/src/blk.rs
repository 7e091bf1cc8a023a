//! Requests of virtio-blk and its configuration ("Block Device" in the VIRTIO specification, version
//! 1.2, section 5.2). Numbers are little endian.

use bitflags::bitflags;
use blockhaul_block::{Can, Facts};

use crate::protocol::CONFIG_MAX;

/// Unit of offsets, lengths and the capacity, in bytes, whatever the block size is.
pub const SECTOR: u64 = 512;
/// Maximum number of parts of the data of a request.
pub const SEGMENTS_MAX: u32 = 126;
/// Length of the header of a request in bytes.
pub const HEADER: usize = 16;
/// Length of the range of a discard or write zeroes request in bytes.
pub const RANGE: usize = 16;
/// Length of the identity in bytes.
pub const ID: usize = 20;

/// Maximum length of a discard or write zeroes request in sectors: 1 GiB.
const ZERO_MAX: u32 = 1 << 21;
/// Flag of a range: it may be deallocated.
const UNMAP: u32 = 1;

bitflags! {
    /// Features of the device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct BlkFeatures: u64 {
        /// The number of parts of the data is limited.
        const SEGMENTS = 1 << 2;
        /// Read-only.
        const READ_ONLY = 1 << 5;
        /// The block size.
        const BLOCK_SIZE = 1 << 6;
        /// Flush.
        const FLUSH = 1 << 9;
        /// Preferred sizes.
        const TOPOLOGY = 1 << 10;
        /// Several queues.
        const QUEUES = 1 << 12;
        /// Discard.
        const DISCARD = 1 << 13;
        /// Write zeroes.
        const WRITE_ZEROES = 1 << 14;
        /// Rings: tables of descriptors.
        const INDIRECT = 1 << 28;
        /// Rings: notifications from a position on.
        const EVENT_IDX = 1 << 29;
        /// vhost-user: the optional parts of its protocol are negotiated.
        const PROTOCOL_FEATURES = 1 << 30;
        /// Version 1 of VIRTIO.
        const VERSION_1 = 1 << 32;
    }
}

/// What is offered for a device.
pub fn features(facts: &Facts) -> BlkFeatures {
    let mut features = BlkFeatures::SEGMENTS
        | BlkFeatures::BLOCK_SIZE
        | BlkFeatures::TOPOLOGY
        | BlkFeatures::QUEUES
        | BlkFeatures::INDIRECT
        | BlkFeatures::EVENT_IDX
        | BlkFeatures::PROTOCOL_FEATURES
        | BlkFeatures::VERSION_1;
    let writes = facts.can.contains(Can::WRITE);
    features.set(BlkFeatures::READ_ONLY, !writes);
    features.set(BlkFeatures::FLUSH, writes && facts.can.contains(Can::FLUSH));
    features.set(BlkFeatures::DISCARD, writes && facts.can.contains(Can::TRIM));
    features.set(BlkFeatures::WRITE_ZEROES, writes && facts.can.contains(Can::ZERO));
    features
}

/// The configuration of a device with so many queues.
pub fn config(facts: &Facts, queues: u16) -> [u8; CONFIG_MAX] {
    let mut config = [0; CONFIG_MAX];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    let block = facts.block.minimum.max(512);
    let preferred = (facts.block.preferred / block).clamp(1, 0x8000);
    put(0, &(facts.size / SECTOR).to_le_bytes());
    put(12, &SEGMENTS_MAX.to_le_bytes());
    put(20, &block.to_le_bytes());
    // The physical block, as a power of two of blocks, and the smallest good request in blocks.
    put(24, &[u8::try_from(preferred.ilog2()).unwrap_or(0)]);
    put(26, &u16::try_from(preferred).unwrap_or(1).to_le_bytes());
    // What is written is durable after a flush.
    put(32, &[1]);
    put(34, &queues.to_le_bytes());
    let ranges = 1_u32;
    put(36, &ZERO_MAX.to_le_bytes());
    put(40, &ranges.to_le_bytes());
    put(44, &u32::try_from(u64::from(block) / SECTOR).unwrap_or(1).to_le_bytes());
    put(48, &ZERO_MAX.to_le_bytes());
    put(52, &ranges.to_le_bytes());
    // Zeroes may deallocate.
    put(56, &[1]);
    config
}

/// How a request ended, for the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BlkStatus {
    /// Done.
    Ok = 0,
    /// Failed.
    Failed = 1,
    /// Not supported.
    Unsupported = 2,
}

/// A request of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlkCommand {
    /// Read from this offset in bytes, as much as there is room for.
    Read(u64),
    /// Write from this offset in bytes, as much as there is.
    Write(u64),
    /// Flush.
    Flush,
    /// Return the identity.
    Id,
    /// Discard the range that follows.
    Discard,
    /// Zero the range that follows.
    Zero,
}

/// The range of a discard or write zeroes request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiscardRange {
    /// Offset in bytes.
    pub at: u64,
    /// Length in bytes, at least one sector.
    pub len: u64,
    /// It may be deallocated.
    pub unmap: bool,
}

impl BlkCommand {
    /// Reads the header of a request.
    ///
    /// # Errors
    /// If it is not supported, or its offset exceeds all devices.
    pub fn parse(header: &[u8; HEADER]) -> Result<BlkCommand, BlkStatus> {
        let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let (_, sector) = header.split_last_chunk::<8>().ok_or(BlkStatus::Failed)?;
        let at = || u64::from_le_bytes(*sector).checked_mul(SECTOR).ok_or(BlkStatus::Failed);
        Ok(match kind {
            0 => BlkCommand::Read(at()?),
            1 => BlkCommand::Write(at()?),
            4 => BlkCommand::Flush,
            8 => BlkCommand::Id,
            11 => BlkCommand::Discard,
            13 => BlkCommand::Zero,
            _ => return Err(BlkStatus::Unsupported),
        })
    }
}

impl DiscardRange {
    /// Reads a range.
    ///
    /// # Errors
    /// If it is empty or too long, exceeds all devices, or has flags that are not known.
    pub fn parse(bytes: &[u8; RANGE]) -> Result<DiscardRange, BlkStatus> {
        let word = |at: usize| {
            let bytes = bytes[at..].first_chunk().copied().unwrap_or_default();
            u32::from_le_bytes(bytes)
        };
        let sector = u64::from(word(0)) | u64::from(word(4)) << 32;
        let count = word(8);
        let flags = word(12);
        let at = sector.checked_mul(SECTOR).ok_or(BlkStatus::Failed)?;
        if count == 0 || count > ZERO_MAX {
            return Err(BlkStatus::Failed);
        }
        if flags & !UNMAP != 0 {
            return Err(BlkStatus::Unsupported);
        }
        Ok(DiscardRange { at, len: u64::from(count) * SECTOR, unmap: flags & UNMAP != 0 })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn header(kind: u32, sector: u64) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        header
    }

    #[test]
    fn headers_name_requests_at_offsets_that_exist() {
        assert_eq!(BlkCommand::parse(&header(0, 3)), Ok(BlkCommand::Read(1536)));
        assert_eq!(BlkCommand::parse(&header(1, 0)), Ok(BlkCommand::Write(0)));
        assert_eq!(BlkCommand::parse(&header(1, 1 << 55)), Err(BlkStatus::Failed));
        assert_eq!(BlkCommand::parse(&header(4, u64::MAX)), Ok(BlkCommand::Flush));
        assert_eq!(BlkCommand::parse(&header(2, 0)), Err(BlkStatus::Unsupported));
    }

    #[test]
    fn ranges_are_not_empty_and_end() {
        let parse = |sector: u64, count: u32, flags: u32| {
            let bytes =
                [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat();
            DiscardRange::parse(bytes.as_slice().try_into().unwrap())
        };
        assert_eq!(parse(2, 8, 1), Ok(DiscardRange { at: 1024, len: 4096, unmap: true }));
        assert_eq!(parse(2, 0, 0), Err(BlkStatus::Failed));
        assert_eq!(parse(2, u32::MAX, 0), Err(BlkStatus::Failed));
        assert_eq!(parse(u64::MAX, 1, 0), Err(BlkStatus::Failed));
        assert_eq!(parse(0, 1, 2), Err(BlkStatus::Unsupported));
    }

    #[test]
    fn the_configuration_is_that_of_the_device() {
        let mut facts = Facts::new("disk", 1_000_000);
        facts.can = Can::WRITE | Can::FLUSH;
        let config = config(&facts, 4);
        assert_eq!(config[..8], 1953_u64.to_le_bytes(), "whole sectors");
        assert_eq!(config[20..24], 512_u32.to_le_bytes());
        assert_eq!((config[24], config[34]), (3, 4));
        assert!(features(&facts).contains(BlkFeatures::FLUSH));
        facts.can = Can::empty();
        assert!(features(&facts).contains(BlkFeatures::READ_ONLY));
        assert!(!features(&facts).intersects(BlkFeatures::FLUSH | BlkFeatures::DISCARD));
    }
}
