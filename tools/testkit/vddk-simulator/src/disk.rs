//! The contents of disks: raw files, or files that describe a pattern.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::{SeekFrom, seek};

use crate::settings::size;
use crate::types::{Block, CHUNK_MIN, SECTOR};

/// The first word of a file that describes a pattern, followed by the settings of [`Pattern`].
const PATTERN: &str = "vddk-simulator-pattern";
/// Maximum length of such a file.
const PATTERN_FILE_MAX: u64 = 4096;

/// The contents of a disk.
#[derive(Debug)]
pub(crate) enum SimulatedDisk {
    /// A raw file. Its holes are not allocated.
    Raw(File),
    /// A computed disk, read-only.
    Pattern(Pattern),
}

/// A computed disk: `size=64G stride=1M data=45`. The first `data` percent, such as 45 or 5.5, of each
/// `stride` are allocated, in whole blocks of 64 KiB; each 8 bytes there hold their own offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pattern {
    size: u64,
    stride: u64,
    /// Allocated bytes at the beginning of each stride.
    data: u64,
}

impl SimulatedDisk {
    /// Opens a disk.
    pub(crate) fn open(path: &Path, writable: bool) -> io::Result<SimulatedDisk> {
        let file = OpenOptions::new().read(true).write(writable).open(path)?;
        if file.metadata()?.len() <= PATTERN_FILE_MAX
            && let Ok(text) = std::fs::read_to_string(path)
            && let Some(text) = text.strip_prefix(PATTERN)
        {
            let wrong = || io::Error::new(io::ErrorKind::InvalidData, "not a pattern");
            return Pattern::parse(text).map(SimulatedDisk::Pattern).ok_or_else(wrong);
        }
        Ok(SimulatedDisk::Raw(file))
    }

    /// Size in whole sectors.
    pub(crate) fn sectors(&self) -> io::Result<u64> {
        match self {
            SimulatedDisk::Raw(file) => Ok(file.metadata()?.len() / SECTOR),
            SimulatedDisk::Pattern(pattern) => Ok(pattern.size / SECTOR),
        }
    }

    /// Fills `bytes` from offset `at`.
    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            SimulatedDisk::Raw(file) => file.read_exact_at(bytes, at),
            SimulatedDisk::Pattern(pattern) => {
                pattern.read(at, bytes);
                Ok(())
            }
        }
    }

    /// Writes `bytes` at offset `at`.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        match self {
            SimulatedDisk::Raw(file) => file.write_all_at(bytes, at),
            SimulatedDisk::Pattern(_) => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    /// Makes completed writes durable.
    pub(crate) fn flush(&self) -> io::Result<()> {
        match self {
            SimulatedDisk::Raw(file) => file.sync_data(),
            SimulatedDisk::Pattern(_) => Ok(()),
        }
    }

    /// The allocated sectors of a range of sectors, in whole chunks of `chunk` sectors.
    pub(crate) fn allocated(&self, start: u64, count: u64, chunk: u64) -> io::Result<Vec<Block>> {
        let mut blocks = Vec::new();
        let end = start + count;
        let mut add = |from: u64, to: u64| {
            let from = (from / chunk * chunk).max(start);
            let to = to.div_ceil(chunk).saturating_mul(chunk).min(end);
            match blocks.last_mut() {
                _ if from >= to => {}
                Some(Block { offset, length }) if *offset + *length >= from => {
                    *length = to.max(*offset + *length) - *offset;
                }
                _ => blocks.push(Block { offset: from, length: to - from }),
            }
        };
        match self {
            SimulatedDisk::Raw(file) => {
                let mut at = start * SECTOR;
                while at < end * SECTOR {
                    let Ok(data) = seek(file, SeekFrom::Data(at)) else { break };
                    let hole = seek(file, SeekFrom::Hole(data))?;
                    add(data / SECTOR, hole.div_ceil(SECTOR));
                    at = hole;
                }
            }
            SimulatedDisk::Pattern(Pattern { stride, data, .. }) => {
                let mut at = start * SECTOR / stride * stride;
                while at < end * SECTOR {
                    add(at / SECTOR, (at + data) / SECTOR);
                    at += stride;
                }
            }
        }
        Ok(blocks)
    }
}

impl Pattern {
    fn parse(text: &str) -> Option<Pattern> {
        let mut all = 0;
        let mut stride = 0;
        let mut share = 0;
        for word in text.split_whitespace() {
            match word.split_once('=')? {
                ("size", value) => all = size(value)?,
                ("stride", value) => stride = size(value)?,
                ("data", value) => share = tenths(value).filter(|share| *share <= 1000)?,
                _ => return None,
            }
        }
        let block = CHUNK_MIN * SECTOR;
        let fits = all > 0 && all <= 1 << 60 && stride >= block && stride.is_multiple_of(block);
        let data = (stride / block).checked_mul(share)?.div_ceil(1000) * block;
        fits.then_some(Pattern { size: all, stride, data })
    }

    fn read(&self, at: u64, bytes: &mut [u8]) {
        for (index, word) in (0_u64..).zip(bytes.chunks_mut(8)) {
            let at = at + index * 8;
            let value = if at % self.stride < self.data { at } else { 0 };
            word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
        }
    }
}

/// A number with at most one decimal place, in tenths.
fn tenths(text: &str) -> Option<u64> {
    let (whole, tenth) = text.split_once('.').unwrap_or((text, "0"));
    let tenth: u64 = tenth.parse().ok().filter(|tenth| *tenth < 10)?;
    whole.parse::<u64>().ok()?.checked_mul(10)?.checked_add(tenth)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_agree_with_their_allocated_blocks() {
        let pattern = Pattern::parse(" size=1G stride=1M data=45").unwrap();
        assert_eq!(pattern.data, 8 * 65536);
        let disk = SimulatedDisk::Pattern(pattern);
        let blocks = disk.allocated(2048, 4096, 128).unwrap();
        let expected = [2048, 4096].map(|offset| Block { offset, length: 1024 });
        assert_eq!(blocks, expected);
        let mut bytes = [1; 16];
        disk.read((1 << 20) + 8, &mut bytes).unwrap();
        assert_eq!(bytes[..8], ((1_u64 << 20) + 8).to_le_bytes());
        disk.read((1 << 20) + 8 * 65536, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 16]);
        assert_eq!(Pattern::parse("size=1G stride=1000 data=45"), None);
        assert_eq!(Pattern::parse("size=1G stride=64K data=100.1"), None);
        let part = Pattern::parse("size=1G stride=100M data=5.5").unwrap();
        assert_eq!(part.data, 88 * 65536);
    }

    #[test]
    fn holes_of_files_are_not_allocated() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        file.as_file().write_all_at(&[1; 5000], 300_000).unwrap();
        let disk = SimulatedDisk::open(file.path(), false).unwrap();
        assert_eq!(disk.sectors().unwrap(), 2048);
        let blocks = disk.allocated(0, 2048, 128).unwrap();
        assert_eq!(blocks, [Block { offset: 512, length: 128 }]);
        assert_eq!(disk.allocated(0, 512, 128).unwrap(), []);
    }
}
