//! The `blockhaul` command: serves, copies and inspects disk images over NBD.
//!
//! - `args`: every option, declared once; help, man pages and completions are derived from it
//!   (`generate`, `manual`).
//! - `serve`, `copy`, `info` (with `map`): one command each.
//! - `compat`: the program under the names of nbdkit and of libnbd's programs.
//! - `mount`: a device as a local file.
//! - `tls_init`: keys and certificates.
//! - `check`: `compare`, `verify` and `checksum`.
//! - `image_check`: `check`, of the tables of an image. `image_change`: `resize`.
//!   `image_backing`: `rebase` and `commit`. `image_bitmap`: `bitmap`. `image_tools`: `create`, `measure`, `snapshot` and `info --chain`.
//!   `image_format`: images that are given by their paths, and partitions.
//! - `jobs`: several disks in one run, listed in a file (`jobfile`); `session`: the environment of
//!   copies.
//! - `pull`, `restore`, `chain`: backups of disks in directories, with increments. `backup_run`: how they and `verify`
//!   ended, for programs and for monitoring.
//! - `bench`: measures one device; the program blockhaul-bench does the rest.
//! - `metrics`: `--metrics` and `--page`. `ctl`: the client of a server's control socket.
//! - `plugin`: the description of a plugin.
//! - `devices`: the registry of backends and layers, and the help about them.
//! - `exit`: failures, remedies, and exit statuses.
//! - `progress`, `signals`, `out`, `logger`: shared by the commands.

mod args;
mod backup_run;
#[cfg(feature = "bench")]
mod bench;
mod chain;
mod check;
mod compat;
mod copy;
mod ctl;
mod devices;
mod doctor;
mod exit;
mod follow;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod generate;
mod help;
#[cfg(feature = "formats")]
mod image_backing;
#[cfg(feature = "formats")]
mod image_bitmap;
#[cfg(feature = "formats")]
mod image_change;
#[cfg(feature = "formats")]
mod image_check;
mod image_format;
#[cfg(feature = "formats")]
mod image_tools;
mod info;
mod jobfile;
mod jobs;
mod logger;
mod manual;
mod metrics;
#[cfg(feature = "fuse")]
mod mount;
mod out;
mod plugin;
mod plugin_host;
mod progress;
mod pull;
mod restore;
mod serve;
mod session;
mod signals;
mod syslog;
mod tls_init;

use std::process::ExitCode;
use std::time::Duration;

use args::CliCommand;
use std::sync::Arc;

use blockhaul_catalog::brackets;
use exit::{CommandFailure, CommandResult};
use logger::LogFormat;

/// Maximum time for plugins to end before the program ends without them.
const PLUGINS_END: Duration = Duration::from_secs(10);

/// Runs the command with the arguments of this process, and returns its exit status.
pub fn main() -> ExitCode {
    // Continuing after a panic could write wrong data, and this program has no other duties.
    blockhaul_io::abort_on_panic();
    // The limit of `ulimit -f` is then an error of a write. Programs that this one starts do not
    // inherit a handler. It can only fail for signals that cannot be handled.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let status = run();
    plugin::wait_for_end(PLUGINS_END);
    // A cache that could not be written back at the end has lost accepted data.
    // The same applies to the tables of an image.
    #[cfg(feature = "formats")]
    let image_was_lost = blockhaul_formats::qcow2::data_was_lost();
    #[cfg(not(feature = "formats"))]
    let image_was_lost = false;
    if (blockhaul_layers::data_was_lost() || image_was_lost) && status == ExitCode::SUCCESS {
        return ExitCode::from(exit::TARGET);
    }
    status
}

fn run() -> ExitCode {
    let words: Vec<_> = std::env::args_os().collect();
    if let Some(status) = compat::run(&words) {
        return ExitCode::from(status);
    }
    #[cfg(feature = "fuse")]
    if let Some(outcome) = mount::helper::run(&words) {
        return report("", outcome);
    }
    // The command of a group is that of another program.
    let mut is_json = logger::asks_for_json(&words);
    let taken = brackets::take(words);
    if let Ok((words, _)) = &taken {
        is_json = logger::asks_for_json(words);
    }
    logger::set_format(if is_json { LogFormat::Json } else { LogFormat::Text });
    let (words, groups) = match taken {
        Ok(taken) => taken,
        Err(text) => return report("", Err(CommandFailure::usage(text))),
    };
    let cli = match args::parse(words) {
        Ok(cli) => cli,
        Err(error) => return ExitCode::from(args::show_error(&error)),
    };
    match cli.command {
        CliCommand::Serve(args) => report("serve: ", serve::run(*args, &groups)),
        CliCommand::Copy(args) => report("copy: ", copy::run(&args, &groups)),
        CliCommand::Pull(args) => report("pull: ", pull::run(&args)),
        CliCommand::Restore(args) => report("restore: ", restore::run(&args, &groups)),
        CliCommand::Follow { plan, set, dry_run } => {
            report("follow: ", follow::run(&plan, &set, dry_run))
        }
        CliCommand::Chain(args) => report("chain: ", chain::run(&args)),
        CliCommand::Info(args) => {
            // Like nbdinfo, whose status 2 is an answer.
            let result = info::run(&args, &groups);
            report("info: ", result.map_err(|failure| failure.with_status(exit::FAILED)))
        }
        CliCommand::Compare(args) => report("compare: ", check::compare(&args, &groups)),
        CliCommand::Verify(args) => report("verify: ", check::verify(&args, &groups)),
        #[cfg(feature = "formats")]
        CliCommand::Check(args) => {
            let result = image_check::check(&args, &groups);
            report(
                "check: ",
                result.map_err(|failure| failure.with_status(image_check::INCOMPLETE)),
            )
        }
        #[cfg(feature = "formats")]
        CliCommand::Create(args) => report("create: ", image_tools::create(&args, &groups)),
        #[cfg(feature = "formats")]
        CliCommand::Rebase(args) => report("rebase: ", image_backing::run_rebase(&args, &groups)),
        #[cfg(feature = "formats")]
        CliCommand::Commit(args) => report("commit: ", image_backing::run_commit(&args, &groups)),
        #[cfg(feature = "formats")]
        CliCommand::Resize(args) => report("resize: ", image_change::run_resize(&args, &groups)),
        #[cfg(feature = "formats")]
        CliCommand::Measure(args) => report("measure: ", image_tools::run_measure(&args, &groups)),
        #[cfg(feature = "formats")]
        CliCommand::Snapshot(args) => report("snapshot: ", image_tools::snapshot(&args, &groups)),
        #[cfg(feature = "formats")]
        CliCommand::Bitmap(args) => report("bitmap: ", image_bitmap::bitmap(args, &groups)),
        CliCommand::Checksum(args) => report("checksum: ", check::checksum(&args, &groups)),
        CliCommand::Map(args) => report("map: ", info::run_map(&args, &groups)),
        #[cfg(feature = "fuse")]
        CliCommand::Mount(args) => report("mount: ", mount::run(&args, &groups)),
        CliCommand::Ctl(args) => report("ctl: ", ctl::run(&args)),
        CliCommand::Tls(args) => report("tls: ", tls_init::run(&args)),
        #[cfg(feature = "bench")]
        CliCommand::Bench(args) => bench::run(*args, &groups),
        CliCommand::Doctor(args) => report("doctor: ", doctor::run(&args)),
        CliCommand::Plugin(args) => report("plugin: ", plugin::run(&args)),
        CliCommand::Help(args) => report("help: ", help::run(&args)),
        CliCommand::Man(args) => report("man: ", generate::man(args.dir.as_deref())),
        CliCommand::Completions(args) => report("completions: ", generate::completions(args.shell)),
    }
}

fn report(command: &str, outcome: CommandResult) -> ExitCode {
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            logger::failure(command, &failure.to_string());
            ExitCode::from(failure.status())
        }
    }
}
