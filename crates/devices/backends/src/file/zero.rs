//! Zeroes and trims a range.
//!
//! If the range may become a hole: punch it out; else let the file system mark it as zero; else
//! write. If it must stay allocated: mark it as zero; else punch it out and reserve it again; else
//! write. For block devices the same calls reach the disk: punching unmaps and fails if that does
//! not read as zeroes, marking has the kernel write zeroes if the disk cannot. The order is
//! nbdcopy's (copy/file-ops.c).

use std::sync::atomic::Ordering;

use blockhaul_block::{Error, Kind, RequestFlags, Result};
use blockhaul_io::{Data, FallocateMode, plain};
use rustix::fs::{FallocateFlags, fallocate};

use super::storage::{FileState, INLINE_MAX};
use super::ways::ZeroMethod;
use super::write::write_failed;

impl FileState {
    // nbd: zeroes.read-back, zeroes.no-hole
    /// Makes the range read as zeroes.
    pub(super) async fn zero(&self, at: u64, len: u64, flags: RequestFlags) -> Result<()> {
        for &way in self.zero.order(flags) {
            if self.zero.left(way) && self.zero_by(way, at, len).await? {
                return Ok(());
            }
        }
        if flags.contains(RequestFlags::FAST) {
            let text = "zeroing is not faster than writing here";
            return Err(Error::new(Kind::Unsupported, text));
        }
        self.write_zeroes(at, len).await
    }

    /// Frees the range if possible.
    pub(super) async fn trim(&self, at: u64, len: u64) -> Result<()> {
        if self.zero.left(ZeroMethod::Punch) && self.zero_by(ZeroMethod::Punch, at, len).await? {
            return Ok(());
        }
        // Punching asks a disk for zeroes; discard does not need them.
        if self.zero.discard.load(Ordering::Relaxed) {
            let file = self.storage.file.clone();
            let discarded = blockhaul_io::offload(move || file.discard_now(at, len)).await;
            match discarded.map_err(|lost| Error::new(Kind::Io, "trimming").because(lost))? {
                Ok(()) => {}
                // Only whole sectors can be discarded; a trim need not do anything.
                Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {}
                Err(error) if error.raw_os_error() == Some(libc::EIO) => {
                    return Err(Error::system("cannot trim", error));
                }
                Err(error) => {
                    self.zero.discard.store(false, Ordering::Relaxed);
                    log::debug!("the disk does not support discard: {}", plain(&error));
                }
            }
        }
        Ok(())
    }

    /// Whether the range could be zeroed this way.
    async fn zero_by(&self, way: ZeroMethod, at: u64, len: u64) -> Result<bool> {
        for &how in way.steps() {
            match self.allocate(how, at, len).await {
                Ok(()) => {}
                Err(error) if refused_for_good(&error) => {
                    self.zero.flag(how).store(false, Ordering::Relaxed);
                    log::debug!("the file does not support {how}: {}", plain(&error));
                    return Ok(false);
                }
                // A disk accepts whole blocks only; the next request may be aligned.
                Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => return Ok(false),
                Err(error) => return Err(Error::system("cannot zero", error)),
            }
        }
        Ok(true)
    }

    async fn allocate(&self, how: FallocateMode, at: u64, len: u64) -> std::io::Result<()> {
        if self.in_memory() && len <= INLINE_MAX as u64 {
            let flags = match how {
                FallocateMode::PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                FallocateMode::ZeroRange => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                FallocateMode::Reserve => FallocateFlags::KEEP_SIZE,
            };
            match fallocate(&self.storage.file, flags, at, len) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
        loop {
            match self.storage.file.allocate(how, at, len).await {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    async fn write_zeroes(&self, at: u64, len: u64) -> Result<()> {
        let (file, _) = self.route(at, len);
        let most = Data::ZEROES_MAX as u64;
        let zeroes = Data::zeroes(Data::ZEROES_MAX);
        let mut at = at;
        let mut left = len;
        while left > 0 {
            let piece = left.min(most);
            let data = zeroes.slice(0, usize::try_from(piece).expect("at most ZEROES_MAX"));
            file.write_all_at(data, at).await.map_err(write_failed)?;
            at += piece;
            left -= piece;
        }
        Ok(())
    }
}

/// The file system or the kernel does not support the call: EOPNOTSUPP, ENOSYS; disks also return
/// ENODEV.
fn refused_for_good(error: &std::io::Error) -> bool {
    [libc::EOPNOTSUPP, libc::ENOSYS, libc::ENODEV]
        .iter()
        .any(|&number| error.raw_os_error() == Some(number))
}
