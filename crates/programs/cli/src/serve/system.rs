//! System settings of a server: locked memory, socket labels.

use std::path::Path;

use rustix::mm::MlockAllFlags;

use crate::exit::{CommandFailure, FAILED, plain};

/// Sets the label of a thread's new sockets (SELinux).
const SOCKET_LABEL: &str = "/proc/thread-self/attr/sockcreate";

/// Locks all memory of this process, now and later: a server whose device is swap space on the same
/// machine could deadlock.
pub fn keep_memory() -> Result<(), CommandFailure> {
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE;
    rustix::mm::mlockall(all).map_err(|errno| {
        let text = format!(
            "--swap: cannot lock memory: {}; run as root, or raise the limit (ulimit -l)",
            plain(&std::io::Error::from(errno))
        );
        CommandFailure::new(FAILED, text)
    })
}

/// New sockets of this thread have a label, until this is dropped.
pub struct SocketLabel(bool);

impl SocketLabel {
    /// Sets the label, if there is one.
    pub fn set(label: Option<&str>) -> Result<SocketLabel, CommandFailure> {
        let Some(label) = label else { return Ok(SocketLabel(false)) };
        std::fs::write(Path::new(SOCKET_LABEL), label).map_err(|error| {
            let text = format!("--selinux-label {label}: the system refused it: {}", plain(&error));
            CommandFailure::new(FAILED, text)
        })?;
        Ok(SocketLabel(true))
    }
}

impl Drop for SocketLabel {
    fn drop(&mut self) {
        if self.0 {
            // An empty label restores the policy's own. If this fails, it was just removed.
            let _ = std::fs::write(Path::new(SOCKET_LABEL), "");
        }
    }
}
