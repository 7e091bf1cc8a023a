//! The device of a disk in chunks.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Facts, FileId, HOLE, Kind, Op, PendingRequest, Reply,
    Request, RequestFlags, Result,
};
use blockhaul_catalog::{Claim, HandleOpener, OpenFuture};

use crate::chunks::disk::ChunkDisk;
use crate::device::REQUEST;
use crate::runtime;

/// Time for the last flush of a disk that is closed.
const CLOSE_MAX: Duration = Duration::from_secs(60);

/// A handle to an open disk.
#[derive(Clone)]
pub(crate) struct ChunkDevice {
    facts: Arc<Facts>,
    open: Arc<OpenChunkDisk>,
}

/// The disk of all handles: closed with the last one.
struct OpenChunkDisk {
    name: Arc<str>,
    disk: Arc<ChunkDisk>,
    _claim: Claim,
}

impl ChunkDevice {
    /// With this name, at a place of this number.
    pub(crate) fn new(
        name: &str,
        disk: Arc<ChunkDisk>,
        identity: Option<FileId>,
        claim: Claim,
    ) -> ChunkDevice {
        let mut facts = Facts::new(name, disk.size);
        facts.files = identity.into_iter().collect();
        let changes = Can::WRITE | Can::FLUSH | Can::ZERO | Can::TRIM;
        facts.can = Can::MULTI_CONN | Can::EXTENTS;
        if disk.read_generation.is_none() {
            facts.can |= changes;
        }
        facts.contexts = vec![BASE_ALLOCATION.to_owned()];
        facts.flush_failures_stay = true;
        facts.loses_unflushed = true;
        let chunk = u32::try_from(disk.chunk).unwrap_or(REQUEST);
        facts.allocation_unit = chunk;
        // For copies alone: clients of a server choose their own.
        facts.advertised = Some(facts.advertised_or_own());
        facts.block.preferred = chunk.min(REQUEST);
        ChunkDevice {
            facts: Arc::new(facts),
            open: Arc::new(OpenChunkDisk { name: name.into(), disk, _claim: claim }),
        }
    }

    /// The same for a disk that has no chunks yet.
    pub(crate) fn empty(self) -> ChunkDevice {
        let facts = Facts { zeroed: true, ..(*self.facts).clone() };
        ChunkDevice { facts: Arc::new(facts), ..self }
    }

    fn start(&self, work: impl FnOnce(Arc<ChunkDisk>) -> ChunkWork) -> PendingRequest {
        let (completer, pending) = PendingRequest::completer();
        let disk = self.open.disk.clone();
        let Ok(under_way) = disk.requests.clone().try_read_owned() else {
            return Error::new(Kind::ShuttingDown, "the disk is being closed").into();
        };
        let work = work(disk);
        let started = runtime::spawn(async move {
            let outcome = work.await;
            drop(under_way);
            completer.complete(outcome);
        });
        started.map_or_else(Into::into, |()| pending)
    }
}

/// A request of a disk.
type ChunkWork = std::pin::Pin<Box<dyn Future<Output = Result<Reply>> + Send>>;

impl Device for ChunkDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        let disk = &self.open.disk;
        if let Err(error) = disk.check() {
            return error.into();
        }
        match op {
            Op::Read(room) => {
                let is_hole =
                    disk.extents(at, at + len).runs().iter().all(|run| run.state & HOLE != 0);
                if is_hole && disk.is_current() {
                    return Ok(Reply::Hole).into();
                }
                let mut buf = room.into_buf();
                self.start(|disk| {
                    Box::pin(async move {
                        disk.read(at, &mut buf).await?;
                        Ok(Reply::Data(buf.into()))
                    })
                })
            }
            Op::Write(data) => self.start(|disk| {
                Box::pin(async move {
                    disk.write(at, data.bytes()).await?;
                    Ok(Reply::Done)
                })
            }),
            Op::Zero => {
                let keeps = flags.contains(RequestFlags::NO_HOLE);
                self.start(|disk| {
                    Box::pin(async move {
                        disk.zero(at, len, keeps).await?;
                        Ok(Reply::Done)
                    })
                })
            }
            Op::Trim => self.start(|disk| {
                Box::pin(async move {
                    disk.trim(at, len).await?;
                    Ok(Reply::Done)
                })
            }),
            Op::Flush => self.start(|disk| {
                Box::pin(async move {
                    disk.flush().await?;
                    Ok(Reply::Done)
                })
            }),
            Op::Extents(contexts) => {
                let mut extents = disk.extents(at, at + len);
                if flags.contains(RequestFlags::ONE_EXTENT) {
                    extents.first_only();
                }
                let reply = Reply::Extents(contexts.iter().map(|_| extents.clone()).collect());
                if disk.is_current() {
                    return Ok(reply).into();
                }
                self.start(|disk| {
                    Box::pin(async move {
                        disk.prove_lease().await?;
                        Ok(reply)
                    })
                })
            }
            Op::Cache => {
                Error::new(Kind::Unsupported, "disks in chunks have no such request").into()
            }
        }
    }
}

/// More handles: they share the disk.
impl HandleOpener for ChunkDevice {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let device: Arc<dyn Device> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(device)))
    }
}

impl Drop for OpenChunkDisk {
    fn drop(&mut self) {
        if self.disk.read_generation.is_some() || self.disk.check().is_err() {
            return;
        }
        let disk = self.disk.clone();
        if !runtime::finish(CLOSE_MAX, async move { disk.close().await }) {
            let name = &self.name;
            log::warn!("{name} could not be closed in time: it counts as open for some time");
        }
    }
}
