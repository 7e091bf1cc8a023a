//! `full:SIZE`: reads as zeroes, and writes fail for lack of space.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, PendingRequest, Reply,
    Request, Result, ZERO,
};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice};

use blockhaul_backends::support::operand;

/// The backend `full:SIZE`.
pub struct FullBackend;

impl Backend for FullBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["full"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "zeroes; every write fails with ENOSPC, to test clients"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul serve full:64M --run 'blockhaul copy sample:64M "$uri" || echo as it should'
"#
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(std::future::ready(open(&target)))
    }
}

fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    let size = match target.intent.target_size {
        Some(wanted) => operand::optional_size(target)?.unwrap_or(wanted),
        None => operand::size(target)?,
    };
    let facts = Facts {
        can: Can::WRITE | Can::FLUSH | Can::CACHE | Can::EXTENTS | Can::MULTI_CONN,
        contexts: vec![BASE_ALLOCATION.to_string()],
        ..Facts::new(operand::name(target), size)
    };
    Ok(OpenedDevice::from(Arc::new(FullDevice(Arc::new(facts))) as Arc<dyn Device>))
}

struct FullDevice(Arc<Facts>);

impl Device for FullDevice {
    fn facts(&self) -> Arc<Facts> {
        self.0.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        match request.op {
            Op::Read(_) => PendingRequest::ready(Ok(Reply::Hole)),
            Op::Write(_) | Op::Zero | Op::Trim => {
                Error::new(Kind::NoSpace, "the device is always full").into()
            }
            Op::Flush | Op::Cache => PendingRequest::ready(Ok(Reply::Done)),
            Op::Extents(contexts) => {
                let hole = || Extents::one(request.len, HOLE | ZERO);
                PendingRequest::ready(Ok(Reply::Extents(contexts.iter().map(|_| hole()).collect())))
            }
        }
    }
}
