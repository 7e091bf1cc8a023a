//! `zero:SIZE`: a read-only device of zeroes, optionally with many extents.

use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, Can, Device, Facts, Result};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};

use crate::null::EmptyDevice;
use crate::support::operand;

/// The backend `zero:SIZE`.
pub struct ZeroBackend;

impl Backend for ZeroBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["zero"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "zeroes, read-only"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul map 'zero:1G?runs=256M'
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[Param {
                name: "runs",
                kind: ParamKind::Size,
                default: Some("0"),
                doc: "Length of its extents, alternately holes and allocated; 0: one hole.",
            }]
        }
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(std::future::ready(open(&target)))
    }
}

fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    operand::source_only(target)?;
    let size = operand::size(target)?;
    let facts = Facts {
        can: Can::CACHE | Can::EXTENTS | Can::FLUSH | Can::MULTI_CONN,
        zeroed: true,
        contexts: vec![BASE_ALLOCATION.to_string()],
        ..Facts::new(operand::name(target), size)
    };
    let runs = target.args.size("runs").unwrap_or(0);
    Ok(
        OpenedDevice::from(
            Arc::new(EmptyDevice { facts: Arc::new(facts), runs }) as Arc<dyn Device>
        ),
    )
}
