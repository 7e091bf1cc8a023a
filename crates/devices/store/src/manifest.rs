//! `manifest.json`: the points of a store. What it says is checked before it is used: anybody may have
//! edited it.

use std::collections::HashSet;
use std::path::Path;

use blockhaul_block::{Error, Kind, Result};
use serde::{Deserialize, Serialize};

/// What the manifest calls itself.
const FORMAT: &str = "blockhaul backup store 1";
/// Maximum length of a manifest, in bytes.
pub(crate) const LENGTH_MAX: u64 = 64 << 20;
/// Longest name of a point in bytes.
const NAME_MAX: usize = 255;

/// A point in time that a store has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupPoint {
    /// Its number, which no other point of the store has; an increment has it in the names of its files.
    pub number: u32,
    /// Its name; no other point of the store has it.
    pub name: String,
    /// The bitmap that began at this point: the next increment must be of that one.
    pub checkpoint: String,
    /// Size of the disk in bytes.
    pub size: u64,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// What its file holds.
    pub content: PointContent,
    /// Digest of the manifest of its file `.raw`; none: not computed.
    pub digest: Option<String>,
}

/// What the file of a point holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum PointContent {
    /// All of the disk.
    Full(FullBackup),
    /// What has changed since the point before this one.
    Increment(Increment),
}

/// A full backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FullBackup {
    /// The number in the names of its files: that of an earlier point, if increments were folded into it.
    pub file: u32,
    /// The increment that is being folded into the file: the files with the number of the point. What
    /// they hold is read from there.
    pub folding: Option<FoldState>,
}

/// What an increment holds, and since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Increment {
    /// The name of the point before it.
    pub parent: String,
    /// The metadata context that said what had changed.
    pub bitmap: String,
    /// Digest of the ranges.
    pub ranges: String,
    /// Bytes in the ranges.
    pub changed: u64,
}

/// An increment that is being folded into a full backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FoldState {
    /// Digest of its ranges.
    pub ranges: String,
    /// Digest of the manifest of its file.
    pub digest: Option<String>,
}

impl BackupPoint {
    /// What it holds, if its file holds all of the disk.
    pub fn full(&self) -> Option<&FullBackup> {
        match &self.content {
            PointContent::Full(full) => Some(full),
            PointContent::Increment(_) => None,
        }
    }

    /// What it holds, if that is what has changed.
    pub fn increment(&self) -> Option<&Increment> {
        match &self.content {
            PointContent::Increment(increment) => Some(increment),
            PointContent::Full(_) => None,
        }
    }

    /// The number in the name of its file `.raw`.
    pub fn file(&self) -> u32 {
        self.full().map_or(self.number, |full| full.file)
    }

    /// The increment that is being folded into its file.
    pub fn folding(&self) -> Option<&FoldState> {
        self.full()?.folding.as_ref()
    }

    /// The numbers in the names of its files.
    pub(crate) fn files(&self) -> impl Iterator<Item = u32> {
        let folding = self.folding().map(|_| self.number);
        [Some(self.file()), folding].into_iter().flatten()
    }
}

/// Checks the name of a point or a checkpoint.
///
/// # Errors
/// [`Kind::Usage`] if it is empty, longer than 255 bytes, or has control characters.
pub fn check_name(name: &str) -> Result<()> {
    let wrong = match name {
        "" => "it is empty",
        name if name.len() > NAME_MAX => "it is longer than 255 bytes",
        name if name.chars().any(char::is_control) => "it has control characters",
        _ => return Ok(()),
    };
    Err(Error::new(Kind::Usage, format!("invalid name {name:?}: {wrong}")))
}

/// The whole file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestDocument {
    format: String,
    points: Vec<BackupPoint>,
    /// Digest of the points.
    digest: String,
}

/// The text of a manifest.
pub(crate) fn to_text(points: &[BackupPoint]) -> Result<String> {
    let text = ManifestDocument {
        format: FORMAT.into(),
        points: points.to_vec(),
        digest: digest(points)?,
    };
    let mut text = serde_json::to_string_pretty(&text).map_err(unserialized)?;
    text.push('\n');
    if text.len() as u64 > LENGTH_MAX {
        let text = "the store has too many points: prune it with blockhaul chain prune";
        return Err(Error::new(Kind::Invalid, text));
    }
    Ok(text)
}

/// The points of a manifest with this text.
///
/// # Errors
/// [`Kind::Invalid`] if it is incomplete, was changed by another program, or contradicts itself.
pub(crate) fn from_text(path: &Path, text: &str) -> Result<Vec<BackupPoint>> {
    let wrong = |why: String| Error::new(Kind::Invalid, format!("{}: {why}", path.display()));
    let text: ManifestDocument = serde_json::from_str(text)
        .map_err(|error| wrong(format!("not a manifest of a backup store: {error}")))?;
    if text.format != FORMAT {
        return Err(wrong(format!("its format is {:?}, not {FORMAT:?}", text.format)));
    }
    if digest(&text.points)? != text.digest {
        let text = "its digest is wrong: it was changed or damaged; restore it from a copy";
        return Err(wrong(text.into()));
    }
    check(&text.points).map_err(wrong)?;
    Ok(text.points)
}

/// Checks that points can be those of a store.
fn check(points: &[BackupPoint]) -> Result<(), String> {
    let mut names = HashSet::new();
    let mut numbers = HashSet::new();
    let mut taken = HashSet::new();
    let mut before: Option<&BackupPoint> = None;
    for point in points {
        let name = &point.name;
        check_name(name).map_err(|error| error.text())?;
        if !names.insert(name) {
            return Err(format!("two points have the name {name:?}"));
        }
        if !numbers.insert(point.number) {
            return Err(format!("point {name:?} has the number of another point"));
        }
        if !point.files().all(|file| taken.insert(file)) {
            return Err(format!("point {name:?} has the files of another point"));
        }
        if i64::try_from(point.size).is_err() {
            return Err(format!("point {name:?} has more than 2^63 - 1 bytes"));
        }
        let parent = before.map(|point| point.name.as_str());
        if let Some(increment) = point.increment() {
            if parent != Some(increment.parent.as_str()) {
                return Err(format!(
                    "point {name:?} is an increment of {:?}, which is not the point before it",
                    increment.parent
                ));
            }
            if before.is_some_and(|before| before.size != point.size) {
                return Err(format!("point {name:?} and the point before it differ in size"));
            }
        }
        before = Some(point);
    }
    Ok(())
}

fn digest(points: &[BackupPoint]) -> Result<String> {
    let text = serde_json::to_vec(points).map_err(unserialized)?;
    Ok(blake3::hash(&text).to_hex().to_string())
}

pub(crate) fn unserialized(error: serde_json::Error) -> Error {
    Error::new(Kind::Invalid, "cannot write JSON").because(error)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn full(number: u32, name: &str, size: u64) -> BackupPoint {
        BackupPoint {
            number,
            name: name.into(),
            checkpoint: name.into(),
            size,
            created: 1,
            content: PointContent::Full(FullBackup { file: number, folding: None }),
            digest: None,
        }
    }

    pub(crate) fn increment(number: u32, name: &str, parent: &str, size: u64) -> BackupPoint {
        let (parent, bitmap) = (parent.to_string(), format!("qemu:dirty-bitmap:{parent}"));
        let increment = Increment { parent, bitmap, ranges: String::new(), changed: 0 };
        BackupPoint { content: PointContent::Increment(increment), ..full(number, name, size) }
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written_and_damage_is_found() {
        let path = Path::new("m");
        let points = [full(1, "a", 9), increment(2, "b", "a", 9), full(3, "c", 10)];
        let text = to_text(&points).unwrap();
        assert_eq!(from_text(path, &text).unwrap(), points);
        assert_eq!(from_text(path, &to_text(&[]).unwrap()).unwrap(), []);
        for at in 0..text.len() - 1 {
            assert!(from_text(path, &text[..at]).is_err(), "cut at {at}");
            let mut damaged = text.clone().into_bytes();
            // Not from one white space to another one.
            damaged[at] = if damaged[at] == b'7' { b'8' } else { b'7' };
            let damaged = String::from_utf8(damaged).unwrap();
            assert!(from_text(path, &damaged).is_err(), "damaged at {at}: {damaged}");
        }
    }

    #[test]
    fn points_that_contradict_each_other_are_refused() {
        let mut folding = full(1, "a", 9);
        let two = Some(FoldState { ranges: String::new(), digest: None });
        folding.content = PointContent::Full(FullBackup { file: 2, folding: two });
        for (points, said) in [
            (vec![full(1, "a", 9), full(2, "a", 9)], "two points have the name"),
            (vec![full(1, "a", 9), full(1, "b", 9)], "the number of another point"),
            (vec![folding, full(2, "b", 9)], "the files of another point"),
            (vec![increment(1, "b", "a", 9)], "not the point before it"),
            (
                vec![full(1, "a", 9), full(2, "b", 9), increment(3, "c", "a", 9)],
                "not the point before it",
            ),
            (vec![full(1, "a", 9), increment(2, "b", "a", 8)], "differ in size"),
            (vec![full(1, "a", u64::MAX)], "2^63"),
            (vec![full(1, "a\n", 9)], "control characters"),
        ] {
            let text = to_text(&points).unwrap();
            let error = from_text(Path::new("m"), &text).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
