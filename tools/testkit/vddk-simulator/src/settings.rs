//! Settings: `KEY=VALUE` lines of `simulator.conf`, then those of the environment variable
//! `VDDK_SIMULATOR`, separated by commas.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// All settings.
#[derive(Debug, Clone)]
pub(crate) struct SimulatorSettings {
    /// The folder of disks; none: paths are used as they are.
    pub(crate) disks: Option<PathBuf>,
    /// The version that is simulated: before 7, disks have no sector sizes.
    pub(crate) version: u32,
    pub(crate) connect: Duration,
    pub(crate) open: Duration,
    pub(crate) close: Duration,
    /// Time of one query for allocated blocks, whatever its length.
    pub(crate) query: Duration,
    /// A query waits for all transfers of the disk, and holds up later ones.
    pub(crate) exclusive: bool,
    /// The first query of a handle for more than one chunk takes the time of as many queries as the
    /// whole disk needs, and later ones of the handle take none.
    pub(crate) scan: bool,
    /// Time of a read or write, without its bytes.
    pub(crate) latency: Duration,
    /// At most this much is added to the time of a read or write, at random.
    pub(crate) jitter: Duration,
    /// Bytes per second of one handle; 0: no limit.
    pub(crate) rate: u64,
    pub(crate) threads: usize,
    /// Alignment of the memory of requests, in bytes.
    pub(crate) align: u64,
    /// Longest read or write, in bytes; 0: no limit.
    pub(crate) longest: u64,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) thumbprint: Option<String>,
    /// The snapshots that exist; none: any.
    pub(crate) snapshots: Vec<String>,
    /// The last part of a path that another program has locked.
    pub(crate) locked: Option<String>,
    pub(crate) transports: String,
    /// Opening and closing must happen on the thread of `InitEx`.
    pub(crate) one_thread: bool,
    pub(crate) faults: Vec<CallFault>,
    /// The file of counters.
    pub(crate) counters: Option<PathBuf>,
    /// Misuse ends the process.
    pub(crate) abort: bool,
    pub(crate) seed: u64,
}

impl Default for SimulatorSettings {
    fn default() -> SimulatorSettings {
        SimulatorSettings {
            disks: None,
            version: 8,
            connect: Duration::ZERO,
            open: Duration::ZERO,
            close: Duration::ZERO,
            query: Duration::ZERO,
            exclusive: true,
            scan: false,
            latency: Duration::ZERO,
            jitter: Duration::ZERO,
            rate: 0,
            threads: 4,
            align: 1,
            longest: 0,
            user: None,
            password: None,
            thumbprint: None,
            snapshots: Vec::new(),
            locked: None,
            transports: "file:nbdssl:nbd".into(),
            one_thread: true,
            faults: Vec::new(),
            counters: None,
            abort: false,
            seed: 1,
        }
    }
}

/// What happens at certain calls of a function: `NAME:FIRST[-LAST]:EFFECT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CallFault {
    /// The function, without `VixDiskLib_`.
    pub(crate) function: String,
    /// The first and last call, from 1.
    pub(crate) calls: (u64, u64),
    pub(crate) effect: CallEffect,
}

/// The effect of a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallEffect {
    /// The call fails with this error.
    Error(u64),
    /// The process ends by a signal.
    Crash,
    /// The call takes this much longer.
    Delay(Duration),
    /// The list of a query is wrong.
    List(BlockListFault),
}

/// How a list of allocated blocks is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockListFault {
    /// A block overlaps the one before it.
    Overlap,
    /// A block ends behind the range of the query.
    PastEnd,
}

impl SimulatorSettings {
    /// The settings of a folder and of the environment.
    pub(crate) fn load(folder: Option<&Path>) -> Result<SimulatorSettings, String> {
        let mut settings = SimulatorSettings::default();
        if let Some(path) = folder.map(|folder| folder.join("simulator.conf"))
            && path.exists()
        {
            let text = std::fs::read_to_string(&path)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            settings.read(text.lines())?;
        }
        let text = std::env::var("VDDK_SIMULATOR").unwrap_or_default();
        settings.read(text.split(','))?;
        Ok(settings)
    }

    fn read<'text>(&mut self, lines: impl Iterator<Item = &'text str>) -> Result<(), String> {
        for line in lines.map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let known = line.split_once('=').and_then(|(key, value)| self.set(key, value));
            known.ok_or_else(|| format!("setting {line:?} is unknown or has a wrong value"))?;
        }
        Ok(())
    }

    /// Sets one value; `None`: unknown or wrong.
    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        let text = || Some(value.to_string());
        match key {
            "disks" => self.disks = Some(value.into()),
            "version" => self.version = value.parse().ok()?,
            "connect" => self.connect = duration(value)?,
            "open" => self.open = duration(value)?,
            "close" => self.close = duration(value)?,
            "query" => self.query = duration(value)?,
            "exclusive" => self.exclusive = switch(value)?,
            "scan" => self.scan = switch(value)?,
            "latency" => self.latency = duration(value)?,
            "jitter" => self.jitter = duration(value)?,
            "rate" => self.rate = size(value)?,
            "threads" => self.threads = value.parse().ok().filter(|n| (1..=64).contains(n))?,
            "align" => self.align = size(value).filter(|align| align.is_power_of_two())?,
            "longest" => self.longest = size(value)?,
            "user" => self.user = text(),
            "password" => self.password = text(),
            "thumbprint" => self.thumbprint = text(),
            "snapshot" => self.snapshots.push(value.to_string()),
            "locked" => self.locked = text(),
            "transports" => self.transports = value.to_string(),
            "one-thread" => self.one_thread = switch(value)?,
            "fail" => self.faults.push(CallFault::parse(value)?),
            "counters" => self.counters = Some(value.into()),
            "abort" => self.abort = switch(value)?,
            "seed" => self.seed = value.parse().ok()?,
            _ => return None,
        }
        Some(())
    }
}

impl CallFault {
    fn parse(text: &str) -> Option<CallFault> {
        let mut parts = text.splitn(3, ':');
        let function = parts.next()?;
        let calls = parts.next()?;
        let effect = parts.next()?;
        let calls = match calls.split_once('-') {
            None => (calls.parse().ok()?, calls.parse().ok()?),
            Some((first, "")) => (first.parse().ok()?, u64::MAX),
            Some((first, last)) => (first.parse().ok()?, last.parse().ok()?),
        };
        let effect = match effect {
            "crash" => CallEffect::Crash,
            "overlap" => CallEffect::List(BlockListFault::Overlap),
            "past-end" => CallEffect::List(BlockListFault::PastEnd),
            text => match text.parse() {
                Ok(error) => CallEffect::Error(error),
                Err(_) => CallEffect::Delay(duration(text)?),
            },
        };
        Some(CallFault { function: function.to_string(), calls, effect })
    }
}

fn switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

fn duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().ok()?;
    match &text[digits.len()..] {
        "s" => Some(Duration::from_secs(number)),
        "ms" => Some(Duration::from_millis(number)),
        "us" => Some(Duration::from_micros(number)),
        _ => None,
    }
}

/// A size in bytes, with one of the suffixes K, M, G, T.
pub(crate) fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_units_and_wrong_ones_are_named() {
        let mut settings = SimulatorSettings::default();
        let text = "# a comment\nquery=700ms\nrate=178M\nexclusive=off\n\nfail=Open:2-3:13\n\
                    fail=QueryAllocatedBlocks:4-:overlap\nfail=Read:1:2s";
        settings.read(text.lines()).unwrap();
        assert_eq!((settings.query, settings.rate), (Duration::from_millis(700), 178 << 20));
        assert!(!settings.exclusive);
        let function = "Open".to_string();
        let open = CallFault { function, calls: (2, 3), effect: CallEffect::Error(13) };
        assert_eq!(settings.faults[0], open);
        assert_eq!(settings.faults[1].calls, (4, u64::MAX));
        assert_eq!(settings.faults[2].effect, CallEffect::Delay(Duration::from_secs(2)));
        for wrong in ["query=1", "what=1", "rate=1X", "fail=Open:1", "exclusive=perhaps", "query"] {
            let error = settings.read(wrong.lines()).unwrap_err();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
