//! The device of an export.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Facts, Flags, Kind, Op, Pending, Reply, Request,
};
use blockhaul_catalog::{Another, Opening};

use crate::DIRTY;
use crate::export::Export;
use crate::map::Map;

/// Runs that are enough for one reply.
const RUNS_MAX: usize = 64 << 10;

/// A disk, with the map of it at one moment.
#[derive(Clone)]
pub(crate) struct Disk {
    facts: Arc<Facts>,
    export: Arc<Export>,
    map: Arc<Map>,
}

impl Disk {
    pub(crate) fn new(name: &str, export: Arc<Export>, map: Map) -> Disk {
        let mut facts = Facts::new(name, map.size());
        facts.can = Can::EXTENTS | Can::MULTI_CONN;
        facts.contexts = vec![BASE_ALLOCATION.to_owned()];
        if map.is_incremental() {
            facts.contexts.push(DIRTY.to_owned());
        }
        Disk { facts: Arc::new(facts), export, map: Arc::new(map) }
    }
}

impl Device for Disk {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(_) if self.map.is_zero(at, len) => Pending::ready(Ok(Reply::Hole)),
            Op::Read(room) => {
                let export = self.export.clone();
                let size = self.facts.size;
                Pending::start(async move {
                    let mut buf = room.into_buf();
                    export.read(size, at, &mut buf).await?;
                    Ok(Reply::Data(buf.into()))
                })
            }
            Op::Extents(contexts) => {
                let lists = contexts.iter().map(|index| {
                    let mut list = self.map.extents(at, len, index > 0, RUNS_MAX);
                    if flags.contains(Flags::ONE_EXTENT) {
                        list.first_only();
                    }
                    list
                });
                Pending::ready(Ok(Reply::Extents(lists.collect())))
            }
            Op::Write(_) | Op::Zero | Op::Trim | Op::Flush | Op::Cache => {
                Error::new(Kind::ReadOnly, "exports of KubeVirt are read-only").into()
            }
        }
    }
}

/// More handles: connections are shared.
impl Another for Disk {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let disk: Arc<dyn Device> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(disk)))
    }
}
