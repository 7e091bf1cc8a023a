//! `readonly`: the device without everything that changes it.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device, Error, Facts, FileRange, Kind, LeaseAccess, PendingRequest, Request, Result,
};
use blockhaul_catalog::{Layer, LayerKind, ParamValues};

/// The layer `readonly`.
pub static READONLY: LayerKind = LayerKind {
    name: "readonly",
    summary: "makes the device read-only",
    manual: "Clients see a read-only device, and every request that would change it is refused (EPERM).",
    example: r#"
blockhaul serve --layer readonly memory:64M --run 'blockhaul info --is read-only "$uri"'
"#,
    needs_content: false,
    writes_below: false,
    transparent: true,
    params: &[],
    changeable: &[],
    configure: |args| configure(args),
};

struct ReadonlyLayer;

fn configure(_args: &ParamValues) -> Result<Arc<dyn Layer>> {
    Ok(Arc::new(ReadonlyLayer))
}

impl Layer for ReadonlyLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let mut facts = Facts::same(&inner.facts());
        facts.can -= Can::CHANGES;
        facts.emulated -= Can::CHANGES;
        Ok(Arc::new(ReadonlyDevice { inner, facts: Arc::new(facts) }))
    }
}

struct ReadonlyDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
}

impl Device for ReadonlyDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        // The fence already refuses these; but the layer must not depend on what is above it.
        if request.kind().changes() {
            return Error::new(Kind::ReadOnly, "the device is read-only").into();
        }
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        match access {
            LeaseAccess::Read => self.inner.file_at(at, len, access),
            LeaseAccess::Write => None,
        }
    }
}
