//! The source of a passphrase: literal, a file, a descriptor, or the user.

use std::fs::File;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read as _, Write as _};
use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_block::{Error, Kind, Result};

use crate::declared::usage;

/// Maximum length of a passphrase, like cryptsetup.
const MOST: u64 = 8 << 20;

/// A passphrase that is read on first use.
pub(super) struct PassphraseSource {
    place: PassphraseOrigin,
    read: Mutex<Option<Arc<Vec<u8>>>>,
}

enum PassphraseOrigin {
    Given(String),
    File(String),
    Descriptor(i32),
    Asked,
}

impl PassphraseSource {
    /// Parses SECRET, `+FILE`, `-FD` or `-`.
    pub(super) fn parse(text: &str) -> Result<PassphraseSource> {
        let place = match (text.strip_prefix('+'), text.strip_prefix('-')) {
            (Some(""), _) => return Err(usage("luks: passphrase=+ requires the name of a file")),
            (Some(path), _) => PassphraseOrigin::File(path.into()),
            (_, Some("")) => PassphraseOrigin::Asked,
            (_, Some(number)) => {
                let number = number.parse().ok().filter(|&number: &i32| number >= 0);
                let number = number.ok_or_else(|| {
                    usage("luks: passphrase=-FD requires the number of a descriptor")
                })?;
                PassphraseOrigin::Descriptor(number)
            }
            (None, None) => PassphraseOrigin::Given(text.into()),
        };
        Ok(PassphraseSource { place, read: Mutex::default() })
    }

    /// The passphrase; the first call reads it, which may wait for user input.
    pub(super) fn get(&self) -> Result<Arc<Vec<u8>>> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*read {
            return Ok(known.clone());
        }
        let found = Arc::new(self.place.read()?);
        *read = Some(found.clone());
        Ok(found)
    }
}

impl PassphraseOrigin {
    fn read(&self) -> Result<Vec<u8>> {
        match self {
            PassphraseOrigin::Given(text) => Ok(text.clone().into_bytes()),
            PassphraseOrigin::File(path) => {
                let what = format!("luks: cannot read the passphrase from {path}");
                read_line(blockhaul_io::open_regular_file(path.as_ref()), what)
            }
            PassphraseOrigin::Descriptor(number) => {
                let what = format!("luks: cannot read the passphrase from descriptor {number}");
                read_line(File::open(format!("/proc/self/fd/{number}")), what)
            }
            PassphraseOrigin::Asked => ask(),
        }
    }
}

/// The first line of a file, without its newline.
fn read_line(file: std::io::Result<File>, what: String) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read =
        file.and_then(|file| BufReader::new(file.take(MOST + 1)).read_until(b'\n', &mut bytes));
    if let Err(error) = read {
        return Err(Error::system(what, error));
    }
    if bytes.len() as u64 > MOST {
        return Err(Error::new(Kind::Invalid, format!("{what}: it is longer than {MOST} bytes")));
    }
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    }
    Ok(bytes)
}

/// Asks the user, without echo; reads standard input if it is not a terminal.
fn ask() -> Result<Vec<u8>> {
    let failed = |error| Error::system("luks: cannot prompt for the passphrase", error);
    let input = std::io::stdin();
    let mut line = Vec::new();
    let hidden = input.is_terminal().then(|| EchoGuard::new(&input)).flatten();
    if hidden.is_some() {
        // Ignore a closed standard error.
        let _ = write!(std::io::stderr(), "passphrase: ");
    }
    let read = input.lock().take(MOST).read_until(b'\n', &mut line);
    if hidden.is_some() {
        let _ = writeln!(std::io::stderr());
    }
    read.map_err(failed)?;
    if line.last() == Some(&b'\n') {
        line.pop();
    }
    Ok(line)
}

/// A terminal with echo off; restored on drop.
struct EchoGuard<'a> {
    input: &'a std::io::Stdin,
    before: rustix::termios::Termios,
}

impl EchoGuard<'_> {
    fn new(input: &std::io::Stdin) -> Option<EchoGuard<'_>> {
        use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
        let before = tcgetattr(input).ok()?;
        let mut quiet = before.clone();
        quiet.local_modes -= LocalModes::ECHO;
        tcsetattr(input, OptionalActions::Flush, &quiet).ok()?;
        Some(EchoGuard { input, before })
    }
}

impl Drop for EchoGuard<'_> {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = rustix::termios::tcsetattr(
            self.input,
            rustix::termios::OptionalActions::Flush,
            &self.before,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passphrases_come_from_where_they_are_said_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "open sesame\nanother line\n").unwrap();
        let get =
            |text: &str| PassphraseSource::parse(text).unwrap().get().map(|found| found.to_vec());
        assert_eq!(get("plain").unwrap(), b"plain");
        assert_eq!(get(&format!("+{}", path.display())).unwrap(), b"open sesame");
        let file = File::open(&path).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        assert_eq!(get(&format!("-{number}")).unwrap(), b"open sesame");
        assert!(get("+/nonexistent").unwrap_err().to_string().contains("from /nonexistent"));
        for wrong in ["+", "-x", "--1"] {
            assert!(PassphraseSource::parse(wrong).is_err(), "{wrong}");
        }
    }
}
