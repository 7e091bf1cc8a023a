//! `--run`: a shell command that determines the server's lifetime.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::stdio;
use crate::exit::{CommandFailure, FAILED, plain};

/// Time for the command to end when the server is stopped by a signal.
const PATIENCE: Duration = Duration::from_millis(500);

/// A running command.
pub struct RunningCommand {
    pid: Option<Pid>,
    ended: mpsc::Receiver<u8>,
}

/// Starts a script with variables set before it (like nbdkit's, not exported), and calls `ended`
/// with its exit status.
pub fn start(
    script: &str,
    variables: &[(&str, OsString)],
    ended: impl FnOnce(u8) + Send + 'static,
) -> Result<RunningCommand, CommandFailure> {
    // As words of the command line, values need not be text.
    let numbered = variables.iter().zip(1..);
    let assigned = numbered.map(|((name, _), number)| format!("{name}=${{{number}}}\n"));
    let text = format!("{}set --\n{script}", assigned.collect::<String>());
    let cannot = |error: std::io::Error| {
        CommandFailure::new(FAILED, format!("cannot run {script:?}: {}", plain(&error)))
    };
    let (input, output) = stdio::original().map_err(cannot)?;
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(text).arg("/bin/sh").stdin(input).stdout(output);
    command.args(variables.iter().map(|(_, value)| value));
    // Only this program may notify a service manager.
    command.env_remove(blockhaul_server::ServiceNotifier::VARIABLE);
    let mut child = command.spawn().map_err(cannot)?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (sender, receiver) = mpsc::channel();
    let wait = move || {
        let status = child.wait().map_or(FAILED, exit_status);
        // Only a stopping server waits for this.
        let _ = sender.send(status);
        ended(status);
    };
    std::thread::Builder::new().name("run".into()).spawn(wait).map_err(cannot)?;
    Ok(RunningCommand { pid, ended: receiver })
}

impl RunningCommand {
    /// Waits for the end of the command; returns its exit status. Blocks.
    pub fn wait(self) -> u8 {
        self.ended.recv().unwrap_or(FAILED)
    }

    /// Sends SIGTERM to the command, and waits a little for it.
    pub fn stop(&mut self) {
        if let Some(pid) = self.pid {
            // Fails only if it has just ended.
            let _ = kill_process(pid, Signal::TERM);
        }
        // Whether it ends in time changes nothing here.
        let _ = self.ended.recv_timeout(PATIENCE);
    }
}

/// The status of a command in a shell's form.
pub fn exit_status(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(FAILED),
        (None, Some(signal)) => crate::signals::status(signal),
        (None, None) => FAILED,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use blockhaul_transfer::shell_word;

    use super::*;

    fn run(script: &str, variables: &[(&str, OsString)]) -> u8 {
        let (sender, receiver) = mpsc::channel();
        let running = start(script, variables, move |status| sender.send(status).unwrap()).unwrap();
        let status = receiver.recv_timeout(Duration::from_secs(120)).unwrap();
        drop(running);
        status
    }

    #[test]
    fn status_and_variables_are_handed_through() {
        assert_eq!(run("exit 7", &[]), 7);
        assert_eq!(run("kill -KILL $$", &[]), 137);
        let odd = "it's $HOME `x` \"y\" \\ \n z";
        let check = format!("test \"$uri\" = {}", shell_word(odd));
        assert_eq!(run(&check, &[("uri", odd.into())]), 0);
        let bytes = OsString::from_vec(vec![b'/', 0xff, b'\'']);
        let check = "test \"$uri\" = \"$(printf '/\\377\\047')\" -a $# = 0 -a \"$last\" = 1";
        let mut variables = vec![("uri", bytes)];
        variables.extend(
            ["a", "b", "c", "d", "e", "f", "g", "h", "last"].map(|name| (name, "1".into())),
        );
        assert_eq!(run(check, &variables), 0);
        // Not exported: programs that the script starts do not see it.
        assert_eq!(run("sh -c 'test -z \"$uri\"'", &[("uri", "x".into())]), 0);
    }
}
