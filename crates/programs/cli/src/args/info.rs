//! Options of `info` and `map`.

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::time::Duration;

use clap::{ArgGroup, Args};

use super::value::duration;

/// Options of `blockhaul info`.
#[derive(Debug, Args)]
#[command(
    infer_long_args = true,
    group = ArgGroup::new("question").args(["list", "size", "uri", "map", "can", "cannot"])
)]
pub struct Info {
    /// What to ask about; see DEVICES
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// All exports of the server
    #[arg(short = 'L', long)]
    pub list: bool,

    /// Only the size in bytes
    #[arg(long)]
    pub size: bool,

    /// Only the canonical URI
    #[arg(long)]
    pub uri: bool,

    /// Which parts hold data, or what another context tells
    #[arg(long, value_name = "CONTEXT", num_args = 0..=1, require_equals = true,
          default_missing_value = blockhaul_block::BASE_ALLOCATION)]
    pub map: Option<String>,

    /// With --map: how much there is of each
    #[arg(long, alias = "total", requires = "map")]
    pub totals: bool,

    /// Tell by the exit status whether the device can do something, 0 for yes and 2 for no: connect,
    /// read, write, tls, structured-reply, extended-header, read-only, rotational,
    /// block-status-payload, cache, df, fast-zero, flush, fua, multi-conn, trim, zero
    #[arg(long, value_name = "X", visible_aliases = ["is", "has"], alias = "have")]
    pub can: Option<String>,

    /// The opposite of --can
    #[arg(long, value_name = "X", visible_alias = "isnt", aliases = [
        "isnot", "is-not", "can-not", "cant", "hasnt", "hasnot", "has-not", "havent", "havenot",
        "have-not",
    ])]
    pub cannot: Option<String>,

    /// Read the beginning and guess what it is (needs the file program); default except with --list
    #[arg(long, overrides_with = "no_content")]
    pub content: bool,

    /// Do not guess what the device holds
    #[arg(long)]
    pub no_content: bool,

    /// Give up on a server after this time without a byte while something was asked; 0 for never. On
    /// connecting and the handshake after 30 s at the latest
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    #[command(flatten)]
    pub colors: Colors,
}

/// Options of `blockhaul map`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Map {
    /// What to ask about; see DEVICES
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// How much there is of each
    #[arg(long, alias = "total")]
    pub totals: bool,

    /// The context to ask for
    #[arg(long, value_name = "NAME", default_value = blockhaul_block::BASE_ALLOCATION)]
    pub context: String,

    /// Give up on a server after this time without a byte while something was asked; 0 for never. On
    /// connecting and the handshake after 30 s at the latest
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    #[command(flatten)]
    pub colors: Colors,
}

/// Whether what is printed has colours.
#[derive(Debug, Args)]
pub struct Colors {
    /// Use colours; default on a terminal
    #[arg(long, aliases = ["colour", "colors", "colours"], overrides_with = "no_color")]
    pub color: bool,

    /// Use no colours
    #[arg(long, aliases = ["no-colour", "no-colors", "no-colours"])]
    pub no_color: bool,
}

impl Colors {
    /// What is asked for, and else whether standard output is a terminal.
    pub fn wanted(&self) -> bool {
        self.color || (!self.no_color && std::io::stdout().is_terminal())
    }
}

pub(super) const EXAMPLES: &str = "\
EXAMPLES
  blockhaul info nbd://server/disk
  blockhaul info --list --json nbd+unix:///?socket=/run/disk.sock
  blockhaul info --map --totals [ qemu-nbd -r -f qcow2 disk.qcow2 ]
  blockhaul info --can write nbd://server/disk && echo writable
";

pub(super) const MAP_EXAMPLES: &str = "\
EXAMPLES
  blockhaul map disk.raw
  blockhaul map --context qemu:dirty-bitmap:b0 --json nbd://server/disk
";
