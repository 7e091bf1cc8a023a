//! Exact resource usage of processes: the two system calls for it that the safe crates do not
//! cover.
#![expect(unsafe_code, reason = "system calls with results in memory")]

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

/// The resource usage of a process that has ended, and of the children that it had waited for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResourceUsage {
    /// Processor time in user mode. The kernel knows the sum of both times to the nanosecond and
    /// divides it between user and system by samples.
    pub user: Duration,
    /// Processor time in the kernel.
    pub system: Duration,
    /// Peak of resident memory in bytes: of the process or of one of those children, whichever was
    /// larger.
    pub peak: u64,
}

/// Waits for a child to end, reaps it, and returns its resource usage (wait4(2)). `pid` must be a
/// child that no other code waits for.
pub fn wait_with_cost(pid: u32) -> io::Result<(ExitStatus, ResourceUsage)> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    loop {
        // SAFETY: both pointers are to live memory of the right types, which the kernel writes only
        // during the call.
        let reaped = unsafe { libc::wait4(pid, &mut status, 0, usage.as_mut_ptr()) };
        if reaped == pid {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: all zeroes is a valid value of this plain structure of numbers, and the kernel has
    // filled it.
    let usage = unsafe { usage.assume_init() };
    let cost = ResourceUsage {
        user: time(usage.ru_utime.tv_sec, usage.ru_utime.tv_usec),
        system: time(usage.ru_stime.tv_sec, usage.ru_stime.tv_usec),
        // Linux counts in units of 1024 bytes.
        peak: u64::try_from(usage.ru_maxrss).unwrap_or(0) << 10,
    };
    Ok((ExitStatus::from_raw(status), cost))
}

/// Processor time that a living process has used so far, of all its threads, also those that have
/// ended (clock_getcpuclockid(3)).
pub fn processor_time(pid: u32) -> io::Result<Duration> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    let mut clock = 0;
    // SAFETY: the pointer is to live memory of the right type.
    let error = unsafe { libc::clock_getcpuclockid(pid, &mut clock) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    let mut spent = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to live memory of the right type; a clock of a process that has ended
    // meanwhile is an error.
    if unsafe { libc::clock_gettime(clock, &mut spent) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(spent.tv_sec).unwrap_or(0);
    Ok(Duration::new(seconds, u32::try_from(spent.tv_nsec).unwrap_or(0)))
}

/// PR_SET_IO_FLUSHER (linux/prctl.h).
const SET_IO_FLUSHER: libc::c_int = 57;

/// Marks this thread, and those that it starts later, as needed by the kernel for writing back dirty
/// memory (PR_SET_IO_FLUSHER): an allocation of theirs then does not wait for a writeback that waits
/// for them. For programs that store what file systems write. Needs CAP_SYS_RESOURCE.
pub fn serves_writeback() -> io::Result<()> {
    let unused: libc::c_ulong = 0;
    let yes: libc::c_ulong = 1;
    // SAFETY: the call takes numbers only and accesses no memory.
    match unsafe { libc::prctl(SET_IO_FLUSHER, yes, unused, unused, unused) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn time(seconds: libc::time_t, micros: libc::suseconds_t) -> Duration {
    let seconds = u64::try_from(seconds).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_child_tells_what_it_cost() {
        let line = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; exit 7";
        let mut child = Command::new("sh").args(["-c", line]).spawn().unwrap();
        let (status, cost) = wait_with_cost(child.id()).unwrap();
        assert_eq!(status.code(), Some(7));
        assert!(cost.user + cost.system > Duration::from_micros(500), "{cost:?}");
        assert!(cost.peak > 100_000, "{cost:?}");
        assert!(wait_with_cost(child.id()).is_err(), "it was reaped already");
        assert!(child.wait().is_err());
    }

    #[test]
    fn a_living_process_tells_its_time() {
        let line = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo; read x";
        let mut child = Command::new("sh")
            .args(["-c", line])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        assert!(processor_time(child.id()).unwrap() > Duration::from_micros(500));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(processor_time(u32::MAX).is_err());
    }
}
