//! The jobs of a server: backups and mirrors of exports in use.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use blockhaul_io::FifoLock;
use blockhaul_transfer::CopySetup;

use crate::compression::CompressingLayer;
use crate::export_table::ExportTable;
use crate::job::{Job, JobEvent, JobObserver, JobStart, JobWork};
use crate::job_files::JobRecord;
use crate::job_state::JobStatus;

/// Number of ended jobs that are remembered.
const ENDED_MAX: usize = 100;

/// The jobs of a server: backups and mirrors of its exports.
#[derive(Default)]
pub struct Jobs {
    /// The jobs, also those of earlier servers.
    list: Mutex<VecDeque<Arc<Job>>>,
    last: AtomicU64,
    observer: Arc<OnceLock<JobObserver>>,
    /// The lock of interrupted jobs: one is resumed or forgotten at a time.
    pub(crate) resuming: Arc<FifoLock>,
}

impl Jobs {
    /// The jobs of a server that begins: those of earlier servers.
    pub fn from_records(found: &[Arc<JobRecord>]) -> Jobs {
        let jobs = Jobs::default();
        let last = found.iter().map(|record| record.id()).max().unwrap_or(0);
        jobs.last.store(last, Ordering::Relaxed);
        let list =
            found.iter().map(|record| Job::from_record(record, &jobs.observer)).map(Arc::new);
        jobs.lock().extend(list);
        jobs
    }

    /// The number of a new job.
    pub(crate) fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Calls `observer` from now on. Only the first one counts.
    pub fn observe(&self, observer: JobObserver) {
        let _ = self.observer.set(observer);
    }

    /// Lists a job as running. Its copy, which is begun afterwards, is set up for it.
    pub(crate) fn begin(&self, start: JobStart, work: JobWork, copy: &mut CopySetup) -> Arc<Job> {
        if let Some(record) = &start.record {
            copy.record(record.clone());
        }
        if start.settings.compress {
            copy.put_over_target(Arc::new(CompressingLayer));
        }
        if start.errors.watches_target() {
            copy.put_over_target(start.errors.over_target());
        }
        let control = copy.control();
        if start.settings.speed > 0 {
            control.limit(start.settings.speed);
        }
        let errors = start.errors.clone();
        let id = start.record.as_ref().map_or_else(|| self.next(), |record| record.id());
        let job = Arc::new(Job::new(id, start, work, control, &self.observer));
        errors.set_job(&job);
        self.remember(job.clone());
        job.send_event(&JobEvent::Status(JobStatus::Created));
        job.enter(JobStatus::Running);
        job
    }

    fn remember(&self, job: Arc<Job>) {
        let mut list = self.lock();
        // The one that this continues.
        list.retain(|other| other.id() != job.id());
        let is_past = |job: &Arc<Job>| job.is_over() && job.resumable().is_none();
        if list.iter().filter(|job| is_past(job)).count() > ENDED_MAX
            && let Some(place) = list.iter().position(is_past)
        {
            list.remove(place);
        }
        list.push_back(job);
    }

    /// All jobs, in the order in which they began.
    pub fn all(&self) -> Vec<Arc<Job>> {
        self.lock().iter().cloned().collect()
    }

    /// The job of this number.
    pub fn find(&self, id: u64) -> Option<Arc<Job>> {
        self.lock().iter().find(|job| job.id() == id).cloned()
    }

    /// The job of this name that was not dismissed.
    pub fn named(&self, name: &str) -> Option<Arc<Job>> {
        let list = self.lock();
        list.iter().find(|job| job.status() != JobStatus::Null && job.name() == name).cloned()
    }

    /// Ends the jobs and the clients of a server that stops, and keeps the bitmaps of its exports.
    /// `clients` ends the clients; returns its result.
    pub async fn end_service<T>(&self, table: &ExportTable, clients: impl Future<Output = T>) -> T {
        table.close().await;
        self.stop().await;
        let ended = clients.await;
        // What devices hold is marked already.
        table.keep_all_bitmaps().await;
        ended
    }

    /// Ends all jobs and waits until they have ended.
    async fn stop(&self) {
        let jobs: Vec<_> = self.all().into_iter().filter(|job| !job.is_over()).collect();
        for job in &jobs {
            if job.interrupt() {
                log::warn!("the server stops: job {} is interrupted", job.id());
            } else {
                log::warn!("the server stops: job {} is cancelled", job.id());
            }
            job.cancel();
        }
        // All of them together: each may wait for a target that does not answer.
        for job in jobs {
            job.over().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Job>>> {
        self.list.lock().expect("no panic under this lock")
    }
}
