//! `checkwrite`: compares written data with the device's contents.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device, Error, Facts, Hints, Kind, Op, PendingRequest, Reply, Request, RequestFlags,
    Result,
};
use blockhaul_catalog::{Layer, LayerKind, Param, ParamValues};

use blockhaul_layers::support::ScratchMemory;
use blockhaul_layers::support::layer;

/// The layer `checkwrite`.
pub static CHECKWRITE: LayerKind = LayerKind {
    name: "checkwrite",
    summary: "compares written data with the device, and changes nothing",
    manual: "A write succeeds if the device contains the same bytes already, a zero or trim request if it \
contains zeroes; otherwise the request fails (EIO). Nothing is changed, so the device below \
may be read-only. A copy to this layer is a comparison over the network.",
    example: r#"
blockhaul copy sample:64M disk.raw
blockhaul serve --layer checkwrite disk.raw --run 'blockhaul copy sample:64M "$uri"'
"#,
    needs_content: true,
    writes_below: false,
    transparent: false,
    params: NONE,
    changeable: &[],
    configure: |args| configure(args),
};

const NONE: &[Param] = &[];

fn configure(_args: &ParamValues) -> Result<Arc<dyn Layer>> {
    layer(|inner| {
        let below = inner.facts();
        // Written data is compared, and nothing is flushed.
        let kept = Hints::ZEROED | Hints::CLAIMS_ROOM | Hints::IN_FLIGHT | Hints::EXTENTS;
        let mut facts = Facts::over(&below).keeping(&below, kept);
        let supplied = Can::CHANGES | Can::FLUSH | Can::MULTI_CONN;
        facts.emulated |= supplied - facts.can;
        facts.can |= supplied;
        facts.can -= Can::FAST_ZERO;
        // Payloads are read.
        facts.takes_parked = false;
        let scratch = ScratchMemory::for_device(&inner);
        Ok(Arc::new(CheckDevice { inner, facts: Arc::new(facts), scratch }))
    })
}

struct CheckDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    scratch: ScratchMemory,
}

impl Device for CheckDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        let at = request.at;
        let len = request.len;
        let bytes = match request.op {
            Op::Write(data) => Some(data),
            Op::Zero | Op::Trim => None,
            Op::Flush => return PendingRequest::ready(Ok(Reply::Done)),
            op => {
                request.op = op;
                request.flags -= RequestFlags::FUA;
                return self.inner.submit(request);
            }
        };
        let inner = self.inner.clone();
        let scratch = self.scratch.clone();
        PendingRequest::start(async move {
            if scratch.holds(&inner, at, len, bytes.as_ref().map(|data| data.bytes())).await? {
                Ok(Reply::Done)
            } else {
                Err(Error::new(Kind::Io, "the data differs from the device"))
            }
        })
    }
}
