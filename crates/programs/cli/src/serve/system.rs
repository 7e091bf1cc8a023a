//! What a server asks of the system for itself: memory that stays, labels of its sockets.

use std::path::Path;

use rustix::mm::MlockAllFlags;

use crate::exit::{FAILED, Failure, plain};

/// Where a thread says how the sockets that it makes are labelled (SELinux).
const SOCKET_LABEL: &str = "/proc/thread-self/attr/sockcreate";

/// Keeps all memory of this process from being swapped out, now and later: a server whose device is
/// swap space on the same machine would wait for itself.
pub fn keep_memory() -> Result<(), Failure> {
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE;
    rustix::mm::mlockall(all).map_err(|errno| {
        let text = format!(
            "--swap: cannot lock memory: {}; run as root, or raise the limit (ulimit -l)",
            plain(&std::io::Error::from(errno))
        );
        Failure::new(FAILED, text)
    })
}

/// Sockets that this thread makes have a label, until this is dropped.
pub struct SocketLabel(bool);

impl SocketLabel {
    /// Sets the label, if there is one.
    pub fn set(label: Option<&str>) -> Result<SocketLabel, Failure> {
        let Some(label) = label else { return Ok(SocketLabel(false)) };
        std::fs::write(Path::new(SOCKET_LABEL), label).map_err(|error| {
            let text = format!("--selinux-label {label}: the system refuses it: {}", plain(&error));
            Failure::new(FAILED, text)
        })?;
        Ok(SocketLabel(true))
    }
}

impl Drop for SocketLabel {
    fn drop(&mut self) {
        if self.0 {
            // An empty label is the policy's own. It was taken away a moment ago where this fails.
            let _ = std::fs::write(Path::new(SOCKET_LABEL), "");
        }
    }
}
