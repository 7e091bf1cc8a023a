//! Opens an image with the files that it names: backing files, and external data files.

use std::path::PathBuf;
use std::sync::Arc;

use blockhaul_block::{Can, Device, Error, FileId, Kind, Result, fence};
use blockhaul_catalog::{
    BackendTarget, HandleOpener, ImageFormat, Intent, OpenContext, OpenFuture, OpenedDevice,
};

use super::device::Qcow2Device;
use super::error::{unsupported, usage};
use super::header::{Header, MAGIC, incompatible};
use super::image::{FileHeader, ImageMetadata, ImageOptions};
use super::parts::BackingImage;
use crate::bytes::index;
use crate::named::{ChainFile, NamedDevice, NamingImage, context_for_names, folder_of};
use crate::storage::{len_of, read};

/// Most images of a chain: more than QEMU's tools can handle, and few enough for the stack.
const CHAIN_MAX: usize = 200;
/// Memory in bytes for the tables of each image below one whose tables are changed.
const BELOW_MEMORY: u64 = 32 << 20;

/// Opens the image that the user described.
pub(super) async fn open(target: &BackendTarget) -> Result<Arc<Qcow2Chain>> {
    let names = context_for_names(target);
    let description = target.text()?;
    if description.is_empty() {
        return Err(usage("requires a device: qcow2:PATH"));
    }
    let opener = ChainOpener {
        context: target.context.clone(),
        names,
        top: top_intent(target)?,
        intent: Intent { direct: target.intent.direct, ..Intent::READ_IMAGE },
        memory: target.args.size("cache").unwrap_or(0),
        bitmaps_below: target.args.switch("backing-bitmaps"),
        keeps_bitmaps: target.context.registry().bitmaps.strong_count() > 0,
    };
    let own = TopImageOptions {
        snapshot: target.args.text("snapshot"),
        backing: target.args.text("backing"),
        backing_format: target.args.text("backing-format").map(BackingFormat::named).transpose()?,
        data_file: target.args.text("data-file"),
        compress: target.args.switch("compress"),
    };
    Ok(Arc::new(Qcow2Chain { levels: opener.levels(description, own).await? }))
}

/// The file of an image whose tables are to be changed, and what is below the image.
pub(super) struct ChainBase {
    pub(super) file: ChainFile,
    pub(super) head: FileHeader,
    /// None if the image has no backing file, or if it was not wanted.
    pub(super) below: Option<BackingImage>,
}

/// To change an image: nobody else may have it open.
pub(super) const CHANGE: Intent =
    Intent { write: true, extends: true, exclusive: true, ..Intent::READ_IMAGE };

/// Opens the file of an image for `intent`, and what is below the image if `below`. Files that
/// images name are opened as the policy of `context` says.
///
/// # Errors
/// Those of opening a file, and of a damaged header.
pub(super) async fn open_base(
    context: &OpenContext,
    description: &str,
    intent: Intent,
    below: impl FnOnce(&Header) -> bool,
) -> Result<ChainBase> {
    let opener = ChainOpener {
        context: context.clone(),
        names: context.clone(),
        top: intent,
        intent: Intent::READ_IMAGE,
        memory: BELOW_MEMORY,
        bitmaps_below: false,
        keeps_bitmaps: false,
    };
    let file = ChainFile::new(context.open(description, intent).await?);
    let facts = file.device.facts();
    let head = FileHeader::read(&file.device).await.map_err(|error| error.on(&facts.name))?;
    if !below(&head.header) {
        return Ok(ChainBase { file, head, below: None });
    }
    let folder = folder_of(description);
    let from = NamingImage { format: "qcow2", file: &facts.name, folder: folder.as_deref() };
    let Some(next) = opener.backing(&head.header, &from, &TopImageOptions::default()).await? else {
        return Ok(ChainBase { file, head, below: None });
    };
    let seen = vec![facts.files.clone()];
    let levels =
        opener.levels_from(next, TopImageOptions::default(), Intent::READ_IMAGE, seen).await?;
    let is_image = levels.first().is_some_and(|level| level.image.is_some());
    let below = Some(BackingImage::new(Qcow2Chain { levels }.first()?, is_image));
    Ok(ChainBase { file, head, below })
}

/// Opens the device of a name and a format that the image `file`, given by `description`, has or is to
/// have. Files that images name are opened as the policy of `context` says.
///
/// # Errors
/// Those of a name or a format that is not known, of the policy, and of the device.
pub(super) async fn backing_device(
    context: &OpenContext,
    description: &str,
    file: &str,
    (name, format): (&str, &str),
    intent: Intent,
) -> Result<Arc<dyn Device>> {
    let folder = folder_of(description);
    let from = NamingImage { format: "qcow2", file, folder: folder.as_deref() };
    let place = from.device(name, "backing")?.description;
    let scheme = match BackingFormat::named(format)? {
        BackingFormat::Raw => None,
        BackingFormat::Qcow2 => Some("qcow2"),
        BackingFormat::Other(scheme) => Some(scheme),
    };
    let place = match scheme {
        None => place,
        Some(scheme) => format!("{scheme}:{}", place.replace('%', "%25").replace('?', "%3f")),
    };
    let opened = from.open(context, name, &place, "backing", intent).await?;
    Ok(ChainFile::new(opened).device)
}

/// What the files of the top image are opened for.
fn top_intent(target: &BackendTarget) -> Result<Intent> {
    let Intent { write, direct, exclusive, .. } = target.intent;
    if write && target.args.text("snapshot").is_some() {
        return Err(usage(
            "a snapshot is read-only: leave out snapshot=NAME, or open it read-only",
        ));
    }
    // An image is written in pieces of any alignment.
    Ok(Intent { write, extends: write, direct, exclusive, ..Intent::READ_IMAGE })
}

/// What the user says about the top image of a chain.
#[derive(Default)]
struct TopImageOptions<'a> {
    snapshot: Option<&'a str>,
    backing: Option<&'a str>,
    backing_format: Option<BackingFormat>,
    data_file: Option<&'a str>,
    compress: bool,
}

/// The formats of backing files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BackingFormat {
    Raw,
    Qcow2,
    /// A format with a device of its own: its scheme.
    Other(&'static str),
}

impl BackingFormat {
    /// The format of a name in an image. Protocols of QEMU are names of formats, too: raw.
    fn named(name: &str) -> Result<BackingFormat> {
        match name {
            "qcow2" => Ok(BackingFormat::Qcow2),
            "raw" | "file" | "host_device" | "host_cdrom" | "nbd" | "http" | "https" => {
                Ok(BackingFormat::Raw)
            }
            other => match ImageFormat::of_qemu_name(other) {
                Some(format) => Ok(BackingFormat::Other(format.scheme)),
                None => Err(unsupported(
                    format!("the backing file has format {other:?}, which is not known"),
                    "serve the backing file with [ qemu-nbd -r -f FORMAT … ] and name it with backing=DEVICE",
                )),
            },
        }
    }
}

/// A file of the chain: an image, or raw bytes at its end.
pub(super) struct ChainLevel {
    pub(super) image: Option<Arc<ImageMetadata>>,
    pub(super) file: ChainFile,
    pub(super) external: Option<ChainFile>,
}

/// An image and everything below it, the top first.
pub(super) struct Qcow2Chain {
    pub(super) levels: Vec<ChainLevel>,
}

impl Qcow2Chain {
    /// The image on top, as a device.
    pub(super) fn opened(self: Arc<Qcow2Chain>) -> Result<OpenedDevice> {
        let device = self.first()?;
        let more =
            self.has_more().then(|| Arc::new(ChainHandles(self.clone())) as Arc<dyn HandleOpener>);
        Ok(OpenedDevice { device, more })
    }

    /// A handle to the image on top, without what is below it: for its tables.
    pub(super) fn top(&self) -> Result<Qcow2Device> {
        let ChainLevel { image, file, external } = self.levels.first().ok_or_else(Error::misfit)?;
        let image = image.clone().ok_or_else(Error::misfit)?;
        let external = external.as_ref().map(|storage| storage.device.clone());
        Ok(Qcow2Device::new(image, file.device.clone(), external, None))
    }

    fn has_more(&self) -> bool {
        // A flush on one handle covers the writes of all of them.
        let covers = |storage: &ChainFile| {
            !storage.has_more() || storage.device.facts().can.contains(Can::MULTI_CONN)
        };
        let written = self.levels.iter().filter(|level| level.is_written());
        if !written.flat_map(ChainLevel::files).all(covers) {
            return false;
        }
        let files = self.levels.iter().flat_map(ChainLevel::files);
        files.into_iter().any(ChainFile::has_more)
    }

    /// The handle over the first handles of all files.
    fn first(&self) -> Result<Arc<dyn Device>> {
        let mut top: Option<BackingImage> = None;
        for level in self.levels.iter().rev() {
            let external = level.external.as_ref().map(|storage| storage.device.clone());
            top = Some(level.over(level.file.device.clone(), external, top));
        }
        top.map(|top| top.device).ok_or_else(Error::misfit)
    }

    /// A handle over further handles.
    async fn another(&self) -> Result<Arc<dyn Device>> {
        let mut top: Option<BackingImage> = None;
        for level in self.levels.iter().rev() {
            let external = match &level.external {
                Some(storage) => Some(storage.another().await?),
                None => None,
            };
            top = Some(level.over(level.file.another().await?, external, top));
        }
        top.map(|top| top.device).ok_or_else(Error::misfit)
    }
}

impl ChainLevel {
    fn files(&self) -> impl Iterator<Item = &ChainFile> {
        std::iter::once(&self.file).chain(&self.external)
    }

    fn is_written(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.writer.is_some())
    }

    fn over(
        &self,
        file: Arc<dyn Device>,
        external: Option<Arc<dyn Device>>,
        below: Option<BackingImage>,
    ) -> BackingImage {
        match &self.image {
            None => BackingImage::new(file, false),
            Some(image) => {
                let handle = Qcow2Device::new(image.clone(), file, external, below);
                // The fence names the image in errors.
                BackingImage::new(fence(Arc::new(handle)), true)
            }
        }
    }
}

struct ChainHandles(Arc<Qcow2Chain>);

impl HandleOpener for ChainHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let chain = self.0.clone();
        Box::pin(async move { chain.another().await })
    }
}

/// A file that is to be opened next.
struct NextFile {
    storage: ChainFile,
    /// The directory that relative names in it begin at, if it is a file.
    folder: Option<PathBuf>,
    format: BackingFormat,
}

/// Opens files.
struct ChainOpener {
    /// For devices that the user has named.
    context: OpenContext,
    /// For names in images.
    names: OpenContext,
    intent: Intent,
    /// For the files of the top image.
    top: Intent,
    /// Memory for tables of an image, in bytes.
    memory: u64,
    /// The bitmaps of images below are contexts, too.
    bitmaps_below: bool,
    /// The user of an image that is written keeps its bitmaps right.
    keeps_bitmaps: bool,
}

impl ChainOpener {
    /// All files of a chain, the top first.
    async fn levels(&self, description: &str, own: TopImageOptions<'_>) -> Result<Vec<ChainLevel>> {
        let opened = self.context.open(description, self.top).await?;
        let folder = folder_of(description);
        let next =
            NextFile { storage: ChainFile::new(opened), folder, format: BackingFormat::Qcow2 };
        self.levels_from(next, own, self.top, Vec::new()).await
    }

    /// All files of a chain from one on, which is opened for `intent`. It must be none of `seen`.
    async fn levels_from(
        &self,
        mut next: NextFile,
        mut own: TopImageOptions<'_>,
        mut intent: Intent,
        mut seen: Vec<Vec<FileId>>,
    ) -> Result<Vec<ChainLevel>> {
        let mut levels = Vec::new();
        loop {
            check_is_new(&next.storage, &mut seen)?;
            if next.format == BackingFormat::Raw {
                levels.push(ChainLevel { image: None, file: next.storage, external: None });
                return Ok(levels);
            }
            if levels.len() == CHAIN_MAX {
                let text = format!("a chain of more than {CHAIN_MAX} images: commit some of them");
                return Err(usage(text));
            }
            let (level, below) = self.level(next, own, intent).await?;
            levels.push(level);
            (own, intent) = (TopImageOptions::default(), self.intent);
            match below {
                Some(below) => next = below,
                None => return Ok(levels),
            }
        }
    }

    /// An image, and what is below it.
    async fn level(
        &self,
        this: NextFile,
        own: TopImageOptions<'_>,
        intent: Intent,
    ) -> Result<(ChainLevel, Option<NextFile>)> {
        let NextFile { storage: file, folder, .. } = this;
        let name = file.device.facts().name.clone();
        let named = |error: Error| error.on(&name);
        let head = FileHeader::read(&file.device).await.map_err(named)?;
        let from = NamingImage { format: "qcow2", file: &name, folder: folder.as_deref() };
        let external = self.data_file(&head.header, &from, own.data_file, intent).await?;
        let data_len = external.as_ref().map(|storage| {
            let facts = storage.device.facts();
            // As for the image file: the last cluster may get longer.
            let len = len_of(&facts);
            if intent.write {
                len.next_multiple_of(head.header.cluster()).min(facts.size)
            } else {
                len
            }
        });
        let snapshot = own.snapshot;
        let memory = self.memory;
        let write = intent.write;
        let keeps_bitmaps = write && self.keeps_bitmaps;
        let options = ImageOptions { snapshot, data_len, memory, write, keeps_bitmaps };
        let mut image = ImageMetadata::open(&file.device, &head, options).await.map_err(named)?;
        image.shows_below = self.bitmaps_below;
        if own.compress && intent.write {
            image.pack().map_err(named)?;
        }
        let image = Some(Arc::new(image));
        let below = self.backing(&head.header, &from, &own).await?;
        Ok((ChainLevel { image, file, external }, below))
    }

    async fn data_file(
        &self,
        header: &Header,
        from: &NamingImage<'_>,
        own: Option<&str>,
        intent: Intent,
    ) -> Result<Option<ChainFile>> {
        if !header.has(incompatible::DATA_FILE) {
            return match own {
                None => Ok(None),
                Some(_) => Err(usage("data-file: the image has its data in itself: leave it out")),
            };
        }
        if let Some(description) = own {
            return Ok(Some(ChainFile::new(self.context.open(description, intent).await?)));
        }
        let Some(named) = &header.data_file else {
            let what = format!("{} has an external data file, but not its name", from.file);
            return Err(unsupported(what, "name it with data-file=DEVICE"));
        };
        let NamedDevice { description, format } = from.device(named, "data-file")?;
        if let Some(format) = format.filter(|format| format != "raw") {
            let what =
                format!("{} names {named:?}; a data file has no format {format:?}", from.file);
            return Err(unsupported(what, "name it with data-file=DEVICE"));
        }
        let opened = from.open(&self.names, named, &description, "data-file", intent).await?;
        Ok(Some(ChainFile::new(opened)))
    }

    async fn backing(
        &self,
        header: &Header,
        from: &NamingImage<'_>,
        own: &TopImageOptions<'_>,
    ) -> Result<Option<NextFile>> {
        if let Some(description) = own.backing {
            let storage = ChainFile::new(self.context.open(description, self.intent).await?);
            return Ok(Some(NextFile { storage, folder: None, format: BackingFormat::Raw }));
        }
        let Some(named) = &header.backing else { return Ok(None) };
        let NamedDevice { description, format } = from.device(named, "backing")?;
        // As in QEMU, the format in the header hides that in the name.
        let format = header.backing_format.as_ref().or(format.as_ref());
        let format = format.map(|name| BackingFormat::named(name)).transpose()?;
        if let Some(BackingFormat::Other(scheme)) = format {
            let encoded = description.replace('%', "%25").replace('?', "%3f");
            let description = format!("{scheme}:{encoded}");
            let opened =
                from.open(&self.names, named, &description, "backing", self.intent).await?;
            let storage = ChainFile::new(opened);
            return Ok(Some(NextFile { storage, folder: None, format: BackingFormat::Raw }));
        }
        let opened = from.open(&self.names, named, &description, "backing", self.intent).await?;
        let (storage, folder) = (ChainFile::new(opened), folder_of(&description));
        let format = match format.or(own.backing_format) {
            Some(format) => format,
            None => unstated(from, named, &storage).await?,
        };
        Ok(Some(NextFile { storage, folder, format }))
    }
}

/// The format of a backing file that the image does not tell. A guest can write a header into a raw
/// disk: one that looks like an image may be either.
async fn unstated(
    from: &NamingImage<'_>,
    named: &str,
    storage: &ChainFile,
) -> Result<BackingFormat> {
    let len = storage.device.facts().size.min(MAGIC.len() as u64);
    let head = read(&storage.device, 0, len).await?;
    if head[..index(len)] != MAGIC {
        return Ok(BackingFormat::Raw);
    }
    let what = format!(
        "{} does not tell the format of its backing file {named:?}, which begins as a qcow2 image; the guest \
         of a raw disk may have written that",
        from.file
    );
    Err(unsupported(what, "add backing-format=qcow2 or backing-format=raw"))
}

/// Refuses a file that is already part of the chain.
fn check_is_new(storage: &ChainFile, seen: &mut Vec<Vec<FileId>>) -> Result<()> {
    let facts = storage.device.facts();
    if !facts.files.is_empty() && seen.contains(&facts.files) {
        let text =
            format!("qcow2: the chain of backing files is a loop: {} is in it twice", facts.name);
        return Err(Error::new(Kind::Invalid, text));
    }
    seen.push(facts.files.clone());
    Ok(())
}
