//! Runs with a time limit.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Runs a command to its end, without input; returns its output and status.
///
/// # Errors
/// If it cannot be started, or has not ended within the limit; it is then killed, and its output is
/// in the error.
pub fn output(command: &mut Command, limit: Duration) -> Result<Output, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("cannot start {name}: {error}"))?;
    let out = PipeOutput::collect(child.stdout.take());
    let err = PipeOutput::collect(child.stderr.take());
    let Some(status) = wait_within(&mut child, limit) else {
        let _ = child.kill();
        let _ = child.wait();
        let out = out.text();
        let err = err.text();
        let seconds = limit.as_secs_f32();
        return Err(format!(
            "{name} has not ended after {seconds} s; it wrote {out:?} and {err:?}"
        ));
    };
    // A background process of the program may hold its pipes open.
    for said in [&out, &err] {
        said.await_end(Duration::from_secs(5));
    }
    Ok(Output { status, stdout: out.bytes(), stderr: err.bytes() })
}

/// The output of a program, as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A field of `/proc/PID/status` that is in KiB, such as `VmHWM`; `None` if it is not there: a process that has
/// ended has no memory.
pub fn status_kib(status: &str, field: &str) -> Option<u64> {
    let values = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    values.split_whitespace().next()?.parse().ok()
}

/// Waits for a process; `None` if it has not ended within the limit.
pub fn wait_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let begun = Instant::now();
    let mut pause = Duration::from_micros(200);
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if begun.elapsed() > limit {
            return None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// The output of a program on one of its pipes, collected by a thread.
#[derive(Debug)]
pub(super) struct PipeOutput {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Disconnected when the pipe has ended.
    ended: Mutex<mpsc::Receiver<()>>,
}

impl PipeOutput {
    pub(super) fn collect(pipe: Option<impl Read + Send + 'static>) -> PipeOutput {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let (running, ended) = mpsc::channel();
        if let Some(mut pipe) = pipe {
            let bytes = Arc::clone(&bytes);
            std::thread::spawn(move || {
                let mut buffer = [0; 8192];
                while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                    lock(&bytes).extend_from_slice(&buffer[..count]);
                }
                drop(running);
            });
        }
        PipeOutput { bytes, ended: Mutex::new(ended) }
    }

    /// Whether the pipe has ended within the limit, of which a stalled machine uses only a part.
    pub(super) fn await_end(&self, limit: Duration) -> bool {
        let ended = lock(&self.ended);
        (0..10).any(|_| ended.recv_timeout(limit / 10) == Err(RecvTimeoutError::Disconnected))
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        lock(&self.bytes).clone()
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).trim().to_owned()
    }
}

/// Data left by a test that failed elsewhere is still valid.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line for the shell.
#[cfg(test)]
pub(super) fn shell(line: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", line]);
    command
}

/// Whether the process with this number has not ended. One that has ended and whose status nobody has
/// collected, as in a container without an init process, is not running.
pub fn is_running(process: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| !stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn output_is_complete_and_bounded_in_time() {
        let output_of = |line: &str, limit| output(&mut shell(line), limit);
        let done = output_of("echo out; echo err >&2; exit 3", LIMIT).unwrap();
        assert_eq!((&done.stdout[..], &done.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
        assert_eq!(done.status.code(), Some(3));
        let large = output_of("head -c 1000000 /dev/zero", LIMIT).unwrap();
        assert_eq!(large.stdout.len(), 1_000_000);
        // Longer, if the shell did not get to run for so long.
        let mut limit = Duration::from_millis(300);
        loop {
            let begun = Instant::now();
            let late = output_of("echo begun; exec sleep 3600", limit).unwrap_err();
            assert!(late.contains("has not ended"), "{late}");
            assert!(begun.elapsed() < limit + LIMIT);
            if late.contains("begun") {
                break;
            }
            limit *= 2;
            assert!(limit < LIMIT, "{late}");
        }
    }
}
