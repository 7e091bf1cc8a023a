//! Peer programs: whether they are available and new enough, and commands to run them.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::run::{lock, output};
use super::skip::{SkipReason, skip_or_fail};

/// A peer program that is available and new enough.
#[derive(Clone, Debug)]
pub struct PeerProgram {
    name: String,
    program: PathBuf,
    /// The directory of unpacked peers; none for a program from the search path.
    home: Option<PathBuf>,
    version: Option<Version>,
}

impl PeerProgram {
    /// Finds a program by its name and checks that it is new enough: nbdkit 1.42, libnbd 1.22,
    /// QEMU 10.0, fio of any version with its nbd engine; others need only be there. Each program
    /// is run once in a process, later calls get the same answer.
    ///
    /// # Errors
    /// Why there is no such peer, and what to do about it.
    pub fn find(name: &str) -> Result<PeerProgram, SkipReason> {
        static KNOWN: OnceLock<Mutex<HashMap<String, Result<PeerProgram, SkipReason>>>> =
            OnceLock::new();
        // The lock is held while the program runs, so that many tests at once run it only once.
        let mut known = lock(KNOWN.get_or_init(Mutex::default));
        known.entry(name.to_owned()).or_insert_with(|| PeerProgram::look_for(name)).clone()
    }

    /// Like [`PeerProgram::find`]; where there is no such peer, says why and gives None, so that the test
    /// can return. [`require_peer!`](crate::require_peer) does both.
    ///
    /// # Panics
    /// Where there is no such peer and peers are required (`CI=true`, `BLOCKHAUL_REQUIRE_PEERS=1`).
    #[track_caller]
    pub fn require(name: &str) -> Option<PeerProgram> {
        match PeerProgram::find(name) {
            Ok(peer) => Some(peer),
            Err(reason) => {
                skip_or_fail(&reason);
                None
            }
        }
    }

    /// The program's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the program, or of the wrapper that runs it. A server under test that is started by
    /// another program is named so.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The version that the program prints; None for programs without a version check.
    pub fn version(&self) -> Option<Version> {
        self.version
    }

    /// A command that runs the program. Process id, open descriptors, signals and exit status are
    /// the program's own.
    pub fn command(&self) -> Command {
        Command::new(&self.program)
    }

    /// Like [`PeerProgram::command`], and the kernel ends the program when the *thread* that spawned it
    /// ends, even if the test process is killed. Not for programs that outlive their thread.
    pub fn tied_command(&self) -> Command {
        let tie = ["--pdeathsig", "KILL", "--"];
        if let Some(home) = &self.home {
            let mut command = Command::new(home.join("enter"));
            command.arg("setpriv").args(tie).arg(&self.name);
            return command;
        }
        let Some(setpriv) = in_search_path("setpriv") else { return self.command() };
        let mut command = Command::new(setpriv);
        command.args(tie).arg(&self.program);
        command
    }

    fn look_for(name: &str) -> Result<PeerProgram, SkipReason> {
        let homes = homes();
        let unpacked = homes
            .into_iter()
            .map(|home| (home.join("bin").join(name), Some(home)))
            .find(|(program, _)| program.is_file());
        let found = unpacked.or_else(|| Some((in_search_path(name)?, None)));
        let Some((program, home)) = found else {
            return Err(SkipReason(format!("there is no {name}; `cargo xtask peers` unpacks it")));
        };
        let mut peer = PeerProgram { name: name.to_owned(), program, home, version: None };
        if let Some(least) = least_version(name) {
            let version = peer.ask_version()?;
            if version < least {
                return Err(SkipReason(format!(
                    "{name} is {version}, older than {least}; `cargo xtask peers` unpacks a newer \
                     one"
                )));
            }
            peer.version = Some(version);
        }
        if name == "fio" {
            let engines = peer.ask("--enghelp")?;
            if !engines.split_whitespace().any(|engine| engine == "nbd") {
                return Err(SkipReason(
                    "fio has no nbd engine; `cargo xtask peers` unpacks one".into(),
                ));
            }
        }
        Ok(peer)
    }

    fn ask_version(&self) -> Result<Version, SkipReason> {
        let text = self.ask("--version")?;
        Version::parse(&text)
            .ok_or_else(|| SkipReason(format!("{} states no version: {text:?}", self.name)))
    }

    fn ask(&self, option: &str) -> Result<String, SkipReason> {
        let output = output(self.command().arg(option), Duration::from_secs(30));
        let output = output.map_err(SkipReason)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let words = String::from_utf8_lossy(&output.stderr);
        Err(SkipReason(format!(
            "`{} {option}` failed: {}: {}",
            self.name,
            output.status,
            words.trim()
        )))
    }
}

/// A command that runs any program among the unpacked peers: with `/usr` as the peers have it and
/// all of them in the search path, so that what it starts needs no wrapper. For shell lines with
/// several peers, and for programs of ours that start peers by name.
///
/// # Errors
/// Where no peers are unpacked.
pub fn among_peers(program: impl AsRef<OsStr>) -> Result<Command, SkipReason> {
    let enter = homes().into_iter().map(|home| home.join("enter")).find(|enter| enter.is_file());
    let Some(enter) = enter else {
        return Err(SkipReason("no peers are unpacked; run `cargo xtask peers`".into()));
    };
    let mut command = Command::new(enter);
    command.arg(program);
    Ok(command)
}

/// Finds the peer or ends the test: `let nbdkit = require_peer!("nbdkit");`. A test that returns a
/// value gives it as the second argument: `require_peer!("nbdkit", Ok(()))`.
#[macro_export]
macro_rules! require_peer {
    ($name:expr) => {
        $crate::require_peer!($name, ())
    };
    ($name:expr, $otherwise:expr) => {
        match $crate::tools::PeerProgram::require($name) {
            Some(peer) => peer,
            None => return $otherwise,
        }
    };
}

impl std::error::Error for SkipReason {}

/// The first two numbers of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The number before the first point.
    pub major: u32,
    /// The number after it.
    pub minor: u32,
}

impl Version {
    /// The first `NUMBER.NUMBER` in a program's output.
    fn parse(text: &str) -> Option<Version> {
        text.split(|c: char| !c.is_ascii_digit() && c != '.').find_map(|word| {
            let mut parts = word.split('.');
            let major = parts.next()?.parse().ok()?;
            let minor = parts.next()?.parse().ok()?;
            Some(Version { major, minor })
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The oldest version of a program that is useful for comparison: extended headers and the current
/// output.
fn least_version(name: &str) -> Option<Version> {
    match name {
        "nbdkit" => Some(Version { major: 1, minor: 42 }),
        _ if name.starts_with("nbd") => Some(Version { major: 1, minor: 22 }),
        _ if name.starts_with("qemu-") => Some(Version { major: 10, minor: 0 }),
        _ => None,
    }
}

/// Directories of unpacked peers, the most specific first.
fn homes() -> Vec<PathBuf> {
    if let Some(dir) = std::env::var_os("BLOCKHAUL_PEERS") {
        return vec![dir.into()];
    }
    let mut homes = Vec::new();
    // A test program lies below the target directory, wherever that is.
    if let Ok(exe) = std::env::current_exe() {
        homes.extend(exe.ancestors().skip(1).map(|dir| dir.join("peers")));
    }
    if let Some(manifest) = std::env::var_os("CARGO_MANIFEST_DIR") {
        homes.extend(Path::new(&manifest).ancestors().map(|dir| dir.join("target/peers")));
    }
    homes.retain(|home| home.join("stamp").is_file());
    homes
}

fn in_search_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_programs_say() {
        let of = |text: &str| Version::parse(text).map(|version| version.to_string());
        assert_eq!(of("nbdkit 1.42.3").as_deref(), Some("1.42"));
        assert_eq!(of("nbdinfo 1.22.2\nlibnbd 1.22.2").as_deref(), Some("1.22"));
        assert_eq!(of("qemu-img version 10.0.13 (Debian 1:10.0.13+ds-0)").as_deref(), Some("10.0"));
        assert_eq!(of("fio-3.39").as_deref(), Some("3.39"));
        assert_eq!(of("no number 7 here"), None);
        let old = Version { major: 9, minor: 2 };
        assert!(least_version("qemu-nbd").is_some_and(|least| old < least));
        assert!(least_version("nbdkit") > least_version("nbdcopy"));
        assert_eq!(least_version("jq"), None);
    }

    #[test]
    fn an_absent_peer_gives_its_reason() {
        let reason = PeerProgram::find("no-such-peer").unwrap_err();
        assert!(reason.to_string().contains("no-such-peer"), "{reason}");
        assert!(reason.to_string().contains("cargo xtask peers"), "{reason}");
    }
}
