//! The system's log (syslog(3)), for servers that nobody sees the standard error of.

use std::os::unix::net::UnixDatagram;

/// The socket of the system's log.
const SOCKET: &str = "/dev/log";
/// The facility of daemons, shifted as in a message's priority (RFC 3164, section 4.1.1).
const DAEMON: u8 = 3 << 3;

/// How severe a message is (RFC 3164, section 4.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    Error = 3,
    Warning = 4,
    Info = 6,
    Debug = 7,
}

/// Sends a message under the name of a program. Without a system log, it is lost.
pub fn send(program: &str, severity: Severity, text: &str) {
    let Ok(socket) = UnixDatagram::unbound() else { return };
    let priority = DAEMON | severity as u8;
    let message = format!("<{priority}>{program}[{}]: {text}", std::process::id());
    let _ = socket.send_to(message.as_bytes(), SOCKET);
}
