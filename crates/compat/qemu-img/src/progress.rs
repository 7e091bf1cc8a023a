//! The lines of `-p`.

use std::sync::{Arc, Mutex, Weak};

use blockhaul_block::{BASE_ALLOCATION, Device, Error, ExtentReader, ZERO};
use blockhaul_catalog::Intent;
use blockhaul_command_lines::qemu_image::QemuImage;
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_engine::CopyProgress;

use crate::error::Result;
use crate::tool::{OutputStream, QemuImg};

/// Percentage points between two lines of `convert` and `commit`, and of the other commands.
pub(crate) const FINE: f64 = 1.0;
pub(crate) const COARSE: f64 = 2.0;
/// Lines show whole multiples of this number of bytes: the size of a copy's requests depends on how fast they
/// are, and is smaller than that of the original.
const APART: u64 = 1 << 20;

/// Prints how far a command is, if `-p` asks for it.
#[derive(Clone)]
pub(crate) struct ProgressLines(Option<Arc<ProgressPrinter>>);

struct ProgressPrinter {
    output: OutputStream,
    /// Percentage points between two lines.
    step: f64,
    state: Mutex<ProgressState>,
}

#[derive(Debug, Default)]
struct ProgressState {
    /// The percentage of the last line.
    last: f64,
    data: u64,
    zeroes: u64,
}

impl ProgressLines {
    /// Begins with 0 %.
    pub(crate) fn begin(output: &OutputStream, line: &QemuImgCommand, step: f64) -> ProgressLines {
        if !line.has("progress") || line.has("quiet") {
            return ProgressLines(None);
        }
        let lines = ProgressPrinter { output: output.clone(), step, state: Mutex::default() };
        lines.print(0.0);
        ProgressLines(Some(Arc::new(lines)))
    }

    /// Whether lines are printed.
    pub(crate) fn is_shown(&self) -> bool {
        self.0.is_some()
    }

    /// Shows the progress of a copy whose source has this much data, if that is known; otherwise of
    /// all that it copies.
    pub(crate) fn watch(&self, progress: &Arc<CopyProgress>, source: Option<SourceAmount>) {
        let Some(lines) = self.0.clone() else { return };
        let watched = Arc::downgrade(progress);
        progress.listen(move |data, zeroes| lines.count(&watched, source, (data, zeroes)));
    }

    /// Ends with 100 % and a new line.
    pub(crate) fn end(&self) {
        if let Some(lines) = &self.0 {
            lines.print(100.0);
            self.leave();
        }
    }

    /// Ends with a new line.
    pub(crate) fn leave(&self) {
        if let Some(lines) = &self.0 {
            // As for the lines.
            let _ = lines.output.print("\n");
        }
    }
}

/// The data and the zeroes of a source, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SourceAmount {
    data: u64,
    zeroes: u64,
}

impl ProgressPrinter {
    /// `done` bytes of `total` are done.
    fn tell(&self, state: &mut ProgressState, done: u64, total: u64) {
        let percent = (done as f64 * 100.0 / total.max(1) as f64).min(100.0);
        if percent > state.last + self.step || percent >= 100.0 && state.last < 100.0 {
            state.last = percent;
            self.print(percent);
        }
    }

    fn print(&self, percent: f64) {
        // If the reader is gone, the command goes on.
        let _ = self.output.print(&format!("    ({percent:.2}/100%)\r"));
    }

    /// Counts more bytes of a copy.
    fn count(&self, copy: &Weak<CopyProgress>, source: Option<SourceAmount>, more: (u64, u64)) {
        let mut state = self.state.lock().expect("no panic under this lock");
        state.data = state.data.saturating_add(more.0);
        state.zeroes = state.zeroes.saturating_add(more.1);
        let all = state.data.saturating_add(state.zeroes);
        let (done, total) = match source {
            // Zeroes that were found in data count, too; others may be done first.
            Some(SourceAmount { data, zeroes }) => {
                (state.data.max(all.saturating_sub(zeroes)).min(data), data)
            }
            None => (all, copy.upgrade().map_or(0, |copy| copy.snapshot().total)),
        };
        let shown = if done < total { done - done % APART } else { done };
        self.tell(&mut state, shown, total);
    }
}

impl QemuImg {
    /// The data and zeroes of these sources; none for servers, which may end with their first client.
    pub(crate) fn source_amount(&self, sources: &[QemuImage]) -> Result<Option<SourceAmount>> {
        let mut all = SourceAmount { data: 0, zeroes: 0 };
        for image in sources {
            if image.path().is_none() {
                return Ok(None);
            }
            let disk = image.disk(self.image_format(image)?, &[]);
            let found =
                self.with_device(&disk, Intent::READ, async |device| amount_of(&device).await)?;
            // The copy reports what cannot be read.
            let Ok(found) = found else { return Ok(None) };
            all.data = all.data.saturating_add(found.data);
            all.zeroes = all.zeroes.saturating_add(found.zeroes);
        }
        Ok(Some(all))
    }
}

async fn amount_of(device: &Arc<dyn Device>) -> Result<SourceAmount, Error> {
    let facts = device.facts();
    let mut found = SourceAmount { data: 0, zeroes: 0 };
    let Some(base) = facts.context(BASE_ALLOCATION) else {
        return Ok(SourceAmount { data: facts.size, ..found });
    };
    let mut extents = ExtentReader::new(device.clone(), base, (0, facts.size));
    while let Some(part) = extents.next().await? {
        part.for_each_run(|_, len, states| {
            if states.first().is_some_and(|state| state & ZERO != 0) {
                found.zeroes += len;
            } else {
                found.data += len;
            }
            Ok::<(), Error>(())
        })?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printer() -> ProgressPrinter {
        let output = OutputStream::new(Box::new(std::io::sink()));
        ProgressPrinter { output, step: FINE, state: Mutex::default() }
    }

    #[test]
    fn zeroes_of_holes_do_not_count() {
        let lines = printer();
        let source = Some(SourceAmount { data: 4 << 20, zeroes: 60 << 20 });
        let percent = |more| {
            lines.count(&Weak::new(), source, more);
            lines.state.lock().unwrap().last
        };
        assert_eq!(percent((0, 60 << 20)), 0.0);
        assert_eq!(percent((512 << 10, 0)), 0.0, "less than a MiB");
        assert_eq!(percent((512 << 10, 0)), 25.0);
        assert_eq!(percent((0, 1 << 20)), 50.0, "zeroes in data");
        assert_eq!(percent((2 << 20, 0)), 100.0);
    }

    #[test]
    fn requests_of_any_size_give_the_same_lines() {
        let lines = printer();
        let source = Some(SourceAmount { data: 4 << 20, zeroes: 60 << 20 });
        let percent = |more| {
            lines.count(&Weak::new(), source, (more, 0));
            lines.state.lock().unwrap().last
        };
        let sizes = [512 << 10, 1 << 20, 1 << 20, 1 << 20, 512 << 10];
        assert_eq!(sizes.map(percent), [0.0, 25.0, 50.0, 75.0, 100.0]);
    }
}
