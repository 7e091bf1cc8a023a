//! `nocache`: hides or replaces hints that a range will be read.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device, Facts, FileRange, LeaseAccess, Op, PendingRequest, Reply, Request, Result,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use blockhaul_layers::support::ScratchMemory;
use blockhaul_layers::support::masked;
use blockhaul_layers::support::{layer, param_or};

/// The layer `nocache`.
pub static NOCACHE: LayerKind = LayerKind {
    name: "nocache",
    summary: "hides or emulates cache hints (ranges that will be read soon)",
    manual: "`cachemode=none` does not advertise hints. `emulate` reads the range from the device and \
discards it, so that a cache below is filled. `nop` accepts hints and does nothing.",
    example: r#"
blockhaul serve --layer nocache sample:64M --run 'blockhaul info --cannot cache "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[param_or(
        "cachemode",
        ParamKind::Choice(&["none", "emulate", "nop"]),
        "none",
        "How to handle cache hints.",
    )],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let mode = args.text("cachemode").unwrap_or("none").to_string();
    layer(move |inner| {
        if mode == "none" {
            return Ok(masked(inner, |facts| facts.can -= Can::CACHE));
        }
        let mut facts = Facts::same(&inner.facts());
        facts.can |= Can::CACHE;
        facts.emulated |= Can::CACHE;
        let scratch = (mode == "emulate").then(|| ScratchMemory::for_device(&inner));
        Ok(Arc::new(NocacheDevice { inner, facts: Arc::new(facts), scratch }))
    })
}

struct NocacheDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    /// For reading the hinted range.
    scratch: Option<ScratchMemory>,
}

impl Device for NocacheDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if !matches!(request.op, Op::Cache) {
            return self.inner.submit(request);
        }
        let Some(scratch) = self.scratch.clone() else {
            return PendingRequest::ready(Ok(Reply::Done));
        };
        let inner = self.inner.clone();
        let Request { at, len, .. } = request;
        PendingRequest::start(async move {
            let mut done = 0;
            while done < len {
                let now = scratch.piece().min(len - done);
                drop(scratch.read(&inner, at + done, now).await?);
                done += now;
            }
            Ok(Reply::Done)
        })
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
