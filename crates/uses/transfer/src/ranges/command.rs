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
/// Bytes of output that are read behind a list that is refused, to learn whether the command fails.
const REST_MAX: u64 = 1 << 20;
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

/// What `parse` makes of the standard output of a script of `/bin/sh`. What it writes on standard error goes to
/// ours, too. It ends with this program.
///
/// # Errors
/// If it cannot be run, or fails: with its status and the last line of its messages. Else the error of `parse`.
pub(super) fn read_output<T>(
    script: &str,
    parse: impl FnOnce(&mut dyn Read) -> Result<T, String>,
) -> Result<T, String> {
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
    let parsed = match process.output() {
        None => parse(&mut std::io::empty()),
        Some(output) => {
            let parsed = parse(&mut *output);
            if parsed.is_err() {
                // A command that fails is the reason for a list that is cut off, and has a message of its own.
                let rest = std::io::copy(&mut output.take(REST_MAX), &mut std::io::sink());
                if rest.is_ok_and(|rest| rest == REST_MAX) {
                    return parsed;
                }
            }
            parsed
        }
    };
    let status = process.wait().map_err(|error| format!("cannot wait: {}", plain(&error)))?;
    if status.success() {
        return parsed;
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

    /// The whole output, of at most 9 bytes.
    fn output(script: &str) -> Result<Vec<u8>, String> {
        read_output(script, |from| {
            let mut bytes = Vec::new();
            from.take(10).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
            if bytes.len() > 9 { Err("too long".to_string()) } else { Ok(bytes) }
        })
    }

    #[test]
    fn the_output_of_a_command_that_succeeds() {
        assert_eq!(output("echo warning >&2; printf '[%s' ]").unwrap(), b"[]");
        assert_eq!(output("yes").unwrap_err(), "too long");
        assert_eq!(output("cat").unwrap(), b"");
    }

    #[test]
    fn what_a_command_has_started_ends_with_a_list_that_is_too_long() {
        let scratch = blockhaul_testkit::tools::ScratchDir::new().unwrap();
        let file = scratch.file("pid");
        let script = format!("sleep 1000 & echo $! >{}; yes", file.display());
        assert_eq!(output(&script).unwrap_err(), "too long");
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
            let error = output(script).unwrap_err();
            assert!(error.contains("the command failed") && error.contains(said), "{error}");
        }
    }
}
