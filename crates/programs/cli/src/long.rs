//! Support for long copies: a journal, and a rate that changes.

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use blockhaul_catalog::Spec;
use blockhaul_engine::{JournalOptions, Rate, Schedule};

use crate::args;
use crate::ends::{self, path_of};
use crate::exit::{self, Failure, plain};

/// Interval at which the file of `--rate-file` is read.
const LOOK: Duration = Duration::from_secs(1);

/// The journal options.
pub struct Journal {
    /// The file.
    pub path: PathBuf,
    /// Start over.
    pub restart: bool,
    /// Maximum time between flushes.
    pub interval: Duration,
    /// Keep it after success: it belongs together with others that may fail.
    pub keep: bool,
}

impl Journal {
    /// Whether an earlier run has left one.
    pub fn goes_on(&self) -> bool {
        !self.restart && self.path.exists()
    }

    /// Removes it when it is not needed any more, unless others need it; and when it does not match
    /// the target.
    pub fn after_verification<T>(&self, verified: &Result<T, Failure>) {
        let over = match verified {
            Ok(_) => !self.keep,
            Err(failure) => failure.status() == exit::DIFFERENT,
        };
        if over {
            remove(&self.path);
        }
    }

    /// The journal options of a copy between these open sides. `discards`: it changes the source.
    pub fn options(&self, source: &Spec, target: &Spec, discards: bool) -> JournalOptions {
        JournalOptions {
            path: self.path.clone(),
            restart: self.restart,
            interval: self.interval,
            keep: self.keep,
            source: identity(source, !discards),
            target: identity(target, false),
        }
    }
}

/// Removes a journal, if it exists; warns on failure.
pub fn remove(path: &Path) {
    let removed = std::fs::remove_file(path).and_then(|()| blockhaul_io::sync_folder(path));
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            let path = path.display();
            let why = plain(&error);
            log::warn!("cannot remove the journal {path}: {why}");
        }
        _ => {}
    }
}

/// Identifies a device, and, if it must not change, its current state.
pub fn identity(spec: &Spec, unchanged: bool) -> String {
    let data = path_of(spec).and_then(|path| {
        let data = std::fs::metadata(&path).ok()?;
        Some((blockhaul_backends::identity(&path)?, data))
    });
    match data {
        // The path can be written in many ways; the file is the same.
        Some(((device, inode), data)) if unchanged && data.is_file() => {
            let seconds = data.mtime();
            let nanos = data.mtime_nsec();
            format!("file {device}:{inode} changed at {seconds}.{nanos:09}")
        }
        Some(((device, inode), _)) => format!("file {device}:{inode}"),
        // The journal is a file that others may read.
        None => ends::without_passwords(&spec.to_string()).into_owned(),
    }
}

/// Layers that show a part or a form of existing contents, for the journal. As digests: an option
/// may be a passphrase.
pub fn seen_through(layers: &[&str]) -> String {
    let told = layers.iter().map(|text| {
        let name = text.split('?').next().unwrap_or(text);
        format!(" through {name} {}", &blake3::hash(text.as_bytes()).to_hex()[..12])
    });
    told.collect()
}

/// Minimum duration of a failed copy for a hint about journals.
pub const WORTH_A_JOURNAL: Duration = Duration::from_secs(60);

/// The hint after a failed copy without a journal: the same command with one. `None` if a journal
/// is not possible.
pub fn hint((source, target): (&Spec, &Spec)) -> Option<String> {
    let mut words = std::env::args_os();
    words.next()?;
    let ours = words.next()? == "copy";
    let pipe = [source, target].contains(&&Spec::Pipe);
    let words: Vec<_> =
        words.map(|word| quoted(&ends::without_passwords(&word.to_string_lossy()))).collect();
    (ours && !pipe).then(|| {
        let journal = quoted(&default_name(target));
        let words = words.join(" ");
        format!("; to be able to resume next time: blockhaul copy --journal {journal} {words}")
    })
}

/// The default journal for a copy to this target, in the current directory: its name and .journal.
fn default_name(target: &Spec) -> String {
    let text = match target {
        Spec::Path(path) => path.to_string_lossy().into_owned(),
        Spec::Command(words) => {
            words.last().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default()
        }
        other => other.to_string(),
    };
    let text = text.split('?').next().unwrap_or_default();
    let last = text.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or_default();
    let plain: String =
        last.chars().filter(|c| c.is_alphanumeric() || "._-".contains(*c)).take(100).collect();
    let plain = plain.trim_start_matches(['-', '.']);
    format!("{}.journal", if plain.is_empty() { "copy" } else { plain })
}

/// A word quoted for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,%@+".contains(c);
    if !word.is_empty() && word.chars().all(plain) || word == "[" || word == "]" {
        word.to_string()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// The requested rate limit, and a thread that changes it.
pub fn rate(args: &args::CopyArgs) -> Result<Option<Arc<Rate>>, Failure> {
    let iops = args.iops.unwrap_or(0);
    let limit = match (&args.rate_file, &args.rate) {
        (Some(file), _) => Limit::File(file.clone()),
        (None, Some(schedule)) => Limit::Given(schedule.clone()),
        (None, None) => return Ok((iops > 0).then(|| Arc::new(Rate::new(0, iops)))),
    };
    let now = limit.now().map_err(|why| Failure::usage(format!("{}: {why}", limit.option())))?;
    let now = (now.0, now.1.unwrap_or(iops));
    let rate = Arc::new(Rate::new(now.0, now.1));
    if limit.changes() {
        let watched = Arc::downgrade(&rate);
        let watching = std::thread::Builder::new().name("rate".into());
        let started = watching.spawn(move || watch(&watched, &limit, now, iops));
        started.map_err(|error| {
            Failure::new(exit::FAILED, format!("cannot reload the rate: {}", plain(&error)))
        })?;
    }
    Ok(Some(rate))
}

/// The source of the rate.
enum Limit {
    Given(Schedule),
    File(PathBuf),
}

impl Limit {
    fn option(&self) -> &'static str {
        match self {
            Limit::Given(_) => "--rate",
            Limit::File(_) => "--rate-file",
        }
    }

    fn changes(&self) -> bool {
        match self {
            Limit::Given(schedule) => schedule.changes(),
            Limit::File(_) => true,
        }
    }

    /// The current bytes per second, and requests per second if given here; 0: no limit.
    fn now(&self) -> Result<(u64, Option<u64>), String> {
        match self {
            Limit::Given(schedule) => by_the_clock(schedule).map(|bytes| (bytes, None)),
            Limit::File(file) => {
                let named = |why: String| format!("{}: {why}", file.display());
                let limits = read(file)
                    .and_then(|(schedule, requests)| Ok((by_the_clock(&schedule)?, requests)));
                limits.map_err(named)
            }
        }
    }
}

/// The rate at this minute of the local day.
fn by_the_clock(schedule: &Schedule) -> Result<u64, String> {
    if !schedule.changes() {
        return Ok(schedule.rate_at(0));
    }
    Ok(schedule.rate_at(minute_of_day()?))
}

/// Minute of the local day, by TZ or /etc/localtime; UTC if there is neither.
fn minute_of_day() -> Result<u16, String> {
    let zone = match jiff::tz::TimeZone::try_system() {
        Ok(zone) => zone,
        // Without a time zone a machine uses UTC; an unknown name is a mistake.
        Err(_) if std::env::var_os("TZ").is_none_or(|name| name.is_empty()) => {
            jiff::tz::TimeZone::UTC
        }
        Err(error) => return Err(format!("rates by time of day need the local time: {error}")),
    };
    let now = jiff::Timestamp::now().to_zoned(zone);
    Ok(u16::from(now.hour().unsigned_abs()) * 60 + u16::from(now.minute().unsigned_abs()))
}

fn watch(rate: &Weak<Rate>, limit: &Limit, mut limits: (u64, u64), iops: u64) {
    let mut complaint = String::new();
    loop {
        std::thread::sleep(LOOK);
        let Some(rate) = rate.upgrade() else { return };
        let now = limit.now().map(|(bytes, requests)| (bytes, requests.unwrap_or(iops)));
        match now {
            Ok(now) if now != limits => {
                log::info!("rate changed: {}", told(now));
                limits = now;
                rate.set(now.0, now.1);
            }
            Ok(_) => complaint.clear(),
            // The rate stays; logged once, not each second.
            Err(why) if why != complaint => {
                log::warn!("{}: {why}", limit.option());
                complaint = why;
            }
            Err(_) => {}
        }
    }
}

/// Limits in words.
fn told((bytes, requests): (u64, u64)) -> String {
    match (bytes, requests) {
        (0, 0) => "no limit".to_string(),
        (0, requests) => format!("limit: {requests} requests per second"),
        (bytes, 0) => format!("limit: {bytes} bytes per second"),
        (bytes, requests) => {
            format!("limits: {bytes} bytes and {requests} requests per second")
        }
    }
}

/// The rate in a file, or its rules; and the requests per second of a line `iops=N`.
fn read(file: &Path) -> Result<(Schedule, Option<u64>), String> {
    // A longer file is not a rate file.
    const LONGEST: u64 = 4096;
    let mut text = String::new();
    let read = std::fs::File::open(file)
        .and_then(|file| file.take(LONGEST).read_to_string(&mut text).map(drop));
    match read {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(plain(&error)),
    }
    let mut rates = Vec::new();
    let mut requests = None;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        match line.strip_prefix("iops=") {
            None => rates.push(line),
            Some(number) => {
                let wrong = |_| format!("{line:?}: iops= requires a number of requests per second");
                requests = Some(number.parse().map_err(wrong)?);
            }
        }
    }
    let rate = match rates[..] {
        [] => "0",
        [rate] => rate,
        [_, second, ..] => {
            return Err(format!("{second:?}: write the rate, or all rules, in one line"));
        }
    };
    Ok((Schedule::parse(rate).map_err(|error| error.text())?, requests))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journals_are_named_after_the_target_and_words_quoted() {
        for (target, name) in [
            ("/dev/vg/root", "root.journal"),
            ("nbd://host/vm1", "vm1.journal"),
            ("nbd://host:10810/", "10810.journal"),
            ("nbd+unix:///disk?socket=/run/x", "disk.journal"),
            ("file:/a/d%20x.raw?direct=on", "d20x.raw.journal"),
            ("null:", "copy.journal"),
            ("/", "copy.journal"),
        ] {
            let spec = Spec::parse(std::ffi::OsStr::new(target)).unwrap();
            assert_eq!(default_name(&spec), name, "{target}");
        }
        assert_eq!(quoted("nbd://h/x"), "nbd://h/x");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted("a?b&c"), "'a?b&c'");
    }

    #[test]
    fn no_limit_is_told_as_none() {
        assert_eq!(told((0, 0)), "no limit");
        assert_eq!(told((10, 0)), "limit: 10 bytes per second");
        assert_eq!(told((0, 7)), "limit: 7 requests per second");
        assert_eq!(told((10, 7)), "limits: 10 bytes and 7 requests per second");
    }

    #[test]
    fn the_minute_is_one_of_the_day() {
        assert!(minute_of_day().unwrap() < 24 * 60);
    }

    #[test]
    fn files_hold_rates_or_rules() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let limit = Limit::File(file.path().to_owned());
        for (text, rate) in
            [("", 0), ("0\n", 0), (" 5k\n", 5 << 10), ("00:00-24:00=1M,*=0", 1 << 20)]
        {
            std::fs::write(file.path(), text).unwrap();
            assert_eq!(limit.now(), Ok((rate, None)), "{text:?}");
        }
        for text in ["x", "8-9=1M", "5k 6k"] {
            std::fs::write(file.path(), text).unwrap();
            assert!(limit.now().unwrap_err().contains(file.path().to_str().unwrap()), "{text:?}");
        }
        assert_eq!(Limit::File("/nowhere/at/all".into()).now(), Ok((0, None)));
    }
}
