//! `blockhaul bench`: measures one device or one server; blockhaul-bench does the rest.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use blockhaul_catalog::brackets::Groups;
use blockhaul_measure::DeviceContext;

use crate::args::{BenchAction, BenchArgs};
use crate::exit::{CommandFailure, plain};
use crate::{devices, logger, out};

/// Maximum time without a reply until a server connection is dropped.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Measures a device or a server, or executes blockhaul-bench for all other commands.
pub fn run(bench: BenchArgs, groups: &Groups) -> ExitCode {
    let spec = |word: &OsStr| groups.spec(word);
    let devices = || DeviceContext { registry: devices::registry(TIMEOUT), spec: &spec };
    let measured = match bench.action {
        Some(BenchAction::Device(device)) => device.run(&devices()).map(|text| (text, 0)),
        Some(BenchAction::Load(load)) => load.run(&devices()),
        None => return failed(&become_other()),
    };
    match measured {
        Ok((text, status)) => match out::print(text.as_bytes()) {
            Ok(_) => ExitCode::from(status),
            Err(failure) => failed(&failure),
        },
        Err(error) => {
            logger::failure("bench: ", &error.to_string());
            ExitCode::from(error.status())
        }
    }
}

fn failed(failure: &CommandFailure) -> ExitCode {
    logger::failure("bench: ", &failure.to_string());
    ExitCode::from(failure.status())
}

/// Replaces this process; returns only on failure.
fn become_other() -> CommandFailure {
    let this = std::env::current_exe().ok();
    let beside = this.as_ref().map(|this| this.with_file_name("blockhaul-bench"));
    let program = beside.filter(|path| path.is_file()).unwrap_or(PathBuf::from("blockhaul-bench"));
    // The words after `bench` as typed, including brackets.
    let words: Vec<OsString> =
        std::env::args_os().skip_while(|word| word != "bench").skip(1).collect();
    let mut command = Command::new(&program);
    command.args(words);
    if let Some(this) = this {
        // The program to measure, unless --blockhaul names another one.
        command.env("BLOCKHAUL_PROGRAM", this);
    }
    let error = command.exec();
    if error.kind() != std::io::ErrorKind::NotFound {
        return CommandFailure::usage(format!(
            "cannot start {}: {}",
            program.display(),
            plain(&error)
        ));
    }
    CommandFailure::usage(
        "the program blockhaul-bench is not installed, which does all of blockhaul bench but bench device and \
         bench load: install it next to blockhaul (from its source: cargo install --locked --path \
         tools/bench)",
    )
}
