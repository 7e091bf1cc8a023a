//! The metrics of a command about backups: how it ended, also if it has not begun to copy, and what its stores have.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use serde_json::{Value, json};

use crate::copy_figures::copy_text;
use crate::copy_state::{CommandEnd, CopyObserver};
use crate::events::StateSource;
use crate::text::{MetricsWriter, TextSource, seconds_since_1970};

/// Figures of a store of backups.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoreSample {
    /// The directory of the store.
    pub store: String,
    /// Number of points.
    pub points: u64,
    /// Time of the newest point, in seconds since 1970; `None` without points.
    pub newest: Option<u64>,
    /// Bytes that the files of the points occupy.
    pub bytes: u64,
}

/// A function that reads the figures of stores.
pub type StoreSource = Box<dyn Fn() -> Vec<StoreSample> + Send + Sync>;

/// A run of a command about backups, whose metrics are published.
pub struct BackupRun {
    command: &'static str,
    began: f64,
    stores: Mutex<StoreSource>,
    copies: OnceLock<(Arc<CopyObserver>, TextSource)>,
    /// How the run ended, and when.
    end: OnceLock<(CommandEnd, f64)>,
}

impl BackupRun {
    /// A run of this command that begins.
    pub fn begin(command: &'static str) -> Arc<BackupRun> {
        Arc::new(BackupRun {
            command,
            began: seconds_since_1970(),
            stores: Mutex::new(Box::new(Vec::new)),
            copies: OnceLock::new(),
            end: OnceLock::new(),
        })
    }

    /// Reads the figures of stores with `source` from now on.
    pub fn set_stores(&self, source: StoreSource) {
        *self.stores.lock().expect("no panic under this lock") = source;
    }

    /// Publishes the metrics of these copies, too. Only the first ones count.
    pub fn set_copies(&self, observer: &Arc<CopyObserver>) {
        let _ = self.copies.set((observer.clone(), copy_text(observer.clone())));
    }

    /// Notes how the run ended. Only the first end counts.
    pub fn finish(&self, end: CommandEnd) {
        let _ = self.end.set((end, seconds_since_1970()));
    }

    /// The source of the metrics.
    pub fn text(self: &Arc<BackupRun>) -> TextSource {
        let run = self.clone();
        Arc::new(move |mut figures| {
            run.add(&mut figures);
            match run.copies.get() {
                Some((_, copies)) => copies(figures),
                None => figures.finish(),
            }
        })
    }

    /// The source of the state: that of the copies, once there are some.
    pub fn state(self: &Arc<BackupRun>) -> StateSource {
        let run = self.clone();
        Arc::new(move || match run.copies.get() {
            Some((copies, _)) => copies.view().json(),
            None => Value::Null,
        })
    }

    fn add(&self, figures: &mut MetricsWriter) {
        let labels = [("command", self.command)];
        let mut one = |name: &str, help: &str, value: f64| {
            figures.add(&format!("blockhaul_backup_{name}"), "gauge", help, &labels, value);
        };
        one("start_time_seconds", "When the command began, in seconds since 1970.", self.began);
        let end = self.end.get();
        one("finished", "Whether the command has ended.", f64::from(u8::from(end.is_some())));
        if let Some((end, time)) = end {
            one("end_time_seconds", "When the command ended, in seconds since 1970.", *time);
            let help = "Exit status of the command; 0 for success.";
            one("exit_status", help, f64::from(end.status));
        }
        let stores = (self.stores.lock().expect("no panic under this lock"))();
        type Figure = (&'static str, &'static str, fn(&StoreSample) -> Option<u64>);
        let each: [Figure; 3] = [
            ("points", "Number of points of a store.", |store| Some(store.points)),
            ("bytes", "Bytes that the points of a store occupy.", |store| Some(store.bytes)),
            (
                "newest_point_time_seconds",
                "When the newest point of a store was made, in seconds since 1970.",
                |store| store.newest,
            ),
        ];
        for (name, help, value) in each {
            let name = format!("blockhaul_backup_store_{name}");
            for (store, value) in stores.iter().filter_map(|store| Some((store, value(store)?))) {
                let labels = [("store", store.store.as_str())];
                figures.add(&name, "gauge", help, &labels, value as f64);
            }
        }
    }

    /// A result for programs with how the command ended.
    pub fn result(&self, mut result: Value) -> Value {
        if !result.is_object() {
            result = json!({});
        }
        result["command"] = self.command.into();
        if let Some((end, _)) = self.end.get() {
            result["exit_status"] = end.status.into();
            result["error"] = end.error.as_deref().into();
        }
        result
    }
}

impl fmt::Debug for BackupRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a run of {}", self.command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_fails_early_has_an_end_and_its_stores() {
        let run = BackupRun::begin("pull");
        let text = run.text();
        let store = |store: &str, newest| StoreSample {
            store: store.to_string(),
            points: 2,
            newest,
            bytes: 9,
        };
        run.set_stores(Box::new(move || vec![store("a", Some(5)), store("b", None)]));
        let running = text(MetricsWriter::default());
        assert!(running.contains("blockhaul_backup_finished{command=\"pull\"} 0\n"), "{running}");
        assert!(!running.contains("exit_status"), "{running}");
        run.finish(CommandEnd { status: 3, error: Some("gone".into()) });
        run.finish(CommandEnd::default());
        let ended = text(MetricsWriter::default());
        for line in [
            "blockhaul_backup_exit_status{command=\"pull\"} 3",
            "blockhaul_backup_store_points{store=\"b\"} 2",
            "blockhaul_backup_store_newest_point_time_seconds{store=\"a\"} 5",
        ] {
            assert!(ended.lines().any(|each| each == line), "{line}: {ended}");
        }
        assert!(!ended.contains("time_seconds{store=\"b\""), "{ended}");
        let result = run.result(Value::Null);
        assert_eq!(result, json!({ "command": "pull", "exit_status": 3, "error": "gone" }));
    }
}
