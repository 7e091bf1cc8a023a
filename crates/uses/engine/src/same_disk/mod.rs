//! Checks whether further connections see the same disks as the first, if the server does not
//! promise it.
//!
//! Some servers give every connection its own disk, or a private copy-on-write. The check uses a
//! block with content that the first lane has written and flushed: the others must read it from
//! both ends.

mod proof;

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};

use blockhaul_block::Device;

pub(crate) use self::proof::Proof;
use crate::segment_queue::SegmentQueue;

/// Passes the proof from the first lane to the others.
#[derive(Default)]
pub(crate) struct SameDisk {
    wanted: AtomicBool,
    state: Mutex<ProofState>,
}

#[derive(Default)]
struct ProofState {
    settled: Option<Option<Proof>>,
    waiting: Vec<Waker>,
}

impl SameDisk {
    pub(crate) fn new() -> SameDisk {
        SameDisk::default()
    }

    /// Whether a lane waits for a proof.
    pub(crate) fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Publishes the proof, or `None` if there will be none; only the first call counts.
    pub(crate) fn settle(&self, proof: Option<Proof>) {
        let mut state = self.state.lock().expect("no panic under this lock");
        if state.settled.is_none() {
            state.settled = Some(proof);
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Another run begins: the block proven before may have changed.
    pub(crate) fn renew(&self) {
        self.state.lock().expect("no panic under this lock").settled = None;
    }

    /// Reads the proof through further handles. `Err(None)`: the copy ended first; `Err(Some)`: why
    /// the handles cannot be used.
    pub(crate) async fn examine(
        &self,
        source: Option<Arc<dyn Device>>,
        target: Option<Arc<dyn Device>>,
        queue: &SegmentQueue,
    ) -> Result<(), Option<String>> {
        self.wanted.store(true, Ordering::Relaxed);
        let mut exhausted = std::pin::pin!(queue.exhausted());
        let proof = poll_fn(|cx| {
            let mut state = self.state.lock().expect("no panic under this lock");
            if let Some(settled) = &state.settled {
                return Poll::Ready(settled.clone());
            }
            state.waiting.push(cx.waker().clone());
            drop(state);
            exhausted.as_mut().poll(cx).map(|()| None)
        });
        let Some(proof) = proof.await else { return Err(None) };
        for device in [source, target].into_iter().flatten() {
            let name = device.facts().name.clone();
            match proof.is_on(&*device).await {
                Ok(true) => {}
                Ok(false) => {
                    return Err(Some(format!(
                        "{name} serves a different disk on each connection (at offset {})",
                        proof.at()
                    )));
                }
                Err(error) => return Err(Some(error.to_string())),
            }
        }
        Ok(())
    }
}
