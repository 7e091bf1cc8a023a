//! Detection of sequential readers.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Readers that are told apart.
const READERS: usize = 8;

/// Recent readers, and how far was read ahead for each.
pub(crate) struct ReadAhead {
    /// Bytes ahead of a reader.
    window: u64,
    readers: Mutex<Vec<SequentialReader>>,
}

#[derive(Debug, Clone, Copy)]
struct SequentialReader {
    end: u64,
    /// The end of what was read ahead.
    ahead: u64,
}

impl ReadAhead {
    /// With this many bytes ahead; 0: never.
    pub(crate) fn new(window: u64) -> ReadAhead {
        ReadAhead { window, readers: Mutex::default() }
    }

    /// Notes a read, and says what to read ahead, if its reader reads on from where an earlier read ended.
    pub(crate) fn note(&self, read: Range<u64>) -> Option<Range<u64>> {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = readers.iter().position(|reader| reader.end == read.start) else {
            if readers.len() >= READERS {
                readers.remove(0);
            }
            readers.push(SequentialReader { end: read.end, ahead: 0 });
            return None;
        };
        let mut reader = readers.remove(place);
        reader.end = read.end;
        let until = read.end.saturating_add(self.window);
        let from = reader.ahead.max(read.end);
        // In steps of half a window.
        let is_due = until > from && until - from >= self.window / 2;
        if is_due {
            reader.ahead = until;
        }
        readers.push(reader);
        is_due.then_some(from..until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_reads_on_is_read_ahead_of() {
        let ahead = ReadAhead::new(100);
        assert_eq!(ahead.note(0..10), None);
        assert_eq!(ahead.note(10..20), Some(20..120));
        assert_eq!(ahead.note(20..30), None);
        assert_eq!(ahead.note(30..80), Some(120..180));
        assert_eq!(ahead.note(500..510), None);
        assert_eq!(ahead.note(80..90), None);
        for at in 0..20 {
            assert_eq!(ahead.note(1000 + at * 7..1003 + at * 7), None);
        }
        assert_eq!(ReadAhead::new(0).note(0..1), None);
    }
}
