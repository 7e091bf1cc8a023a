//! Clients of the disk: each has a part of it, and knows its contents.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, DeviceExt as _, Kind, Result};
use blockhaul_io::{Data, Task};
use blockhaul_testkit::rng::Rng;

use super::disk::{TURNS, wait};

/// What the clients have in common.
#[derive(Default)]
struct GuestControl {
    /// They start nothing more until it is unset.
    quiet: Cell<bool>,
    /// They end.
    over: Cell<bool>,
    /// Number of those that are at work.
    busy: Cell<u32>,
}

/// The clients.
pub struct Guests {
    control: Rc<GuestControl>,
    tasks: Vec<Task<(usize, Vec<u8>)>>,
}

/// One client.
struct Guest {
    seed: u64,
    device: Arc<dyn Device>,
    start: usize,
    bytes: Vec<u8>,
    rng: Rng,
}

impl Guests {
    /// Begins `count` clients of a disk with these contents; `handle` opens the device of one.
    pub fn start(
        seed: u64,
        count: usize,
        contents: &[u8],
        handle: impl Fn() -> Arc<dyn Device>,
    ) -> Guests {
        let control = Rc::new(GuestControl::default());
        let mut rng = Rng::new(!seed);
        let share = contents.len().div_ceil(count);
        let parts = contents.chunks(share).enumerate();
        let tasks = parts.map(|(index, part)| {
            let guest = Guest {
                seed,
                device: handle(),
                start: index * share,
                bytes: part.to_vec(),
                rng: Rng::new(rng.number()),
            };
            blockhaul_io::start(guest.run(control.clone()))
        });
        let tasks = tasks.collect();
        Guests { control, tasks }
    }

    /// None of them begins a request until `resume`.
    pub fn pause(&self) {
        self.control.quiet.set(true);
    }

    /// Whether one of them has a request in flight.
    pub fn are_busy(&self) -> bool {
        self.control.busy.get() > 0
    }

    /// They go on.
    pub fn resume(&self) {
        self.control.quiet.set(false);
    }

    /// They end; what the disk must hold then.
    pub async fn end(mut self) -> Vec<u8> {
        self.control.over.set(true);
        let mut contents = Vec::new();
        for task in std::mem::take(&mut self.tasks) {
            let (start, bytes) = task.await;
            assert_eq!(start, contents.len());
            contents.extend(bytes);
        }
        contents
    }
}

impl Drop for Guests {
    /// After a failure, too: they must not keep the worker.
    fn drop(&mut self) {
        self.control.over.set(true);
    }
}

impl Guest {
    async fn run(mut self, control: Rc<GuestControl>) -> (usize, Vec<u8>) {
        while !control.over.get() {
            if control.quiet.get() {
                blockhaul_io::sleep(Duration::from_millis(1)).await;
                continue;
            }
            control.busy.set(control.busy.get() + 1);
            self.step().await;
            control.busy.set(control.busy.get() - 1);
            wait(self.rng.below(TURNS)).await;
            if self.rng.chance(50) {
                blockhaul_io::sleep(Duration::from_millis(1)).await;
            }
        }
        (self.start, self.bytes)
    }

    /// One request, and often a look at its effect.
    async fn step(&mut self) {
        let from = self.rng.below(self.bytes.len() as u64 - 1) as usize;
        let longest = if self.rng.chance(10) { 40_000 } else { 5000 };
        let len = (self.rng.between(1, longest) as usize).min(self.bytes.len() - from);
        let at = (self.start + from) as u64;
        let range = from..from + len;
        let action = self.rng.below(10);
        match action {
            0 => self.insist(async |device| device.flush().await).await,
            1 => {}
            2 | 3 => {
                let trims = action == 2;
                self.bytes[range.clone()].fill(0);
                self.insist(async |device| {
                    if trims {
                        device.trim(at, len as u64).await
                    } else {
                        device.zero(at, len as u64).await
                    }
                })
                .await;
            }
            _ => {
                self.rng.fill(&mut self.bytes[range.clone()]);
                let data = Data::copy_of(&self.bytes[range.clone()]);
                self.insist(async |device| device.write(at, data.clone()).await).await;
            }
        }
        if self.rng.chance(50) {
            let mut found = Vec::new();
            let found = &mut found;
            self.insist(async |device| {
                *found = device.read(at, len).await?.bytes().to_vec();
                Ok(())
            })
            .await;
            let right = *found == self.bytes[range];
            assert!(right, "seed {:#x}: the live disk at {at}, {len} bytes", self.seed);
        }
    }

    /// Repeats a request that a fault of the test fails.
    async fn insist(&self, mut request: impl AsyncFnMut(&Arc<dyn Device>) -> Result<()>) {
        while let Err(error) = request(&self.device).await {
            let expected = matches!(error.kind(), Kind::Io | Kind::NoSpace);
            assert!(expected, "seed {:#x}: a request of a client failed: {error}", self.seed);
            blockhaul_io::sleep(Duration::from_micros(100)).await;
        }
    }
}
