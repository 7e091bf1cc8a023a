//! `nozero`: hides, replaces or limits zero requests.

use blockhaul_block::{Can, Device, Facts, Op, PendingRequest, Request, RequestFlags, Result};
use blockhaul_catalog::{LayerKind, ParamKind, ParamValues};
use std::sync::Arc;

use blockhaul_layers::support::masked;
use blockhaul_layers::support::{layer, param_or};

/// The layer `nozero`.
pub static NOZERO: LayerKind = LayerKind {
    name: "nozero",
    summary: "hides or emulates zero requests",
    manual: "`zeromode=none` does not advertise zero requests: clients must write zeroes. `emulate` accepts \
them and writes zeroes to the device below. `notrim` asks the device to keep zeroed ranges \
allocated. `plugin` passes zero requests to the device; use it with `fastzeromode`.

`fastzeromode` applies to requests that must be fast or fail: `none` does not advertise them, \
`slow` always fails them, `ignore` zeroes as if the flag were not set, `default` leaves it to \
the device.",
    example: r#"
blockhaul serve --layer nozero memory:64M --run 'blockhaul copy sample:64M "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        param_or(
            "zeromode",
            ParamKind::Choice(&["none", "emulate", "notrim", "plugin"]),
            "none",
            "How to handle zero requests.",
        ),
        param_or(
            "fastzeromode",
            ParamKind::Choice(&["none", "slow", "ignore", "default"]),
            "default",
            "How to handle zero requests that must be fast.",
        ),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn blockhaul_catalog::Layer>> {
    let mode = args.text("zeromode").unwrap_or("none").to_string();
    let fast = args.text("fastzeromode").unwrap_or("default").to_string();
    let notrim = mode == "notrim";
    layer(move |inner| {
        let can = inner.facts().can;
        let mut device = inner;
        if matches!(mode.as_str(), "none" | "emulate") {
            device = masked(device, |facts| facts.can -= Can::ZERO | Can::FAST_ZERO);
            // Emulated here, so that layers above do not see the hidden ability.
            device = blockhaul_block::emulate::emulate(device);
        }
        let ignore = fast == "ignore";
        let slow = fast == "slow" && can.contains(Can::ZERO);
        let mut facts = Facts::same(&device.facts());
        if mode == "none" {
            facts.withheld |= facts.can & (Can::ZERO | Can::FAST_ZERO);
        } else {
            match fast.as_str() {
                "none" => facts.withheld |= facts.can & Can::FAST_ZERO,
                "slow" | "ignore" if facts.can.contains(Can::ZERO) => facts.can |= Can::FAST_ZERO,
                _ => {}
            }
        }
        Ok(Arc::new(NozeroDevice { inner: device, facts: Arc::new(facts), notrim, ignore, slow }))
    })
}

struct NozeroDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    notrim: bool,
    ignore: bool,
    slow: bool,
}

impl Device for NozeroDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        if matches!(request.op, Op::Zero) {
            if request.flags.contains(RequestFlags::FAST) && self.slow {
                let text = "fast zeroing is disabled";
                return blockhaul_block::Error::new(blockhaul_block::Kind::Unsupported, text)
                    .into();
            }
            if self.ignore {
                request.flags -= RequestFlags::FAST;
            }
            if self.notrim {
                request.flags |= RequestFlags::NO_HOLE;
            }
        }
        self.inner.submit(request)
    }

    fn file_at(
        &self,
        at: u64,
        len: u64,
        access: blockhaul_block::LeaseAccess,
    ) -> Option<blockhaul_block::FileRange> {
        self.inner.file_at(at, len, access)
    }
}
