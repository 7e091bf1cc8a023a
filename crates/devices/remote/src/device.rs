//! The device of a remote disk.

use std::sync::Arc;

use async_trait::async_trait;
use blockhaul_block::{
    Can, Device, Error, Facts, FileId, Kind, Op, PendingRequest, Reply, Request, Result,
};
use blockhaul_catalog::{Claim, HandleOpener, OpenFuture};
use tokio::sync::Semaphore;

use crate::runtime;

/// Bytes of a request that are worth what a server does for each: it checks signatures, and looks the object up.
pub(crate) const REQUEST: u32 = 4 << 20;

/// A disk on a server. Its methods run on the thread of requests.
#[async_trait]
pub(crate) trait RemoteObject: Send + Sync + 'static {
    /// Bytes of the disk.
    fn size(&self) -> u64;

    /// Whether the disk is read in one pass, from its beginning to its end.
    fn is_stream(&self) -> bool {
        false
    }

    /// The name of the version of the disk; `None`: it has none.
    fn version(&self) -> Option<String> {
        None
    }

    /// What the server says about the disk, for users; may be empty.
    fn description(&self) -> String {
        String::new()
    }

    /// Fills `buf` with the bytes at offset `at`. The range is inside the disk.
    ///
    /// # Errors
    /// The server refuses or fails; or it has another disk by now.
    async fn read(&self, at: u64, buf: &mut [u8]) -> Result<()>;
}

/// A read-only device.
#[derive(Clone)]
pub(crate) struct RemoteDevice {
    facts: Arc<Facts>,
    object: Arc<dyn RemoteObject>,
    /// One for each request that may be under way.
    turns: Arc<Semaphore>,
    _claim: Option<Arc<Claim>>,
}

impl RemoteDevice {
    /// A device with this name and at most `connections` requests under way.
    pub(crate) fn new(
        name: &str,
        object: Arc<dyn RemoteObject>,
        connections: usize,
    ) -> RemoteDevice {
        let mut facts = Facts::new(name, object.size());
        facts.description = object.description();
        facts.version = object.version().map(Into::into);
        facts.can = Can::MULTI_CONN;
        facts.one_handle = object.is_stream();
        // For copies alone: clients of a server choose their own.
        facts.advertised = Some(facts.advertised_or_own());
        facts.block.preferred = REQUEST;
        let turns = Arc::new(Semaphore::new(connections));
        RemoteDevice { facts: Arc::new(facts), object, turns, _claim: None }
    }

    /// The same for an object of this number, which others may write.
    pub(crate) fn claimed(self, identity: FileId, claim: Claim) -> RemoteDevice {
        let facts = Facts { files: vec![identity], ..(*self.facts).clone() };
        RemoteDevice { facts: Arc::new(facts), _claim: Some(Arc::new(claim)), ..self }
    }
}

impl Device for RemoteDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, .. } = request;
        let Op::Read(room) = op else {
            return Error::new(Kind::ReadOnly, "the device is read-only").into();
        };
        let RemoteDevice { object, turns, .. } = self.clone();
        let (completer, pending) = PendingRequest::completer();
        let mut buf = room.into_buf();
        let started = runtime::spawn(async move {
            // Nobody closes it.
            let _turn = turns.acquire().await;
            let read = object.read(at, &mut buf).await;
            completer.complete(read.map(|()| Reply::Data(buf.into())));
        });
        started.map_or_else(Into::into, |()| pending)
    }
}

/// More handles: they share the connections.
impl HandleOpener for RemoteDevice {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let device: Arc<dyn Device> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(device)))
    }
}
