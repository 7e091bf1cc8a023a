//! Options of `serve`, and of one of its exports.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser};

use super::engine::Engine;
use super::value::{TlsMode, VsockPlace, duration, limit, mask, memory, port};
use crate::devices;

/// Options of `blockhaul serve`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Serve {
    /// What to serve; see DEVICES
    #[arg(value_name = "DEVICE", required_unless_present = "export")]
    pub device: Option<OsString>,

    /// Listen on this Unix socket; - for a private one, which is removed in the end; may be repeated
    #[arg(short = 'U', long, value_name = "SOCKET")]
    pub unix: Vec<PathBuf>,

    /// Listen on this TCP port; 0 takes a free one and prints it; may be repeated
    #[arg(short, long, value_parser = port)]
    pub port: Vec<u16>,

    /// Listen on this address or host name only (with TCP); may be repeated: each port is opened on
    /// each of them
    #[arg(short, long = "ip-addr", alias = "ipaddr", value_name = "ADDR")]
    pub ip_addr: Vec<String>,

    /// Listen on this port for virtual machines, or in one for its host; with a context id before it,
    /// on that only; may be repeated
    #[arg(long, value_name = "[CID:]PORT", value_parser = VsockPlace::from_str)]
    pub vsock: Vec<VsockPlace>,

    /// Serve the client at standard input and output, and stop when it leaves
    #[arg(short, long, conflicts_with = "run")]
    pub single: bool,

    /// Serve it read-only
    #[arg(short, long, alias = "read-only")]
    pub readonly: bool,

    /// Name of DEVICE for clients. With a device behind it, a further export; may be repeated. In
    /// brackets, as separate words, the device has options of its own: --layer, --readonly,
    /// --description. Clients that ask for no name get the export without one, or else the first.
    /// In NAME=, %XX is a byte
    #[arg(
        short,
        long,
        aliases = ["export-name", "exportname"],
        value_name = "NAME | NAME=DEVICE | NAME=[ DEVICE OPTION… ]"
    )]
    pub export: Vec<OsString>,

    /// Text that tells people what the export is
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub description: String,

    /// Put a layer over the device, or over each of several exports; repeated, the last is outermost;
    /// see LAYERS
    #[arg(long, value_name = "NAME[?key=value&…]")]
    pub layer: Vec<String>,

    /// Return when ready, and serve in the background
    ///
    /// Messages then go to where standard error leads if that is a file, else to syslog.
    #[arg(
        long,
        conflicts_with_all = ["foreground", "run", "single", "exit_with_parent"]
    )]
    pub background: bool,

    /// Stay in the foreground, which is the default
    #[arg(short, long, alias = "no-fork")]
    pub foreground: bool,

    /// Do not print what is served, and to whom, when ready
    #[arg(short, long)]
    pub quiet: bool,

    /// Write the process id to this file when ready
    #[arg(short = 'P', long, alias = "pid-file", value_name = "FILE")]
    pub pidfile: Option<PathBuf>,

    /// Run this shell command while serving, then stop with its exit status. The command sees
    /// $uri (also $nbd), $unixsocket, $port and $exportname. Without --unix and --port it is served
    /// on a private Unix socket
    #[arg(long, value_name = "CMD")]
    pub run: Option<String>,

    /// Print the URI for clients when ready, and a command to try it
    #[arg(long, aliases = ["print-url", "show-uri", "show-url"])]
    pub print_uri: bool,

    /// Open the device anew for each client, who gets it as it is then: a file may have another size.
    /// What is written by one client is seen by the others as the storage has it
    #[arg(long)]
    pub per_client: bool,

    /// Clients get the device whatever name they ask for
    #[arg(long)]
    pub any_name: bool,

    /// The name in $uri and $exportname, for devices that have exports of their own
    #[arg(long, value_name = "NAME")]
    pub uri_export: Option<String>,

    /// Keep all memory from being swapped out, for a device that is swap space on this machine
    #[arg(long)]
    pub swap: bool,

    /// Label of the sockets that are listened on (SELinux)
    #[arg(long, value_name = "LABEL")]
    pub selinux_label: Option<String>,

    /// End when the process that started this one ends
    #[arg(long)]
    pub exit_with_parent: bool,

    /// Requests of one connection in progress at a time, at most. By default their bytes are
    /// bounded instead
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub threads: Option<u32>,

    /// Time that a client has for the handshake; 0 for no limit
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub timeout: Duration,

    /// Time that a stop waits for requests which devices hold, and for plugins and scripts to end. What
    /// takes longer is named in the log and given up, its requests are answered with an error, and the
    /// exit status is 9. Clients delay a stop by less than a second; a second signal stops at once
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub drain_timeout: Duration,

    /// Be looked after through this Unix socket, with blockhaul ctl. It is for the user that runs the
    /// server alone, and removed in the end
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,

    /// Serve figures for Prometheus, on a loopback address as localhost:9100 (port 0 takes a free one and
    /// says which) or on unix:PATH: GET /metrics. Without a password, for whoever reaches it
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<crate::metrics::Address>,

    /// Once everything is open and listens, run as this user, by name or number, and in its groups
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,

    /// The group to run in with --user, in place of the user's own; or the only thing that changes
    #[arg(short, long, value_name = "GROUP")]
    pub group: Option<String>,

    /// Change what clients may cost; may be repeated; see LIMITS
    #[arg(long, value_name = "NAME=VALUE", value_parser = limit)]
    pub limit: Vec<String>,

    /// Say what is going on
    #[arg(short, long)]
    pub verbose: bool,

    /// Say each request at each layer and at the device; implies --verbose
    #[arg(long)]
    pub trace: bool,

    /// How messages on standard error are written: text, or json, one object a line with time, level and
    /// message and, where they apply, connection (its number), client, user, export, request, offset,
    /// length, error
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: crate::logger::Format,

    /// Run plugins (nbdkit:…) in processes of their own: the crash of one breaks the sessions that it
    /// has, not the server, which starts it again for the next client; with =once it stays down, for
    /// plugins whose memory is the disk. One that hangs ends by its parameter @watchdog=TIME
    #[arg(long, value_name = "again|once", num_args = 0..=1, require_equals = true,
          default_missing_value = "again", value_parser = isolate)]
    pub isolate: Option<blockhaul_isolated::Again>,

    #[command(flatten)]
    pub tls: ServeTls,

    /// Do not offer structured replies (for tests of clients)
    #[arg(long, aliases = ["no-sr", "no-structured-replies"], help_heading = "Protocol")]
    pub no_structured: bool,

    /// Do not offer extended headers (for tests of clients)
    #[arg(long, aliases = ["no-eh", "no-extended-headers"], help_heading = "Protocol")]
    pub no_extended: bool,

    /// Do not offer metadata contexts (for tests of clients)
    #[arg(long, aliases = ["no-mc", "no-meta-contexts"], help_heading = "Protocol")]
    pub no_contexts: bool,

    /// Tell block sizes as the device has them, and none where it has none (for tests of clients)
    #[arg(long, help_heading = "Protocol")]
    pub no_block_sizes: bool,

    /// Tell this preferred block size where the device has nothing to say about block sizes
    #[arg(long, value_name = "BYTES", hide = true, requires = "no_block_sizes",
          value_parser = clap::value_parser!(u32).range(512..=32 << 20))]
    pub preferred_block: Option<u32>,

    /// Leave bits out of the handshake's flags, of which the default has all: 1 fixed newstyle, 2 no zeroes
    /// behind a chosen export (for tests of clients)
    #[arg(long, value_name = "MASK", help_heading = "Protocol", value_parser = mask)]
    pub mask_handshake: Option<u16>,

    /// Greet clients in the oldest way, for those that know no other: they get the first export, and
    /// choose nothing, TLS neither
    #[arg(long, alias = "old-style", help_heading = "Protocol")]
    pub oldstyle: bool,

    /// Speak NBD after an HTTP/1.1 request to upgrade to it (GET or POST of any path, with Upgrade: nbd), as
    /// Incus and LXD do; with --tls require over HTTPS. Clients write nbd+http://HOST:PORT/, or nbd+https
    #[arg(long, conflicts_with = "oldstyle", help_heading = "Protocol")]
    pub http_upgrade: bool,

    /// Threads that serve; 0 for one per core
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Tuning",
          value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub workers: u16,

    /// Memory for requests of all clients together
    #[arg(long, value_name = "SIZE", default_value = "512M", help_heading = "Tuning",
          value_parser = memory)]
    pub memory: u64,

    #[command(flatten)]
    pub engine: Engine,

    /// SIGHUP stops the server, as it does nbdkit.
    #[arg(long, hide = true)]
    pub hangup_stops: bool,

    /// Files are opened without locks, as nbdkit does.
    #[arg(long, hide = true)]
    pub no_locks: bool,

    /// Set by a server that starts itself again to go to the background.
    #[arg(long, hide = true)]
    pub in_background: bool,
}

fn isolate(text: &str) -> Result<blockhaul_isolated::Again, String> {
    match text {
        "again" => Ok(blockhaul_isolated::Again::ForClients),
        "once" => Ok(blockhaul_isolated::Again::Never),
        _ => Err(format!("{text:?} is neither again nor once")),
    }
}

/// What stands in the brackets of `--export NAME=[ … ]`.
#[derive(Debug, Parser)]
#[command(infer_long_args = true, no_binary_name = true, disable_help_flag = true)]
pub struct ServeExport {
    /// What to serve; see DEVICES
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// Serve it read-only
    #[arg(short, long, alias = "read-only")]
    pub readonly: bool,

    /// Text that tells people what the export is
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub description: String,

    /// Put a layer over the device; repeated, the last is outermost; see LAYERS
    #[arg(long, value_name = "NAME[?key=value&…]")]
    pub layer: Vec<String>,
}

/// Whether and how a server uses TLS.
#[derive(Debug, Args)]
pub struct ServeTls {
    /// Whether clients may or must use TLS: off, on, or require, which refuses all else. Without this
    /// require, where keys or certificates are given, else off
    #[arg(long, value_name = "MODE", help_heading = "TLS")]
    pub tls: Option<TlsMode>,

    /// Directory with server-cert.pem, server-key.pem and ca-cert.pem, and ca-crl.pem if certificates
    /// were revoked. Without this nbdkit's places: ~/.pki/nbdkit, ~/.config/pki/nbdkit, or
    /// /etc/pki/nbdkit for root. blockhaul tls init makes them
    #[arg(long, value_name = "DIR", conflicts_with = "tls_psk", help_heading = "TLS")]
    pub tls_certificates: Option<PathBuf>,

    /// File of pre-shared keys, in lines USER:HEXKEY; blockhaul tls init --psk makes one
    #[arg(long, value_name = "FILE", help_heading = "TLS")]
    pub tls_psk: Option<PathBuf>,

    /// Clients must have a certificate that the authority of ca-cert.pem has signed
    #[arg(long, conflicts_with = "tls_psk", help_heading = "TLS")]
    pub tls_verify_peer: bool,
}

pub(super) const EXAMPLES: &str = "\
EXAMPLES
  Serve an image to this machine only:
      blockhaul serve -i localhost disk.raw
  In the background, until the process with the id in the file is stopped:
      blockhaul serve --background -P /run/disk.pid -U /run/disk.sock disk.raw
  Copy from a server that lives as long as the copy:
      blockhaul serve sample:2G --run 'nbdcopy \"$uri\" disk.raw'
  To those only who have a key:
      blockhaul tls init --psk alice keys.psk
      blockhaul serve --tls-psk keys.psk disk.raw
  Several disks, one of them read-only and slower; every file of a folder:
      blockhaul serve --export a=a.raw --export b=[ b.raw -r --layer 'rate?rate=10M' ]
      blockhaul serve dir:/var/images
  Serve what another server exports, slower:
      blockhaul serve -U /run/slow.sock --layer 'rate?rate=10M' nbd://server/disk
";

/// The limits of a server, for the help.
pub(super) fn limits() -> String {
    let row = |limit: &blockhaul_server::Limit| {
        let what = format!("{} (default {})", limit.what, limit.default());
        devices::entry(limit.name, &what, 18)
    };
    format!("LIMITS\n{}", blockhaul_server::Limits::TABLE.iter().map(row).collect::<String>())
}
