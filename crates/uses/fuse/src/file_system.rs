//! A loop device over a mounted disk, and the mount of its file system. Both are made by losetup(8) and
//! mount(8), which know all types of file systems.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use blockhaul_io::plain;

use crate::mountpoint::MountTarget;

/// The kinds of reasons why a file system is not mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystemErrorKind {
    /// The target is not a directory.
    Target,
    /// Only root may mount.
    Permission,
    /// No loop device can be made.
    LoopDevice,
    /// mount(8) has failed.
    Mount,
}

/// The reason why a file system is not mounted, with a remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystemError {
    /// The kind of the reason.
    pub kind: FileSystemErrorKind,
    text: String,
}

impl FileSystemError {
    fn new(kind: FileSystemErrorKind, text: impl Into<String>) -> FileSystemError {
        FileSystemError { kind, text: text.into() }
    }
}

impl fmt::Display for FileSystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for FileSystemError {}

/// The file system to mount.
#[derive(Clone)]
pub struct FileSystemTarget {
    /// The directory on which it is mounted.
    pub target: PathBuf,
    /// Options, as for `mount -o`.
    pub options: Option<String>,
}

/// A mounted file system with its loop device, which ends with it: when somebody unmounts it, even
/// after this program was killed.
pub struct FileSystem {
    target: PathBuf,
    /// The loop device, as /dev/loopN.
    device: String,
}

impl FileSystemTarget {
    /// Checks that a file system can be mounted on this target by this process.
    ///
    /// # Errors
    /// [`FileSystemErrorKind::Target`] and [`FileSystemErrorKind::Permission`].
    pub fn check(target: &MountTarget) -> Result<(), FileSystemError> {
        if !target.is_folder() {
            let text = format!("{} is not a directory", target.path().display());
            return Err(FileSystemError::new(FileSystemErrorKind::Target, text));
        }
        if !rustix::process::geteuid().is_root() {
            let text = "only root can mount a file system: run it as root, or mount without \
                        --filesystem and open TARGET/disk with a program that reads file systems, for \
                        example fuse2fs -o fakeroot,ro TARGET/disk DIR";
            return Err(FileSystemError::new(FileSystemErrorKind::Permission, text));
        }
        Ok(())
    }

    /// Makes the loop device and mounts the file system of `disk`, a file. Blocks.
    ///
    /// # Errors
    /// [`FileSystemErrorKind::LoopDevice`] and [`FileSystemErrorKind::Mount`].
    pub fn mount(self, disk: &Path, write: bool) -> Result<FileSystem, FileSystemError> {
        let mut words: Vec<&OsStr> = ["--find", "--show", "--direct-io=on"].map(OsStr::new).into();
        if !write {
            words.push(OsStr::new("--read-only"));
        }
        words.push(disk.as_os_str());
        let device = run("losetup", &words).map_err(|why| {
            let text = format!("cannot make a loop device: {why}");
            FileSystemError::new(FileSystemErrorKind::LoopDevice, text)
        })?;
        let mounted = FileSystem { target: self.target, device: device.trim().to_string() };
        let options = match (write, self.options) {
            (true, options) => options.unwrap_or_else(|| "rw".into()),
            (false, None) => "ro".into(),
            (false, Some(options)) => format!("ro,{options}"),
        };
        let target = mounted.target.as_os_str();
        let words = ["-o", &options, "--", &mounted.device].map(OsStr::new);
        match run("mount", &[&words[..], &[target]].concat()) {
            Ok(_) => {
                // It is in use: the kernel removes it with the mount.
                mounted.detach();
                Ok(mounted)
            }
            Err(why) => {
                mounted.detach();
                let hint = if is_partitioned(disk) {
                    "; the device has a partition table: choose a partition with --partition N"
                } else if write {
                    ""
                } else {
                    "; if the file system was not unmounted cleanly, add --writable --layer cow, so \
                         that it can be repaired without a change to the device"
                };
                let why = why.trim_end_matches('.');
                let text = format!("cannot mount the file system: {why}{hint}");
                Err(FileSystemError::new(FileSystemErrorKind::Mount, text))
            }
        }
    }
}

impl FileSystem {
    /// The loop device.
    pub fn device(&self) -> &Path {
        Path::new(&self.device)
    }

    /// Unmounts it. Blocks.
    pub fn unmount(&self) {
        let target = self.target.as_os_str();
        let Err(why) = run("umount", &[OsStr::new("--"), target]) else { return };
        log::warn!("{why}: unmounting it as soon as nobody uses it");
        let lazily = [OsStr::new("--lazy"), OsStr::new("--"), target];
        if let Err(why) = run("umount", &lazily) {
            log::warn!("{why}");
        }
    }

    /// Removes the loop device, now or when the file system is unmounted.
    fn detach(&self) {
        if let Err(why) = run("losetup", &["--detach", &self.device].map(OsStr::new)) {
            log::warn!("{why}");
        }
    }
}

/// Whether a disk begins with a partition table, GPT or MBR, as far as it can be read.
fn is_partitioned(disk: &Path) -> bool {
    let mut head = [0; 520];
    let read = File::open(disk).and_then(|file| file.read_exact_at(&mut head, 0));
    // A boot sector of a file system ends in the same bytes, but could be mounted.
    read.is_ok() && (head[510..512] == [0x55, 0xaa] || head[512..] == *b"EFI PART")
}

/// Runs a program to its end; returns its output, or what it says is wrong.
fn run(program: &str, words: &[&OsStr]) -> Result<String, String> {
    let ran = Command::new(program).args(words).stdin(Stdio::null()).output();
    let ran = ran.map_err(|error| format!("{program}: {}", plain(&error)))?;
    if ran.status.success() {
        return Ok(String::from_utf8_lossy(&ran.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&ran.stderr);
    let said = said.lines().map(str::trim).find(|line| !line.is_empty());
    Err(said.map_or_else(|| format!("{program} has failed"), str::to_string))
}
