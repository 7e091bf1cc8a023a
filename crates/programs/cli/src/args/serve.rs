//! Options of `serve`, and of one of its exports.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser};

use super::engine::EngineArgs;
use super::format::{ImageFormatArgs, PartitionArgs};
use super::log::LogArgs;
#[cfg(feature = "vhost")]
use super::value::VhostPlace;
use super::value::{
    QmpClient, TlsMode, TlsRecords, VsockPlace, count, duration, limit, mask, memory, port,
};
use crate::devices;

/// Options of `blockhaul serve`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct ServeArgs {
    /// Device to serve (see blockhaul help devices)
    #[arg(value_name = "DEVICE", required_unless_present_any = ["config", "export", "qmp", "qmp_client", "qmp_run"])]
    pub device: Option<OsString>,

    #[command(flatten)]
    pub image: ImageFormatArgs,

    /// Serve what this file in TOML describes, instead of DEVICE and options (docs/serve-config.md)
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "device", "export", "description", "readonly", "layer", "format", "backing", "partition", "per_client",
        "any_name", "unix", "port", "ip_addr", "tls", "tls_certificates", "tls_psk", "tls_verify_peer", "limit",
        "threads", "timeout", "memory", "metrics", "page", "workers", "bitmaps"])]
    pub config: Option<PathBuf>,

    /// Check the file of --config, without opening devices and sockets, and exit
    #[arg(long, requires = "config")]
    pub check_config: bool,

    /// Print the result of --check-config as JSON
    #[arg(long, requires = "check_config")]
    pub json: bool,

    /// Listen on this Unix socket; may be repeated
    ///
    /// - creates a private socket, which is removed on exit.
    #[arg(short = 'U', long, value_name = "SOCKET")]
    pub unix: Vec<PathBuf>,

    /// Listen on this TCP port (0: a free port, printed); may be repeated
    #[arg(short, long, value_parser = port)]
    pub port: Vec<u16>,

    /// Listen only on this address or host name (TCP); may be repeated
    ///
    /// Each port is opened on each address.
    #[arg(short, long = "ip-addr", alias = "ipaddr", value_name = "ADDR")]
    pub ip_addr: Vec<String>,

    /// Listen on this vsock port, for virtual machines; may be repeated
    ///
    /// On a host, virtual machines can connect; in a virtual machine, its host can. With a context
    /// ID (CID), listen on that one only.
    #[arg(long, value_name = "[CID:]PORT", value_parser = VsockPlace::from_str)]
    pub vsock: Vec<VsockPlace>,

    /// Serve to virtual machines through this Unix socket, as a virtio-blk disk; may be repeated
    ///
    /// QEMU, cloud-hypervisor and other programs connect to the socket with vhost-user, and share the
    /// memory of the virtual machine with the server. Without EXPORT, the disk is the default export.
    /// Without --unix, --port or another place to listen, the server has no NBD clients.
    #[cfg(feature = "vhost")]
    #[arg(long, value_name = "[EXPORT=]SOCKET", value_parser = VhostPlace::from_str)]
    pub vhost_user: Vec<VhostPlace>,

    /// Serve one client on standard input and output, then exit
    #[arg(short, long, conflicts_with = "run")]
    pub single: bool,

    /// Serve read-only
    #[arg(short, long, alias = "read-only")]
    pub readonly: bool,

    /// Name of DEVICE for clients, or a further export; may be repeated
    ///
    /// NAME names DEVICE. NAME=DEVICE is a further export. NAME=[ DEVICE OPTION… ], as separate
    /// words, gives the device its own --layer, --readonly and --description. In NAME=, %XX is a
    /// byte. If a client asks for the empty name, it gets the unnamed export or, without one, the
    /// first.
    #[arg(
        short,
        long,
        aliases = ["export-name", "exportname"],
        value_name = "NAME | NAME=DEVICE | NAME=[ DEVICE OPTION… ]"
    )]
    pub export: Vec<OsString>,

    /// Description of the export, shown to clients
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub description: String,

    /// Put a layer over the device (see blockhaul help layers)
    ///
    /// May be repeated; the last layer is the outermost. With several exports, the layer is put
    /// over each of them.
    #[arg(long, value_name = "NAME[?key=value&…]")]
    pub layer: Vec<String>,

    /// Return when ready, and serve in the background
    ///
    /// Messages then go to standard error if that is a file, else to syslog.
    #[arg(
        long,
        conflicts_with_all = ["foreground", "run", "single", "exit_with_parent"]
    )]
    pub background: bool,

    /// Stay in the foreground (the default)
    #[arg(short, long, alias = "no-fork")]
    pub foreground: bool,

    /// Do not print what is served, and to whom, when ready
    #[arg(short, long)]
    pub quiet: bool,

    /// Write the process ID to this file when ready; it is removed when the server ends
    #[arg(short = 'P', long, alias = "pid-file", value_name = "FILE")]
    pub pidfile: Option<PathBuf>,

    /// Run this shell command while serving, then exit with its status
    ///
    /// The command gets the variables $uri (also $nbd), $unixsocket, $port and $exportname. Without
    /// --unix and --port, listen on a private Unix socket.
    #[arg(long, value_name = "CMD")]
    pub run: Option<String>,

    /// Print the URI for clients when ready, and a command to try it
    #[arg(long, aliases = ["print-url", "show-uri", "show-url"])]
    pub print_uri: bool,

    /// Open the device again for each client
    ///
    /// A client gets the device as it is at that time: a file may have another size. Whether one
    /// client sees what another writes depends on the storage. A disk image such as qcow2 is refused,
    /// unless it is served with --readonly.
    #[arg(long)]
    pub per_client: bool,

    /// Serve the device whatever export name clients ask for
    #[arg(long)]
    pub any_name: bool,

    /// Export name for $uri and $exportname, for devices that have exports of their own
    #[arg(long, value_name = "NAME")]
    pub uri_export: Option<String>,

    /// Lock all memory, for a device that is swap space of this machine
    #[arg(long)]
    pub swap: bool,

    /// SELinux label of the listening sockets
    #[arg(long, value_name = "LABEL")]
    pub selinux_label: Option<String>,

    /// Exit when the parent process exits
    #[arg(long)]
    pub exit_with_parent: bool,

    /// Maximum requests in progress per connection
    ///
    /// By default the bytes of these requests are limited instead.
    #[arg(short, long, value_name = "N", value_parser = count::<u32>(1, 65536))]
    pub threads: Option<u32>,

    /// Time that a client has for the handshake (0: no limit)
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub timeout: Duration,

    /// Time to wait on exit for requests, plugins and scripts
    ///
    /// The server then logs what it still waits for, answers these requests with an error, and
    /// exits with status 9. Clients delay the exit by less than a second. A second signal ends it at once.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub drain_timeout: Duration,

    /// Listen for blockhaul ctl on this Unix socket
    ///
    /// Only the user that runs the server can use the socket. It is removed on exit.
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,

    /// Listen for clients of QEMU's monitor protocol (QMP) on this Unix socket; may be repeated
    ///
    /// Clients add disks, exports, bitmaps and jobs as with qemu-storage-daemon. Only the user that
    /// runs the server can use the socket. It is removed on exit.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["per_client", "any_name", "trace"])]
    pub qmp: Vec<PathBuf>,

    /// Serve the monitor protocol to this one client, too; may be repeated
    ///
    /// A Unix socket to connect to, an inherited socket, or standard input and output.
    #[arg(long, value_name = "unix:PATH|fd:N|stdio", hide = true, value_parser = QmpClient::from_str)]
    pub qmp_client: Vec<QmpClient>,

    /// Run this command of the monitor protocol before the server is ready; may be repeated
    #[arg(long, value_name = "JSON", hide = true)]
    pub qmp_run: Vec<String>,

    /// Listen for NBD clients only when the monitor protocol asks for it
    #[arg(long, hide = true)]
    pub no_listen: bool,

    /// Keep dirty bitmaps in this directory when the server ends
    ///
    /// A later server continues them for the export of the same name and device. After a crash they
    /// are inconsistent: ctl exports shows them, and ctl bitmap-remove removes them. Each file has a
    /// digest; if it does not match, the server does not start. Other programs must not write to the
    /// device in between.
    #[arg(long, value_name = "DIR", conflicts_with = "per_client")]
    pub bitmaps: Option<PathBuf>,

    /// Keep what is needed to resume jobs in this directory when the server ends
    ///
    /// A later server shows them as interrupted, and marks what clients write meanwhile; ctl
    /// job-resume continues them, and ctl job-cancel removes them. Other programs must not write to
    /// the device in between. At the first write to a block of 64 KiB that is copied already, a client
    /// waits until that is recorded on disk.
    #[arg(long, value_name = "DIR", conflicts_with = "per_client")]
    pub job_state: Option<PathBuf>,

    /// Publish metrics for Prometheus: localhost:PORT, unix:PATH or textfile:PATH
    ///
    /// ADDR is a loopback address with a port, for example localhost:9100, or unix:PATH. Port 0
    /// selects a free port and prints it. The server answers GET /metrics. There is no password:
    /// whoever reaches the address can read the metrics. textfile:PATH writes a file for
    /// node_exporter every 15 s and at the end, as the user of --user; PATH ends in .prom, and the
    /// label run has its name. May be given twice, for an address and a file.
    #[arg(long, value_name = "ADDR")]
    pub metrics: Vec<blockhaul_metrics::Destination>,

    /// Serve a web page at the address of --metrics that shows clients and load
    ///
    /// The page shows clients, exports, rate and latency over time. It is read-only and loads
    /// nothing from other servers. The same data as JSON: GET /status.json, and as one event a
    /// second: GET /events.
    #[arg(long, requires = "metrics")]
    pub page: bool,

    /// Change to this user (name or number) and to its groups once everything is open
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,

    /// Change to this group once everything is open
    ///
    /// With --user, the group takes the place of the user's own groups. Without --user, only the
    /// group changes.
    #[arg(short, long, value_name = "GROUP")]
    pub group: Option<String>,

    /// Change a limit on what clients can use; may be repeated; see LIMITS
    #[arg(long, value_name = "NAME=VALUE", value_parser = limit)]
    pub limit: Vec<String>,

    /// Print more detail
    #[arg(short, long)]
    pub verbose: bool,

    /// Log each request at each layer and at the device; implies --verbose
    #[arg(long)]
    pub trace: bool,

    #[command(flatten)]
    pub log: LogArgs,

    /// Run each plugin (nbdkit:…) in a process of its own
    ///
    /// If a plugin crashes, its sessions fail, but the server continues and starts the plugin again
    /// for the next client; with =once, for plugins that keep the disk in memory, it does not. The
    /// plugin's parameter @watchdog=TIME ends a plugin that hangs.
    #[arg(long, value_name = "again|once", num_args = 0..=1, require_equals = true,
          default_missing_value = "again", value_parser = isolate)]
    pub isolate: Option<blockhaul_isolated::RestartPolicy>,

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

    /// Report the device's own block sizes, or none (for tests of clients)
    #[arg(long, help_heading = "Protocol")]
    pub no_block_sizes: bool,

    /// Report this preferred block size if the device reports no block sizes
    #[arg(long, value_name = "BYTES", hide = true, requires = "no_block_sizes",
          value_parser = count::<u32>(512, 32 << 20))]
    pub preferred_block: Option<u32>,

    /// Mask of the handshake flags to offer (for tests of clients)
    ///
    /// 1 is fixed newstyle, 2 is no zeroes after the export information [default: all flags]
    #[arg(long, value_name = "MASK", help_heading = "Protocol", value_parser = mask)]
    pub mask_handshake: Option<u16>,

    /// Use the oldstyle handshake, for clients that support no other
    ///
    /// Clients get the first export and cannot choose an export or TLS.
    #[arg(long, alias = "old-style", help_heading = "Protocol")]
    pub oldstyle: bool,

    /// Start NBD after an HTTP/1.1 upgrade request
    ///
    /// Clients send GET or POST of any path with "Upgrade: nbd", as those of Incus and LXD do; with --tls
    /// require over HTTPS. Their URIs are nbd+http://HOST:PORT/ or nbd+https://HOST:PORT/.
    #[arg(long, conflicts_with = "oldstyle", help_heading = "Protocol")]
    pub http_upgrade: bool,

    /// Threads that serve (0: one per core)
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Tuning",
          value_parser = count::<u16>(0, 1024))]
    pub workers: u16,

    /// Memory for the requests of all clients together
    #[arg(long, value_name = "SIZE", default_value = "512M", help_heading = "Tuning",
          value_parser = memory)]
    pub memory: u64,

    #[command(flatten)]
    pub engine: EngineArgs,

    /// Exit on SIGHUP, as nbdkit does.
    #[arg(long, hide = true)]
    pub hangup_stops: bool,

    /// Do as nbdkit does: print the URI with the program that nbdkit names, keep the file of the process ID, and change
    /// to the directory / in the background.
    #[arg(long, hide = true)]
    pub as_nbdkit: bool,

    /// Keep the file of the process ID, as qemu-nbd does.
    #[arg(long, hide = true)]
    pub keep_pidfile: bool,

    /// Leave it to the client to report what it is refused: it is the server that started this one.
    #[arg(long, hide = true)]
    pub quiet_clients: bool,

    /// Open files without locks, as nbdkit does.
    #[arg(long, hide = true)]
    pub no_locks: bool,

    /// Set by a server that starts itself again to go to the background.
    #[arg(long, hide = true)]
    pub in_background: bool,
}

fn isolate(text: &str) -> Result<blockhaul_isolated::RestartPolicy, String> {
    match text {
        "again" => Ok(blockhaul_isolated::RestartPolicy::ForClients),
        "once" => Ok(blockhaul_isolated::RestartPolicy::Never),
        _ => Err(format!("{text:?} is not one of again, once")),
    }
}

impl ServeArgs {
    /// Sockets for virtual machines, and the exports that they get.
    #[cfg(feature = "vhost")]
    pub fn vhost_places(&self) -> Vec<(String, PathBuf)> {
        self.vhost_user.iter().map(|place| (place.export.clone(), place.socket.clone())).collect()
    }

    /// None, as this program is built without them.
    #[cfg(not(feature = "vhost"))]
    pub fn vhost_places(&self) -> Vec<(String, PathBuf)> {
        Vec::new()
    }

    /// Whether it listens for NBD clients only when the monitor protocol asks for it: nothing is
    /// served, and no place to listen is given.
    pub fn waits_for_monitor(&self) -> bool {
        let nothing_served =
            self.device.is_none() && self.export.is_empty() && self.config.is_none();
        let no_tcp = self.port.is_empty() && self.ip_addr.is_empty();
        let no_place = self.unix.is_empty() && self.vsock.is_empty() && no_tcp && !self.single;
        self.no_listen || !self.qmp.is_empty() && nothing_served && no_place
    }
}

/// What stands in the brackets of `--export NAME=[ … ]`.
#[derive(Debug, Parser)]
#[command(infer_long_args = true, no_binary_name = true, disable_help_flag = true)]
pub struct ServeExport {
    /// Device to serve (see blockhaul help devices)
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// Serve read-only
    #[arg(short, long, alias = "read-only")]
    pub readonly: bool,

    /// Description of the export, shown to clients
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub description: String,

    /// Put a layer over the device (see blockhaul help layers)
    ///
    /// May be repeated; the last layer is the outermost.
    #[arg(long, value_name = "NAME[?key=value&…]")]
    pub layer: Vec<String>,

    #[command(flatten)]
    pub partition: PartitionArgs,
}

/// Whether and how a server uses TLS.
#[derive(Debug, Args)]
pub struct ServeTls {
    /// Whether clients can or must use TLS: off, on or require
    ///
    /// require refuses clients without TLS [default: require if certificates or keys are given,
    /// else off]
    #[arg(long, value_name = "MODE", help_heading = "TLS")]
    pub tls: Option<TlsMode>,

    /// Directory with the certificates of the server
    ///
    /// It contains server-cert.pem, server-key.pem, ca-cert.pem and, if certificates were revoked,
    /// ca-crl.pem; blockhaul tls init creates the first three [default: as nbdkit, ~/.pki/nbdkit or
    /// ~/.config/pki/nbdkit; for root /etc/pki/nbdkit]
    #[arg(long, value_name = "DIR", conflicts_with = "tls_psk", help_heading = "TLS")]
    pub tls_certificates: Option<PathBuf>,

    /// File of pre-shared keys, with lines USER:HEXKEY
    ///
    /// blockhaul tls init --psk creates such a file.
    #[arg(long, value_name = "FILE", help_heading = "TLS")]
    pub tls_psk: Option<PathBuf>,

    /// Require client certificates signed by the authority in ca-cert.pem
    #[arg(long, conflicts_with = "tls_psk", help_heading = "TLS")]
    pub tls_verify_peer: bool,

    /// Which code makes the records of TLS 1.3: own or openssl
    ///
    /// The code of OpenSSL copies each byte once more. TLS 1.2 always uses it [default: own]
    #[arg(long, value_name = "CODE", hide_possible_values = true, help_heading = "TLS")]
    pub tls_records: Option<TlsRecords>,
}

pub(super) const EXAMPLES: &str = "\
EXAMPLES
  Serve an image on this machine only:
      blockhaul serve -i localhost disk.raw
  Serve in the background, until the process with the ID in the file is stopped:
      blockhaul serve --background -P /run/disk.pid -U /run/disk.sock disk.raw
  Serve for the duration of a copy:
      blockhaul serve sample:2G --run 'nbdcopy \"$uri\" disk.raw'
  Serve only to clients that have a key:
      blockhaul tls init --psk alice keys.psk
      blockhaul serve --tls-psk keys.psk disk.raw
  Serve several disks, one of them read-only and slower; serve every file of a directory:
      blockhaul serve --export a=a.raw --export b=[ b.raw -r --layer 'rate?rate=10M' ]
      blockhaul serve dir:/var/images
  Serve what a file describes; ctl reload carries out what is changed in it:
      blockhaul serve --config disks.toml --control /run/disks.ctl
  Serve the export of another server, at a lower rate:
      blockhaul serve -U /run/slow.sock --layer 'rate?rate=10M' nbd://server/disk
";

/// The limits of a server, for the help.
pub(super) fn limits() -> String {
    let row = |limit: &blockhaul_server::Limit| {
        let what = format!("{} [default: {}]", limit.what, limit.default());
        devices::short_entry(limit.name, &what, 18)
    };
    format!("LIMITS\n{}", blockhaul_server::Limits::TABLE.iter().map(row).collect::<String>())
}
