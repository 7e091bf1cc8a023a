//! Reports about jobs for the control socket.

use serde_json::{Value, json};

use crate::job::{Job, JobEnd, JobWork};
use crate::job_state::JobStatus;

impl Job {
    fn state(&self) -> &'static str {
        match (self.ended.get(), self.status()) {
            (Some(JobEnd { result: Ok(_), .. }), _) => "completed",
            (Some(JobEnd { cancelled: true, .. }), _) => "cancelled",
            (Some(_), _) if self.resumable().is_some() => "interrupted",
            (Some(_), _) if matches!(self.work, JobWork::Interrupted(_)) => "cancelled",
            (Some(_), _) => "failed",
            (None, JobStatus::Paused | JobStatus::Standby) => "paused",
            (None, JobStatus::Pending) => "pending",
            (None, _) => match self.mirror() {
                Some(mirror) if mirror.is_completing() => "completing",
                Some(mirror) if mirror.is_ready() => "ready",
                _ => "running",
            },
        }
    }

    /// For the control socket.
    pub fn described(&self) -> Value {
        let now = self.progress.snapshot();
        let ended = self.ended.get();
        let seconds = ended.map_or_else(|| blockhaul_io::elapsed(self.started), |end| end.after);
        let mut described = json!({
            "job": self.id(),
            "name": self.name(),
            "type": self.kind(),
            "export": self.export(),
            "target": self.target(),
            "state": self.state(),
            "io_status": self.io_status(),
            "done": now.done(),
            "total": now.total,
            "seconds": seconds.as_secs_f64(),
            "result": ended.and_then(|end| end.result.as_ref().ok()),
            "error": ended.and_then(|end| end.result.as_ref().err()).map(ToString::to_string),
        });
        let more = match &self.work {
            JobWork::Interrupted(record) => record.described(),
            JobWork::Mirror(mirror) => mirror.described(),
            JobWork::Backup(moment) => {
                let stats = moment.stats();
                json!({
                    "released": self.progress.discarded().0,
                    "saved": stats.saved,
                    "kept": stats.kept,
                    "writes_delayed": stats.waits,
                    "longest_delay": stats.longest_wait.as_secs_f64(),
                })
            }
        };
        if let (Value::Object(described), Value::Object(more)) = (&mut described, more) {
            described.extend(more);
        }
        described
    }
}
