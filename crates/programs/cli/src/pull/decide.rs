//! Whether a disk is copied in full, or what has changed; and whether an earlier pull is resumed.

use blockhaul_store::{Point, Ranges, Store, Writer};

use super::wanted::{Found, Mode, Question, WantedDisk};
use crate::exit::{self, Failure, stored};

/// What is copied of a disk.
#[derive(Debug)]
pub(super) enum What {
    /// Nothing: the point exists.
    Already,
    /// All of it, and the reason.
    Full { why: String },
    /// What has changed since a point of this name, according to this metadata context.
    Increment { parent: String, bitmap: String, ranges: Ranges },
}

impl What {
    /// The ranges of an increment.
    pub(super) fn ranges(&self) -> Option<&Ranges> {
        match self {
            What::Increment { ranges, .. } => Some(ranges),
            _ => None,
        }
    }
}

/// The same, before the bitmap is read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Already,
    Full { why: String },
    Increment { parent: String, bitmap: String },
}

/// What a new point is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decision {
    /// The name of the point.
    pub(super) name: String,
    /// The bitmap that begins at it.
    pub(super) checkpoint: String,
    pub(super) kind: Kind,
}

/// Decides for a source with this size and with or without the bitmap. `fresh`: a name that the store
/// does not have.
pub(super) fn decide(
    question: &Question,
    store: &Store,
    (size, has_bitmap): (u64, bool),
    fresh: &str,
) -> Result<Decision, Failure> {
    let name = question.point.clone().unwrap_or_else(|| fresh.to_string());
    let checkpoint = question.checkpoint.clone().unwrap_or_else(|| name.clone());
    let decided = |kind| Ok(Decision { name: name.clone(), checkpoint: checkpoint.clone(), kind });
    if let Some(there) = store.points().iter().find(|point| point.name == name) {
        return if is_done(there, question, store, &checkpoint, size) {
            decided(Kind::Already)
        } else {
            Err(Failure::usage(format!(
                "{} has a point {name:?} already: choose another name with --point",
                store.dir().display()
            )))
        };
    }
    let full = |why: String| match question.mode {
        Mode::Increment => {
            let text =
                format!("an increment is not possible: {why}; use mode auto for a full backup");
            Err(Failure::new(exit::OPEN, text))
        }
        _ => decided(Kind::Full { why }),
    };
    if question.mode == Mode::Full {
        return full("a full backup was requested".into());
    }
    let Some((context, began)) = &question.bitmap else {
        return full("no bitmap was named".into());
    };
    let Some(newest) = store.newest() else {
        return full("the store has no point yet".into());
    };
    if !has_bitmap {
        return full(format!("the source has no bitmap {context:?}"));
    }
    if newest.checkpoint != *began && newest.name != *began {
        return Err(Failure::usage(format!(
            "bitmap {context:?} began at {began:?}, but the newest point of {} is {:?} with checkpoint \
             {:?}: this bitmap began with another backup; make a full backup with --full, or say with \
             --parent at which checkpoint the bitmap began",
            store.dir().display(),
            newest.name,
            newest.checkpoint
        )));
    }
    if newest.size != size {
        return Err(Failure::new(
            exit::OPEN,
            format!(
                "the source has {size} bytes, but point {:?} has {}: the disk was resized, or is another \
                 one; make a full backup with --full",
                newest.name, newest.size
            ),
        ));
    }
    decided(Kind::Increment { parent: newest.name.clone(), bitmap: context.clone() })
}

/// Whether the point `there` is what is asked for: an earlier run of the same pull has completed this
/// disk, and failed with another one.
fn is_done(there: &Point, question: &Question, store: &Store, checkpoint: &str, size: u64) -> bool {
    let is_newest = store.newest().is_some_and(|newest| newest.number == there.number);
    let began_there = question.bitmap.as_ref().is_some_and(|(_, began)| *began == there.checkpoint);
    let is_same = match (there.increment(), &question.bitmap) {
        (Some(increment), Some((context, _))) => increment.bitmap == *context,
        (Some(_), None) => false,
        (None, _) => true,
    };
    is_newest && !began_there && is_same && there.checkpoint == checkpoint && there.size == size
}

/// How the copy of a disk begins.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Begin {
    /// With what an earlier run has copied into the file of this number.
    Resume(u32),
    /// With nothing; what an earlier run has copied is discarded.
    Anew,
}

/// Decides whether what an earlier run has left is continued.
pub(super) fn begin(
    writer: &Writer,
    wanted: &WantedDisk,
    found: &Found,
    restart: bool,
) -> Result<Begin, Failure> {
    let Some(left) = writer.unfinished() else { return Ok(Begin::Anew) };
    let journal = writer.journal(left.number);
    let dir = writer.store().dir().display();
    let is_discarded = blockhaul_engine::discarding_journal(&journal).map_err(stored)?.is_some();
    let abandon = format!("if its source is gone: blockhaul chain abandon {dir}");
    if restart {
        if is_discarded {
            let text = format!(
                "{}: what it records was discarded at the source, and is in {dir} only: resume the pull \
                 without --restart; {abandon}",
                journal.display()
            );
            return Err(Failure::new(exit::OPEN, text));
        }
        blockhaul_engine::check_journal(&journal, true).map_err(stored)?;
        return Ok(Begin::Anew);
    }
    if !journal.exists() {
        return Ok(Begin::Anew);
    }
    let is_named = wanted.point.is_some() && left.name == found.name;
    let is_same = match (left.increment(), &found.what) {
        (None, What::Full { .. }) => true,
        (Some(increment), What::Increment { parent, bitmap, ranges }) => {
            increment.parent == *parent
                && increment.bitmap == *bitmap
                && increment.ranges == ranges.digest()
        }
        _ => false,
    };
    if is_named && is_same && left.size == found.size && left.checkpoint == found.checkpoint {
        return Ok(Begin::Resume(left.number));
    }
    let why = match (is_named, is_same) {
        (false, _) => format!("resume it with --point {:?}", left.name),
        (true, false) => "the source now has other changes than when it began".to_string(),
        (true, true) => {
            "the source or the checkpoint is another one than when it began".to_string()
        }
    };
    let next = if is_discarded {
        format!("what it records was discarded at the source, and is in {dir} only; {abandon}")
    } else {
        "or discard it with --restart".to_string()
    };
    let text = format!("{dir} has an unfinished point {:?}: {why}; {next}", left.name);
    Err(Failure::new(exit::OPEN, text))
}

#[cfg(test)]
mod tests {
    use blockhaul_store::{Content, Full, Increment};

    use super::*;

    const CONTEXT: &str = "qemu:dirty-bitmap:monday";

    /// A store with a full backup, and an increment if there are two names.
    fn store(names: &[&str]) -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let mut parent: Option<&str> = None;
        for name in names {
            let mut writer = Writer::lock(folder.path()).unwrap();
            let number = writer.next_number().unwrap();
            let ranges = Ranges::default();
            let content = match parent {
                None => Content::Full(Full { file: number, folding: None }),
                Some(parent) => Content::Increment(Increment {
                    parent: parent.into(),
                    bitmap: CONTEXT.into(),
                    ranges: ranges.digest(),
                    changed: 0,
                }),
            };
            let (name, checkpoint) = (name.to_string(), name.to_string());
            let point =
                Point { number, name, checkpoint, size: 9, created: 0, content, digest: None };
            writer.begin(point, parent.map(|_| &ranges)).unwrap();
            std::fs::write(writer.store().raw(number), "123456789").unwrap();
            writer.publish(1, None).unwrap();
            parent = names.first().copied();
        }
        let store = Store::open_or_new(folder.path()).unwrap();
        (folder, store)
    }

    fn question(mode: Mode, bitmap: bool, point: Option<&str>) -> Question {
        let bitmap = bitmap.then(|| (CONTEXT.to_string(), "monday".to_string()));
        Question { bitmap, point: point.map(str::to_string), checkpoint: None, mode }
    }

    #[track_caller]
    fn kind(question: &Question, store: &Store, source: (u64, bool)) -> Kind {
        decide(question, store, source, "fresh").unwrap().kind
    }

    #[track_caller]
    fn refused(question: &Question, store: &Store, source: (u64, bool)) -> String {
        decide(question, store, source, "fresh").unwrap_err().to_string()
    }

    #[test]
    fn what_is_copied_depends_on_store_and_source() {
        let (_kept, empty) = store(&[]);
        let (_folder, monday) = store(&["monday"]);
        let auto = question(Mode::Auto, true, Some("tuesday"));
        let full = |found: Kind, words: &str| match found {
            Kind::Full { why } => assert!(why.contains(words), "{why}"),
            other => panic!("{other:?}"),
        };
        full(kind(&auto, &empty, (9, true)), "no point yet");
        full(kind(&auto, &monday, (9, false)), "no bitmap \"qemu:dirty-bitmap:monday\"");
        full(kind(&question(Mode::Auto, false, None), &monday, (9, true)), "no bitmap was named");
        full(kind(&question(Mode::Full, true, None), &monday, (8, true)), "requested");
        let increment = Kind::Increment { parent: "monday".into(), bitmap: CONTEXT.into() };
        assert_eq!(kind(&auto, &monday, (9, true)), increment);
        let only = question(Mode::Increment, true, None);
        assert_eq!(kind(&only, &monday, (9, true)), increment);
        assert!(refused(&only, &monday, (9, false)).contains("not possible"));
        assert!(refused(&only, &empty, (9, true)).contains("not possible"));
    }

    #[test]
    fn a_bitmap_of_another_backup_is_refused() {
        let (_folder, store) = store(&["monday", "tuesday"]);
        let auto = question(Mode::Auto, true, Some("wednesday"));
        let said = refused(&auto, &store, (9, true));
        assert!(
            said.contains("began with another backup") && said.contains("\"tuesday\""),
            "{said}"
        );
        let other = refused(&question(Mode::Auto, true, None), &store, (8, true));
        assert!(other.contains("began with another backup"), "{other}");
    }

    #[test]
    fn a_disk_of_another_size_is_refused() {
        let (_folder, store) = store(&["monday"]);
        let said = refused(&question(Mode::Auto, true, None), &store, (10, true));
        assert!(said.contains("10 bytes") && said.contains("--full"), "{said}");
    }

    #[test]
    fn a_point_that_exists_is_only_accepted_from_the_same_pull() {
        let (_folder, store) = store(&["monday", "tuesday"]);
        let again = question(Mode::Auto, true, Some("tuesday"));
        assert_eq!(kind(&again, &store, (9, true)), Kind::Already);
        let older = question(Mode::Auto, true, Some("monday"));
        assert!(refused(&older, &store, (9, true)).contains("already"));
        assert!(refused(&again, &store, (8, true)).contains("already"));
        // The next increment under an old name.
        let mut next = again.clone();
        next.bitmap = Some(("qemu:dirty-bitmap:tuesday".into(), "tuesday".into()));
        assert!(refused(&next, &store, (9, true)).contains("already"));
    }
}
