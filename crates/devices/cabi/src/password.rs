//! Passwords for plugins (`nbdkit_read_password(3)`).

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;

/// Maximum length of a password in bytes.
const MAX: u64 = 64 << 10;

/// `-` asks on the terminal, `-FD` reads a line from a descriptor, `+FILE` from a file; anything else
/// is the password.
pub(crate) fn read(value: &[u8]) -> Result<Vec<u8>, String> {
    match value {
        b"-" => from_terminal(),
        [b'-', digits @ ..] => {
            let digits = std::str::from_utf8(digits).unwrap_or_default();
            let fd: RawFd =
                digits.parse().map_err(|_| "password: -FD needs a number".to_string())?;
            if fd <= 2 {
                return Err(
                    "cannot use password -FD with descriptors 0 to 2; write - or +FILE".into()
                );
            }
            // SAFETY: the user opened the descriptor for this purpose and named it; F_GETFD checks
            // whether it is open.
            if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
                return Err(format!("password: descriptor {fd} is not open"));
            }
            // SAFETY: open, as just checked; by nbdkit's contract it is closed after reading.
            line(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
        }
        [b'+', path @ ..] => {
            let path = OsStr::from_bytes(path);
            let file = File::open(path).map_err(|error| {
                format!("password: {}: {}", path.display(), blockhaul_io::plain(&error))
            })?;
            line(file)
        }
        value => Ok(value.to_vec()),
    }
}

fn line(from: impl std::io::Read) -> Result<Vec<u8>, String> {
    let mut text = Vec::new();
    let read = BufReader::new(from.take(MAX)).read_until(b'\n', &mut text);
    read.map_err(|error| format!("password: {}", blockhaul_io::plain(&error)))?;
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    if text.contains(&0) {
        return Err("password: it holds a zero byte".into());
    }
    Ok(text)
}

fn from_terminal() -> Result<Vec<u8>, String> {
    let input = std::io::stdin();
    if !input.is_terminal() {
        return Err("password: stdin is not a tty; write +FILE or -FD".into());
    }
    let fd = input.as_raw_fd();
    let mut before = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: the descriptor is open, and the kernel fills the structure or fails.
    if unsafe { libc::tcgetattr(fd, before.as_mut_ptr()) } != 0 {
        return Err(format!("password: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: filled just above.
    let before = unsafe { before.assume_init() };
    let mut silent = before;
    silent.c_lflag &= !libc::ECHO;
    // Without a prompt the password can still be typed.
    let _ = write!(std::io::stderr(), "password: ");
    // SAFETY: a structure that the kernel filled, with echo off.
    unsafe { libc::tcsetattr(fd, libc::TCSAFLUSH, &raw const silent) };
    let answer = line(input.lock());
    // SAFETY: as above, with the previous settings.
    unsafe { libc::tcsetattr(fd, libc::TCSAFLUSH, &raw const before) };
    let _ = writeln!(std::io::stderr());
    answer
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn passwords_come_from_the_value_a_file_or_a_descriptor() {
        assert_eq!(read(b"secret"), Ok(b"secret".to_vec()));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        std::fs::write(&path, "one\ntwo\n").unwrap();
        assert_eq!(read(format!("+{}", path.display()).as_bytes()), Ok(b"one".to_vec()));
        // A number that other tests do not get when it is free again.
        let file = File::open(&path).unwrap();
        // SAFETY: a descriptor that is open, and a number for its copy, which belongs to this test.
        let fd = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 600) };
        assert!(fd >= 600, "{}", std::io::Error::last_os_error());
        assert_eq!(read(format!("-{fd}").as_bytes()), Ok(b"one".to_vec()));
        assert!(read(format!("-{fd}").as_bytes()).unwrap_err().contains("not open"));
        assert!(read(b"-0").is_err() && read(b"-x").is_err() && read(b"+/dev/null/x").is_err());
    }
}
