//! The resource usage of processes, from `/proc` (proc(5)).
//!
//! Processor time is exact: of a command that has ended, what wait4(2) tells; of a server, the
//! processor clock of its process, before and after. The kernel knows the sum to the nanosecond and
//! divides it between user and system by samples. Children that a server has waited for are known
//! in ticks, mostly of 10 ms. Peak memory of a command is the larger of what wait4(2) tells and of
//! the high-water marks (`VmHWM`, shared pages included) of it and its children, looked at every
//! 20 ms; of a server it is that mark in the end. Bytes and calls (`/proc/PID/io`) are those of
//! read, write, sendfile and splice; the kernel does not count socket calls (send, recv) nor
//! io_uring there. All system calls can only be counted from outside (`SystemCallCounter`).

use std::fs;

use serde::{Deserialize, Serialize};

/// What a process, with the children it has reaped, used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time in user mode, in seconds.
    pub user_s: f64,
    /// Processor time in the kernel, in seconds.
    pub system_s: f64,
    /// Peak of resident memory in bytes; 0 if it was never seen.
    pub peak_bytes: u64,
    /// Threads at once, at most, as far as seen.
    pub threads: u64,
    /// Bytes and calls, if the kernel reports them.
    pub io: Option<IoCounters>,
    /// All system calls, where they were counted.
    #[serde(default)]
    pub calls: Option<u64>,
}

/// Bytes and calls of a process; see the module for which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoCounters {
    /// Bytes read, from files or caches.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Calls that read.
    pub reads: u64,
    /// Calls that write.
    pub writes: u64,
}

impl Usage {
    /// Processor time in seconds.
    pub fn cpu_s(&self) -> f64 {
        self.user_s + self.system_s
    }

    /// What a living process has used so far; None if it has ended.
    pub fn of(pid: u32) -> Option<Usage> {
        let times = ProcessorTimes::of(pid)?;
        let mut usage = Usage { io: io_of(pid), ..Usage::default() };
        usage.user_s = times.children_user_s;
        usage.system_s = times.children_system_s;
        for pid in family(pid) {
            let Ok(exact) = blockhaul_os::processor_time(pid) else { continue };
            let exact = exact.as_secs_f64();
            let system = ProcessorTimes::of(pid).map_or(0.0, |times| times.system_share()) * exact;
            usage.system_s += system;
            usage.user_s += exact - system;
        }
        usage.watch(pid);
        Some(usage)
    }

    /// What was used since `before`; peaks are those of all the time.
    pub fn since(&self, before: &Usage) -> Usage {
        let io = match (self.io, before.io) {
            (Some(now), Some(then)) => Some(IoCounters {
                read_bytes: now.read_bytes.saturating_sub(then.read_bytes),
                written_bytes: now.written_bytes.saturating_sub(then.written_bytes),
                reads: now.reads.saturating_sub(then.reads),
                writes: now.writes.saturating_sub(then.writes),
            }),
            _ => None,
        };
        // The sum is exact; how it is divided may seem to go backwards.
        let spent = (self.cpu_s() - before.cpu_s()).max(0.0);
        let system_s = (self.system_s - before.system_s).clamp(0.0, spent);
        Usage { user_s: spent - system_s, system_s, io, ..*self }
    }

    /// Takes over the peaks of a living process and of its children, where the kernel lists them.
    pub fn watch(&mut self, pid: u32) {
        let mut bytes = 0;
        let mut threads = 0;
        for pid in family(pid) {
            if let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) {
                bytes += field(&status, "VmHWM:") << 10;
                threads += field(&status, "Threads:");
            }
        }
        self.peak_bytes = self.peak_bytes.max(bytes);
        self.threads = self.threads.max(threads);
    }
}

/// A process and its children, where the kernel lists them.
fn family(pid: u32) -> Vec<u32> {
    // A shell line has a few children; a loop over more would disturb what is measured.
    const MEMBERS_MAX: usize = 16;
    let mut pids = vec![pid];
    let mut at = 0;
    while at < pids.len() && pids.len() < MEMBERS_MAX {
        let pid = pids[at];
        at += 1;
        if let Ok(children) = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")) {
            pids.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    pids.truncate(MEMBERS_MAX);
    pids
}

/// Bytes and calls of a process that has not been reaped.
pub fn io_of(pid: u32) -> Option<IoCounters> {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    Some(IoCounters {
        read_bytes: field(&text, "rchar:"),
        written_bytes: field(&text, "wchar:"),
        reads: field(&text, "syscr:"),
        writes: field(&text, "syscw:"),
    })
}

/// Processor time of the whole machine that was not idle, in seconds, and of it what a hypervisor
/// gave to others.
pub fn machine_busy() -> (f64, f64) {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<f64> = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .map(|number| number.parse().unwrap_or(0.0))
        .collect();
    let at = |index: usize| ticks.get(index).copied().unwrap_or(0.0) / ticks_per_second();
    // user nice system idle iowait irq softirq steal
    (at(0) + at(1) + at(2) + at(5) + at(6) + at(7), at(7))
}

/// Processor times in `/proc/PID/stat`, in seconds.
#[derive(Debug, Default, PartialEq)]
struct ProcessorTimes {
    user_s: f64,
    system_s: f64,
    children_user_s: f64,
    children_system_s: f64,
}

impl ProcessorTimes {
    fn of(pid: u32) -> Option<ProcessorTimes> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        ProcessorTimes::parse(&text, ticks_per_second())
    }

    /// How much of the time of the process itself was spent in the kernel: from 0 to 1.
    fn system_share(&self) -> f64 {
        let both = self.user_s + self.system_s;
        if both > 0.0 { self.system_s / both } else { 0.0 }
    }

    fn parse(text: &str, ticks_per_second: f64) -> Option<ProcessorTimes> {
        // The second field is a name in parentheses that may hold anything.
        let rest = text.rsplit_once(')')?.1;
        let mut fields = rest.split_whitespace().skip(11).map(|field| field.parse::<f64>().ok());
        let mut next = || Some(fields.next()?? / ticks_per_second);
        Some(ProcessorTimes {
            user_s: next()?,
            system_s: next()?,
            children_user_s: next()?,
            children_system_s: next()?,
        })
    }
}

fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// The number behind a name at the start of a line; 0 if there is none.
fn field(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_do_not_confuse() {
        let text = "12 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 110 220 330 440 20 0\n";
        let times = ProcessorTimes::parse(text, 100.0).unwrap();
        let expected = ProcessorTimes {
            user_s: 1.1,
            system_s: 2.2,
            children_user_s: 3.3,
            children_system_s: 4.4,
        };
        assert_eq!(times, expected);
        assert_eq!(ProcessorTimes::parse("12 (a) S 1", 100.0), None);
    }

    #[test]
    fn differences_keep_the_sum() {
        let before = Usage { user_s: 1.0, system_s: 2.0, ..Usage::default() };
        let now = Usage { user_s: 0.9, system_s: 2.3, ..Usage::default() };
        let spent = now.since(&before);
        assert!((spent.cpu_s() - 0.2).abs() < 1e-9 && spent.user_s >= 0.0, "{spent:?}");
        assert_eq!(before.since(&now).cpu_s(), 0.0);
    }

    #[test]
    fn this_process_uses_something() {
        let before = Usage::of(std::process::id()).unwrap();
        assert!(before.peak_bytes > 100_000 && before.threads >= 1, "{before:?}");
        let text = fs::read("/proc/self/stat").unwrap();
        let after = Usage::of(std::process::id()).unwrap().since(&before);
        let io = after.io.unwrap();
        assert!(io.read_bytes >= text.len() as u64 && io.reads >= 1, "{io:?}");
        assert!(after.user_s < 60.0);
    }
}
