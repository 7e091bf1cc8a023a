//! The runs of a range of the disk.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Result};

use super::errors::damaged;
use super::image::MappedImage;
use super::map::{DiskPlace, Run};
use super::pages::TableLookup;

impl MappedImage {
    /// The runs of a range that is within the disk, at least one of them; ends early when there are
    /// more than `most`. `None` if a table must be read first.
    pub(super) fn runs_now(&self, at: u64, end: u64, most: usize) -> Option<Result<Vec<Run>>> {
        let mut walk = RunWalk { next: at, end, most, steps: u64::MAX, runs: Vec::new() };
        let mut look = TableLookup::new(&self.pages);
        match self.walk(&mut walk, &mut look) {
            Err(error) => Some(Err(error)),
            Ok(()) if look.missing.is_some() => None,
            Ok(()) => Some(Ok(walk.runs)),
        }
    }

    /// The same, reading tables; ends early also when `steps` entries of tables were looked at,
    /// which is counted down.
    pub(super) async fn runs(
        &self,
        files: &[Arc<dyn Device>],
        (at, end): (u64, u64),
        most: usize,
        steps: &mut u64,
    ) -> Result<Vec<Run>> {
        let mut walk = RunWalk { next: at, end, most, steps: *steps, runs: Vec::new() };
        let mut look = TableLookup::new(&self.pages);
        loop {
            self.walk(&mut walk, &mut look)?;
            let Some(key) = look.missing else { break };
            let page = self.pages.load(files, key).await?;
            look.add(key, page);
        }
        *steps = walk.steps;
        Ok(walk.runs)
    }

    /// Goes on until the walk has ended, or a page is missing.
    fn walk(&self, walk: &mut RunWalk, look: &mut TableLookup<'_>) -> Result<()> {
        while walk.next < walk.end && walk.runs.len() <= walk.most && walk.steps > 0 {
            let Some((len, place)) = self.map.find(walk.next, look)? else { return Ok(()) };
            if len == 0 {
                return Err(Error::misfit());
            }
            let run = Run { at: walk.next, len: len.min(walk.end - walk.next), place };
            self.check(&run)?;
            walk.next = run.end();
            walk.steps -= 1;
            push(&mut walk.runs, run);
        }
        Ok(())
    }

    /// Refuses data that begins beyond the end of its file.
    fn check(&self, run: &Run) -> Result<()> {
        let (DiskPlace::Data { file, at } | DiskPlace::Packed { file, at, .. }) = run.place else {
            return Ok(());
        };
        let len = self.lens.get(file).copied().ok_or_else(Error::misfit)?;
        if at < len {
            return Ok(());
        }
        let text = format!(
            "the data of offset {} of the disk is at offset {at}, beyond the {len} bytes of the file",
            run.at
        );
        Err(damaged(self.format, text))
    }
}

/// A search for runs.
struct RunWalk {
    next: u64,
    end: u64,
    /// Number of runs that is enough; the last one may still grow.
    most: usize,
    /// Number of entries that may still be looked at.
    steps: u64,
    runs: Vec<Run>,
}

/// Appends a run, or makes the last one longer.
fn push(runs: &mut Vec<Run>, run: Run) {
    if let Some(last) = runs.last_mut() {
        let follows = match (last.place, run.place) {
            (DiskPlace::Data { file, at }, DiskPlace::Data { file: other, at: next }) => {
                file == other && at.checked_add(last.len) == Some(next)
            }
            (DiskPlace::Packed { .. }, _) => false,
            (one, other) => one == other,
        };
        if follows {
            last.len += run.len;
            return;
        }
    }
    runs.push(run);
}
