//! The device of a page blob.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Facts, FileId, Kind, Op, PendingRequest, Reply, Request,
    RequestFlags, Result,
};
use blockhaul_catalog::{Claim, HandleOpener, OpenFuture};
use blockhaul_io::Data;
use bytes::Bytes;
use tokio::sync::Semaphore;

use super::blob::{PAGE, PageBlob, WRITE_MAX};
use crate::device::{REQUEST, RemoteObject as _};
use crate::runtime;

/// Time for the service to end the lease of a blob that is closed.
const CLOSE_MAX: Duration = Duration::from_secs(10);

/// A handle to an open blob.
#[derive(Clone)]
pub(super) struct PageBlobDevice {
    facts: Arc<Facts>,
    open: Arc<OpenPageBlob>,
    /// One for each request that may be under way.
    turns: Arc<Semaphore>,
}

/// The blob of all handles: closed with the last one.
struct OpenPageBlob {
    blob: Arc<PageBlob>,
    _claim: Claim,
}

impl PageBlobDevice {
    /// With this name, for the blob of this number, with at most `connections` requests under way. `is_new`: it is empty.
    pub(super) fn new(
        name: &str,
        blob: PageBlob,
        (identity, claim): (FileId, Claim),
        connections: usize,
        is_new: bool,
    ) -> PageBlobDevice {
        let mut facts = Facts::new(name, blob.size);
        facts.files = vec![identity];
        facts.can = Can::MULTI_CONN | Can::EXTENTS;
        if blob.lease.is_some() {
            facts.can |= Can::WRITE | Can::FLUSH | Can::FUA | Can::ZERO | Can::TRIM;
        } else {
            facts.description = blob.object.description();
            facts.version = blob.object.version().map(Into::into);
        }
        facts.contexts = vec![BASE_ALLOCATION.to_owned()];
        facts.zeroed = is_new;
        facts.allocation_unit = PAGE;
        facts.block.minimum = PAGE;
        facts.block.maximum = WRITE_MAX;
        // For copies alone: clients of a server choose their own.
        facts.advertised = Some(facts.advertised_or_own());
        facts.block.preferred = REQUEST;
        PageBlobDevice {
            facts: Arc::new(facts),
            open: Arc::new(OpenPageBlob { blob: Arc::new(blob), _claim: claim }),
            turns: Arc::new(Semaphore::new(connections)),
        }
    }

    fn start(&self, work: impl FnOnce(Arc<PageBlob>) -> BlobWork) -> PendingRequest {
        let (completer, pending) = PendingRequest::completer();
        let (work, turns) = (work(self.open.blob.clone()), self.turns.clone());
        let started = runtime::spawn(async move {
            // Nobody closes it.
            let _turn = turns.acquire().await;
            completer.complete(work.await);
        });
        started.map_or_else(Into::into, |()| pending)
    }
}

/// A request of a blob.
type BlobWork = Pin<Box<dyn Future<Output = Result<Reply>> + Send>>;

/// The bytes of a write, which are not copied.
struct WriteBytes(Data);

impl AsRef<[u8]> for WriteBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl Device for PageBlobDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => {
                let mut buf = room.into_buf();
                self.start(|blob| {
                    Box::pin(async move {
                        blob.read(at, &mut buf).await?;
                        Ok(Reply::Data(buf.into()))
                    })
                })
            }
            Op::Write(data) => {
                let bytes = Bytes::from_owner(WriteBytes(data));
                self.start(|blob| {
                    Box::pin(async move { blob.write(at, bytes).await.map(|()| Reply::Done) })
                })
            }
            Op::Zero if flags.contains(RequestFlags::NO_HOLE) => self.start(|blob| {
                Box::pin(async move { blob.write_zeroes(at, len).await.map(|()| Reply::Done) })
            }),
            Op::Zero | Op::Trim => self.start(|blob| {
                Box::pin(async move { blob.clear(at, len).await.map(|()| Reply::Done) })
            }),
            // What was written is durable.
            Op::Flush => Ok(Reply::Done).into(),
            Op::Extents(contexts) => {
                let is_one = flags.contains(RequestFlags::ONE_EXTENT);
                self.start(move |blob| {
                    Box::pin(async move {
                        let mut extents = blob.extents(at, len).await?;
                        if is_one {
                            extents.first_only();
                        }
                        Ok(Reply::Extents(contexts.iter().map(|_| extents.clone()).collect()))
                    })
                })
            }
            Op::Cache => Error::new(Kind::Unsupported, "blobs have no such request").into(),
        }
    }
}

/// More handles: they share the blob.
impl HandleOpener for PageBlobDevice {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let device: Arc<dyn Device> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(device)))
    }
}

impl Drop for OpenPageBlob {
    fn drop(&mut self) {
        let Some(lease) = self.blob.lease.clone().filter(|lease| lease.id().is_ok()) else {
            return;
        };
        let _ = runtime::finish(CLOSE_MAX, async move { lease.release().await });
    }
}
