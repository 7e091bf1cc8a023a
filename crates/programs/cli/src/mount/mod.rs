//! `blockhaul mount`: devices as local files, through FUSE.
//!
//! - `disks`: what is shown. `place`: where. `job`: the workers' part, from opening the devices to the
//!   end. `helper`: for mount(8).
//!   What it shares with `serve` is there: going to the background, `--run`, the service manager.

mod disks;
pub mod helper;
mod job;
mod place;

use std::sync::mpsc;
use std::time::Duration;

use blockhaul_fuse::FileSystemTarget;
use blockhaul_fuse::mountpoint::MountTarget;
use blockhaul_io::Runtime;
use blockhaul_server::ServiceNotifier;

use crate::brackets::Groups;
use crate::exit::{CommandFailure, CommandResult, FAILED, HELD, plain};
use crate::serve::background::{self, BackgroundProcess, WorkingDirectory};
use crate::serve::stop::{StopReason, Stopper};
use crate::serve::{close, job as serve_job, stdio};
use crate::{args, signals};
use disks::{MountDisks, MountSources};
use job::{MountOutcome, MountSetup};
use place::{CurrentMount, MountLocation, no_file_system, unmountable};

/// Maximum time for the device to close after it has held requests for too long.
const CLOSING: Duration = Duration::from_secs(1);

/// Runs `blockhaul mount`.
pub fn run(args: &args::MountArgs, groups: &Groups) -> CommandResult {
    args.log.start(args.verbose);
    let asked = MountRequest::check(args, groups)?;
    if args.background && !args.in_background {
        drop(asked);
        return background::start("mount");
    }
    // The directory may be the one that the mount covers.
    let background = if args.in_background {
        BackgroundProcess::enter(WorkingDirectory::Root)
    } else {
        BackgroundProcess::none()
    };
    stdio::guard();
    mount(args, asked, background)
}

/// The command line, with all checks possible before anything is opened.
struct MountRequest {
    disks: MountSources,
    target: MountTarget,
}

impl MountRequest {
    fn check(args: &args::MountArgs, groups: &Groups) -> Result<MountRequest, CommandFailure> {
        let disks = MountSources::new(args, groups)?;
        if let Some(path) = &args.pid_file {
            serve_job::check_pidfile(path)?;
        }
        let target = MountTarget::find(args.places().1).map_err(|why| unmountable(&why))?;
        if disks.need_directory() {
            check_several(args, &target)?;
        }
        if args.filesystem {
            FileSystemTarget::check(&target).map_err(no_file_system)?;
        }
        Ok(MountRequest { disks, target })
    }
}

/// Refuses what cannot be done with several disks.
fn check_several(args: &args::MountArgs, target: &MountTarget) -> Result<(), CommandFailure> {
    let shown = target.path().display();
    if args.filesystem {
        let text = "--filesystem: mounts one file system: give it one DEVICE";
        return Err(CommandFailure::usage(text));
    }
    if !target.is_folder() {
        let text = format!("{shown} is not a directory: several disks need one");
        return Err(CommandFailure::usage(text));
    }
    Ok(())
}

/// Mounts on workers, while this thread waits for signals; then closes everything.
fn mount(
    args: &args::MountArgs,
    asked: MountRequest,
    background: BackgroundProcess,
) -> CommandResult {
    let (completer, stopped) = blockhaul_io::ticket();
    let stopper = Stopper::new(completer);
    let place = MountLocation::new(asked.target, args)?;
    let caught = signals::catch()?;
    if args.writable
        && let Err(error) = blockhaul_os::serves_writeback()
    {
        log::debug!("a file system on the disk could wait for this process: {}", plain(&error));
    }
    let config = args.engine.config(usize::from(args.workers));
    let runtime = Runtime::start(&config).map_err(|error| {
        CommandFailure::new(FAILED, format!("cannot start workers: {}", plain(&error)))
    })?;
    let current = CurrentMount::default();
    let mut job = MountSetup {
        wanted: asked.disks,
        disks: MountDisks::default(),
        others: args.allow_other,
        cache: args.cache,
        memory: args.memory,
        place,
        current: current.clone(),
        stopper: stopper.clone(),
        background,
        notify: ServiceNotifier::new(),
        pid_file: args.pid_file.clone(),
        run: args.run.clone(),
        verbose: args.verbose,
    };
    let (sender, served) = mpsc::channel();
    let serving = caught.until_dropped();
    drop(runtime.remote().spawn(move || async move {
        let outcome = job.serve(stopped).await;
        // This function waits for it.
        let _ = sender.send((outcome, job));
        drop(serving);
    }));
    let first = move |signal| stopper.stop(StopReason::Signal(signal));
    let at_once = current.clone();
    let mut attention = caught.on_stop(first, move || at_once.unmount());
    attention.wait();
    let (outcome, job) = served
        .recv()
        .map_err(|_| CommandFailure::new(FAILED, "the mount ended without a result"))?;
    finish(outcome, (job, runtime), || attention.look())
}

/// Closes the device (`open`), and returns the exit status. A device that holds requests has a
/// limited time; then the process ends without it.
fn finish(
    outcome: Result<MountOutcome, CommandFailure>,
    open: impl Send + 'static,
    look: impl FnMut(),
) -> CommandResult {
    let held = matches!(&outcome, Ok(MountOutcome { held: 1.., .. }));
    let ended = close(move || drop(open), held.then_some(CLOSING), look);
    let MountOutcome { status, held } = outcome?;
    if held == 0 && ended.is_some() {
        return Ok(status);
    }
    log::warn!(held; "the device held {held} requests for too long after the unmount");
    std::process::exit(i32::from(if status == 0 { HELD } else { status }))
}
