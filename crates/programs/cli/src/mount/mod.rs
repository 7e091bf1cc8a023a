//! `blockhaul mount`: a device as a local file, through FUSE.
//!
//! - `job`: the workers' part, from opening the device to the end. `filesystem`: `--filesystem`.
//!   `helper`: for mount(8).
//!   What it shares with `serve` is there: going to the background, `--run`, the service manager.

mod filesystem;
pub mod helper;
mod job;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use blockhaul_catalog::{Intent, Registry, Spec};
use blockhaul_fuse::mountpoint::{Mounted, Target};
use blockhaul_io::Runtime;

use crate::brackets::Groups;
use crate::exit::{FAILED, Failure, HELD, OPEN, Outcome, plain};
use crate::image_format::{self, Use};
use crate::serve::background::{self, Background, Directory};
use crate::serve::notify::Notify;
use crate::serve::stop::{Stop, Stopper};
use crate::serve::{close, job as serve_job, stdio};
use crate::{args, devices, logger, signals};
use filesystem::Place;
use job::{End, Job};

/// Maximum time for the device to close after it has held requests for too long.
const CLOSING: Duration = Duration::from_secs(1);

/// Runs `blockhaul mount`.
pub fn run(args: &args::Mount, groups: &Groups) -> Outcome {
    logger::start(args.verbose);
    let asked = Asked::check(args, groups)?;
    if args.background && !args.in_background {
        drop(asked);
        return background::start("mount");
    }
    // The directory may be the one that the mount covers.
    let background =
        if args.in_background { Background::enter(Directory::Root) } else { Background::none() };
    stdio::guard();
    mount(args, asked, background)
}

/// The command line, with all checks possible before anything is opened.
struct Asked {
    registry: Registry,
    spec: Spec,
    layers: Vec<String>,
    intent: Intent,
    target: Target,
}

impl Asked {
    fn check(args: &args::Mount, groups: &Groups) -> Result<Asked, Failure> {
        let registry = devices::registry(args.timeout);
        let spec = groups.spec(&args.device)?;
        let mut layers = args.layer.clone();
        if let Some(number) = args.partition {
            layers.insert(0, format!("partition?partition={number}"));
        }
        let intent = intent_below(&registry, &layers, args.writable);
        registry.target(&spec, intent)?;
        devices::layers(&registry, &layers)?;
        if let Some(text) = image_format::warning(&spec, !layers.is_empty(), Use::Served) {
            log::warn!("{text}");
        }
        if let Some(path) = &args.pid_file {
            serve_job::check_pidfile(path)?;
        }
        let target = Target::find(&args.target).map_err(|why| unmountable(&why))?;
        if args.filesystem {
            filesystem::check(&target)?;
        }
        Ok(Asked { registry, spec, layers, intent, target })
    }
}

/// The intent for opening the storage: under a layer that changes nothing it need not be writable.
fn intent_below(registry: &Registry, layers: &[String], write: bool) -> Intent {
    let kept = layers.iter().any(|layer| !devices::writes_below(registry, layer));
    if write && !kept { Intent::WRITE } else { Intent::READ }
}

fn unmountable(why: &blockhaul_fuse::mountpoint::Error) -> Failure {
    Failure::new(OPEN, why.to_string())
}

/// What is mounted now: a second signal unmounts it without waiting.
#[derive(Clone, Default)]
struct Current(Arc<Mutex<Option<Mounted>>>);

impl Current {
    fn set(&self, mounted: Option<Mounted>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = mounted;
    }

    fn unmount(&self) {
        if let Some(mounted) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
            && let Err(error) = mounted.unmount_lazily()
        {
            log::warn!("{error}");
        }
    }
}

/// Mounts on workers, while this thread waits for signals; then closes everything.
fn mount(args: &args::Mount, asked: Asked, background: Background) -> Outcome {
    let (completer, stopped) = blockhaul_io::ticket();
    let stopper = Stopper::new(completer);
    let place = Place::new(asked.target, args)?;
    let caught = signals::catch()?;
    if args.writable
        && let Err(error) = blockhaul_os::serves_writeback()
    {
        log::debug!("a file system on the disk could wait for this process: {}", plain(&error));
    }
    let config = args.engine.config(usize::from(args.workers));
    let runtime = Runtime::start(&config).map_err(|error| {
        Failure::new(FAILED, format!("cannot start workers: {}", plain(&error)))
    })?;
    let current = Current::default();
    let mut job = Job {
        registry: asked.registry,
        spec: asked.spec,
        layers: asked.layers,
        intent: asked.intent,
        write: args.writable,
        others: args.allow_other,
        cache: args.cache,
        memory: args.memory,
        place,
        current: current.clone(),
        stopper: stopper.clone(),
        background,
        notify: Notify::new(),
        pid_file: args.pid_file.clone(),
        run: args.run.clone(),
        verbose: args.verbose,
        stack: None,
    };
    let (sender, served) = mpsc::channel();
    let serving = caught.until_dropped();
    drop(runtime.remote().spawn(move || async move {
        let outcome = job.serve(stopped).await;
        // This function waits for it.
        let _ = sender.send((outcome, job));
        drop(serving);
    }));
    let first = move |signal| stopper.stop(Stop::Signal(signal));
    let at_once = current.clone();
    let mut attention = caught.on_stop(first, move || at_once.unmount());
    attention.wait();
    let (outcome, job) =
        served.recv().map_err(|_| Failure::new(FAILED, "the mount ended without a result"))?;
    finish(outcome, (job, runtime), || attention.look())
}

/// Closes the device (`open`), and returns the exit status. A device that holds requests has a
/// limited time; then the process ends without it.
fn finish(outcome: Result<End, Failure>, open: impl Send + 'static, look: impl FnMut()) -> Outcome {
    let held = matches!(&outcome, Ok(End { held: 1.., .. }));
    let ended = close(move || drop(open), held.then_some(CLOSING), look);
    let End { status, held } = outcome?;
    if held == 0 && ended.is_some() {
        return Ok(status);
    }
    log::warn!(held; "the device held {held} requests for too long after the unmount");
    std::process::exit(i32::from(if status == 0 { HELD } else { status }))
}

/// The path of the disk, and that of the place, for `--run`.
fn variables(disk: &std::path::Path, target: &std::path::Path) -> [(&'static str, String); 2] {
    let text = |path: &std::path::Path| path.display().to_string();
    [("disk", text(disk)), ("target", text(target))]
}

/// The file of the disk.
fn disk_of(mounted: &Mounted, is_folder: bool) -> PathBuf {
    if is_folder { mounted.path().join(blockhaul_fuse::DISK) } else { mounted.path().to_path_buf() }
}
