//! The map of ranges that the source did not return, in the format of ddrescue's map files.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Error, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};

/// Maximum number of ranges in a map: about 6 MiB of text.
const RANGES_MAX: usize = 1 << 17;
/// Maximum length of a file that is read as a map.
const FILE_MAX: u64 = 64 << 20;
/// Minimum time between two replacements of the file that nothing waits for.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// How thoroughly a range was read that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailedState {
    /// By one long request.
    Long,
    /// In pieces.
    Pieces,
    /// Block by block.
    Blocks,
}

const STATES: [(FailedState, &str); 3] =
    [(FailedState::Long, "*"), (FailedState::Pieces, "/"), (FailedState::Blocks, "-")];

/// A range that failed, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FailedRange {
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) state: FailedState,
}

/// The ranges of a source that failed, and the file with them.
#[derive(Debug)]
pub(crate) struct ErrorMap {
    path: PathBuf,
    ranges: Mutex<FailedRanges>,
    /// Number of ranges that were added; changes while `ranges` is held.
    added: AtomicU64,
    /// Held while the file is replaced.
    file: Mutex<SavedMap>,
}

/// The file as it was last replaced.
#[derive(Debug)]
struct SavedMap {
    /// Value of `added` when its contents were made.
    added: u64,
    at: Instant,
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct FailedRanges {
    /// Size of the source; 0: not known yet.
    size: u64,
    /// Everything was tried once: what is in no range is on the target.
    is_tried: bool,
    /// By their offsets: length and state.
    ranges: BTreeMap<u64, (u64, FailedState)>,
}

impl ErrorMap {
    /// The map in this file; an empty one if there is none, or it is to begin again.
    pub(crate) fn read(path: &Path, restart: bool) -> Result<ErrorMap> {
        let ranges = if restart { Ok(FailedRanges::default()) } else { read(path) };
        let ranges = ranges.map_err(|error| failed(path, &blockhaul_io::plain(&error)))?;
        Ok(ErrorMap::new(path.into(), ranges))
    }

    fn new(path: PathBuf, ranges: FailedRanges) -> ErrorMap {
        let file = Mutex::new(SavedMap { added: 0, at: blockhaul_io::now() });
        ErrorMap { path, ranges: Mutex::new(ranges), added: AtomicU64::new(0), file }
    }

    fn ranges(&self) -> MutexGuard<'_, FailedRanges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether everything was tried once, by this run or an earlier one.
    pub(crate) fn is_tried(&self) -> bool {
        self.ranges().is_tried
    }

    /// Sets the size of the source.
    ///
    /// # Errors
    /// If the map is one of a source of another size.
    pub(crate) fn fit(&self, size: u64) -> Result<()> {
        let mut ranges = self.ranges();
        if ranges.size != 0 && ranges.size != size {
            let found = ranges.size;
            let why = format!(
                "it is the map of a source of {found} bytes, and this one has {size}: choose another name"
            );
            return Err(failed(&self.path, &why));
        }
        ranges.size = size;
        Ok(())
    }

    /// Whether all of this range failed already.
    pub(crate) fn covers(&self, at: u64, len: u64) -> bool {
        let ranges = self.ranges();
        let before = ranges.ranges.range(..=at).next_back();
        before.is_some_and(|(start, (long, _))| start + long >= at.saturating_add(len))
    }

    /// Adds a range that failed in one long request. Returns a number for [`ErrorMap::save_added`].
    ///
    /// # Errors
    /// If there are too many.
    pub(crate) fn add(&self, at: u64, len: u64) -> std::io::Result<u64> {
        let mut ranges = self.ranges();
        ranges.remove(at, len);
        ranges.insert(FailedRange { at, len, state: FailedState::Long });
        if ranges.ranges.len() <= RANGES_MAX {
            return Ok(self.added.fetch_add(1, Ordering::Relaxed) + 1);
        }
        Err(Error::other(format!("more than {RANGES_MAX} ranges cannot be read")))
    }

    /// Replaces what the map has of this range; `None`: it is on the target now.
    pub(crate) fn set(&self, at: u64, len: u64, state: Option<FailedState>) {
        let mut ranges = self.ranges();
        ranges.remove(at, len);
        if let Some(state) = state {
            ranges.insert(FailedRange { at, len, state });
        }
    }

    /// Everything was tried once.
    pub(crate) fn set_tried(&self) {
        self.ranges().is_tried = true;
    }

    /// Reads blocks again that failed in an earlier run, unless that run was interrupted.
    pub(crate) fn reopen_blocks(&self) {
        let mut ranges = self.ranges();
        if ranges.ranges.values().all(|(_, state)| *state == FailedState::Blocks) {
            ranges.ranges.values_mut().for_each(|(_, state)| *state = FailedState::Pieces);
        }
    }

    /// The ranges in this state, the last one first.
    pub(crate) fn backwards(&self, wanted: FailedState) -> Vec<FailedRange> {
        let ranges = self.ranges();
        let all = ranges.ranges.iter().rev();
        let all = all.map(|(at, (len, state))| FailedRange { at: *at, len: *len, state: *state });
        all.filter(|range| range.state == wanted).collect()
    }

    /// Number of ranges, and bytes in them.
    pub(crate) fn totals(&self) -> (usize, u64) {
        let ranges = self.ranges();
        (ranges.ranges.len(), ranges.ranges.values().map(|(len, _)| len).sum())
    }

    /// Makes the file durable with the range that [`ErrorMap::add`] has given this number. Ranges that were added
    /// while the file was being replaced share its next replacement. Blocks.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn save_added(&self, number: u64) -> std::io::Result<()> {
        let mut saved = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if saved.added >= number { Ok(()) } else { self.replace_file(&mut saved) }
    }

    /// Whether the file is older than [`SAVE_INTERVAL`], and is not being replaced.
    pub(crate) fn is_save_due(&self) -> bool {
        self.file.try_lock().is_ok_and(|saved| blockhaul_io::now() >= saved.at + SAVE_INTERVAL)
    }

    /// Replaces the file durably. Blocks.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn save(&self) -> std::io::Result<()> {
        self.replace_file(&mut self.file.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn replace_file(&self, saved: &mut SavedMap) -> std::io::Result<()> {
        let ranges = self.ranges();
        let (text, added) = (ranges.to_text(), self.added.load(Ordering::Relaxed));
        drop(ranges);
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let fresh = PathBuf::from(name);
        let mut file = std::fs::File::create(&fresh)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&fresh, &self.path)?;
        blockhaul_io::sync_folder(&self.path)?;
        *saved = SavedMap { added, at: blockhaul_io::now() };
        Ok(())
    }

    /// The failure of a copy whose map cannot be written.
    pub(crate) fn unwritable(&self, error: &std::io::Error) -> TransferError {
        let next = match error.kind() {
            ErrorKind::NotFound => ": create its directory first",
            _ => "",
        };
        failed(&self.path, &format!("cannot write it: {}{next}", blockhaul_io::plain(error)))
    }

    /// [`ErrorMap::save`], as a failure of the copy.
    pub(crate) fn saved(&self) -> Result<()> {
        self.save().map_err(|error| self.unwritable(&error))
    }
}

impl FailedRanges {
    /// Removes a range from all others.
    fn remove(&mut self, at: u64, len: u64) {
        let end = at.saturating_add(len);
        let before = self.ranges.range(..end).rev();
        let met = before.take_while(|(start, (long, _))| **start + *long > at);
        let met: Vec<_> = met.map(|(start, rest)| (*start, *rest)).collect();
        for (start, (long, state)) in met {
            let stop = start + long;
            self.ranges.remove(&start);
            if start < at {
                self.ranges.insert(start, (at - start, state));
            }
            if stop > end {
                self.ranges.insert(end, (stop - end, state));
            }
        }
    }

    /// Inserts a range that no other one meets, and joins it with its neighbours.
    fn insert(&mut self, range: FailedRange) {
        let FailedRange { mut at, mut len, state } = range;
        if let Some((start, (long, other))) = self.ranges.range(..at).next_back()
            && *other == state
            && start + long == at
        {
            (at, len) = (*start, long + len);
        }
        if let Some((long, other)) = self.ranges.get(&(at + len)).copied()
            && other == state
        {
            self.ranges.remove(&(at + len));
            len += long;
        }
        self.ranges.insert(at, (len, state));
    }

    /// The file: what is in no range was copied, or, in an interrupted first pass, not tried.
    fn to_text(&self) -> String {
        let (rest, status) = if self.is_tried { ("+", "+") } else { ("?", "?") };
        let mut text = format!(
            "# Mapfile of blockhaul copy --error-map, in the format of GNU ddrescue\n\
             # current_pos  current_status  current_pass\n0x0  {status}  1\n# pos  size  status\n"
        );
        let mut row = |at: u64, len: u64, state: &str| {
            if len > 0 {
                let _ = writeln!(text, "{at:#010X}  {len:#010X}  {state}");
            }
        };
        let mut next = 0;
        for (at, (len, state)) in &self.ranges {
            row(next, at - next, rest);
            let shown = STATES.iter().find(|(other, _)| other == state).map_or("-", |row| row.1);
            row(*at, *len, shown);
            next = at + len;
        }
        row(next, self.size.saturating_sub(next), rest);
        text
    }

    fn parse(text: &str) -> Result<FailedRanges, String> {
        let lines = text.lines().map(str::trim).zip(1..);
        let mut lines = lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#'));
        let mut found = FailedRanges { is_tried: true, ..FailedRanges::default() };
        lines.next().ok_or("it is no map file of ddrescue: it is empty")?;
        let mut has_copied = false;
        for (line, number) in lines {
            let wrong =
                || format!("line {number}: {line:?} is not \"offset size status\" of ddrescue");
            let words: Vec<_> = line.split_whitespace().collect();
            let [at, len, status] = words[..] else { return Err(wrong()) };
            let (Some(at), Some(len)) = (integer(at), integer(len)) else { return Err(wrong()) };
            let end = at.checked_add(len).filter(|_| at == found.size && len > 0);
            found.size = end.ok_or_else(wrong)?;
            match STATES.iter().find(|(_, shown)| *shown == status) {
                Some((state, _)) => found.insert(FailedRange { at, len, state: *state }),
                None if status == "?" => found.is_tried = false,
                None if status == "+" => has_copied = true,
                None => return Err(wrong()),
            }
            if found.ranges.len() > RANGES_MAX {
                return Err(format!("it has more than {RANGES_MAX} ranges"));
            }
        }
        if found.size == 0 {
            return Err("it is no map file of ddrescue: it has no ranges".to_string());
        }
        if has_copied && !found.is_tried {
            let text = "it is the map of a run of ddrescue that has not tried everything (\"?\"): let ddrescue end \
                        its first pass, or choose another name";
            return Err(text.to_string());
        }
        Ok(found)
    }
}

/// A number of ddrescue: decimal, or hexadecimal after 0x.
fn integer(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn read(path: &Path) -> std::io::Result<FailedRanges> {
    match std::fs::metadata(path) {
        Ok(data) if !data.is_file() => return Err(Error::other("it is not a regular file")),
        Ok(data) if data.len() > FILE_MAX => {
            return Err(Error::other("it is too large for a map file of ddrescue"));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(FailedRanges::default()),
        Err(error) => return Err(error),
    }
    let text = std::fs::read(path)?;
    let text = String::from_utf8(text)
        .map_err(|_| Error::other("it is no map file of ddrescue: choose another name"))?;
    FailedRanges::parse(&text).map_err(Error::other)
}

/// The warning that a copy with a map of an earlier one reads only what the map lists.
pub(crate) fn only_failed(map: &Path) -> String {
    format!(
        "only what {} lists as failed is read again, and nothing else is copied: remove the map to copy everything",
        map.display()
    )
}

/// The map cannot be used.
pub(crate) fn failed(path: &Path, why: &str) -> TransferError {
    let text = format!("error map {}: {why}", path.display());
    TransferError::new(TransferErrorKind::Open, TransferStep::Journal, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> ErrorMap {
        ErrorMap::new(PathBuf::new(), FailedRanges { size: 1 << 20, ..FailedRanges::default() })
    }

    #[test]
    fn ranges_join_and_split() {
        let map = map();
        map.add(0x1000, 0x1000).unwrap();
        map.add(0x3000, 0x1000).unwrap();
        assert_eq!(map.totals(), (2, 0x2000));
        map.add(0x2000, 0x1000).unwrap();
        assert_eq!(map.totals(), (1, 0x3000));
        assert!(map.covers(0x1000, 0x3000) && !map.covers(0x1000, 0x3001) && !map.covers(0, 2));
        map.set(0x2000, 0x200, Some(FailedState::Blocks));
        map.set(0x3000, 0x1000, None);
        assert_eq!(map.totals(), (3, 0x2000));
        let blocks = FailedRange { at: 0x2000, len: 0x200, state: FailedState::Blocks };
        assert_eq!(map.backwards(FailedState::Blocks), [blocks]);
        let offsets = |list: Vec<FailedRange>| list.iter().map(|r| r.at).collect::<Vec<_>>();
        assert_eq!(offsets(map.backwards(FailedState::Long)), [0x2200, 0x1000]);
    }

    #[test]
    fn the_file_is_read_again() {
        let map = map();
        map.add(0x1000, 0x1000).unwrap();
        let first = map.ranges().clone();
        assert_eq!(FailedRanges::parse(&first.to_text()).unwrap(), first);
        map.set_tried();
        map.set(0x1800, 0x200, Some(FailedState::Blocks));
        map.set(0x1a00, 0x200, Some(FailedState::Pieces));
        let second = map.ranges().clone();
        assert_eq!(FailedRanges::parse(&second.to_text()).unwrap(), second);
        assert!(second.to_text().contains("\n0x00001800  0x00000200  -\n"), "{}", second.to_text());
    }

    #[test]
    fn ranges_share_the_replacement_of_the_file() {
        let scratch = blockhaul_testkit::tools::ScratchDir::new().unwrap();
        let path = scratch.file("map");
        let map = ErrorMap::new(path.clone(), map().ranges().clone());
        let first = map.add(0, 512).unwrap();
        let second = map.add(4096, 512).unwrap();
        map.save_added(first).unwrap();
        assert_eq!(read(&path).unwrap(), *map.ranges());
        std::fs::remove_file(&path).unwrap();
        map.save_added(second).unwrap();
        assert!(!path.exists(), "the file had both");
        let third = map.add(8192, 512).unwrap();
        map.save_added(third).unwrap();
        assert_eq!(read(&path).unwrap(), *map.ranges());
    }

    #[test]
    fn other_files_are_refused() {
        for text in [
            "",
            "x",
            "0 ? 1\n0 5",
            "0 ? 1\n0 5 x",
            "0 ? 1\n1 5 +",
            "0 ? 1\n0 0 +",
            "0 ? 1\n0 0xffffffffffffffff +\n0xffffffffffffffff 2 +",
            "0 ? 1\n0 5 +\n5 5 ?",
        ] {
            let parsed = FailedRanges::parse(text);
            assert!(parsed.is_err(), "{text:?}: {parsed:?}");
        }
    }
}
