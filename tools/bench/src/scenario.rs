//! Scenario files: what is measured, as data. The fields' comments are the format's reference.
//!
//! A scenario is a table: environments are its columns (a command each), cases its rows, and every
//! cell is run many times. Words in braces are variables (`vars`); a brace around anything else
//! stays as it is.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer};

use crate::metric::Metric;
pub use crate::step::{ScenarioStep, StepCommand};
use crate::vars::{VariableValue, Vars};
use blockhaul_measure::{MeasureError, Result};

/// The scenarios that come with the program, by name.
pub const BUILT_IN: &[(&str, &str)] = &[
    ("copy", include_str!("../../../bench/scenarios/copy.toml")),
    ("curl", include_str!("../../../bench/scenarios/curl.toml")),
    ("curve", include_str!("../../../bench/scenarios/curve.toml")),
    ("direct", include_str!("../../../bench/scenarios/direct.toml")),
    ("direct-read", include_str!("../../../bench/scenarios/direct-read.toml")),
    ("extents", include_str!("../../../bench/scenarios/extents.toml")),
    ("fio", include_str!("../../../bench/scenarios/fio.toml")),
    ("formats", include_str!("../../../bench/scenarios/formats.toml")),
    ("guest-latency", include_str!("../../../bench/scenarios/guest-latency.toml")),
    ("latency", include_str!("../../../bench/scenarios/latency.toml")),
    ("load", include_str!("../../../bench/scenarios/load.toml")),
    ("local", include_str!("../../../bench/scenarios/local.toml")),
    ("million", include_str!("../../../bench/scenarios/million.toml")),
    ("mirror", include_str!("../../../bench/scenarios/mirror.toml")),
    ("mount", include_str!("../../../bench/scenarios/mount.toml")),
    ("near-empty", include_str!("../../../bench/scenarios/near-empty.toml")),
    ("pipes", include_str!("../../../bench/scenarios/pipes.toml")),
    ("python-plugins", include_str!("../../../bench/scenarios/python-plugins.toml")),
    ("remote", include_str!("../../../bench/scenarios/remote.toml")),
    ("requests", include_str!("../../../bench/scenarios/requests.toml")),
    ("rtt", include_str!("../../../bench/scenarios/rtt.toml")),
    ("served-image", include_str!("../../../bench/scenarios/served-image.toml")),
    ("server", include_str!("../../../bench/scenarios/server.toml")),
    ("slow-extents", include_str!("../../../bench/scenarios/slow-extents.toml")),
    ("tls", include_str!("../../../bench/scenarios/tls.toml")),
    ("vddk", include_str!("../../../bench/scenarios/vddk.toml")),
    ("vhost-user", include_str!("../../../bench/scenarios/vhost-user.toml")),
];

/// Earlier names of scenarios, in results and on command lines.
const RENAMED: &[(&str, &str)] = &[
    ("seed0", "requests"),
    ("seed1", "direct-read"),
    ("seed2", "mirror"),
    ("seed3", "slow-extents"),
    ("seed4", "latency"),
];

/// The name of a scenario that may have had another one.
pub fn today(name: &str) -> &str {
    RENAMED.iter().find(|(earlier, _)| *earlier == name).map_or(name, |(_, today)| today)
}

/// A scenario file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// One line for headings.
    pub title: String,
    /// What is measured and how, in a few sentences.
    #[serde(default)]
    pub description: String,
    /// Label of the environment that others are compared with; the first one by default.
    pub reference: Option<String>,
    /// Runs of every cell that count.
    #[serde(default = "default_runs")]
    pub runs: u32,
    /// Rounds before those that count.
    #[serde(default = "default_warmup")]
    pub warmup: u32,
    /// A command that takes longer has failed, for instance `90s` or `5m`.
    #[serde(default = "default_timeout", deserialize_with = "duration")]
    pub timeout: Duration,
    /// Runs at the same time, for cells that wait most of the time: 1 by default. With several, cells
    /// are run from the last one to the first one of the table, so that the long ones come last in it.
    /// The use of the processors by others is not known then.
    #[serde(default = "default_together")]
    pub together: u32,
    /// Seed of the order of runs; by default another one each time (it is recorded).
    pub seed: Option<u64>,
    /// Whether the kernel's caches are dropped before every run. Needs root.
    #[serde(default)]
    pub drop_caches: bool,
    /// A variable with a number in every row: results are also drawn as curves over it.
    pub curve: Option<String>,
    /// What is shown besides times and memory.
    #[serde(default)]
    pub show: Vec<Metric>,
    /// How much is done in a run, to show how much of it is done in a second.
    pub rate: Option<WorkAmount>,
    /// File systems to be mounted for the runs, by name.
    #[serde(default)]
    pub mount: BTreeMap<String, ScenarioMount>,
    /// What the machine must have for the scenario as a whole.
    #[serde(default)]
    pub needs: ScenarioNeeds,
    /// Variables of all cells.
    #[serde(default)]
    pub variables: Vars,
    /// What `--quick`, the default, changes.
    #[serde(default)]
    pub quick: SizeOverrides,
    /// What `--full` changes.
    #[serde(default)]
    pub full: SizeOverrides,
    /// Every case is multiplied by all combinations of these values.
    #[serde(default)]
    pub matrix: BTreeMap<String, Vec<VariableValue>>,
    /// Files with known content, made once. Variables of a row may be used; equal images are made
    /// once.
    #[serde(default)]
    pub image: Vec<ScenarioImage>,
    /// Steps carried out once for every row, after the images are made. Equal steps are carried
    /// out once.
    #[serde(default)]
    pub setup: Vec<ScenarioStep>,
    /// Steps before every run.
    #[serde(default)]
    pub prepare: Vec<ScenarioStep>,
    /// Steps after every run, when its servers have ended. The run has failed if one of them fails.
    #[serde(default)]
    pub check: Vec<ScenarioStep>,
    /// Servers by name, for `servers` of environments and cases.
    #[serde(default)]
    pub server: BTreeMap<String, ScenarioServer>,
    /// The columns.
    pub environment: Vec<Environment>,
    /// The rows.
    pub case: Vec<ScenarioCase>,
}

/// What changes with the size of a scenario.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizeOverrides {
    /// Runs of every cell that count.
    pub runs: Option<u32>,
    /// Rounds before those that count.
    pub warmup: Option<u32>,
    /// Variables that replace those of the scenario.
    #[serde(default)]
    pub variables: Vars,
    /// Axes that replace those of the scenario.
    #[serde(default)]
    pub matrix: BTreeMap<String, Vec<VariableValue>>,
}

/// What must be there; else a scenario, a row or a column is skipped, with the reason. Programs of
/// commands and servers need not be listed.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioNeeds {
    /// Programs that must be found.
    #[serde(default)]
    pub programs: Vec<String>,
    /// Files that must be there, as seen from the folder in which it is started.
    #[serde(default)]
    pub files: Vec<String>,
    /// Whether the user must be root.
    #[serde(default)]
    pub root: bool,
    /// File systems of `[mount]` that are used.
    #[serde(default)]
    pub mounts: Vec<String>,
    /// Type of the file system that `{disk}` must be on, for instance `xfs`.
    pub file_system: Option<String>,
    /// Bytes that must be free where `{scratch}` is.
    pub scratch: Option<VariableValue>,
    /// Bytes that must be free where `{disk}` is.
    pub disk: Option<VariableValue>,
}

/// How much is done in a run.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkAmount {
    /// A number, or a size with a unit; variables of a row may be used.
    pub amount: VariableValue,
    /// The unit of what is shown, for instance `MB/s`.
    pub unit: String,
    /// The amount is divided by this: 1000000 for MB of bytes.
    #[serde(default = "one")]
    pub divide: u64,
}

/// A file system of its own: an image file under `{disk}`, mounted through a loop device with direct
/// I/O. It needs root. Its folder is the variable `{mount_NAME}`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioMount {
    /// `ext4`, `xfs` or `btrfs`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Size of the file system.
    pub size: VariableValue,
}

/// A file with known content.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioImage {
    /// Where it is made.
    pub path: String,
    /// Its size in bytes.
    pub size: VariableValue,
    /// How many bytes of it are data; the rest are holes. All of it by default.
    pub data: Option<VariableValue>,
    /// Length in bytes of a run of data; runs lie anywhere and some touch. 1M by default.
    pub run: Option<VariableValue>,
    /// Seed of the bytes and of where they are.
    #[serde(default = "default_seed")]
    pub seed: u64,
}

/// A server for one run.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioServer {
    /// What is started. It must stay in the foreground and end when it gets SIGTERM.
    pub command: StepCommand,
    /// The server is ready when this Unix socket listens. A stale one is removed before.
    pub socket: Option<String>,
    /// The server is ready when this TCP port of the loopback address accepts a connection.
    pub port: Option<VariableValue>,
    /// The server is ready when this file exists.
    pub exists: Option<String>,
}

/// A column.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Environment {
    /// Its heading, short.
    pub label: String,
    /// What is timed.
    pub command: StepCommand,
    /// Names of servers to be started after those of the case, whose clients they may be.
    #[serde(default)]
    pub servers: Vec<String>,
    /// Variables; those of a case go before them.
    #[serde(default)]
    pub variables: Vars,
    /// Steps before every run, after those of the scenario and the case.
    #[serde(default)]
    pub prepare: Vec<ScenarioStep>,
    /// What the machine must have for this column.
    #[serde(default)]
    pub needs: ScenarioNeeds,
}

/// A row, or several with a matrix.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioCase {
    /// Its heading. With a matrix, values that it does not name are appended.
    pub label: String,
    /// Names of servers to be started, in this order.
    #[serde(default)]
    pub servers: Vec<String>,
    /// Variables; they go before all others.
    #[serde(default)]
    pub variables: Vars,
    /// Steps carried out once, after those of the scenario.
    #[serde(default)]
    pub setup: Vec<ScenarioStep>,
    /// Steps before every run, after those of the scenario.
    #[serde(default)]
    pub prepare: Vec<ScenarioStep>,
    /// Steps after every run, instead of those of the scenario.
    pub check: Option<Vec<ScenarioStep>>,
    /// Why the result of this row cannot be checked. Without this, a row must have a check.
    pub unchecked: Option<String>,
    /// Labels of the environments that take part; all by default.
    pub environments: Option<Vec<String>>,
    /// What the machine must have for this row.
    #[serde(default)]
    pub needs: ScenarioNeeds,
}

impl ScenarioCase {
    /// Whether its result is checked, by its own steps or those of the scenario, or a reason is given.
    fn check_unchecked(&self, common: &[ScenarioStep]) -> std::result::Result<(), String> {
        let checked = !self.check.as_deref().unwrap_or(common).is_empty();
        if checked == self.unchecked.is_some() {
            return Err(if checked {
                format!(
                    "case '{}' has both 'unchecked' and a check; keep one, or set 'check = []'",
                    self.label
                )
            } else {
                format!(
                    "case '{}' has no check of its result, so a fast wrong run would count; \
                     add 'check', or say why there is none with 'unchecked = \"…\"'",
                    self.label
                )
            });
        }
        Ok(())
    }
}

impl Scenario {
    /// Whether it has a size only: neither `[quick]` nor `[full]` changes anything.
    pub fn has_one_size(&self) -> bool {
        self.quick == SizeOverrides::default() && self.full == SizeOverrides::default()
    }

    /// Reads a scenario file; its name, for results, is the file's without `.toml`.
    pub fn load(path: &Path) -> Result<(String, Scenario)> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            MeasureError::usage(format!(
                "cannot read the scenario {}: {error}; 'bench list' shows those that are built in, \
                 'bench run NAME' runs one",
                path.display()
            ))
        })?;
        let name = path.file_stem().map_or_else(String::new, |stem| stem.display().to_string());
        Ok((name, Scenario::parse(&path.display().to_string(), &text)?))
    }

    /// One of the scenarios that come with the program.
    pub fn built_in(name: &str) -> Result<(String, Scenario)> {
        let name = today(name);
        match BUILT_IN.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => Ok((name.to_owned(), Scenario::parse(name, text)?)),
            None => {
                let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
                Err(MeasureError::usage(format!(
                    "there is no scenario '{name}' in the program; there are {}; for a file, use \
                     'bench FILE.toml'",
                    known.join(", ")
                )))
            }
        }
    }

    /// Parses and checks a scenario. `whence` is where errors say that it is.
    pub fn parse(whence: &str, text: &str) -> Result<Scenario> {
        let scenario: Scenario = toml::from_str(text).map_err(|error| {
            MeasureError::usage(format!("scenario {whence}: {}", one_text(&error)))
        })?;
        scenario.check(whence)?;
        Ok(scenario)
    }

    /// Whether all that is named is there, once.
    fn check(&self, whence: &str) -> Result<()> {
        let wrong = |text: String| Err(MeasureError::usage(format!("scenario {whence}: {text}")));
        let labels: Vec<&str> = self.environment.iter().map(|e| e.label.as_str()).collect();
        if labels.is_empty() || self.case.is_empty() {
            return wrong("there must be an [[environment]] and a [[case]] at least".to_owned());
        }
        if let Some(twice) = twice(&labels) {
            return wrong(format!(
                "two environments are labelled '{twice}'; give one of them another label"
            ));
        }
        if let Some(twice) = twice(&self.case.iter().map(|c| c.label.as_str()).collect::<Vec<_>>())
        {
            return wrong(format!(
                "two cases are labelled '{twice}'; give one of them another label"
            ));
        }
        let known_label = |what: &str, label: &str| {
            if labels.contains(&label) {
                Ok(())
            } else {
                wrong(format!(
                    "{what} names the environment '{label}', which is not there; there are: {}",
                    labels.join(", ")
                ))
            }
        };
        if let Some(reference) = &self.reference {
            known_label("'reference'", reference)?;
        }
        if self.runs == 0 || self.quick.runs == Some(0) || self.full.runs == Some(0) {
            return wrong("'runs' is 0; it must be 1 at least".to_owned());
        }
        for case in &self.case {
            for label in case.environments.iter().flatten() {
                known_label(&format!("case '{}'", case.label), label)?;
            }
            case.check_unchecked(&self.check).or_else(wrong)?;
        }
        for (name, server) in &self.server {
            let ways = [server.socket.is_some(), server.port.is_some(), server.exists.is_some()];
            if ways.iter().filter(|set| **set).count() != 1 {
                return wrong(format!(
                    "[server.{name}] must say when it is ready, in one way: 'socket', 'port' or \
                     'exists'"
                ));
            }
        }
        let needs = self.case.iter().map(|case| &case.needs);
        for needs in needs.chain(self.environment.iter().map(|e| &e.needs)).chain([&self.needs]) {
            if let Some(name) = needs.mounts.iter().find(|name| !self.mount.contains_key(*name)) {
                return wrong(format!("'mounts' names '{name}', but there is no [mount.{name}]"));
            }
        }
        if self.rate.as_ref().is_some_and(|rate| rate.divide == 0) {
            return wrong("[rate] 'divide' is 0".to_owned());
        }
        for (axis, values) in self.matrix.iter().chain(&self.quick.matrix).chain(&self.full.matrix)
        {
            if values.is_empty() {
                return wrong(format!("[matrix] '{axis}' has no values"));
            }
        }
        Ok(())
    }
}

/// A label that is there twice.
fn twice<'a>(labels: &[&'a str]) -> Option<&'a str> {
    labels.iter().enumerate().find(|(at, label)| labels[..*at].contains(label)).map(|(_, l)| *l)
}

/// The TOML parser's words, which tell line and column, without the trailing line break.
fn one_text(error: &toml::de::Error) -> String {
    error.to_string().trim_end().to_owned()
}

fn default_runs() -> u32 {
    5
}

fn default_warmup() -> u32 {
    1
}

fn default_together() -> u32 {
    1
}

fn default_timeout() -> Duration {
    Duration::from_secs(120)
}

fn one() -> u64 {
    1
}

fn default_seed() -> u64 {
    1
}

fn duration<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Duration, D::Error> {
    let text = match VariableValue::deserialize(from)? {
        VariableValue::Text(text) => text,
        VariableValue::Number(seconds) => seconds.to_string(),
        VariableValue::List(_) => return Err(de::Error::custom("a time was expected, not a list")),
    };
    blockhaul_catalog::parse_duration(&text).map_err(|error| de::Error::custom(error.text()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Scenario::parse("x.toml", text).unwrap_err().to_string()
    }

    const GOOD: &str = "title = 't'\n\
        [[environment]]\nlabel = 'a'\ncommand = ['true']\n\
        [[case]]\nlabel = 'c'\nunchecked = 'nothing is written'\n";

    #[test]
    fn a_small_scenario_is_enough() {
        let scenario = Scenario::parse("x", GOOD).unwrap();
        assert_eq!((scenario.runs, scenario.warmup, scenario.drop_caches), (5, 1, false));
        assert_eq!(scenario.environment[0].command, StepCommand::Words(vec!["true".into()]));
    }

    #[test]
    fn built_in_scenarios_parse() {
        let places = crate::plan::BenchPaths {
            scratch: "/dev/shm".into(),
            disk: "/var/tmp".into(),
            blockhaul: None,
            search: vec!["/bin".into(), "/usr/bin".into()],
        };
        for (earlier, name) in RENAMED {
            assert_eq!(Scenario::built_in(earlier).unwrap().0, *name);
        }
        for (name, _) in BUILT_IN {
            let scenario = Scenario::built_in(name).unwrap().1;
            for full in [false, true] {
                let choice = crate::plan::RunSelection { full, ..Default::default() };
                let plan = crate::plan::ScenarioPlan::new(name, &scenario, &choice, &places, 1);
                assert!(plan.is_ok(), "{name}: {:?}", plan.err());
            }
        }
        let text = Scenario::built_in("nothing").unwrap_err().to_string();
        assert!(text.contains("copy, curl, curve, direct, direct-read, extents"), "{text}");
    }

    #[test]
    fn errors_say_what_where_and_what_next() {
        let text = error(&GOOD.replace("title", "tilte"));
        assert!(text.contains("scenario x.toml") && text.contains("line 1"), "{text}");
        assert!(text.contains("unknown field `tilte`"), "{text}");
        let text = error(&format!("reference = 'b'\n{GOOD}"));
        assert!(text.contains("'reference' names the environment 'b'"), "{text}");
        assert!(text.contains("there are: a"), "{text}");
        let text = error(&GOOD.replace("unchecked = 'nothing is written'", ""));
        assert!(text.contains("case 'c' has no check") && text.contains("unchecked"), "{text}");
        let text = error(&GOOD.replace("['true']", "''"));
        assert!(text.contains("the command is empty") && text.contains("line 4"), "{text}");
        let text = error(&format!("prepare = [{{ fresh = 'f' }}]\n{GOOD}"));
        assert!(text.contains("fresh = FILE, size = SIZE"), "{text}");
        let text = error(&format!("timeout = '3 weeks'\n{GOOD}"));
        assert!(text.contains("\"3 weeks\" is not a time"), "{text}");
        let text = error(&format!("{GOOD}[server.s]\ncommand = 'x'\n"));
        assert!(text.contains("[server.s]") && text.contains("'socket'"), "{text}");
        let text = error(&format!("runs = 0\n{GOOD}"));
        assert!(text.contains("'runs' is 0"), "{text}");
    }

    #[test]
    fn times_have_units() {}
}
