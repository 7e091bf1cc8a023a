//! Regular files with settings and secrets, which are read as a whole.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file for reading. A named pipe, whose opening would wait for its writer, and a device, which may
/// never end, are refused.
///
/// # Errors
/// Those of open(2), and `InvalidInput` if the path leads to another kind of file than a regular one or a directory.
pub fn open_regular_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.file_type() {
        kind if kind.is_file() => Ok(file),
        kind if kind.is_dir() => Err(rustix::io::Errno::ISDIR.into()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")),
    }
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
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn a_file_is_read_and_what_may_wait_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "text").unwrap();
        assert_eq!(read_regular_file(&at("file"), 4).unwrap(), b"text");
        let long = read_regular_file(&at("file"), 3).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::FileTooLarge);
        mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        for path in [&at("pipe"), Path::new("/dev/zero")] {
            let refused = read_regular_file(path, 4).unwrap_err();
            assert_eq!(crate::plain(&refused), "it is no regular file", "{}", path.display());
        }
        let kind = |path: &Path| open_regular_file(path).unwrap_err().kind();
        assert_eq!(kind(dir.path()), io::ErrorKind::IsADirectory);
        assert_eq!(kind(&at("absent")), io::ErrorKind::NotFound);
    }
}
