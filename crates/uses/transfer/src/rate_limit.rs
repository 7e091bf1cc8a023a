//! The rate limit of a copy: fixed, by rules for the time of day, or in a file that is read again.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use blockhaul_engine::{RateLimit, RateSchedule};
use blockhaul_io::plain;

use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::options::TransferOptions;

/// Interval at which the file of `--rate-file` is read.
const LOOK: Duration = Duration::from_secs(1);

/// The rate limit of these options, in bytes and requests per second; `None`: no limit. Where rules or
/// a file say so, a thread changes it, until the limit is dropped.
///
/// # Errors
/// If the rules or the file cannot be used, or no thread can be started.
pub fn rate_limit(options: &TransferOptions) -> Result<Option<Arc<RateLimit>>> {
    let iops = options.iops.unwrap_or(0);
    let limit = match (&options.rate_file, &options.rate) {
        (Some(file), _) => RateSource::File(file.clone()),
        (None, Some(schedule)) => RateSource::Given(schedule.clone()),
        (None, None) => return Ok((iops > 0).then(|| Arc::new(RateLimit::new(0, iops)))),
    };
    let now =
        limit.now().map_err(|why| TransferError::request(format!("{}: {why}", limit.option())))?;
    let now = (now.0, now.1.unwrap_or(iops));
    let rate = Arc::new(RateLimit::new(now.0, now.1));
    if limit.changes() {
        let watched = Arc::downgrade(&rate);
        let watching = std::thread::Builder::new().name("rate".into());
        let started = watching.spawn(move || watch(&watched, &limit, now, iops));
        started.map_err(|error| {
            let text = format!("cannot reload the rate: {}", plain(&error));
            TransferError::new(TransferErrorKind::Other, TransferStep::Options, text)
        })?;
    }
    Ok(Some(rate))
}

/// Where the rate comes from.
enum RateSource {
    Given(RateSchedule),
    File(PathBuf),
}

impl RateSource {
    fn option(&self) -> &'static str {
        match self {
            RateSource::Given(_) => "--rate",
            RateSource::File(_) => "--rate-file",
        }
    }

    fn changes(&self) -> bool {
        match self {
            RateSource::Given(schedule) => schedule.changes(),
            RateSource::File(_) => true,
        }
    }

    /// The current bytes per second, and requests per second if given here; 0: no limit.
    fn now(&self) -> Result<(u64, Option<u64>), String> {
        match self {
            RateSource::Given(schedule) => by_the_clock(schedule).map(|bytes| (bytes, None)),
            RateSource::File(file) => {
                let named = |why: String| format!("{}: {why}", file.display());
                let limits = read(file)
                    .and_then(|(schedule, requests)| Ok((by_the_clock(&schedule)?, requests)));
                limits.map_err(named)
            }
        }
    }
}

/// The rate at this minute of the local week.
fn by_the_clock(schedule: &RateSchedule) -> Result<u64, String> {
    if !schedule.changes() {
        return Ok(schedule.rate_at(0, 0));
    }
    let (day, minute) = local_time()?;
    Ok(schedule.rate_at(day, minute))
}

/// Day of the week from 0 (Monday) to 6, and minute of the local day, by TZ or /etc/localtime; UTC if there is neither.
fn local_time() -> Result<(u8, u16), String> {
    let zone = match jiff::tz::TimeZone::try_system() {
        Ok(zone) => zone,
        // Without a time zone a machine uses UTC; an unknown name is a mistake.
        Err(_) if std::env::var_os("TZ").is_none_or(|name| name.is_empty()) => {
            jiff::tz::TimeZone::UTC
        }
        Err(error) => return Err(format!("rates by time of day need the local time: {error}")),
    };
    let now = jiff::Timestamp::now().to_zoned(zone);
    let minute = u16::from(now.hour().unsigned_abs()) * 60 + u16::from(now.minute().unsigned_abs());
    Ok((now.weekday().to_monday_zero_offset().unsigned_abs(), minute))
}

fn watch(rate: &Weak<RateLimit>, limit: &RateSource, mut limits: (u64, u64), iops: u64) {
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
fn read(file: &Path) -> Result<(RateSchedule, Option<u64>), String> {
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
    Ok((RateSchedule::parse(rate).map_err(|error| error.text())?, requests))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_is_told_as_none() {
        assert_eq!(told((0, 0)), "no limit");
        assert_eq!(told((10, 0)), "limit: 10 bytes per second");
        assert_eq!(told((0, 7)), "limit: 7 requests per second");
        assert_eq!(told((10, 7)), "limits: 10 bytes and 7 requests per second");
    }

    #[test]
    fn the_minute_is_one_of_the_day() {
        let (day, minute) = local_time().unwrap();
        assert!(day < 7 && minute < 24 * 60);
    }

    #[test]
    fn files_hold_rates_or_rules() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let limit = RateSource::File(file.path().to_owned());
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
        assert_eq!(RateSource::File("/nowhere/at/all".into()).now(), Ok((0, None)));
    }
}
