//! Parses the text after `python:`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{BackendTarget, parse_duration, percent_decode};

/// Default number of threads: nbdkit's threads per connection.
const THREADS: usize = 16;
/// Maximum number of threads.
const THREADS_MAX: usize = 1024;
/// Maximum number of processes of one plugin.
const PROCESSES_MAX: usize = 64;
/// The interpreter, on PATH.
const PYTHON: &str = "python3";

/// Settings for starting a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PythonSettings {
    /// The script.
    pub script: PathBuf,
    /// Its parameters in order.
    pub config: Vec<(String, String)>,
    /// The settings around it.
    pub host: PythonHostSettings,
}

/// Settings of the process that runs a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PythonHostSettings {
    /// The interpreter: a name on PATH, or a path.
    pub python: String,
    /// Maximum number of callbacks at a time, if the plugin accepts parallel requests.
    pub threads: usize,
    /// Number of processes that run the plugin, from 1 to 64.
    pub processes: usize,
    /// Time after which a request fails; none: never.
    pub timeout: Option<Duration>,
}

impl Default for PythonHostSettings {
    fn default() -> PythonHostSettings {
        PythonHostSettings { python: PYTHON.into(), threads: THREADS, processes: 1, timeout: None }
    }
}

impl PythonSettings {
    /// A script without parameters.
    pub fn new(script: impl Into<PathBuf>) -> PythonSettings {
        PythonSettings {
            script: script.into(),
            config: Vec::new(),
            host: PythonHostSettings::default(),
        }
    }

    /// Parses `SCRIPT?KEY=VALUE&…`. Parameters keep their order and may be repeated.
    ///
    /// # Errors
    /// [`Kind::Usage`] for no script, a parameter without a key, an unknown setting or a wrong value.
    pub fn parse(text: &str) -> Result<PythonSettings> {
        let (path, options) = text.split_once('?').unwrap_or((text, ""));
        if path.is_empty() {
            return Err(usage("name the script, for example python:disk.py".into()));
        }
        let mut settings = PythonSettings::new(percent_decode(path)?);
        for part in options.split('&').filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(usage(format!("{part:?}: write it as KEY=VALUE")));
            };
            let key = percent_decode(key)?;
            let value = percent_decode(value)?;
            match key.strip_prefix('@') {
                Some(name) => settings.host.set(name, &value)?,
                None => settings.config.push((key, value)),
            }
        }
        Ok(settings)
    }

    pub(crate) fn of(target: &BackendTarget) -> Result<PythonSettings> {
        PythonSettings::parse(target.text()?)
    }

    /// The name for messages.
    pub(crate) fn shown(&self) -> String {
        let name = self.script.file_name().unwrap_or(self.script.as_os_str());
        Path::new(name).display().to_string()
    }
}

impl PythonHostSettings {
    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let error = |why: String| usage(format!("@{name}: {why}"));
        match name {
            "python" if !value.is_empty() => self.python = value.into(),
            "threads" => self.threads = count(value, THREADS_MAX).map_err(error)?,
            "processes" => self.processes = count(value, PROCESSES_MAX).map_err(error)?,
            "timeout" => match parse_duration(value) {
                Ok(Duration::ZERO) => self.timeout = None,
                Ok(time) => self.timeout = Some(time),
                Err(why) => return Err(error(why.text())),
            },
            "python" => return Err(error("name an interpreter".into())),
            _ => {
                let known = "unknown; known are @processes, @python, @threads and @timeout";
                return Err(error(known.into()));
            }
        }
        Ok(())
    }
}

/// A number from 1 to `most`, or what is wrong with it.
fn count(value: &str, most: usize) -> Result<usize, String> {
    match value.parse() {
        Ok(number) if (1..=most).contains(&number) => Ok(number),
        _ => Err(format!("{value:?} is not a number from 1 to {most}")),
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
        let text = "a%20b.py?x=1&y=%26&x=2&@threads=3&@processes=4&@timeout=2s&@python=/opt/py/bin/python3";
        let parsed = PythonSettings::parse(text).unwrap();
        let config: Vec<_> =
            parsed.config.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(config, [("x", "1"), ("y", "&"), ("x", "2")]);
        assert_eq!(parsed.script, Path::new("a b.py"));
        let timeout = Some(Duration::from_secs(2));
        let python = "/opt/py/bin/python3".into();
        let host = PythonHostSettings { python, threads: 3, processes: 4, timeout };
        assert_eq!(parsed.host, host);
    }

    #[test]
    fn wrong_settings_are_errors() {
        for bad in [
            "",
            "?a=1",
            "x?a",
            "x?@threads=0",
            "x?@processes=0",
            "x?@processes=65",
            "x?@timeout=soon",
            "x?@python=",
            "x?@a=1",
            "x?a=%zz",
        ] {
            assert_eq!(PythonSettings::parse(bad).unwrap_err().kind(), Kind::Usage, "{bad}");
        }
    }
}
