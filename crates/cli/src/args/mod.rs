//! Every command and option, declared once: parsing, help, man pages and completions follow.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::{brackets, devices, exit, out};

/// Serve, copy and inspect disk images over NBD.
///
/// Everything is a device: a file, memory, an export of an NBD server far away. Each command takes
/// devices, written the same way everywhere; see DEVICES below.
#[derive(Debug, Parser)]
#[command(name = "blockhaul", version, infer_long_args = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a device over NBD
    ///
    /// Serves any device to NBD clients until it is asked to stop (SIGTERM, SIGINT). Options are
    /// nbdkit's, except that --export names what is served. Without --unix and --port it listens on
    /// TCP port 10809 of all addresses. It goes to the background once it is ready, unless
    /// --foreground or --run is given or it was started by socket activation.
    Serve(Box<Serve>),
    /// Copy a device to another
    ///
    /// Copies all of SOURCE to TARGET over many connections and with many requests in flight. Holes
    /// and zeroes are not transferred. Options are nbdcopy's. TARGET must be at least as large as
    /// SOURCE; a file is made as large, whatever was in it is gone.
    Copy(Box<Copy>),
    /// Show what a device is and can
    ///
    /// Prints what nbdinfo prints, to the byte, for exports of NBD servers; the same facts for all
    /// other devices.
    Info(Box<Info>),
    /// Show which parts of a device hold data
    ///
    /// The same as blockhaul info --map.
    Map(Map),
    /// Compare two devices
    ///
    /// Tells whether two devices hold the same, and where they first differ. What both call zero is
    /// not read. Where one is longer, zeroes at its end are no difference. The exit status is that of
    /// qemu-img compare: 0 the same, 1 different, 2 cannot open, 3 cannot get extents, 4 cannot read.
    Compare(Box<Compare>),
    /// Check a device against a manifest
    ///
    /// Reads a device and compares it with what copy --manifest wrote down: tells the ranges that are
    /// different, and ends with status 8 if there are any.
    Verify(Box<Verify>),
    /// Print the digest of what a device holds
    ///
    /// Prints what b3sum, sha256sum or blksum would print for the same bytes in a raw file. Holes are
    /// not read.
    Checksum(Box<Checksum>),
    /// Look after a running server
    ///
    /// Asks a server that was started with --control PATH: who is connected and does how much, what is
    /// served; ends one connection or all, changes parameters of layers while clients are at work.
    Ctl(Box<Ctl>),
    /// Make keys and certificates for TLS
    ///
    /// What serve --tls and nbds URIs need, in the layout of nbdkit, libnbd and QEMU.
    Tls(Tls),
    /// Measure programs side by side
    ///
    /// Runs scenarios: blockhaul and the programs that people use today on the same work, in turn,
    /// with the results checked; prints medians and ratios and keeps the raw figures.
    Bench(Box<bench::Args>),
    /// Show what a plugin says about itself: its version, abilities and thread model
    Plugin(Plugin),
    /// Write the man pages
    #[command(hide = true)]
    Man(Man),
    /// Write completions for a shell
    #[command(hide = true)]
    Completions(Completions),
}

/// How work is carried out: for every command that moves much.
#[derive(Debug, Args)]
pub struct Engine {
    /// How to talk to the kernel: uring, threads (epoll and threads), or auto, which takes io_uring
    /// where it is allowed
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Tuning")]
    pub engine: io::Engine,

    /// Move every byte through memory: no splice, no reflink, no copying by the kernel. For comparing,
    /// and should a kernel do it wrong
    #[arg(long, help_heading = "Tuning")]
    pub no_zero_copy: bool,
}

impl Engine {
    /// How to run `workers` threads, 0 for one per core.
    pub fn config(&self, workers: usize) -> io::Config {
        if self.no_zero_copy {
            io::disable_parking();
        }
        io::Config { workers, engine: self.engine }
    }
}

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
    #[arg(short, long)]
    pub port: Vec<u16>,

    /// Listen on this address or host name only (with TCP); may be repeated: each port is opened on
    /// each of them
    #[arg(short, long = "ip-addr", alias = "ipaddr", value_name = "ADDR")]
    pub ip_addr: Vec<String>,

    /// Listen on this port for virtual machines, or in one for its host; with a context id before it,
    /// on that only; may be repeated
    #[arg(long, value_name = "[CID:]PORT", value_parser = crate::serve::VsockPlace::from_str)]
    pub vsock: Vec<crate::serve::VsockPlace>,

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

    /// Stay in the foreground
    #[arg(short, long, alias = "no-fork")]
    pub foreground: bool,

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

    /// End when the process that started this one ends; implies --foreground
    #[arg(long)]
    pub exit_with_parent: bool,

    /// Requests of one connection in progress at a time, at most. By default their bytes are
    /// bounded instead
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub threads: Option<u32>,

    /// Time that a client has for the handshake; 0 for no limit
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub timeout: Duration,

    /// Time that a stop waits for requests which devices hold. What they hold longer is named in the
    /// log and answered with an error, and the exit status is 9. Clients delay a stop by less than a
    /// second; a second signal stops at once
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

    /// How messages on standard error are written: text, or json, one object a line with time, level,
    /// message and, where it is about one, the number of the connection
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: crate::logger::Format,

    /// Run plugins (nbdkit:…) in processes of their own: the crash of one ends its exports, not the
    /// server, which says so
    #[arg(long)]
    pub isolate: bool,

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

    /// Leave bits out of the handshake's flags, of which the default has all: 1 fixed newstyle, 2 no zeroes
    /// behind a chosen export (for tests of clients)
    #[arg(long, value_name = "MASK", help_heading = "Protocol", value_parser = mask)]
    pub mask_handshake: Option<u16>,

    /// Greet clients in the oldest way, for those that know no other: they get the first export, and
    /// choose nothing, TLS neither
    #[arg(long, alias = "old-style", help_heading = "Protocol")]
    pub oldstyle: bool,

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

    /// Set by a server that starts itself again to go to the background.
    #[arg(long, hide = true)]
    pub in_background: bool,
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
    pub tls: Option<crate::serve::Mode>,

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

/// Options of `blockhaul copy`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Copy {
    /// What to copy; - reads standard input; see DEVICES
    #[arg(value_name = "SOURCE", required_unless_present = "job", conflicts_with = "job")]
    pub source: Option<OsString>,

    /// Where to copy it; - writes standard output; see DEVICES
    #[arg(value_name = "TARGET", required_unless_present = "job", conflicts_with = "job")]
    pub target: Option<OsString>,

    /// Connections to each side. Without this, as many as are found to pay, from 1 to 16, beginning
    /// with one for each processor and at most 4; with 4 where requests take long
    #[arg(short = 'C', long, value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub connections: Option<u16>,

    /// When to use more than one connection to a server that does not report multi-conn: auto does so
    /// after reading over the further one what was read and written over the first; always without
    /// that check; advertised never
    #[arg(long, value_name = "WHEN", default_value = "auto",
          value_parser = multi_conn())]
    pub multi_conn: engine::MultiConn,

    /// Requests in flight on each connection, reads and writes together. Without this, as many as
    /// are found to pay, up to 64
    #[arg(short = 'R', long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub requests: Option<u32>,

    /// Bytes of a request: a power of two from 4k to 32m. Without this, what is found to pay, from 64k
    /// to 8m, beginning with 512k
    #[arg(long, value_name = "SIZE", value_parser = request_size)]
    pub request_size: Option<u32>,

    /// Bytes in flight on each connection; with the default, 44m on all together
    #[arg(long, value_name = "SIZE", default_value = "16m", value_parser = queue_size)]
    pub queue_size: u64,

    /// Threads that copy; 0 for one per core
    #[arg(short = 'T', long, value_name = "N", default_value = "0",
          value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub threads: u16,

    /// Runs of zeroes at least this long become holes: a power of two from 512; 0 to not look.
    /// Without this 4096, where a source that tells its holes is looked at in samples only
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = sparse)]
    pub sparse: Option<u32>,

    /// Make no holes on the target
    #[arg(long)]
    pub allocated: bool,

    /// The target reads as zeroes already: leave out zeroes. A sample of it is looked at first. What a
    /// target says reads as zeroes is left out in any case
    #[arg(long, alias = "target-is-zero")]
    pub destination_is_zero: bool,

    /// With --destination-is-zero: do not look at a sample
    #[arg(long, requires = "destination_is_zero")]
    pub trust: bool,

    /// Zero all that is zero, segment by segment, as nbdcopy.
    #[arg(long, hide = true)]
    pub zero_all: bool,

    /// Do not ask the source where its holes are
    #[arg(long)]
    pub no_extents: bool,

    /// Make the target durable before ending
    #[arg(long)]
    pub flush: bool,

    /// Read and write files and disks past the page cache: on, off, or auto, which does so where the
    /// data would only turn out what others have there: from 64M on, reads of what is not cached, and
    /// writes of what does not come from a cached file
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub direct: crate::direct::Wanted,

    /// One request at a time, in order
    #[arg(long)]
    pub synchronous: bool,

    /// Read both sides again after the copy and compare their digests
    #[arg(long)]
    pub verify: bool,

    /// After the copy, read the source again and write digests of its segments to this file, for
    /// blockhaul verify
    #[arg(long, value_name = "FILE")]
    pub manifest: Option<PathBuf>,

    /// Print the digest of what was copied, as checksum does: blake3, sha256 or blksum. It is computed
    /// while copying, except for sha256 and after --journal went on, which read the source once more;
    /// holes cost blksum nearly nothing. On standard error when the copy goes to standard output
    #[arg(long, value_name = "NAME", value_parser = algorithm)]
    pub digest: Option<engine::Algorithm>,

    /// Copy only this range, to the same place on the target, which keeps everything else: offset and
    /// length, as 1G:64M. To a pipe go the bytes of the range
    #[arg(long, value_name = "OFFSET:LENGTH", value_parser = range, conflicts_with = "since",
          help_heading = "Parts of a disk")]
    pub range: Option<(u64, u64)>,

    /// Copy only what this bitmap of the source says, as qemu:dirty-bitmap:NAME: a metadata context of
    /// its server. The target must hold the copy that the bitmap was begun with
    #[arg(long, value_name = "CONTEXT", conflicts_with_all = ["since", "journal"],
          help_heading = "Parts of a disk")]
    pub bitmap: Option<String>,

    /// With --bitmap: copy what has any of these flags set. Without this, what has any flag set
    #[arg(long, value_name = "FLAGS", requires = "bitmap", help_heading = "Parts of a disk",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub bitmap_flags: Option<u64>,

    /// Copy only what is not as in this manifest, which an earlier copy to the same target has written.
    /// All of the source is read, but only what changed is written, in units of 1 to 128 MiB. With
    /// --manifest, the new one is for the next time
    #[arg(long, value_name = "MANIFEST", help_heading = "Parts of a disk")]
    pub since: Option<PathBuf>,

    /// Show progress: as a bar, as lines of N/100 on descriptor FD, or as one JSON object a line
    /// (json, or json:FD). A terminal gets a bar by default
    #[arg(short, long, value_name = "FD|json", num_args = 0..=1, require_equals = true,
          default_missing_value = "bar")]
    pub progress: Option<crate::progress::Style>,

    /// Show no bar
    #[arg(long, conflicts_with = "progress")]
    pub no_progress: bool,

    /// Serve figures for Prometheus while copying, on a loopback address as localhost:9100 (port 0
    /// takes a free one and says which) or on unix:PATH: GET /metrics. Without a password, for
    /// whoever reaches it
    #[arg(long, value_name = "ADDR", help_heading = "Long copies")]
    pub metrics: Option<crate::metrics::Address>,

    /// Give up on a connection after this time without a byte either way while requests are in
    /// flight; 0 for never
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    /// How often a failed request is repeated, and a lost connection made again, on either side,
    /// before the copy fails; 0 for never. What would fail again (a full target) is not repeated
    #[arg(long, value_name = "N", default_value = "5", help_heading = "Long copies",
          value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub retries: u32,

    /// Time before a lost connection is made a second time; doubles each time, up to 30 s. A request that
    /// fails on a connection that stands is repeated sooner, after 20 ms at first
    #[arg(long, value_name = "TIME", default_value = "1s", help_heading = "Long copies",
          value_parser = duration)]
    pub retry_delay: Duration,

    /// Keep a journal of what is durable on the target: run again after a crash or kill, with the same
    /// FILE, the copy goes on where it was. Both sides must be the same as before; a change that their
    /// size, times and samples do not show is found by --verify. Removed after success
    #[arg(long, value_name = "FILE", help_heading = "Long copies")]
    pub journal: Option<PathBuf>,

    /// With --journal: begin anew
    #[arg(long, requires = "journal", help_heading = "Long copies")]
    pub restart: bool,

    /// With --journal: longest time between flushes of the target
    #[arg(long, value_name = "TIME", default_value = "5s", requires = "journal",
          help_heading = "Long copies", value_parser = duration)]
    pub journal_interval: Duration,

    /// Copy at most so many bytes a second, all connections together; or so many by the local time of
    /// day, as 08:00-18:00=50M,*=0: the first rule that is for a time counts, 0 is no limit
    #[arg(long, value_name = "RATE|RULES", help_heading = "Long copies", value_parser = schedule)]
    pub rate: Option<engine::Schedule>,

    /// Start at most so many requests a second
    #[arg(long, value_name = "N", help_heading = "Long copies",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub iops: Option<u64>,

    /// Take the rate from this file, which is read again each second: a rate or rules as for --rate, 0
    /// or no file for none; a line iops=N instead of --iops
    #[arg(long, value_name = "FILE", conflicts_with = "rate", help_heading = "Long copies")]
    pub rate_file: Option<PathBuf>,

    /// Bytes that one connection writes together, a power of two from 64k to 1g; the unit of the
    /// journal. Without this 128m, and less for disks that are too small to keep all connections busy
    #[arg(long, value_name = "SIZE", help_heading = "Long copies", value_parser = segment)]
    pub segment: Option<u32>,

    /// Copy several disks: those that this file lists; see JOB FILES. Options given here count for all
    /// of them, whatever the file says
    #[arg(long, value_name = "FILE", help_heading = "Several disks")]
    pub job: Option<PathBuf>,

    /// With --job: disks that are copied at a time; without this 4
    #[arg(long, value_name = "N",
          help_heading = "Several disks", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub parallel: Option<u16>,

    /// With --job: memory for what is in flight, all disks together. Without this what the largest of
    /// them would use alone
    #[arg(long, value_name = "SIZE", help_heading = "Several disks",
          value_parser = total_memory)]
    pub total_memory: Option<u64>,

    /// With --job: connections to the sources, and as many to the targets, of all disks that are copied
    /// at a time
    #[arg(long, value_name = "N", help_heading = "Several disks",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub total_connections: Option<u16>,

    /// Put a layer over the source; repeated, the last is outermost; see LAYERS
    #[arg(long, value_name = "NAME[?key=value&…]")]
    pub source_layer: Vec<String>,

    /// Put a layer over the target
    #[arg(long, value_name = "NAME[?key=value&…]")]
    pub target_layer: Vec<String>,

    /// Say what is going on, and in the end what was done
    #[arg(short, long)]
    pub verbose: bool,

    #[command(flatten)]
    pub engine: Engine,
}

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
          default_missing_value = block::BASE_ALLOCATION)]
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

    /// Use colours; default on a terminal
    #[arg(long, aliases = ["colour", "colors", "colours"], overrides_with = "no_color")]
    pub color: bool,

    /// Use no colours
    #[arg(long, aliases = ["no-colour", "no-colors", "no-colours"])]
    pub no_color: bool,
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
    #[arg(long, value_name = "NAME", default_value = block::BASE_ALLOCATION)]
    pub context: String,

    /// Use colours; default on a terminal
    #[arg(long, aliases = ["colour", "colors", "colours"], overrides_with = "no_color")]
    pub color: bool,

    /// Use no colours
    #[arg(long, aliases = ["no-colour", "no-colors", "no-colours"])]
    pub no_color: bool,
}

/// How whole devices are read.
#[derive(Debug, Args)]
pub struct Reading {
    /// Connections to each device
    #[arg(short = 'C', long, value_name = "N", default_value = "4",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub connections: u16,

    /// Do not ask where holes are
    #[arg(long)]
    pub no_extents: bool,

    /// How often a failed request is repeated, and a lost connection made again; 0 for never
    #[arg(long, value_name = "N", default_value = "5",
          value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub retries: u32,

    /// Give up on a connection after this time without a byte while requests are in flight; 0 for
    /// never
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    /// Say what is going on
    #[arg(short, long)]
    pub verbose: bool,

    #[command(flatten)]
    pub engine: Engine,
}

/// Options of `blockhaul compare`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Compare {
    /// The one; see DEVICES
    #[arg(value_name = "A")]
    pub one: OsString,

    /// The other
    #[arg(value_name = "B")]
    pub other: OsString,

    /// Different sizes are a difference, too
    #[arg(short, long)]
    pub strict: bool,

    /// Tell by the exit status only
    #[arg(short, long)]
    pub quiet: bool,

    #[command(flatten)]
    pub reading: Reading,
}

/// Options of `blockhaul verify`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Verify {
    /// What to check; see DEVICES
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// What copy --manifest wrote
    #[arg(value_name = "MANIFEST")]
    pub manifest: PathBuf,

    #[command(flatten)]
    pub reading: Reading,
}

/// Options of `blockhaul checksum`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Checksum {
    /// What to read; see DEVICES
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// The digest: blake3 (as b3sum), sha256 (as sha256sum) or blksum (as the program of that name)
    #[arg(long, value_name = "NAME", default_value = "blake3", value_parser = algorithm)]
    pub digest: engine::Algorithm,

    #[command(flatten)]
    pub reading: Reading,
}

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

/// Options of `blockhaul tls`.
#[derive(Debug, Args)]
pub struct Tls {
    /// What to do.
    #[command(subcommand)]
    pub command: TlsCommand,
}

/// The commands of `blockhaul tls`.
#[derive(Debug, Subcommand)]
pub enum TlsCommand {
    /// Make an authority with certificates, or a file of keys
    ///
    /// Makes a directory with an authority (ca-cert.pem, ca-key.pem) and certificates of a server and
    /// a client, or with --psk a file of pre-shared keys. Only their owner can read the files; none is
    /// overwritten. Move ca-key.pem away: whoever has it can make more certificates.
    Init(TlsInit),
}

/// Options of `blockhaul tls init`.
#[derive(Debug, Args)]
#[command(infer_long_args = true, after_long_help = TLS_INIT_EXAMPLES)]
pub struct TlsInit {
    /// Directory for certificates, or with --psk the file for keys
    #[arg(value_name = "PLACE")]
    pub place: PathBuf,

    /// Make a file with a key for this user instead; may be repeated
    #[arg(long, value_name = "USER", conflicts_with_all = ["host", "client", "days"])]
    pub psk: Vec<String>,

    /// Name or address of the server, as clients call it; may be repeated. Without this the name of
    /// this machine, localhost, 127.0.0.1 and ::1
    #[arg(long, value_name = "NAME")]
    pub host: Vec<String>,

    /// Name of the client
    #[arg(long, value_name = "NAME", default_value = "client")]
    pub client: String,

    /// Days that the certificates of server and client hold; the authority holds ten years
    #[arg(long, value_name = "N", default_value = "730",
          value_parser = clap::value_parser!(u32).range(1..=36500))]
    pub days: u32,
}

/// Options of `blockhaul man`.
#[derive(Debug, Args)]
pub struct Man {
    /// Directory to write all pages to; without it, the main page is printed
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Options of `blockhaul plugin`.
#[derive(Debug, Args)]
pub struct Plugin {
    /// The plugin, by nbdkit's short name (curl) or by path
    #[arg(value_name = "PLUGIN")]
    pub plugin: String,
    /// Its parameters, as nbdkit takes them; some plugins need one before they can tell
    #[arg(value_name = "KEY=VALUE")]
    pub config: Vec<String>,
}

/// Options of `blockhaul completions`.
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

/// The command line's definition, with help on devices and exit statuses.
pub fn definition() -> clap::Command {
    let statuses = || {
        let rows = exit::TABLE.iter().map(|(status, what)| devices::entry(status, what, 10));
        format!("EXIT STATUS\n{}", rows.collect::<String>())
    };
    let about_devices = devices::help();
    let with = |examples: &str| format!("{examples}\n{about_devices}\n{}", statuses());
    Cli::command()
        .after_long_help(with(EXAMPLES))
        .mut_subcommand("serve", |command| {
            command.after_long_help(with(&format!("{SERVE_EXAMPLES}\n{}", limits())))
        })
        .mut_subcommand("copy", |command| {
            command.after_long_help(with(&format!("{COPY_EXAMPLES}\n{}", crate::jobfile::HELP)))
        })
        .mut_subcommand("info", |command| command.after_long_help(with(INFO_EXAMPLES)))
        .mut_subcommand("map", |command| command.after_long_help(with(MAP_EXAMPLES)))
        .mut_subcommand("ctl", |command| command.after_long_help(with(CTL_EXAMPLES)))
        .mut_subcommand("compare", |command| command.after_long_help(with(COMPARE_EXAMPLES)))
        .mut_subcommand("verify", |command| command.after_long_help(with(VERIFY_EXAMPLES)))
        .mut_subcommand("checksum", |command| command.after_long_help(with(CHECKSUM_EXAMPLES)))
}

const EXAMPLES: &str = "\
EXAMPLES
  Copy an export of a server to a file and verify it:
      blockhaul copy --verify nbd://server/disk disk.raw
  Serve an image on a Unix socket:
      blockhaul serve -U /run/disk.sock disk.raw
  See what a server exports:
      blockhaul info --list nbd://server
";

const SERVE_EXAMPLES: &str = "\
EXAMPLES
  Serve an image to this machine only, in the foreground:
      blockhaul serve -f -i localhost disk.raw
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

const CTL_EXAMPLES: &str = "\
EXAMPLES
  A server that can be looked after; who is there, and an end to the third of them:
      blockhaul serve --control /run/disks.ctl --export a=a.raw --layer 'rate?rate=10M'
      blockhaul ctl /run/disks.ctl clients
      blockhaul ctl /run/disks.ctl disconnect 3
  Faster at night:
      blockhaul ctl /run/disks.ctl set a rate rate=100M
  An end without haste:
      blockhaul ctl /run/disks.ctl drain --wait
";

const TLS_INIT_EXAMPLES: &str = "\
EXAMPLES
  Keys, the simplest way:
      blockhaul tls init --psk alice keys.psk
      blockhaul serve --tls-psk keys.psk disk.raw
      blockhaul copy 'nbds://alice@server/?tls-psk-file=keys.psk' disk.raw
  Certificates; copy ca-cert.pem, client-cert.pem and client-key.pem to the client:
      blockhaul tls init --host server.example pki
      blockhaul serve --tls-certificates pki --tls-verify-peer disk.raw
      blockhaul copy 'nbds://server.example/?tls-certificates=pki' disk.raw
";

const COMPARE_EXAMPLES: &str = "\
EXAMPLES
  See whether a copy is one:
      blockhaul compare nbd://old/disk nbd://new/disk
";

const VERIFY_EXAMPLES: &str = "\
EXAMPLES
  Keep digests of a backup, and check it a year later:
      blockhaul copy --manifest disk.manifest nbd://server/disk disk.raw
      blockhaul verify disk.raw disk.manifest
";

const CHECKSUM_EXAMPLES: &str = "\
EXAMPLES
  The digest that b3sum prints for the same bytes in a file:
      blockhaul checksum nbd://server/disk
  The digest that blksum prints, which passes over holes:
      blockhaul checksum --digest blksum disk.raw
";

const COPY_EXAMPLES: &str = "\
EXAMPLES
  Serve a generated disk image, copy it and verify it:
      blockhaul copy --verify [ blockhaul serve sample:2G ] disk.raw
  From one server to another, over 8 connections:
      blockhaul copy -C 8 nbd://old/disk nbd://new/disk
  With half of the line by day and all of it by night:
      blockhaul copy --rate 08:00-18:00=50M,*=0 nbd://old/disk nbd://new/disk
  With the digest that b3sum prints for the copy:
      blockhaul copy --digest blake3 nbd://server/disk disk.raw
  Through a pipe:
      blockhaul copy nbd://server/disk - | zstd > disk.raw.zst
  Convert to qcow2 with QEMU's server:
      blockhaul copy disk.raw [ qemu-nbd -f qcow2 disk.qcow2 ]
  Only what changed since the last time, by a bitmap of QEMU's, or without one:
      blockhaul copy --bitmap qemu:dirty-bitmap:b0 nbd://server/disk disk.raw
      blockhaul copy --since monday --manifest tuesday nbd://server/disk disk.raw
  The first 512 bytes of a disk:
      blockhaul copy --range 0:512 nbd://server/disk - | xxd
  Progress for programs, one JSON object a line: done, total (0 while unknown), data, zeroed,
  skipped, resumed, verified (bytes), connections, requests, request_size (what was found to pay),
  in_flight, retries, routes, rate (bytes/s), elapsed, eta (s, null while unknown), phase (copy or
  verify), finished; the last line has success, too; with --job all have disks:
      blockhaul copy --progress=json nbd://server/disk disk.raw
  Figures for Prometheus, read with curl:
      blockhaul copy --metrics localhost:9100 nbd://server/disk disk.raw
      curl http://localhost:9100/metrics
  Several disks, with one limit and one report:
      blockhaul copy --job vm1.toml --progress
";

const INFO_EXAMPLES: &str = "\
EXAMPLES
  blockhaul info nbd://server/disk
  blockhaul info --list --json nbd+unix:///?socket=/run/disk.sock
  blockhaul info --map --totals [ qemu-nbd -r -f qcow2 disk.qcow2 ]
  blockhaul info --can write nbd://server/disk && echo writable
";

const MAP_EXAMPLES: &str = "\
EXAMPLES
  blockhaul map disk.raw
  blockhaul map --context qemu:dirty-bitmap:b0 --json nbd://server/disk
";

/// Parses the words of a command line, groups replaced.
pub fn parse(words: Vec<OsString>) -> Result<Cli, clap::Error> {
    let mut definition = definition();
    let parsed = definition.try_get_matches_from_mut(words);
    let matches = parsed.map_err(|error| error.format(&mut definition))?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut definition))
}

/// An option of `copy` that was given, by its long name, and its values; a flag has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// The long name.
    pub name: String,
    /// What was given, in order.
    pub values: Vec<OsString>,
}

/// The options of `copy` among the words of a command line that was understood.
pub fn given(words: Vec<OsString>) -> Result<Vec<Given>, clap::Error> {
    let mut definition = definition();
    let matches = definition.try_get_matches_from_mut(words)?;
    let (Some(matches), Some(copy)) =
        (matches.subcommand_matches("copy"), definition.find_subcommand("copy"))
    else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for option in copy.get_arguments() {
        let id = option.get_id().as_str();
        let typed = matches.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
        let Some(name) = option.get_long().filter(|_| typed) else { continue };
        let values = match option.get_action().takes_values() {
            true => matches.get_raw(id).into_iter().flatten().map(OsString::from).collect(),
            false => Vec::new(),
        };
        found.push(Given { name: name.to_string(), values });
    }
    Ok(found)
}

/// Shows what clap has to say: help and version on standard output, errors on standard error. Returns
/// the exit status.
pub fn show_error(error: &clap::Error) -> u8 {
    let colors = |terminal| {
        let rendered = error.render();
        let text = if terminal { rendered.ansi().to_string() } else { rendered.to_string() };
        brackets::readable(&text)
    };
    use std::io::IsTerminal as _;
    if error.use_stderr() {
        out::error(&colors(std::io::stderr().is_terminal()));
        // As nbdinfo, whose status 2 is an answer.
        let info = std::env::args_os().nth(1).is_some_and(|command| command == "info");
        return if info { exit::FAILED } else { exit::USAGE };
    }
    match out::print(colors(std::io::stdout().is_terminal()).as_bytes()) {
        Ok(_) => 0,
        Err(failure) => failure.status(),
    }
}

/// The limits of a server, for the help.
fn limits() -> String {
    let row = |limit: &server::Limit| {
        let what = format!("{} (default {})", limit.what, limit.default());
        devices::entry(limit.name, &what, 18)
    };
    format!("LIMITS\n{}", server::Limits::TABLE.iter().map(row).collect::<String>())
}

fn limit(text: &str) -> Result<String, String> {
    server::Limits::default().set(text).map(|()| text.to_string())
}

fn duration(text: &str) -> Result<Duration, String> {
    block::parse_duration(text).map_err(|error| error.text())
}

fn size(text: &str) -> Result<u64, String> {
    block::parse_size(text).map_err(|error| error.text())
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) =
        text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=VALUE"))?;
    Ok((name.to_string(), value.to_string()))
}

fn power_of_two(text: &str, least: u32, most: u32) -> Result<u32, String> {
    let wrong = || {
        let (least, most) = (block::format_size(least.into()), block::format_size(most.into()));
        format!("{text} is not a power of two from {least} to {most}")
    };
    let size = u32::try_from(size(text)?).map_err(|_| wrong())?;
    let fits = size.is_power_of_two() && (least..=most).contains(&size);
    if fits { Ok(size) } else { Err(wrong()) }
}

fn request_size(text: &str) -> Result<u32, String> {
    power_of_two(text, engine::MIN_REQUEST, engine::MAX_REQUEST)
}

fn multi_conn() -> impl TypedValueParser<Value = engine::MultiConn> {
    let names = ["auto", "always", "advertised"];
    PossibleValuesParser::new(names).map(|name| match &*name {
        "always" => engine::MultiConn::Always,
        "advertised" => engine::MultiConn::Advertised,
        _ => engine::MultiConn::Auto,
    })
}

fn algorithm(text: &str) -> Result<engine::Algorithm, String> {
    text.parse().map_err(|error: block::Error| error.text())
}

fn segment(text: &str) -> Result<u32, String> {
    power_of_two(text, 64 << 10, 1 << 30)
}

fn schedule(text: &str) -> Result<engine::Schedule, String> {
    engine::Schedule::parse(text).map_err(|error| error.text())
}

fn range(text: &str) -> Result<(u64, u64), String> {
    let wrong = || format!("{text} is not OFFSET:LENGTH, as 1G:64M");
    let (at, len) = text.split_once(':').ok_or_else(wrong)?;
    let (at, len) = (size(at)?, size(len)?);
    if len == 0 {
        return Err(format!("{text} has no bytes"));
    }
    at.checked_add(len).map(|_| (at, len)).ok_or_else(wrong)
}

fn sparse(text: &str) -> Result<u32, String> {
    if size(text)? == 0 { Ok(0) } else { power_of_two(text, 512, 1 << 31) }
}

fn queue_size(text: &str) -> Result<u64, String> {
    // More than this is no window but the whole disk in memory.
    const MOST: u64 = 64 << 30;
    match size(text)? {
        bytes @ 1..=MOST => Ok(bytes),
        _ => Err(format!("{text} is not between 1 byte and {}", block::format_size(MOST))),
    }
}

fn total_memory(text: &str) -> Result<u64, String> {
    // The largest request, for reading and for verifying.
    const LEAST: u64 = 2 * engine::MAX_REQUEST as u64;
    match size(text)? {
        bytes if bytes >= LEAST => Ok(bytes),
        _ => Err(format!("{text} is less than {}", block::format_size(LEAST))),
    }
}

fn memory(text: &str) -> Result<u64, String> {
    // The largest request, and room for what comes with it.
    const LEAST: u64 = 64 << 20;
    match size(text)? {
        bytes if bytes >= LEAST => Ok(bytes),
        _ => Err(format!(
            "{text} is less than the {} that one client may need",
            block::format_size(LEAST)
        )),
    }
}

fn mask(text: &str) -> Result<u16, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u16::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{text:?} is not a number from 0 to 65535"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Cli, clap::Error> {
        parse(text.split_whitespace().map(OsString::from).collect())
    }

    fn copy(text: &str) -> Copy {
        match parse_text(&format!("blockhaul copy {text}")).unwrap().command {
            Command::Copy(copy) => *copy,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        definition().debug_assert();
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
        assert_eq!(copy.progress, Some(crate::progress::Style::Percent(3)));
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
            "copy a b --bitmap c --journal j",
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
            let Command::Info(info) = cli.command else { panic!("{cli:?}") };
            assert_eq!(info.can.as_deref(), Some("write"), "{word}");
        }
        for word in ["--cannot", "--can-not", "--isnt", "--is-not", "--hasnt", "--have-not"] {
            let cli = parse_text(&format!("blockhaul info {word} write a")).unwrap();
            let Command::Info(info) = cli.command else { panic!("{cli:?}") };
            assert_eq!(info.cannot.as_deref(), Some("write"), "{word}");
        }
        let cli = parse_text("blockhaul info --map a --totals").unwrap();
        let Command::Info(info) = cli.command else { panic!("{cli:?}") };
        assert_eq!(info.map.as_deref(), Some("base:allocation"));
    }
}
