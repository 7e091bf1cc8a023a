//! The disk of an image, once all of it is proven: in a temporary file without a name.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;

use blockhaul_block::{
    Device, Error, Facts, FileRange, Kind, LeaseAccess, PendingRequest, Request, Result,
};
use blockhaul_catalog::{HandleOpener, Intent, OpenContext, OpenFuture, OpenedDevice};
use bytes::Bytes;
use tokio::sync::mpsc;

use super::blob::{BlobReader, ImageSource};
use super::decoder::LayerDecoder;
use super::digest::ContentDigest;
use super::image_files::{ImageFiles, StoredDisk};
use super::manifest::{Descriptor, Manifest, NESTED_MAX, Platform, choose};
use super::read_progress::ReadProgress;
use super::registry::other_bytes;
use super::tar_scan::TarScan;

/// Parts of a blob that wait for their decoder.
const PARTS: usize = 16;

/// The part of an image that is the disk.
pub(super) struct DiskChoice {
    pub(super) platform: Platform,
    /// Whether an image for no other platform will do.
    pub(super) is_strict: bool,
    /// The name of the disk.
    pub(super) disk: Option<String>,
}

/// A disk whose bytes are those of the image.
pub(super) struct ProvenDisk {
    /// The digest of the manifest.
    image: ContentDigest,
    /// The name of the disk in the image.
    path: String,
    disk: StoredDisk,
}

/// Reads all of an image, and proves it. Runs on the thread of requests.
///
/// # Errors
/// It cannot be read, has other bytes than its digests, or no disk.
pub(super) async fn load(
    source: &ImageSource,
    choice: &DiskChoice,
    mut progress: ReadProgress,
) -> Result<ProvenDisk> {
    let mut files = ImageFiles::new(choice.disk.as_deref())?;
    let (image, manifest) = manifest(source, choice).await?;
    let (path, disk) = match manifest {
        Manifest::Container { config, layers } => {
            check_platform(source, &config, choice).await?;
            // An unknown one is refused before the first is read.
            for layer in &layers {
                LayerDecoder::of(&layer.media_type)?;
            }
            progress.set_total(layers.iter().fold(0, |sum, layer| layer.size.saturating_add(sum)));
            for layer in &layers {
                files = read_layer(source, layer, files, &mut progress).await?;
            }
            files.disk()?
        }
        Manifest::Artifact(files) => {
            let blob = artifact_file(files, choice.disk.as_deref())?;
            let name = blob.title.clone().unwrap_or_else(|| blob.digest.to_string());
            let path = blockhaul_wire::printable(name.as_bytes(), 100);
            progress.set_total(blob.size);
            (path, read_file(source, &blob, &mut progress).await?)
        }
        Manifest::Index(_) => {
            let text = format!("the image has more than {NESTED_MAX} indexes within one another");
            let error = Error::new(Kind::Unsupported, text);
            return Err(error.with_remedy("name the manifest by its digest"));
        }
    };
    Ok(ProvenDisk { image, path, disk })
}

/// The manifest for the platform, and its digest; an index if too many lead to it.
async fn manifest(source: &ImageSource, choice: &DiskChoice) -> Result<(ContentDigest, Manifest)> {
    let (bytes, mut digest) = source.top().await?;
    let mut found = Manifest::parse(&bytes)?;
    for _ in 0..NESTED_MAX {
        let Manifest::Index(entries) = found else { break };
        let chosen = choose(entries, &choice.platform)?;
        found = Manifest::parse(&source.manifest(&chosen).await?)?;
        digest = chosen.digest;
    }
    Ok((digest, found))
}

async fn check_platform(
    source: &ImageSource,
    config: &Descriptor,
    choice: &DiskChoice,
) -> Result<()> {
    let bytes = source.small_blob(config).await?;
    let found: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let architecture = found.get("architecture").and_then(serde_json::Value::as_str);
    match architecture {
        Some(own) if choice.is_strict && own != choice.platform.architecture => {
            let own = blockhaul_wire::printable(own.as_bytes(), 40);
            let text = format!("the image is for {own} alone");
            Err(Error::new(Kind::NotFound, text).with_remedy("leave out arch="))
        }
        _ => Ok(()),
    }
}

/// The file of an artefact that is the disk.
fn artifact_file(files: Vec<Descriptor>, wanted: Option<&str>) -> Result<Descriptor> {
    let count = files.len();
    let is_wanted =
        |file: &Descriptor| wanted.is_none_or(|wanted| file.title.as_deref() == Some(wanted));
    let mut found = files.into_iter().filter(is_wanted);
    match (found.next(), found.next()) {
        (Some(file), None) => Ok(file),
        (None, _) => {
            let text = format!("none of the {count} files of the artefact is the disk");
            Err(Error::new(Kind::NotFound, text).with_remedy("check disk=NAME"))
        }
        (Some(_), Some(_)) => {
            let text = format!("the artefact has {count} files");
            Err(Error::new(Kind::Unsupported, text).with_remedy("choose one with disk=NAME"))
        }
    }
}

/// Adds the files of a layer.
async fn read_layer(
    source: &ImageSource,
    layer: &Descriptor,
    mut files: ImageFiles,
    progress: &mut ReadProgress,
) -> Result<ImageFiles> {
    let (digest, mut decoder) = (layer.digest.clone(), LayerDecoder::of(&layer.media_type)?);
    read_blob(source, layer, progress, move |mut parts| {
        let (mut sum, mut scan) = (digest.sum(), TarScan::new());
        let mut members = files.layer(&digest);
        while let Some(part) = parts.blocking_recv() {
            sum.add(&part);
            decoder.feed(&part, |bytes| scan.feed(bytes, &mut members))?;
        }
        if sum.finish() != digest {
            return Err(other_bytes(&digest));
        }
        decoder.finish()?;
        scan.finish()?;
        members.finish();
        Ok(files)
    })
    .await
}

/// A blob as it is.
async fn read_file(
    source: &ImageSource,
    blob: &Descriptor,
    progress: &mut ReadProgress,
) -> Result<StoredDisk> {
    let (digest, size) = (blob.digest.clone(), blob.size);
    read_blob(source, blob, progress, move |mut parts| {
        let (mut sum, mut at) = (digest.sum(), 0);
        let disk = StoredDisk::new(size, &digest)?;
        while let Some(part) = parts.blocking_recv() {
            sum.add(&part);
            disk.store(at, &part)?;
            at += part.len() as u64;
        }
        if sum.finish() == digest { Ok(disk) } else { Err(other_bytes(&digest)) }
    })
    .await
}

/// The result of `work` with the bytes of a blob, on a thread of its own.
async fn read_blob<T: Send + 'static>(
    source: &ImageSource,
    blob: &Descriptor,
    progress: &mut ReadProgress,
    work: impl FnOnce(mpsc::Receiver<Bytes>) -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel(PARTS);
    let done = tokio::task::spawn_blocking(move || work(receiver));
    let mut reader = BlobReader::new(source, blob);
    let read = loop {
        match reader.next().await {
            Ok(Some(part)) => {
                if let Some(line) = progress.add(part.len() as u64, blockhaul_io::now()) {
                    log::info!("{line}");
                }
                // The work has failed if it takes nothing more.
                if sender.send(part).await.is_err() {
                    break Ok(());
                }
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    drop(sender);
    let done = done.await.unwrap_or_else(|lost| {
        Err(Error::new(Kind::Io, "reading a layer has failed (a bug in the program)").because(lost))
    });
    read.and(done)
}

/// Opens the device of a disk. Call it on a worker.
///
/// # Errors
/// Those of opening the temporary file.
pub(super) async fn open(
    name: &Arc<str>,
    proven: ProvenDisk,
    context: &OpenContext,
    intent: Intent,
) -> Result<OpenedDevice> {
    let ProvenDisk { image, path, disk } = proven;
    let number = disk.file.as_fd().as_raw_fd();
    let opened = context.open(&format!("file:/proc/self/fd/{number}"), intent).await?;
    let facts = Facts {
        name: name.clone(),
        description: format!(
            "disk {path} of {} bytes in layer {} of image {image}",
            disk.size, disk.layer
        ),
        version: Some(image.to_string().into()),
        ..Facts::same(&opened.device.facts())
    };
    let facts = Arc::new(facts);
    let device = Arc::new(ImageDisk { facts: facts.clone(), file: opened.device });
    let more = opened.more.map(|more| Arc::new(MoreDisks { facts, more }) as Arc<dyn HandleOpener>);
    Ok(OpenedDevice { device, more })
}

/// The device of a disk.
struct ImageDisk {
    facts: Arc<Facts>,
    file: Arc<dyn Device>,
}

impl Device for ImageDisk {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        self.file.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.file.file_at(at, len, access)
    }
}

struct MoreDisks {
    facts: Arc<Facts>,
    more: Arc<dyn HandleOpener>,
}

impl HandleOpener for MoreDisks {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let (facts, opening) = (self.facts.clone(), self.more.another());
        Box::pin(async move {
            let device: Arc<dyn Device> = Arc::new(ImageDisk { facts, file: opening.await? });
            Ok(device)
        })
    }
}
