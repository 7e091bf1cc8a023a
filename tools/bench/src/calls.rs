//! System calls of a server, counted by perf(1).

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::process::{ProcessContext, TimedServer};

/// perf counts after this time.
const COUNTS_AFTER: Duration = Duration::from_millis(300);

/// System calls that are counted from outside, by perf(1), which makes each of them dearer. Dropping it
/// ends the counting.
pub struct SystemCallCounter {
    child: Child,
    log: PathBuf,
}

impl ProcessContext<'_> {
    /// Begins to count the system calls of a server; `None` where that cannot be done: without perf, or
    /// without the permission.
    pub fn count_calls(&self, server: &TimedServer) -> Option<SystemCallCounter> {
        let log = self.logs.join(format!("calls-{}", server.name.replace('/', "_")));
        let child = Command::new(self.places.find("perf")?)
            .args(["stat", "--field-separator", ",", "--event", "raw_syscalls:sys_enter"])
            .arg("--output")
            .arg(&log)
            .arg("--pid")
            .arg(server.group.child.id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .ok()?;
        let mut calls = SystemCallCounter { child, log };
        // It does not say when it has begun.
        std::thread::sleep(COUNTS_AFTER);
        matches!(calls.child.try_wait(), Ok(None)).then_some(calls)
    }
}

impl SystemCallCounter {
    /// Ends the counting; `None` if nothing was counted after all.
    pub fn end(mut self) -> Option<u64> {
        // perf loses a signal that comes just before it waits for one.
        while matches!(self.child.try_wait(), Ok(None)) {
            rustix::process::kill_process(Pid::from_child(&self.child), Signal::INT).ok()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        counted(&fs::read_to_string(&self.log).ok()?)
    }
}

impl Drop for SystemCallCounter {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }
}

/// The number in what perf writes: `12345,,raw_syscalls:sys_enter,...`.
fn counted(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("sys_enter"))?;
    line.split(',').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_perf_writes_is_understood() {
        assert_eq!(counted("# started\n\n1234,,raw_syscalls:sys_enter,5,100.00,,\n"), Some(1234));
        assert_eq!(counted("<not counted>,,raw_syscalls:sys_enter,0,0.00,,\n"), None);
        assert_eq!(counted(""), None);
    }
}
