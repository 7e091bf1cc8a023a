//! A front end: what its messages do.

mod queues;

use std::future::poll_fn;
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use blockhaul_block::{Device, Flushes};
use blockhaul_io::{Pool, Stream};

use crate::blk::{self, BlkFeatures};
use crate::in_flight;
use crate::memory::{LOST, REGIONS_MAX, Regions};
use crate::protocol::{self, CONFIG_MAX, Message};
use crate::queue::{RequestWatcher, VhostDisk};
use crate::ring::QUEUES_MAX;
use crate::socket::{self, ReceivedMessage};
use queues::Queues;

/// Interval of looks at the size of the device.
const LOOK: Duration = Duration::from_secs(1);

/// Opens the device again; none if that is not possible now.
pub type DeviceReopener = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Option<Arc<dyn Device>>>>>>;

/// What to serve to a front end.
pub struct VhostConfig {
    /// The disk, fenced.
    pub device: Arc<dyn Device>,
    /// Flushes of all clients of the disk.
    pub flushes: Arc<Flushes>,
    /// Memory for requests; it must hold the largest, of 32 MiB.
    pub pool: Pool,
    /// The identity of the disk for the guest, of which 20 bytes are used.
    pub name: String,
    /// Who counts the requests.
    pub watch: Arc<dyn RequestWatcher>,
    /// How the device is opened again, to find out whether its size has changed; none for a device
    /// that keeps its size.
    pub reopen: Option<DeviceReopener>,
}

/// Serves a front end until it disconnects, or its socket is shut down; then completes what is in
/// flight. Call it on a worker; queues run on all workers.
///
/// # Errors
/// If the socket fails, or the front end violates the protocol.
pub async fn serve(stream: Arc<Stream>, config: VhostConfig) -> Result<(), String> {
    let mut session = FrontEndSession::new(stream, config);
    let result = session.converse().await;
    session.queues.stop_all().await;
    result
}

/// The state that messages change.
struct FrontEndSession {
    stream: Arc<Stream>,
    disk: Arc<VhostDisk>,
    reopen: Option<DeviceReopener>,
    /// What the front end has accepted.
    features: BlkFeatures,
    protocol: protocol::ProtocolFeatures,
    regions: Regions,
    queues: Queues,
    /// Where the front end gets the message that the configuration has changed.
    changes: Option<OwnedFd>,
}

/// The end of a message.
enum MessageOutcome {
    /// There is nothing to say about it, other than that it is done.
    Nothing,
    /// The reply that it has.
    Reply(Vec<u8>),
    /// A reply with a descriptor.
    WithFd(Vec<u8>, OwnedFd),
}

impl FrontEndSession {
    fn new(stream: Arc<Stream>, config: VhostConfig) -> FrontEndSession {
        let VhostConfig { device, flushes, pool, name, watch, reopen } = config;
        let disk = VhostDisk::new(device, flushes, pool, &name, watch);
        let regions = Regions::default();
        let queues = Queues::new(disk.clone(), regions.space().clone());
        FrontEndSession {
            stream,
            disk,
            reopen,
            features: BlkFeatures::empty(),
            protocol: protocol::ProtocolFeatures::empty(),
            regions,
            queues,
            changes: None,
        }
    }

    async fn converse(&mut self) -> Result<(), String> {
        let space = self.regions.space().clone();
        let mut ended = pin!(space.ended());
        loop {
            let stream = self.stream.clone();
            let mut receiving = pin!(socket::receive(&*stream));
            let received = loop {
                let mut next = pin!(timely(&mut receiving));
                let next = poll_fn(|cx| match ended.as_mut().poll(cx) {
                    Poll::Ready(()) => Poll::Ready(Err(LOST)),
                    Poll::Pending => next.as_mut().poll(cx).map(Ok),
                });
                match next.await? {
                    Some(received) => break received,
                    None => self.look_at_size().await?,
                }
            };
            let Some(message) = received.map_err(|error| blockhaul_io::plain(&error))? else {
                return Ok(());
            };
            let answered = self.answer(message).await;
            if space.is_lost() {
                return Err(LOST.into());
            }
            answered?;
        }
    }

    /// Handles a message, and replies if it has a reply or asks for one.
    async fn answer(&mut self, received: ReceivedMessage) -> Result<(), String> {
        let ReceivedMessage { header, payload, fds } = received;
        let message = Message::parse(header, &payload).map_err(|error| error.to_string())?;
        let acknowledged = header.need_reply
            && !message.has_reply()
            && self.protocol.contains(protocol::ProtocolFeatures::REPLY_ACK);
        log::trace!("vhost-user: message {} with {} descriptors", header.request, fds.len());
        let done = match self.handle(header, message, fds).await {
            Ok(done) => done,
            Err(why) if acknowledged => {
                log::warn!("refused a message of a front end: {why}");
                MessageOutcome::Reply(protocol::reply_number(header, 1))
            }
            Err(why) => return Err(why),
        };
        let (reply, fd) = match done {
            MessageOutcome::Nothing if acknowledged => (protocol::reply_number(header, 0), None),
            MessageOutcome::Nothing => return Ok(()),
            MessageOutcome::Reply(reply) => (reply, None),
            MessageOutcome::WithFd(reply, fd) => (reply, Some(fd)),
        };
        let fd = fd.as_ref().map(|fd| fd.as_fd());
        socket::send(&*self.stream, &reply, fd).await.map_err(|error| blockhaul_io::plain(&error))
    }

    async fn handle(
        &mut self,
        header: protocol::MessageHeader,
        message: Message,
        fds: Vec<OwnedFd>,
    ) -> Result<MessageOutcome, String> {
        let number =
            |number: u64| Ok(MessageOutcome::Reply(protocol::reply_number(header, number)));
        match message {
            Message::GetFeatures => return number(self.offered().bits()),
            Message::GetProtocolFeatures => {
                return number(protocol::ProtocolFeatures::all().bits());
            }
            Message::GetQueueNumber => return number(QUEUES_MAX.into()),
            Message::GetMemorySlots => return number(REGIONS_MAX as u64),
            Message::GetConfig { offset, len, flags } => {
                let bytes = self.config(offset, len);
                return Ok(MessageOutcome::Reply(protocol::reply_config(
                    header, offset, flags, &bytes,
                )));
            }
            Message::GetInFlight(asked) => {
                let (table, fd) = in_flight::create(&asked)?;
                return Ok(MessageOutcome::WithFd(protocol::reply_table(header, &table), fd));
            }
            Message::GetRingBase { queue } => {
                let base = self.queues.base(queue).await?;
                return Ok(MessageOutcome::Reply(protocol::reply_base(header, queue, base)));
            }
            message => self.change(message, fds).await?,
        }
        Ok(MessageOutcome::Nothing)
    }

    /// Handles a message that changes something.
    async fn change(&mut self, message: Message, mut fds: Vec<OwnedFd>) -> Result<(), String> {
        match message {
            Message::SetFeatures(features) => self.accept(features),
            Message::SetProtocolFeatures(features) => {
                let known = protocol::ProtocolFeatures::from_bits(features);
                self.protocol = known
                    .ok_or_else(|| format!("protocol features {features:#x} were not offered"))?;
                Ok(())
            }
            Message::SetMemory(regions) => self.regions.replace(&regions, fds),
            Message::AddMemory(region) => {
                let fd = fds.pop().filter(|_| fds.is_empty());
                self.regions.add(region, fd.ok_or("a memory region needs one descriptor")?)
            }
            Message::RemoveMemory(region) => self.regions.remove(region),
            Message::SetBackendSocket => {
                self.changes = fds.pop().filter(|_| fds.is_empty());
                self.changes.is_some().then_some(()).ok_or("no descriptor of a socket".into())
            }
            Message::SetInFlight(table) => {
                let fd = fds.pop().filter(|_| fds.is_empty()).ok_or("a table without a file")?;
                let lost = self.regions.space().lost();
                self.queues.set_table(in_flight::InFlightTable::open(&table, fd, lost)?);
                Ok(())
            }
            // A driver cannot change the cache, as that is not offered.
            Message::SetConfig => Err("the configuration cannot be changed".into()),
            Message::SetOwner => Ok(()),
            Message::ResetOwner => {
                self.queues.stop_all().await;
                Ok(())
            }
            message => self.queues.change(&self.regions, message, fds).await,
        }
    }

    fn offered(&self) -> BlkFeatures {
        blk::features(&self.disk.device().facts())
    }

    fn accept(&mut self, features: u64) -> Result<(), String> {
        let offered = self.offered();
        let known = BlkFeatures::from_bits(features).filter(|features| offered.contains(*features));
        self.features = known.ok_or_else(|| format!("features {features:#x} were not offered"))?;
        let flushes = self.features.contains(BlkFeatures::FLUSH);
        self.disk.durable_writes.store(!flushes, Ordering::Relaxed);
        self.queues.set_features(self.features);
        Ok(())
    }

    /// A part of the configuration; empty if it is not inside.
    fn config(&self, offset: u32, len: u32) -> Vec<u8> {
        let config: [u8; CONFIG_MAX] = blk::config(&self.disk.device().facts(), QUEUES_MAX);
        let part = (offset as usize).checked_add(len as usize);
        let part = part.and_then(|end| config.get(offset as usize..end));
        part.map(<[u8]>::to_vec).unwrap_or_default()
    }

    /// Tells the front end if the size of the device has changed.
    async fn look_at_size(&mut self) -> Result<(), String> {
        let Some(reopen) = &self.reopen else { return Ok(()) };
        let Some(device) = reopen().await else { return Ok(()) };
        let before = self.disk.device().facts().size;
        let now = device.facts().size;
        if before == now {
            return Ok(());
        }
        log::info!("the size of the disk changes from {before} to {now} bytes");
        self.disk.set_device(device);
        if let Some(changes) = &self.changes {
            let message = protocol::config_changed();
            let sent = socket::send(changes, &message, None).await;
            sent.map_err(|error| blockhaul_io::plain(&error))?;
        }
        Ok(())
    }
}

/// What `work` yields; none if that takes longer than [`LOOK`].
async fn timely<T>(work: &mut Pin<&mut impl Future<Output = T>>) -> Option<T> {
    let waiting = poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(done),
        Poll::Pending => Poll::Pending,
    });
    blockhaul_io::timeout(LOOK, waiting).await.ok()
}
