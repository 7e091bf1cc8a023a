//! Parses the text after `python:`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Target, parse_duration, percent_decode};

/// Default number of threads: nbdkit's threads per connection.
const THREADS: usize = 16;
/// Maximum number of threads.
const THREADS_MAX: usize = 1024;
/// The interpreter, on PATH.
const PYTHON: &str = "python3";

/// Settings for starting a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The script.
    pub script: PathBuf,
    /// Its parameters in order.
    pub config: Vec<(String, String)>,
    /// The settings around it.
    pub host: HostSettings,
}

/// Settings of the process that runs a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// The interpreter: a name on PATH, or a path.
    pub python: String,
    /// Maximum number of callbacks at a time, if the plugin accepts parallel requests.
    pub threads: usize,
    /// Time after which a request fails; none: never.
    pub timeout: Option<Duration>,
}

impl Default for HostSettings {
    fn default() -> HostSettings {
        HostSettings { python: PYTHON.into(), threads: THREADS, timeout: None }
    }
}

impl Settings {
    /// A script without parameters.
    pub fn new(script: impl Into<PathBuf>) -> Settings {
        Settings { script: script.into(), config: Vec::new(), host: HostSettings::default() }
    }

    /// Parses `SCRIPT?KEY=VALUE&…`. Parameters keep their order and may be repeated.
    ///
    /// # Errors
    /// [`Kind::Usage`] for no script, a parameter without a key, an unknown setting or a wrong value.
    pub fn parse(text: &str) -> Result<Settings> {
        let (path, options) = text.split_once('?').unwrap_or((text, ""));
        if path.is_empty() {
            return Err(usage("name the script, for example python:disk.py".into()));
        }
        let mut settings = Settings::new(percent_decode(path)?);
        for part in options.split('&').filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(usage(format!("{part:?}: write it as KEY=VALUE")));
            };
            let (key, value) = (percent_decode(key)?, percent_decode(value)?);
            match key.strip_prefix('@') {
                Some(name) => settings.host.set(name, &value)?,
                None => settings.config.push((key, value)),
            }
        }
        Ok(settings)
    }

    pub(crate) fn of(target: &Target) -> Result<Settings> {
        Settings::parse(target.text()?)
    }

    /// The name for messages.
    pub(crate) fn shown(&self) -> String {
        let name = self.script.file_name().unwrap_or(self.script.as_os_str());
        Path::new(name).display().to_string()
    }
}

impl HostSettings {
    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let wrong = |why: String| Err(usage(format!("@{name}: {why}")));
        match name {
            "python" if !value.is_empty() => self.python = value.into(),
            "threads" => match value.parse() {
                Ok(threads) if (1..=THREADS_MAX).contains(&threads) => self.threads = threads,
                _ => return wrong(format!("{value:?} is not a number from 1 to {THREADS_MAX}")),
            },
            "timeout" => match parse_duration(value) {
                Ok(Duration::ZERO) => self.timeout = None,
                Ok(time) => self.timeout = Some(time),
                Err(error) => return wrong(error.text()),
            },
            "python" => return wrong("name an interpreter".into()),
            _ => return wrong("unknown; known are @python, @threads and @timeout".into()),
        }
        Ok(())
    }
}

fn usage(text: String) -> Error {
    Error::new(Kind::Usage, format!("python: {text}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn parameters_go_to_the_plugin_and_settings_do_not() {
        let text = "a%20b.py?x=1&y=%26&x=2&@threads=3&@timeout=2s&@python=/opt/py/bin/python3";
        let parsed = Settings::parse(text).unwrap();
        let config: Vec<_> =
            parsed.config.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(config, [("x", "1"), ("y", "&"), ("x", "2")]);
        assert_eq!(parsed.script, Path::new("a b.py"));
        let timeout = Some(Duration::from_secs(2));
        let host = HostSettings { python: "/opt/py/bin/python3".into(), threads: 3, timeout };
        assert_eq!(parsed.host, host);
    }

    #[test]
    fn wrong_settings_are_errors() {
        for bad in [
            "",
            "?a=1",
            "x?a",
            "x?@threads=0",
            "x?@timeout=soon",
            "x?@python=",
            "x?@a=1",
            "x?a=%zz",
        ] {
            assert_eq!(Settings::parse(bad).unwrap_err().kind(), Kind::Usage, "{bad}");
        }
    }
}
