//! The log of a server in nbdkit's place: standard error, the system's log, or none.

use blockhaul_command_lines::nbdkit::{Line, Log};
use log::{Level, Metadata, Record};

use crate::out::{self, one_line};
use crate::syslog::{self, Severity};

/// Reports an error before there is a server.
pub fn error(text: &str) {
    out::error(&format!("nbdkit: error: {}\n", one_line(text)));
}

/// Prints a debug message.
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
            // nbdkit sends everything with this severity.
            Log::Syslog => syslog::send("nbdkit", Severity::Error, &format!("{level}: {text}")),
            Log::Usual | Log::Stderr => {
                out::error(&format!("nbdkit: {level}: {text}\n"));
            }
        }
    }

    fn flush(&self) {}
}

/// Prints the environment, for `-D nbdkit.environ=1`, in C notation.
pub fn environment() {
    for (name, value) in std::env::vars_os() {
        let text = escaped(value.as_encoded_bytes());
        out::error(&format!("nbdkit: debug: {}={text}\n", name.display()));
    }
}

/// Escapes unprintable characters and backslashes in C notation.
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

/// Starts logging before the server does, which then only sets the level.
pub fn start(line: &Line, in_background: bool) {
    let to = match line.log {
        // The output of a background server is not seen, unless it is verbose.
        Log::Usual if in_background && !line.verbose => Log::Syslog,
        to => to,
    };
    // Fails only if a logger is already set, which is then used.
    let _ = log::set_boxed_logger(Box::new(Logger { to, verbose: line.verbose }));
}
