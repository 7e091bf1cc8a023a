//! Opens an image with the files that it names: backing files, and external data files.

use std::path::PathBuf;
use std::sync::Arc;

use blockhaul_block::{Can, Device, Error, FileId, Kind, Result, fence};
use blockhaul_catalog::{Another, ImageFormat, Intent, OpenContext, Opened, Opening, Target};

use super::device::Handle;
use super::error::{unsupported, usage};
use super::header::{Header, MAGIC, incompatible};
use super::image::{Head, Image, Options};
use super::parts::Backing;
use crate::bytes::index;
use crate::named::{NamedDevice, Namer, Storage, context_for_names, folder_of};
use crate::storage::{len_of, read};

/// Most images of a chain: more than QEMU's tools can handle, and few enough for the stack.
const CHAIN_MAX: usize = 200;
/// Memory in bytes for the tables of each image below one whose tables are changed.
const BELOW_MEMORY: u64 = 32 << 20;

/// Opens the image that the user described.
pub(super) async fn open(target: &Target) -> Result<Arc<Chain>> {
    let names = context_for_names(target);
    let description = target.text()?;
    if description.is_empty() {
        return Err(usage("requires a device: qcow2:PATH"));
    }
    let opener = Opener {
        context: target.context.clone(),
        names,
        top: top_intent(target)?,
        intent: Intent { direct: target.intent.direct, ..Intent::READ_IMAGE },
        memory: target.args.size("cache").unwrap_or(0),
        bitmaps_below: target.args.switch("backing-bitmaps"),
        keeps_bitmaps: target.context.registry().bitmaps.strong_count() > 0,
    };
    let own = Own {
        snapshot: target.args.text("snapshot"),
        backing: target.args.text("backing"),
        backing_format: target.args.text("backing-format").map(Format::named).transpose()?,
        data_file: target.args.text("data-file"),
        compress: target.args.switch("compress"),
    };
    Ok(Arc::new(Chain { levels: opener.levels(description, own).await? }))
}

/// The file of an image whose tables are to be changed, and what is below the image.
pub(super) struct Base {
    pub(super) file: Storage,
    pub(super) head: Head,
    /// None if the image has no backing file, or if it was not wanted.
    pub(super) below: Option<Backing>,
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
) -> Result<Base> {
    let opener = Opener {
        context: context.clone(),
        names: context.clone(),
        top: intent,
        intent: Intent::READ_IMAGE,
        memory: BELOW_MEMORY,
        bitmaps_below: false,
        keeps_bitmaps: false,
    };
    let file = Storage::new(context.open(description, intent).await?);
    let facts = file.device.facts();
    let head = Head::read(&file.device).await.map_err(|error| error.on(&facts.name))?;
    if !below(&head.header) {
        return Ok(Base { file, head, below: None });
    }
    let folder = folder_of(description);
    let from = Namer { format: "qcow2", file: &facts.name, folder: folder.as_deref() };
    let Some(next) = opener.backing(&head.header, &from, &Own::default()).await? else {
        return Ok(Base { file, head, below: None });
    };
    let seen = vec![facts.files.clone()];
    let levels = opener.levels_from(next, Own::default(), Intent::READ_IMAGE, seen).await?;
    let is_image = levels.first().is_some_and(|level| level.image.is_some());
    let below = Some(Backing::new(Chain { levels }.first()?, is_image));
    Ok(Base { file, head, below })
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
    let from = Namer { format: "qcow2", file, folder: folder.as_deref() };
    let place = from.device(name, "backing")?.description;
    let scheme = match Format::named(format)? {
        Format::Raw => None,
        Format::Qcow2 => Some("qcow2"),
        Format::Other(scheme) => Some(scheme),
    };
    let place = match scheme {
        None => place,
        Some(scheme) => format!("{scheme}:{}", place.replace('%', "%25").replace('?', "%3f")),
    };
    let opened = from.open(context, name, &place, "backing", intent).await?;
    Ok(Storage::new(opened).device)
}

/// What the files of the top image are opened for.
fn top_intent(target: &Target) -> Result<Intent> {
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
struct Own<'a> {
    snapshot: Option<&'a str>,
    backing: Option<&'a str>,
    backing_format: Option<Format>,
    data_file: Option<&'a str>,
    compress: bool,
}

/// The formats of backing files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Raw,
    Qcow2,
    /// A format with a device of its own: its scheme.
    Other(&'static str),
}

impl Format {
    /// The format of a name in an image. Protocols of QEMU are names of formats, too: raw.
    fn named(name: &str) -> Result<Format> {
        match name {
            "qcow2" => Ok(Format::Qcow2),
            "raw" | "file" | "host_device" | "host_cdrom" | "nbd" | "http" | "https" => {
                Ok(Format::Raw)
            }
            other => match ImageFormat::of_qemu_name(other) {
                Some(format) => Ok(Format::Other(format.scheme)),
                None => Err(unsupported(
                    format!("the backing file has format {other:?}, which is not known"),
                    "serve the backing file with [ qemu-nbd -r -f FORMAT … ] and name it with backing=DEVICE",
                )),
            },
        }
    }
}

/// A file of the chain: an image, or raw bytes at its end.
pub(super) struct Level {
    pub(super) image: Option<Arc<Image>>,
    pub(super) file: Storage,
    pub(super) external: Option<Storage>,
}

/// An image and everything below it, the top first.
pub(super) struct Chain {
    pub(super) levels: Vec<Level>,
}

impl Chain {
    /// The image on top, as a device.
    pub(super) fn opened(self: Arc<Chain>) -> Result<Opened> {
        let device = self.first()?;
        let more = self.has_more().then(|| Arc::new(More(self.clone())) as Arc<dyn Another>);
        Ok(Opened { device, more })
    }

    /// A handle to the image on top, without what is below it: for its tables.
    pub(super) fn top(&self) -> Result<Handle> {
        let Level { image, file, external } = self.levels.first().ok_or_else(Error::misfit)?;
        let image = image.clone().ok_or_else(Error::misfit)?;
        let external = external.as_ref().map(|storage| storage.device.clone());
        Ok(Handle::new(image, file.device.clone(), external, None))
    }

    fn has_more(&self) -> bool {
        // A flush on one handle covers the writes of all of them.
        let covers = |storage: &Storage| {
            !storage.has_more() || storage.device.facts().can.contains(Can::MULTI_CONN)
        };
        let written = self.levels.iter().filter(|level| level.is_written());
        if !written.flat_map(Level::files).all(covers) {
            return false;
        }
        let files = self.levels.iter().flat_map(Level::files);
        files.into_iter().any(Storage::has_more)
    }

    /// The handle over the first handles of all files.
    fn first(&self) -> Result<Arc<dyn Device>> {
        let mut top: Option<Backing> = None;
        for level in self.levels.iter().rev() {
            let external = level.external.as_ref().map(|storage| storage.device.clone());
            top = Some(level.over(level.file.device.clone(), external, top));
        }
        top.map(|top| top.device).ok_or_else(Error::misfit)
    }

    /// A handle over further handles.
    async fn another(&self) -> Result<Arc<dyn Device>> {
        let mut top: Option<Backing> = None;
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

impl Level {
    fn files(&self) -> impl Iterator<Item = &Storage> {
        std::iter::once(&self.file).chain(&self.external)
    }

    fn is_written(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.writer.is_some())
    }

    fn over(
        &self,
        file: Arc<dyn Device>,
        external: Option<Arc<dyn Device>>,
        below: Option<Backing>,
    ) -> Backing {
        match &self.image {
            None => Backing::new(file, false),
            Some(image) => {
                let handle = Handle::new(image.clone(), file, external, below);
                // The fence names the image in errors.
                Backing::new(fence(Arc::new(handle)), true)
            }
        }
    }
}

struct More(Arc<Chain>);

impl Another for More {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let chain = self.0.clone();
        Box::pin(async move { chain.another().await })
    }
}

/// A file that is to be opened next.
struct Next {
    storage: Storage,
    /// The directory that relative names in it begin at, if it is a file.
    folder: Option<PathBuf>,
    format: Format,
}

/// Opens files.
struct Opener {
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

impl Opener {
    /// All files of a chain, the top first.
    async fn levels(&self, description: &str, own: Own<'_>) -> Result<Vec<Level>> {
        let opened = self.context.open(description, self.top).await?;
        let folder = folder_of(description);
        let next = Next { storage: Storage::new(opened), folder, format: Format::Qcow2 };
        self.levels_from(next, own, self.top, Vec::new()).await
    }

    /// All files of a chain from one on, which is opened for `intent`. It must be none of `seen`.
    async fn levels_from(
        &self,
        mut next: Next,
        mut own: Own<'_>,
        mut intent: Intent,
        mut seen: Vec<Vec<FileId>>,
    ) -> Result<Vec<Level>> {
        let mut levels = Vec::new();
        loop {
            check_is_new(&next.storage, &mut seen)?;
            if next.format == Format::Raw {
                levels.push(Level { image: None, file: next.storage, external: None });
                return Ok(levels);
            }
            if levels.len() == CHAIN_MAX {
                let text = format!("a chain of more than {CHAIN_MAX} images: commit some of them");
                return Err(usage(text));
            }
            let (level, below) = self.level(next, own, intent).await?;
            levels.push(level);
            (own, intent) = (Own::default(), self.intent);
            match below {
                Some(below) => next = below,
                None => return Ok(levels),
            }
        }
    }

    /// An image, and what is below it.
    async fn level(
        &self,
        this: Next,
        own: Own<'_>,
        intent: Intent,
    ) -> Result<(Level, Option<Next>)> {
        let Next { storage: file, folder, .. } = this;
        let name = file.device.facts().name.clone();
        let named = |error: Error| error.on(&name);
        let head = Head::read(&file.device).await.map_err(named)?;
        let from = Namer { format: "qcow2", file: &name, folder: folder.as_deref() };
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
        let options = Options { snapshot, data_len, memory, write, keeps_bitmaps };
        let mut image = Image::open(&file.device, &head, options).await.map_err(named)?;
        image.shows_below = self.bitmaps_below;
        if own.compress && intent.write {
            image.pack().map_err(named)?;
        }
        let image = Some(Arc::new(image));
        let below = self.backing(&head.header, &from, &own).await?;
        Ok((Level { image, file, external }, below))
    }

    async fn data_file(
        &self,
        header: &Header,
        from: &Namer<'_>,
        own: Option<&str>,
        intent: Intent,
    ) -> Result<Option<Storage>> {
        if !header.has(incompatible::DATA_FILE) {
            return match own {
                None => Ok(None),
                Some(_) => Err(usage("data-file: the image has its data in itself: leave it out")),
            };
        }
        if let Some(description) = own {
            return Ok(Some(Storage::new(self.context.open(description, intent).await?)));
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
        Ok(Some(Storage::new(opened)))
    }

    async fn backing(
        &self,
        header: &Header,
        from: &Namer<'_>,
        own: &Own<'_>,
    ) -> Result<Option<Next>> {
        if let Some(description) = own.backing {
            let storage = Storage::new(self.context.open(description, self.intent).await?);
            return Ok(Some(Next { storage, folder: None, format: Format::Raw }));
        }
        let Some(named) = &header.backing else { return Ok(None) };
        let NamedDevice { description, format } = from.device(named, "backing")?;
        // As in QEMU, the format in the header hides that in the name.
        let format = header.backing_format.as_ref().or(format.as_ref());
        let format = format.map(|name| Format::named(name)).transpose()?;
        if let Some(Format::Other(scheme)) = format {
            let encoded = description.replace('%', "%25").replace('?', "%3f");
            let description = format!("{scheme}:{encoded}");
            let opened =
                from.open(&self.names, named, &description, "backing", self.intent).await?;
            let storage = Storage::new(opened);
            return Ok(Some(Next { storage, folder: None, format: Format::Raw }));
        }
        let opened = from.open(&self.names, named, &description, "backing", self.intent).await?;
        let (storage, folder) = (Storage::new(opened), folder_of(&description));
        let format = match format.or(own.backing_format) {
            Some(format) => format,
            None => unstated(from, named, &storage).await?,
        };
        Ok(Some(Next { storage, folder, format }))
    }
}

/// The format of a backing file that the image does not tell. A guest can write a header into a raw
/// disk: one that looks like an image may be either.
async fn unstated(from: &Namer<'_>, named: &str, storage: &Storage) -> Result<Format> {
    let len = storage.device.facts().size.min(MAGIC.len() as u64);
    let head = read(&storage.device, 0, len).await?;
    if head[..index(len)] != MAGIC {
        return Ok(Format::Raw);
    }
    let what = format!(
        "{} does not tell the format of its backing file {named:?}, which begins as a qcow2 image; the guest \
         of a raw disk may have written that",
        from.file
    );
    Err(unsupported(what, "add backing-format=qcow2 or backing-format=raw"))
}

/// Refuses a file that is already part of the chain.
fn check_is_new(storage: &Storage, seen: &mut Vec<Vec<FileId>>) -> Result<()> {
    let facts = storage.device.facts();
    if !facts.files.is_empty() && seen.contains(&facts.files) {
        let text =
            format!("qcow2: the chain of backing files is a loop: {} is in it twice", facts.name);
        return Err(Error::new(Kind::Invalid, text));
    }
    seen.push(facts.files.clone());
    Ok(())
}
