//! `detect-zeroes`: writes of zeroes become zero requests.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device, Facts, FileRange, LeaseAccess, Op, PendingRequest, Request, RequestFlags, Result,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use crate::declared::{layer, param_or};

/// The layer `detect-zeroes`.
pub static DETECT_ZEROES: LayerKind = LayerKind {
    name: "detect-zeroes",
    summary: "sends a zero request for each write of which all bytes are zero",
    manual: "An image then stores no data for what clients write as zeroes, as with QEMU's \
option of this name. The range stays allocated where the device below distinguishes; `unmap=on` lets the \
device free it. Devices without zero requests get the write unchanged.",
    example: r#"
blockhaul serve --layer 'detect-zeroes?unmap=on' memory:64M \
  --run 'blockhaul copy sample:64M "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[param_or(
        "unmap",
        ParamKind::Switch,
        "off",
        "Whether the device may free what is written as zeroes.",
    )],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let hole = if args.switch("unmap") { RequestFlags::empty() } else { RequestFlags::NO_HOLE };
    layer(move |inner| {
        let below = inner.facts();
        if !(below.can - below.emulated).contains(Can::ZERO) {
            return Ok(inner);
        }
        let mut facts = Facts::same(&below);
        // Payloads are read.
        facts.takes_parked = false;
        Ok(Arc::new(ZeroDetector { inner, facts: Arc::new(facts), hole }))
    })
}

struct ZeroDetector {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    /// Flags of the zero requests.
    hole: RequestFlags,
}

impl Device for ZeroDetector {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        if let Op::Write(data) = &request.op
            && blockhaul_io::is_zero(data.bytes())
        {
            request.op = Op::Zero;
            request.flags = (request.flags & RequestFlags::FUA) | self.hole;
        }
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        match access {
            LeaseAccess::Read => self.inner.file_at(at, len, access),
            // Bytes that bypass the layer are not examined.
            LeaseAccess::Write => None,
        }
    }
}
