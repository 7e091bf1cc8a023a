//! Every command and option, declared once: parsing, help, man pages and completions follow. A file
//! for each command, or for those of a kind; `value` has what their values may be.

mod backup;
#[cfg(feature = "bench")]
mod bench;
mod check;
mod copy;
pub(crate) mod ctl;
mod engine;
mod format;
#[cfg(feature = "formats")]
mod image;
mod info;
mod layout;
mod log;
#[cfg(feature = "fuse")]
mod mount;
mod pages;
pub(crate) mod serve;
mod tls;
pub(crate) mod value;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

pub use self::backup::{
    ChainArgs, ChainCommand, ChainReporting, ProgressOptions, PullArgs, RestoreArgs, ResultArgs,
};
#[cfg(feature = "bench")]
pub use self::bench::{BenchAction, BenchArgs};
#[cfg(feature = "formats")]
pub use self::check::{CheckArgs, RepairArg};
pub use self::check::{ChecksumArgs, CompareArgs, ReadArgs, VerifyArgs};
pub use self::copy::{CopyArgs, JOB_FILES};
pub use self::engine::EngineArgs;
#[cfg(feature = "formats")]
pub use self::format::BackingPolicy;
#[cfg(feature = "fuse")]
pub use self::format::PartitionArgs;
pub use self::format::{ImageFormatArgs, backing_policy};
#[cfg(feature = "formats")]
pub use self::image::{
    BitmapArgs, BitmapCommand, BitmapMerge, ChangeOutput, CommitArgs, CreateArgs, ImageBitmap,
    InfoChain, ListArgs, MeasureArgs, RebaseArgs, ResizeArgs, SnapshotArgs, SnapshotCommand,
};
pub use self::info::{InfoArgs, InspectionOptions, MapArgs};
pub use self::layout::laid_out;
#[cfg(feature = "fuse")]
pub use self::mount::{MountArgs, MountExport};
pub use self::serve::{ServeArgs, ServeExport};
pub use self::tls::{TlsArgs, TlsCommand, TlsInit};
pub use self::value::{QmpClient, VsockPlace, total_memory};
pub use crate::serve::control::commands::{Ctl, CtlCommand};
use crate::{brackets, devices, exit, logger, out};

/// Serve, copy and inspect disk images over NBD.
///
/// A device is a file, a disk, memory, an export of an NBD server and more. All commands use the same
/// notation for devices; see blockhaul help devices.
#[derive(Debug, Parser)]
#[command(name = "blockhaul", version, infer_long_args = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Serve a device over NBD
    ///
    /// Serve any device to NBD clients until a signal (SIGTERM, SIGINT) stops the server. The
    /// options are those of nbdkit, except that --export names what is served. Without --unix and
    /// --port, listen on TCP port 10809 of all addresses. The server prints what it serves when it is
    /// ready; with --background, the command returns then.
    Serve(Box<ServeArgs>),
    /// Copy a device to another
    ///
    /// Copy all of SOURCE to TARGET, over several connections and with many requests in flight.
    /// Holes and zeroes are not transferred. The options are those of nbdcopy. TARGET must be at
    /// least as large as SOURCE. A file as TARGET is resized to the size of SOURCE, and its old
    /// content is lost.
    Copy(Box<CopyArgs>),
    /// Back up the disks of a machine in use, in full or what has changed
    ///
    /// Copy the disks that the file lists, each to a directory of its own: in full, or what a dirty
    /// bitmap marks as changed since the last pull. Each pull adds a point in time, which restore, and
    /// all commands as backup:DIR?point=NAME, read. A pull that was interrupted leaves no point; the same
    /// command resumes it. Nothing is written before all disks are open and checked.
    Pull(Box<PullArgs>),
    /// Restore a disk from its backups
    ///
    /// Check the digests of a point, and copy the disk as it was then to TARGET.
    Restore(Box<RestoreArgs>),
    /// List, check, merge and prune the backups of a disk
    ///
    /// Manage a directory that blockhaul pull has written.
    Chain(ChainArgs),
    /// Move the disks of a machine in use: rounds of changes, then the cut-over
    ///
    /// Copy what has changed in rounds, until the predicted downtime fits. Then stop the machine, copy the last
    /// round, verify it, and start the machine. The same command resumes a move. See docs/warm-moves.md.
    Follow {
        /// File with the machine, its disks and commands
        plan: PathBuf,
        /// Set a key of the plan, for example downtime=10s
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
        /// Show what would be done, and run nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Show size and properties of a device
    ///
    /// For exports of NBD servers, print what nbdinfo prints, byte for byte. For all other devices,
    /// print the same properties.
    Info(Box<InfoArgs>),
    /// Show which parts of a device hold data
    ///
    /// Same as blockhaul info --map.
    Map(MapArgs),
    /// Compare two devices
    ///
    /// Report whether two devices have the same content, and the first difference. Ranges that both
    /// devices report as zero are not read. If one device is longer, zeroes at its end are not a
    /// difference. The exit status is that of qemu-img compare: 0 the same, 1 different, 2 cannot
    /// open, 3 cannot get extents, 4 cannot read.
    Compare(Box<CompareArgs>),
    /// Check a device against a manifest
    ///
    /// Read a device and compare it with a manifest that copy --manifest has written. Print the
    /// ranges that differ, and exit with status 8 if there are any.
    Verify(Box<VerifyArgs>),
    /// Check the tables of a qcow2 image, and repair them
    ///
    /// Count the references to each cluster of the image, and compare them with its refcounts.
    /// Nothing else may use the image. The exit status is that of qemu-img check.
    #[cfg(feature = "formats")]
    Check(CheckArgs),
    /// Create an image without data
    ///
    /// Create a qcow2 image or a raw disk that reads as zeroes, or as the backing file of
    /// qcow2:PATH?backing=FILE.
    #[cfg(feature = "formats")]
    Create(CreateArgs),
    /// Change the size of the disk in an image
    ///
    /// Make a raw disk, or the disk in a qcow2 image, larger or smaller. New bytes read as zeroes. Nothing
    /// else may use the image. After a power cut it has the old size or the new one.
    #[cfg(feature = "formats")]
    Resize(ResizeArgs),
    /// Give an image another backing file, or none
    ///
    /// The disk stays as it is: where the old and the new backing file differ, the contents of the old one
    /// are written to the image first.
    #[cfg(feature = "formats")]
    Rebase(RebaseArgs),
    /// Write an image's changes into its backing file
    ///
    /// The image is emptied, and shows the same disk. Other images that use this backing file
    /// become invalid.
    #[cfg(feature = "formats")]
    Commit(CommitArgs),
    /// Show how large an image of a device would be
    ///
    /// Print the length of a new image with the data of SOURCE, and with data everywhere, without
    /// compression. No data is read.
    #[cfg(feature = "formats")]
    Measure(MeasureArgs),
    /// List the internal snapshots of an image
    #[cfg(feature = "formats")]
    Snapshot(SnapshotArgs),
    /// List, add, remove and change the persistent bitmaps of an image
    #[cfg(feature = "formats")]
    Bitmap(BitmapArgs),
    /// Print the digest of the content of a device
    ///
    /// Print what b3sum, sha256sum or blksum would print for the same bytes in a raw file. Holes
    /// are not read.
    Checksum(Box<ChecksumArgs>),
    /// Show a device as a local file
    ///
    /// Show a device, with its layers, as a file, through FUSE: TARGET/disk if TARGET is a directory,
    /// or TARGET itself if it is a file; or several devices as files of a directory. Programs can read it, and with --writable write it, as
    /// any file: mount its file system, copy it, look into it. It is there until a signal (SIGTERM,
    /// SIGINT), until umount TARGET, or until the command of --run ends.
    #[cfg(feature = "fuse")]
    Mount(Box<MountArgs>),
    /// Manage a running server
    ///
    /// Send a command to a server that was started with --control PATH: list clients and exports,
    /// disconnect a client, change parameters of layers, add and remove exports and layers while
    /// clients are connected, stop the server.
    Ctl(Box<Ctl>),
    /// Create keys and certificates for TLS
    ///
    /// Create what serve --tls and nbds URIs need, in the layout of nbdkit, libnbd and QEMU.
    Tls(TlsArgs),
    /// Measure devices and servers, and compare programs
    ///
    /// Measure one device or one server. All other arguments are those of the program blockhaul-bench, which runs
    /// scenarios: blockhaul and the programs in common use do the same work, in turn, and the results are checked.
    #[cfg(feature = "bench")]
    Bench(Box<BenchArgs>),
    /// Check whether this machine has what devices and commands need
    ///
    /// Print a line for the kernel, io_uring, FUSE, limits, memory, and programs and libraries of some
    /// devices: good; limited, if only some devices or commands need it; or wrong, with what to do.
    Doctor(DoctorArgs),
    /// Show version, abilities and thread model of a plugin
    Plugin(PluginArgs),
    /// Show the help of a command, or of a topic
    ///
    /// Topics: devices, layers, the scheme of a device (memory), the name of a layer (rate),
    /// exit-status, job.
    Help(HelpArgs),
    /// Write the man pages
    Man(ManArgs),
    /// Write completions for a shell
    Completions(CompletionsArgs),
}

/// Options of `blockhaul help`.
#[derive(Debug, Args)]
pub struct HelpArgs {
    /// A command, or a topic
    #[arg(value_name = "COMMAND | TOPIC")]
    pub topic: Vec<String>,
}

/// Options of `blockhaul man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Directory for all pages [default: print the main page]
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Options of `blockhaul doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON: version, success, and facts with name, state, value and remedy
    #[arg(long)]
    pub json: bool,
}

/// Options of `blockhaul plugin`.
#[derive(Debug, Args)]
pub struct PluginArgs {
    /// The plugin, by name, path or as a device
    ///
    /// The name is nbdkit's short name, for example curl; a device is nbdkit:NAME?KEY=VALUE.
    #[arg(value_name = "PLUGIN")]
    pub plugin: String,
    /// Parameters of the plugin, as for nbdkit
    ///
    /// Some plugins need a parameter before they report anything.
    #[arg(value_name = "KEY=VALUE")]
    pub config: Vec<String>,
}

/// Options of `blockhaul completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

/// The command line's definition, with help on devices and exit statuses.
pub fn definition() -> clap::Command {
    let command = Cli::command()
        .long_version(long_version())
        .disable_help_subcommand(true)
        .after_long_help(format!("{EXAMPLES}\n{MORE}\n{}", statuses()));
    let serve = format!("{}\n{}", serve::EXAMPLES, serve::limits());
    let copy = format!("{}\n{}", copy::EXAMPLES, copy::JOB_FILES);
    let sections = [
        ("serve", &*serve),
        ("copy", &copy),
        ("pull", backup::PULL_HELP),
        ("restore", backup::RESTORE_EXAMPLES),
        ("info", info::EXAMPLES),
        ("map", info::MAP_EXAMPLES),
        ("ctl", ctl::EXAMPLES),
        ("compare", check::COMPARE_EXAMPLES),
        ("verify", check::VERIFY_EXAMPLES),
        ("checksum", check::CHECKSUM_EXAMPLES),
        #[cfg(feature = "fuse")]
        ("mount", mount::EXAMPLES),
    ];
    let command = sections.into_iter().fold(command, |command, (name, examples)| {
        let statuses = pages::statuses_of(name);
        let text = format!("{examples}\n{MORE}\nEXIT STATUS\n{statuses}");
        command.mut_subcommand(name, |command| command.after_long_help(text))
    });
    pages::complete(command.mut_subcommand("copy", copy::with_short_help), "")
}

/// Where devices and layers are described: they are the same for all commands.
const MORE: &str = "\
DEVICES AND LAYERS
  blockhaul help devices    all devices and their options
  blockhaul help layers     all layers and their options
  blockhaul help NAME       one of them, for example blockhaul help memory
  blockhaul help exit-status, blockhaul help job    exit statuses; files of copy --job
";

const EXAMPLES: &str = "\
EXAMPLES
  Copy an export of a server to a file and verify it:
      blockhaul copy --verify nbd://server/disk disk.raw
  Serve an image on a Unix socket:
      blockhaul serve -U /run/disk.sock disk.raw
  List the exports of a server:
      blockhaul info --list nbd://server
";

/// The help of a command, given by its words, as `--help` prints it; `None`: no such command.
pub fn help_of(words: &[String]) -> Option<clap::builder::StyledStr> {
    let mut definition = definition();
    definition.build();
    let mut command = &mut definition;
    for word in words {
        command = command.find_subcommand_mut(word)?;
    }
    Some(command.render_long_help())
}

/// The output of `--version`: what a report of an error needs.
fn long_version() -> String {
    let commit = match env!("BLOCKHAUL_COMMIT") {
        "" => String::new(),
        commit => format!("commit: {commit}\n"),
    };
    let features = [
        ("bench", cfg!(feature = "bench")),
        ("formats", cfg!(feature = "formats")),
        ("fuse", cfg!(feature = "fuse")),
        ("luks", cfg!(feature = "luks")),
        ("nbdkit-plugins", cfg!(feature = "nbdkit-plugins")),
        ("remote", cfg!(feature = "remote")),
        ("restic", cfg!(feature = "restic")),
        ("vddk", cfg!(feature = "vddk")),
        ("vhost", cfg!(feature = "vhost")),
    ];
    let features: Vec<_> = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    let kernel = rustix::system::uname();
    format!(
        "{}\n{commit}features: {}\nOpenSSL: {}\nkernel: {}",
        env!("CARGO_PKG_VERSION"),
        features.join(" "),
        blockhaul_tls::library_version(),
        kernel.release().to_string_lossy()
    )
}

/// The exit statuses, for the help.
pub fn statuses() -> String {
    let rows = exit::TABLE.iter().map(|(status, what)| devices::short_entry(status, what, 10));
    format!("EXIT STATUS\n{}", rows.collect::<String>())
}

/// Parses the words of a command line, groups replaced.
pub fn parse(words: Vec<OsString>) -> Result<Cli, clap::Error> {
    let words = blockhaul_command_lines::earlier::renamed(words);
    if let Some(command) = parse_frequent(&words) {
        return Ok(Cli { command });
    }
    let mut definition = definition();
    let parsed = definition.try_get_matches_from_mut(words.clone());
    let matches = parsed.map_err(|error| with_own_tip(error, &words).format(&mut definition))?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut definition))
}

/// A command that scripts start often, without the definition of all others, which is a sixth of the time
/// that a process takes to start. `None`: another command, or words that need the whole definition for an
/// answer, such as those with an error or `--help`.
fn parse_frequent(words: &[OsString]) -> Option<CliCommand> {
    fn only<A: Args>(name: &'static str, words: &[OsString]) -> Option<A> {
        parse_command(name, words.to_vec()).ok().map(|(args, _)| args)
    }
    let (_, [name, words @ ..]) = words.split_first()? else { return None };
    match name.to_str()? {
        "copy" => only("copy", words).map(CliCommand::Copy),
        "info" => only("info", words).map(CliCommand::Info),
        "map" => only("map", words).map(CliCommand::Map),
        "serve" => only("serve", words).map(CliCommand::Serve),
        "compare" => only("compare", words).map(CliCommand::Compare),
        "checksum" => only("checksum", words).map(CliCommand::Checksum),
        _ => None,
    }
}

/// The error, without clap's advice to write an unknown option behind `--`, which is wrong for all
/// but names of files; with the option that is meant, if it is known.
fn with_own_tip(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    if error.kind() == clap::error::ErrorKind::InvalidSubcommand {
        return with_known_command(error, words);
    }
    if error.kind() != clap::error::ErrorKind::UnknownArgument {
        return error;
    }
    error.remove(ContextKind::Suggested);
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return error };
    let tip = if word == "--layer" {
        Some("use --source-layer or --target-layer: a layer is put over one side".to_string())
    } else {
        unknown_ctl_command(word, words)
    };
    if let Some(tip) = tip {
        let tip = ContextValue::StyledStrs(vec![tip.into()]);
        error.insert(ContextKind::Suggested, tip);
    }
    error
}

/// Commands of other programs, and what stands for them here.
const FOREIGN: &[(&str, &str)] = &[
    ("backup", "pull, or for a disk that blockhaul serves: ctl SOCKET backup"),
    ("clone", "copy"),
    ("convert", "copy, for example to qcow2:PATH"),
    ("dd", "copy, with --range for a part"),
    ("diff", "compare"),
    ("forget", "chain prune"),
    ("inspect", "info"),
    ("list", "info --list, or chain list for backups"),
    ("mirror", "ctl SOCKET mirror, for a disk that blockhaul serves"),
    ("repository", "chain"),
    ("rsync", "copy"),
    ("show", "info"),
    ("snapshots", "chain list, or snapshot list for an image"),
    ("sync", "copy; with --since or --bitmap, only what has changed"),
];

/// The error about an unknown command, with ours in its place if it is one of another program.
fn with_known_command(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    let foreign = words.get(1).and_then(|word| FOREIGN.iter().find(|(name, _)| word == name));
    if let Some((_, ours)) = foreign {
        error.remove(ContextKind::SuggestedSubcommand);
        let tip = ContextValue::StyledStrs(vec![format!("use blockhaul {ours}").into()]);
        error.insert(ContextKind::Suggested, tip);
    }
    error
}

/// Advice if `word` is the command of `blockhaul ctl SOCKET COMMAND`, and like none that there is: clap
/// does not say that a command is expected behind another argument.
fn unknown_ctl_command(word: &str, words: &[OsString]) -> Option<String> {
    let [_, ctl, _, command, ..] = words else { return None };
    (ctl == "ctl" && command == word)
        .then(|| format!("ctl has no command {word:?}; blockhaul ctl --help lists the commands"))
}

/// An option of `copy` that was given, by its long name, and its values; a flag has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOption {
    /// The long name.
    pub name: String,
    /// What was given, in order.
    pub values: Vec<OsString>,
}

/// The options of `copy` among the words of a command line that was understood.
pub fn given(words: Vec<OsString>) -> Result<Vec<CopyOption>, clap::Error> {
    let mut definition = definition();
    let matches = definition.try_get_matches_from_mut(words)?;
    let (Some(matches), Some(copy)) =
        (matches.subcommand_matches("copy"), definition.find_subcommand("copy"))
    else {
        return Ok(Vec::new());
    };
    Ok(given_among(copy, matches))
}

/// The options of this command that were given.
fn given_among(command: &clap::Command, matches: &clap::ArgMatches) -> Vec<CopyOption> {
    let mut found = Vec::new();
    for option in command.get_arguments() {
        let id = option.get_id().as_str();
        let typed = matches.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
        let Some(name) = option.get_long().filter(|_| typed) else { continue };
        let values = if option.get_action().takes_values() {
            matches.get_raw(id).into_iter().flatten().map(OsString::from).collect()
        } else {
            Vec::new()
        };
        found.push(CopyOption { name: name.to_string(), values });
    }
    found
}

/// The definition of what follows a command, without that of all commands.
pub fn definition_of<A: Args>(command: &'static str) -> clap::Command {
    let base = clap::Command::new(command).bin_name(format!("blockhaul {command}"));
    A::augment_args(base.no_binary_name(true).infer_long_args(true))
}

/// Parses what follows a command that opens devices, such as `copy`, without the definition of all commands;
/// with the options that were given.
pub fn parse_command<A: Args>(
    command: &'static str,
    words: Vec<OsString>,
) -> Result<(A, Vec<CopyOption>), clap::Error> {
    let mut definition = definition_of::<A>(command);
    let parsed = definition.try_get_matches_from_mut(words.clone());
    let matches = parsed.map_err(|error| with_own_tip(error, &words).format(&mut definition))?;
    let args = A::from_arg_matches(&matches).map_err(|error| error.format(&mut definition))?;
    Ok((args, given_among(&definition, &matches)))
}

/// Shows what clap has to say: help and version on standard output, errors on standard error. Returns
/// the exit status.
pub fn show_error(error: &clap::Error) -> u8 {
    let escaped = error_escaped();
    let error = escaped.as_ref().unwrap_or(error);
    let colors = |terminal| {
        let rendered = error.render();
        let text = if terminal { rendered.ansi().to_string() } else { rendered.to_string() };
        if error.use_stderr() {
            brackets::readable(&text)
        } else {
            layout::laid_out(&brackets::readable(&text))
        }
    };
    use std::io::IsTerminal as _;
    if error.use_stderr() {
        if logger::is_json() {
            logger::failure("", &message_of(error));
        } else {
            out::raw_error(&colors(std::io::stderr().is_terminal()));
        }
        // As nbdinfo, whose status 2 is an answer.
        let info = std::env::args_os().nth(1).is_some_and(|command| command == "info");
        return if info { exit::FAILED } else { exit::USAGE };
    }
    match out::print(colors(std::io::stdout().is_terminal()).as_bytes()) {
        Ok(_) => 0,
        Err(failure) => failure.status(),
    }
}

/// What an error says about the command line, without the usage and where to find more.
fn message_of(error: &clap::Error) -> String {
    let rendered = brackets::readable(&error.render().to_string());
    let lines = rendered.lines().take_while(|line| !line.starts_with("Usage:"));
    let lines = lines.filter(|line| !line.starts_with("For more information"));
    let text = exit::joined(&lines.collect::<Vec<_>>().join("\n"));
    text.strip_prefix("error: ").map(str::to_string).unwrap_or(text)
}

/// The error about the same command line with what cannot be printed escaped in its words; `None` if
/// there is nothing to escape.
fn error_escaped() -> Option<clap::Error> {
    let words: Vec<_> = std::env::args_os().collect();
    let escaped = |word: &OsString| OsString::from(out::one_word(&word.to_string_lossy()));
    let shown: Vec<_> = words.iter().map(escaped).collect();
    let (words, _) = (shown != words).then(|| brackets::take(shown).ok()).flatten()?;
    parse(words).err()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn parse_text(text: &str) -> Result<Cli, clap::Error> {
        parse(text.split_whitespace().map(OsString::from).collect())
    }

    fn copy(text: &str) -> CopyArgs {
        match parse_text(&format!("blockhaul copy {text}")).unwrap().command {
            CliCommand::Copy(copy) => *copy,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        definition().debug_assert();
    }

    /// Sections that are laid out here fit a terminal of 80 columns: their lines would be wrapped once more there.
    #[test]
    fn sections_are_not_wrapped_twice() {
        fn check(command: &clap::Command, path: &str) {
            let text = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            for line in text.lines().filter(|line| line.chars().count() > 80) {
                // A command line, or one line of text above it.
                let is_alone =
                    line.starts_with("      ") || line.trim_start().starts_with("blockhaul ");
                assert!(is_alone || line.ends_with(':'), "{path}: {line}");
            }
            command
                .get_subcommands()
                .for_each(|inner| check(inner, &format!("{path} {}", inner.get_name())));
        }
        check(&definition(), "blockhaul");
        let topics = copy::JOB_FILES.lines().all(|line| line.chars().count() <= 80);
        assert!(topics, "{}", copy::JOB_FILES);
    }

    #[test]
    fn messages_about_a_command_line_are_json_if_it_asks_for_that() {
        let error = parse_text("blockhaul copy a b --log-format json --nosuch").unwrap_err();
        assert_eq!(message_of(&error), "unexpected argument '--nosuch' found");
        let error = parse_text("blockhaul copy a b --layer x").unwrap_err();
        let text = "unexpected argument '--layer' found tip: use --source-layer or --target-layer: a layer is put over one side";
        assert_eq!(message_of(&error), text);
    }

    #[test]
    fn output_of_map_has_its_earlier_name_too() {
        for words in ["map --output qemu a", "map --format qemu a", "map --format=qemu a"] {
            let Ok(Cli { command: CliCommand::Map(map) }) =
                parse_text(&format!("blockhaul {words}"))
            else {
                panic!("{words}")
            };
            assert_eq!((map.output.as_deref(), map.image.format), (Some("qemu"), None), "{words}");
        }
        let Ok(Cli { command: CliCommand::Map(map) }) =
            parse_text("blockhaul map --format qcow2 --output json a")
        else {
            panic!("both")
        };
        assert!(map.image.format.is_some() && map.output.as_deref() == Some("json"));
    }

    #[test]
    fn copy_has_nbdcopys_defaults() {
        let copy = copy("a b");
        assert_eq!((copy.connections, copy.requests, copy.threads), (None, None, 0));
        assert_eq!((copy.request_size, copy.queue_size, copy.sparse), (None, 16 << 20, None));
        assert_eq!(copy.timeout, Duration::from_secs(60));
        assert!(copy.progress.is_none() && !copy.flush && !copy.allocated);
    }

    #[test]
    fn options_may_follow_devices_and_be_shortened() {
        let copy = copy("a -C 8 b --request-s=64k --target-is-zero -S 0 --alloc -p=3");
        assert_eq!(
            (copy.connections, copy.request_size, copy.sparse),
            (Some(8), Some(65536), Some(0))
        );
        assert!(copy.destination_is_zero && copy.allocated);
        assert_eq!(copy.progress, Some(crate::progress::ProgressStyle::Percent(3)));
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let bad = [
            "copy a b -C 0",
            "copy a b -R 0",
            "copy a b --request-size=5000",
            "copy a b --request-size=2k",
            "copy a b --request-size=64m",
            "copy a b --request-size=1.5k",
            "copy a b -S 513",
            "copy a b -S 256",
            "copy a b --queue-size=0",
            "copy a b --range 5",
            "copy a b --range 5:0",
            "copy a b --range 5:x",
            "copy a b --range 8e:8e",
            "copy a b --bitmap-flags 1",
            "copy a b --bitmap c --bitmap-flags 0",
            "copy a b --ranges l --range 1:1",
            "copy a b --ranges l --bitmap c",
            "copy a b --ranges l --since m",
            "copy a b --bitmap c --since m",
            "copy a b --range 1:1 --since m",
            "copy a b --trust",
            "copy a b --timeout=x",
            "copy a b --progress=x",
            "copy a",
            "copy a b c",
            "copy a b --what",
            "serve",
            "serve a -p 65536",
            "serve a --vsock 4294967296",
            "serve a --vsock x:1",
            "serve a --single --run true",
            "serve a --limit connections",
            "serve a --limit connections=0",
            "serve a --limit what=1",
            "serve a --drain-timeout x",
            "serve a -t 0",
            "serve a --memory 1k",
            "serve a --engine x",
            "serve a --log-format xml",
            "serve a --metrics 0.0.0.0:9",
            "ctl s reload x",
            "info a --list --size",
            "info a --totals",
            "serve a --tls maybe",
            "serve a --tls-psk k --tls-certificates d",
            "serve a --tls-psk k --tls-verify-peer",
            "ctl",
            "ctl s",
            "ctl s what",
            "ctl s disconnect x",
            "ctl s set a rate",
            "ctl s set a rate rate",
            "tls",
            "tls init",
            "tls init d --days 0",
            "tls init k --psk a --host b",
            "what",
        ];
        for text in bad {
            let error = parse_text(&format!("blockhaul {text}")).unwrap_err();
            assert!(error.use_stderr(), "{text}");
        }
    }

    #[test]
    fn info_knows_nbdinfos_synonyms() {
        for word in ["--can", "--is", "--has", "--have"] {
            let cli = parse_text(&format!("blockhaul info {word} write a")).unwrap();
            let CliCommand::Info(info) = cli.command else { panic!("{cli:?}") };
            assert_eq!(info.can.as_deref(), Some("write"), "{word}");
        }
        for word in ["--cannot", "--can-not", "--isnt", "--is-not", "--hasnt", "--have-not"] {
            let cli = parse_text(&format!("blockhaul info {word} write a")).unwrap();
            let CliCommand::Info(info) = cli.command else { panic!("{cli:?}") };
            assert_eq!(info.cannot.as_deref(), Some("write"), "{word}");
        }
        let cli = parse_text("blockhaul info --map a --totals").unwrap();
        let CliCommand::Info(info) = cli.command else { panic!("{cli:?}") };
        assert_eq!(info.map.as_deref(), Some("base:allocation"));
    }
}
