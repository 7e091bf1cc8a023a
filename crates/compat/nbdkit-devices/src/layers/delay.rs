//! `delay`: delays every request, like a slow disk or a distant server.
//!
//! The time runs from `submit`; requests wait in parallel, not in a queue. With `exclusive=on` a
//! request for extents runs alone: it waits until all others are done, and all others wait for it,
//! as on servers with one lock for both.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_block::{Device, Facts, Op, OpKind, Outcome, PendingRequest, Request, Result};
use blockhaul_catalog::{Layer, LayerKind, Param, ParamKind, ParamValues};
use blockhaul_io::Completer;

/// The layer `delay`.
pub static DELAY: LayerKind = LayerKind {
    name: "delay",
    summary: "delays requests before they reach the device",
    manual: "Every request waits this long before it is passed to the device; requests wait in parallel. \
With `exclusive=on`, all other requests wait while a request for extents is in progress, as \
with sources that hold one lock for both.",
    example: r#"
blockhaul copy --source-layer 'delay?read=20ms&extents=20ms' sample:64M null:
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        time("read", "Delay of reads."),
        time("write", "Delay of writes."),
        time("zero", "Delay of zero requests."),
        time("trim", "Delay of trim requests."),
        time("flush", "Delay of flushes."),
        time("cache", "Delay of cache hints."),
        time("extents", "Delay of requests for extents."),
        Param {
            name: "exclusive",
            kind: ParamKind::Switch,
            default: Some("off"),
            doc: "Hold back all other requests while a request for extents is in progress.",
        },
    ],
    changeable: &["read", "write", "zero", "trim", "flush", "cache", "extents"],
    configure: |args| configure(args),
};

/// A duration parameter, zero by default.
const fn time(name: &'static str, doc: &'static str) -> Param {
    Param { name, kind: ParamKind::Duration, default: Some("0"), doc }
}

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let times = Arc::<DelayTimes>::default();
    times.set(args);
    let gate = args.switch("exclusive").then(|| Arc::new(RequestGate::default()));
    Ok(Arc::new(DelayLayer { times, gate }))
}

/// Delays in nanoseconds, in the order of [`OpKind::ALL`].
#[derive(Default)]
struct DelayTimes([AtomicU64; OpKind::ALL.len()]);

impl DelayTimes {
    fn set(&self, args: &ParamValues) {
        for (time, kind) in self.0.iter().zip(OpKind::ALL) {
            let wanted = args.duration(kind.name()).unwrap_or_default();
            // Capped at five centuries.
            let nanoseconds = u64::try_from(wanted.as_nanos()).unwrap_or(u64::MAX);
            time.store(nanoseconds, Ordering::Relaxed);
        }
    }

    fn of(&self, kind: OpKind) -> Duration {
        Duration::from_nanos(self.0[kind as usize].load(Ordering::Relaxed))
    }
}

struct DelayLayer {
    times: Arc<DelayTimes>,
    gate: Option<Arc<RequestGate>>,
}

impl Layer for DelayLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let times = self.times.clone();
        let gate = self.gate.clone();
        Ok(Arc::new(DelayDevice { inner, times, gate }))
    }

    fn change(&self, args: &ParamValues) -> Result<()> {
        self.times.set(args);
        Ok(())
    }
}

struct DelayDevice {
    inner: Arc<dyn Device>,
    times: Arc<DelayTimes>,
    gate: Option<Arc<RequestGate>>,
}

impl Device for DelayDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let delay = self.times.of(request.kind());
        if delay.is_zero() && self.gate.is_none() {
            return self.inner.submit(request);
        }
        let inner = self.inner.clone();
        let gate = self.gate.clone();
        let due = blockhaul_io::now().checked_add(delay);
        PendingRequest::start(async move {
            let alone = matches!(request.op, Op::Extents(_));
            let pass = match gate {
                Some(gate) => Some(RequestGate::enter(gate, alone).await),
                None => None,
            };
            // A time too far to be represented never comes: `sleep` waits for a century.
            match due {
                // After the gate, the time starts when the gate opens, as the work would.
                _ if pass.is_some() => blockhaul_io::sleep(delay).await,
                Some(due) => blockhaul_io::sleep_until(due).await,
                None => blockhaul_io::sleep(delay).await,
            }
            let outcome: Outcome = inner.submit(request).await;
            drop(pass);
            outcome
        })
    }
}

/// Admits several requests at a time, or a single exclusive one; first come, first served.
#[derive(Default)]
struct RequestGate(Mutex<RequestGateState>);

#[derive(Default)]
struct RequestGateState {
    many: usize,
    alone: bool,
    waiting: VecDeque<(bool, Completer<RequestPermit>)>,
}

impl RequestGateState {
    /// Admits a request if possible.
    fn admit(&mut self, alone: bool) -> bool {
        let free = !self.alone && (!alone || self.many == 0);
        if free {
            self.alone = alone;
            self.many += usize::from(!alone);
        }
        free
    }
}

/// Permission to run; returned on drop.
struct RequestPermit {
    gate: Arc<RequestGate>,
    alone: bool,
}

impl RequestGate {
    async fn enter(gate: Arc<RequestGate>, alone: bool) -> RequestPermit {
        let turn = {
            let mut inside = gate.lock();
            if inside.waiting.is_empty() && inside.admit(alone) {
                return RequestPermit { gate: gate.clone(), alone };
            }
            let (completer, turn) = blockhaul_io::ticket();
            inside.waiting.push_back((alone, completer));
            turn
        };
        turn.await.expect("the gate lets in all who wait, and they keep it alive")
    }

    fn leave(gate: &Arc<RequestGate>, alone: bool) {
        let mut admitted = Vec::new();
        {
            let mut inside = gate.lock();
            if alone {
                inside.alone = false;
            } else {
                inside.many -= 1;
            }
            while let Some(&(alone, _)) = inside.waiting.front()
                && inside.admit(alone)
            {
                admitted.extend(inside.waiting.pop_front());
            }
        }
        // Without the lock: an abandoned waiter drops the pass, which calls this again.
        for (alone, completer) in admitted {
            completer.complete(RequestPermit { gate: gate.clone(), alone });
        }
    }

    fn lock(&self) -> MutexGuard<'_, RequestGateState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        RequestGate::leave(&self.gate, self.alone);
    }
}
