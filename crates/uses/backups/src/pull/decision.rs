//! The decision whether a disk is copied in full, or what has changed.

use std::time::{Duration, SystemTime};

use blockhaul_store::{BackupPoint, Store};

use super::request::{ChangeBitmap, PointKind, PointPlan, PullDisk, PullMode};
use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};

/// Why a disk that has a point in its store is copied in full.
const NO_BITMAP: &str = "no bitmap was named or found that has what changed since the newest point";

/// The question whether a disk is copied in full: its facts besides the source and the store.
#[derive(Debug, Clone)]
pub(crate) struct PullQuestion {
    pub(crate) bitmap: Option<ChangeBitmap>,
    pub(crate) point: Option<String>,
    pub(crate) checkpoint: Option<String>,
    pub(crate) mode: PullMode,
    pub(crate) default_point: String,
}

impl PullQuestion {
    pub(crate) fn new(disk: &PullDisk, default_point: &str) -> PullQuestion {
        PullQuestion {
            bitmap: disk.bitmap.clone(),
            point: disk.point.clone(),
            checkpoint: disk.checkpoint.clone(),
            mode: disk.mode,
            default_point: default_point.to_string(),
        }
    }

    /// Decides for a source with this size, in bytes, and with or without the bitmap. The plan has no ranges
    /// yet.
    pub(crate) fn decide(&self, store: &Store, size: u64, has_bitmap: bool) -> Result<PointPlan> {
        let name = self.point.clone().unwrap_or_else(|| fresh_name(store, &self.default_point));
        let checkpoint = self.checkpoint.clone().unwrap_or_else(|| name.clone());
        let kind = match store.points().iter().find(|point| point.name == name) {
            Some(there) if self.is_done(there, store, &checkpoint, size) => PointKind::Existing,
            Some(_) => {
                let text = format!(
                    "{} has a point {name:?} already: choose another name with --point",
                    store.dir().display()
                );
                return Err(BackupError::new(BackupErrorKind::Request, BackupStep::Plan, text));
            }
            None => match self.increment(store, size, has_bitmap)? {
                Ok(increment) => increment,
                Err(reason) => self.full(reason)?,
            },
        };
        Ok(PointPlan { name, checkpoint, size, kind, data: None, ranges: None })
    }

    /// A full backup for this reason, unless only an increment is wanted.
    fn full(&self, reason: String) -> Result<PointKind> {
        if self.mode != PullMode::Increment {
            return Ok(PointKind::Full { reason });
        }
        let text =
            format!("an increment is not possible: {reason}; use mode auto for a full backup");
        Err(BackupError::new(BackupErrorKind::Open, BackupStep::Plan, text))
    }

    /// An increment, or why the backup has to be a full one.
    fn increment(
        &self,
        store: &Store,
        size: u64,
        has_bitmap: bool,
    ) -> Result<Result<PointKind, String>> {
        if self.mode == PullMode::Full {
            return Ok(Err("a full backup was requested".into()));
        }
        let Some(newest) = store.newest() else {
            return Ok(Err("it is the first of this disk".into()));
        };
        let Some(bitmap) = &self.bitmap else {
            return Ok(Err(NO_BITMAP.into()));
        };
        let ChangeBitmap { context, checkpoint } = bitmap;
        if !has_bitmap {
            return Ok(Err(format!("the source has no bitmap {context:?}")));
        }
        if newest.checkpoint != *checkpoint && newest.name != *checkpoint {
            return Err(of_another_backup(bitmap, store, newest));
        }
        if newest.size != size {
            let text = format!(
                "the source has {size} bytes, but point {:?} has {}: the disk was resized, or is another \
                 one; make a full backup with --full",
                newest.name, newest.size
            );
            return Err(BackupError::new(BackupErrorKind::Open, BackupStep::Plan, text));
        }
        Ok(Ok(PointKind::Increment { parent: newest.name.clone(), bitmap: context.clone() }))
    }

    /// Whether the point `there` is the requested one: an earlier run of the same pull has completed this
    /// disk, and failed with another one.
    fn is_done(&self, there: &BackupPoint, store: &Store, checkpoint: &str, size: u64) -> bool {
        let is_newest = store.newest().is_some_and(|newest| newest.number == there.number);
        let bitmap = self.bitmap.as_ref();
        let began_there = bitmap.is_some_and(|bitmap| bitmap.checkpoint == there.checkpoint);
        let is_same = match (there.increment(), bitmap) {
            (Some(increment), Some(bitmap)) => increment.bitmap == bitmap.context,
            (Some(_), None) => false,
            (None, _) => true,
        };
        is_newest && !began_there && is_same && there.checkpoint == checkpoint && there.size == size
    }
}

/// The bitmap began at another point than the newest.
fn of_another_backup(bitmap: &ChangeBitmap, store: &Store, newest: &BackupPoint) -> BackupError {
    let ChangeBitmap { context, checkpoint } = bitmap;
    let future = if is_of_future(newest) {
        " and a time in the future, as of a wrong clock: newer points may be hidden"
    } else {
        ""
    };
    let text = format!(
        "bitmap {context:?} began at {checkpoint:?}, but the newest point of {} is {:?} with checkpoint \
         {:?}{future}: this bitmap began with another backup; make a full backup with --full, or say with \
         --parent at which checkpoint the bitmap began",
        store.dir().display(),
        newest.name,
        newest.checkpoint
    );
    BackupError::new(BackupErrorKind::Request, BackupStep::Plan, text)
}

/// Whether the time of a point is later than clocks usually differ.
fn is_of_future(point: &BackupPoint) -> bool {
    let made = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(point.created));
    let ahead = made.and_then(|made| made.duration_since(SystemTime::now()).ok());
    ahead.is_some_and(|ahead| ahead > Duration::from_secs(300))
}

/// This name, with a number where the store has such a point.
fn fresh_name(store: &Store, name: &str) -> String {
    let is_taken = |name: &String| store.points().iter().any(|point| point.name == *name);
    let numbered = (2..).map(|count: u64| format!("{name}-{count}"));
    let mut names = std::iter::once(name.to_string()).chain(numbered);
    names.find(|name| !is_taken(name)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use blockhaul_store::{FullBackup, Increment, IncrementRanges, PointContent, StoreWriter};

    use super::*;

    const CONTEXT: &str = "qemu:dirty-bitmap:monday";

    /// A store with a full backup, and an increment if there are two names.
    fn store(names: &[&str]) -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let mut parent: Option<&str> = None;
        for name in names {
            let mut writer = StoreWriter::lock(folder.path()).unwrap();
            let number = writer.next_number().unwrap();
            let ranges = IncrementRanges::default();
            let content = match parent {
                None => PointContent::Full(FullBackup { file: number, folding: None }),
                Some(parent) => PointContent::Increment(Increment {
                    parent: parent.into(),
                    bitmap: CONTEXT.into(),
                    ranges: ranges.digest(),
                    changed: 0,
                }),
            };
            let (name, checkpoint) = (name.to_string(), name.to_string());
            let point = BackupPoint {
                number,
                name,
                checkpoint,
                size: 9,
                created: 0,
                content,
                digest: None,
            };
            writer.begin(point, parent.map(|_| &ranges)).unwrap();
            std::fs::write(writer.store().raw(number), "123456789").unwrap();
            writer.publish(1, None).unwrap();
            parent = names.first().copied();
        }
        let store = Store::open_or_new(folder.path()).unwrap();
        (folder, store)
    }

    fn question(mode: PullMode, has_bitmap: bool, point: Option<&str>) -> PullQuestion {
        let bitmap = ChangeBitmap { context: CONTEXT.into(), checkpoint: "monday".into() };
        PullQuestion {
            bitmap: has_bitmap.then_some(bitmap),
            point: point.map(str::to_string),
            checkpoint: None,
            mode,
            default_point: "fresh".into(),
        }
    }

    #[track_caller]
    fn kind(question: &PullQuestion, store: &Store, (size, has_bitmap): (u64, bool)) -> PointKind {
        question.decide(store, size, has_bitmap).unwrap().kind
    }

    #[track_caller]
    fn refused(question: &PullQuestion, store: &Store, (size, has_bitmap): (u64, bool)) -> String {
        question.decide(store, size, has_bitmap).unwrap_err().to_string()
    }

    #[test]
    fn what_is_copied_depends_on_store_and_source() {
        let (_kept, empty) = store(&[]);
        let (_folder, monday) = store(&["monday"]);
        let auto = question(PullMode::Auto, true, Some("tuesday"));
        let full = |found: PointKind, words: &str| match found {
            PointKind::Full { reason } => assert!(reason.contains(words), "{reason}"),
            other => panic!("{other:?}"),
        };
        full(kind(&auto, &empty, (9, true)), "the first of this disk");
        full(kind(&auto, &monday, (9, false)), "no bitmap \"qemu:dirty-bitmap:monday\"");
        full(
            kind(&question(PullMode::Auto, false, None), &monday, (9, true)),
            "no bitmap was named or found",
        );
        full(kind(&question(PullMode::Full, true, None), &monday, (8, true)), "requested");
        let increment = PointKind::Increment { parent: "monday".into(), bitmap: CONTEXT.into() };
        assert_eq!(kind(&auto, &monday, (9, true)), increment);
        let only = question(PullMode::Increment, true, None);
        assert_eq!(kind(&only, &monday, (9, true)), increment);
        assert!(refused(&only, &monday, (9, false)).contains("not possible"));
        assert!(refused(&only, &empty, (9, true)).contains("not possible"));
    }

    #[test]
    fn a_bitmap_of_another_backup_is_refused() {
        let (_folder, store) = store(&["monday", "tuesday"]);
        let auto = question(PullMode::Auto, true, Some("wednesday"));
        let said = refused(&auto, &store, (9, true));
        assert!(
            said.contains("began with another backup") && said.contains("\"tuesday\""),
            "{said}"
        );
        let other = refused(&question(PullMode::Auto, true, None), &store, (8, true));
        assert!(other.contains("began with another backup"), "{other}");
    }

    #[test]
    fn a_point_of_the_future_is_named_in_the_error() {
        let (_folder, store) = store(&["tuesday"]);
        let mut newest = store.newest().unwrap().clone();
        let bitmap = ChangeBitmap { context: CONTEXT.into(), checkpoint: "monday".into() };
        let said = |newest: &BackupPoint| of_another_backup(&bitmap, &store, newest).to_string();
        assert!(!said(&newest).contains("future"), "{}", said(&newest));
        newest.created = 7_226_000_000;
        assert!(said(&newest).contains("a time in the future"), "{}", said(&newest));
        newest.created = u64::MAX;
        assert!(!said(&newest).is_empty());
    }

    #[test]
    fn a_disk_of_another_size_is_refused() {
        let (_folder, store) = store(&["monday"]);
        let said = refused(&question(PullMode::Auto, true, None), &store, (10, true));
        assert!(said.contains("10 bytes") && said.contains("--full"), "{said}");
    }

    #[test]
    fn a_point_that_exists_is_only_accepted_from_the_same_pull() {
        let (_folder, store) = store(&["monday", "tuesday"]);
        let again = question(PullMode::Auto, true, Some("tuesday"));
        assert_eq!(kind(&again, &store, (9, true)), PointKind::Existing);
        let older = question(PullMode::Auto, true, Some("monday"));
        assert!(refused(&older, &store, (9, true)).contains("already"));
        assert!(refused(&again, &store, (8, true)).contains("already"));
        // The next increment under an old name.
        let mut next = again.clone();
        next.bitmap = Some(ChangeBitmap {
            context: "qemu:dirty-bitmap:tuesday".into(),
            checkpoint: "tuesday".into(),
        });
        assert!(refused(&next, &store, (9, true)).contains("already"));
    }

    #[test]
    fn a_default_name_that_exists_gets_a_number() {
        let (_folder, store) = store(&["monday", "monday-2"]);
        assert_eq!(fresh_name(&store, "monday"), "monday-3");
        assert_eq!(fresh_name(&store, "tuesday"), "tuesday");
    }
}
