//! Types of the members of requests.

use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A time in seconds: a number that may have a fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0.as_secs_f64())
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Seconds, D::Error> {
        let seconds = f64::deserialize(deserializer).ok();
        let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        time.map(Seconds).ok_or_else(|| D::Error::custom("is not a time in seconds"))
    }
}

/// A device that the server opens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "is neither a string nor a list of strings")]
pub enum DeviceDescription {
    /// A description in the notation of `serve` and `copy`. Relative paths are relative to the working
    /// directory of the server.
    Text(String),
    /// The words of a command that starts an NBD server: the first one is the program.
    Command(Vec<String>),
}

/// Options of a copy, as words of the command line of `copy`: `--rate=50M`. Options that need a terminal, another
/// file or a source of their own are refused.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CopyOptions(pub Vec<String>);

/// Behaviour of a job when a request of its source or target fails: the error policies of QEMU's jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorPolicy {
    /// The job fails.
    #[default]
    Report,
    /// The job repeats the request until it succeeds, ever more seldom.
    Ignore,
    /// The job pauses, and repeats the request when it is resumed.
    Stop,
    /// The job pauses if there is no space, and fails after other errors.
    Enospc,
}

impl ErrorPolicy {
    /// The names of all policies.
    pub const NAMES: [&'static str; 4] = ["report", "ignore", "stop", "enospc"];

    /// The name of this policy.
    pub fn name(self) -> &'static str {
        ErrorPolicy::NAMES[self as usize]
    }

    /// The policy of this name; none if there is no such policy.
    pub fn parse(name: &str) -> Option<ErrorPolicy> {
        use ErrorPolicy::{Enospc, Ignore, Report, Stop};
        [Report, Ignore, Stop, Enospc].into_iter().find(|policy| policy.name() == name)
    }
}

/// When the target of a mirror has what clients write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyMode {
    /// Later: in one of the next rounds.
    #[default]
    Background,
    /// Before the write completes.
    WriteBlocking,
}

impl CopyMode {
    /// The names of all modes, as in QEMU.
    pub const NAMES: [&'static str; 2] = ["background", "write-blocking"];

    /// The name of this mode.
    pub fn name(self) -> &'static str {
        CopyMode::NAMES[self as usize]
    }

    /// The mode of this name; none if there is no such mode.
    pub fn parse(name: &str) -> Option<CopyMode> {
        let all = [CopyMode::Background, CopyMode::WriteBlocking];
        all.into_iter().find(|mode| mode.name() == name)
    }
}

/// What a mirror copies before it copies changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SyncMode {
    /// All of the disk.
    #[default]
    Full,
    /// Nothing: the target has the contents of the disk already.
    None,
}

/// What fails if old contents cannot be saved for a snapshot, or not in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotFailurePolicy {
    /// The snapshot. Clients go on.
    #[default]
    Break,
    /// The write of the client.
    Fail,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_protocol() {
        for name in ErrorPolicy::NAMES {
            let policy: ErrorPolicy = serde_json::from_value(name.into()).unwrap();
            assert_eq!((policy.name(), ErrorPolicy::parse(name)), (name, Some(policy)));
        }
        for name in CopyMode::NAMES {
            let mode: CopyMode = serde_json::from_value(name.into()).unwrap();
            assert_eq!((mode.name(), CopyMode::parse(name)), (name, Some(mode)));
        }
        assert_eq!((ErrorPolicy::parse("fail"), CopyMode::parse("")), (None, None));
    }
}
