//! The metrics of a server, for `--metrics` and `ctl metrics`.

use std::sync::{Arc, Weak};

use blockhaul_catalog::StorageFigure;
use blockhaul_jobs::{ExportTable, Job, Jobs};
use blockhaul_metrics::{JobSample, MetricsWriter, TextSource as Text, add_jobs, add_server};
use blockhaul_server::Server;

use super::control::{JobReply, reply};
use crate::metrics::BuildInfo as _;

/// Makes the metrics of this server; none when it has ended. Does not keep its exports open.
pub fn text(server: &Arc<Server>, table: &Arc<ExportTable>, jobs: &Arc<Jobs>) -> Text {
    let server: Weak<Server> = Arc::downgrade(server);
    let table = Arc::downgrade(table);
    let jobs = Arc::downgrade(jobs);
    Arc::new(move |figures| match (server.upgrade(), table.upgrade(), jobs.upgrade()) {
        (Some(server), Some(table), Some(jobs)) => write(figures, &server, &table, &jobs),
        _ => figures.finish(),
    })
}

/// Adds the metrics of a server, its jobs and its storage.
pub fn write(
    mut figures: MetricsWriter,
    server: &Server,
    table: &ExportTable,
    jobs: &Jobs,
) -> String {
    figures.build_info();
    add_server(&mut figures, &server.sums());
    add_jobs(&mut figures, &jobs.all().iter().map(|job| sample(job)).collect::<Vec<_>>());
    for StorageFigure { name, help, labels, value } in table.figures() {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        let labels: Vec<_> = labels.iter().map(|(key, value)| (*key, value.as_str())).collect();
        figures.add(&format!("blockhaul_{name}"), kind, help, &labels, value);
    }
    figures.finish()
}

/// The figures of a job.
fn sample(job: &Job) -> JobSample {
    let JobReply { report, exit_status } = reply(job);
    JobSample {
        number: report.job,
        kind: report.kind,
        export: report.export,
        state: report.state,
        done: report.done,
        total: report.total,
        data_rate: report.data_rate,
        exit_status,
        end_time: report.end_time,
    }
}
