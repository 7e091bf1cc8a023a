//! `--trace`: logs each request at each layer and at the device, in nbdkit's format.

use std::sync::Arc;

use blockhaul_block::{
    Device, Facts, FileRange, LeaseAccess, Op, PendingRequest, Request, RequestFlags, Result,
};
use blockhaul_catalog::{AdjustableLayer, Layer};

/// Layers with a logging layer over the device and over each of them, the last one outermost.
/// `device`: its name in the lines, if it has any. Gates have lines, too, like nbdkit's filters.
pub fn with_trace(layers: &[Arc<AdjustableLayer>], device: Option<&str>) -> Vec<Arc<dyn Layer>> {
    let trace = |name: &str| Arc::new(TraceLayer(name.into())) as Arc<dyn Layer>;
    let mut with_trace: Vec<_> = device.map(trace).into_iter().collect();
    for layer in layers {
        with_trace.extend(layer.layer().cloned());
        with_trace.push(trace(layer.name()));
    }
    with_trace
}

/// A layer that changes nothing.
struct TraceLayer(Arc<str>);

impl Layer for TraceLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        log::debug!(device = self.0; "{}: open", self.0);
        Ok(Arc::new(TraceDevice { name: self.0.clone(), inner }))
    }
}

struct TraceDevice {
    name: Arc<str>,
    inner: Arc<dyn Device>,
}

impl Device for TraceDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let what = match request.op {
            Op::Read(_) => "pread",
            Op::Write(_) => "pwrite",
            Op::Flush => "flush",
            Op::Trim => "trim",
            Op::Zero => "zero",
            Op::Cache => "cache",
            Op::Extents(_) => "extents",
        };
        let Request { at, len, flags, .. } = request;
        log::debug!(
            device = self.name, request = what, offset = at, length = len;
            "{}: {what} count={len} offset={at}{}", self.name, FlagNames(flags)
        );
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}

impl Drop for TraceDevice {
    fn drop(&mut self) {
        log::debug!(device = self.name; "{}: close", self.name);
    }
}

/// Flags by their names.
struct FlagNames(RequestFlags);

impl std::fmt::Display for FlagNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (name, _) in self.0.iter_names() {
            write!(f, " {}", name.to_ascii_lowercase())?;
        }
        Ok(())
    }
}
