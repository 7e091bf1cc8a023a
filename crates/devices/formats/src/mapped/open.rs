//! Opens an image with the files that it consists of.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result, fence};
use blockhaul_catalog::{
    BackendTarget, HandleOpener, Intent, OpenContext, OpenFuture, OpenedDevice,
};

use super::device::MappedDevice;
use super::errors::{unsupported, usage};
use super::image::{MappedFormat, MappedImage};
use crate::named::{ChainFile, NamingImage, context_for_names, folder_of};
use crate::storage::len_of;

/// Memory for tables if no option says otherwise, in bytes.
const MEMORY: u64 = 32 << 20;

/// The files of an image, and what is under it.
pub(crate) struct ImageFiles {
    pub(crate) files: Vec<ChainFile>,
    pub(crate) backing: Option<ChainFile>,
}

/// Opens files of an image.
pub(crate) struct ImageFileOpener<'a> {
    pub(crate) format: &'static str,
    target: &'a BackendTarget,
    /// For names in the image.
    names: OpenContext,
    /// The description of the device that holds the image.
    pub(crate) description: &'a str,
    intent: Intent,
}

impl ImageFileOpener<'_> {
    /// The device that the user named as the one under the image.
    pub(crate) async fn own_backing(&self) -> Result<Option<ChainFile>> {
        let Some(description) = self.target.args.text("backing") else { return Ok(None) };
        self.own(description).await.map(Some)
    }

    /// Opens a device that the user named.
    pub(crate) async fn own(&self, description: &str) -> Result<ChainFile> {
        Ok(ChainFile::new(self.target.context.open(description, self.intent).await?))
    }

    /// Opens a file that the image `file` names, as `scheme:` or, without one, as raw bytes. Only
    /// paths are names: a relative one begins at the directory of the image.
    pub(crate) async fn named(
        &self,
        file: &str,
        named: &str,
        scheme: Option<&str>,
        option: &str,
    ) -> Result<ChainFile> {
        let folder = folder_of(self.description);
        let from = NamingImage { format: self.format, file, folder: folder.as_deref() };
        let path = from.path(named, option)?;
        let description = match scheme {
            Some(scheme) => format!("{scheme}:{}", path.replace('%', "%25").replace('?', "%3f")),
            None => path,
        };
        let opened = from.open(&self.names, named, &description, option, self.intent).await?;
        Ok(ChainFile::new(opened))
    }
}

/// Opens an image: `read` finds out what the files say, and adds further ones.
pub(crate) async fn open<'a, F, R>(
    format: &'static str,
    target: &'a BackendTarget,
    read: F,
) -> Result<OpenedDevice>
where
    F: FnOnce(ImageFileOpener<'a>, ChainFile) -> R,
    R: Future<Output = Result<(MappedFormat, ImageFiles)>>,
{
    let description = target.text()?;
    if description.is_empty() {
        return Err(usage(format, format!("requires a device: {format}:PATH")));
    }
    if target.intent.write || target.intent.target_size.is_some() {
        let way =
            "open it read-only (serve --readonly), or copy it to a qcow2 image or a raw disk first";
        return Err(unsupported(format, "images of this format are read-only", way));
    }
    let intent = Intent { direct: target.intent.direct, ..Intent::READ_IMAGE };
    let storage = ChainFile::new(target.context.open(description, intent).await?);
    let name = storage.device.facts().name.clone();
    let names = context_for_names(target);
    let opener = ImageFileOpener { format, target, names, description, intent };
    let (found, files) = read(opener, storage).await.map_err(|error| error.on(&name))?;
    if found.size > i64::MAX.unsigned_abs() || !found.unit.is_power_of_two() {
        return Err(Error::new(Kind::Io, format!("{format}: a disk of {} bytes", found.size)));
    }
    let lens = files.files.iter().map(|storage| len_of(&storage.device.facts())).collect();
    let memory = target.args.size("cache").unwrap_or(MEMORY);
    let image = Arc::new(MappedImage::new(format, found, lens, memory));
    let open = Arc::new(OpenImage { name, image, files });
    let has_more = open.files.all().any(ChainFile::has_more);
    let device = open.handle();
    let more = has_more.then(|| Arc::new(MappedHandles(open)) as Arc<dyn HandleOpener>);
    Ok(OpenedDevice { device, more })
}

impl ImageFiles {
    /// Of one file.
    pub(crate) fn one(file: ChainFile, backing: Option<ChainFile>) -> ImageFiles {
        ImageFiles { files: vec![file], backing }
    }

    fn all(&self) -> impl Iterator<Item = &ChainFile> {
        self.files.iter().chain(&self.backing)
    }
}

/// An open image with the first handles of its files.
struct OpenImage {
    name: Arc<str>,
    image: Arc<MappedImage>,
    files: ImageFiles,
}

impl OpenImage {
    fn over(
        &self,
        files: Vec<Arc<dyn Device>>,
        backing: Option<Arc<dyn Device>>,
    ) -> Arc<dyn Device> {
        fence(Arc::new(MappedDevice::new(&self.name, self.image.clone(), files, backing)))
    }

    fn handle(&self) -> Arc<dyn Device> {
        let files = self.files.files.iter().map(|storage| storage.device.clone()).collect();
        self.over(files, self.files.backing.as_ref().map(|storage| storage.device.clone()))
    }

    async fn another(&self) -> Result<Arc<dyn Device>> {
        let mut files = Vec::with_capacity(self.files.files.len());
        for storage in &self.files.files {
            files.push(storage.another().await?);
        }
        let backing = match &self.files.backing {
            Some(storage) => Some(storage.another().await?),
            None => None,
        };
        Ok(self.over(files, backing))
    }
}

struct MappedHandles(Arc<OpenImage>);

impl HandleOpener for MappedHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let open = self.0.clone();
        Box::pin(async move { open.another().await })
    }
}
