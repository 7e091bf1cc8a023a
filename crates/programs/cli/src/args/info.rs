//! Options of `info` and `map`.

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Duration;

use blockhaul_command_lines::earlier::MAP_OUTPUTS;
use clap::{ArgGroup, Args};

use super::format::ImageFormatArgs;
use super::value::{duration, range};

/// Options of `info`, of which one can be used.
const QUESTIONS: &[&str] = if cfg!(feature = "formats") {
    &["list", "chain", "size", "uri", "map", "can", "cannot"]
} else {
    &["list", "size", "uri", "map", "can", "cannot"]
};

/// Options of `blockhaul info`.
#[derive(Debug, Args)]
#[command(
    infer_long_args = true,
    group = ArgGroup::new("question").args(QUESTIONS)
)]
pub struct InfoArgs {
    /// Device to inspect (see blockhaul help devices)
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    #[command(flatten)]
    pub image: ImageFormatArgs,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// List all exports of the server
    ///
    /// Of an object store, list the objects below the name; of a WebDAV server, the files in the directory.
    #[arg(short = 'L', long)]
    pub list: bool,

    /// Describe a qcow2 image and the images below it, not the disk in it
    ///
    /// Print options, snapshots and bitmaps. Backing files are opened only with --backing allow.
    #[cfg(feature = "formats")]
    #[arg(long)]
    pub chain: bool,

    /// Print only the size in bytes
    #[arg(long)]
    pub size: bool,

    /// Print only the canonical URI
    #[arg(long)]
    pub uri: bool,

    /// Show which parts hold data, or the extents of another metadata context
    #[arg(long, value_name = "CONTEXT", num_args = 0..=1, require_equals = true,
          default_missing_value = blockhaul_block::BASE_ALLOCATION)]
    pub map: Option<String>,

    /// With --map: print a summary by type
    #[arg(long, alias = "total", requires = "map")]
    pub totals: bool,

    /// Exit with 0 if the device supports X, 2 if not
    ///
    /// X is one of connect, read, write, tls, structured-reply, extended-header, read-only,
    /// rotational, block-status-payload, cache, df, fast-zero, flush, fua, multi-conn, trim, zero.
    #[arg(long, value_name = "X", visible_aliases = ["is", "has"], alias = "have")]
    pub can: Option<String>,

    /// The opposite of --can
    #[arg(long, value_name = "X", visible_alias = "isnt", aliases = [
        "isnot", "is-not", "can-not", "cant", "hasnt", "hasnot", "has-not", "havent", "havenot",
        "have-not",
    ])]
    pub cannot: Option<String>,

    /// Read the beginning and report what it contains
    ///
    /// This needs the program file. It is the default except with --list.
    #[arg(long, overrides_with = "no_content")]
    pub content: bool,

    /// Do not examine the content
    #[arg(long)]
    pub no_content: bool,

    /// Whether the program runs as nbdinfo.
    #[arg(skip)]
    pub is_nbdinfo: bool,

    #[command(flatten)]
    pub common: InspectionOptions,
}

/// Options of `blockhaul map`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct MapArgs {
    /// Device to inspect (see blockhaul help devices)
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    #[command(flatten)]
    pub image: ImageFormatArgs,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// How to print ranges: as nbdinfo does, its JSON, one JSON object a line, or the JSON of
    /// qemu-img map [default: nbdinfo]
    #[arg(long, value_name = "FORM", conflicts_with = "json", value_parser = MAP_OUTPUTS,
          hide_possible_values = false)]
    pub output: Option<String>,

    /// Print a summary by type
    #[arg(long, alias = "total")]
    pub totals: bool,

    /// Show only this range, for example 1G:64M
    #[arg(long, value_name = "OFFSET:LENGTH", value_parser = range)]
    pub range: Option<(u64, u64)>,

    /// Print a strip that shows where data, or dirty ranges, are
    ///
    /// The height of a column is the share of data in its part of the disk. Ranges are then not
    /// listed, except with --totals or --output.
    #[arg(long)]
    pub strip: bool,

    /// Write an SVG image that shows where data, or dirty ranges, are
    ///
    /// Ranges are then not listed, except with --totals or --output.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Metadata context to show; may be repeated
    ///
    /// With several, a range ends where the state of any of them changes, and shows the states of
    /// all.
    // The spelling of nbdinfo and of info, for those who know it.
    #[arg(long, alias = "map", value_name = "NAME", default_value = blockhaul_block::BASE_ALLOCATION)]
    pub context: Vec<String>,

    #[command(flatten)]
    pub common: InspectionOptions,
}

/// Options of both commands.
#[derive(Debug, Args)]
pub struct InspectionOptions {
    /// Drop a connection if no byte has moved for this long (0: never)
    ///
    /// This applies while a reply is pending. Connecting and the handshake time out after 30 s at
    /// most.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    /// Print more detail
    #[arg(short, long)]
    pub verbose: bool,

    #[command(flatten)]
    pub colors: ColorArgs,
}

/// Whether what is printed has colours.
#[derive(Debug, Args)]
pub struct ColorArgs {
    /// Use colours [default: on a terminal]
    #[arg(long, aliases = ["colour", "colors", "colours"], overrides_with = "no_color")]
    pub color: bool,

    /// Do not use colours
    #[arg(long, aliases = ["no-colour", "no-colors", "no-colours"])]
    pub no_color: bool,
}

impl ColorArgs {
    /// What is asked for, and else whether standard output is a terminal.
    pub fn wanted(&self) -> bool {
        self.color || (!self.no_color && std::io::stdout().is_terminal())
    }
}

pub(super) const EXAMPLES: &str = "\
EXAMPLES
  blockhaul info nbd://server/disk
  blockhaul info --list s3://BUCKET/NAME
  blockhaul info --list --json nbd+unix:///?socket=/run/disk.sock
  blockhaul info --map --totals [ qemu-nbd -r -f qcow2 disk.qcow2 ]
  blockhaul info --can write nbd://server/disk && echo writable
";

pub(super) const MAP_EXAMPLES: &str = "\
EXAMPLES
  blockhaul map disk.raw
  blockhaul map --range 1G:64M --output qemu disk.raw
  blockhaul map --strip --svg disk.svg disk.raw
  blockhaul map --context qemu:dirty-bitmap:b0 --json nbd://server/disk
  blockhaul map --context base:allocation --context qemu:dirty-bitmap:b0 nbd://server/disk
";
