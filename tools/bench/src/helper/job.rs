//! A block job of qemu-storage-daemon, driven over QMP, as one command that can be timed: open both
//! images, copy, close the target, which flushes it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};

use blockhaul_measure::{MeasureError, Result};

/// Without a word for so long, the daemon hangs.
const SILENCE_MAX: Duration = Duration::from_secs(600);

/// What job, between what.
#[derive(Debug, Args)]
pub struct QmpJobArgs {
    /// The daemon's QMP socket
    #[arg(long)]
    qmp: PathBuf,
    /// Which job
    #[arg(long, value_enum)]
    kind: QmpJobKind,
    /// Where it copies from: options of a block device as in --blockdev, without node-name
    #[arg(long)]
    source: String,
    /// Where it copies to
    #[arg(long)]
    target: String,
    /// Backup: let the kernel copy
    #[arg(long)]
    copy_range: bool,
    /// Backup: requests at a time
    #[arg(long)]
    max_workers: Option<u32>,
}

/// Which job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum QmpJobKind {
    Mirror,
    Backup,
}

impl QmpJobArgs {
    /// Runs the job to its end.
    pub fn run(&self) -> Result<()> {
        let mut qmp = QmpConnection::connect(&self.qmp)?;
        for (name, options) in [("source", &self.source), ("target", &self.target)] {
            let mut node = nested(options)?;
            node.insert("node-name".to_owned(), json!(name));
            qmp.execute("blockdev-add", Value::Object(node))?;
        }
        let mut job = json!({
            "job-id": "job", "device": "source", "target": "target", "sync": "full",
            "auto-dismiss": false,
        });
        let command = match self.kind {
            QmpJobKind::Mirror => "blockdev-mirror",
            QmpJobKind::Backup => {
                let mut perf = Map::new();
                if self.copy_range {
                    perf.insert("use-copy-range".to_owned(), json!(true));
                }
                if let Some(workers) = self.max_workers {
                    perf.insert("max-workers".to_owned(), json!(workers));
                }
                if !perf.is_empty() {
                    job["x-perf"] = Value::Object(perf);
                }
                "blockdev-backup"
            }
        };
        qmp.execute(command, job)?;
        loop {
            let event = qmp.event("JOB_STATUS_CHANGE")?;
            match event["data"]["status"].as_str() {
                Some("ready") => drop(qmp.execute("job-complete", json!({ "id": "job" }))?),
                Some("concluded") => break,
                _ => {}
            }
        }
        let jobs = qmp.execute("query-jobs", json!({}))?;
        if let Some(error) = jobs[0]["error"].as_str() {
            return Err(MeasureError::new(format!("the job failed: {error}")));
        }
        qmp.execute("job-dismiss", json!({ "id": "job" }))?;
        // A mirror has put the target in the place of the source, where it has no other user.
        qmp.execute("blockdev-del", json!({ "node-name": "target" }))?;
        Ok(())
    }
}

/// A connection to a QMP monitor.
struct QmpConnection {
    reader: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl QmpConnection {
    fn connect(path: &std::path::Path) -> Result<QmpConnection> {
        let failed = |error: std::io::Error| MeasureError::file("connect to", path, error);
        let stream = UnixStream::connect(path).map_err(failed)?;
        stream.set_read_timeout(Some(SILENCE_MAX)).map_err(failed)?;
        let mut qmp = QmpConnection { reader: BufReader::new(stream), events: Vec::new() };
        qmp.next()?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn next(&mut self) -> Result<Value> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => Err(MeasureError::new("the daemon closed its QMP socket")),
            Ok(_) => serde_json::from_str(&line).map_err(|error| {
                MeasureError::new(format!("the daemon's answer is no JSON: {error}"))
            }),
            Err(error) => {
                Err(MeasureError::new(format!("cannot read from the QMP socket: {error}")))
            }
        }
    }

    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.reader.get_mut().write_all(line.as_bytes()).map_err(|error| {
            MeasureError::new(format!("cannot write to the QMP socket: {error}"))
        })?;
        loop {
            let mut answer = self.next()?;
            if answer.get("event").is_some() {
                self.events.push(answer);
            } else if answer.get("error").is_some() {
                let why = answer["error"]["desc"].as_str().unwrap_or("no reason given");
                return Err(MeasureError::new(format!("{command}: {why}")));
            } else {
                return Ok(answer["return"].take());
            }
        }
    }

    /// The next event of a kind; others are dropped.
    fn event(&mut self, kind: &str) -> Result<Value> {
        loop {
            let event = if self.events.is_empty() { self.next()? } else { self.events.remove(0) };
            if event["event"] == kind {
                return Ok(event);
            }
        }
    }
}

/// `a=b,c.d=on` as nested objects: `{"a": "b", "c": {"d": true}}`.
fn nested(options: &str) -> Result<Map<String, Value>> {
    let mut all = Map::new();
    for option in options.split(',') {
        let wrong = || MeasureError::usage(format!("'{option}' is not NAME=VALUE"));
        let (name, value) = option.split_once('=').ok_or_else(wrong)?;
        let mut place = &mut all;
        let (path, last) = name.rsplit_once('.').map_or((None, name), |(p, l)| (Some(p), l));
        for part in path.into_iter().flat_map(|path| path.split('.')) {
            let inner = place.entry(part.to_owned()).or_insert_with(|| json!({}));
            place = inner.as_object_mut().ok_or_else(wrong)?;
        }
        let value = match value {
            "on" => json!(true),
            "off" => json!(false),
            text => json!(text),
        };
        place.insert(last.to_owned(), value);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_nest() {
        let found = nested("driver=raw,file.driver=nbd,file.cache.direct=on,x=1").unwrap();
        let expected = json!({
            "driver": "raw", "x": "1", "file": { "driver": "nbd", "cache": { "direct": true } },
        });
        assert_eq!(Value::Object(found), expected);
        assert!(nested("driver").is_err() && nested("a=b,a.c=d").is_err());
    }
}
