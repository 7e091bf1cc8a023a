//! Devices and copies for programs that are not this command: the same registry, options and checks.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Registry, Spec};
use blockhaul_engine::Progress;
use blockhaul_io::{Pool, Runtime};
use blockhaul_transfer::{CopyReport, CopyRequest, CopySetup, Endpoint, TransferOptions};

use crate::args::{self, CopyArgs};
use crate::copy::copy_options;
use crate::devices;
pub use crate::exit::Failure;

/// Everything that can be opened. A connection is dropped after `timeout` without a byte (zero:
/// never); servers are asked for these metadata contexts besides `base:allocation`.
pub fn registry(timeout: Duration, contexts: &[String]) -> Registry {
    devices::registry_asking(timeout, 0, contexts)
}

/// Like [`registry`], for servers of these devices: connections may stay silent for a minute.
pub fn serving_registry() -> Registry {
    devices::registry(Duration::from_secs(60))
}

/// Options of a connection that is dropped after `timeout` without a byte (zero: never).
pub fn connecting(timeout: Duration) -> blockhaul_client::Options {
    devices::connecting(timeout)
}

/// A copy of one disk that has not begun.
pub struct Copy(CopySetup);

impl Copy {
    /// Parses the options of `blockhaul copy`, with all checks possible without opening anything.
    /// `options` are words of the command line, without the two devices.
    ///
    /// # Errors
    /// If an option is unknown, has an invalid value, or cannot be used here: those of standard
    /// streams, of several disks, and those that set up a whole process.
    pub fn new(source: Spec, target: Spec, options: Vec<OsString>) -> Result<Copy, Failure> {
        let ends = ["source", "target"].map(OsString::from);
        let words = options.into_iter().chain(ends).collect();
        let parsed = args::parse_command::<CopyArgs>("copy", words);
        let (args, _) = parsed.map_err(|error| Failure::usage(first_line(&error.to_string())))?;
        if [&source, &target].contains(&&Spec::Pipe) {
            return Err(Failure::usage("- is a standard stream: use a device on both sides"));
        }
        let of_a_process =
            args.job.is_some() || !args.metrics.is_empty() || args.progress.is_some();
        if of_a_process {
            let text = "--job, --metrics and --progress are for the command only";
            return Err(Failure::usage(text));
        }
        let ends = [source, target].map(Endpoint::Device);
        let [source, target] = ends;
        let options = TransferOptions::from(&args);
        copy_options::set_up(CopyRequest { options, ..CopyRequest::new(source, target) }).map(Copy)
    }

    /// The counters of the copy, also while it runs; they can cancel it.
    pub fn progress(&self) -> Arc<Progress> {
        self.0.control().progress().clone()
    }

    /// Copies, and waits for the end: not on a worker.
    ///
    /// # Errors
    /// The failed side, and why. After a cancel, the state of the target.
    pub fn run(self, runtime: &Runtime) -> Result<CopyReport, Failure> {
        let Copy(setup) = self;
        let pool = Pool::new(setup.memory());
        let control = setup.control();
        let result = runtime.block_on(move || async move {
            setup.open_source().await?.open_target().await?.run(pool).await
        });
        let note = control.discarded_note().unwrap_or_default();
        let failed = |error| {
            let failure = Failure::from(error);
            if !control.progress().is_cancelled() {
                return failure.and(&note);
            }
            let text = format!("stopped{}", control.target_state());
            Failure::new(failure.status(), text).and(&note)
        };
        result.map_err(failed)
    }
}

/// The message of the parser without its usage.
fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_string()
}

/// Parses a device as a program would type it; `-` is not one.
///
/// # Errors
/// [`Kind::Usage`] if it is empty or a standard stream.
pub fn device(word: &std::ffi::OsStr) -> Result<Spec> {
    match Spec::parse(word)? {
        Spec::Pipe => Err(Error::new(Kind::Usage, "- is a standard stream, not a device")),
        spec => Ok(spec),
    }
}
