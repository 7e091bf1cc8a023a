//! `readahead`: sends hints for what a sequential reader will read next.

use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_block::{
    Can, Device, Facts, FileRange, LeaseAccess, Op, PendingRequest, Request, Result,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use crate::layers::hint;
use blockhaul_layers::support::{layer, param_or, usage};

/// The first window; it doubles with every sequential request.
const WINDOW_MIN: u64 = 64 << 10;

/// The layer `readahead`.
pub static READAHEAD: LayerKind = LayerKind {
    name: "readahead",
    summary: "sends cache hints ahead of sequential reads",
    manual: "When reads are sequential, the device below gets cache hints for the following range: first 64 \
KiB, then twice as much each time, up to `window`. The device below must act on hints, as a \
file does; one without hints is refused (`nocache?cachemode=emulate` turns hints into reads, \
for devices that cache what is read). Readers with large requests, such as `blockhaul copy`, \
do not benefit.",
    example: r#"
blockhaul copy sample:64M disk.raw
blockhaul serve --layer 'readahead?window=1M' disk.raw --run 'blockhaul checksum "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[param_or("window", ParamKind::Size, "4M", "Maximum bytes to hint ahead.")],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let most = args.size("window").unwrap_or(4 << 20).max(WINDOW_MIN);
    layer(move |inner| {
        let facts = inner.facts();
        if !facts.can.contains(Can::CACHE) {
            return Err(usage(format!(
                "readahead: {} ignores cache hints: put nocache?cachemode=emulate below",
                facts.name
            )));
        }
        let reader = Mutex::new(SequentialReader { end: 0, hinted: 0, window: WINDOW_MIN });
        Ok(Arc::new(AheadDevice { inner, size: facts.size, most, reader }))
    })
}

struct AheadDevice {
    inner: Arc<dyn Device>,
    size: u64,
    most: u64,
    reader: Mutex<SequentialReader>,
}

/// The state of a reader.
struct SequentialReader {
    /// Where the last read ended.
    end: u64,
    /// End of the hints sent.
    hinted: u64,
    window: u64,
}

impl SequentialReader {
    /// A read of `at..end`: the range to hint.
    fn hint(&mut self, at: u64, end: u64, size: u64, most: u64) -> Option<(u64, u64)> {
        let follows = at == self.end && at > 0;
        self.end = end;
        if !follows {
            self.hinted = end;
            self.window = WINDOW_MIN;
            return None;
        }
        // Half a window is left: hints are few and large.
        if self.hinted > end.saturating_add(self.window / 2) {
            return None;
        }
        let from = self.hinted.max(end);
        let to = end.saturating_add(self.window).min(size);
        self.window = (self.window * 2).min(most);
        if to <= from {
            return None;
        }
        self.hinted = to;
        Some((from, to))
    }
}

impl Device for AheadDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let hint = match (&request.op, request.end()) {
            (Op::Read(_), Some(end)) => {
                let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
                reader.hint(request.at, end, self.size, self.most)
            }
            _ => None,
        };
        let pending = self.inner.submit(request);
        if let Some((from, to)) = hint {
            // The device decides whether to use a hint.
            drop(hint::hint(self.inner.clone(), from, to - from));
        }
        pending
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_while_reads_follow_each_other() {
        let mut reader = SequentialReader { end: 0, hinted: 0, window: WINDOW_MIN };
        let mut read = |at: u64, len: u64| reader.hint(at, at + len, 1 << 20, 256 << 10);
        let k = 1 << 10;
        assert_eq!(read(0, 4 * k), None);
        assert_eq!(read(4 * k, 4 * k), Some((8 * k, 72 * k)));
        assert_eq!(read(8 * k, 4 * k), Some((72 * k, 140 * k)), "twice as much");
        assert_eq!(read(12 * k, 4 * k), Some((140 * k, 272 * k)));
        assert_eq!(read(16 * k, 4 * k), None, "more than half of it is left");
        assert_eq!(read(500 * k, 4 * k), None, "another place");
        assert_eq!(read(504 * k, 4 * k), Some((508 * k, 572 * k)));
        assert_eq!(read(0, 4 * k), None);
        assert_eq!(read((1 << 20) - 4 * k, 4 * k), None);
    }
}
