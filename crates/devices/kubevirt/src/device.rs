//! The device of an export.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Facts, Kind, Op, PendingRequest, Reply, Request,
    RequestFlags,
};
use blockhaul_catalog::{HandleOpener, OpenFuture};

use crate::DIRTY;
use crate::export::HttpExport;
use crate::map::ExportMap;

/// Runs that are enough for one reply.
const RUNS_MAX: usize = 64 << 10;

/// A disk, with the map of it at one moment.
#[derive(Clone)]
pub(crate) struct KubeVirtDevice {
    facts: Arc<Facts>,
    export: Arc<HttpExport>,
    map: Arc<ExportMap>,
}

impl KubeVirtDevice {
    pub(crate) fn new(name: &str, export: Arc<HttpExport>, map: ExportMap) -> KubeVirtDevice {
        let mut facts = Facts::new(name, map.size());
        facts.can = Can::EXTENTS | Can::MULTI_CONN;
        facts.contexts = vec![BASE_ALLOCATION.to_owned()];
        if map.is_incremental() {
            facts.contexts.push(DIRTY.to_owned());
        }
        KubeVirtDevice { facts: Arc::new(facts), export, map: Arc::new(map) }
    }
}

impl Device for KubeVirtDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(_) if self.map.is_zero(at, len) => PendingRequest::ready(Ok(Reply::Hole)),
            Op::Read(room) => {
                let export = self.export.clone();
                let size = self.facts.size;
                PendingRequest::start(async move {
                    let mut buf = room.into_buf();
                    export.read(size, at, &mut buf).await?;
                    Ok(Reply::Data(buf.into()))
                })
            }
            Op::Extents(contexts) => {
                let lists = contexts.iter().map(|index| {
                    let mut list = self.map.extents(at, len, index > 0, RUNS_MAX);
                    if flags.contains(RequestFlags::ONE_EXTENT) {
                        list.first_only();
                    }
                    list
                });
                PendingRequest::ready(Ok(Reply::Extents(lists.collect())))
            }
            Op::Write(_) | Op::Zero | Op::Trim | Op::Flush | Op::Cache => {
                Error::new(Kind::ReadOnly, "exports of KubeVirt are read-only").into()
            }
        }
    }
}

/// More handles: connections are shared.
impl HandleOpener for KubeVirtDevice {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let disk: Arc<dyn Device> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(disk)))
    }
}
