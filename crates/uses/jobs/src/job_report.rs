//! Reports about jobs for the control socket.

use std::time::Duration;

use blockhaul_catalog::rounded_size;
use blockhaul_control::{BackupFigures, JobFigures, JobReport};
use blockhaul_snapshot::SnapshotStats;
use blockhaul_transfer::CopyReport;

use crate::job::{Job, JobEnd, JobWork};
use crate::job_state::JobStatus;

impl Job {
    /// The result of a copy in one sentence.
    pub(crate) fn summary(&self, report: &CopyReport, after: Duration) -> String {
        let verb = if self.mirror().is_some() { "mirrored" } else { "backed up" };
        let copied = rounded_size(report.summary.size);
        let part = match self.disk_size() {
            disk if disk > report.summary.size => format!(" of {}", rounded_size(disk)),
            _ => String::new(),
        };
        let verified = if report.verified > 0 { ", verified" } else { "" };
        format!("{verb} {copied}{part} in {:.1} s{verified}", after.as_secs_f64())
    }

    fn data_rate(&self, data: u64) -> u64 {
        if self.is_over() {
            return 0;
        }
        self.pace.lock().expect("no panic under this lock").note(data)
    }

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

    /// The report about the job, for the control socket.
    pub fn report(&self) -> JobReport {
        let now = self.progress.snapshot();
        let ended = self.ended.get();
        let seconds = ended.map_or_else(|| blockhaul_io::elapsed(self.started), |end| end.after);
        let mut report = JobReport {
            job: self.id(),
            name: self.name(),
            kind: self.kind(),
            export: self.export().to_string(),
            target: self.target().to_string(),
            state: self.state(),
            io_status: self.io_status(),
            done: now.done(),
            total: now.total,
            data_rate: self.data_rate(now.data),
            seconds: seconds.as_secs_f64(),
            end_time: ended.and_then(|end| end.time),
            summary: ended.and_then(|end| end.summary.clone()),
            result: ended.and_then(|end| end.result.as_ref().ok()).cloned(),
            error: self.failure().map(ToString::to_string),
            figures: self.figures(),
        };
        if let JobWork::Interrupted(record) = &self.work {
            report.export = record.export();
            report.error = Some(record.interruption());
        }
        report
    }

    fn figures(&self) -> JobFigures {
        match &self.work {
            JobWork::Interrupted(record) => JobFigures::Interrupted(record.figures()),
            JobWork::Mirror(mirror) => JobFigures::Mirror(mirror.figures()),
            JobWork::Backup(snapshot) => {
                let SnapshotStats { saved, kept, waits, longest_wait, .. } = snapshot.stats();
                JobFigures::Backup(BackupFigures {
                    released: self.progress.discarded().0,
                    saved,
                    kept,
                    writes_delayed: waits,
                    longest_delay: longest_wait.as_secs_f64(),
                })
            }
        }
    }
}
