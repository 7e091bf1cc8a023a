//! Passwords: `+FILE`, `-` for the terminal, `-FD` for a descriptor, or the value itself, as in
//! nbdkit_read_password(3).

use std::fs::File;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read, Write as _};

use blockhaul_block::{Error, Kind, Result};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

/// Maximum length of a password in bytes.
const MAX: u64 = 64 << 10;

/// The password that `value` names.
///
/// # Errors
/// If it cannot be read. The text does not contain it.
pub(crate) fn read(value: &str) -> Result<String> {
    if value == "-" {
        return from_terminal();
    }
    if let Some(number) = value.strip_prefix('-') {
        let fd = number.parse::<u32>().ok().filter(|fd| *fd > 2);
        let wrong = "vddk: password=-FD needs the number of an open descriptor above 2; write - or \
                     +FILE";
        let fd = fd.ok_or_else(|| Error::new(Kind::Usage, wrong))?;
        let file = File::open(format!("/proc/self/fd/{fd}"));
        return line(file.map_err(|error| Error::system(wrong, error))?);
    }
    match value.strip_prefix('+') {
        Some(path) => {
            let cannot =
                |error| Error::system(format!("vddk: cannot read the password from {path}"), error);
            line(blockhaul_io::open_regular_file(path.as_ref()).map_err(cannot)?)
        }
        None => Ok(value.to_string()),
    }
}

fn line(from: impl Read) -> Result<String> {
    let mut text = String::new();
    BufReader::new(from.take(MAX))
        .read_line(&mut text)
        .map_err(|error| Error::system("vddk: cannot read the password", error))?;
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

fn from_terminal() -> Result<String> {
    let input = std::io::stdin();
    if !input.is_terminal() {
        let text = "vddk: password=- needs a terminal; write +FILE or -FD";
        return Err(Error::new(Kind::Usage, text));
    }
    let failed =
        |error: rustix::io::Errno| Error::system("vddk: cannot use the terminal", error.into());
    let before = tcgetattr(&input).map_err(failed)?;
    let mut silent = before.clone();
    silent.local_modes -= LocalModes::ECHO;
    // Before the prompt: what is typed after it is neither shown nor discarded.
    tcsetattr(&input, OptionalActions::Flush, &silent).map_err(failed)?;
    // Without a prompt the password can still be typed.
    let _ = write!(std::io::stderr(), "password: ");
    let answer = line(input.lock());
    // The terminal may be gone; the password is not affected.
    let _ = tcsetattr(&input, OptionalActions::Flush, &before);
    let _ = writeln!(std::io::stderr());
    answer
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn passwords_come_from_the_value_a_file_or_a_descriptor() {
        assert_eq!(read("secret").unwrap(), "secret");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "one\ntwo\n").unwrap();
        assert_eq!(read(&format!("+{}", file.path().display())).unwrap(), "one");
        assert_eq!(read(&format!("-{}", file.as_file().as_raw_fd())).unwrap(), "one");
        for wrong in ["-0", "-x", "-999999", "+/nothing/there"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
