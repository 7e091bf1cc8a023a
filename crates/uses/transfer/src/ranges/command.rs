//! `--ranges-command`: the output of a command that succeeds.

use std::io::{Read, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::sync::mpsc;
use std::time::Duration;

use blockhaul_client::ShellProcess;
use blockhaul_io::plain;

use crate::printable::one_line;

/// What of the end of its messages is kept, in bytes.
const MESSAGES: usize = 4096;
/// Time for its messages to end after the command: what it has started may keep them open.
const PATIENCE: Duration = Duration::from_secs(1);

/// The beginning of a script, for messages.
pub(super) fn shown(script: &str) -> String {
    let line = one_line(script.trim());
    match line.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// The standard output of a script of `/bin/sh`, up to one byte more than `most`. What it writes on standard
/// error goes to ours, too. It ends with this program.
///
/// # Errors
/// If it cannot be run, or fails: with its status and the last line of its messages.
pub(super) fn output(script: &str, most: u64) -> Result<Vec<u8>, String> {
    let started = ShellProcess::start(script);
    let mut process = started.map_err(|error| format!("cannot run: {}", plain(&error)))?;
    let messages = process.take_messages();
    let (sender, receiver) = mpsc::channel();
    let pass_on = move || {
        // Nobody waits for them after a success.
        let _ = sender.send(messages.map(pass_on).unwrap_or_default());
    };
    let started = std::thread::Builder::new().name("messages".into()).spawn(pass_on);
    started.map_err(|error| format!("cannot start a thread: {}", plain(&error)))?;
    let mut bytes = Vec::new();
    if let Some(from) = process.output() {
        let read = from.take(most.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| format!("cannot read the output: {}", plain(&error)))?;
    }
    if bytes.len() as u64 > most {
        return Ok(bytes);
    }
    let status = process.wait().map_err(|error| format!("cannot wait: {}", plain(&error)))?;
    if status.success() {
        return Ok(bytes);
    }
    let last = receiver.recv_timeout(PATIENCE).unwrap_or_default();
    let last = String::from_utf8_lossy(&last);
    let last = match last.lines().map(str::trim).rfind(|line| !line.is_empty()) {
        Some(line) => format!("; its last message: {}", one_line(line)),
        None => String::new(),
    };
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    };
    Err(format!("the command failed ({how}): its list is not used{last}"))
}

/// Copies what it reads to standard error; the end of it.
fn pass_on(mut from: impl Read) -> Vec<u8> {
    let mut last = Vec::new();
    let mut buffer = [0; 1024];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        // Nothing else can be said if that fails.
        let _ = std::io::stderr().write_all(&buffer[..len]);
        last.extend_from_slice(&buffer[..len]);
        last.drain(..last.len().saturating_sub(MESSAGES));
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_a_command_that_succeeds() {
        assert_eq!(output("echo warning >&2; printf '[%s' ]", 9).unwrap(), b"[]");
        assert_eq!(output("yes", 9).unwrap().len(), 10);
        assert_eq!(output("cat", 9).unwrap(), b"");
    }

    #[test]
    fn what_a_command_has_started_ends_with_a_list_that_is_too_long() {
        let scratch = blockhaul_testkit::tools::ScratchDir::new().unwrap();
        let file = scratch.file("pid");
        let script = format!("sleep 1000 & echo $! >{}; yes", file.display());
        assert_eq!(output(&script, 9).unwrap().len(), 10);
        let pid = std::fs::read_to_string(&file).unwrap();
        // A process that nobody has waited for has no command line.
        let line = std::fs::read(format!("/proc/{}/cmdline", pid.trim()));
        assert!(line.is_err() || line.is_ok_and(|line| line.is_empty()), "it goes on");
    }

    #[test]
    fn a_command_that_fails_has_no_output() {
        for (script, said) in [
            (
                "echo []; echo one >&2; echo two >&2; exit 3",
                "(exit status 3): its list is not used; its last message: two",
            ),
            ("echo []; kill -KILL $$", "(signal 9): its list"),
            ("echo []; exit 1", "exit status 1"),
            ("/no/such/program", "exit status 127"),
        ] {
            let error = output(script, 99).unwrap_err();
            assert!(error.contains("the command failed") && error.contains(said), "{error}");
        }
    }
}
