//! Common parts of other projects' test suites: the result of a test, expected failures, and
//! templates that `configure` would fill in.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::Outcome;

/// The status with which a test says that it cannot run here (automake's).
const SKIP: i32 = 77;

/// How a test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Pass,
    Skip,
    Fail,
}

impl End {
    pub const ALL: [End; 3] = [End::Pass, End::Skip, End::Fail];

    pub fn word(self) -> &'static str {
        match self {
            End::Pass => "pass",
            End::Skip => "skip",
            End::Fail => "FAIL",
        }
    }

    /// Runs a test, which writes to `log`.
    pub fn of(test: &str, command: &mut Command, log: &Path) -> Result<End, String> {
        let file = fs::File::create(log).map_err(|error| at("write", log, &error))?;
        let copy = file.try_clone().map_err(|error| at("write", log, &error))?;
        let status = command.stdin(Stdio::null()).stdout(file).stderr(copy).status();
        let status = status.map_err(|error| format!("cannot start {test}: {error}"))?;
        Ok(match status.code() {
            Some(0) => End::Pass,
            Some(SKIP) => End::Skip,
            _ => End::Fail,
        })
    }
}

/// How blockhaul takes the place of another program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Install {
    /// A symbolic link with the other's name.
    Linked,
    /// A copy with the other's name.
    Copied,
}

impl Install {
    /// Puts `program` at `place`.
    pub fn put(self, program: &Path, place: &Path) -> Outcome {
        let put = match self {
            Install::Linked => std::os::unix::fs::symlink(program, place),
            Install::Copied => fs::copy(program, place).map(drop),
        };
        put.map_err(|error| at("make", place, &error))
    }
}

/// Tests that may fail, and why: rows of a table like ``| `test-x.sh` | reason |``.
pub fn exceptions(text: &str) -> BTreeMap<String, String> {
    let row = |line: &str| {
        let (name, rest) = line.strip_prefix("| `")?.split_once("` |")?;
        let reason = rest.trim().trim_end_matches('|').trim();
        let is_test = name.ends_with(".sh") || name.ends_with(".py");
        is_test.then(|| (name.to_owned(), reason.to_owned()))
    };
    text.lines().filter_map(row).collect()
}

/// A template with the result of `value` for each `@NAME@`.
pub fn filled(template: &str, value: impl Fn(&str) -> String) -> String {
    let mut text = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('@') {
        text.push_str(before);
        let name = after.split_once('@').map(|(name, _)| name).filter(|name| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        });
        match name {
            None => {
                text.push('@');
                rest = after;
            }
            Some(name) => {
                text.push_str(&value(name));
                rest = &after[name.len() + 1..];
            }
        }
    }
    text + rest
}

pub fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| at("read", path, &error))
}

pub fn make_dir(path: &Path) -> Outcome {
    fs::create_dir_all(path).map_err(|error| at("make", path, &error))
}

pub fn at(what: &str, path: &Path, error: &std::io::Error) -> String {
    format!("cannot {what} {}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_are_rows_that_start_with_a_test() {
        let text = "| Test | Why |\n|---|---|\n| `copy-tls.sh` | no TLS yet |\n| `--flush` | x |\n\
                    | `620-stats.py` | none |\n";
        let found = exceptions(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found["620-stats.py"], "none");
        assert_eq!(found["copy-tls.sh"], "no TLS yet");
    }
}
