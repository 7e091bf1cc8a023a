//! A device that can be exchanged while in use: the top of every served stack.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

use blockhaul_block::{
    BlockSizes, Can, ContextSet, Device, Error, Extents, Facts, Kind, Op, OpKind, PendingRequest,
    Reply, Request, RequestFlags, Result,
};
use blockhaul_io::{Completer, Notify};

/// Points to a device that can be exchanged while in use.
///
/// A stack of a device and its layers never changes. To add or remove a layer, or to move to other
/// storage, a new stack is assembled beside the old one and [`swap`](Switch::swap)ped in. Each
/// caller (a connection, a job) has its own [`handle`](Switch::handle), which is a [`Device`].
///
/// A handle keeps the facts that its caller saw first, like an NBD client after negotiation. A
/// request that these facts allow and the current device does not support fails with
/// [`Kind::ShuttingDown`].
pub struct Switch {
    inner: Mutex<SwitchState>,
}

struct SwitchState {
    device: Arc<dyn Device>,
    handles: Vec<Weak<HandleState>>,
    /// A barrier is active: new handles hold their requests, too.
    held: bool,
    /// Why the switch is closed.
    closed: Option<Error>,
}

/// How to handle requests in flight when a device is exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Barrier {
    /// They end on the old device while new requests go to the new one. For devices that always
    /// show the same data.
    None,
    /// They end on the old device first; new requests wait, in order. If that takes longer, the
    /// exchange fails: the old device stays, and the requests continue.
    Within(Duration),
}

impl Switch {
    /// A switch to a device, which must be fenced.
    pub fn new(device: Arc<dyn Device>) -> Arc<Switch> {
        let inner = SwitchState { device, handles: Vec::new(), held: false, closed: None };
        Arc::new(Switch { inner: Mutex::new(inner) })
    }

    /// The current device.
    pub fn device(&self) -> Arc<dyn Device> {
        self.lock().device.clone()
    }

    /// A handle for one caller, with the facts of the current device.
    pub fn handle(&self) -> Arc<dyn Device> {
        let mut inner = self.lock();
        let device = inner.device.clone();
        let route = match &inner.closed {
            Some(error) => Route::Closed(error.clone()),
            None if inner.held => Route::Held(Vec::new()),
            None => Route::To(DeviceRoute { device: device.clone(), lacks: None }),
        };
        let shared = HandleState {
            advertised: device.facts(),
            route: RwLock::new(route),
            in_flight: Arc::default(),
        };
        let handle = SwitchHandle { shared: Arc::new(shared) };
        if inner.handles.len() == inner.handles.capacity() {
            inner.handles.retain(|handle| handle.strong_count() > 0);
        }
        inner.handles.push(Arc::downgrade(&handle.shared));
        Arc::new(handle)
    }

    /// Number of handles in use.
    pub fn handles(&self) -> usize {
        self.lock().handles.iter().filter(|handle| handle.strong_count() > 0).count()
    }

    /// Points all handles to another device, and returns the old one. Call it on a worker.
    ///
    /// `last` runs when no request is in flight any more on the old device and none has started on
    /// the new one, for work in between (a flush of the old device); without a barrier it runs
    /// first. If it fails, the old device stays.
    ///
    /// # Errors
    /// - [`Kind::Refused`] during another exchange, or after [`Switch::close`].
    /// - [`Kind::TimedOut`] if the requests in flight do not end within the barrier's time.
    /// - The error of `last`.
    /// - What `last` fails with.
    pub async fn swap(
        &self,
        new: Arc<dyn Device>,
        barrier: Barrier,
        last: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<Arc<dyn Device>> {
        let Barrier::Within(time) = barrier else {
            last().await?;
            let mut inner = self.changeable()?;
            inner.lead(&new);
            return Ok(std::mem::replace(&mut inner.device, new));
        };
        let held = self.hold()?;
        let drained = blockhaul_io::timeout(time, async {
            for handle in &held.handles {
                handle.in_flight.idle().await;
            }
        });
        if drained.await.is_err() {
            let text = format!(
                "requests of the device are still in flight after {} s; it stays as it is",
                time.as_secs_f32()
            );
            return Err(Error::new(Kind::TimedOut, text));
        }
        last().await?;
        Ok(held.release(new))
    }

    /// Closes the switch for good: requests in flight are finished, all others fail with this
    /// error.
    pub fn close(&self, error: Error) {
        let mut inner = self.lock();
        for handle in inner.handles() {
            handle.set(Route::Closed(error.clone()));
        }
        inner.closed = Some(error);
    }

    /// Holds the requests of all handles until the result is released or dropped.
    fn hold(&self) -> Result<HeldRequests<'_>> {
        let mut inner = self.changeable()?;
        inner.held = true;
        let handles = inner.handles();
        for handle in &handles {
            handle.set(Route::Held(Vec::new()));
        }
        Ok(HeldRequests { switch: self, handles })
    }

    fn changeable(&self) -> Result<MutexGuard<'_, SwitchState>> {
        let inner = self.lock();
        if let Some(error) = &inner.closed {
            return Err(error.clone());
        }
        if inner.held {
            return Err(Error::new(Kind::Refused, "another change of this device is under way"));
        }
        Ok(inner)
    }

    fn lock(&self) -> MutexGuard<'_, SwitchState> {
        self.inner.lock().expect("no panic under this lock")
    }
}

impl SwitchState {
    fn handles(&self) -> Vec<Arc<HandleState>> {
        self.handles.iter().filter_map(Weak::upgrade).collect()
    }

    fn lead(&self, device: &Arc<dyn Device>) {
        let facts = device.facts();
        for handle in self.handles() {
            let lacks = FactMismatch::of(&handle.advertised, &facts).map(Box::new);
            handle.set(Route::To(DeviceRoute { device: device.clone(), lacks }));
        }
    }
}

/// Requests of all handles wait until this is dropped.
struct HeldRequests<'a> {
    switch: &'a Switch,
    handles: Vec<Arc<HandleState>>,
}

impl HeldRequests<'_> {
    /// Releases the requests to another device, and returns the old one.
    fn release(self, new: Arc<dyn Device>) -> Arc<dyn Device> {
        std::mem::replace(&mut self.switch.lock().device, new)
    }
}

impl Drop for HeldRequests<'_> {
    fn drop(&mut self) {
        let mut inner = self.switch.lock();
        inner.held = false;
        // If closed meanwhile, the waiting requests have failed.
        if inner.closed.is_none() {
            inner.lead(&inner.device);
        }
    }
}

/// One caller's handle.
struct SwitchHandle {
    shared: Arc<HandleState>,
}

struct HandleState {
    /// The facts that the caller knows.
    advertised: Arc<Facts>,
    route: RwLock<Route>,
    in_flight: Arc<InFlight>,
}

/// How to handle requests.
enum Route {
    To(DeviceRoute),
    /// They wait, in this order.
    Held(Vec<Completer<()>>),
    Closed(Error),
}

/// The path to a device.
struct DeviceRoute {
    device: Arc<dyn Device>,
    /// What the caller expects and the device does not support; usually none.
    lacks: Option<Box<FactMismatch>>,
}

impl HandleState {
    fn read(&self) -> RwLockReadGuard<'_, Route> {
        self.route.read().expect("no panic under this lock")
    }

    fn write(&self) -> RwLockWriteGuard<'_, Route> {
        self.route.write().expect("no panic under this lock")
    }

    /// Changes the route. Waiting requests check it again, in order.
    fn set(&self, route: Route) {
        let before = std::mem::replace(&mut *self.write(), route);
        if let Route::Held(waiting) = before {
            waiting.into_iter().for_each(|request| request.complete(()));
        }
    }

    fn submit(self: &Arc<HandleState>, request: Request) -> PendingRequest {
        match &*self.read() {
            Route::To(way) => return self.submit_to(way, request),
            Route::Closed(error) => return PendingRequest::from(error.clone().before_flush()),
            Route::Held(_) => {}
        }
        let shared = self.clone();
        PendingRequest::start(async move {
            // More than once if one barrier follows another.
            while let Some(turn) = shared.wait() {
                let _ = turn.await;
            }
            shared.submit(request).await
        })
    }

    /// A place in the queue; none if there is no need to wait.
    fn wait(&self) -> Option<blockhaul_io::Ticket<()>> {
        match &mut *self.write() {
            Route::Held(waiting) => {
                let (completer, ticket) = blockhaul_io::ticket();
                waiting.push(completer);
                Some(ticket)
            }
            Route::To(_) | Route::Closed(_) => None,
        }
    }

    fn submit_to(&self, way: &DeviceRoute, request: Request) -> PendingRequest {
        let pending = match &way.lacks {
            None => way.device.submit(request),
            Some(lacks) => lacks.submit(&*way.device, request),
        };
        // Requests that complete at once do so under the lock: a swap does not overtake them.
        pending.guarded(|| self.in_flight.enter())
    }
}

impl Device for SwitchHandle {
    fn facts(&self) -> Arc<Facts> {
        self.shared.advertised.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        self.shared.submit(request)
    }

    // No `file_at`: accesses that bypass the handle could not be held at a barrier or redirected.
}

/// Counts the requests that a handle has in flight.
#[derive(Default)]
struct InFlight {
    count: AtomicUsize,
    idle: Notify,
}

impl InFlight {
    fn enter(self: &Arc<InFlight>) -> InFlightGuard {
        self.count.fetch_add(1, Ordering::AcqRel);
        InFlightGuard(self.clone())
    }

    /// Waits until there is none.
    async fn idle(&self) {
        loop {
            let idle = self.idle.listen();
            if self.count.load(Ordering::Acquire) == 0 {
                return;
            }
            let _ = idle.await;
        }
    }
}

struct InFlightGuard(Arc<InFlight>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify();
        }
    }
}

/// What a handle provides itself if the device does not: a device without a cache has nothing to do
/// ahead of a read, and a fast zero request may fail with [`Kind::Unsupported`].
pub const PROVIDED: Can = Can::CACHE.union(Can::FAST_ZERO);

/// What the caller was promised and the current device does not support.
struct FactMismatch {
    size: u64,
    can: Can,
    block: BlockSizes,
    /// The device's context for each context of the caller; none if they are the same.
    contexts: Option<Vec<Option<usize>>>,
}

impl FactMismatch {
    /// `None` if the device supports everything that the caller knows.
    fn of(advertised: &Facts, now: &Facts) -> Option<FactMismatch> {
        let same = now.contexts.len() >= advertised.contexts.len()
            && now.contexts.iter().zip(&advertised.contexts).all(|(now, then)| now == then);
        let index = |name| now.contexts.iter().position(|context| context == name);
        let lacks = FactMismatch {
            size: now.size,
            can: advertised.can.difference(now.can),
            block: now.block,
            contexts: (!same).then(|| advertised.contexts.iter().map(index).collect()),
        };
        let enough = now.size >= advertised.size
            && lacks.can.is_empty()
            && now.block.minimum <= advertised.block.minimum
            && now.block.maximum >= advertised.block.maximum
            && same;
        (!enough).then_some(lacks)
    }

    /// Submits a request that the device supports.
    fn submit(&self, device: &dyn Device, mut request: Request) -> PendingRequest {
        if let Some(why) = self.refuse(&request) {
            let error = Error::new(Kind::ShuttingDown, format!("the device was exchanged: {why}"));
            return PendingRequest::from(error.before_flush());
        }
        if request.kind() == OpKind::Cache && self.can.contains(Can::CACHE) {
            return PendingRequest::ready(Ok(Reply::Done));
        }
        if request.flags.contains(RequestFlags::FAST) && self.can.contains(Can::FAST_ZERO) {
            let text = "the device was exchanged: it has no fast zeroes any more";
            return PendingRequest::from(Error::new(Kind::Unsupported, text));
        }
        let (Op::Extents(asked), Some(map)) = (&mut request.op, &self.contexts) else {
            return device.submit(request);
        };
        // Each list's place in the reply: the caller expects them in its own order.
        let mut wanted: Vec<usize> = Vec::with_capacity(asked.count());
        for index in asked.iter() {
            match map.get(index).copied().flatten() {
                Some(now) => wanted.push(now),
                None => {
                    let text = "the device was exchanged: it has no such context any more";
                    return PendingRequest::from(Error::new(Kind::ShuttingDown, text));
                }
            }
        }
        *asked = wanted.iter().fold(ContextSet::empty(), |all, &index| all.with(index));
        let order = *asked;
        let pending = device.submit(request);
        PendingRequest::finishing(async move {
            pending.await.map(|reply| in_order(reply, order, &wanted))
        })
    }

    fn refuse(&self, request: &Request) -> Option<&'static str> {
        let kind = request.kind();
        let mut needed = match kind {
            OpKind::Read | OpKind::Write | OpKind::Cache => Can::empty(),
            OpKind::Zero => Can::ZERO,
            OpKind::Trim => Can::TRIM,
            // A flush must cover the writes of other handles, if this was promised.
            OpKind::Flush => Can::FLUSH | Can::MULTI_CONN,
            OpKind::Extents => Can::EXTENTS,
        };
        needed.set(Can::WRITE, kind.changes());
        needed.set(Can::FUA, request.flags.contains(RequestFlags::FUA));
        if self.can.intersects(needed) {
            return Some("it does not have all abilities any more");
        }
        if request.end().is_none_or(|end| end > self.size) {
            return Some("it has become smaller");
        }
        if !self.block.fits(request.at, request.len, self.size) {
            return Some("its blocks have become larger");
        }
        let payload = matches!(kind, OpKind::Read | OpKind::Write);
        if payload && request.len > u64::from(self.block.maximum) {
            return Some("it takes shorter requests only");
        }
        None
    }
}

/// Reorders the lists of a reply from ascending order of context to the order of `wanted`.
fn in_order(reply: Reply, contexts: ContextSet, wanted: &[usize]) -> Reply {
    let Reply::Extents(lists) = reply else { return reply };
    let mut lists: Vec<(usize, Extents)> = contexts.iter().zip(lists).collect();
    let place = |index: usize| wanted.iter().position(|&wanted| wanted == index);
    lists.sort_by_key(|&(index, _)| place(index));
    Reply::Extents(lists.into_iter().map(|(_, list)| list).collect())
}
