//! `changes=FILE`: the changed areas that VMware's QueryChangedDiskAreas has returned, as JSON, shown
//! as a dirty bitmap.

use std::io::Read;
use std::path::Path;

use blockhaul_block::{Error, Extents, Kind, Result};
use blockhaul_change_lists::{ChangeList, ChangeListError, ListKind};

/// The context that shows them, with the states of QEMU's dirty bitmaps.
pub(crate) const CONTEXT: &str = "qemu:dirty-bitmap:changes";

/// Changed areas: offset and length, in order, apart from each other.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangedAreas(Vec<(u64, u64)>);

impl ChangedAreas {
    /// Reads a file with all that has changed on a disk of `size` bytes.
    ///
    /// # Errors
    /// [`Kind::Usage`] if it cannot be read, is no such list, or is not one of all of this disk.
    pub(crate) fn read(path: &Path, size: u64) -> Result<ChangedAreas> {
        let failed =
            |why: &str| Error::new(Kind::Usage, format!("vddk: changes={}: {why}", path.display()));
        let file = std::fs::File::open(path).map_err(|error| failed(&error.to_string()))?;
        ChangedAreas::parse(file, size).map_err(|why| failed(&why))
    }

    fn parse(from: impl Read, size: u64) -> std::result::Result<ChangedAreas, String> {
        let text = |error: ChangeListError| error.to_string();
        let list = ChangeList::read(from).map_err(text)?;
        if list.kind() != ListKind::VmwareAnswers {
            return Err("not an answer of QueryChangedDiskAreas: save the whole answers".into());
        }
        let fitted = list.fit(size).map_err(text)?;
        match fitted.incomplete {
            Some(incomplete) => Err(text(incomplete.error)),
            None => Ok(ChangedAreas(fitted.ranges)),
        }
    }

    /// The states of a range that is not empty, in at most `most` runs: 1 for changed, else 0.
    pub(crate) fn find(&self, at: u64, end: u64, most: usize) -> Extents {
        let mut found = Extents::new();
        let mut here = at;
        let first = self.0.partition_point(|(start, len)| start + len <= at);
        for &(start, len) in &self.0[first..] {
            let stop = start + len;
            if start >= end || found.len() >= most {
                break;
            }
            found.push(start.saturating_sub(here), 0);
            if found.len() == most {
                return found;
            }
            here = stop.min(end);
            found.push(here - start.max(at), 1);
        }
        if found.len() < most {
            found.push(end - here, 0);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(changes: &ChangedAreas, at: u64, end: u64, most: usize) -> Vec<(u64, u64)> {
        let found = changes.find(at, end, most);
        found.runs().iter().map(|run| (run.len, run.state)).collect()
    }

    #[test]
    fn answers_are_joined() {
        let text = r#"{"startOffset": 0, "length": 100, "changedArea":
            [{"start": 10, "length": 5}, {"start": 15, "length": 1}, {"start": 50, "length": 0}]}
            [{"startOffset": 99, "length": 11, "changedArea": null},
             {"_vimtype": "x", "dynamicProperty": [], "startOffset": 110, "length": 10},
             {"startOffset": 80, "length": 20, "changedArea": [{"start": 90, "length": 10}]}]"#;
        let changes = ChangedAreas::parse(text.as_bytes(), 120).unwrap();
        assert_eq!(changes, ChangedAreas(vec![(10, 6), (90, 10)]));
        let all = [(10, 0), (6, 1), (74, 0), (10, 1), (20, 0)];
        assert_eq!(runs(&changes, 0, 120, 9), all);
        for most in 1..5 {
            assert_eq!(runs(&changes, 0, 120, most), all[..most], "{most}");
        }
        assert_eq!(runs(&changes, 12, 14, 9), [(2, 1)]);
        assert_eq!(runs(&changes, 16, 17, 9), [(1, 0)]);
        assert_eq!(runs(&changes, 95, 200, 9), [(5, 1), (100, 0)]);
        assert_eq!(runs(&ChangedAreas::default(), 5, 9, 1), [(4, 0)]);
    }

    #[test]
    fn other_lists_and_lists_of_a_part_are_refused() {
        for (text, part) in [
            (
                r#"{"startOffset": 0, "length": 50, "changedArea": []}"#,
                "query again with startOffset=50",
            ),
            (
                r#"{"startOffset": 0, "length": 20} {"startOffset": 30, "length": 70}"#,
                "bytes 20 to 29",
            ),
            (r#"{"changedArea": []}"#, "no answer of QueryChangedDiskAreas has startOffset"),
            (r#"{"startOffset": 0, "length": 101}"#, "end at 101, but the source has 100"),
            (
                r#"{"startOffset": 0, "length": 100, "changedArea": [{"start": 90, "length": 11}]}"#,
                "ends at 101",
            ),
            ("", "is empty"),
            ("[]", "not an answer"),
            ("[{}]", "not a range"),
            (r#"{"offset": 0, "length": 9}"#, "not an answer of QueryChangedDiskAreas"),
            (r#"{"startOffset": 0, "length": 9, "error": "fault"}"#, "member \"error\""),
        ] {
            let error = ChangedAreas::parse(text.as_bytes(), 100).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        let missing = ChangedAreas::read(Path::new("/no/such"), 9).unwrap_err().to_string();
        assert!(missing.contains("changes=/no/such"), "{missing}");
    }
}
