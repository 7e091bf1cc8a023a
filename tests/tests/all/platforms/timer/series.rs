//! Metrics files of a run, read at regular times as a scrape reads them, and the test of the alert rules that is made
//! of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// Time between two samples.
const INTERVAL: Duration = Duration::from_secs(5);

/// The directory of the metrics files, as the units name it.
pub const DIRECTORY: &str = "/var/lib/prometheus/node-exporter";

/// Values of each series, by the number of the sample.
type Series = BTreeMap<String, BTreeMap<u64, f64>>;

/// A thread that reads the metrics files.
pub struct Recorder {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    checks: Vec<(u64, Vec<Alert>)>,
}

struct Shared {
    dir: PathBuf,
    began: Instant,
    /// Seconds since 1970 of sample 0, which is time 0 of the test of the rules.
    zero: f64,
    is_over: AtomicBool,
    /// Number of samples, and their series.
    samples: Mutex<(u64, Series)>,
}

/// A critical alert about a command that fires.
#[derive(Debug, Clone)]
pub struct Alert {
    pub name: &'static str,
    pub run: &'static str,
    pub command: &'static str,
    pub summary: &'static str,
    pub description: Option<&'static str>,
}

impl Recorder {
    /// Begins to read the files of a directory.
    pub fn begin(dir: PathBuf) -> Recorder {
        let shared = Arc::new(Shared {
            dir,
            began: Instant::now(),
            zero: since_1970(SystemTime::now()),
            is_over: AtomicBool::new(false),
            samples: Mutex::default(),
        });
        let of_thread = shared.clone();
        let thread = Some(thread::spawn(move || of_thread.record()));
        Recorder { shared, thread, checks: Vec::new() }
    }

    /// Waits for the next sample; exactly these alerts have to fire then.
    pub fn expect(&mut self, alerts: &[Alert]) {
        let now = self.samples();
        while self.samples() == now {
            thread::sleep(Duration::from_millis(50));
        }
        self.checks.push((now, alerts.to_vec()));
    }

    fn samples(&self) -> u64 {
        self.shared.samples.lock().unwrap().0
    }

    /// The test of these rules in the format of promtool.
    pub fn rule_test(&self, rules: &Path) -> Value {
        let samples = self.shared.samples.lock().unwrap();
        let series = samples.1.iter().map(|(name, values)| {
            let value = |at| values.get(&at).map_or("_".into(), f64::to_string);
            let values: Vec<String> = (0..samples.0).map(value).collect();
            json!({ "series": name, "values": values.join(" ") })
        });
        let interval = format!("{}s", INTERVAL.as_secs());
        let (firing, alerts): (Vec<_>, Vec<_>) = self
            .checks
            .iter()
            .map(|(at, alerts)| (firing(*at, alerts), annotated(*at, alerts)))
            .unzip();
        json!({
            "rule_files": [rules],
            "evaluation_interval": interval,
            "tests": [{
                "interval": interval,
                "input_series": series.collect::<Vec<_>>(),
                "promql_expr_test": firing,
                "alert_rule_test": alerts.concat(),
            }],
        })
    }

    /// Ends the thread.
    pub fn end(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

/// The alerts that fire in a sample, and no others.
fn firing(at: u64, alerts: &[Alert]) -> Value {
    let sample = |alert: &Alert| {
        let labels = format!("{{alertname=\"{}\", run=\"{}\"}}", alert.name, alert.run);
        json!({ "labels": labels, "value": 1 })
    };
    json!({
        "expr": "count by (alertname, run) (ALERTS{alertstate=\"firing\"})",
        "eval_time": eval_time(at),
        "exp_samples": alerts.iter().map(sample).collect::<Vec<_>>(),
    })
}

/// The same alerts with what they tell.
fn annotated(at: u64, alerts: &[Alert]) -> Vec<Value> {
    let one = |alert: &Alert| {
        let mut annotations = json!({ "summary": alert.summary });
        if let Some(description) = alert.description {
            annotations["description"] = description.into();
        }
        let labels = json!({
            "severity": "critical", "instance": "host", "run": alert.run, "command": alert.command,
        });
        json!({
            "eval_time": eval_time(at),
            "alertname": alert.name,
            "exp_alerts": [{ "exp_labels": labels, "exp_annotations": annotations }],
        })
    };
    alerts.iter().map(one).collect()
}

fn eval_time(at: u64) -> String {
    format!("{}s", at * INTERVAL.as_secs())
}

impl Shared {
    fn record(&self) {
        for at in 0_u32.. {
            let due = self.began + at * INTERVAL;
            while Instant::now() < due {
                if self.is_over.load(Ordering::Relaxed) {
                    return;
                }
                thread::sleep(Duration::from_millis(20));
            }
            let found = self.read();
            let mut samples = self.samples.lock().unwrap();
            for (name, value) in found {
                samples.1.entry(name).or_default().insert(at.into(), value);
            }
            samples.0 = u64::from(at) + 1;
        }
    }

    /// What a scrape of node_exporter finds.
    fn read(&self) -> Vec<(String, f64)> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            let Ok(text) = fs::read_to_string(entry.path()) else { continue };
            if !name.ends_with(".prom") {
                continue;
            }
            found.extend(text.lines().filter_map(|line| self.series(line)));
            let time = since_1970(entry.metadata().unwrap().modified().unwrap()) - self.zero;
            let file = format!("{DIRECTORY}/{name}");
            let series =
                format!("node_textfile_mtime_seconds{{instance=\"host\",file=\"{file}\"}}");
            found.push((series, time));
        }
        found
    }

    /// Series and value of a line, with times from the first sample on.
    fn series(&self, line: &str) -> Option<(String, f64)> {
        let (name, value) = line.rsplit_once(' ').filter(|_| !line.starts_with('#'))?;
        let value: f64 = value.parse().ok()?;
        let (metric, labels) = name.split_once('{').unwrap_or((name, "}"));
        let zero = if metric.ends_with("_time_seconds") { self.zero } else { 0.0 };
        Some((format!("{metric}{{instance=\"host\",{labels}"), value - zero))
    }
}

fn since_1970(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}
