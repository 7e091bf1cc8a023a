//! `changes=FILE`: the changed areas that VMware's QueryChangedDiskAreas has returned, as JSON, shown
//! as a dirty bitmap.

use std::io::Read as _;
use std::path::Path;

use blockhaul_block::{Error, Extents, Kind, Result, gaps, join_ranges};
use serde_json::Value;

/// The context that shows them, with the states of QEMU's dirty bitmaps.
pub(crate) const CONTEXT: &str = "qemu:dirty-bitmap:changes";
/// Maximum length of a file in bytes: more than a million areas.
const FILE_MAX: u64 = 128 << 20;

/// Changed areas, and where they are all that has changed: start and end, in order, apart from each other.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangedAreas {
    areas: Vec<(u64, u64)>,
    covered: Vec<(u64, u64)>,
}

impl ChangedAreas {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, or is no such list.
    pub(crate) fn read(path: &Path) -> Result<ChangedAreas> {
        let failed = |why: String| {
            Error::new(Kind::Usage, format!("vddk: changes={}: {why}", path.display()))
        };
        let mut text = String::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(FILE_MAX + 1).read_to_string(&mut text));
        match read {
            Err(error) => Err(failed(error.to_string())),
            Ok(len) if len as u64 > FILE_MAX => {
                Err(failed(format!("longer than {FILE_MAX} bytes")))
            }
            Ok(_) => ChangedAreas::parse(&text).map_err(failed),
        }
    }

    /// Objects with `changedArea`, one after the other or in a list: a query reports as much as fits.
    fn parse(text: &str) -> std::result::Result<ChangedAreas, String> {
        let mut changes = ChangedAreas::default();
        let mut some = false;
        for value in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
            some = true;
            match value.map_err(|error| error.to_string())? {
                Value::Array(answers) => {
                    answers.iter().try_for_each(|answer| changes.add(answer))?;
                }
                answer => changes.add(&answer)?,
            }
        }
        if !some {
            return Err("the file is empty".into());
        }
        let ChangedAreas { areas, covered } = changes;
        Ok(ChangedAreas { areas: join_ranges(areas), covered: join_ranges(covered) })
    }

    /// Adds one answer: its areas are all that has changed from `startOffset` to `startOffset` + `length`. An
    /// empty list of areas may be absent.
    fn add(&mut self, answer: &Value) -> std::result::Result<(), String> {
        let range = |of: &Value, start: &str| {
            let number = |name| of.get(name).and_then(Value::as_u64);
            let (start, len) = number(start).zip(number("length"))?;
            Some((start, start.checked_add(len)?))
        };
        let list = match (answer.get("changedArea"), answer.get("startOffset")) {
            (Some(Value::Array(list)), _) => &list[..],
            (Some(Value::Null), _) => &[],
            (None, Some(_)) => {
                refuse_others(answer)?;
                &[]
            }
            _ => return Err("not an answer of QueryChangedDiskAreas: no changedArea".into()),
        };
        for area in list {
            let area = range(area, "start");
            self.areas.push(area.ok_or("an area without start and length in bytes")?);
        }
        // An answer without both covers nothing.
        self.covered.extend(range(answer, "startOffset"));
        Ok(())
    }

    /// Checks that this is all that has changed on a disk of `size` bytes.
    ///
    /// # Errors
    /// [`Kind::Usage`] if an area or an answer ends beyond it, or the answers do not cover all of it.
    pub(crate) fn check(&self, size: u64) -> Result<()> {
        let end = |ranges: &[(u64, u64)]| ranges.last().map_or(0, |range| range.1);
        let end = end(&self.areas).max(end(&self.covered));
        if end > size {
            let text = format!("vddk: changes= ends at {end}, and the disk has {size} bytes");
            return Err(Error::new(Kind::Usage, text));
        }
        match gaps(&self.covered, size).first() {
            None => Ok(()),
            Some(_) if self.covered.is_empty() => Err(Error::new(
                Kind::Usage,
                "vddk: changes=: no answer has startOffset and length, which say what it covers: save the whole \
                 answers of QueryChangedDiskAreas",
            )),
            Some((start, stop)) => Err(Error::new(
                Kind::Usage,
                format!(
                    "vddk: changes= does not cover all of the disk of {size} bytes: bytes {start} to {} are \
                     missing: query again with startOffset={start} and add the answer",
                    stop - 1
                ),
            )),
        }
    }

    /// The states of a range that is not empty, in at most `most` runs: 1 for changed, else 0.
    pub(crate) fn find(&self, at: u64, end: u64, most: usize) -> Extents {
        let mut found = Extents::new();
        let mut here = at;
        let first = self.areas.partition_point(|area| area.1 <= at);
        for &(start, stop) in &self.areas[first..] {
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

/// Refuses an answer without `changedArea` that has members which may stand for it. pyVmomi and others add
/// members that describe the object.
fn refuse_others(answer: &Value) -> std::result::Result<(), String> {
    const KNOWN: [&str; 4] = ["startOffset", "length", "dynamicProperty", "dynamicType"];
    let mut names = answer.as_object().into_iter().flat_map(|members| members.keys());
    match names.find(|name| !name.starts_with('_') && !KNOWN.contains(&name.as_str())) {
        Some(name) => Err(format!(
            "not an answer of QueryChangedDiskAreas: no changedArea, but the unknown member {name:?}"
        )),
        None => Ok(()),
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
        let changes = ChangedAreas::parse(text).unwrap();
        let areas = vec![(10, 16), (90, 100)];
        assert_eq!(changes, ChangedAreas { areas, covered: vec![(0, 120)] });
        changes.check(120).unwrap();
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
    fn answers_that_do_not_cover_the_disk_are_refused() {
        let missing = |start: u64, stop: u64| {
            format!(
                "bytes {start} to {} are missing: query again with startOffset={start} ",
                stop - 1
            )
        };
        for (text, said) in [
            (r#"{"startOffset": 0, "length": 50, "changedArea": []}"#, missing(50, 100)),
            (r#"{"startOffset": 50, "length": 50, "changedArea": []}"#, missing(0, 50)),
            (
                r#"{"startOffset": 0, "length": 20} {"startOffset": 30, "length": 70}"#,
                missing(20, 30),
            ),
            (r#"{"changedArea": []}"#, "no answer has startOffset and length".into()),
            ("[]", "no answer has startOffset and length".into()),
            (r#"{"startOffset": 0, "length": 101}"#, "ends at 101".into()),
            (
                r#"{"startOffset": 0, "length": 100, "changedArea": [{"start": 90, "length": 11}]}"#,
                "ends at 101".into(),
            ),
        ] {
            let error = ChangedAreas::parse(text).unwrap().check(100).unwrap_err();
            assert!(error.text().contains(&said), "{text}: {error}");
        }
    }

    #[test]
    fn other_files_are_refused() {
        for (text, part) in [
            ("", "is empty"),
            ("[{}]", "no changedArea"),
            (r#"{"startOffset": 0, "length": 9, "changedAreas": []}"#, "member \"changedAreas\""),
            (r#"{"startOffset": 0, "length": 9, "error": "fault"}"#, "member \"error\""),
            ("disk", "expected"),
            (r#"{"changedArea": [{"start": 1}]}"#, "without start and length"),
            (r#"{"changedArea": [{"start": -1, "length": 5}]}"#, "without start and length"),
            (r#"{"changedArea": [{"start": 18446744073709551615, "length": 5}]}"#, "without"),
        ] {
            let error = ChangedAreas::parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        let missing = ChangedAreas::read(Path::new("/no/such")).unwrap_err().to_string();
        assert!(missing.contains("changes=/no/such"), "{missing}");
    }
}
