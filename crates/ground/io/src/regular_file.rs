//! Regular files with settings and secrets, which are read as a whole.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstatfs, major, minor};

/// The file system of pipes without a name (linux/magic.h).
const PIPEFS: u64 = 0x5049_5045;
/// Time in which the writer of a pipe without a name begins.
const PIPE_PATIENCE: Duration = Duration::from_secs(10);

/// Opens a regular file for reading. Also a pipe without a name, as shells make it for `<(…)`, and `/dev/null`, which
/// is an empty file. A named pipe, whose opening would wait for its writer, and a device, which may never end, are
/// refused.
///
/// # Errors
/// Those of open(2), `InvalidInput` if the path leads to another kind of file, and `TimedOut` if nothing comes through
/// a pipe in 10 s.
pub fn open_regular_file(path: &Path) -> io::Result<File> {
    let open = |flags: OFlags| {
        OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)
    };
    let file = match open(OFlags::NONBLOCK) {
        // Another process has a lease, which it gives back while this one waits.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            open_leased(&open(OFlags::PATH)?)?
        }
        opened => opened?,
    };
    let data = file.metadata()?;
    match data.file_type() {
        kind if kind.is_file() => Ok(file),
        kind if kind.is_dir() => Err(rustix::io::Errno::ISDIR.into()),
        kind if is_null(kind, data.rdev()) => Ok(file),
        kind if kind.is_fifo() && fstatfs(&file)?.f_type.cast_unsigned() == PIPEFS => {
            wait_for_writer(&file)?;
            Ok(file)
        }
        _ => Err(not_regular()),
    }
}

/// Opens a file that others have under a lease, by a descriptor that only names it.
fn open_leased(named: &File) -> io::Result<File> {
    if !named.metadata()?.is_file() {
        return Err(not_regular());
    }
    File::open(format!("/proc/self/fd/{}", named.as_raw_fd()))
}

fn is_null(kind: FileType, device: u64) -> bool {
    kind.is_char_device() && (major(device), minor(device)) == (1, 3)
}

/// Waits for the first bytes of a pipe, or for its end; later reads wait for the rest.
fn wait_for_writer(file: &File) -> io::Result<()> {
    let patience = Timespec::try_from(PIPE_PATIENCE).map_err(io::Error::other)?;
    if poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&patience))? == 0 {
        let text = "nothing has come through the pipe in 10 s";
        return Err(io::Error::new(io::ErrorKind::TimedOut, text));
    }
    Ok(fcntl_setfl(file, fcntl_getfl(file)? - OFlags::NONBLOCK)?)
}

fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")
}

/// Reads a regular file of at most `most` bytes as a whole.
///
/// # Errors
/// Those of [`open_regular_file`] and of read(2), and `FileTooLarge` if the file has more bytes.
pub fn read_regular_file(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular_file(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let text = format!("the file has more than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write as _;

    use rustix::fs::{CWD, Mode, mknodat};

    use super::*;

    #[test]
    fn a_file_is_read_and_what_may_wait_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "text").unwrap();
        assert_eq!(read_regular_file(&at("file"), 4).unwrap(), b"text");
        let long = read_regular_file(&at("file"), 3).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::FileTooLarge);
        mknodat(CWD, at("pipe"), rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        for path in [&at("pipe"), Path::new("/dev/zero")] {
            let refused = read_regular_file(path, 4).unwrap_err();
            assert_eq!(crate::plain(&refused), "it is no regular file", "{}", path.display());
        }
        let kind = |path: &Path| open_regular_file(path).unwrap_err().kind();
        assert_eq!(kind(dir.path()), io::ErrorKind::IsADirectory);
        assert_eq!(kind(&at("absent")), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_pipe_of_a_shell_and_the_empty_device_are_read() {
        assert_eq!(read_regular_file(Path::new("/dev/null"), 4).unwrap(), b"");
        let (reader, mut writer) = io::pipe().unwrap();
        let path = format!("/dev/fd/{}", reader.as_raw_fd());
        let written = std::thread::spawn(move || {
            writer.write_all(b"te").unwrap();
            std::thread::sleep(Duration::from_millis(20));
            writer.write_all(b"xt").unwrap();
        });
        assert_eq!(read_regular_file(Path::new(&path), 4).unwrap(), b"text");
        written.join().unwrap();
    }
}
