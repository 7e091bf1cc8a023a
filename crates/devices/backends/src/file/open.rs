//! Opens a path as a device: what is there, how it may be used, and its facts.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use blockhaul_block::{BASE_ALLOCATION, BlockSizes, Can, Error, Facts, Kind, Result};
use blockhaul_catalog::{Direct, Target};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, SeekFrom, Stat, fcntl_getfl, fcntl_setfl,
    fstat, ftruncate, openat, openat2, seek, statat,
};
use rustix::io::Errno;

use super::device::FileDevice;
use super::handed::Handed;
use super::in_use;
use super::limits::{self, Nearness, page};
use super::lock::Lock;
use super::storage::{Past, Storage};
use crate::support::operand;

/// Limits in bytes for the preferred block of a file system: a page, and one short request.
const PREFERRED: (u32, u32) = (4096, 1 << 20);

/// Size in bytes of a file that becomes longer as it is written, if the caller names none: more than
/// file systems allow, which report when they are full.
const GROWTH_MAX: u64 = 1 << 55;

/// A file with blocks for at least one in this many bytes of a copy is overwritten instead of
/// emptied.
const BLOCKS_SHARE: u64 = 8;

/// Opens the file of a description; blocks. The target of a copy keeps its contents until it is
/// resized; the facts are those afterwards.
pub(super) fn open(target: &Target) -> Result<(FileDevice, Option<Resize>)> {
    let mut name = operand::name(target);
    let path = target.path();
    let handed = Handed::find(target, "fd").map_err(|error| error.on(&name.as_str().into()))?;
    let mut target = std::borrow::Cow::Borrowed(target);
    match &handed {
        Some(handed) => {
            name = format!("file:?fd={}", handed.number());
            // Check its abilities before it is reopened, which may have more.
            if handed.is_readonly() && target.intent.target_size.is_none() {
                target.to_mut().intent.write = false;
            }
        }
        None if path.as_os_str().is_empty() => {
            let text = "file: has no path: write file:PATH, or file:?fd=N for an open file";
            return Err(Error::new(Kind::Usage, text));
        }
        None => {}
    }
    let handed = handed.as_ref();
    let open = Open { path: &path, target: &target, folder: None, links: false, handed };
    open.run(&name).map_err(|error| error.on(&name.as_str().into()))
}

/// Opens a regular file of a directory by its name; blocks. `name` must be one component. Without
/// `links` no link is followed, and nothing outside the directory is opened; with them, block
/// devices are allowed, too.
pub(super) fn open_in(
    folder: &OwnedFd,
    name: &str,
    links: bool,
    target: &Target,
) -> Result<FileDevice> {
    let (path, folder) = (Path::new(name), Some(folder.as_fd()));
    let open = Open { path, target, folder, links, handed: None };
    let opened = open.run(name).map_err(|error| error.on(&name.into()));
    // A file in a directory is never the target of a copy.
    opened.map(|(device, _)| device)
}

/// Makes an open file the target of a copy.
pub(super) struct Resize {
    name: String,
    file: blockhaul_io::File,
    /// Size in bytes; none for a file that grows as it is written.
    size: Option<u64>,
    /// Empty it first.
    empty: bool,
    created: Option<Created>,
}

impl Resize {
    /// Empties and resizes the file; blocks. After an error its contents are unchanged.
    pub(super) fn run(mut self) -> Result<()> {
        self.resize().map_err(|errno| {
            let text = match self.size {
                Some(size) => format!("cannot resize it to {size} bytes"),
                None => "cannot empty it".to_string(),
            };
            system(text, errno).on(&self.name.as_str().into())
        })?;
        if let Some(created) = &mut self.created {
            created.stays = true;
        }
        Ok(())
    }

    fn resize(&self) -> rustix::io::Result<()> {
        let held = u64::try_from(fstat(&self.file)?.st_size).unwrap_or(0);
        // Check an impossible size before any data is lost.
        if let Some(size) = self.size.filter(|&size| size > held) {
            ftruncate(&self.file, size)?;
        }
        if self.empty {
            ftruncate(&self.file, 0)?;
        }
        self.size.map_or(Ok(()), |size| ftruncate(&self.file, size))
    }
}

/// A file created by opening it. It is removed on drop, unless it is kept.
struct Created {
    path: PathBuf,
    file: blockhaul_io::File,
    stays: bool,
}

impl Created {
    fn new(file: &blockhaul_io::File) -> Option<Created> {
        let number = std::os::fd::AsRawFd::as_raw_fd(&file.as_fd());
        // The current path: the directory may be a link, and the working directory may change.
        let path = std::fs::read_link(super::handed::path(number)).ok()?;
        Some(Created { path, file: file.clone(), stays: false })
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        // Another program may have written to it or replaced it.
        let ours = fstat(&self.file).is_ok_and(|stat| {
            stat.st_size == 0 && super::identity(&self.path) == Some(super::identity::of(&stat))
        });
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            log::warn!(
                "cannot remove {}, to which nothing was copied: {error}",
                self.path.display()
            );
        }
    }
}

struct Open<'a> {
    path: &'a Path,
    target: &'a Target,
    /// The directory that the path must not leave; none for unrestricted paths.
    folder: Option<BorrowedFd<'a>>,
    /// In a directory: links may lead outside.
    links: bool,
    /// The descriptor to open instead of the path.
    handed: Option<&'a Handed>,
}

impl Open<'_> {
    fn run(&self, name: &str) -> Result<(FileDevice, Option<Resize>)> {
        // Checked before it is opened, because opening a pipe waits for its other end.
        let there = match self.stat() {
            Ok(stat) if self.stays() => {
                only_regular(&stat)?;
                There::File
            }
            Ok(stat) => match check_type(&stat)? {
                true => There::Disk(stat.st_rdev),
                false => There::File,
            },
            Err(Errno::NOENT) if self.target.intent.target_size.is_some() => There::Nothing,
            Err(errno) => return Err(self.refused(errno)),
        };
        if let Some(handed) = self.handed
            && self.target.intent.write
            && handed.is_readonly()
        {
            let text = "is only open for reading: open it for reading and writing, in a shell with \
                        N<>FILE";
            return Err(Error::new(Kind::ReadOnly, text));
        }
        let wanted = match self.target.args.text("direct") {
            None => self.target.intent.direct,
            Some(_) if self.target.args.switch("direct") => Direct::On,
            Some(_) => Direct::Off,
        };
        let direct = wanted == Direct::On;
        let file = self.first(there, direct)?;
        let created = match there {
            There::Nothing => Created::new(&file),
            There::File | There::Disk(_) => None,
        };
        let stat =
            fstat(&file).map_err(|errno| system("cannot get the status of the file", errno))?;
        let is_disk = check_type(&stat)?;
        if self.stays() {
            // It may have been replaced since the check.
            only_regular(&stat)?;
        }
        let lock = match self.target.intent.write && self.target.args.switch("lock") {
            true => Lock::take(&file, &stat, self.target.intent.target_size.is_some())?,
            false => None,
        };
        // Direct partial writes need the rest of the block, which does not exist while the file
        // grows.
        let extends = self.target.intent.extends && self.target.intent.write && !is_disk;
        if extends && direct {
            return Err(no_direct_growth());
        }
        let grows = extends || (self.target.intent.grows && !is_disk && !direct);
        let held = u64::try_from(stat.st_size).unwrap_or(0);
        let mut zeroed = false;
        let mut resize = None;
        let size = match self.target.intent.target_size.filter(|_| !is_disk) {
            Some(size) => {
                if !grows {
                    check_size(&file, size)?;
                }
                // Emptied, so that the old contents read as zeroes, unless it is overwritten.
                zeroed = grows || !(self.target.intent.overwrites && has_blocks(&stat, size));
                let (name, file, empty) = (name.to_string(), file.clone(), zeroed);
                let size_then = (!grows).then_some(size);
                resize = Some(Resize { name, file, size: size_then, empty, created });
                size
            }
            None if extends => GROWTH_MAX,
            None => seek(&file, SeekFrom::End(0))
                .map_err(|errno| system("cannot determine its size", errno))?,
        };
        let disk = if is_disk { stat.st_rdev } else { stat.st_dev };

        let mut align = 1;
        let mut buffered = None;
        if direct {
            let known = limits::direct_align(&file, is_disk.then_some(disk));
            align = known.ok_or_else(no_direct)?;
            // If the size is not a multiple, only the page cache can reach the end.
            if !size.is_multiple_of(u64::from(align)) {
                let cached = self.descriptor(false, OFlags::empty())?;
                // Readahead would cache pages that other requests write directly.
                let _ = rustix::fs::fadvise(&cached, 0, None, rustix::fs::Advice::Random);
                buffered = Some(cached);
                align = align.max(page());
            }
        }
        let nearness = match is_disk {
            // A device node is on a file system that says nothing about the device.
            true => Nearness::Local,
            false => limits::nearness(&file),
        };
        let past = match wanted {
            Direct::Auto if nearness != Nearness::Memory => self.past(is_disk.then_some(disk)),
            _ => None,
        };
        let minimum = if buffered.is_some() { 1 } else { align };
        let wanted = match is_disk {
            true => limits::queue_number(disk, "physical_block_size"),
            false => u64::try_from(stat.st_blksize).ok(),
        };
        let unit = limits::block_size(wanted).unwrap_or(4096);
        let preferred = unit.clamp(PREFERRED.0, PREFERRED.1).max(align);
        let writes_past = past.is_some() && self.target.intent.write;
        let mut can = Can::FLUSH | Can::EXTENTS | Can::MULTI_CONN;
        if self.target.intent.write {
            can |= Can::CHANGES;
        }
        if !direct {
            can |= Can::CACHE;
        }
        let facts = Facts {
            block: BlockSizes { minimum, preferred, ..BlockSizes::default() },
            can,
            rotational: limits::rotational(disk),
            zeroed,
            grows_from: grows.then_some(if resize.is_some() { 0 } else { held }),
            takes_parked: !direct && !writes_past,
            allocation_unit: unit,
            files: vec![super::identity::of(&stat)],
            contexts: vec![BASE_ALLOCATION.to_string()],
            ..Facts::new(name, size)
        };
        let length = AtomicU64::new(if resize.is_some() { 0 } else { held });
        let storage =
            Storage { file, length, buffered, past, align, is_disk, grows, nearness, _lock: lock };
        Ok((FileDevice::new(facts, storage), resize))
    }

    /// The same file for direct I/O, if possible.
    fn past(&self, disk: Option<u64>) -> Option<Past> {
        let file = self.descriptor(true, OFlags::empty()).ok()?;
        let align = limits::direct_align(&file, disk)?;
        Some(Past::new(file, align.max(page())))
    }

    /// The first descriptor, which creates the file or claims the block device.
    fn first(&self, there: There, direct: bool) -> Result<blockhaul_io::File> {
        match there {
            There::File => self.descriptor(direct, OFlags::empty()),
            There::Nothing => self.descriptor(direct, OFlags::CREATE),
            There::Disk(device) => {
                let intent = self.target.intent;
                let claims = intent.write && intent.exclusive && self.target.args.switch("lock");
                let claim = if claims { OFlags::EXCL } else { OFlags::empty() };
                match self.open(self.flags(direct) | claim, Mode::empty()) {
                    Err(Errno::BUSY) if claims => Err(in_use::error(device)),
                    opened => self.opened(opened, direct),
                }
            }
        }
    }

    fn descriptor(&self, direct: bool, more: OFlags) -> Result<blockhaul_io::File> {
        self.opened(self.open(self.flags(direct) | more, Mode::from_raw_mode(0o666)), direct)
    }

    fn flags(&self, direct: bool) -> OFlags {
        let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY;
        flags |= if self.target.intent.write { OFlags::RDWR } else { OFlags::RDONLY };
        if direct {
            flags |= OFlags::DIRECT;
        }
        flags
    }

    fn opened(
        &self,
        opened: rustix::io::Result<OwnedFd>,
        direct: bool,
    ) -> Result<blockhaul_io::File> {
        match opened {
            Ok(fd) => Ok(blockhaul_io::File::new(fd)),
            Err(Errno::INVAL) if direct => Err(no_direct()),
            Err(errno) => Err(self.refused(errno)),
        }
    }

    /// Whether only regular files of the directory may be opened.
    fn stays(&self) -> bool {
        self.folder.is_some() && !self.links
    }

    fn stat(&self) -> rustix::io::Result<Stat> {
        if let Some(handed) = self.handed {
            return fstat(handed.fd());
        }
        match self.folder {
            None => statat(CWD, self.path, AtFlags::empty()),
            Some(folder) if self.links => statat(folder, self.path, AtFlags::empty()),
            Some(folder) => statat(folder, self.path, AtFlags::SYMLINK_NOFOLLOW),
        }
    }

    fn open(&self, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
        if let Some(handed) = self.handed {
            return handed.open(flags - OFlags::CREATE);
        }
        let Some(folder) = self.folder else {
            return openat(CWD, self.path, flags, mode);
        };
        // A pipe in place of the file would block.
        let flags = flags | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let fd = match self.links {
            true => openat(folder, self.path, flags, Mode::empty())?,
            false => match openat2(folder, self.path, flags, Mode::empty(), resolve) {
                // Linux before 5.6, or a sandbox. For a name without a slash this is equivalent.
                Err(Errno::NOSYS | Errno::PERM) => {
                    openat(folder, self.path, flags | OFlags::NOFOLLOW, Mode::empty())?
                }
                opened => opened?,
            },
        };
        // io_uring would fail instead of waiting.
        fcntl_setfl(&fd, fcntl_getfl(&fd)? - OFlags::NONBLOCK)?;
        Ok(fd)
    }

    /// Why the path could not be opened, and a remedy.
    fn refused(&self, errno: Errno) -> Error {
        let intent = self.target.intent;
        let text = match errno {
            Errno::ACCESS | Errno::PERM | Errno::ROFS if self.handed.is_some() && intent.write => {
                "cannot reopen the descriptor for writing: check the permissions, or open it for reading \
                 and writing, without O_APPEND and O_DIRECT"
            }
            _ if self.handed.is_some() => {
                "cannot reopen the descriptor: open it for reading as well, or check the permissions of \
                 the file"
            }
            Errno::NOENT if intent.target_size.is_some() => {
                "cannot create it: create its directory first"
            }
            Errno::NOENT if intent.write => {
                "cannot open it: check the name, or create it first, for example with truncate -s 10G \
                 FILE"
            }
            Errno::NOENT if is_host_and_port(self.target) => {
                "cannot open it: for an NBD server write nbd://HOST:PORT"
            }
            Errno::NOENT => "cannot open it: check the name",
            Errno::ACCESS | Errno::PERM | Errno::ROFS if intent.target_size.is_some() => {
                "cannot open it for writing: choose another place, or change the permissions"
            }
            Errno::ACCESS | Errno::PERM | Errno::ROFS if intent.write => {
                "cannot open it for writing: open it read-only, or change the permissions"
            }
            Errno::ACCESS | Errno::PERM => "cannot open it: check its read permission",
            Errno::TXTBSY | Errno::BUSY => "cannot open it: end the program that uses it first",
            _ => "cannot open it",
        };
        system(text, errno)
    }
}

fn no_direct_growth() -> Error {
    let text = "an image that grows cannot be written with direct I/O: leave out direct=on";
    Error::new(Kind::Unsupported, text)
}

/// What is at a path before it is opened.
#[derive(Clone, Copy)]
enum There {
    Nothing,
    File,
    /// A block device with this number.
    Disk(u64),
}

/// Checks that the file system supports a size, without changing the file.
fn check_size(file: &blockhaul_io::File, size: u64) -> Result<()> {
    match seek(file, SeekFrom::Start(size)) {
        Ok(_) => Ok(()),
        Err(Errno::INVAL | Errno::OVERFLOW) => {
            Err(system(format!("cannot resize it to {size} bytes"), Errno::FBIG))
        }
        Err(errno) => Err(system("cannot determine its maximum size", errno)),
    }
}

/// Whether it is a block device; an error if it is neither that nor a regular file.
fn check_type(stat: &Stat) -> Result<bool> {
    let what = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => return Ok(false),
        FileType::BlockDevice => return Ok(true),
        FileType::Directory => {
            "is a directory: name a disk image in it, or serve all its files with dir:PATH"
        }
        FileType::Fifo => "is a pipe, without random access: use - to copy from or to it",
        FileType::Socket => "is a socket: for an NBD server write nbd+unix:///?socket=PATH",
        FileType::CharacterDevice => {
            "is a character device: use a block device or a file, or null: or zero:"
        }
        _ => "is neither a file nor a block device",
    };
    Err(Error::new(Kind::Usage, what))
}

/// Refuses all but regular files, the only ones served from a directory.
fn only_regular(stat: &Stat) -> Result<()> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        _ => Err(Error::new(
            Kind::NotFound,
            "is not a regular file, and symbolic links are not followed",
        )),
    }
}

/// Whether a file has so many blocks that overwriting them is faster than freeing and reallocating
/// them for `size` bytes: measured with 1 GiB onto a full file, 0.34 s instead of 0.80 in memory,
/// and two thirds of the processor time on ext4.
fn has_blocks(stat: &Stat, size: u64) -> bool {
    let held = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
    held >= (size / BLOCKS_SHARE).max(1)
}

fn no_direct() -> Error {
    let text = "its file system does not support direct I/O: leave out direct=on";
    Error::new(Kind::Unsupported, text)
}

fn system(text: impl Into<std::borrow::Cow<'static, str>>, errno: Errno) -> Error {
    Error::system(text, errno.into())
}

/// Whether a path looks like the address of a server.
fn is_host_and_port(target: &Target) -> bool {
    let text = target.rest.to_string_lossy();
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_host = |c: char| c.is_ascii_alphanumeric() || ".-:[]".contains(c);
    !host.is_empty() && host.chars().all(is_host) && port.parse::<u16>().is_ok()
}
