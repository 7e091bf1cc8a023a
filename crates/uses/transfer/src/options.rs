//! The options of a copy, as plain data, and conflicts between them.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use blockhaul_catalog::{ConnectionSettings, DeviceSpec, DirectMode};
use blockhaul_engine::{
    DigestAlgorithm, EngineOptions, KernelCopyMode, MultiConn, RateSchedule, SEGMENT,
};

use crate::description::{full, same, same_storage};
use crate::option_table::{TRANSFER_OPTIONS, find_option};
use crate::values::ErrorAction;

/// The options of a copy, with the defaults of `blockhaul copy`. Every front end fills them in. The fields have
/// the names of the command's long options.
#[derive(Debug, Clone, PartialEq)]
pub struct TransferOptions {
    /// Connections to each side, from 1 to 1024; `None`: adaptive, up to 16.
    pub connections: Option<u16>,
    /// When to use several connections to a server without multi-conn.
    pub multi_conn: MultiConn,
    /// Requests in flight on each connection, from 1 to 65536; `None`: adaptive, up to 64.
    pub requests: Option<u32>,
    /// Bytes of each request, a power of two from 4 KiB to 32 MiB; `None`: adaptive, 64 KiB to 8 MiB.
    pub request_size: Option<u32>,
    /// Maximum bytes in flight on each connection; at least 1.
    pub queue_size: u64,
    /// Shortest run of zeroes, in bytes, that becomes a hole: a power of two of at least 512, or 0: do
    /// not search for zeroes. `None`: 4096, in samples where the source reports holes.
    pub sparse: Option<u32>,
    /// Do not make holes on the target.
    pub allocated: bool,
    /// Assume that the target reads as zeroes.
    pub destination_is_zero: bool,
    /// Do not verify that on a sample.
    pub trust: bool,
    /// Zero everything that is zero, segment by segment, as nbdcopy.
    pub zero_all: bool,
    /// Do not ask the source for its extents.
    pub no_extents: bool,
    /// Flush the target before the copy ends. A verification and a manifest imply it.
    pub flush: bool,
    /// Discard ranges of the source once they are durable on the target.
    pub discard_source: bool,
    /// Whether to bypass the page cache of files and disks.
    pub direct: DirectMode,
    /// Send one request at a time, in order.
    pub synchronous: bool,
    /// Read both sides again after the copy, and compare them.
    pub verify: bool,
    /// The file for the manifest of the source.
    pub manifest: Option<PathBuf>,
    /// The digest of the copied data to compute.
    pub digest: Option<DigestAlgorithm>,
    /// What to do if the storage of the source fails on a range.
    pub on_error: ErrorAction,
    /// The file with the ranges that could not be read.
    pub error_map: Option<PathBuf>,
    /// Copy only this range: offset and length in bytes, not empty.
    pub range: Option<(u64, u64)>,
    /// Copy only the ranges in this file; `-`: standard input.
    pub ranges: Option<PathBuf>,
    /// Copy only the ranges that this shell command prints.
    pub ranges_command: Option<String>,
    /// Accept a list that covers only a part of the disk.
    pub ranges_partial: bool,
    /// The target is a new file that is meant to have only the ranges of the list: no warning about that.
    pub ranges_alone: bool,
    /// The target is a file of a store of backups, which the caller has locked: other copies must not change such files.
    pub into_store: bool,
    /// Copy only what this metadata context of the source, a dirty bitmap, marks.
    pub bitmap: Option<String>,
    /// Copy ranges with any of these flags of the bitmap, at least one; `None`: any flag.
    pub bitmap_flags: Option<u64>,
    /// Copy only what differs from this manifest.
    pub since: Option<PathBuf>,
    /// Time without a byte after which a connection is dropped; zero: never.
    pub timeout: Duration,
    /// Bytes per second below which a connection is dropped; 0: no minimum.
    pub min_rate: u64,
    /// How often to retry a request or reconnect, from 0 to 1000.
    pub retries: u32,
    /// Delay before the second attempt to reconnect; doubles each time, up to 30 s.
    pub retry_delay: Duration,
    /// The file in which progress is recorded.
    pub journal: Option<PathBuf>,
    /// With a journal: begin from the start.
    pub restart: bool,
    /// With a journal: maximum time between flushes of the target; `None`: 5 s.
    pub journal_interval: Option<Duration>,
    /// A limit of bytes per second, or rules for the time of day.
    pub rate: Option<RateSchedule>,
    /// A file with a rate limit that is read each second.
    pub rate_file: Option<PathBuf>,
    /// A limit of requests started per second, at least 1.
    pub iops: Option<u64>,
    /// Bytes that one connection writes as a unit, a power of two from 64 KiB to 1 GiB; `None`: 128 MiB,
    /// less for small disks.
    pub segment: Option<u32>,
    /// Layers over the source, `NAME[?key=value&…]`, the first innermost.
    pub source_layer: Vec<String>,
    /// Layers over the target, `NAME[?key=value&…]`, the first innermost.
    pub target_layer: Vec<String>,
    /// Move every byte through memory.
    pub no_zero_copy: bool,
}

impl Default for TransferOptions {
    fn default() -> TransferOptions {
        TransferOptions {
            connections: None,
            multi_conn: MultiConn::Auto,
            requests: None,
            request_size: None,
            queue_size: 16 << 20,
            sparse: None,
            allocated: false,
            destination_is_zero: false,
            trust: false,
            zero_all: false,
            no_extents: false,
            flush: false,
            discard_source: false,
            direct: DirectMode::Auto,
            synchronous: false,
            verify: false,
            manifest: None,
            digest: None,
            on_error: ErrorAction::Stop,
            error_map: None,
            range: None,
            ranges: None,
            ranges_command: None,
            ranges_partial: false,
            ranges_alone: false,
            into_store: false,
            bitmap: None,
            bitmap_flags: None,
            since: None,
            timeout: Duration::from_secs(60),
            min_rate: 0,
            retries: 5,
            retry_delay: Duration::from_secs(1),
            journal: None,
            restart: false,
            journal_interval: None,
            rate: None,
            rate_file: None,
            iops: None,
            segment: None,
            source_layer: Vec::new(),
            target_layer: Vec::new(),
            no_zero_copy: false,
        }
    }
}

impl TransferOptions {
    /// The engine's options, without ranges, journal and rate limit.
    pub(crate) fn engine(&self) -> EngineOptions {
        let usual = EngineOptions::default();
        EngineOptions {
            connections: self.connections.map_or(usual.connections, usize::from),
            // An explicit number is used as is.
            adaptive_connections: self.connections.is_none(),
            multi_conn: self.multi_conn,
            requests: self.requests.map_or(usual.requests, |n| n as usize),
            adaptive: self.requests.is_none(),
            request_size: self.request_size.unwrap_or(usual.request_size),
            adaptive_size: self.request_size.is_none(),
            queue_size: self.queue_size.max(self.request_size.unwrap_or(0).into()),
            sparse: self.sparse.unwrap_or(usual.sparse),
            sampled: self.sparse.is_none(),
            allocated: self.allocated,
            target_is_zero: self.destination_is_zero,
            trust_zero: self.trust,
            extents: !self.no_extents,
            zero_all: self.zero_all,
            // A verification, a manifest and a map of errors are about durable data.
            flush: self.flush || self.verify || self.manifest.is_some() || self.error_map.is_some(),
            discard_source: self.discard_source,
            synchronous: self.synchronous,
            segment: self.segment.map_or(SEGMENT, u64::from),
            spread: self.segment.is_none(),
            retries: self.retries,
            retry_delay: self.retry_delay,
            by_kernel: if self.no_zero_copy { KernelCopyMode::Never } else { KernelCopyMode::Auto },
            digest: self.digest,
            ..usual
        }
    }

    /// The settings of connections to both sides.
    pub fn connections(&self) -> ConnectionSettings {
        let contexts = self.bitmap.iter().cloned().collect();
        ConnectionSettings { timeout: self.timeout, min_rate: self.min_rate, contexts }
    }

    /// Whether a list says what is copied.
    fn has_list(&self) -> bool {
        self.ranges.is_some() || self.ranges_command.is_some()
    }

    /// Whether the copy is an increment of an earlier one on the target.
    fn is_increment(&self) -> bool {
        self.bitmap.is_some() || self.since.is_some()
    }

    /// Whether an option with a requirement or an exclusion is given.
    fn has(&self, option: &str) -> bool {
        match option {
            "restart" => self.restart,
            "journal" => self.journal.is_some(),
            "journal-interval" => self.journal_interval.is_some(),
            "trust" => self.trust,
            "destination-is-zero" => self.destination_is_zero,
            "range" => self.range.is_some(),
            "ranges" => self.ranges.is_some(),
            "ranges-command" => self.ranges_command.is_some(),
            "ranges-partial" => self.ranges_partial,
            "bitmap" => self.bitmap.is_some(),
            "bitmap-flags" => self.bitmap_flags.is_some(),
            "since" => self.since.is_some(),
            "manifest" => self.manifest.is_some(),
            "rate" => self.rate.is_some(),
            "on-error" => self.on_error == ErrorAction::Skip,
            "error-map" => self.error_map.is_some(),
            "verify" => self.verify,
            "digest" => self.digest.is_some(),
            "discard-source" => self.discard_source,
            "rate-file" => self.rate_file.is_some(),
            _ => false,
        }
    }

    /// The options for the disk of this number of several: `placeholder` in the names of its files is the number.
    #[must_use]
    pub fn numbered(&self, placeholder: &str, number: usize) -> TransferOptions {
        let mut options = self.clone();
        let TransferOptions { manifest, error_map, since, journal, .. } = &mut options;
        for file in [manifest, error_map, since, journal].into_iter().flatten() {
            if let Some(name) = file.to_str() {
                *file = name.replace(placeholder, &number.to_string()).into();
            }
        }
        options
    }

    /// Refuses options that exclude each other, or need another one. The command line refuses the same.
    ///
    /// # Errors
    /// The names of two such options.
    pub fn check(&self) -> Result<(), OptionConflict> {
        for (option, others) in EXCLUSIONS {
            let excluded = others.iter().find(|other| self.has(other));
            if let Some(other) = excluded.filter(|_| self.has(option)) {
                let text = format!(
                    "the argument '{}' cannot be used with '{}'",
                    shown(option),
                    shown(other)
                );
                return Err(OptionConflict::new(option, other, text));
            }
        }
        for (option, others) in REQUIREMENTS {
            if self.has(option) && !others.iter().any(|other| self.has(other)) {
                let shown: Vec<_> = others.iter().map(|other| shown(other)).collect();
                let shown = if let [one] = &shown[..] {
                    one.clone()
                } else {
                    format!("<{}>", shown.join("|"))
                };
                let text = format!("the following required arguments were not provided: {shown}");
                let conflict = OptionConflict::new(option, others[0], text);
                return Err(OptionConflict { is_requirement: true, ..conflict });
            }
        }
        Ok(())
    }

    /// Refuses options that conflict with each other, or with these sides, before anything is opened.
    pub(crate) fn check_with(
        &self,
        source: &DeviceSpec,
        target: &DeviceSpec,
    ) -> Result<(), OptionConflict> {
        self.check()?;
        let pipes = [source, target].map(|spec| *spec == DeviceSpec::Pipe);
        self.check_pipes(pipes)?;
        self.check_second_read(pipes == [false, false])?;
        if let (Some(journal), Some(manifest)) = (&self.journal, &self.manifest)
            && full(journal) == full(manifest)
        {
            let text = "--journal and --manifest are the same file: choose another name";
            return Err(OptionConflict::new("journal", "manifest", text));
        }
        if same(source, target) {
            return Err(OptionConflict::new("source", "target", same_storage(source, target)));
        }
        self.check_selection(pipes)?;
        self.check_error_map(pipes)?;
        self.check_journal()
    }

    /// Whether a copy with these sides can also leave out what cannot be read, and does not yet.
    pub(crate) fn can_skip(&self, source: &DeviceSpec, target: &DeviceSpec) -> bool {
        let (on_error, error_map) = (ErrorAction::Skip, Some(PathBuf::from("FILE")));
        let skipping = TransferOptions { on_error, error_map, ..self.clone() };
        self.on_error != ErrorAction::Skip && skipping.check_with(source, target).is_ok()
    }

    fn check_error_map(&self, pipes: [bool; 2]) -> Result<(), OptionConflict> {
        let Some(map) = &self.error_map else { return Ok(()) };
        if pipes != [false, false] {
            let side = if pipes[0] { "source" } else { "target" };
            let text =
                "--on-error skip: ranges cannot be left out in a pipe: use a device on both sides";
            return Err(OptionConflict::new("on-error", side, text));
        }
        if self.journal.as_ref().is_some_and(|journal| full(journal) == full(map)) {
            let text = "--journal and --error-map are the same file: choose another name";
            return Err(OptionConflict::new("journal", "error-map", text));
        }
        Ok(())
    }

    fn check_journal(&self) -> Result<(), OptionConflict> {
        if !self.discard_source || self.journal.is_some() {
            return Ok(());
        }
        let text = "--discard-source needs a journal: add --journal FILE (in a job file: journal = \"FILE\"); without \
                    one, a copy that fails cannot go on, and what it has discarded is on an incomplete target only";
        Err(OptionConflict::new("discard-source", "journal", text))
    }

    fn check_pipes(&self, pipes: [bool; 2]) -> Result<(), OptionConflict> {
        if pipes == [true, true] {
            let text = "copies from - to -: one of them must be a device";
            return Err(OptionConflict::new("source", "target", text));
        }
        let side = if pipes[0] { "source" } else { "target" };
        if self.journal.is_some() && pipes != [false, false] {
            let text =
                "--journal: a copy from or to a pipe cannot be resumed: use a device on both sides";
            return Err(OptionConflict::new("journal", side, text));
        }
        if self.discard_source && pipes != [false, false] {
            let text = "--discard-source: a pipe can neither discard nor be flushed: neither side can be one";
            return Err(OptionConflict::new("discard-source", side, text));
        }
        Ok(())
    }

    /// Refuses options that read a side again, where it cannot be.
    fn check_second_read(&self, are_devices: bool) -> Result<(), OptionConflict> {
        let twice = [
            (self.verify, "verify"),
            (self.digest.is_some(), "digest"),
            (self.manifest.is_some(), "manifest"),
            (self.since.is_some(), "since"),
        ];
        if self.discard_source
            && let Some((_, option)) = twice.iter().find(|(given, _)| *given)
        {
            let text = format!(
                "--{option} reads the source a second time, and --discard-source leaves nothing to read: \
                 leave out one of them"
            );
            return Err(OptionConflict::new(option, "discard-source", text));
        }
        let side = |option| {
            let what = if option == "verify" { "both sides" } else { "the source" };
            let text =
                format!("--{option} reads {what} again: use a device on both sides, not a pipe");
            Err(OptionConflict::new(option, "source", text))
        };
        match (self.manifest.is_some(), self.verify) {
            _ if are_devices => Ok(()),
            (true, _) => side("manifest"),
            (_, true) => side("verify"),
            _ => Ok(()),
        }
    }

    fn check_selection(&self, pipes: [bool; 2]) -> Result<(), OptionConflict> {
        let is_pipe = pipes != [false, false];
        let side = if pipes[0] { "source" } else { "target" };
        if self.range.is_some() && pipes[0] {
            let text = "--range: the source is a pipe: use a device";
            return Err(OptionConflict::new("range", "source", text));
        }
        let increment = if self.bitmap.is_some() { "bitmap" } else { "since" };
        let of_pipe = |option| {
            let text = format!(
                "--{option}: ranges cannot be left out in a pipe: use a device on both sides"
            );
            Err(OptionConflict::new(option, side, text))
        };
        if self.is_increment() && is_pipe {
            return of_pipe(increment);
        }
        if self.has_list() && is_pipe {
            return of_pipe("ranges");
        }
        if self.is_increment() && self.destination_is_zero {
            let text = "--destination-is-zero: the target of an increment holds the earlier copy";
            return Err(OptionConflict::new("destination-is-zero", increment, text));
        }
        if self.bitmap.as_deref() == Some(blockhaul_block::BASE_ALLOCATION) {
            let text =
                format!("--bitmap: {} is not a dirty bitmap", blockhaul_block::BASE_ALLOCATION);
            return Err(OptionConflict::new("bitmap", "bitmap", text));
        }
        if self.digest.is_some() && (self.is_increment() || self.range.is_some() || self.has_list())
        {
            let text = "--digest covers a whole disk: use --verify, or --manifest";
            let part = if self.range.is_some() { "range" } else { increment };
            let part = if self.has_list() { "ranges" } else { part };
            return Err(OptionConflict::new("digest", part, text));
        }
        Ok(())
    }
}

/// Options, and those that they exclude.
const EXCLUSIONS: &[(&str, &[&str])] = &[
    ("range", &["since"]),
    ("ranges", &["ranges-command", "range", "bitmap", "since", "manifest"]),
    ("ranges-command", &["range", "bitmap", "since", "manifest"]),
    ("bitmap", &["since"]),
    ("rate-file", &["rate"]),
    ("error-map", TWICE_OR_PARTLY),
];

/// Options that read the source twice, copy a part of it, or change it: not for a disk that fails.
const TWICE_OR_PARTLY: &[&str] = &[
    "verify",
    "digest",
    "manifest",
    "since",
    "range",
    "ranges",
    "ranges-command",
    "bitmap",
    "discard-source",
];

/// Options, and those of which they need one.
const REQUIREMENTS: &[(&str, &[&str])] = &[
    ("trust", &["destination-is-zero"]),
    ("ranges-partial", &["ranges", "ranges-command"]),
    ("bitmap-flags", &["bitmap"]),
    ("restart", &["journal"]),
    ("on-error", &["error-map"]),
    ("error-map", &["on-error"]),
    ("journal-interval", &["journal"]),
];

/// An option as on the command line.
fn shown(option: &str) -> String {
    let row = find_option(TRANSFER_OPTIONS, option);
    row.map_or_else(|| format!("--{option}"), ToString::to_string)
}

/// Two fields of a request that do not go together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionConflict {
    /// The names of the fields: long options of `blockhaul copy`, `source` or `target`.
    pub fields: [&'static str; 2],
    text: String,
    is_requirement: bool,
}

impl OptionConflict {
    fn new(field: &'static str, other: &'static str, text: impl Into<String>) -> OptionConflict {
        OptionConflict { fields: [field, other], text: text.into(), is_requirement: false }
    }

    /// Whether the first field needs the second one, which is not set.
    pub fn is_requirement(&self) -> bool {
        self.is_requirement
    }
}

impl fmt::Display for OptionConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for OptionConflict {}
