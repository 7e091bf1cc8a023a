//! Space that is allocated in a new or larger image, and files of raw disks.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use blockhaul_catalog::NamePolicy;
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_formats::qcow2::reserve::reserve;
use blockhaul_io::plain;
use rustix::fs::{FallocateFlags, fallocate};

use crate::error::{QemuImgError, Result, failure};
use crate::image::not_changed;
use crate::tool::QemuImg;

/// Bytes that the tables of a small image take, with what is left free before clusters.
const TABLES: u64 = 256 << 10;

/// The parts of an image that are allocated before it has data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Preallocation {
    #[default]
    Off,
    /// Places for all clusters of an image: its file has holes there.
    Metadata,
    /// Places for all clusters, and the space of the file.
    Falloc,
    /// The space of the file, filled with zeroes.
    Full,
}

impl Preallocation {
    /// The preallocation of this name.
    pub(crate) fn parse(name: &str) -> Result<Preallocation> {
        Ok(match name {
            "off" => Preallocation::Off,
            "metadata" => Preallocation::Metadata,
            "falloc" => Preallocation::Falloc,
            "full" => Preallocation::Full,
            _ => {
                let text = format!("Parameter 'preallocation' does not accept value '{name}'");
                return Err(failure(text));
            }
        })
    }
}

impl QemuImg {
    /// Allocates the disk in an image from offset `from` on.
    pub(crate) fn preallocate(
        &self,
        image: &QemuImage,
        format: QemuFormat,
        how: Preallocation,
        from: u64,
    ) -> Result<()> {
        if how == Preallocation::Off {
            return Ok(());
        }
        let Some(path) = image.path() else {
            let text = "Could not resize image: Cannot grow NBD nodes";
            return Err(failure(format!("{}: {text}", image.shown)));
        };
        match format {
            QemuFormat::Qcow2 => self.preallocate_qcow2(image, path, how, from),
            _ => preallocate_raw(path, how, from).map_err(|error| not_allocated(image, &error)),
        }
    }

    fn preallocate_qcow2(
        &self,
        image: &QemuImage,
        path: &Path,
        how: Preallocation,
        from: u64,
    ) -> Result<()> {
        let wrong = |error: io::Error| not_allocated(image, &error);
        let needs_space = how != Preallocation::Metadata;
        // New clusters: what is before them keeps its holes.
        let len = std::fs::metadata(path).map_err(wrong)?.len();
        let start = len.checked_next_multiple_of(self.description(image)?.cluster).unwrap_or(len);
        if needs_space {
            // As one piece, before parts of it are written: each piece needs an entry in the tables of the
            // file system, which may then grow when more is written.
            let data = self.disk_size(image)?.saturating_sub(from);
            // With its tables; what is too much is freed.
            let more = data.saturating_add(data / 32).saturating_add(TABLES);
            let file = open_to_write(path).map_err(wrong)?;
            // Without it, the space may suffice: what is needed is allocated later.
            let _ = fallocate(&file, FallocateFlags::KEEP_SIZE, start, more);
        }
        let writes = how == Preallocation::Full;
        let result =
            self.with_holder(image, NamePolicy::Refuse, async move |context, holder| {
                reserve(context, holder, from, writes).await
            })?;
        let end = result.map_err(|error| not_changed(image, &error))?;
        fill_up(path, start, end, needs_space).map_err(wrong)
    }
}

fn not_allocated(image: &QemuImage, error: &io::Error) -> QemuImgError {
    failure(format!("{}: Could not preallocate: {}", image.shown, plain(error)))
}

/// Lengthens a file to `end`, and allocates its space from `start` on if that is needed.
fn fill_up(path: &Path, start: u64, end: u64, needs_space: bool) -> io::Result<()> {
    let file = open_to_write(path)?;
    let len = file.metadata()?.len();
    if len < end {
        file.set_len(end)?;
    }
    let end = end.max(len);
    if needs_space {
        allocate(&file, start, end)?;
        // Frees what is behind the end.
        file.set_len(end)?;
    }
    Ok(())
}

fn preallocate_raw(path: &Path, how: Preallocation, from: u64) -> io::Result<()> {
    let file = open_to_write(path)?;
    let end = file.metadata()?.len();
    if how != Preallocation::Metadata {
        allocate(&file, from, end)?;
    }
    if how == Preallocation::Full {
        zeroes(&file, from, end)?;
    }
    Ok(())
}

fn open_to_write(path: &Path) -> io::Result<File> {
    File::options().write(true).open(path)
}

/// Allocates the first block of a file, as the original does: QEMU finds out with it which alignment
/// direct I/O needs.
pub(crate) fn allocate_start(image: &QemuImage, size: u64) -> Result<()> {
    let Some(path) = image.path().filter(|path| path.is_file()) else { return Ok(()) };
    let done = open_to_write(path).and_then(|file| zeroes(&file, 0, size.min(4096)));
    done.map_err(|error| failure(format!("{}: {}", image.shown, plain(&error))))
}

/// Allocates the first block of a file that a copy has filled, if the block has no data.
pub(crate) fn allocate_start_of_copy(image: &QemuImage) -> Result<()> {
    let Some(path) = image.path().filter(|path| path.is_file()) else { return Ok(()) };
    let fill = || {
        let file = File::options().read(true).write(true).open(path)?;
        let mut first = [0; 4096];
        let len = file.read_at(&mut first, 0)?;
        if first.iter().all(|byte| *byte == 0) {
            file.write_all_at(&first[..len], 0)
        } else {
            Ok(())
        }
    };
    fill().map_err(|error| failure(format!("{}: {}", image.shown, plain(&error))))
}

/// Allocates the space of a file from `start` to `end`.
fn allocate(file: &File, start: u64, end: u64) -> io::Result<()> {
    if start < end {
        fallocate(file, FallocateFlags::empty(), start, end - start)?;
    }
    Ok(())
}

/// Writes zeroes to a part of a file.
fn zeroes(file: &File, start: u64, end: u64) -> io::Result<()> {
    let piece = vec![0; 1 << 20];
    let mut at = start;
    while at < end {
        let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(piece.len());
        file.write_all_at(&piece[..len], at)?;
        at += len as u64;
    }
    Ok(())
}

/// Removes the contents of a raw disk that exists.
pub(crate) fn empty_raw(image: &QemuImage) -> Result<()> {
    let Some(path) = image.path().filter(|path| path.is_file()) else { return Ok(()) };
    let emptied = File::options().write(true).truncate(true).open(path);
    emptied.map(|_| ()).map_err(|error| {
        failure(format!("{}: Could not create file: {}", image.shown, plain(&error)))
    })
}
