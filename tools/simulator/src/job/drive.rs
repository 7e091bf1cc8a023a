//! Controls a job at random until it has ended.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_io::simulation::{choose, note};
use blockhaul_io::{LostCompletion, Ticket, sleep, timeout};
use blockhaul_jobs::{CopyMode, Job, JobError, JobSettings, JobStatus, MirrorCompletion};
use blockhaul_transfer::NamedOption;

use super::world::JobWorld;

/// Virtual time in which a job ends once nothing goes wrong any more.
const PATIENCE: Duration = Duration::from_secs(4 * 3600);
/// Random actions on one job; then it is only helped to its end.
const ACTIONS: u32 = 30;

/// What is known when a job begins.
pub(super) struct JobBaseline {
    blame: u64,
    starts: u64,
    /// Something may go wrong that nobody counts.
    may_fail: bool,
}

/// How a job went.
pub(super) struct JobResult {
    pub(super) completed: bool,
    /// Its server has ended before.
    pub(super) lost: bool,
}

impl JobWorld {
    /// Call it before a job begins. `may_fail`: the job itself has a reason.
    pub(super) fn before(&self, may_fail: bool) -> JobBaseline {
        let may_fail = may_fail || self.has_bad_network() || self.has_bad_disk;
        JobBaseline { blame: self.blame(), starts: self.starts, may_fail }
    }

    /// Waits until something has begun on the server, which may end meanwhile: `None`; or cannot get
    /// clients to wait.
    pub(super) async fn begun<T>(
        &mut self,
        mut ticket: Ticket<Result<T, JobError>>,
    ) -> Result<Option<T>, String> {
        if self.rng.chance(20) {
            match timeout(self.moment(), &mut ticket).await {
                Ok(ended) => return begun(ended),
                Err(_) => self.calamity().await?,
            }
        }
        begun(ticket.await)
    }

    /// Controls a job until it has ended; `ending`: how a mirror is to end.
    pub(super) async fn drive(
        &mut self,
        job: &Arc<Job>,
        ending: Option<MirrorCompletion>,
        before: &JobBaseline,
    ) -> Result<JobResult, String> {
        let begun = blockhaul_io::now();
        let cancels = !self.is_calm && self.rng.chance(25);
        let mut cancelled = false;
        let mut completing = false;
        let mut actions = 0;
        while !job.is_over() && self.starts == before.starts {
            if blockhaul_io::elapsed(begun) > PATIENCE {
                return Err(format!("a job hangs: {:?}", job.report()));
            }
            sleep(self.moment()).await;
            actions += 1;
            if actions == ACTIONS {
                self.heal();
                self.set_calm(true);
            }
            match self.rng.below(if actions >= ACTIONS { 4 } else { 12 }) {
                0 => drop(job.pause(false)),
                1 => drop(job.limit(0)),
                2 if job.status() == JobStatus::Pending => job.finalize(),
                2 | 3 if matches!(job.status(), JobStatus::Ready | JobStatus::Standby) => {
                    if let Some(ending) = ending.filter(|_| !completing) {
                        job.complete(ending);
                        completing = true;
                    }
                }
                4 => drop(job.pause(true)),
                5 => drop(job.limit(self.rng.between(1 << 18, 4 << 20))),
                6 if cancels && choose("a job is cancelled", 50_000) => {
                    cancelled = true;
                    job.cancel();
                }
                7 => self.change_mode(job),
                8 | 9 => self.calamity().await?,
                _ => {}
            }
        }
        self.set_calm(false);
        if self.starts != before.starts {
            // It may have been complete before.
            let completed = job.outcome().is_some_and(|(error, _)| error.is_none());
            return Ok(JobResult { completed, lost: true });
        }
        let error = job.outcome().and_then(|(error, _)| error);
        note(&format!("the job has ended: {error:?}"));
        let explained = cancelled || before.may_fail || self.blame() != before.blame;
        match error {
            Some(error) if !explained => {
                Err(format!("a job fails without a reason: {error}: {:?}", job.report()))
            }
            error => Ok(JobResult { completed: error.is_none(), lost: false }),
        }
    }

    fn change_mode(&mut self, job: &Job) {
        let modes = [CopyMode::Background, CopyMode::WriteBlocking];
        if let Some(mirror) = job.mirror() {
            mirror.set_copy_mode(*self.rng.pick(&modes));
        }
    }

    /// A time until something happens.
    fn moment(&mut self) -> Duration {
        let most = 1 << self.rng.between(8, 21);
        Duration::from_micros(self.rng.below(most))
    }

    /// How the next job is controlled.
    pub(super) fn settings(&mut self) -> JobSettings {
        use blockhaul_jobs::ErrorPolicy;
        let policies =
            [ErrorPolicy::Report, ErrorPolicy::Ignore, ErrorPolicy::Stop, ErrorPolicy::Enospc];
        let rng = &mut self.rng;
        JobSettings {
            finalized_by_hand: rng.chance(20),
            dismissed_by_hand: rng.chance(20),
            on_source_error: *rng.pick(&policies),
            on_target_error: *rng.pick(&policies),
            speed: if rng.chance(30) { rng.between(1 << 18, 4 << 20) } else { 0 },
            ..JobSettings::default()
        }
    }

    /// Options of the next job's copy.
    pub(super) fn copy_options(&mut self) -> Vec<NamedOption> {
        let rng = &mut self.rng;
        let retries = if self.is_calm { 5 } else { *rng.pick(&[0, 1, 5]) };
        let mut options = vec![
            NamedOption::new("retries", retries),
            NamedOption::new("retry-delay", format_args!("{}ms", rng.pick(&[1, 1000]))),
            NamedOption::new("timeout", format_args!("{}s", rng.pick(&[5, 60]))),
            NamedOption::new("request-size", 4096_u64 << rng.below(6)),
            NamedOption::new("requests", rng.between(1, 16)),
            NamedOption::new("connections", rng.between(1, 4)),
        ];
        if rng.chance(20) {
            options.push(NamedOption::flag("no-extents"));
        }
        options
    }
}

fn begun<T>(ended: Result<Result<T, JobError>, LostCompletion>) -> Result<Option<T>, String> {
    match ended {
        Ok(Ok(begun)) => Ok(Some(begun)),
        Ok(Err(failure)) => {
            let text = failure.to_string();
            note(&text);
            if text.contains("still in flight") { Ok(None) } else { Err(text) }
        }
        Err(LostCompletion) => Ok(None),
    }
}
