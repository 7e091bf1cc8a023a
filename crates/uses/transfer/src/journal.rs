//! The journal of a copy: its options, and what identifies the two sides in it.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_catalog::{DeviceSpec, RecordFile};
use blockhaul_engine::JournalOptions;
use blockhaul_io::plain;

use crate::description::{path_of, without_passwords};
use crate::error::{Result, TransferErrorKind};

/// The journal of a copy.
#[derive(Debug, Clone)]
pub struct Journal {
    /// The file.
    pub path: PathBuf,
    /// Begin from the start.
    pub restart: bool,
    /// Maximum time between flushes.
    pub interval: Duration,
    /// Keep the journal after success: its copy belongs together with others that may fail.
    pub keep: bool,
}

impl Journal {
    /// Whether an earlier run has left one.
    pub(crate) fn goes_on(&self) -> bool {
        !self.restart && self.path.exists()
    }

    /// The file in which a target that exists only as a whole records its progress: beside the journal, because the
    /// engine has none for such a copy.
    pub(crate) fn record_file(&self) -> RecordFile {
        let mut path = self.path.clone().into_os_string();
        path.push(".upload");
        RecordFile { path: path.into(), restart: self.restart }
    }

    /// Removes the journal after a successful verification, unless other copies need it; and when
    /// it does not match the target.
    pub(crate) fn after_verification<T>(&self, verified: &Result<T>) {
        let over = match verified {
            Ok(_) => !self.keep,
            Err(error) => error.kind() == TransferErrorKind::Difference,
        };
        if over {
            remove_journal(&self.path);
        }
    }

    /// The journal options of a copy between these open sides. `discards`: it changes the source.
    pub(crate) fn options(
        &self,
        source: &DeviceSpec,
        target: &DeviceSpec,
        discards: bool,
    ) -> JournalOptions {
        JournalOptions {
            path: self.path.clone(),
            restart: self.restart,
            interval: self.interval,
            keep: self.keep,
            source: identity(source, !discards),
            target: identity(target, false),
        }
    }
}

/// The name of a journal for a copy to this target, in the current directory: that of the target, and `.journal`.
pub fn journal_name(target: &DeviceSpec) -> String {
    let text = match target {
        DeviceSpec::Path(path) => path.to_string_lossy().into_owned(),
        DeviceSpec::Command(words) => {
            words.last().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default()
        }
        other => other.to_string(),
    };
    let text = text.split('?').next().unwrap_or_default();
    let last = text.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or_default();
    let plain: String =
        last.chars().filter(|c| c.is_alphanumeric() || "._-".contains(*c)).take(100).collect();
    let plain = plain.trim_start_matches(['-', '.']);
    format!("{}.journal", if plain.is_empty() { "copy" } else { plain })
}

/// Removes a journal, if it exists; warns on failure.
pub fn remove_journal(path: &Path) {
    let removed = std::fs::remove_file(path).and_then(|()| blockhaul_io::sync_folder(path));
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            let path = path.display();
            let why = plain(&error);
            log::warn!("cannot remove the journal {path}: {why}");
        }
        _ => {}
    }
}

/// Identifies a device for a journal; with its current state, if it must stay `unchanged`.
pub(crate) fn identity(spec: &DeviceSpec, unchanged: bool) -> String {
    let data = path_of(spec).and_then(|path| {
        let data = std::fs::metadata(&path).ok()?;
        Some((blockhaul_backends::identity(&path)?, data))
    });
    match data {
        // The path can be written in many ways; the file is the same.
        Some(((device, inode), data)) if unchanged && data.is_file() => {
            let seconds = data.mtime();
            let nanos = data.mtime_nsec();
            format!("file {device}:{inode} changed at {seconds}.{nanos:09}")
        }
        Some(((device, inode), _)) => format!("file {device}:{inode}"),
        // The journal is a file that others may read.
        None => without_passwords(&spec.to_string()).into_owned(),
    }
}

/// Layers that show a part or a form of existing contents, for the journal. As digests: an option
/// may be a passphrase.
pub(crate) fn seen_through(layers: &[&str]) -> String {
    let told = layers.iter().map(|text| {
        let name = text.split('?').next().unwrap_or(text);
        format!(" through {name} {}", &blake3::hash(text.as_bytes()).to_hex()[..12])
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journals_are_named_after_the_target() {
        for (target, name) in [
            ("/dev/vg/root", "root.journal"),
            ("nbd://host/vm1", "vm1.journal"),
            ("nbd://host:10810/", "10810.journal"),
            ("nbd+unix:///disk?socket=/run/x", "disk.journal"),
            ("file:/a/d%20x.raw?direct=on", "d20x.raw.journal"),
            ("null:", "copy.journal"),
            ("/", "copy.journal"),
        ] {
            let spec = DeviceSpec::parse(std::ffi::OsStr::new(target)).unwrap();
            assert_eq!(journal_name(&spec), name, "{target}");
        }
    }
}
