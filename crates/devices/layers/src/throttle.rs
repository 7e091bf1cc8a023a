//! `throttle`: limits bytes and requests per second, of reads, writes or both, for one device or for
//! all of a group together.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use blockhaul_block::{Device, Error, Facts, Kind, Op, PendingRequest, Request, Result};
use blockhaul_catalog::{Layer, LayerKind, Param, ParamKind, ParamValues};
use blockhaul_io::Turn;

use crate::declared::{param, usage};
use crate::rate::Bucket;

/// The layer `throttle`.
pub static THROTTLE: LayerKind = LayerKind {
    name: "throttle",
    summary: "limits bytes and requests per second, of reads, writes or both, also of several devices together",
    manual: "Requests wait until all limits allow them, in the order in which they arrive. Zero and trim \
requests count as writes of their length. Layers with the same `group` in one process have these limits \
together: each of them needs the same options. `rate` has one limit, which can be changed.",
    example: r#"
blockhaul copy --source-layer 'throttle?iops-read=100&bps-total=20M' sample:8M null:
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: PARAMS,
    changeable: &[],
    configure: |args| configure(args),
};

const PARAMS: &[Param] = &[
    param("group", ParamKind::Text, "Layers with the same group share the limits."),
    param("bps-total", ParamKind::Rate, "Bytes per second, of reads and writes."),
    param("bps-read", ParamKind::Rate, "Bytes per second, of reads."),
    param("bps-write", ParamKind::Rate, "Bytes per second, of writes."),
    param("iops-total", ParamKind::Number, "Requests per second, reads and writes."),
    param("iops-read", ParamKind::Number, "Reads per second."),
    param("iops-write", ParamKind::Number, "Writes per second."),
    param(
        "bps-total-max",
        ParamKind::Size,
        "Bytes that may pass at once [default: those of 100 ms].",
    ),
    param("bps-read-max", ParamKind::Size, "The same for reads."),
    param("bps-write-max", ParamKind::Size, "The same for writes."),
    param(
        "iops-total-max",
        ParamKind::Number,
        "Requests that may pass at once [default: those of 100 ms].",
    ),
    param("iops-read-max", ParamKind::Number, "The same for reads."),
    param("iops-write-max", ParamKind::Number, "The same for writes."),
    param("iops-size", ParamKind::Size, "A larger request counts as several of this size."),
];

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Bytes,
    Requests,
}

/// The limits, by name: what they count, and of which requests; `None`: of all.
const LIMITS: &[(&str, Unit, Option<RequestDirection>)] = &[
    ("bps-total", Unit::Bytes, None),
    ("bps-read", Unit::Bytes, Some(RequestDirection::Read)),
    ("bps-write", Unit::Bytes, Some(RequestDirection::Write)),
    ("iops-total", Unit::Requests, None),
    ("iops-read", Unit::Requests, Some(RequestDirection::Read)),
    ("iops-write", Unit::Requests, Some(RequestDirection::Write)),
];

/// The direction of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestDirection {
    Read,
    Write,
}

/// The limits of a layer or a group.
#[derive(Debug)]
struct ThrottleLimits {
    /// The options that they were made from.
    options: Vec<(&'static str, u64)>,
    buckets: Vec<(Unit, Option<RequestDirection>, Bucket)>,
    /// Bytes of one request; 0: any number.
    iops_size: u64,
}

/// The groups that are in use.
static GROUPS: Mutex<Option<HashMap<String, Weak<ThrottleLimits>>>> = Mutex::new(None);

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let limits = ThrottleLimits::new(args)?;
    let limits = match args.text("group") {
        None => Arc::new(limits),
        Some(group) => join(group, limits)?,
    };
    Ok(Arc::new(ThrottleLayer(limits)))
}

/// The limits of a group, which are these if it is new.
fn join(group: &str, limits: ThrottleLimits) -> Result<Arc<ThrottleLimits>> {
    // A panic cannot leave the map inconsistent.
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    let groups = groups.get_or_insert_default();
    groups.retain(|_, limits| limits.strong_count() > 0);
    if let Some(found) = groups.get(group).and_then(Weak::upgrade) {
        if found.options != limits.options {
            return Err(usage(format!("throttle: group {group} is in use with other limits")));
        }
        return Ok(found);
    }
    let limits = Arc::new(limits);
    groups.insert(group.to_string(), Arc::downgrade(&limits));
    Ok(limits)
}

impl ThrottleLimits {
    fn new(args: &ParamValues) -> Result<ThrottleLimits> {
        let mut options = Vec::new();
        let mut buckets = Vec::new();
        for &(name, unit, side) in LIMITS {
            let max_name = format!("{name}-max");
            let (limit, max) = match unit {
                Unit::Bytes => (args.rate(name), args.size(&max_name)),
                Unit::Requests => (args.number(name), args.number(&max_name)),
            };
            let max = max.filter(|&max| max > 0);
            let Some(limit) = limit.filter(|&limit| limit > 0) else {
                if max.is_some() {
                    return Err(usage(format!("throttle: {max_name} requires {name}")));
                }
                continue;
            };
            let burst = max.unwrap_or(limit / 10);
            options.extend([(name, limit), (name, burst)]);
            buckets.push((unit, side, Bucket::new(limit, burst)));
        }
        if buckets.is_empty() {
            let text = "throttle: requires a limit above 0, for example iops-total=100";
            return Err(Error::new(Kind::Usage, text));
        }
        let iops_size = args.size("iops-size").unwrap_or(0);
        options.push(("iops-size", iops_size));
        Ok(ThrottleLimits { options, buckets, iops_size })
    }

    /// The places of a request in all queues that it is in.
    fn draw(&self, side: RequestDirection, len: u64) -> Vec<(usize, Turn)> {
        let requests = if self.iops_size == 0 { 1 } else { len.div_ceil(self.iops_size).max(1) };
        let concerned = |of: Option<RequestDirection>| of.is_none_or(|of| of == side);
        let buckets = self.buckets.iter().enumerate().filter(|(_, bucket)| concerned(bucket.1));
        let turns = buckets.map(|(index, (unit, _, bucket))| {
            let tokens = if *unit == Unit::Bytes { len } else { requests };
            (index, bucket.draw(tokens))
        });
        turns.collect()
    }

    /// How long to wait before asking again; `None`: it is this one's turn everywhere.
    fn wait(&self, turns: &[(usize, Turn)]) -> Option<Duration> {
        let wait = |&(index, turn): &(usize, Turn)| self.buckets.get(index)?.2.wait(turn);
        turns.iter().filter_map(wait).max()
    }
}

struct ThrottleLayer(Arc<ThrottleLimits>);

impl Layer for ThrottleLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(ThrottleDevice { inner, limits: self.0.clone() }))
    }
}

struct ThrottleDevice {
    inner: Arc<dyn Device>,
    limits: Arc<ThrottleLimits>,
}

impl Device for ThrottleDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let side = match &request.op {
            Op::Read(_) => RequestDirection::Read,
            Op::Write(_) | Op::Zero | Op::Trim => RequestDirection::Write,
            _ => return self.inner.submit(request),
        };
        let turns = self.limits.draw(side, request.len);
        if self.limits.wait(&turns).is_none() {
            return self.inner.submit(request);
        }
        let inner = self.inner.clone();
        let limits = self.limits.clone();
        PendingRequest::start(async move {
            while let Some(wait) = limits.wait(&turns) {
                blockhaul_io::sleep(wait).await;
            }
            inner.submit(request).await
        })
    }
}
