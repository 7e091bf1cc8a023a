//! Loop devices, and disks that lose data when the kernel writes it back. They need root.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use blockhaul_testkit::tools::{self, ScratchDir, text as lossy};
use rustix::fs::{Mode, OFlags};

use crate::{LIMIT, text};

/// Size of a page, and of a bad place of a [`LossyDisk`], in bytes.
pub const PAGE: u64 = 4096;

/// A loop device over a file, until it is dropped.
pub struct Loop {
    /// Its path.
    pub device: String,
}

impl Loop {
    /// `None`, and the reason on standard error, where this machine does not let us.
    pub fn over(file: &Path) -> Option<Loop> {
        Loop::with(&[], file)
    }

    /// The same, with options of losetup.
    pub fn with(options: &[&str], file: &Path) -> Option<Loop> {
        let args = [&["--find", "--show"], options, &[text(file)]].concat();
        let device = setup("losetup", &args)?;
        Some(Loop { device })
    }

    /// Waits until it is not mounted any more, in no mount namespace: another process may have copied the
    /// mount into its own.
    #[track_caller]
    pub fn wait_until_closed(&self) {
        let exclusive = OFlags::RDONLY | OFlags::EXCL;
        tools::until("no other mount namespace has it", || {
            rustix::fs::open(&self.device, exclusive, Mode::empty()).is_ok()
        });
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // The kernel would keep the flag of a test that made the device read-only for the next file.
        let _ = Command::new("blockdev").args(["--setrw", &self.device]).status();
        let status = Command::new("losetup").args(["--detach", &self.device]).status();
        assert!(status.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

/// A loop device whose writes succeed into the page cache, but whose writeback fails: its file is on a
/// tmpfs without free space.
pub struct LossyDisk {
    disk: Loop,
    folder: Mounted,
    _scratch: ScratchDir,
}

impl LossyDisk {
    /// A sparse disk of `size` bytes whose file system has space for `room`. `None`, and the reason on
    /// standard error, where this machine does not let us.
    ///
    /// # Panics
    /// Where the scratch directory cannot be used.
    pub fn full(size: u64, room: u64) -> Option<LossyDisk> {
        LossyDisk::over(room, |file| file.set_len(size))
    }

    /// A disk of `size` bytes that stores everything but the pages at these offsets, which are ascending
    /// multiples of [`PAGE`]. `None` as for [`LossyDisk::full`].
    ///
    /// # Panics
    /// Where the scratch directory cannot be used.
    pub fn with_bad_places(size: u64, bad: &[u64]) -> Option<LossyDisk> {
        let disk = LossyDisk::over(2 * size, |file| {
            file.set_len(size)?;
            let starts = bad.iter().map(|at| at + PAGE);
            let ends = bad.iter().copied();
            for (start, end) in [0].into_iter().chain(starts).zip(ends.chain([size])) {
                file.write_all_at(&vec![0; (end - start) as usize], start)?;
            }
            Ok(())
        })?;
        let stored = disk.file().metadata().expect("the file is there").blocks() * 512;
        if stored != size - bad.len() as u64 * PAGE {
            tools::skip("this tmpfs does not store single pages");
            return None;
        }
        disk.resize(stored)?;
        // The loop driver of some kernels (Linux 6.18) takes a write that is cut short for a success: each
        // page is a request of its own, which is either stored or fails.
        let name = disk.device().trim_start_matches("/dev/");
        let limit = format!("/sys/block/{name}/queue/max_sectors_kb");
        if let Err(error) = std::fs::write(&limit, (PAGE / 1024).to_string()) {
            tools::skip(format!("{limit}: {error}"));
            return None;
        }
        Some(disk)
    }

    fn over(room: u64, fill: impl FnOnce(&File) -> io::Result<()>) -> Option<LossyDisk> {
        let scratch = ScratchDir::on_disk().expect("a scratch directory");
        let folder = scratch.file("storage");
        std::fs::create_dir(&folder).expect("a scratch directory can be written");
        let options = format!("huge=never,size={room}");
        setup("mount", &["-t", "tmpfs", "-o", &options, "tmpfs", text(&folder)])?;
        let folder = Mounted(folder);
        let file = folder.0.join("disk");
        File::create(&file).and_then(|file| fill(&file)).expect("the tmpfs can be written");
        Some(LossyDisk { disk: Loop::over(&file)?, folder, _scratch: scratch })
    }

    /// The path of the disk.
    pub fn device(&self) -> &str {
        &self.disk.device
    }

    /// The file that the disk stores its data in: what is on the disk whatever the page cache of the disk
    /// holds.
    pub fn file(&self) -> PathBuf {
        self.folder.0.join("disk")
    }

    /// From now on the disk stores everything, up to `room` bytes.
    ///
    /// # Panics
    /// Where the file system cannot be made larger.
    pub fn heal(&self, room: u64) {
        self.resize(room).expect("a tmpfs can be made larger");
    }

    fn resize(&self, room: u64) -> Option<()> {
        let options = format!("remount,size={room}");
        setup("mount", &["-o", &options, text(&self.folder.0)]).map(|_| ())
    }
}

/// A mounted file system, until it is dropped.
pub struct Mounted(PathBuf);

impl Mounted {
    /// Makes the directory `at` and mounts there; `args` are the arguments of mount before it. `None`, and
    /// the reason on standard error, where this machine does not let us.
    ///
    /// # Panics
    /// Where the directory cannot be made.
    pub fn new(args: &[&str], at: &Path) -> Option<Mounted> {
        std::fs::create_dir_all(at).expect("a scratch directory can be written");
        setup("mount", &[args, &[text(at)]].concat())?;
        Some(Mounted(at.to_owned()))
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: the kernel closes the file of a detached loop device a moment later.
        setup("umount", &["--lazy", text(&self.0)]);
    }
}

/// Runs a command that needs rights; gives what it printed.
fn setup(program: &str, args: &[&str]) -> Option<String> {
    let output = tools::output(Command::new(program).args(args), LIMIT);
    match output {
        Ok(output) if output.status.success() => Some(lossy(&output.stdout).trim().to_string()),
        Ok(output) => {
            tools::skip(format!("{program} {args:?}: {}", lossy(&output.stderr)));
            None
        }
        Err(why) => {
            tools::skip(why);
            None
        }
    }
}
