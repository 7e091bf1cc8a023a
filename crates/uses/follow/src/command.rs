//! Commands of the plan: run by the shell, with a timeout, and ended with all that they have started.

use std::io::{Read as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ChildStderr, ChildStdout};
use std::time::{Duration, Instant};

use blockhaul_client::ShellProcess;
use blockhaul_io::plain;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Time between two checks of the timeout.
const TICK: Duration = Duration::from_millis(100);
/// Time between two checks whether a command has ended that has closed its output.
const END_TICK: Duration = Duration::from_millis(10);
/// Maximum length of a line of output in bytes.
const LINE_MAX: usize = 1 << 20;
/// Maximum number of lines.
const LINES_MAX: usize = 10_000;

/// Runs a script of `/bin/sh`, and calls `line` with each line of its standard output. Its messages go to the standard
/// error of this process. `is_cancelled` and the timeout end it; so does the end of this process.
///
/// # Errors
/// If it cannot be run, fails, takes too long, is cancelled, or `line` fails.
pub(crate) fn run_command(
    script: &str,
    timeout: Duration,
    is_cancelled: &dyn Fn() -> bool,
    line: &mut dyn FnMut(&str) -> Result<(), String>,
) -> Result<(), String> {
    let started = ShellProcess::start(script);
    let mut process = started.map_err(|error| format!("cannot run: {}", error.text()))?;
    let messages = process.take_messages();
    let pass_on = move || messages.into_iter().for_each(pass_on);
    let started = std::thread::Builder::new().name("messages".into()).spawn(pass_on);
    started.map_err(|error| format!("cannot start a thread: {}", plain(&error)))?;
    let end = Instant::now() + timeout;
    let due = || {
        if is_cancelled() {
            return Err("cancelled".to_string());
        }
        if Instant::now() >= end {
            return Err(format!("it takes longer than {} s (timeout)", timeout.as_secs_f64()));
        }
        Ok(())
    };
    let mut lines = LineBuffer::default();
    while lines.read(&mut process, line)? {
        due()?;
    }
    let status = loop {
        if let Some(status) = process.try_wait().map_err(|error| plain(&error))? {
            break status;
        }
        due()?;
        std::thread::sleep(END_TICK);
    };
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => Err(format!("exit status {code}")),
        (None, Some(signal)) => Err(format!("signal {signal}")),
        (None, None) => Err(status.to_string()),
    }
}

/// Copies messages to standard error.
fn pass_on(mut from: ChildStderr) {
    let mut buffer = [0; 1024];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        // Nothing else can be said if that fails.
        let _ = std::io::stderr().write_all(&buffer[..len]);
    }
}

/// Output up to the end of its last line.
#[derive(Default)]
struct LineBuffer {
    rest: Vec<u8>,
    count: usize,
}

impl LineBuffer {
    /// Waits for output, at most for a tick, and passes on its lines. Whether more may follow.
    fn read(
        &mut self,
        process: &mut ShellProcess,
        line: &mut dyn FnMut(&str) -> Result<(), String>,
    ) -> Result<bool, String> {
        // What it has started in the background may keep the output open.
        let has_ended = process.try_wait().map_err(|error| plain(&error))?.is_some();
        let Some(output) = process.output() else { return Ok(false) };
        let len = match is_ready(output, if has_ended { Duration::ZERO } else { TICK })? {
            false if !has_ended => return Ok(true),
            false => 0,
            true => {
                let mut buffer = [0; 4096];
                let len = output.read(&mut buffer).map_err(|error| plain(&error))?;
                self.rest.extend_from_slice(&buffer[..len]);
                len
            }
        };
        while let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
            let text: Vec<_> = self.rest.drain(..=end).collect();
            self.pass(&text[..end], line)?;
        }
        if self.rest.len() > LINE_MAX {
            return Err(format!("it prints a line of more than {LINE_MAX} bytes"));
        }
        if len == 0 && !self.rest.is_empty() {
            let text = std::mem::take(&mut self.rest);
            self.pass(&text, line)?;
        }
        Ok(len > 0)
    }

    fn pass(
        &mut self,
        text: &[u8],
        line: &mut dyn FnMut(&str) -> Result<(), String>,
    ) -> Result<(), String> {
        self.count += 1;
        if self.count > LINES_MAX {
            return Err(format!("it prints more than {LINES_MAX} lines"));
        }
        line(&String::from_utf8_lossy(text))
    }
}

/// Whether output, or its end, is there within this time.
fn is_ready(output: &ChildStdout, time: Duration) -> Result<bool, String> {
    let time = Timespec::try_from(time).map_err(|error| error.to_string())?;
    match poll(&mut [PollFd::new(output, PollFlags::IN)], Some(&time)) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(format!("cannot read its output: {}", plain(&error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, timeout: u64) -> Result<Vec<String>, String> {
        let mut lines = Vec::new();
        let timeout = Duration::from_millis(timeout);
        run_command(script, timeout, &|| false, &mut |line| {
            lines.push(line.to_string());
            Ok(())
        })?;
        Ok(lines)
    }

    #[test]
    fn lines_of_a_command_that_succeeds() {
        assert_eq!(run("echo a; printf b", 9999).unwrap(), ["a", "b"]);
        // A server that a provider leaves behind keeps the pipe open.
        assert_eq!(run("sleep 3 & echo a", 9999).unwrap(), ["a"]);
    }

    #[test]
    fn commands_that_fail_or_hang_are_errors() {
        for (script, timeout, said) in [
            ("exit 3", 9999, "exit status 3"),
            ("kill -KILL $$", 9999, "signal 9"),
            ("sleep 1000", 100, "longer than 0.1 s (timeout)"),
            ("exec >&-; sleep 1000", 100, "(timeout)"),
            ("yes", 9999, "more than 10000 lines"),
            ("tr '\\0' a </dev/zero", 9999, "a line of more than"),
        ] {
            let error = run(script, timeout).unwrap_err();
            assert!(error.contains(said), "{script}: {error}");
        }
    }
}
