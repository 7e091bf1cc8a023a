//! The ranges of a read that have arrived.

/// Ranges of a read, relative to the request.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    /// Bytes from the start on that have arrived in order.
    reached: u64,
    /// The other ranges, start and length, in order of arrival.
    rest: Vec<(u64, u64)>,
}

impl Coverage {
    /// Adds a range.
    pub(super) fn add(&mut self, start: u64, len: u64) {
        if start == self.reached {
            self.reached += len;
        } else {
            self.rest.push((start, len));
        }
    }

    // nbd: chunk.overlap-refused, read.incomplete-refused
    /// Whether the ranges are the whole request of `len` bytes, each byte once: bytes that arrive
    /// twice may differ.
    pub(super) fn is_whole(&mut self, len: u64) -> bool {
        self.rest.sort_unstable();
        let in_order = self.rest.iter().all(|&(start, part)| {
            let follows = start == self.reached;
            self.reached += part;
            follows
        });
        in_order && self.reached == len
    }
}
