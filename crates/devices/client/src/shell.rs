//! A command of the shell that ends with this program.

use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};

use blockhaul_block::{Error, Result};

use crate::guard::{ProcessGuard, REGISTER};

/// Becomes the shell with the script, so that the registered process is the script's.
const RUN: &str = r#"exec /bin/sh -c "$1""#;

/// A script of `/bin/sh` whose output is read. If it has not ended when this is dropped, or when this
/// program ends in any way, also by SIGKILL, it is ended with all that it has started.
pub struct ShellProcess {
    child: Child,
    guard: ProcessGuard,
}

impl ShellProcess {
    /// Starts a script, with an empty standard input, and pipes for the rest. It stays in this process group:
    /// it may ask for a password on the terminal.
    ///
    /// # Errors
    /// If its guard or the shell cannot be started.
    pub fn start(script: &str) -> Result<ShellProcess> {
        let guard = ProcessGuard::start()?;
        let child = Command::new("/bin/sh")
            .args(["-c", &format!("{REGISTER}{RUN}"), "sh"])
            .arg(guard.folder())
            .arg(script)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Error::system("cannot start /bin/sh", error))?;
        Ok(ShellProcess { child, guard })
    }

    /// Its standard output. It stays open until what the script has started is found: what writes to it
    /// ends when it is closed.
    pub fn output(&mut self) -> Option<&mut ChildStdout> {
        self.child.stdout.as_mut()
    }

    /// Its standard error, once.
    pub fn take_messages(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    /// Its status, if it has ended.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn try_wait(&mut self) -> std::io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn wait(&mut self) -> std::io::Result<ExitStatus> {
        self.child.wait()
    }
}

impl Drop for ShellProcess {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.guard.end();
            // Fails only if it has been waited for.
            let _ = self.child.wait();
        }
    }
}
