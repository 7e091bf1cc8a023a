//! Lengths, versions, flags and error numbers of the kernel (linux/fuse.h, fcntl.h, errno.h).

/// Length of the header of a request in bytes.
pub const HEADER: usize = 40;
/// Length of the header and the arguments of a write in bytes: its data follows.
pub const WRITE_HEADER: usize = HEADER + 40;
/// Length of the header of a reply in bytes.
pub const REPLY_HEADER: usize = 16;
/// The node of the root.
pub const ROOT: u64 = 1;
/// The major version of the protocol.
pub const MAJOR: u32 = 7;
/// The oldest minor version that is supported: that of Linux 4.20, from which on requests may have
/// more than 32 pages.
pub const MINOR_LEAST: u32 = 28;
/// The minor version of which this module uses the features.
pub const MINOR: u32 = 38;

/// An error number for the kernel, as in errno(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelErrno(i32);

impl KernelErrno {
    /// The operation is not allowed.
    pub const PERM: KernelErrno = KernelErrno(1);
    /// There is no such file.
    pub const NOENT: KernelErrno = KernelErrno(2);
    /// The operation was interrupted.
    pub const INTR: KernelErrno = KernelErrno(4);
    /// The device failed.
    pub const IO: KernelErrno = KernelErrno(5);
    /// There is no such data behind this offset.
    pub const NXIO: KernelErrno = KernelErrno(6);
    /// There is not enough memory.
    pub const NOMEM: KernelErrno = KernelErrno(12);
    /// Access is denied.
    pub const ACCES: KernelErrno = KernelErrno(13);
    /// Something else uses the device.
    pub const BUSY: KernelErrno = KernelErrno(16);
    /// The file is not a directory.
    pub const NOTDIR: KernelErrno = KernelErrno(20);
    /// The file is a directory.
    pub const ISDIR: KernelErrno = KernelErrno(21);
    /// The request is invalid.
    pub const INVAL: KernelErrno = KernelErrno(22);
    /// There is no space.
    pub const NOSPC: KernelErrno = KernelErrno(28);
    /// The file system is read-only.
    pub const ROFS: KernelErrno = KernelErrno(30);
    /// The operation does not exist here; for some the kernel then stops asking.
    pub const NOSYS: KernelErrno = KernelErrno(38);
    /// The version of the protocol is not supported.
    pub const PROTO: KernelErrno = KernelErrno(71);
    /// The operation is not supported for this file.
    pub const OPNOTSUPP: KernelErrno = KernelErrno(95);

    /// The positive number.
    pub fn number(self) -> i32 {
        self.0
    }
}

/// Flags of the negotiation that this server uses.
pub mod init_flags {
    /// Several reads of a file may be in flight.
    pub const ASYNC_READ: u64 = 1 << 0;
    /// Writes may be larger than a page.
    pub const BIG_WRITES: u64 = 1 << 5;
    /// Asynchronous direct I/O has several requests in flight.
    pub const ASYNC_DIO: u64 = 1 << 15;
    /// Look-ups in a directory may overlap.
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    /// The reply has a maximum number of pages of a request.
    pub const MAX_PAGES: u64 = 1 << 22;
    /// There are flags from bit 32 on.
    pub const EXTENDED: u64 = 1 << 30;
    /// Files that are opened for direct I/O may be mapped shared.
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
}

/// Flags of an opened file.
pub mod open_flags {
    /// Reads and writes bypass the page cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// What the page cache holds of the file is still valid.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// Direct writes that do not extend the file may overlap.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Which attributes a request sets.
pub mod set_flags {
    /// The mode.
    pub const MODE: u32 = 1 << 0;
    /// Owner or group.
    pub const OWNERSHIP: u32 = 1 << 1 | 1 << 2;
    /// The size.
    pub const SIZE: u32 = 1 << 3;
    /// The request comes from an open file.
    pub const HANDLE: u32 = 1 << 6;
}

/// Flags of a write.
pub mod write_flags {
    /// It comes from the page cache, where a program has changed a mapping, and no program waits for it.
    pub const CACHE: u32 = 1 << 0;
}

/// Modes of fallocate(2).
pub mod allocate_flags {
    /// The size stays.
    pub const KEEP_SIZE: u32 = 0x01;
    /// The range is freed and reads as zeroes.
    pub const PUNCH_HOLE: u32 = 0x02;
    /// The range reads as zeroes and stays allocated.
    pub const ZERO_RANGE: u32 = 0x10;
}

/// O_DSYNC, which O_SYNC contains: a write is durable when it completes.
pub const O_DSYNC: u32 = 0o10000;
/// The access mode among the flags of open(2); 0 is reading only.
pub const O_ACCMODE: u32 = 0o3;
