//! The kernel's information about a file's storage: alignments, queue properties, kind of file
//! system.

use std::fs;
use std::path::PathBuf;

use rustix::fs::{AtFlags, Statx, StatxFlags, fstatfs, major, minor, statx};

/// Maximum block size accepted from the kernel: NBD's limit for a minimum block.
const BLOCK_MAX: u32 = 64 << 10;
/// Alignment of direct I/O if the kernel does not report it: valid for all common disks.
const DIRECT_ALIGN: u32 = 4096;

/// File systems by the number in statfs(2).
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;
/// ext2, ext3 and ext4, XFS, Btrfs, F2FS: on local storage, with their block maps in memory or one
/// read away.
const LOCAL: [u64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010];

/// How quickly the file system answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileSystemSpeed {
    /// All of it is in memory: no operation waits for a disk.
    Memory,
    /// Local: searching for holes is fast.
    Local,
    /// Any operation may wait for a network or another program.
    Unknown,
}

/// Where the file's data is.
pub(super) fn nearness(file: &blockhaul_io::File) -> FileSystemSpeed {
    let Ok(stat) = fstatfs(file) else { return FileSystemSpeed::Unknown };
    match u64::try_from(stat.f_type).unwrap_or(0) {
        TMPFS | RAMFS => FileSystemSpeed::Memory,
        kind if LOCAL.contains(&kind) => FileSystemSpeed::Local,
        _ => FileSystemSpeed::Unknown,
    }
}

/// Alignment in bytes of offsets, lengths and memory for O_DIRECT; `None` if it is not supported.
pub(super) fn direct_align(file: &blockhaul_io::File, disk: Option<u64>) -> Option<u32> {
    let asked: Option<Statx> = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    // Since Linux 6.1; older kernels leave the bit out of the mask.
    if let Some(known) = asked.filter(|got| got.stx_mask & StatxFlags::DIOALIGN.bits() != 0) {
        let align = known.stx_dio_mem_align.max(known.stx_dio_offset_align);
        let usable = known.stx_dio_offset_align > 0 && align.is_power_of_two();
        return (usable && align <= BLOCK_MAX).then_some(align);
    }
    let logical = disk.and_then(|disk| queue_number(disk, "logical_block_size"));
    Some(block_size(logical).unwrap_or(DIRECT_ALIGN))
}

/// Minimum alignment of direct requests if others use the page cache: no page may be used by both.
/// Otherwise the kernel may find the page dirty after a direct write, and then reports at the next
/// flush that an earlier write was lost (EIO).
pub(super) fn page() -> u32 {
    u32::try_from(rustix::param::page_size()).unwrap_or(4096)
}

/// A number as a block size, if it is valid.
pub(super) fn block_size(number: Option<u64>) -> Option<u32> {
    let size = u32::try_from(number?).ok()?;
    (size.is_power_of_two() && (512..=BLOCK_MAX).contains(&size)).then_some(size)
}

/// Whether seeking costs time on this disk; false if unknown.
pub(super) fn rotational(disk: u64) -> bool {
    queue_number(disk, "rotational") == Some(1)
}

/// Whether the kernel refuses writes to this disk, although it opens the disk for them; false if unknown.
pub(super) fn is_readonly(disk: u64) -> bool {
    let path = format!("/sys/dev/block/{}:{}/ro", major(disk), minor(disk));
    fs::read_to_string(path).is_ok_and(|text| text.trim() == "1")
}

/// A property of a disk's queue. `disk` is a device number; a partition uses the queue of its disk,
/// one directory up.
pub(super) fn queue_number(disk: u64, name: &str) -> Option<u64> {
    let folder = PathBuf::from(format!("/sys/dev/block/{}:{}", major(disk), minor(disk)));
    ["queue", "../queue"]
        .iter()
        .find_map(|queue| fs::read_to_string(folder.join(queue).join(name)).ok())
        .and_then(|text| text.trim().parse().ok())
}
