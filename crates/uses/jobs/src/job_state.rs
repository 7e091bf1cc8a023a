//! The states of jobs, and the requests that each state accepts: those of QEMU's jobs, which clients
//! of its monitor protocol rely on.
//!
//! ```text
//! created - running - waiting - pending - concluded - null
//!             | |        |         |          |
//!        paused ready -- aborting -+----------+
//!                |
//!             standby (a ready job that is paused)
//! ```

/// The state of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobStatus {
    /// The job has not started.
    Created,
    /// The job copies.
    Running,
    /// The job was paused, on request or after an error.
    Paused,
    /// A mirror could complete.
    Ready,
    /// A mirror that could complete was paused.
    Standby,
    /// The job has copied everything, and waits for the other jobs of its group.
    Waiting,
    /// The job waits until it is finalized.
    Pending,
    /// The job fails, or was cancelled.
    Aborting,
    /// The job has ended.
    Concluded,
    /// The job was dismissed.
    Null,
}

/// A request for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobCommand {
    /// End it soon.
    Cancel,
    /// Start no more requests.
    Pause,
    /// Continue.
    Resume,
    /// Change its rate.
    SetSpeed,
    /// Change how a mirror copies.
    Change,
    /// End a mirror.
    Complete,
    /// End a pending job.
    Finalize,
    /// Forget an ended job.
    Dismiss,
}

impl JobStatus {
    /// Its name on the control socket and in the monitor protocol.
    pub fn name(self) -> &'static str {
        match self {
            JobStatus::Created => "created",
            JobStatus::Running => "running",
            JobStatus::Paused => "paused",
            JobStatus::Ready => "ready",
            JobStatus::Standby => "standby",
            JobStatus::Waiting => "waiting",
            JobStatus::Pending => "pending",
            JobStatus::Aborting => "aborting",
            JobStatus::Concluded => "concluded",
            JobStatus::Null => "null",
        }
    }

    /// Whether a job in this state accepts a request.
    pub fn accepts(self, verb: JobCommand) -> bool {
        use JobStatus::{Concluded, Created, Paused, Pending, Ready, Running, Standby, Waiting};
        let active = matches!(self, Created | Running | Paused | Ready | Standby);
        match verb {
            JobCommand::Cancel => active || matches!(self, Waiting | Pending),
            JobCommand::Pause | JobCommand::Resume | JobCommand::SetSpeed | JobCommand::Change => {
                active
            }
            JobCommand::Complete => matches!(self, Ready | Standby),
            JobCommand::Finalize => self == Pending,
            JobCommand::Dismiss => self == Concluded,
        }
    }

    /// Whether a job can change from this state to another one.
    pub fn leads_to(self, next: JobStatus) -> bool {
        use JobStatus::{
            Aborting, Concluded, Created, Null, Paused, Pending, Ready, Running, Standby, Waiting,
        };
        match self {
            Created => matches!(next, Running | Aborting | Null),
            Running => matches!(next, Paused | Ready | Waiting | Aborting),
            Paused => matches!(next, Running | Waiting | Aborting),
            Ready => matches!(next, Standby | Waiting | Aborting),
            Standby => matches!(next, Ready | Waiting | Aborting),
            Waiting => matches!(next, Pending | Aborting),
            Pending => matches!(next, Aborting | Concluded),
            Aborting => next == Concluded,
            Concluded => next == Null,
            Null => false,
        }
    }

    /// Whether the work of the job has ended.
    pub fn is_over(self) -> bool {
        matches!(self, JobStatus::Concluded | JobStatus::Null)
    }
}

impl JobCommand {
    /// Its name in errors.
    pub fn name(self) -> &'static str {
        match self {
            JobCommand::Cancel => "cancel",
            JobCommand::Pause => "pause",
            JobCommand::Resume => "resume",
            JobCommand::SetSpeed => "set-speed",
            JobCommand::Change => "change",
            JobCommand::Complete => "complete",
            JobCommand::Finalize => "finalize",
            JobCommand::Dismiss => "dismiss",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [JobStatus; 10] = [
        JobStatus::Created,
        JobStatus::Running,
        JobStatus::Paused,
        JobStatus::Ready,
        JobStatus::Standby,
        JobStatus::Waiting,
        JobStatus::Pending,
        JobStatus::Aborting,
        JobStatus::Concluded,
        JobStatus::Null,
    ];

    #[test]
    fn every_state_leads_to_the_end_and_none_back_from_it() {
        for from in ALL {
            let mut reached = vec![from];
            let mut at = 0;
            while let Some(&status) = reached.get(at) {
                let next = ALL.into_iter().filter(|next| status.leads_to(*next));
                let fresh: Vec<_> = next.filter(|next| !reached.contains(next)).collect();
                reached.extend(fresh);
                at += 1;
            }
            assert!(reached.contains(&JobStatus::Null), "{from:?}");
            assert!(!from.is_over() || !reached.contains(&JobStatus::Running), "{from:?}");
        }
    }

    #[test]
    fn an_ended_job_accepts_only_its_dismissal() {
        let verbs = [
            JobCommand::Cancel,
            JobCommand::Pause,
            JobCommand::Resume,
            JobCommand::SetSpeed,
            JobCommand::Complete,
        ];
        for status in [JobStatus::Aborting, JobStatus::Concluded, JobStatus::Null] {
            assert!(verbs.iter().all(|verb| !status.accepts(*verb)), "{status:?}");
        }
        assert!(JobStatus::Concluded.accepts(JobCommand::Dismiss));
        assert!(!JobStatus::Running.accepts(JobCommand::Dismiss));
    }
}
