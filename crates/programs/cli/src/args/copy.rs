//! Options of `copy`, and the request that they make.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use blockhaul_transfer::TransferOptions;
use clap::Args;

use super::engine::EngineArgs;
use super::format::ImageFormatArgs;
use super::log::LogArgs;
use super::value::{
    algorithm, count, direct, duration, error_action, multi_conn, queue_size, range, request_size,
    schedule, segment, size, sparse, total_memory,
};
use crate::devices;

/// Options of `blockhaul copy`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct CopyArgs {
    /// Device to copy; - reads standard input (see blockhaul help devices)
    #[arg(value_name = "SOURCE", required_unless_present = "job", conflicts_with = "job")]
    pub source: Option<OsString>,

    /// Device to write; - writes standard output (see blockhaul help devices)
    #[arg(value_name = "TARGET", required_unless_present = "job", conflicts_with = "job")]
    pub target: Option<OsString>,

    #[command(flatten)]
    pub image: ImageFormatArgs,

    /// Connections to each side [default: adaptive, up to 16]
    ///
    /// The adaptive default starts with one connection per CPU, at most 4, or with 4 if requests
    /// take long, and uses 1 to 16. It is 1 for servers behind HTTP or SSH without multi-conn.
    #[arg(short = 'C', long, value_name = "N",
          value_parser = count::<u16>(1, 1024))]
    pub connections: Option<u16>,

    /// When to use several connections to a server without multi-conn
    ///
    /// auto: only after checking that a further connection returns the same data that the first
    /// connection read and wrote. always: without this check. advertised: never; use several
    /// connections only to servers that report multi-conn.
    #[arg(long, value_name = "WHEN", default_value = "auto",
          value_parser = multi_conn())]
    pub multi_conn: blockhaul_engine::MultiConn,

    /// Requests in flight on each connection [default: adaptive, up to 64]
    ///
    /// The number includes reads and writes.
    #[arg(short = 'R', long, value_name = "N",
          value_parser = count::<u32>(1, 65536))]
    pub requests: Option<u32>,

    /// Bytes of each request [default: adaptive, 64k to 8m]
    ///
    /// A power of two from 4k to 32m. The adaptive default starts with 512k.
    #[arg(long, value_name = "SIZE", value_parser = request_size)]
    pub request_size: Option<u32>,

    /// Maximum bytes in flight on each connection
    ///
    /// With the default, all connections together have at most 44m in flight.
    #[arg(long, value_name = "SIZE", default_value = "16m", value_parser = queue_size)]
    pub queue_size: u64,

    /// Threads that copy (0: one per core)
    #[arg(short = 'T', long, alias = "workers", value_name = "N", default_value = "0",
          value_parser = count::<u16>(0, 1024))]
    pub threads: u16,

    /// Turn runs of zeroes of at least SIZE into holes [default: 4096]
    ///
    /// A power of two, 512 or more; 0 does not look for zeroes. By default, if the source reports
    /// holes, its data is only sampled for zeroes.
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = sparse)]
    pub sparse: Option<u32>,

    /// Do not create holes on the target
    #[arg(long)]
    pub allocated: bool,

    /// Assume that the target reads as zeroes, and skip zeroes
    ///
    /// A sample of the target is checked first, see --trust. Ranges that the target itself reports
    /// as zero are always skipped.
    #[arg(long, alias = "target-is-zero")]
    pub destination_is_zero: bool,

    /// With --destination-is-zero: do not check a sample
    #[arg(long, requires = "destination_is_zero")]
    pub trust: bool,

    /// Zero everything that is zero, segment by segment, as nbdcopy.
    #[arg(long, hide = true)]
    pub zero_all: bool,

    /// Do not ask the source for its extents (data and holes)
    #[arg(long)]
    pub no_extents: bool,

    /// Flush the target to stable storage before exiting
    #[arg(long)]
    pub flush: bool,

    /// Discard ranges of the source once they are durable on the target
    ///
    /// Frees space at a source that is not needed after the copy, such as the overlay of a backup. A
    /// range is discarded after it was written, flushed, and recorded in the --journal, which is required; the
    /// target is flushed every --journal-interval for that. After a failure, continue with the same journal. The
    /// journal stays after success, and the same command then copies nothing: use another journal and
    /// another target for each backup. A failed discard causes a warning.
    #[arg(long)]
    pub discard_source: bool,

    /// Bypass the page cache of files and disks: on, off or auto
    ///
    /// auto bypasses it for files of 64M or more, and for block devices, if the data is not cached
    /// already, so as not to evict the data of other programs: it reads uncached data, and writes
    /// data that does not come from a cached file, with direct I/O.
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = direct)]
    pub direct: blockhaul_catalog::DirectMode,

    /// Send one request at a time, in order
    #[arg(long)]
    pub synchronous: bool,

    /// Flush the target, then read both sides again and compare them
    #[arg(long)]
    pub verify: bool,

    /// Write digests of the source to FILE, for verify and --since
    ///
    /// The source is read once more, before the copy. FILE is written after the target has been
    /// flushed. An existing manifest is replaced; any other existing file is refused.
    #[arg(long, value_name = "FILE")]
    pub manifest: Option<PathBuf>,

    /// Print the digest of the copied data: blake3, sha256 or blksum
    ///
    /// This is the digest that blockhaul checksum prints. It is computed while copying; sha256, and
    /// a copy resumed with --journal, read the source once more instead. With blksum, holes cost
    /// almost nothing. If the copy goes to standard output, the digest is printed on standard
    /// error.
    #[arg(long, value_name = "NAME", value_parser = algorithm)]
    pub digest: Option<blockhaul_engine::DigestAlgorithm>,

    /// What to do if the storage of the source fails on a range: stop or skip [default: stop]
    ///
    /// skip: the range reads as zeroes on the target, and is read again in smaller pieces at the end.
    #[arg(long, value_name = "WHAT", default_value = "stop", value_parser = error_action(),
          hide_possible_values = true, hide_default_value = true, help_heading = "Bad sectors")]
    pub on_error: blockhaul_transfer::ErrorAction,

    /// With --on-error skip: the mapfile, as of ddrescue, for the ranges that cannot be read
    ///
    /// If FILE exists and everything was tried, only the ranges in it are read again.
    #[arg(long, value_name = "FILE", help_heading = "Bad sectors",
          conflicts_with_all = ["verify", "digest", "manifest", "since", "range", "list", "bitmap", "discard_source"])]
    pub error_map: Option<PathBuf>,

    /// Copy only this range, for example 1G:64M
    ///
    /// The range is written to the same place on the target; the rest of the target does not
    /// change. A pipe receives only the bytes of the range.
    #[arg(long, value_name = "OFFSET:LENGTH", value_parser = range, conflicts_with = "since",
          help_heading = "Parts of a disk")]
    pub range: Option<(u64, u64)>,

    /// Copy only the ranges in this list; - reads standard input
    ///
    /// The rest of the target does not change. The list has lines or JSON with offset and length, or is
    /// from nbdinfo --map --json, rbd diff, thin_delta, thin_dump, QueryChangedDiskAreas (VMware),
    /// list_changed_blocks (XAPI), ListChangedBlocks (EBS), or SnapshotMetadata (CSI).
    #[arg(long, value_name = "FILE|-", group = "list", conflicts_with_all = ["range", "bitmap", "since", "manifest"],
          help_heading = "Parts of a disk")]
    pub ranges: Option<PathBuf>,

    /// Run this shell command and copy only the ranges it prints; if it fails, nothing is copied
    #[arg(long, value_name = "CMD", group = "list", conflicts_with_all = ["range", "bitmap", "since", "manifest"],
          help_heading = "Parts of a disk")]
    pub ranges_command: Option<String>,

    /// Accept a list that covers only a part of the disk; a warning says what is not copied
    #[arg(long, requires = "list", help_heading = "Parts of a disk")]
    pub ranges_partial: bool,

    /// Copy only what this dirty bitmap of the source marks
    ///
    /// CONTEXT is a metadata context of the server, for example qemu:dirty-bitmap:NAME. The target
    /// must hold the copy that was made when the bitmap was started.
    #[arg(
        long,
        value_name = "CONTEXT",
        conflicts_with = "since",
        help_heading = "Parts of a disk"
    )]
    pub bitmap: Option<String>,

    /// With --bitmap: copy ranges with any of these flags [default: any]
    #[arg(long, value_name = "FLAGS", requires = "bitmap", help_heading = "Parts of a disk",
          value_parser = count::<u64>(1, u64::MAX))]
    pub bitmap_flags: Option<u64>,

    /// Copy only what differs from this manifest of an earlier copy
    ///
    /// The manifest must have been written by an earlier copy to the same target. The source is
    /// read completely, but only what changed is written, in units of 1 to 128 MiB. Use --manifest
    /// as well to write a manifest for the next copy.
    #[arg(long, value_name = "MANIFEST", help_heading = "Parts of a disk")]
    pub since: Option<PathBuf>,

    /// Show progress: a bar, a map, lines on descriptor FD, or JSON
    ///
    /// Without a value, a bar; a terminal gets a bar by default. map: a map of the disk that fills;
    /// each character is a part of the disk: - is not begun, + begun, * data, . zeroes or holes, =
    /// copied by an earlier run, # verified. FD: lines N/100 on this file descriptor. json, or
    /// json:FD: one JSON object per line, on standard error or on descriptor FD.
    #[arg(short, long, value_name = "FD|map|json", num_args = 0..=1, require_equals = true,
          default_missing_value = "bar")]
    pub progress: Option<crate::progress::ProgressStyle>,

    /// Show what would be read, written and overwritten, and change nothing
    #[arg(long)]
    pub dry_run: bool,

    /// With --dry-run: print JSON
    #[arg(long, requires = "dry_run")]
    pub json: bool,

    /// Do not show a progress bar
    #[arg(long, conflicts_with = "progress")]
    pub no_progress: bool,

    /// Publish metrics for Prometheus: localhost:PORT, unix:PATH or textfile:PATH
    ///
    /// ADDR is a loopback address with a port, for example localhost:9100, or unix:PATH. Port 0
    /// selects a free port and prints it. There is no password: whoever reaches the address can read
    /// the metrics. textfile:PATH writes a file for node_exporter every 15 s and at the end; PATH ends
    /// in .prom, and the label run has its name. May be given twice, for an address and a file.
    #[arg(long, value_name = "ADDR", help_heading = "Long copies")]
    pub metrics: Vec<blockhaul_metrics::Destination>,

    /// Serve a web page at the address of --metrics that shows the progress
    ///
    /// It shows a map of the disk, rate and latency over time, and the slower side, is read-only and
    /// loads nothing from other servers. GET /status.json and /events give the same data as JSON.
    #[arg(long, help_heading = "Long copies", requires = "metrics")]
    pub page: bool,

    /// Drop a connection if no byte has moved for this long (0: never)
    ///
    /// This applies while requests are in flight. If a server sends bytes but completes no reply in
    /// this time, a warning is printed each minute.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    /// Drop a connection slower than this, in bytes/s [default: 0, no minimum]
    ///
    /// The rate is the number of bytes of reads and writes that complete while requests are in
    /// flight, measured over --timeout (60 s if that is 0). A request counts when it completes. The
    /// connection is handled as after --timeout.
    #[arg(long, value_name = "RATE", default_value = "0", hide_default_value = true, value_parser = size)]
    pub min_rate: u64,

    /// How often to retry a request or reconnect, on either side (0: never)
    ///
    /// After that the copy fails. Permanent errors, such as a full target, are not retried.
    #[arg(long, value_name = "N", default_value = "5", help_heading = "Long copies",
          value_parser = count::<u32>(0, 1000))]
    pub retries: u32,

    /// Delay before the second attempt to reconnect
    ///
    /// The delay doubles each time, up to 30 s. A request that fails on a working connection is
    /// retried sooner, after 20 ms at first.
    #[arg(long, value_name = "TIME", default_value = "1s", help_heading = "Long copies",
          value_parser = duration)]
    pub retry_delay: Duration,

    /// Record progress in FILE, to resume the copy after a crash
    ///
    /// The journal records what is durable on the target. Run the same command again with the same
    /// FILE after a crash or kill, and the copy resumes. Both sides must be unchanged; a change
    /// that their sizes, times and samples do not show is found only by --verify. The journal is
    /// removed after success; with --discard-source it stays.
    #[arg(long, value_name = "FILE", help_heading = "Long copies")]
    pub journal: Option<PathBuf>,

    /// With --journal: start from the beginning
    #[arg(long, requires = "journal", help_heading = "Long copies")]
    pub restart: bool,

    /// With --journal: maximum time between flushes of the target
    #[arg(long, value_name = "TIME", default_value = "5s", requires = "journal",
          help_heading = "Long copies", value_parser = duration)]
    pub journal_interval: Duration,

    /// Limit the bytes per second of all connections together
    ///
    /// Either one rate, such as 50M (base 1024), 20MB/s or 160Mbit (base 1000), or rules by local time,
    /// for example 'mon-fri 08:00-18:00=50M,*=0': the first rule that matches the time applies. 0 means no
    /// limit. Reads of --verify, --manifest, --since and --digest count, too.
    #[arg(long, value_name = "RATE|RULES", help_heading = "Long copies", value_parser = schedule)]
    pub rate: Option<blockhaul_engine::RateSchedule>,

    /// Limit the number of requests started per second
    #[arg(long, value_name = "N", help_heading = "Long copies",
          value_parser = count::<u64>(1, u64::MAX))]
    pub iops: Option<u64>,

    /// Read the rate limit from this file, again each second
    ///
    /// The file contains a rate or rules as for --rate; a line iops=N takes the place of --iops. 0
    /// or a missing file means no limit.
    #[arg(long, value_name = "FILE", conflicts_with = "rate", help_heading = "Long copies")]
    pub rate_file: Option<PathBuf>,

    /// Bytes that one connection writes as a unit [default: 128m]
    ///
    /// A power of two from 64k to 1g; also the unit of the journal. The default is smaller for
    /// disks that are too small to keep all connections busy.
    #[arg(long, value_name = "SIZE", help_heading = "Long copies", value_parser = segment)]
    pub segment: Option<u32>,

    /// Copy the disks that this file lists; see blockhaul help job
    ///
    /// Options on the command line apply to all disks and override the file.
    #[arg(long, value_name = "FILE", help_heading = "Several disks")]
    pub job: Option<PathBuf>,

    /// With --job: number of disks to copy at a time [default: 4]
    #[arg(long, value_name = "N",
          help_heading = "Several disks", value_parser = count::<u16>(1, 1024))]
    pub parallel: Option<u16>,

    /// With --job: memory for data in flight, all disks together
    ///
    /// [default: what the largest disk would use alone]
    #[arg(long, value_name = "SIZE", help_heading = "Several disks",
          value_parser = total_memory)]
    pub total_memory: Option<u64>,

    /// With --job: connections to all sources, and to all targets
    ///
    /// The limit applies to each side, over all disks that are copied at a time.
    #[arg(long, value_name = "N", help_heading = "Several disks",
          value_parser = count::<u16>(1, 1024))]
    pub total_connections: Option<u16>,

    /// Put a layer over the source (see blockhaul help layers)
    ///
    /// May be repeated; the last layer is the outermost.
    #[arg(long, value_name = "NAME[?key=value&…]")]
    pub source_layer: Vec<String>,

    // Its help names the layers that there are.
    #[arg(long, value_name = "NAME[?key=value&…]", help = target_layer())]
    pub target_layer: Vec<String>,

    /// Print more detail, and a summary at the end
    #[arg(short, long)]
    pub verbose: bool,

    #[command(flatten)]
    pub log: LogArgs,

    #[command(flatten)]
    pub engine: EngineArgs,
}

impl From<&CopyArgs> for TransferOptions {
    fn from(args: &CopyArgs) -> TransferOptions {
        TransferOptions {
            connections: args.connections,
            multi_conn: args.multi_conn,
            requests: args.requests,
            request_size: args.request_size,
            queue_size: args.queue_size,
            sparse: args.sparse,
            allocated: args.allocated,
            destination_is_zero: args.destination_is_zero,
            trust: args.trust,
            zero_all: args.zero_all,
            no_extents: args.no_extents,
            flush: args.flush,
            discard_source: args.discard_source,
            direct: args.direct,
            synchronous: args.synchronous,
            verify: args.verify,
            manifest: args.manifest.clone(),
            digest: args.digest,
            on_error: args.on_error,
            error_map: args.error_map.clone(),
            range: args.range,
            ranges: args.ranges.clone(),
            ranges_command: args.ranges_command.clone(),
            ranges_partial: args.ranges_partial,
            ranges_alone: false,
            into_store: false,
            bitmap: args.bitmap.clone(),
            bitmap_flags: args.bitmap_flags,
            since: args.since.clone(),
            timeout: args.timeout,
            min_rate: args.min_rate,
            retries: args.retries,
            retry_delay: args.retry_delay,
            journal: args.journal.clone(),
            restart: args.restart,
            journal_interval: args.journal.is_some().then_some(args.journal_interval),
            rate: args.rate.clone(),
            rate_file: args.rate_file.clone(),
            iops: args.iops,
            segment: args.segment,
            source_layer: args.source_layer.clone(),
            target_layer: args.target_layer.clone(),
            no_zero_copy: args.engine.no_zero_copy,
        }
    }
}

/// The options that `copy -h` shows.
const FREQUENT: [&str; 10] = [
    "verify",
    "journal",
    "rate",
    "job",
    "progress",
    "range",
    "digest",
    "on_error",
    "error_map",
    "format",
];

/// The command, with the frequent options and an example in its short help.
pub(super) fn with_short_help(command: clap::Command) -> clap::Command {
    let shortened = command.mut_args(|arg| {
        let shown = arg.is_positional() || FREQUENT.contains(&arg.get_id().as_str());
        arg.hide_short_help(!shown)
    });
    let partition =
        "Use this partition of the source (of the target: --target-layer 'partition?partition=N')";
    shortened.mut_arg("partition", |arg| arg.help(partition)).after_help(
        "EXAMPLE\n  Copy a disk, resume it after a crash with the same command, and verify it:\n      \
         blockhaul copy --verify --journal vm1.journal nbd://old/vm1 vm1.raw\n\n\
         blockhaul copy --help has all options and more examples.\n",
    )
}

pub(super) const EXAMPLES: &str = "\
EXAMPLES
  Serve a generated disk image, copy it and verify it:
      blockhaul copy --verify [ blockhaul serve sample:2G ] disk.raw
  Limit the rate by day, but not by night:
      blockhaul copy --rate 08:00-18:00=50M,*=0 nbd://old/disk nbd://new/disk
  Copy and print the digest that b3sum prints for the copy:
      blockhaul copy --digest blake3 nbd://server/disk disk.raw
  Convert to qcow2:
      blockhaul copy disk.raw qcow2:disk.qcow2
  Copy only what changed since the last copy, with a dirty bitmap of QEMU or with a manifest:
      blockhaul copy --bitmap qemu:dirty-bitmap:b0 nbd://server/disk disk.raw
      blockhaul copy --since monday --manifest tuesday nbd://server/disk disk.raw
  Save what can be read of a disk with bad sectors; the same command again reads only those:
      blockhaul copy --on-error skip --error-map disk.map /dev/sdb disk.raw
  Report progress to a program, one JSON object per line (members: docs/watching.md):
      blockhaul copy --progress=json nbd://server/disk disk.raw
  Serve metrics for Prometheus, and a page for a browser, at http://localhost:9100/:
      blockhaul copy --metrics localhost:9100 --page nbd://server/disk disk.raw
  Copy several disks, with one limit and one report:
      blockhaul copy --job vm1.toml --progress
";

/// What the help says about job files.
pub const JOB_FILES: &str = "\
JOB FILES
  A file for --job is TOML. Each [[disk]] has a source and a target, in the
  notation of the command line, or as a list of words for a server that is
  started as with [ CMD ARG… ]; a name for messages [default: its number]; and
  any option of copy by its long name, flags as true. [defaults] apply to each
  disk that does not set the option itself. Keys before the first table apply
  to all disks together: parallel, total-memory, total-connections, rate,
  rate-file, iops, threads, engine, metrics, page.
      parallel = 2
      rate = \"08:00-18:00=50M,*=0\"
      [defaults]
      verify = true
      [[disk]]
      name = \"root\"
      source = \"nbd://old/root\"
      target = \"nbd://new/root\"
      journal = \"root.journal\"
      [[disk]]
      source = [\"qemu-nbd\", \"-r\", \"-f\", \"qcow2\", \"data.qcow2\"]
      target = \"data.raw\"
      retries = 20
  All sources and targets are opened before the first byte is written. The run
  succeeds if all disks succeed; otherwise its exit status is that of the first
  disk in the file that failed. Journals of complete disks are kept until all
  disks are complete, so that the same command resumes with the disks that
  failed. Those of disks with discard-source stay after that, too.
";

/// The help of `--target-layer`.
fn target_layer() -> String {
    format!(
        "Put a layer over the target; see blockhaul help layers. A file under a layer that shows its content ({}) is \
         neither emptied nor resized",
        devices::names_over_content()
    )
}
