//! `protect`: makes ranges read-only.

use std::sync::Arc;

use blockhaul_block::{
    Device, Error, Facts, FileRange, Kind, LeaseAccess, Op, PendingRequest, Request, Result,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use crate::layers::ranges::RangeSet;
use blockhaul_layers::support::ScratchMemory;
use blockhaul_layers::support::{layer, param, usage};

/// The layer `protect`.
pub static PROTECT: LayerKind = LayerKind {
    name: "protect",
    summary: "protects ranges of the device from changes",
    manual: "Writes and zero requests that touch a protected range succeed if they would change nothing \
there: the range is read and compared. Otherwise they fail (EPERM), and nothing of the request \
is written. Trim requests that touch a protected range fail. `protect=START-END` includes both \
ends; START defaults to the start of the device and END to its end; `~START-END` protects \
everything except the range. Several ranges are separated by commas.",
    example: r#"
blockhaul serve --layer 'protect?protect=0-1023' memory:64M \
  --run 'blockhaul copy random:1M "$uri" || echo the first KiB stays as it is'
"#,
    needs_content: true,
    writes_below: true,
    transparent: false,
    params: &[param("protect", ParamKind::Text, "The ranges: START-END[,START-END …].")],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let Some(text) = args.text("protect") else {
        return Err(usage("protect: requires a range, for example protect=0-511"));
    };
    let ranges = Arc::new(RangeSet::parse("protect", text)?);
    layer(move |inner| {
        let scratch = ScratchMemory::for_device(&inner);
        Ok(Arc::new(ProtectDevice { inner, ranges: ranges.clone(), scratch }))
    })
}

struct ProtectDevice {
    inner: Arc<dyn Device>,
    ranges: Arc<RangeSet>,
    scratch: ScratchMemory,
}

impl Device for ProtectDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let end = request.end().unwrap_or(u64::MAX);
        let touched = request.kind().changes() && self.ranges.within(request.at, end).count() > 0;
        if !touched {
            return self.inner.submit(request);
        }
        if matches!(request.op, Op::Trim) {
            return refused().into();
        }
        let inner = self.inner.clone();
        let ranges = self.ranges.clone();
        let scratch = self.scratch.clone();
        if let Op::Write(data) = &request.op
            && let Err(error) = data.load()
        {
            return Error::system("cannot read what is to be written", error).into();
        }
        PendingRequest::start(async move {
            for (from, to) in ranges.within(request.at, end) {
                let bytes = match &request.op {
                    Op::Write(data) => {
                        let start = from - request.at;
                        let stop = to - request.at;
                        Some(&data.bytes()[start as usize..stop as usize])
                    }
                    _ => None,
                };
                if !scratch.holds(&inner, from, to - from, bytes).await? {
                    return Err(refused());
                }
            }
            inner.submit(request).await
        })
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        match access {
            LeaseAccess::Read => self.inner.file_at(at, len, access),
            LeaseAccess::Write => None,
        }
    }
}

fn refused() -> Error {
    Error::new(Kind::ReadOnly, "the request would change a protected range")
}
