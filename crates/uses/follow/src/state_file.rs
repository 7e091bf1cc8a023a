//! The directory with the state of a move: `state.json`, journals, manifests and the result.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use blockhaul_io::plain;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::error::{FollowError, FollowErrorKind};
use crate::machine::FollowState;

/// Longer files are no state.
const LENGTH_MAX: u64 = 64 << 20;
/// The version of the file.
const VERSION: u32 = 1;

/// The directory, locked.
pub(crate) struct StateDir {
    path: PathBuf,
    _lock: File,
}

#[derive(Serialize, Deserialize)]
struct StateFile {
    version: u32,
    machine: String,
    targets: Vec<String>,
    state: FollowState,
    /// What the targets were after the last complete round, or are while a round is copied.
    marks: Vec<Option<TargetMark>>,
}

/// The state, and the marks of the targets.
type SavedState = (FollowState, Vec<Option<TargetMark>>);

/// A file as it was: another program that writes to it changes this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TargetMark {
    file: (u64, u64),
    /// Size and time of the last change; `None`: a copy writes to it.
    contents: Option<(u64, i64, i64)>,
}

impl TargetMark {
    /// The mark of a regular file; `None` for others.
    pub(crate) fn of(path: &Path) -> Option<TargetMark> {
        let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
        Some(TargetMark {
            file: (found.dev(), found.ino()),
            contents: Some((found.len(), found.mtime(), found.mtime_nsec())),
        })
    }

    /// The mark while a copy writes to the file.
    pub(crate) fn while_written(self) -> TargetMark {
        TargetMark { contents: None, ..self }
    }

    /// Whether a file with the mark `found` is the one of this mark, and unchanged if that matters.
    pub(crate) fn fits(&self, found: &TargetMark) -> bool {
        let is_same = self.contents.is_none() || self.contents == found.contents;
        self.file == found.file && is_same
    }
}

fn failed(what: &str, path: &Path, why: &str) -> FollowError {
    FollowError::new(FollowErrorKind::State, format!("{what} {}: {why}", path.display()))
}

impl StateDir {
    /// Creates the directory, if it is absent, and locks it.
    pub(crate) fn open(path: &Path) -> Result<StateDir, FollowError> {
        let wrong = |error: std::io::Error| failed("the state", path, &plain(&error));
        std::fs::create_dir_all(path).map_err(wrong)?;
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).open(path.join("lock"));
        let lock = lock.map_err(wrong)?;
        if let Err(error) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            let why = match error {
                rustix::io::Errno::WOULDBLOCK => {
                    "another move uses it: wait until it ends".to_string()
                }
                error => plain(&error),
            };
            return Err(failed("the state", path, &why));
        }
        Ok(StateDir { path: path.to_path_buf(), _lock: lock })
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The state of an earlier run of the move of this machine to these targets.
    pub(crate) fn load(
        &self,
        machine: &str,
        targets: &[String],
    ) -> Result<Option<SavedState>, FollowError> {
        let path = self.file("state.json");
        let text = match blockhaul_io::read_regular_file(&path, LENGTH_MAX) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("cannot read", &path, &plain(&error))),
        };
        let parsed: StateFile = serde_json::from_slice(&text)
            .map_err(|error| failed("not the state of a move:", &path, &error.to_string()))?;
        if parsed.version != VERSION || parsed.machine != machine || parsed.targets != targets {
            let why =
                "it is of another machine, other targets, or another version: use another state";
            return Err(failed("the state", &path, why));
        }
        Ok(Some((parsed.state, parsed.marks)))
    }

    /// Replaces the state, durably.
    pub(crate) fn save(
        &self,
        machine: &str,
        targets: &[String],
        state: &FollowState,
        marks: &[Option<TargetMark>],
    ) -> Result<(), FollowError> {
        let file = StateFile {
            version: VERSION,
            machine: machine.into(),
            targets: targets.to_vec(),
            state: state.clone(),
            marks: marks.to_vec(),
        };
        self.write("state.json", &file)
    }

    /// Writes a file in JSON, durably.
    pub(crate) fn write(&self, name: &str, value: &impl Serialize) -> Result<(), FollowError> {
        let text = serde_json::to_string_pretty(value)
            .map_err(|error| failed("cannot write", &self.file(name), &error.to_string()))?;
        self.write_text(name, &(text + "\n"))
    }

    /// Writes a file, durably.
    pub(crate) fn write_text(&self, name: &str, text: &str) -> Result<(), FollowError> {
        let path = self.file(name);
        let written = || -> std::io::Result<()> {
            let mut fresh = tempfile::NamedTempFile::new_in(&self.path)?;
            fresh.write_all(text.as_bytes())?;
            fresh.as_file().sync_all()?;
            fresh.persist(&path).map_err(|error| error.error)?;
            blockhaul_io::sync_folder(&path)
        };
        written().map_err(|error| failed("cannot write", &path, &plain(&error)))
    }

    /// Removes the journals of a disk, but for this one.
    pub(crate) fn remove_journals(&self, disk: &str, kept: &Path) -> Result<(), FollowError> {
        let wrong = |error: std::io::Error| failed("the state", &self.path, &plain(&error));
        let prefix = format!("{disk}.");
        for entry in std::fs::read_dir(&self.path).map_err(wrong)? {
            let path = entry.map_err(wrong)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let inner = name.strip_prefix(&prefix).and_then(|name| name.strip_suffix(".journal"));
            // The name of another disk may begin with this one.
            if inner.is_some_and(|inner| !inner.contains('.')) && path != kept {
                std::fs::remove_file(&path).map_err(wrong)?;
            }
        }
        Ok(())
    }
}
