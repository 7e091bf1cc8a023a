//! The map of an export: pages of JSON, checked, as runs.
//!
//! A number says what an extent is, but 1 means a hole in a full backup, and what has changed in an
//! incremental one. So the words beside it count.

use blockhaul_block::{Error, Extents, HOLE, Kind, Result, ZERO};
use blockhaul_wire::printable;
use serde::Deserialize;

/// Extents of a page that are asked for.
pub(crate) const PAGE: u32 = 8192;
/// Largest page in bytes: far more than that many extents take.
pub(crate) const PAGE_MAX: usize = 4 << 20;
/// Most pages: what 64 TiB take, if each bit of the bitmap begins another extent.
const PAGES_MAX: u32 = 1 << 17;
/// Most runs that are kept, 9 bytes each.
const RUNS_MAX: usize = 8 << 20;

/// The bits of a run: [`HOLE`] and [`ZERO`], and one for what has changed.
const IS_HOLE: u8 = 1;
const IS_ZERO: u8 = 2;
const CHANGED: u8 = 4;
const _: () = assert!(IS_HOLE as u64 == HOLE && IS_ZERO as u64 == ZERO);

/// A page. An answer without one of the members is none: it must not look like the end of the map.
#[derive(Debug, Deserialize)]
struct ExportMapPage {
    /// No extents are `null`.
    #[serde(deserialize_with = "Option::deserialize")]
    extents: Option<Vec<PageExtent>>,
    /// `null` on the last page.
    #[serde(deserialize_with = "Option::deserialize")]
    next_offset: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct PageExtent {
    offset: u64,
    length: u64,
    #[serde(rename = "type")]
    number: u64,
    #[serde(default)]
    description: String,
}

/// What the words beside a number mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StateMeaning {
    /// In a full backup only.
    Full(u8),
    /// In an incremental backup only.
    Incremental(u8),
    Either(u8),
}

fn words(description: &str) -> Option<StateMeaning> {
    Some(match description {
        "data" => StateMeaning::Full(0),
        "hole" => StateMeaning::Full(IS_HOLE),
        "hole,zero" => StateMeaning::Full(IS_HOLE | IS_ZERO),
        "zero" => StateMeaning::Either(IS_ZERO),
        "clean" => StateMeaning::Incremental(0),
        "dirty" => StateMeaning::Incremental(CHANGED),
        "dirty,zero" => StateMeaning::Incremental(CHANGED | IS_ZERO),
        _ => return None,
    })
}

/// The map, as far as it was read.
#[derive(Debug, Default)]
pub(crate) struct ExportMap {
    /// Where each run begins, ascending; and its bits.
    starts: Vec<u64>,
    states: Vec<u8>,
    end: u64,
    pages: u32,
    /// Whether it is that of an incremental backup, once that is known.
    incremental: Option<bool>,
}

impl ExportMap {
    /// Bytes of the disk.
    pub(crate) fn size(&self) -> u64 {
        self.end
    }

    /// Whether it says what has changed.
    pub(crate) fn is_incremental(&self) -> bool {
        self.incremental == Some(true)
    }

    /// Takes in the next page; where the one after it begins.
    pub(crate) fn add(&mut self, text: &[u8]) -> Result<Option<u64>> {
        let wrong = |why: String| Error::new(Kind::Io, format!("the map of the server {why}"));
        let page: ExportMapPage = serde_json::from_slice(text)
            .map_err(|error| wrong(format!("is not what KubeVirt sends: {error}")))?;
        self.pages += 1;
        if self.pages > PAGES_MAX {
            return Err(wrong(format!("has more than {PAGES_MAX} pages")));
        }
        let before = self.end;
        for extent in page.extents.unwrap_or_default() {
            let PageExtent { offset, length, number, description } = extent;
            if offset != self.end {
                let what = if offset < self.end { "overlaps" } else { "has a gap" };
                return Err(wrong(format!(
                    "{what} at offset {}: an extent begins at {offset}",
                    self.end
                )));
            }
            let end = offset.checked_add(length).filter(|end| i64::try_from(*end).is_ok());
            let end = end.ok_or_else(|| {
                wrong(format!("has {length} bytes at offset {offset}, more than any disk"))
            })?;
            if length == 0 {
                return Err(wrong(format!("has an empty extent at offset {offset}")));
            }
            self.push(end, number, &description).map_err(wrong)?;
        }
        match page.next_offset {
            Some(next) if next != self.end || self.end == before => {
                Err(wrong(format!("ends at offset {}, and goes on at {next}", self.end)))
            }
            Some(next) => Ok(Some(next)),
            None if self.end == 0 => Err(wrong("is empty".to_owned())),
            None if self.end == before => {
                Err(wrong(format!("goes on at {before}, and has nothing there")))
            }
            None => Ok(None),
        }
    }

    /// Appends what reaches to `end`.
    fn push(&mut self, end: u64, number: u64, description: &str) -> Result<(), String> {
        let (incremental, state) = match words(description) {
            Some(StateMeaning::Full(state)) => (Some(false), state),
            Some(StateMeaning::Incremental(state)) => (Some(true), state),
            Some(StateMeaning::Either(state)) => (None, state),
            None => {
                let shown = printable(description.as_bytes(), 64);
                return Err(format!(
                    "has an extent of type {number}, \"{shown}\", which this version does not know"
                ));
            }
        };
        match (self.incremental, incremental) {
            (Some(known), Some(now)) if known != now => {
                return Err("mixes extents of full and incremental backups".to_owned());
            }
            (known, now) => self.incremental = known.or(now),
        }
        if self.states.last() != Some(&state) {
            if self.starts.len() == RUNS_MAX {
                return Err(format!("has more than {RUNS_MAX} extents"));
            }
            self.starts.push(self.end);
            self.states.push(state);
        }
        self.end = end;
        Ok(())
    }

    /// The runs of a range, in the map; at most `most`.
    pub(crate) fn extents(&self, at: u64, len: u64, changed: bool, most: usize) -> Extents {
        let mut found = Extents::new();
        let stop = at.saturating_add(len).min(self.end);
        let mut from = at;
        let mut index = self.index(at);
        while from < stop && found.len() < most {
            let Some(state) = self.states.get(index) else { break };
            let end = self.starts.get(index + 1).map_or(self.end, |next| *next).min(stop);
            let state =
                if changed { u64::from(state & CHANGED != 0) } else { u64::from(state & !CHANGED) };
            found.push(end - from, state);
            from = end;
            index += 1;
        }
        found
    }

    /// Whether all of a range reads as zeroes.
    pub(crate) fn is_zero(&self, at: u64, len: u64) -> bool {
        let extents = self.extents(at, len, false, 2);
        matches!(extents.runs(), [run] if run.len == len && run.state & ZERO != 0)
    }

    /// The run that an offset is in.
    fn index(&self, at: u64) -> usize {
        self.starts.partition_point(|start| *start <= at).saturating_sub(1)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn page(extents: &[(u64, u64, &str)], next: Option<u64>) -> Vec<u8> {
        let extents: Vec<_> = extents
            .iter()
            .map(|(offset, length, description)| {
                serde_json::json!({ "offset": offset, "length": length, "type": 0, "description": description })
            })
            .collect();
        serde_json::json!({ "extents": extents, "next_offset": next }).to_string().into_bytes()
    }

    fn refused(pages: &[Vec<u8>]) -> String {
        let mut map = ExportMap::default();
        let (last, first) = pages.split_last().unwrap();
        for page in first {
            map.add(page).unwrap();
        }
        map.add(last).unwrap_err().to_string()
    }

    #[test]
    fn pages_are_joined() {
        let mut map = ExportMap::default();
        let first = page(&[(0, 10, "data"), (10, 5, "hole,zero")], Some(15));
        assert_eq!(map.add(&first).unwrap(), Some(15));
        assert_eq!(
            map.add(&page(&[(15, 5, "hole,zero"), (20, 1, "hole"), (21, 9, "zero")], None))
                .unwrap(),
            None
        );
        assert_eq!((map.size(), map.is_incremental()), (30, false));
        let found = |at, len| {
            let extents = map.extents(at, len, false, 99);
            extents.runs().iter().map(|run| (run.len, run.state)).collect::<Vec<_>>()
        };
        assert_eq!(found(0, 30), [(10, 0), (10, 3), (1, 1), (9, 2)]);
        assert_eq!(found(5, 10), [(5, 0), (5, 3)]);
        assert_eq!(map.extents(0, 30, false, 2).total(), 20);
        assert!(
            map.is_zero(12, 8) && map.is_zero(21, 9) && !map.is_zero(9, 2) && !map.is_zero(20, 1)
        );
    }

    #[test]
    fn what_has_changed_is_known_in_an_incremental_backup() {
        let mut map = ExportMap::default();
        let all = [(0, 10, "zero"), (10, 5, "dirty"), (15, 5, "dirty,zero"), (20, 5, "clean")];
        map.add(&page(&all, None)).unwrap();
        assert!(map.is_incremental());
        let runs = |changed| {
            let extents = map.extents(0, 25, changed, 99);
            extents.runs().iter().map(|run| (run.len, run.state)).collect::<Vec<_>>()
        };
        assert_eq!(runs(true), [(10, 0), (10, 1), (5, 0)]);
        assert_eq!(runs(false), [(10, 2), (5, 0), (5, 2), (5, 0)]);
    }

    #[test]
    fn a_map_that_is_not_one_is_refused() {
        for (pages, why) in [
            (vec![page(&[], None)], "is empty"),
            (vec![b"{\"extents\":null,\"next_offset\":null}".to_vec()], "is empty"),
            (vec![page(&[], Some(0))], "goes on at 0"),
            (vec![page(&[(5, 5, "data")], None)], "gap at offset 0"),
            (vec![page(&[(0, 5, "data"), (4, 5, "data")], None)], "overlaps at offset 5"),
            (vec![page(&[(0, 5, "data")], Some(4))], "goes on at 4"),
            (vec![page(&[(0, 5, "data")], Some(6))], "goes on at 6"),
            (vec![page(&[(0, 5, "data")], Some(5)), page(&[], Some(5))], "goes on at 5"),
            (vec![page(&[(0, 5, "data")], Some(5)), page(&[(0, 5, "data")], None)], "overlaps"),
            (vec![page(&[(0, 5, "data")], Some(5)), page(&[], None)], "has nothing there"),
            (
                vec![
                    page(&[(0, 5, "data")], Some(5)),
                    b"{\"extents\":null,\"next_offset\":null}".to_vec(),
                ],
                "goes on at 5, and has nothing there",
            ),
            (vec![b"{}".to_vec()], "missing field `extents`"),
            (vec![page(&[(0, 5, "data")], Some(5)), b"{}".to_vec()], "missing field `extents`"),
            (
                vec![page(&[(0, 5, "data")], Some(5)), b"{\"error\":\"internal\"}".to_vec()],
                "missing field `extents`",
            ),
            (vec![b"{\"next_offset\":null}".to_vec()], "missing field `extents`"),
            (vec![b"{\"extents\":[]}".to_vec()], "missing field `next_offset`"),
            (vec![page(&[(0, 0, "data")], None)], "empty extent"),
            (vec![page(&[(0, u64::MAX, "data")], None)], "more than any disk"),
            (vec![page(&[(0, 1, "data"), (1, u64::MAX, "data")], None)], "more than any disk"),
            (vec![page(&[(0, 5, "da\u{7}ta")], None)], "da\\u{7}ta"),
            (vec![page(&[(0, 5, "data"), (5, 5, "dirty")], None)], "mixes"),
            (vec![b"<html>".to_vec()], "not what KubeVirt sends"),
            (vec![b"{\"extents\":[{\"offset\":-1,\"length\":1,\"type\":0}]}".to_vec()], "not what"),
        ] {
            let said = refused(&pages);
            assert!(said.contains(why), "{why}: {said}");
        }
    }

    #[test]
    fn a_map_without_end_is_refused() {
        let mut map = ExportMap::default();
        let mut at = 0;
        let refused = loop {
            match map.add(&page(&[(at, 1, "data")], Some(at + 1))) {
                Ok(next) => at = next.unwrap(),
                Err(error) => break error.to_string(),
            }
        };
        assert!(refused.contains("more than 131072 pages"), "{refused}");
    }
}
