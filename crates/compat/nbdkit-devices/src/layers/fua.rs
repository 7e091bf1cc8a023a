//! `fua`: hides, emulates, forces or drops forced unit access.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device, Facts, FileRange, LeaseAccess, Op, PendingRequest, Reply, Request, RequestFlags,
    Result, emulate,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use blockhaul_layers::support::FlushRecord;
use blockhaul_layers::support::PerDisk;
use blockhaul_layers::support::masked;
use blockhaul_layers::support::{opened, param_or, usage};

/// The layer `fua`.
pub static FUA: LayerKind = LayerKind {
    name: "fua",
    summary: "sets how requests with FUA are made durable",
    manual: "`fuamode=none` does not advertise FUA: clients must flush. `emulate` flushes the device after \
each FUA request, even if the device supports FUA. `native` passes FUA to the device and fails \
at the start if the device does not support it. `pass` passes it to the device in any case. \
`force` makes every write durable, and flushes do nothing. `discard` accepts FUA and flushes \
and ignores both: fast, and data is lost if the machine stops.

With `emulate` and `force`, after a flush or a FUA request has failed, all later ones fail \
until the device is opened again.",
    example: r#"
blockhaul serve --layer 'fua?fuamode=emulate' memory:64M \
  --run 'blockhaul info --can fua "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[param_or(
        "fuamode",
        ParamKind::Choice(&["none", "emulate", "native", "force", "pass", "discard"]),
        "none",
        "How to handle FUA.",
    )],
    changeable: &[],
    configure: |args| configure(args),
};

enum FuaMode {
    /// With the failed-flush state of the device below.
    Force(Arc<FlushRecord>),
    Discard,
}

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let mode = args.text("fuamode").unwrap_or("none").to_string();
    let disks = PerDisk::<FlushRecord>::default();
    opened(move |below| {
        let flushes = disks.get(&below, || Ok(FlushRecord::default()))?;
        let inner = below.device;
        let facts = inner.facts();
        let writable = facts.can.contains(Can::WRITE);
        let native = facts.can.contains(Can::FUA) && !facts.emulated.contains(Can::FUA);
        let able = facts.can.intersects(Can::FUA | Can::FLUSH);
        match mode.as_str() {
            _ if !writable => Ok(inner),
            "none" => Ok(masked(inner, |facts| facts.withheld |= Can::FUA)),
            "emulate" if able => {
                let inner = flushes.guard(inner);
                Ok(emulate::emulate(masked(inner, |f| f.can -= Can::FUA)))
            }
            "native" if native => Ok(inner),
            "pass" => Ok(inner),
            "force" if able => Ok(forced(flushes.guard(inner), FuaMode::Force(flushes))),
            "discard" => Ok(forced(inner, FuaMode::Discard)),
            mode => Err(usage(format!(
                "fua: fuamode={mode} is not possible: {} cannot make writes durable that way",
                facts.name
            ))),
        }
    })
}

fn forced(inner: Arc<dyn Device>, mode: FuaMode) -> Arc<dyn Device> {
    let mut facts = Facts::same(&inner.facts());
    facts.can |= Can::FUA | Can::FLUSH;
    facts.withheld -= Can::FUA | Can::FLUSH;
    // A durable write needs no flush on any handle.
    facts.can |= Can::MULTI_CONN;
    Arc::new(FuaDevice { inner, facts: Arc::new(facts), mode })
}

struct FuaDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    mode: FuaMode,
}

impl Device for FuaDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        match request.op {
            Op::Flush => {
                let is_durable = match &self.mode {
                    FuaMode::Force(flushes) => flushes.check(),
                    FuaMode::Discard => Ok(()),
                };
                return PendingRequest::ready(is_durable.map(|()| Reply::Done));
            }
            Op::Write(_) | Op::Zero | Op::Trim => {
                request.flags.set(RequestFlags::FUA, matches!(self.mode, FuaMode::Force(_)));
            }
            _ => {}
        }
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        match access {
            LeaseAccess::Read => self.inner.file_at(at, len, access),
            // Writes that bypass the layer would not be durable.
            LeaseAccess::Write => None,
        }
    }
}
