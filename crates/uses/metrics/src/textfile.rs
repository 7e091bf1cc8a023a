//! The metrics as a file, for node_exporter's textfile collector.

use std::fs::{self, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_io::{Completer, WorkerHandle, plain};

use crate::error::MetricsError;
use crate::text::{MetricsWriter, TextSource};

/// Interval between two versions of the file.
const INTERVAL: Duration = Duration::from_secs(15);

/// A file of metrics, which is written again and again until it is ended.
pub struct TextFile {
    file: Arc<MetricsFile>,
    /// Dropped, it ends the task.
    _stop: Completer<()>,
}

impl TextFile {
    /// Writes the first version; others follow from a worker.
    pub fn start(
        path: &Path,
        text: TextSource,
        worker: &WorkerHandle,
    ) -> Result<TextFile, MetricsError> {
        let path = path.to_path_buf();
        let file = Arc::new(MetricsFile { path: path.clone(), text, ended: Mutex::new(false) });
        file.write(false).map_err(|error| MetricsError::Write { path, error })?;
        let (stop, mut stopped) = blockhaul_io::ticket();
        let written = file.clone();
        drop(worker.spawn(move || async move {
            while blockhaul_io::timeout(INTERVAL, &mut stopped).await.is_err() {
                written.clone().write_aside(false).await;
            }
        }));
        Ok(TextFile { file, _stop: stop })
    }

    /// Writes the last version, which stays.
    pub async fn end(self) {
        self.file.write_aside(true).await;
    }
}

struct MetricsFile {
    path: PathBuf,
    text: TextSource,
    /// The last version is written, or being written.
    ended: Mutex<bool>,
}

impl MetricsFile {
    /// Writes a version on a thread that may block; an error is logged.
    async fn write_aside(self: Arc<Self>, last: bool) {
        let written = blockhaul_io::offload(move || {
            if let Err(error) = self.write(last) {
                log::warn!("--metrics: cannot write {}: {}", self.path.display(), plain(&error));
            }
        });
        // Lost only when the program ends.
        let _ = written.await;
    }

    /// Replaces the file by a new version, so that no reader sees a part of one.
    fn write(&self, last: bool) -> std::io::Result<()> {
        let run = self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut ended = self.ended.lock().expect("no panic under this lock");
        if *ended {
            return Ok(());
        }
        *ended = last;
        let text = (self.text)(MetricsWriter::for_run(run));
        // The collector does not read names with this ending.
        let mut fresh = self.path.clone().into_os_string();
        fresh.push(format!(".{}.new", std::process::id()));
        let fresh = PathBuf::from(fresh);
        let _ = fs::remove_file(&fresh);
        let made = OpenOptions::new().write(true).create_new(true).open(&fresh);
        let written = made
            .and_then(|mut file| {
                // The collector has a user of its own, whatever the umask is.
                file.set_permissions(Permissions::from_mode(0o644))?;
                file.write_all(text.as_bytes())
            })
            .and_then(|()| fs::rename(&fresh, &self.path));
        if written.is_err() {
            let _ = fs::remove_file(&fresh);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use blockhaul_io::{Runtime, RuntimeConfig};

    use super::*;

    #[test]
    fn the_last_version_stays_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("night.prom");
        let runtime =
            Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
        let count = AtomicU64::new(0);
        let text: TextSource = Arc::new(move |mut figures| {
            figures.add(
                "a_total",
                "counter",
                "What.",
                &[],
                count.fetch_add(1, Ordering::Relaxed) as f64,
            );
            figures.finish()
        });
        let missing = folder.path().join("no/night.prom");
        let refused = TextFile::start(&missing, text.clone(), &runtime.remote()).err().unwrap();
        assert_eq!(refused.remedy(), Some("create its directory first"), "{refused}");
        let file = TextFile::start(&path, text, &runtime.remote()).unwrap();
        let late = file.file.clone();
        assert!(fs::read_to_string(&path).unwrap().ends_with("a_total{run=\"night\"} 1\n"));
        runtime.block_on(|| file.end());
        late.write(false).unwrap();
        assert!(fs::read_to_string(&path).unwrap().ends_with("a_total{run=\"night\"} 2\n"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left over");
    }
}
