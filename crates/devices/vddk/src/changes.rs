//! `changes=FILE`: the changed areas that VMware's QueryChangedDiskAreas has returned, as JSON, shown
//! as a dirty bitmap.

use std::io::Read as _;
use std::path::Path;

use blockhaul_block::{Error, Extents, Kind, Result};
use serde_json::Value;

/// The context that shows them, with the states of QEMU's dirty bitmaps.
pub(crate) const CONTEXT: &str = "qemu:dirty-bitmap:changes";
/// Maximum length of a file in bytes: more than a million areas.
const FILE_MAX: u64 = 128 << 20;

/// Changed areas in order, apart from each other: start and end.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes(Vec<(u64, u64)>);

impl Changes {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, or is no such list.
    pub(crate) fn read(path: &Path) -> Result<Changes> {
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
            Ok(_) => Changes::parse(&text).map_err(failed),
        }
    }

    /// Objects with `changedArea`, one after the other or in a list: a query reports as much as fits.
    fn parse(text: &str) -> std::result::Result<Changes, String> {
        let mut areas = Vec::new();
        let mut some = false;
        for value in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
            some = true;
            match value.map_err(|error| error.to_string())? {
                Value::Array(answers) => {
                    answers.iter().try_for_each(|answer| collect(answer, &mut areas))?;
                }
                answer => collect(&answer, &mut areas)?,
            }
        }
        if !some {
            return Err("the file is empty".into());
        }
        areas.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(areas.len());
        for (start, end) in areas {
            match joined.last_mut() {
                Some(last) if last.1 >= start => last.1 = last.1.max(end),
                _ => joined.push((start, end)),
            }
        }
        Ok(Changes(joined))
    }

    /// Where the last area ends; 0 without any.
    pub(crate) fn end(&self) -> u64 {
        self.0.last().map_or(0, |area| area.1)
    }

    /// The states of a range that is not empty, in at most `most` runs: 1 for changed, else 0.
    pub(crate) fn find(&self, at: u64, end: u64, most: usize) -> Extents {
        let mut found = Extents::new();
        let mut here = at;
        let first = self.0.partition_point(|area| area.1 <= at);
        for &(start, stop) in &self.0[first..] {
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

/// Adds the areas of one answer.
fn collect(answer: &Value, areas: &mut Vec<(u64, u64)>) -> std::result::Result<(), String> {
    let list = match answer.get("changedArea") {
        Some(Value::Array(list)) => list,
        Some(Value::Null) => return Ok(()),
        _ => return Err("not an answer of QueryChangedDiskAreas: no changedArea".into()),
    };
    for area in list {
        let number = |name| area.get(name).and_then(Value::as_u64);
        let range = number("start").zip(number("length"));
        let range = range.and_then(|(start, len)| Some((start, start.checked_add(len)?)));
        match range {
            Some((start, end)) if start < end => areas.push((start, end)),
            Some(_) => {}
            None => return Err("an area without start and length in bytes".into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(changes: &Changes, at: u64, end: u64, most: usize) -> Vec<(u64, u64)> {
        let found = changes.find(at, end, most);
        found.runs().iter().map(|run| (run.len, run.state)).collect()
    }

    #[test]
    fn answers_are_joined() {
        let text = r#"{"startOffset": 0, "length": 100, "changedArea":
            [{"start": 10, "length": 5}, {"start": 15, "length": 1}, {"start": 50, "length": 0}]}
            [{"changedArea": null}, {"changedArea": [{"start": 90, "length": 10}]}]"#;
        let changes = Changes::parse(text).unwrap();
        assert_eq!(changes, Changes(vec![(10, 16), (90, 100)]));
        assert_eq!(changes.end(), 100);
        let all = [(10, 0), (6, 1), (74, 0), (10, 1), (20, 0)];
        assert_eq!(runs(&changes, 0, 120, 9), all);
        for most in 1..5 {
            assert_eq!(runs(&changes, 0, 120, most), all[..most], "{most}");
        }
        assert_eq!(runs(&changes, 12, 14, 9), [(2, 1)]);
        assert_eq!(runs(&changes, 16, 17, 9), [(1, 0)]);
        assert_eq!(runs(&changes, 95, 200, 9), [(5, 1), (100, 0)]);
        assert_eq!(runs(&Changes::default(), 5, 9, 1), [(4, 0)]);
    }

    #[test]
    fn other_files_are_refused() {
        for (text, part) in [
            ("", "is empty"),
            ("[{}]", "no changedArea"),
            ("disk", "expected"),
            (r#"{"changedArea": [{"start": 1}]}"#, "without start and length"),
            (r#"{"changedArea": [{"start": -1, "length": 5}]}"#, "without start and length"),
            (r#"{"changedArea": [{"start": 18446744073709551615, "length": 5}]}"#, "without"),
        ] {
            let error = Changes::parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        let missing = Changes::read(Path::new("/no/such")).unwrap_err().to_string();
        assert!(missing.contains("changes=/no/such"), "{missing}");
    }
}
