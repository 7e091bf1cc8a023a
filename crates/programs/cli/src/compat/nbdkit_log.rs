//! The log of a server in nbdkit's place: standard error, a file, the system's log, or none.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::sync::OnceLock;

use blockhaul_command_lines::nbdkit::{LogDestination, NbdkitCommand};
use log::{Level, Metadata, Record};

use crate::out::{self, one_line};
use crate::syslog::{self, Severity};

/// The start of a message: the program, and the name of this server.
static SENDER: OnceLock<String> = OnceLock::new();

fn sender() -> &'static str {
    SENDER.get().map_or("nbdkit", String::as_str)
}

/// Reports an error before there is a server.
pub fn error(text: &str) {
    out::error(&format!("{}: error: {}\n", sender(), one_line(text)));
}

/// Reports what may be a mistake before there is a server.
pub fn warning(text: &str) {
    out::error(&format!("{}: warning: {}\n", sender(), one_line(text)));
}

/// Prints a debug message.
pub fn debug(text: &str) {
    out::error(&format!("{}: debug: {text}\n", sender()));
}

struct NbdkitLogger {
    to: LogDestination,
    /// The open file, if that is the destination.
    file: Option<File>,
    verbose: bool,
}

impl log::Log for NbdkitLogger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        let level = match record.level() {
            // Debugging always goes to standard error.
            Level::Debug | Level::Trace if self.verbose => {
                let text = escaped(record.args().to_string().as_bytes());
                return debug(&text);
            }
            Level::Debug | Level::Trace => return,
            Level::Error => "error",
            Level::Warn | Level::Info => "warning",
        };
        let text = one_line(&record.args().to_string());
        let line = format!("{}: {level}: {text}\n", sender());
        match self.to {
            LogDestination::Null => {}
            // nbdkit sends everything with this severity.
            LogDestination::Syslog => {
                syslog::send("nbdkit", Severity::Error, &format!("{level}: {text}"))
            }
            LogDestination::File(_) => {
                // A full disk must not end the server.
                let _ = self.file.as_ref().map(|mut file| file.write_all(line.as_bytes()));
            }
            LogDestination::Usual | LogDestination::Stderr => out::error(&line),
        }
    }

    fn flush(&self) {}
}

/// Prints the environment, for `-D nbdkit.environ=1`, in C notation.
pub fn environment() {
    for (name, value) in std::env::vars_os() {
        let text = escaped(value.as_encoded_bytes());
        debug(&format!("{}={text}", name.display()));
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
///
/// # Errors
/// The file for messages cannot be opened.
pub fn start(line: &NbdkitCommand, in_background: bool) -> std::io::Result<()> {
    if let Some(name) = &line.name {
        SENDER.get_or_init(|| format!("nbdkit[{}]", out::one_word(name)));
    }
    let to = match &line.log {
        // The output of a background server is not seen, unless it is verbose.
        LogDestination::Usual if in_background && !line.verbose => LogDestination::Syslog,
        to => to.clone(),
    };
    let file = match &to {
        LogDestination::File(path) => {
            Some(OpenOptions::new().create(true).append(true).open(path)?)
        }
        _ => None,
    };
    // Fails only if a logger is already set, which is then used.
    let _ = log::set_boxed_logger(Box::new(NbdkitLogger { to, file, verbose: line.verbose }));
    Ok(())
}
