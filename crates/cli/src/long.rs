//! What copies that take long have: a journal, and a rate that changes.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use block::Spec;
use engine::{JournalOptions, Rate};

use crate::args;
use crate::copy::path_of;
use crate::exit::{self, Failure, plain};

/// Time between two looks at the file of `--rate-file`.
const LOOK: Duration = Duration::from_secs(1);

/// What was typed about a journal.
pub struct Journal {
    /// The file.
    pub path: PathBuf,
    /// Begin anew.
    pub restart: bool,
    /// Longest time between flushes.
    pub interval: Duration,
}

impl Journal {
    /// Whether an earlier run has left one.
    pub fn goes_on(&self) -> bool {
        !self.restart && self.path.exists()
    }

    /// The journal of a copy between these, which are open.
    pub fn options(&self, source: &Spec, target: &Spec) -> JournalOptions {
        JournalOptions {
            path: self.path.clone(),
            restart: self.restart,
            interval: self.interval,
            source: identity(source, true),
            target: identity(target, false),
        }
    }
}

/// What tells a device from another one, and, when it is not to change, from itself at another time.
fn identity(spec: &Spec, unchanged: bool) -> String {
    let data = path_of(spec).and_then(|path| {
        let data = std::fs::metadata(&path).ok()?;
        Some((backends::identity(&path)?, data))
    });
    match data {
        // The path may be written in many ways; the file is the same.
        Some(((device, inode), data)) if unchanged && data.is_file() => {
            let (seconds, nanos) = (data.mtime(), data.mtime_nsec());
            format!("file {device}:{inode} changed at {seconds}.{nanos:09}")
        }
        Some(((device, inode), _)) => format!("file {device}:{inode}"),
        None => spec.to_string(),
    }
}

/// The limit that was asked for, and a thread that changes it.
pub fn rate(args: &args::Copy) -> Result<Option<Arc<Rate>>, Failure> {
    let iops = args.iops.unwrap_or(0);
    let Some(file) = &args.rate_file else {
        let bytes = args.rate.unwrap_or(0);
        return Ok((bytes > 0 || iops > 0).then(|| Arc::new(Rate::new(bytes, iops))));
    };
    let bytes = read(file).map_err(|why| Failure::usage(format!("--rate-file: {why}")))?;
    let rate = Arc::new(Rate::new(bytes, iops));
    let (watched, file) = (Arc::downgrade(&rate), file.clone());
    let watching = std::thread::Builder::new().name("rate".into());
    let started = watching.spawn(move || watch(&watched, &file, bytes, iops));
    started.map_err(|error| {
        Failure::new(exit::FAILED, format!("cannot watch the rate: {}", plain(&error)))
    })?;
    Ok(Some(rate))
}

fn watch(rate: &Weak<Rate>, file: &Path, mut bytes: u64, iops: u64) {
    let mut complaint = String::new();
    loop {
        std::thread::sleep(LOOK);
        let Some(rate) = rate.upgrade() else { return };
        match read(file) {
            Ok(now) if now != bytes => {
                log::info!("the rate is now {now} bytes a second");
                bytes = now;
                rate.set(bytes, iops);
            }
            Ok(_) => complaint.clear(),
            // The rate stays; said once, not each second.
            Err(why) if why != complaint => {
                log::warn!("--rate-file: {why}");
                complaint = why;
            }
            Err(_) => {}
        }
    }
}

/// The rate in a file.
fn read(file: &Path) -> Result<u64, String> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(format!("{}: {}", file.display(), plain(&error))),
    };
    match text.trim() {
        "" | "0" => Ok(0),
        text => {
            block::parse_rate(text).map_err(|error| format!("{}: {}", file.display(), error.text()))
        }
    }
}
