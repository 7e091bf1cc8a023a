//! `--ranges-command`: the output of a command that succeeds.

use std::io::{Read, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::exit::plain;
use crate::out;

/// What of the end of its messages is kept, in bytes.
const MESSAGES: usize = 4096;
/// Time for its messages to end after the command: what it has started may keep them open.
const PATIENCE: Duration = Duration::from_secs(1);

/// The beginning of a script, for messages.
pub(super) fn shown(script: &str) -> String {
    let line = out::one_line(script.trim());
    match line.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// The standard output of a script of `/bin/sh`, up to one byte more than `most`. What it writes on standard
/// error goes to ours, too.
///
/// # Errors
/// If it cannot be run, or fails: with its status and the last line of its messages.
pub(super) fn output(script: &str, most: u64) -> Result<Vec<u8>, String> {
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(script).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("cannot run: {}", plain(&error)))?;
    let messages = child.stderr.take();
    let (sender, receiver) = mpsc::channel();
    let pass_on = move || {
        // Nobody waits for them after a success.
        let _ = sender.send(messages.map(pass_on).unwrap_or_default());
    };
    if let Err(error) = std::thread::Builder::new().name("messages".into()).spawn(pass_on) {
        stop(&mut child);
        return Err(format!("cannot start a thread: {}", plain(&error)));
    }
    let read = read(&mut child, most);
    if !matches!(&read, Ok(bytes) if bytes.len() as u64 <= most) {
        stop(&mut child);
        return read;
    }
    let status = child.wait().map_err(|error| format!("cannot wait: {}", plain(&error)))?;
    if status.success() {
        return read;
    }
    let last = receiver.recv_timeout(PATIENCE).unwrap_or_default();
    let last = String::from_utf8_lossy(&last);
    let last = match last.lines().map(str::trim).rfind(|line| !line.is_empty()) {
        Some(line) => format!("; its last message: {}", out::one_line(line)),
        None => String::new(),
    };
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    };
    Err(format!("the command failed ({how}): its list is not used{last}"))
}

fn read(child: &mut Child, most: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    if let Some(out) = child.stdout.take() {
        let read = out.take(most.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| format!("cannot read the output: {}", plain(&error)))?;
    }
    Ok(bytes)
}

/// Ends a command that is not needed any more.
fn stop(child: &mut Child) {
    // They fail only if it has ended.
    let _ = child.kill();
    let _ = child.wait();
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
