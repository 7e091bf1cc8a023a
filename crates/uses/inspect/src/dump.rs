//! The content of a device in hexadecimal, in the format of nbddump 1.22.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, ContextSet, Device, DeviceExt as _, Error, Kind, ZERO};

use crate::error::{InspectionError, Result};

/// Bytes of a line.
const LINE: usize = 16;
/// Columns of the bytes of a full line.
const COLUMNS: usize = 3 * LINE + 1;
/// Bytes of a read: a multiple of a line.
const READ: u64 = 1 << 20;
/// Fewest bytes of zeroes that are not read.
const ZEROES: u64 = 4096;

/// Writes lines for `length` bytes from `offset` on, as far as the device has them, and flushes the output after each
/// read. An output that fails with [`ErrorKind::BrokenPipe`] ends the dump, which is not an error.
///
/// # Errors
/// The offset is behind the end, a read fails, or the output cannot be written.
pub async fn write_dump(
    device: &Arc<dyn Device>,
    (offset, length): (u64, u64),
    color: bool,
    output: &mut impl Write,
) -> Result<()> {
    let facts = device.facts();
    if offset > facts.size {
        let text = format!("offset {offset} is behind the end: {} bytes", facts.size);
        return Err(Error::new(Kind::Invalid, text).on(&facts.name).into());
    }
    let end = offset.saturating_add(length).min(facts.size);
    match write_lines(device, (offset, end), color, output).await {
        Err(InspectionError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Writes the lines of a range: offset and end.
async fn write_lines(
    device: &Arc<dyn Device>,
    (mut at, end): (u64, u64),
    color: bool,
    output: &mut impl Write,
) -> Result<()> {
    let facts = device.facts();
    let mut lines = Lines { size: facts.size, color, last: None, starred: false };
    let context = facts.context(BASE_ALLOCATION);
    while at < end {
        let zeroes = zeroes_at(device, context, at, end).await;
        if zeroes >= ZEROES {
            at = lines.zeroes(at, zeroes, output)?;
            continue;
        }
        let len = usize::try_from(READ.min(end - at)).unwrap_or(LINE);
        let read = device.read(at, len).await.map_err(|error| error.on(&facts.name))?;
        for line in read.bytes().chunks(LINE) {
            lines.line(at, line, output)?;
            at += line.len() as u64;
        }
        output.flush()?;
    }
    Ok(())
}

/// Whole lines of zeroes at `at`, in bytes, as far as the device reports them. An error is reported
/// by the read that follows.
async fn zeroes_at(
    device: &Arc<dyn Device>,
    context: Option<ContextSet>,
    at: u64,
    end: u64,
) -> u64 {
    let Some(context) = context else { return 0 };
    let lists = device.extents(at, end - at, context).await.unwrap_or_default();
    let run = lists.first().and_then(|list| list.runs().first().copied());
    let len = run.filter(|run| run.state & ZERO != 0).map_or(0, |run| run.len.min(end - at));
    len - len % LINE as u64
}

/// Makes lines, and leaves out those that repeat.
struct Lines {
    /// Size of the device: its last line is always shown, even if only a part of it is asked for.
    size: u64,
    color: bool,
    /// The bytes of the last line.
    last: Option<[u8; LINE]>,
    /// A mark for left out lines was the last thing printed.
    starred: bool,
}

impl Lines {
    /// A line of at most 16 bytes.
    fn line(&mut self, at: u64, bytes: &[u8], output: &mut impl Write) -> io::Result<()> {
        let is_last = self.size.saturating_sub(at) <= LINE as u64;
        // Short lines compare as if zeroes followed.
        let mut padded = [0; LINE];
        padded[..bytes.len()].copy_from_slice(bytes);
        let repeats = self.last == Some(padded) && !is_last;
        if repeats {
            return self.star(output);
        }
        self.starred = false;
        self.last = Some(padded);
        let line = if self.color { colored(at, bytes) } else { plain(at, bytes) };
        output.write_all(line.as_bytes())
    }

    /// Whole lines of zeroes. Returns where they end.
    fn zeroes(&mut self, at: u64, len: u64, output: &mut impl Write) -> io::Result<u64> {
        let end = at + len;
        self.line(at, &[0; LINE], output)?;
        let last = end - LINE as u64;
        if last > at {
            if last - at > LINE as u64 {
                self.star(output)?;
            }
            self.line(last, &[0; LINE], output)?;
        }
        Ok(end)
    }

    fn star(&mut self, output: &mut impl Write) -> io::Result<()> {
        if std::mem::replace(&mut self.starred, true) {
            return Ok(());
        }
        output.write_all(if self.color { "\u{2606}\n".as_bytes() } else { b"*\n" })
    }
}

/// The columns that `count` bytes take.
fn columns(count: usize) -> usize {
    3 * count + usize::from(count >= LINE / 2)
}

fn plain(at: u64, bytes: &[u8]) -> String {
    let mut line = format!("{at:010x}: ");
    for (index, byte) in bytes.iter().enumerate() {
        let gap = if index + 1 == LINE / 2 { " " } else { "" };
        let _ = write!(line, "{byte:02x} {gap}");
    }
    line.extend(std::iter::repeat_n(' ', COLUMNS - columns(bytes.len())));
    line.push('|');
    line.extend(bytes.iter().map(|byte| if is_shown(*byte) { char::from(*byte) } else { '.' }));
    line.extend(std::iter::repeat_n(' ', LINE - bytes.len()));
    line.push_str("|\n");
    line
}

fn is_shown(byte: u8) -> bool {
    (b' '..=b'~').contains(&byte)
}

/// Colours of the offset, of unimportant parts, of bytes, of letters and digits, of other
/// characters.
const OFFSET: &str = "\x1b[22;32m";
const DIM: &str = "\x1b[22;90m";
const BYTE: &str = "\x1b[1;34m";
const LETTER: &str = "\x1b[1;31m";
const MARK: &str = "\x1b[1;35m";

fn colored(at: u64, bytes: &[u8]) -> String {
    let mut line = format!("{OFFSET}{at:010x}{DIM}: ");
    for (index, byte) in bytes.iter().enumerate() {
        let gap = if index + 1 == LINE / 2 { " " } else { "" };
        let _ = write!(line, "{}{byte:02x} {gap}", if *byte == 0 { DIM } else { BYTE });
    }
    line.push_str(DIM);
    line.extend(std::iter::repeat_n(' ', COLUMNS - columns(bytes.len())));
    line.push('\u{2502}');
    for &byte in bytes {
        let shown = char::from(byte);
        match byte {
            _ if byte.is_ascii_alphanumeric() => line.extend(LETTER.chars().chain([shown])),
            _ if is_shown(byte) => line.extend(MARK.chars().chain([shown])),
            _ => line.extend(DIM.chars().chain(['\u{b7}'])),
        }
    }
    line.push_str(DIM);
    line.extend(std::iter::repeat_n(' ', LINE - bytes.len()));
    line.push_str("\u{2502}\n\x1b[0m");
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_lines_keep_the_columns() {
        let full = plain(0, &[b'A'; 16]);
        for count in 1..16 {
            assert_eq!(plain(4096, &[0; 16][..count]).len(), full.len(), "{count}");
        }
        assert_eq!(
            plain(0x123, b"ab\0").trim_end(),
            format!("0000000123: 61 62 00 {:40}|ab.             |", "")
        );
    }
}
