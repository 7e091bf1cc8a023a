//! `[ CMD … ]`: a server started by systemd socket activation (sd_listen_fds(3)), as nbdcopy does.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};

use crate::guard::{ProcessGuard, REGISTER};

/// Moves the listening socket from standard input to descriptor 3 and passes it to the server. The
/// shell's process ID becomes the server's, which LISTEN_PID must contain.
const ACTIVATE: &str =
    r#"exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1; export LISTEN_PID LISTEN_FDS; exec "$@""#;

/// Time for a server to end after SIGTERM, before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// A server started for one purpose. It is stopped when the last handle is dropped, and by its
/// guard if this program is killed.
pub struct ServerProcess {
    child: Mutex<Child>,
    socket: PathBuf,
    name: String,
    /// Dropped last: until then it ends the server if this program is killed.
    _guard: ProcessGuard,
}

impl ServerProcess {
    /// Starts a server. The word `blockhaul` in front means this program itself.
    ///
    /// # Errors
    /// If no directory for its socket can be made, or the program cannot be started.
    pub fn start(words: &[OsString]) -> Result<Arc<ServerProcess>> {
        Self::start_with(words, |command| command)
    }

    /// The same, in a directory and a process group of its own, with these additional environment
    /// variables: signals from the terminal must not reach the server, which is needed until this
    /// program has finished.
    pub fn start_apart(
        words: &[OsString],
        folder: Option<&Path>,
        environment: &[(OsString, OsString)],
    ) -> Result<Arc<ServerProcess>> {
        Self::start_with(words, |command| {
            command.envs(environment.iter().map(|(name, value)| (name, value)));
            if let Some(folder) = folder {
                command.current_dir(folder);
            }
            command.process_group(0)
        })
    }

    fn start_with(
        words: &[OsString],
        how: impl Fn(&mut Command) -> &mut Command,
    ) -> Result<Arc<ServerProcess>> {
        let name =
            words.iter().map(|word| word.display().to_string()).collect::<Vec<_>>().join(" ");
        let name = format!("[ {name} ]");
        let Some(program) = words.first() else {
            return Err(Error::new(Kind::Usage, "no command between [ and ]"));
        };
        let guard = ProcessGuard::start()?;
        let program = match program.to_str() {
            Some("blockhaul") => guard.this_program()?.into_os_string(),
            _ => program.clone(),
        };
        let socket = guard.socket();
        let cannot = |error| Error::system(format!("cannot start {name}"), error);
        let listener = UnixListener::bind(&socket).map_err(cannot)?;
        let child = how(&mut Command::new("/bin/sh"))
            .args(["-c", &format!("{REGISTER}{ACTIVATE}"), "sh"])
            .arg(guard.folder())
            .arg(program)
            .args(&words[1..])
            .stdin(Stdio::from(OwnedFd::from(listener)))
            // Only this program may notify a service manager.
            .env_remove("NOTIFY_SOCKET")
            .spawn()
            .map_err(cannot)?;
        Ok(Arc::new(ServerProcess { child: Mutex::new(child), socket, name, _guard: guard }))
    }

    /// The path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process ID, valid until [`ServerProcess::ended`].
    pub fn id(&self) -> u32 {
        self.child.lock().expect("no panic under this lock").id()
    }

    /// The command as typed.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How it ended, if it has.
    pub fn ended(&self) -> Option<String> {
        Some(format!("the command has ended with {}", self.status()?))
    }

    /// Its exit status, if it has ended.
    pub fn status(&self) -> Option<ExitStatus> {
        let mut child = self.child.lock().expect("no panic under this lock");
        child.try_wait().ok().flatten()
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let child = self.child.get_mut().expect("no panic under this lock");
        let ended = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
        if !ended(child) {
            let id = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
            if let Some(id) = id {
                // Fails only if it has just ended.
                let _ = rustix::process::kill_process(id, rustix::process::Signal::TERM);
            }
            let deadline = blockhaul_io::now() + STOP_PATIENCE;
            while !ended(child) && blockhaul_io::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !ended(child) {
                log::warn!("{} does not stop: killing it", self.name);
                // Fails only if it has just ended.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}
