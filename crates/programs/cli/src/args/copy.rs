//! Options of `copy`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::engine::Engine;
use super::value::{
    algorithm, duration, multi_conn, queue_size, range, request_size, schedule, segment, size,
    sparse, total_memory,
};
use crate::devices;

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
    pub multi_conn: blockhaul_engine::MultiConn,

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
    #[arg(short = 'T', long, alias = "workers", value_name = "N", default_value = "0",
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

    /// Discard at the source, to free its space, what is safe on the target: written, flushed, and recorded
    /// in the --journal if there is one. The target is flushed each second for that, or as often as
    /// --journal-interval says. For a source that nobody needs once it is copied, such as the overlay of a
    /// backup. After a failure go on with the same journal; without one, never copy again what was
    /// discarded. What the source fails to discard stays there, with a warning
    #[arg(long)]
    pub discard_source: bool,

    /// Read and write files and disks past the page cache: on, off, or auto, which does so where the
    /// data would only turn out what others have there: from 64M on, reads of what is not cached, and
    /// writes of what does not come from a cached file
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub direct: crate::direct::Wanted,

    /// One request at a time, in order
    #[arg(long)]
    pub synchronous: bool,

    /// Flush the target, read both sides again and compare them
    #[arg(long)]
    pub verify: bool,

    /// Read the source once more, before the copy, and write digests of its pieces to this file when
    /// the target has been flushed, for blockhaul verify and --since. It takes the place of an earlier
    /// manifest, of nothing else
    #[arg(long, value_name = "FILE")]
    pub manifest: Option<PathBuf>,

    /// Print the digest of what was copied, as checksum does: blake3, sha256 or blksum. It is computed
    /// while copying, except for sha256 and after --journal went on, which read the source once more;
    /// holes cost blksum nearly nothing. On standard error when the copy goes to standard output
    #[arg(long, value_name = "NAME", value_parser = algorithm)]
    pub digest: Option<blockhaul_engine::Algorithm>,

    /// Copy only this range, to the same place on the target, which keeps everything else: offset and
    /// length, as 1G:64M. To a pipe go the bytes of the range
    #[arg(long, value_name = "OFFSET:LENGTH", value_parser = range, conflicts_with = "since",
          help_heading = "Parts of a disk")]
    pub range: Option<(u64, u64)>,

    /// Copy only the ranges in this list, to the same place on the target, which keeps everything else: JSON
    /// lines with offset and length, or the output of nbdinfo --map --json (what is clean is left out),
    /// rbd diff --format json, VMware's QueryChangedDiskAreas, CSI's SnapshotMetadata as JSON, or thin_delta.
    /// - reads standard input
    #[arg(long, value_name = "FILE|-", conflicts_with_all = ["range", "bitmap", "since", "manifest"],
          help_heading = "Parts of a disk")]
    pub ranges: Option<PathBuf>,

    /// Copy only what this bitmap of the source says, as qemu:dirty-bitmap:NAME: a metadata context of
    /// its server. The target must hold the copy that the bitmap was begun with
    #[arg(
        long,
        value_name = "CONTEXT",
        conflicts_with = "since",
        help_heading = "Parts of a disk"
    )]
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
    /// flight; 0 for never. A server that sends bytes but completes no reply in this time gets a warning
    /// each minute
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    /// Give up on a connection, as after --timeout, if its reads and writes in flight complete fewer
    /// bytes a second than this, measured over --timeout (60 s if that is 0); 0 for no minimum. A
    /// request counts when it is complete
    #[arg(long, value_name = "RATE", default_value = "0", value_parser = size)]
    pub min_rate: u64,

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
    pub rate: Option<blockhaul_engine::Schedule>,

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

    // Its help names the layers that there are.
    #[arg(long, value_name = "NAME[?key=value&…]", help = target_layer())]
    pub target_layer: Vec<String>,

    /// Say what is going on, and in the end what was done
    #[arg(short, long)]
    pub verbose: bool,

    #[command(flatten)]
    pub engine: Engine,
}

pub(super) const EXAMPLES: &str = "\
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
  Only what changed between two snapshots of Ceph:
      rbd diff --from-snap a --format json p/d@b | blockhaul copy --ranges - /dev/rbd0 disk.raw
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

/// What the help says about job files.
pub const JOB_FILES: &str = "\
JOB FILES
  A file for --job is TOML. Each [[disk]] has a source and a target, written as on the command line,
  or as a list of words for a server that is started as with [ CMD ARG… ]; a name for messages (else
  its number); and any option of copy by its long name, flags as true. [defaults] are for all disks
  that say nothing else. Keys before the first table are for all disks together: parallel,
  total-memory, total-connections, rate, rate-file, iops, threads, engine, metrics.
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
  All sources and targets are opened before the first byte is written. The run succeeds if all disks
  do; its exit status is else that of the first disk of the file that failed. Journals of disks that
  are complete stay until all are, so that the same command goes on with those that failed.
";

/// The help of `--target-layer`.
fn target_layer() -> String {
    format!(
        "Put a layer over the target. A file under a layer that shows what it holds ({}) is neither emptied \
         nor made larger",
        devices::names_over_content()
    )
}
