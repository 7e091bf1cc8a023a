//! `blockhaul bench`: `bench device` is part of this program; blockhaul-bench does the rest.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use blockhaul_bench::args::Action;
use blockhaul_bench::{Args, Devices};
use blockhaul_catalog::brackets::Groups;

use crate::exit::{Failure, plain};
use crate::{devices, logger};

/// Maximum time without a reply until a server connection is dropped.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Measures a device, or executes the program for all other commands.
pub fn run(args: Args, groups: &Groups) -> ExitCode {
    if let Some(Action::Device(device)) = &args.action {
        let spec = |word: &OsStr| groups.spec(word);
        let devices = Devices { registry: devices::registry(TIMEOUT), spec: &spec };
        return blockhaul_bench::measure_device(device, &devices);
    }
    let failure = become_other(&args);
    logger::failure("bench: ", &failure.to_string());
    ExitCode::from(failure.status())
}

/// Replaces this process; returns only on failure.
fn become_other(args: &Args) -> Failure {
    let this = std::env::current_exe().ok();
    let beside = this.as_ref().map(|this| this.with_file_name("blockhaul-bench"));
    let program = beside.filter(|path| path.is_file()).unwrap_or(PathBuf::from("blockhaul-bench"));
    // The words after `bench` as typed, including brackets.
    let mut words: Vec<OsString> =
        std::env::args_os().skip_while(|word| word != "bench").skip(1).collect();
    if let Some(this) = this.filter(|_| args.lacks_program()) {
        words.push("--blockhaul".into());
        words.push(this.into_os_string());
    }
    let error = Command::new(&program).args(words).exec();
    if error.kind() != std::io::ErrorKind::NotFound {
        return Failure::usage(format!("cannot start {}: {}", program.display(), plain(&error)));
    }
    Failure::usage(
        "the program blockhaul-bench is not installed, which does all of blockhaul bench but bench device: \
         install it next to blockhaul (from its source: cargo install --locked --path \
         crates/programs/bench)",
    )
}
