//! A queue: requests of its ring become requests of the device. It belongs to one worker.

mod disk;
mod request;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use blockhaul_block::{Device, OpKind};
use blockhaul_io::{Completer, Event, Interest, Ticket};

pub use disk::RequestWatcher;
pub(crate) use disk::VhostDisk;

use crate::in_flight::InFlightEntries;
use crate::memory::{GuestSpace, Memory};
use crate::ring::{Ring, RingError, RingLayout};

/// Requests taken before other tasks of the worker run; their bytes count as well, by
/// [`BYTES_PER_SHARE`].
const TURN: u64 = 64;
/// Bytes that count as one request.
const BYTES_PER_SHARE: u64 = 128 << 10;

/// The descriptor that notifies the driver; the front end may replace it at any time.
#[derive(Default)]
pub(crate) struct Call(Mutex<Option<OwnedFd>>);

impl Call {
    pub(crate) fn set(&self, fd: Option<OwnedFd>) {
        *self.0.lock().expect("no panic under this lock") = fd;
    }

    /// Notifies the driver.
    pub(crate) fn signal(&self) {
        if let Some(fd) = &*self.0.lock().expect("no panic under this lock") {
            // It fails only if the counter is full, and the driver has notifications enough.
            let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
        }
    }
}

/// Everything that a queue needs to run.
pub(crate) struct QueueStart {
    pub(crate) disk: Arc<VhostDisk>,
    pub(crate) space: Arc<GuestSpace>,
    pub(crate) layout: RingLayout,
    /// Position of the first request.
    pub(crate) base: u16,
    pub(crate) kick: OwnedFd,
    pub(crate) call: Arc<Call>,
    pub(crate) entries: Option<InFlightEntries>,
}

/// Stops a queue.
pub(crate) struct Stopper {
    asked: Arc<AtomicBool>,
    wake: Completer<()>,
}

/// When a queue is to stop.
pub(crate) struct QueueStop {
    asked: Arc<AtomicBool>,
    woken: Ticket<()>,
}

/// A pair to stop a queue with.
pub(crate) fn stopper() -> (Stopper, QueueStop) {
    let (wake, woken) = blockhaul_io::ticket();
    let asked = Arc::<AtomicBool>::default();
    (Stopper { asked: asked.clone(), wake }, QueueStop { asked, woken })
}

impl Stopper {
    /// The queue takes no more requests, and ends after those that it has.
    pub(crate) fn stop(self) {
        self.asked.store(true, Ordering::SeqCst);
        self.wake.complete(());
    }
}

/// A running queue.
struct QueueTask {
    disk: Arc<VhostDisk>,
    space: Arc<GuestSpace>,
    layout: RingLayout,
    ring: RefCell<Ring>,
    call: Arc<Call>,
    entries: RefCell<Option<InFlightEntries>>,
    /// Requests that the device has.
    running: Cell<usize>,
    /// Signals that one of them has completed.
    completed: Event,
    /// The driver is about to be notified.
    calling: Cell<bool>,
    broken: Cell<bool>,
    /// Requests of each kind that completed at once since one was timed.
    untimed: [Cell<u8>; OpKind::ALL.len()],
}

/// Serves a queue on this worker until it is stopped, and its requests have ended. Returns the
/// position of the next request.
///
/// # Errors
/// If its ring is not in memory.
pub(crate) async fn run(start: QueueStart, stop: QueueStop) -> Result<u16, RingError> {
    let QueueStart { disk, space, layout, base, kick, call, mut entries } = start;
    let mut ring = Ring::new(layout, base, &space.now())?;
    let recovered = entries.as_mut().map(|entries| entries.recover(ring.next_used()));
    let recovered = recovered.unwrap_or_default();
    if space.is_lost() {
        space.end();
        return Err(RingError::Lost);
    }
    if !recovered.is_empty() {
        log::info!("{} requests that an earlier server had taken are repeated", recovered.len());
        // At most as many as the ring has.
        let count = u16::try_from(recovered.len()).unwrap_or(layout.size);
        ring.set_next_available(ring.next_used().wrapping_add(count));
    }
    let queue = Rc::new(QueueTask {
        disk,
        space,
        layout,
        ring: RefCell::new(ring),
        call,
        entries: RefCell::new(entries),
        running: Cell::new(0),
        completed: Event::new(),
        calling: Cell::new(false),
        broken: Cell::new(false),
        untimed: Default::default(),
    });
    queue.serve(&kick, stop, recovered).await;
    queue.until_fewer(1).await;
    queue.call_now();
    let next = queue.ring.borrow().next_available();
    Ok(next)
}

impl QueueTask {
    async fn serve(self: &Rc<Self>, kick: &OwnedFd, mut stop: QueueStop, recovered: Vec<u16>) {
        let memory = self.space.now();
        let device = self.disk.device();
        for head in recovered {
            self.handle(&memory, &device, head).await;
        }
        loop {
            if let Err(why) = self.take_all(&stop).await {
                self.give_up(why);
            }
            if stop.asked.load(Ordering::SeqCst) || !self.kicked(kick, &mut stop.woken).await {
                return;
            }
        }
    }

    /// Waits for a notification of the driver. False: the queue must stop.
    async fn kicked(&self, kick: &OwnedFd, stop: &mut Ticket<()>) -> bool {
        if self.broken.get() {
            // The other end is dropped unused if the session ends.
            let _ = stop.await;
            return false;
        }
        let mut ready = pin!(blockhaul_io::ready(kick, Interest::Readable));
        let kicked = poll_fn(|cx| match Pin::new(&mut *stop).poll(cx) {
            Poll::Ready(_) => Poll::Ready(None),
            Poll::Pending => ready.as_mut().poll(cx).map(Some),
        });
        match kicked.await {
            None => return false,
            Some(Ok(())) => {}
            Some(Err(error)) => log::warn!("cannot wait for the guest: {error}"),
        }
        match rustix::io::read(kick, &mut [0; 8]) {
            Ok(1..) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            other => {
                let why = match other {
                    Ok(_) => "it is at its end".to_string(),
                    Err(error) => io::Error::from(error).to_string(),
                };
                log::warn!("a queue has no descriptor for notifications: {why}");
                self.broken.set(true);
            }
        }
        true
    }

    /// Takes requests until there are no more, or the queue must stop.
    async fn take_all(self: &Rc<Self>, stop: &QueueStop) -> Result<(), RingError> {
        let mut turn = 0;
        loop {
            if self.broken.get() {
                return Ok(());
            }
            let memory = self.space.now();
            let device = self.disk.device();
            self.ring.borrow().want_no_kick(&memory)?;
            while turn < TURN && !stop.asked.load(Ordering::Relaxed) {
                let head = self.ring.borrow_mut().take(&memory);
                let Some(head) = self.unless_lost(head)? else { break };
                self.leave_room().await;
                turn += 1 + self.handle(&memory, &device, head).await / BYTES_PER_SHARE;
            }
            self.call_now();
            if stop.asked.load(Ordering::Relaxed) {
                return Ok(());
            }
            if turn >= TURN {
                turn = 0;
                blockhaul_io::yield_now().await;
            } else {
                let waiting = self.ring.borrow().want_kick(&memory);
                if !self.unless_lost(waiting)? {
                    return Ok(());
                }
            }
        }
    }

    /// Waits until the device has fewer requests than the ring holds: a driver that lends chains twice
    /// must not use up memory.
    async fn leave_room(&self) {
        if self.running.get() >= usize::from(self.layout.size) {
            self.call_now();
            self.until_fewer(usize::from(self.layout.size)).await;
        }
    }

    /// Waits until the device has fewer than `count` requests.
    async fn until_fewer(&self, count: usize) {
        loop {
            let mark = self.completed.mark();
            if self.running.get() < count {
                return;
            }
            self.completed.wait_after(mark).await;
        }
    }

    /// Takes a chain and carries out its request. Returns its bytes.
    async fn handle(
        self: &Rc<Self>,
        memory: &Arc<Memory>,
        device: &Arc<dyn Device>,
        head: u16,
    ) -> u64 {
        if let Some(entries) = &mut *self.entries.borrow_mut() {
            entries.begin(head);
        }
        self.request(memory, device, head).await
    }

    /// Gives a chain back, and notifies the driver soon.
    fn give_back(self: &Rc<Self>, memory: &Memory, head: u16, written: u32, soon: bool) {
        let given = self.try_give_back(memory, head, written);
        if let Err(why) = self.unless_lost(given) {
            return self.give_up(why);
        }
        // Requests that complete together are one notification.
        if soon && !self.calling.replace(true) {
            let queue = self.clone();
            drop(blockhaul_io::spawn(async move {
                queue.calling.set(false);
                queue.call_now();
            }));
        }
    }

    fn try_give_back(&self, memory: &Memory, head: u16, written: u32) -> Result<(), RingError> {
        let mut ring = self.ring.borrow_mut();
        let entries = self.entries.borrow();
        ring.give_back(memory, head, written)?;
        if let Some(entries) = &*entries {
            entries.giving_back(head);
        }
        ring.publish(memory)?;
        if let Some(entries) = &*entries {
            entries.given_back(head, ring.next_used());
        }
        Ok(())
    }

    /// Notifies the driver, if it wants that.
    fn call_now(&self) {
        let must_call = self.ring.borrow_mut().must_call(&self.space.now());
        match self.unless_lost(must_call) {
            Ok(true) => self.call.signal(),
            Ok(false) => {}
            Err(why) => self.give_up(why),
        }
    }

    /// What was read of the memory, unless pages of it are lost.
    fn unless_lost<T>(&self, read: Result<T, RingError>) -> Result<T, RingError> {
        if self.space.is_lost() { Err(RingError::Lost) } else { read }
    }

    /// The driver must reset the device: nothing more is taken from the ring.
    fn give_up(&self, why: RingError) {
        let was_broken = self.broken.replace(true);
        if why == RingError::Lost {
            // The end of the session is logged.
            self.space.end();
        } else if !was_broken {
            log::warn!("a guest's queue cannot be used any more: {why}");
        }
    }
}
