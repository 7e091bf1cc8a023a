//! Parses the text after `sh:` and `eval:`.

use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{BackendTarget, parse_duration, percent_decode};

use crate::Language;

/// Default number of parallel runs: nbdkit's threads per connection.
const RUNS: usize = 16;
/// Maximum number of parallel runs.
const RUNS_MAX: usize = 1024;

/// Settings for starting a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScriptSettings {
    /// The form of the script.
    pub language: Language,
    /// Parameters in order; no key: a bare value. For `sh` the first is the script.
    pub config: Vec<(Option<String>, String)>,
    /// The settings around the script.
    pub host: ScriptHostSettings,
}

/// Settings of the host for a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScriptHostSettings {
    /// Maximum number of runs at a time, if the script accepts parallel requests.
    pub threads: usize,
    /// Time after which a run is killed; none: never.
    pub timeout: Option<Duration>,
}

impl Default for ScriptHostSettings {
    fn default() -> ScriptHostSettings {
        ScriptHostSettings { threads: RUNS, timeout: None }
    }
}

impl ScriptSettings {
    /// No parameters yet.
    pub fn new(language: Language) -> ScriptSettings {
        ScriptSettings { language, config: Vec::new(), host: ScriptHostSettings::default() }
    }

    /// Parses the text. Parameters keep their order and may be repeated.
    pub(crate) fn parse(language: Language, target: &BackendTarget) -> Result<ScriptSettings> {
        let text = target.text()?;
        let mut settings = ScriptSettings::new(language);
        let options = match (language, text.split_once('?')) {
            (Language::Eval, _) => text.strip_prefix('?').unwrap_or(text),
            (Language::Sh, found) => {
                let (path, options) = found.unwrap_or((text, ""));
                if !path.is_empty() {
                    settings.config.push((Some("script".into()), percent_decode(path)?));
                }
                options
            }
        };
        for part in options.split('&').filter(|part| !part.is_empty()) {
            let (key, value) = match part.split_once('=') {
                Some((key, value)) => (Some(percent_decode(key)?), percent_decode(value)?),
                None => (None, percent_decode(part)?),
            };
            match key {
                Some(key) if key.starts_with('@') => settings.set_host(&key, &value)?,
                key => settings.config.push((key, value)),
            }
        }
        Ok(settings)
    }

    fn set_host(&mut self, key: &str, value: &str) -> Result<()> {
        let name = self.language.name();
        let wrong = |why: String| Err(Error::new(Kind::Usage, format!("{name}: {key}: {why}")));
        match key {
            "@threads" => match value.parse() {
                Ok(runs) if (1..=RUNS_MAX).contains(&runs) => self.host.threads = runs,
                _ => return wrong(format!("{value:?} is not a number from 1 to {RUNS_MAX}")),
            },
            "@timeout" => match parse_duration(value) {
                Ok(Duration::ZERO) => self.host.timeout = None,
                Ok(time) => self.host.timeout = Some(time),
                Err(error) => return wrong(error.text()),
            },
            _ => return wrong("unknown; known are @threads and @timeout".into()),
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(language: Language, rest: &str) -> Result<ScriptSettings> {
        let target = BackendTarget {
            scheme: language.name().into(),
            rest: rest.into(),
            command: Vec::new(),
            args: blockhaul_catalog::ParamValues::default(),
            intent: blockhaul_catalog::Intent::READ,
            context: blockhaul_catalog::OpenContext::default(),
        };
        ScriptSettings::parse(language, &target)
    }

    #[test]
    fn parameters_keep_their_order_and_may_have_no_key() {
        let sh = parse(Language::Sh, "a%20b.sh?x=1&y&x=2&@threads=3&@timeout=2s").unwrap();
        let config: Vec<_> =
            sh.config.iter().map(|(key, value)| (key.as_deref(), value.as_str())).collect();
        let wanted = [(Some("script"), "a b.sh"), (Some("x"), "1"), (None, "y"), (Some("x"), "2")];
        assert_eq!(config, wanted);
        assert_eq!(
            sh.host,
            ScriptHostSettings { threads: 3, timeout: Some(Duration::from_secs(2)) }
        );
        let eval = parse(Language::Eval, "get_size=echo 1?&pread=a%26b").unwrap();
        assert_eq!(eval.config[0], (Some("get_size".into()), "echo 1?".into()));
        assert_eq!(eval.config[1], (Some("pread".into()), "a&b".into()));
        assert_eq!(parse(Language::Sh, "?script=x").unwrap().config.len(), 1);
    }

    #[test]
    fn wrong_settings_of_the_host_are_errors() {
        for bad in ["x?@threads=0", "x?@threads=a", "x?@timeout=soon", "x?@other=1", "x?a=%zz"] {
            assert_eq!(parse(Language::Sh, bad).unwrap_err().kind(), Kind::Usage, "{bad}");
        }
    }
}
