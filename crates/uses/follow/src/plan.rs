//! The file of `blockhaul follow`.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_catalog::DeviceSpec;
use blockhaul_transfer::{parse_duration, same_place};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde::Deserialize;
use toml::{Table, Value};

use crate::error::{FollowError, FollowErrorKind};
use crate::limits::{FollowLimits, VerifyScope};

/// Longer files cannot be plans.
const LENGTH_MAX: u64 = 1 << 20;
/// Maximum number of disks.
const DISKS_MAX: usize = 256;

/// When the machine is stopped, once its predicted downtime is short enough.
#[derive(Debug, Clone, PartialEq)]
pub enum CutOver {
    /// At once.
    Now,
    /// At this time, in seconds since 1970.
    At(f64),
    /// After SIGUSR1.
    Signal,
    /// Once this file exists.
    File(PathBuf),
}

/// A disk of the plan.
#[derive(Debug, Clone, PartialEq)]
pub struct FollowDisk {
    /// The name that the provider uses.
    pub name: String,
    /// The device that is written.
    pub target: DeviceSpec,
}

/// A plan.
#[derive(Debug, Clone, PartialEq)]
pub struct FollowPlan {
    /// The name of the machine.
    pub machine: String,
    /// The command that makes points in time.
    pub provider: String,
    /// The command that stops the machine.
    pub stop: Option<String>,
    /// The command that starts it at its new place.
    pub start: Option<String>,
    /// The directory with the state of the move.
    pub state: PathBuf,
    /// Maximum time of each command.
    pub timeout: Duration,
    /// When rounds end.
    pub limits: FollowLimits,
    /// When the machine is stopped.
    pub cut_over: CutOver,
    /// The first round writes only what differs from what the targets have.
    pub adopt: bool,
    /// The disks.
    pub disks: Vec<FollowDisk>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PlanFile {
    machine: String,
    provider: String,
    stop: Option<String>,
    start: Option<String>,
    state: PathBuf,
    #[serde(default = "default_downtime")]
    downtime: String,
    #[serde(default = "default_rounds")]
    rounds: u32,
    until: Option<String>,
    #[serde(default = "default_timeout")]
    timeout: String,
    #[serde(default = "default_cut_over")]
    cut_over: String,
    #[serde(default = "default_verify")]
    verify: VerifyScope,
    #[serde(default)]
    adopt: bool,
    disk: Vec<PlanDisk>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanDisk {
    name: String,
    target: String,
}

fn default_downtime() -> String {
    "30s".into()
}

fn default_rounds() -> u32 {
    20
}

fn default_timeout() -> String {
    "10m".into()
}

fn default_cut_over() -> String {
    "now".into()
}

fn default_verify() -> VerifyScope {
    VerifyScope::Written
}

impl FollowPlan {
    /// Reads a plan. `settings`: `KEY=VALUE`, which take precedence over the keys of the file.
    ///
    /// # Errors
    /// [`FollowErrorKind::Plan`] if it cannot be read, or is not a plan.
    pub fn read(path: &Path, settings: &[String]) -> Result<FollowPlan, FollowError> {
        let wrong = |why: String| {
            FollowError::new(FollowErrorKind::Plan, format!("{}: {why}", path.display()))
        };
        let text = blockhaul_io::read_regular_file(path, LENGTH_MAX)
            .map_err(|error| wrong(blockhaul_io::plain(&error)))?;
        let text = String::from_utf8(text).map_err(|_| wrong("not text".into()))?;
        FollowPlan::parse(&text, settings).map_err(wrong)
    }

    /// Parses a plan.
    ///
    /// # Errors
    /// Why it is not one.
    pub fn parse(text: &str, settings: &[String]) -> Result<FollowPlan, String> {
        let mut table: Table = text.parse().map_err(|error: toml::de::Error| {
            let at = error.span().map_or(0, |span| span.start);
            let line = 1 + text[..at].matches('\n').count();
            format!("line {line}: {}", blockhaul_transfer::toml_fault(text, at, error.message()))
        })?;
        for setting in settings {
            let (key, value) = setting.split_once('=').ok_or_else(|| {
                format!("--set {setting}: write KEY=VALUE, as in --set downtime=10s")
            })?;
            let parsed = format!("value = {value}").parse::<Table>().ok();
            let value = match parsed.and_then(|mut table| table.remove("value")) {
                Some(value @ (Value::Integer(_) | Value::Boolean(_) | Value::String(_))) => value,
                _ => Value::String(value.into()),
            };
            table.insert(key.to_string(), value);
        }
        let file: PlanFile =
            table.try_into().map_err(|error: toml::de::Error| error.message().to_string())?;
        file.plan()
    }

    /// What would be done, for users.
    pub fn text(&self) -> String {
        let mut text = format!(
            "machine {}: rounds by {:?}, until the predicted downtime is at most {} s, at most {} rounds\n",
            self.machine, self.provider, self.limits.downtime, self.limits.rounds
        );
        for disk in &self.disks {
            text += &format!("disk {}: copied to {}\n", disk.name, disk.target);
        }
        let cut_over = match &self.cut_over {
            CutOver::Now => "at once".to_string(),
            CutOver::At(time) => format!("at {}", shown_time(*time)),
            CutOver::Signal => "after SIGUSR1".to_string(),
            CutOver::File(path) => format!("once {} exists", path.display()),
        };
        text += &format!("cut-over: {cut_over}\n");
        for (name, command) in [("stop", &self.stop), ("start", &self.start)] {
            match command {
                Some(command) => text += &format!("{name}: {command:?}\n"),
                None => text += &format!("{name}: no command\n"),
            }
        }
        let verify = match self.limits.verify {
            VerifyScope::None => "nothing",
            VerifyScope::Written => "what the last round writes",
            VerifyScope::All => "all of both sides",
        };
        text + &format!("verified: {verify}\nstate: {}\n", self.state.display())
    }
}

fn shown_time(seconds: f64) -> String {
    Timestamp::from_second(seconds as i64).map_or_else(|_| "never".into(), |time| time.to_string())
}

impl PlanFile {
    fn plan(self) -> Result<FollowPlan, String> {
        let duration =
            |key: &str, text: &str| parse_duration(text).map_err(|why| format!("{key}: {why}"));
        let time = |key: &str, text: &str| {
            let zoned = |time: DateTime| Ok(time.to_zoned(TimeZone::system())?.timestamp());
            let parsed = text.parse::<Timestamp>();
            let parsed = parsed.or_else(|_| text.parse::<DateTime>().and_then(zoned));
            parsed.map(|time| time.as_second() as f64).map_err(|_| {
                format!("{key}: {text:?} is not a time such as 2026-12-01T02:00:00 or 2026-12-01T02:00:00+01:00")
            })
        };
        let cut_over = match self.cut_over.split_once(' ') {
            None if self.cut_over == "now" => CutOver::Now,
            None if self.cut_over == "signal" => CutOver::Signal,
            Some(("at", text)) => CutOver::At(time("cut-over", text)?),
            Some(("file", path)) => CutOver::File(path.into()),
            _ => {
                return Err(format!(
                    "cut-over: {:?} is not now, signal, at TIME, or file PATH",
                    self.cut_over
                ));
            }
        };
        if self.disk.is_empty() || self.disk.len() > DISKS_MAX {
            return Err(format!("a plan has 1 to {DISKS_MAX} tables [[disk]]"));
        }
        if self.rounds == 0 {
            return Err("rounds: at least 1".into());
        }
        if self.stop.is_none() && matches!(cut_over, CutOver::Now | CutOver::At(_)) {
            return Err(
                "stop: without a command that stops the machine, cut-over must be signal or file PATH: stop the \
                 machine before"
                    .into(),
            );
        }
        let mut names = HashSet::new();
        let mut disks: Vec<FollowDisk> = Vec::new();
        for PlanDisk { name, target } in self.disk {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
                return Err(format!("disk {name:?}: a name has letters, digits, '-', '_' and '.'"));
            }
            if !names.insert(name.clone()) {
                return Err(format!("disk {name}: the name is used twice"));
            }
            let spec = DeviceSpec::parse(OsStr::new(&target))
                .map_err(|error| format!("disk {name}: target: {}", error.text()))?;
            if spec == DeviceSpec::Pipe {
                return Err(format!("disk {name}: target: a pipe cannot keep what is not copied"));
            }
            let is_same = |other: &&FollowDisk| same_place(&other.target, &spec);
            if let Some(other) = disks.iter().find(is_same) {
                return Err(format!("disks {} and {name} have the same target", other.name));
            }
            disks.push(FollowDisk { name, target: spec });
        }
        let until = self.until.map(|text| time("until", &text)).transpose()?;
        Ok(FollowPlan {
            machine: self.machine,
            provider: self.provider,
            stop: self.stop,
            start: self.start,
            state: self.state,
            timeout: duration("timeout", &self.timeout)?,
            limits: FollowLimits {
                downtime: duration("downtime", &self.downtime)?.as_secs_f64(),
                rounds: self.rounds,
                until,
                verify: self.verify,
            },
            cut_over,
            adopt: self.adopt,
            disks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: &str = "machine = 'vm'\nstop = ':'\nprovider = './p'\nstate = 's'\n[[disk]]\nname = 'vda'\ntarget = 'a.raw'\n";

    #[test]
    fn settings_take_precedence() {
        let plan = FollowPlan::parse(PLAN, &[]).unwrap();
        assert_eq!((plan.limits.downtime, plan.limits.rounds), (30.0, 20));
        assert_eq!((plan.cut_over, plan.adopt), (CutOver::Now, false));
        let settings =
            ["downtime=1500ms", "rounds=3", "cut-over=file /tmp/x", "adopt=true", "verify=all"];
        let plan = FollowPlan::parse(PLAN, &settings.map(String::from)).unwrap();
        assert_eq!((plan.limits.downtime, plan.limits.rounds), (1.5, 3));
        assert_eq!(plan.limits.verify, VerifyScope::All);
        assert_eq!((&plan.cut_over, plan.adopt), (&CutOver::File("/tmp/x".into()), true));
        assert!(plan.text().contains("once /tmp/x exists"), "{}", plan.text());
    }

    #[test]
    fn wrong_plans_are_refused_with_the_key() {
        for (setting, said) in [
            ("downtime", "write KEY=VALUE"),
            ("downtime=soon", "downtime: "),
            ("rounds=0", "rounds: at least 1"),
            ("rounds=many", "invalid type"),
            ("cut-over=later", "\"later\" is not now, signal, at TIME"),
            ("cut-over=at noon", "cut-over: \"noon\" is not a time"),
            ("until=x", "until: \"x\" is not a time"),
            ("colour=red", "unknown field `colour`"),
            ("verify=some", "unknown variant `some`"),
        ] {
            let error = FollowPlan::parse(PLAN, &[setting.to_string()]).unwrap_err();
            assert!(error.contains(said), "{setting}: {error}");
        }
        for (old, new, said) in [
            ("'vda'", "'../vda'", "a name has letters"),
            ("'a.raw'", "'-'", "a pipe cannot keep"),
            ("'a.raw'", "''", "target: "),
            ("[[disk]]", "x = y\n[[disk]]", "line 5: "),
            ("machine = 'vm'\n", "", "missing field `machine`"),
            ("stop = ':'\n", "", "cut-over must be signal or file PATH"),
        ] {
            let error = FollowPlan::parse(&PLAN.replace(old, new), &[]).unwrap_err();
            assert!(error.contains(said), "{new}: {error}");
        }
        let two = format!("{PLAN}[[disk]]\nname = 'vda'\ntarget = 'b.raw'\n");
        assert!(FollowPlan::parse(&two, &[]).unwrap_err().contains("used twice"));
        let two = format!("{PLAN}[[disk]]\nname = 'vdb'\ntarget = './a.raw'\n");
        let error = FollowPlan::parse(&two, &[]).unwrap_err();
        assert!(error.contains("disks vda and vdb have the same target"), "{error}");
    }
}
