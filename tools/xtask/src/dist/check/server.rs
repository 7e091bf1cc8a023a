//! A server that runs as process 1 of a root file system, until it is asked to end.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::TaskResult;

/// Longer than a server takes to start or to stop.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts a server, waits for its socket, uses it, and stops it.
pub fn with(
    mut command: Command,
    socket: &Path,
    use_it: impl FnOnce() -> TaskResult,
) -> TaskResult {
    let mut server = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot start the server: {error}"))?;
    let used = listens(&mut server, socket).and_then(|()| use_it());
    let stopped = stop(&mut server);
    used.and(stopped)
}

fn listens(server: &mut Child, socket: &Path) -> TaskResult {
    let begun = Instant::now();
    while !socket.exists() {
        let ended =
            server.try_wait().map_err(|error| format!("cannot wait for the server: {error}"))?;
        if let Some(status) = ended {
            return Err(format!("the server ended with {status}"));
        }
        if begun.elapsed() > PATIENCE {
            return Err(format!("the server does not listen within {} s", PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Asks process 1 of the root to end, as `podman stop` does, and waits for it.
fn stop(server: &mut Child) -> TaskResult {
    let asked = ask(server);
    let begun = Instant::now();
    while asked.is_ok() && begun.elapsed() < PATIENCE {
        match server.try_wait().map_err(|error| format!("cannot wait for the server: {error}"))? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("the server ended with {status}")),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
    // Process 1 is killed with its parent.
    let _ = server.kill();
    let _ = server.wait();
    asked.and(Err(format!("the server did not end within {} s of SIGTERM", PATIENCE.as_secs())))
}

/// Sends SIGTERM to the process in the namespace.
fn ask(server: &Child) -> TaskResult {
    let outer = server.id();
    let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))
        .map_err(|error| format!("cannot find the server's process: {error}"))?;
    let inner = children.split_whitespace().next().and_then(|text| text.parse().ok());
    let inner = inner.and_then(Pid::from_raw).ok_or("the server ended before it was stopped")?;
    kill_process(inner, Signal::TERM)
        .map_err(|error| format!("cannot stop the server's process: {error}"))
}
