//! The metrics of the jobs of a server.

use crate::text::MetricsWriter;

/// Figures of a job of a server.
#[derive(Debug, Clone, PartialEq)]
pub struct JobSample {
    /// Number of the job.
    pub number: u64,
    /// `backup` or `mirror`.
    pub kind: &'static str,
    /// Name of the export that is copied.
    pub export: String,
    /// State of the job, in a word.
    pub state: &'static str,
    /// Bytes that are done.
    pub done: u64,
    /// Bytes that are to be done, as far as known.
    pub total: u64,
    /// Bytes of data that the job writes per second; 0 when it has ended.
    pub data_rate: u64,
    /// Exit status of a command that ends as the job did, from 0 to 255; `None`: it has not ended.
    pub exit_status: Option<u8>,
    /// Time at which the job ended, in seconds since 1970.
    pub end_time: Option<f64>,
}

impl JobSample {
    fn labelled<T>(&self, add: impl FnOnce(&[(&str, &str)]) -> T) -> T {
        let number = self.number.to_string();
        add(&[("job_id", &number), ("type", self.kind), ("export", &self.export)])
    }
}

/// Adds the metrics of jobs. Metrics of one name are consecutive. The label is `job_id`, because Prometheus has its
/// own label `job`.
pub fn add_jobs(figures: &mut MetricsWriter, jobs: &[JobSample]) {
    let help = "State of a job, as the label state; the value is 1.";
    for job in jobs {
        job.labelled(|labels| {
            let labels = [labels, &[("state", job.state)]].concat();
            figures.add("blockhaul_serve_job_state", "gauge", help, &labels, 1.0);
        });
    }
    type Figure = (&'static str, &'static str, fn(&JobSample) -> Option<f64>);
    let each: [Figure; 5] = [
        ("done_bytes", "Bytes that a job has done.", |job| Some(job.done as f64)),
        ("total_bytes", "Bytes that a job has to do; 0 while unknown.", |job| {
            Some(job.total as f64)
        }),
        ("data_bytes_per_second", "Bytes of data that a job writes per second.", |job| {
            Some(job.data_rate as f64)
        }),
        ("exit_status", "Exit status of a job that has ended; 0 for success.", |job| {
            job.exit_status.map(f64::from)
        }),
        ("end_time_seconds", "When a job ended, in seconds since 1970.", |job| job.end_time),
    ];
    for (name, help, value) in each {
        let name = format!("blockhaul_serve_job_{name}");
        for (job, value) in jobs.iter().filter_map(|job| Some((job, value(job)?))) {
            job.labelled(|labels| figures.add(&name, "gauge", help, labels, value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_that_run_have_no_end() {
        let failed = JobSample {
            number: 1,
            kind: "backup",
            export: "a\"".into(),
            state: "failed",
            done: 5,
            total: 9,
            data_rate: 0,
            exit_status: Some(6),
            end_time: Some(1.5),
        };
        let running = JobSample {
            number: 2,
            kind: "mirror",
            state: "running",
            data_rate: 7,
            exit_status: None,
            end_time: None,
            ..failed.clone()
        };
        let mut figures = MetricsWriter::default();
        add_jobs(&mut figures, &[failed, running]);
        let text = figures.finish();
        let labels = r#"{job_id="1",type="backup",export="a\"""#;
        for line in [
            format!("blockhaul_serve_job_state{labels},state=\"failed\"}} 1"),
            format!("blockhaul_serve_job_done_bytes{labels}}} 5"),
            format!("blockhaul_serve_job_exit_status{labels}}} 6"),
            format!("blockhaul_serve_job_end_time_seconds{labels}}} 1.5"),
            r#"blockhaul_serve_job_data_bytes_per_second{job_id="2",type="mirror",export="a\""} 7"#
                .to_string(),
        ] {
            assert!(text.lines().any(|each| each == line), "{line}: {text}");
        }
        assert!(!text.contains("_exit_status{job_id=\"2\""), "{text}");
        assert_eq!(text.matches("# TYPE").count(), 6, "{text}");
    }
}
