//! The workers' part of a mount: opens the devices, mounts, signals readiness, and unmounts.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockhaul_fuse::mountpoint::MountedDisk;
use blockhaul_fuse::{
    FileSystem, Files, MountConfig, MountEnd, PageCacheMode, Permissions, Session,
};
use blockhaul_io::{Task, Ticket, offload};
use blockhaul_server::ServiceNotifier;

use super::disks::{MountDisks, MountSources};
use super::place::{CurrentMount, MountLocation, no_file_system, unmountable};
use crate::exit::{CommandFailure, FAILED, TARGET, plain};
use crate::serve::background::BackgroundProcess;
use crate::serve::command::{self, RunningCommand};
use crate::serve::job::write_pid;
use crate::serve::stdio;
use crate::serve::stop::{StopReason, Stopper};
use crate::{logger, signals};

/// Bytes that the kernel reads ahead: several of the largest requests, so that a copy does not wait
/// for each.
const READ_AHEAD: u64 = 4 << 20;

/// Time after which a mount that does not end is reported.
const PATIENCE: Duration = Duration::from_secs(1);

/// Everything that a mount needs.
pub struct MountSetup {
    pub wanted: MountSources,
    /// The open disks: to be closed when no worker needs them any more.
    pub disks: MountDisks,
    pub others: bool,
    pub cache: PageCacheMode,
    pub memory: u64,
    pub place: MountLocation,
    pub current: CurrentMount,
    pub stopper: Stopper,
    pub background: BackgroundProcess,
    pub notify: ServiceNotifier,
    pub pid_file: Option<PathBuf>,
    pub run: Option<String>,
    pub verbose: bool,
}

/// Says why the program does not end: files are still open, or other mount namespaces have copies of
/// the mount.
async fn tell_if_used(place: PathBuf) {
    blockhaul_io::sleep(PATIENCE).await;
    log::warn!(
        "{} is unmounted, but still in use: waiting until its files are closed; repeat the signal to \
         end at once",
        place.display()
    );
}

/// How a mount ended.
pub struct MountOutcome {
    /// Exit status of the program.
    pub status: u8,
    /// Requests that the device still has.
    pub held: usize,
}

impl MountSetup {
    /// Mounts, and serves until it is stopped.
    pub async fn serve(
        &mut self,
        stopped: Ticket<StopReason>,
    ) -> Result<MountOutcome, CommandFailure> {
        self.wanted.open(&mut self.disks).await?;
        let is_folder = self.place.target().is_folder();
        let permissions = Permissions {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            write: self.wanted.write(),
            others: self.others,
        };
        let session = Session::new(MountConfig {
            files: Files {
                info: is_folder.then(|| self.disks.info()),
                permissions,
                time: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            },
            disks: self.disks.shown(),
            cache: self.cache,
            memory: self.memory,
        });
        let target = self.place.target().clone();
        let source = self.wanted.source();
        let mounting = offload(move || target.mount(&source, &permissions));
        let mounted =
            mounting.await.map_err(|lost| CommandFailure::new(FAILED, lost.to_string()))?;
        let (mounted, connection) = mounted.map_err(|why| unmountable(&why))?;
        self.current.set(Some(mounted.clone()));
        let stopper = self.stopper.clone();
        let serving = blockhaul_io::spawn(async move {
            let ended = session.serve(connection).await;
            stopper.stop(StopReason::Left);
            ended
        });
        let mut file_system = None;
        let shown = self.while_mounted(&mounted, is_folder, &mut file_system, stopped).await;
        self.notify.stopping("unmounting");
        let ended = self.end(&mounted, file_system, serving).await;
        let status = shown?;
        let ended = ended?;
        if let Err(error) = ended.flush {
            let text = format!("what was written last may be lost: {error}");
            return Err(CommandFailure::new(TARGET, text));
        }
        if let Err(error) = ended.written_back {
            let text =
                format!("what programs have written to a mapping of the file is lost: {error}");
            return Err(CommandFailure::new(TARGET, text));
        }
        Ok(MountOutcome { status, held: ended.held })
    }

    /// What happens while it is mounted; returns the exit status when it is to be unmounted.
    async fn while_mounted(
        &self,
        mounted: &MountedDisk,
        is_folder: bool,
        file_system: &mut Option<FileSystem>,
        stopped: Ticket<StopReason>,
    ) -> Result<u8, CommandFailure> {
        let disk = self.first_disk(mounted, is_folder);
        let place = mounted.clone();
        let write = self.wanted.write();
        let reading = offload(move || place.read_ahead(READ_AHEAD));
        // A slower mount is a mount, too.
        let _ = reading.await;
        if let Some(wanted) = self.place.file_system() {
            let disk = disk.clone();
            let mounting = offload(move || wanted.mount(&disk, write));
            let lost =
                |lost: blockhaul_io::LostCompletion| CommandFailure::new(FAILED, lost.to_string());
            *file_system = Some(mounting.await.map_err(lost)?.map_err(no_file_system)?);
        }
        let disk = match file_system {
            None => disk,
            Some(file_system) => {
                self.hide(mounted).await?;
                file_system.device().to_path_buf()
            }
        };
        if let Some(path) = &self.pid_file {
            write_pid(path)?;
        }
        let shown = self.shown(&disk).to_path_buf();
        self.announce(&shown);
        self.background.ready("", self.verbose)?;
        let mut child = self.start_command(&disk)?;
        stdio::let_go();
        self.notify.ready(&format!("mounted at {}", shown.display()));
        let why = match stopped.await.unwrap_or(StopReason::Command(FAILED)) {
            StopReason::Signal(_) if signals::ends_by_itself() => StopReason::Ended,
            why => why,
        };
        if let (StopReason::Signal(_), Some(child)) = (&why, &mut child) {
            child.stop();
        }
        Ok(match (why, child) {
            (StopReason::Command(status), _) => status,
            (StopReason::Signal(signal), Some(_)) => signals::status(signal),
            (StopReason::Ended, Some(child)) => {
                offload(move || child.wait()).await.unwrap_or(FAILED)
            }
            _ => 0,
        })
    }

    /// Unmounts the disk as soon as the loop device does not use it any more, and removes its
    /// directory: the user's mount is then the only one, and the session ends with it.
    async fn hide(&self, mounted: &MountedDisk) -> Result<(), CommandFailure> {
        let place = mounted.clone();
        let unmounting = offload(move || place.unmount_lazily()).await;
        let unmounted = unmounting.map_err(|lost| CommandFailure::new(FAILED, lost.to_string()))?;
        unmounted.map_err(|why| unmountable(&why))?;
        self.current.set(None);
        self.place.remove();
        Ok(())
    }

    /// The file of the first disk.
    fn first_disk(&self, mounted: &MountedDisk, is_folder: bool) -> PathBuf {
        let path = mounted.path();
        if is_folder { path.join(self.disks.first()) } else { path.to_path_buf() }
    }

    /// What the user gets: the file of the disk, or the directory with the files.
    fn shown<'a>(&'a self, disk: &'a Path) -> &'a Path {
        match self.wanted.only() {
            Some(_) => self.place.shown(disk),
            None => self.place.path(),
        }
    }

    fn announce(&self, shown: &Path) {
        if self.run.is_some() {
            return;
        }
        let write = if self.wanted.write() { "read-write" } else { "read-only" };
        let shown = shown.display();
        logger::announce(&match self.wanted.only() {
            Some(spec) => format!("{spec} ({write}) is {shown}"),
            None => format!("{} disks ({write}) are in {shown}", self.disks.count()),
        });
    }

    /// Starts the command of `--run`, whose end unmounts.
    fn start_command(&self, disk: &Path) -> Result<Option<RunningCommand>, CommandFailure> {
        let Some(script) = &self.run else { return Ok(None) };
        let stopper = self.stopper.clone();
        let ended = move |status| stopper.stop(StopReason::Command(status));
        command::start(script, &variables(disk, self.place.path()), ended).map(Some)
    }

    /// Unmounts, and waits for the end of the session.
    async fn end(
        &mut self,
        mounted: &MountedDisk,
        file_system: Option<FileSystem>,
        serving: Task<std::io::Result<MountEnd>>,
    ) -> Result<MountEnd, CommandFailure> {
        let lost =
            |lost: blockhaul_io::LostCompletion| CommandFailure::new(FAILED, lost.to_string());
        let file_system = file_system.filter(|_| !serving.is_finished());
        if let Some(file_system) = file_system {
            offload(move || file_system.unmount()).await.map_err(lost)?;
        }
        // Not with a file system: `hide` has unmounted it.
        if !serving.is_finished() {
            let place = mounted.clone();
            // Never on a worker, which would have to reply to the kernel's question.
            let unmounted = offload(move || place.unmount()).await.map_err(lost)?;
            unmounted.map_err(|why| unmountable(&why))?;
        }
        let watch = blockhaul_io::spawn(tell_if_used(self.place.path().to_path_buf()));
        let ended = serving.await;
        watch.cancel();
        self.current.set(None);
        self.place.remove();
        ended.map_err(|error| {
            let text = format!("cannot read requests of the kernel: {}", plain(&error));
            CommandFailure::new(FAILED, text)
        })
    }
}

/// The path of the disk, and that of the place, for `--run`.
fn variables(disk: &Path, target: &Path) -> [(&'static str, OsString); 2] {
    [("disk", disk.into()), ("target", target.into())]
}
