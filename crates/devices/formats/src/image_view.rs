//! Devices whose contents are an image of another device, made as they are read: `as-qcow2:`, `as-vmdk:`.

use std::sync::Arc;

use blockhaul_block::emulate::emulate;
use blockhaul_block::{
    Can, Device, Error, Facts, FileRange, Kind, LeaseAccess, Op, PendingRequest, Reply, Request,
    Result, fence,
};
use blockhaul_catalog::{BackendTarget, HandleOpener, Intent, OpenFuture, OpenedDevice};

use crate::bytes::index;

/// An image of a device, whose bytes are made when they are read.
pub(crate) trait ImageView: 'static {
    /// The scheme of the device.
    const SCHEME: &'static str;

    /// Length of the image in bytes.
    fn len(&self) -> u64;

    /// The longest prefix of a range that is plain bytes of a source of `size` bytes: their offset there, and
    /// length.
    fn plain(&self, size: u64, at: u64, len: u64) -> Option<(u64, u64)>;

    /// Fills a part of the image.
    async fn fill(&self, source: &Arc<dyn Device>, part: &mut ImagePart<'_>) -> Result<()>;
}

/// A part of an image that is put together.
pub(crate) struct ImagePart<'a> {
    /// Its offset in the image.
    pub(crate) at: u64,
    pub(crate) bytes: &'a mut [u8],
}

impl ImagePart<'_> {
    /// The offset after it.
    pub(crate) fn end(&self) -> u64 {
        self.at + self.bytes.len() as u64
    }

    /// Copies what is within the part of bytes that are at an offset of the image.
    pub(crate) fn put(&mut self, host: u64, bytes: &[u8]) {
        let start = host.max(self.at);
        let end = (host + bytes.len() as u64).min(self.end());
        if start >= end {
            return;
        }
        let from = bytes.get(index(start - host)..index(end - host));
        let to = self.bytes.get_mut(index(start - self.at)..index(end - self.at));
        if let (Some(from), Some(to)) = (from, to) {
            to.copy_from_slice(from);
        }
    }
}

/// The error of a source that was written in the meantime.
pub(crate) fn changed(scheme: &str) -> Error {
    let text = format!(
        "{scheme}: the source has changed while it was read: stop its writer, or copy a snapshot of it"
    );
    Error::new(Kind::Io, text)
}

/// Opens the device inside a description, and an image of it.
///
/// # Errors
/// [`Kind::Unsupported`] if the image is to be written; those of the device, and of `make`.
pub(crate) async fn open<I: ImageView + Send + Sync>(
    target: &BackendTarget,
    make: impl AsyncFnOnce(&Arc<dyn Device>) -> Result<I>,
) -> Result<OpenedDevice> {
    if target.intent.write {
        let scheme = I::SCHEME;
        let instead = match scheme {
            "as-qcow2" => "for a new image write qcow2:FILE".to_string(),
            _ => format!("copy {scheme}:SOURCE to a file"),
        };
        let text =
            format!("{scheme}: an image that is made as it is read cannot be written: {instead}");
        return Err(Error::new(Kind::Unsupported, text));
    }
    // The tables that are made describe the contents of now.
    let intent = Intent { direct: target.intent.direct, ..Intent::READ_IMAGE };
    let opened = target.context.open(target.text()?, intent).await?;
    let source = fence(emulate(opened.device));
    let image = Arc::new(make(&source).await?);
    let device = Arc::new(ImageViewDevice::new(source, image.clone()));
    let more =
        opened.more.map(|more| Arc::new(ImageViewHandles { more, image }) as Arc<dyn HandleOpener>);
    Ok(OpenedDevice { device, more })
}

struct ImageViewHandles<I> {
    more: Arc<dyn HandleOpener>,
    image: Arc<I>,
}

impl<I: ImageView + Send + Sync> HandleOpener for ImageViewHandles<I> {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let more = self.more.clone();
        let image = self.image.clone();
        Box::pin(async move {
            let source = fence(emulate(more.another().await?));
            Ok(Arc::new(ImageViewDevice::new(source, image)) as Arc<dyn Device>)
        })
    }
}

/// A handle.
struct ImageViewDevice<I> {
    facts: Arc<Facts>,
    source: Arc<dyn Device>,
    /// Size of the source in bytes.
    size: u64,
    image: Arc<I>,
}

impl<I: ImageView> ImageViewDevice<I> {
    fn new(source: Arc<dyn Device>, image: Arc<I>) -> ImageViewDevice<I> {
        let below = source.facts();
        let mut facts = Facts::new(format!("{}:{}", I::SCHEME, below.name), image.len());
        facts.description.clone_from(&below.description);
        // All handles read the same, and nothing is ever written.
        facts.can = Can::MULTI_CONN;
        facts.rotational = below.rotational;
        facts.one_handle = below.one_handle;
        facts.in_flight = below.in_flight;
        facts.files.clone_from(&below.files);
        facts.block.maximum = facts.block.maximum.min(below.block.maximum);
        ImageViewDevice { facts: Arc::new(facts), size: below.size, source, image }
    }
}

impl<I: ImageView + Send + Sync> Device for ImageViewDevice<I> {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Op::Read(room) = request.op else {
            return Error::new(Kind::ReadOnly, "an image that is made as it is read").into();
        };
        let at = request.at;
        let len = room.len() as u64;
        if let Some((source_at, plain)) = self.image.plain(self.size, at, len)
            && plain == len
        {
            return self.source.submit(Request::read(source_at, room));
        }
        let (source, image) = (self.source.clone(), self.image.clone());
        PendingRequest::start(async move {
            let mut buf = room.into_buf();
            image.fill(&source, &mut ImagePart { at, bytes: &mut buf }).await?;
            Ok(Reply::Data(buf.into()))
        })
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        if access != LeaseAccess::Read {
            return None;
        }
        let (at, len) = self.image.plain(self.size, at, len)?;
        self.source.file_at(at, len, access)
    }
}
