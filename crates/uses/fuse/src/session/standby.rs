//! Lanes that rest.
//!
//! The kernel wakes every lane that waits for requests, for each request, and one of them gets it. Unless
//! one lane cannot keep up, the others are woken in vain, or for a few requests that the first one would have
//! answered together with its own: a lane to which this happens again and again rests until another one
//! has too much to do. The first lane never rests: connections of devices often belong to its worker.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use blockhaul_io::Completer;

/// Maximum time of a rest: the lanes that do not rest can be kept from their work by other tasks.
const REST: Duration = Duration::from_millis(100);

/// The lanes of a session that rest.
#[derive(Default)]
pub(super) struct Standby {
    lanes: Mutex<Lanes>,
    /// Number of lanes that rest, for a look without the lock.
    count: AtomicUsize,
}

#[derive(Default)]
struct Lanes {
    /// Those that rest, with the numbers of their rests.
    resting: Vec<(u64, Completer<()>)>,
    rests: u64,
}

impl Standby {
    fn lock(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().expect("no panic under this lock")
    }

    /// Rests. Returns whether another lane has called, before the time was over.
    pub(super) async fn rest(&self) -> bool {
        let (lane, called) = blockhaul_io::ticket();
        let number = {
            let mut lanes = self.lock();
            lanes.rests += 1;
            let number = lanes.rests;
            lanes.resting.push((number, lane));
            self.count.store(lanes.resting.len(), Ordering::Relaxed);
            number
        };
        let called = blockhaul_io::timeout(REST, called).await.is_ok();
        let mut lanes = self.lock();
        lanes.resting.retain(|(other, _)| *other != number);
        self.count.store(lanes.resting.len(), Ordering::Relaxed);
        called
    }

    /// Calls a lane that rests. Returns whether there was one.
    pub(super) fn call(&self) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let lane = {
            let mut lanes = self.lock();
            let lane = lanes.resting.pop();
            self.count.store(lanes.resting.len(), Ordering::Relaxed);
            lane
        };
        lane.map(|(_, lane)| lane.complete(())).is_some()
    }

    /// Calls all lanes that rest.
    pub(super) fn call_all(&self) {
        while self.call() {}
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use blockhaul_io::{Runtime, Task};

    use super::*;

    fn on_a_worker<F: Future<Output = ()> + 'static>(check: impl Fn() -> F + Send + 'static) {
        let config =
            blockhaul_io::RuntimeConfig { workers: 1, ..blockhaul_io::RuntimeConfig::default() };
        Runtime::start(&config).expect("a worker").block_on(check);
    }

    fn rest(standby: &Rc<Standby>) -> Task<bool> {
        let standby = standby.clone();
        blockhaul_io::start(async move { standby.rest().await })
    }

    #[test]
    fn a_call_ends_one_rest_and_the_last_call_all() {
        on_a_worker(|| async {
            let standby = Rc::new(Standby::default());
            assert!(!standby.call(), "nobody rests");
            let (one, other) = (rest(&standby), rest(&standby));
            assert!(standby.call());
            assert_eq!(standby.lock().resting.len(), 1);
            standby.call_all();
            assert!(one.await && other.await);
            assert!(!standby.call(), "nobody rests any more");
        });
    }

    #[test]
    fn a_rest_ends_without_a_call() {
        on_a_worker(|| async {
            let standby = Rc::new(Standby::default());
            assert!(!rest(&standby).await);
            assert!(!standby.call(), "nobody rests any more");
        });
    }
}
