//! Bounds on what a parser keeps in memory: a string, an element, a line.

use std::io::{Error, ErrorKind, Read, Result};

use crate::error::ChangeListError;

/// Maximum distance of two separators in bytes.
const PIECE_MAX: usize = 1 << 20;
/// Bytes at the beginning of a list by which its kind is recognized.
const FIRST: usize = 64 << 10;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A reader that fails where separators are far apart.
pub(crate) struct PieceReader<R> {
    from: R,
    separator: u8,
    /// Bytes since the last separator.
    since: usize,
    /// The last byte: a separator behind `\` is part of a string.
    last: u8,
}

impl<R: Read> PieceReader<R> {
    pub(crate) fn new(from: R, separator: u8) -> PieceReader<R> {
        PieceReader { from, separator, since: 0, last: 0 }
    }
}

impl<R: Read> Read for PieceReader<R> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let len = self.from.read(into)?;
        for &byte in &into[..len] {
            self.since += 1;
            if byte == self.separator && self.last != b'\\' {
                self.since = 0;
            }
            self.last = byte;
            if self.since > PIECE_MAX {
                let text = format!(
                    "{PIECE_MAX} bytes without {:?}: not a list of changes",
                    char::from(self.separator)
                );
                return Err(Error::new(ErrorKind::InvalidData, text));
            }
        }
        Ok(len)
    }
}

/// The beginning of a list without its byte order mark, which PowerShell writes, and without empty lines; and the
/// number of its first line.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn first_bytes(
    from: &mut impl Read,
) -> std::result::Result<(Vec<u8>, usize), ChangeListError> {
    let mut first = Vec::new();
    let mut line = 1;
    while first.is_empty() {
        let read = from.by_ref().take(FIRST as u64).read_to_end(&mut first);
        if read.map_err(|error| ChangeListError::unreadable(&error))? == 0 {
            break;
        }
        if line == 1 && first.starts_with(BYTE_ORDER_MARK) {
            first.drain(..BYTE_ORDER_MARK.len());
        }
        let spaces = first.len() - first.trim_ascii_start().len();
        line += first.drain(..spaces).filter(|&byte| byte == b'\n').count();
    }
    Ok((first, line))
}
