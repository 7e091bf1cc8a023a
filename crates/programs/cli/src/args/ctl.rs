//! Options and commands of `ctl`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::value::{duration, setting};

/// Options of `blockhaul ctl`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Ctl {
    /// The server's socket, as it was given to serve --control
    #[arg(value_name = "SOCKET")]
    pub socket: PathBuf,

    /// What to do.
    #[command(subcommand)]
    pub command: CtlCommand,

    /// Print JSON: the server's answer, one object in a line
    #[arg(long, global = true)]
    pub json: bool,

    /// Time to wait for an answer; 0 for any
    #[arg(long, global = true, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,
}

/// The commands of `blockhaul ctl`.
#[derive(Debug, Subcommand)]
pub enum CtlCommand {
    /// Show who is connected: address, export, TLS identity, requests in flight, bytes, requests, age
    Clients,
    /// Show what is served, with its layers and their parameters
    Exports,
    /// End a client: no more of its requests are read, those in progress are answered. The second
    /// time its connection is cut
    Disconnect {
        /// Its number, as clients shows it
        #[arg(value_name = "N")]
        number: u64,
    },
    /// Change parameters of a layer, for requests that come and those that wait
    Set {
        /// The export's name; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// The layer's name; NAME:N for the nth of that name from the storage on
        #[arg(value_name = "LAYER")]
        layer: String,
        /// What to change; exports shows what there is
        #[arg(value_name = "NAME=VALUE", required = true, value_parser = setting)]
        setting: Vec<(String, String)>,
    },
    /// Serve another device, for clients that connect from now on
    ExportAdd {
        /// The name, and the device as serve takes it; a path is looked up here, not where the server is
        #[arg(value_name = "NAME=DEVICE")]
        export: OsString,
        /// Clients may only read it
        #[arg(short, long)]
        readonly: bool,
        /// Text for people, in lists of exports
        #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
        description: String,
        /// A layer over it, below those of all exports; may be repeated
        #[arg(long, value_name = "LAYER")]
        layer: Vec<String>,
    },
    /// Serve an export no more, and close its device
    ExportRemove {
        /// The export's name; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Also while clients use it: what they send from now on is answered ESHUTDOWN
        #[arg(long)]
        force: bool,
    },
    /// Put a layer over an export while clients use it, next to the clients
    LayerAdd {
        /// The export's name; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// A layer that shows the same disk: rate, delay, log, stats, readonly, cache and others
        #[arg(value_name = "LAYER")]
        layer: String,
        /// How long requests in flight may take to end; after that the layers stay as they are
        #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
        within: Duration,
    },
    /// Take a layer away from an export while clients use it
    LayerRemove {
        /// The export's name; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// The layer's name; NAME:N for the nth of that name from the storage on
        #[arg(value_name = "LAYER")]
        layer: String,
        /// How long requests in flight may take to end; after that the layers stay as they are
        #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
        within: Duration,
    },
    /// Read certificates, keys, revocations and pre-shared keys again, as after SIGHUP. Clients that are
    /// connected stay; if something is wrong, the old ones stay in use
    Reload,
    /// Print figures, as serve --metrics shows them to Prometheus
    Metrics,
    /// Accept no more clients, and end when the last one has left
    Drain {
        /// Wait until the server has ended
        #[arg(long)]
        wait: bool,
    },
    /// End as after SIGTERM: requests in progress are finished and answered
    Stop {
        /// Wait until the server has ended
        #[arg(long)]
        wait: bool,
    },
}

pub(super) const EXAMPLES: &str = "\
EXAMPLES
  A server that can be looked after; who is there, and an end to the third of them:
      blockhaul serve --control /run/disks.ctl --export a=a.raw --layer 'rate?rate=10M'
      blockhaul ctl /run/disks.ctl clients
      blockhaul ctl /run/disks.ctl disconnect 3
  Faster at night:
      blockhaul ctl /run/disks.ctl set a rate rate=100M
  Another disk, and later none; a layer while clients are at work:
      blockhaul ctl /run/disks.ctl export-add b=b.raw
      blockhaul ctl /run/disks.ctl layer-add b 'delay?read=5ms'
      blockhaul ctl /run/disks.ctl layer-remove b delay
      blockhaul ctl /run/disks.ctl export-remove b
  An end without haste:
      blockhaul ctl /run/disks.ctl drain --wait
";
