//! A process and all that it starts.

use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus};
use std::time::Duration;

use blockhaul_os::ResourceUsage;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

/// A child that leads a process group; what is left of the group is killed when this is dropped.
pub(crate) struct ProcessGroup {
    pub(crate) child: Child,
    handle: OwnedFd,
    reaped: bool,
}

impl ProcessGroup {
    /// Takes a child that leads a group.
    pub(crate) fn new(mut child: Child) -> std::io::Result<ProcessGroup> {
        match rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(handle) => Ok(ProcessGroup { child, handle, reaped: false }),
            Err(error) => {
                // Linux before 5.3, which nothing here supports.
                child.kill()?;
                child.wait()?;
                Err(error.into())
            }
        }
    }

    /// Waits for the end of the child, no longer than this. It is not reaped.
    pub(crate) fn ended_within(&self, time: Duration) -> bool {
        let timeout = Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        let mut fds = [PollFd::new(&self.handle, PollFlags::IN)];
        // An interrupting signal looks as if the time were over; the caller looks again.
        self.reaped || rustix::event::poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
    }

    /// Sends a signal to all of the group.
    pub(crate) fn signal(&self, signal: Signal) {
        if !self.reaped {
            // It may have ended meanwhile; its number is not used again before it is reaped.
            rustix::process::kill_process_group(Pid::from_child(&self.child), signal).ok();
        }
    }

    /// Ends all of the group at once.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Waits for the child's end, ends what it left running, and tells what it cost.
    pub(crate) fn reap(&mut self) -> std::io::Result<(ExitStatus, ResourceUsage)> {
        if self.ended_within(Duration::ZERO) {
            self.kill();
        }
        let ended = blockhaul_os::wait_with_cost(self.child.id());
        self.reaped = true;
        ended
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if !self.reaped {
            self.kill();
            self.child.wait().ok();
        }
    }
}
