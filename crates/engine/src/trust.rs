//! Whether further connections see the same disks as the first, where the server does not promise it.
//!
//! Some servers give every connection a disk of its own, or a private copy-on-write. A block with
//! content that the first lane has written and flushed tells: the others must read it from both ends.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};

use block::{Device, DeviceExt, Result};

use crate::plan::Plan;
use crate::zeroes::is_zero;

/// Bytes of a sample: one block of every file system in use.
pub(crate) const SAMPLE: usize = 4096;

/// A block that is known to be the same on source and target of the first lane.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    at: u64,
    bytes: Arc<[u8]>,
}

impl Sample {
    /// The first whole block of `bytes` with content, if there is one.
    pub(crate) fn of(at: u64, bytes: &[u8]) -> Option<Sample> {
        let found = bytes.chunks_exact(SAMPLE).position(|block| !is_zero(block))?;
        let start = found * SAMPLE;
        Some(Sample { at: at + start as u64, bytes: bytes[start..start + SAMPLE].into() })
    }

    /// Where it is.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Whether a device holds the same there.
    pub(crate) async fn is_on(&self, device: &dyn Device) -> Result<bool> {
        let data = device.read(self.at, self.bytes.len()).await?;
        Ok(data.bytes() == &*self.bytes)
    }
}

/// Where the first lane leaves the sample and others wait for it.
#[derive(Default)]
pub(crate) struct Trust {
    wanted: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    settled: Option<Option<Sample>>,
    waiting: Vec<Waker>,
}

impl Trust {
    pub(crate) fn new() -> Trust {
        Trust::default()
    }

    /// Whether somebody waits for a sample.
    pub(crate) fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Hands out the sample, or `None` when there will be none; the first call counts.
    pub(crate) fn settle(&self, sample: Option<Sample>) {
        let mut state = self.state.lock().expect("no panic under this lock");
        if state.settled.is_none() {
            state.settled = Some(sample);
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Reads the sample through further handles. `Err(None)`: the copy ended before; `Err(Some)`: why
    /// the handles are not to be used.
    pub(crate) async fn examine(
        &self,
        source: Option<Arc<dyn Device>>,
        target: Option<Arc<dyn Device>>,
        plan: &Plan,
    ) -> Result<(), Option<String>> {
        self.wanted.store(true, Ordering::Relaxed);
        let mut exhausted = std::pin::pin!(plan.exhausted());
        let sample = poll_fn(|cx| {
            let mut state = self.state.lock().expect("no panic under this lock");
            if let Some(settled) = &state.settled {
                return Poll::Ready(settled.clone());
            }
            state.waiting.push(cx.waker().clone());
            drop(state);
            exhausted.as_mut().poll(cx).map(|()| None)
        });
        let Some(sample) = sample.await else { return Err(None) };
        for device in [source, target].into_iter().flatten() {
            let name = device.facts().name.clone();
            match sample.is_on(&*device).await {
                Ok(true) => {}
                Ok(false) => {
                    return Err(Some(format!(
                        "{name} shows each connection a disk of its own (at offset {})",
                        sample.at
                    )));
                }
                Err(error) => return Err(Some(error.to_string())),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_the_first_block_with_content() {
        let mut bytes = vec![0; 3 * SAMPLE + 100];
        assert!(Sample::of(0, &bytes).is_none());
        bytes[3 * SAMPLE + 1] = 1;
        assert!(Sample::of(0, &bytes).is_none(), "a partial block is none");
        bytes[SAMPLE + 7] = 1;
        let sample = Sample::of(1 << 20, &bytes).unwrap();
        assert_eq!(sample.at, (1 << 20) + SAMPLE as u64);
        assert_eq!(sample.bytes[7], 1);
    }
}
