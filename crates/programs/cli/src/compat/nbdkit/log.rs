//! Where a server in nbdkit's place says what is wrong: standard error, the system's log, or nowhere.

use std::os::unix::net::UnixDatagram;

use log::{Level, Metadata, Record};

use super::line::{Line, Log};
use crate::out::{self, one_line};

/// The system's log takes datagrams here (syslog(3)).
const SYSLOG: &str = "/dev/log";
/// Facility daemon, severity error.
const DAEMON_ERROR: u8 = 3 << 3 | 3;

/// Says what went wrong before there was a server.
pub fn error(text: &str) {
    out::error(&format!("nbdkit: error: {}\n", one_line(text)));
}

/// Says something to who asked for much.
pub fn debug(text: &str) {
    out::error(&format!("nbdkit: debug: {text}\n"));
}

struct Logger {
    to: Log,
    verbose: bool,
}

impl log::Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        let level = match record.level() {
            // Debugging always goes to standard error.
            Level::Debug | Level::Trace if self.verbose => {
                let text = escaped(record.args().to_string().as_bytes());
                return out::error(&format!("nbdkit: debug: {text}\n"));
            }
            Level::Debug | Level::Trace => return,
            Level::Error => "error",
            Level::Warn | Level::Info => "warning",
        };
        let text = one_line(&record.args().to_string());
        match self.to {
            Log::Null => {}
            Log::Syslog => syslog(&format!("{level}: {text}")),
            Log::Usual | Log::Stderr => {
                out::error(&format!("nbdkit: {level}: {text}\n"));
            }
        }
    }

    fn flush(&self) {}
}

/// Says what is in the environment, for `-D nbdkit.environ=1`, as C would write it.
pub fn environment() {
    for (name, value) in std::env::vars_os() {
        let text = escaped(value.as_encoded_bytes());
        out::error(&format!("nbdkit: debug: {}={text}\n", name.display()));
    }
}

/// What cannot be printed, and backslashes, as C writes them.
fn escaped(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            7 => text += "\\a",
            8 => text += "\\b",
            b'\t' => text += "\\t",
            b'\n' => text += "\\n",
            b'\\' => text += "\\\\",
            b' '..=b'~' => text.push(char::from(*byte)),
            other => text += &format!("\\x{other:02x}"),
        }
    }
    text
}

fn syslog(text: &str) {
    let Ok(socket) = UnixDatagram::unbound() else { return };
    let message = format!("<{DAEMON_ERROR}>nbdkit[{}]: {text}", std::process::id());
    // Where there is no such log there is nobody to tell.
    let _ = socket.send_to(message.as_bytes(), SYSLOG);
}

/// Starts logging before the server does, which then only sets the level.
pub fn start(line: &Line, in_background: bool) {
    let to = match line.log {
        // Nobody sees what a server in the background prints, unless it is told to say much.
        Log::Usual if in_background && !line.verbose => Log::Syslog,
        to => to,
    };
    // Fails only if it was set before; then that one does.
    let _ = log::set_boxed_logger(Box::new(Logger { to, verbose: line.verbose }));
}
