//! `vmdk:DEVICE`: VMware's image format, read only, and `as-vmdk:DEVICE`, a device as such an image.
//! Comments name sections of VMware's "Virtual Disk Format 5.0".
//!
//! A `descriptor` names the extents of a disk: files with plain bytes, or `sparse` ones. It is a
//! file of its own, or within the only extent.

mod descriptor;
mod sparse;
mod stream;

use std::sync::Arc;

pub use stream::AsVmdk;

use blockhaul_block::{Device, Result};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};

use crate::mapped::{
    self, BACKING, BlockMap, BlockUnpacker, CACHE, DiskPlace, ImageFileOpener, ImageFiles,
    MappedFormat, NAMES, TableLookup, checked_size, damaged, other_file, unsupported, usage,
};
use crate::named::ChainFile;
use crate::storage::{len_of, read};
use descriptor::{Descriptor, ExtentKind, FORMAT};
use sparse::SparseExtent;

/// Longest descriptor in bytes.
const DESCRIPTOR_MAX: u64 = 2 << 20;

/// The backend `vmdk:DEVICE`.
pub struct VmdkBackend;

impl Backend for VmdkBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["vmdk"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "the disk in a VMDK image (VMware, OVA), read-only. DEVICE is the path of the image or its descriptor, or \
         any device that holds it, where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M disk.raw
qemu-img convert -O vmdk -o subformat=streamOptimized disk.raw disk.vmdk
blockhaul copy vmdk:disk.vmdk restored.raw && cmp disk.raw restored.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        &[
            NAMES,
            BACKING,
            Param {
                name: "extent",
                kind: ParamKind::Text,
                default: None,
                doc: "The device with the data, instead of the only extent that the descriptor names.",
            },
            CACHE,
        ]
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            let own = target.args.text("extent").map(str::to_string);
            let inspect = move |opener, file| inspect(opener, file, own);
            mapped::open(FORMAT, &target, inspect).await
        })
    }
}

/// What the first file of an image is.
enum FirstFile {
    Descriptor(Descriptor),
    /// The only extent, with the descriptor in it.
    Extent(SparseExtent, Descriptor),
}

/// Reads the descriptor of an image, and its header if it is an extent.
async fn start(device: &Arc<dyn Device>) -> Result<FirstFile> {
    let file_len = len_of(&device.facts());
    let head = read(device, 0, 512.min(file_len)).await?;
    if descriptor::is_one(&head) {
        if file_len > DESCRIPTOR_MAX {
            let text = format!("a descriptor of {file_len} bytes, more than {DESCRIPTOR_MAX}");
            return Err(unsupported(FORMAT, text, "convert the disk to a single file"));
        }
        let bytes = read(device, 0, file_len).await?;
        return Ok(FirstFile::Descriptor(Descriptor::parse(&bytes)?));
    }
    if !SparseExtent::is_one(&head) {
        return Err(other_file(FORMAT, "VMDK"));
    }
    let (embedded, extent) = SparseExtent::open(device, 0, file_len).await?;
    let descriptor = match embedded {
        None => Descriptor::default(),
        Some((at, len)) => {
            mapped::check_within(FORMAT, "the descriptor", at, len.min(DESCRIPTOR_MAX), file_len)?;
            Descriptor::parse(&read(device, at, len.min(DESCRIPTOR_MAX)).await?)?
        }
    };
    match extent {
        Some(extent) => Ok(FirstFile::Extent(extent, descriptor)),
        // A header without grains contains the descriptor of other files.
        None => Ok(FirstFile::Descriptor(descriptor)),
    }
}

async fn inspect(
    opener: ImageFileOpener<'_>,
    file: ChainFile,
    own: Option<String>,
) -> Result<(MappedFormat, ImageFiles)> {
    match start(&file.device).await? {
        FirstFile::Extent(extent, descriptor) => {
            if own.is_some() {
                return Err(usage(
                    FORMAT,
                    "extent: the image has its data in itself: leave it out",
                ));
            }
            let backing = parent(&opener, &file, &descriptor).await?;
            let parts =
                vec![DiskPart { start: 0, len: extent.len, kind: PartKind::Sparse(extent) }];
            Ok((found(parts)?, ImageFiles::one(file, backing)))
        }
        FirstFile::Descriptor(descriptor) => {
            let backing = parent(&opener, &file, &descriptor).await?;
            let (parts, mut files) = open_extents(&opener, &file, &descriptor, own).await?;
            // It stays claimed.
            files.push(file);
            Ok((found(parts)?, ImageFiles { files, backing }))
        }
    }
}

/// The image of these parts.
fn found(parts: Vec<DiskPart>) -> Result<MappedFormat> {
    let size = checked_size(FORMAT, parts.last().map_or(0, |last| last.start + last.len))?;
    let sparse = || {
        parts.iter().filter_map(|part| match &part.kind {
            PartKind::Sparse(sparse) => Some(sparse),
            _ => None,
        })
    };
    let is_packed = sparse().any(SparseExtent::is_packed);
    if is_packed && parts.len() > 1 {
        let text = "compressed extents in a disk of several extents";
        return Err(unsupported(FORMAT, text, "convert it with VMware's tools"));
    }
    let unit = sparse().map(|sparse| sparse.grain).min().unwrap_or(sparse::SECTOR);
    let unpack = is_packed.then(|| Arc::new(sparse::Grains) as Arc<dyn BlockUnpacker>);
    Ok(MappedFormat { size, unit, sector: None, map: Box::new(DiskParts(parts)), unpack })
}

/// Opens the extents that a descriptor names.
async fn open_extents(
    opener: &ImageFileOpener<'_>,
    file: &ChainFile,
    descriptor: &Descriptor,
    own: Option<String>,
) -> Result<(Vec<DiskPart>, Vec<ChainFile>)> {
    let name = file.device.facts().name.clone();
    let named = descriptor.extents.iter().filter(|extent| extent.kind != ExtentKind::Zero).count();
    if descriptor.extents.is_empty() {
        return Err(damaged(FORMAT, "a descriptor without extents"));
    }
    if own.is_some() && named != 1 {
        return Err(usage(FORMAT, format!("extent: the descriptor names {named} files")));
    }
    let mut parts = Vec::new();
    let mut files = Vec::new();
    let mut next = 0_u64;
    for extent in &descriptor.extents {
        let kind = match &extent.kind {
            ExtentKind::Zero => PartKind::Zero,
            ExtentKind::Flat { name: path, .. } | ExtentKind::Sparse { name: path } => {
                let storage = match &own {
                    Some(own) => opener.own(own).await?,
                    None => opener.named(&name, path, None, "extent").await?,
                };
                let number = files.len();
                let kind = part(&storage.device, number, extent).await;
                files.push(storage);
                kind.map_err(|error| error.on(&Arc::from(path.as_str())))?
            }
        };
        parts.push(DiskPart { start: next, len: extent.len, kind });
        let end = next.checked_add(extent.len).filter(|end| i64::try_from(*end).is_ok());
        next = end.ok_or_else(|| damaged(FORMAT, "extents of more than 2^63 bytes"))?;
    }
    Ok((parts, files))
}

/// An extent of a file.
async fn part(
    device: &Arc<dyn Device>,
    file: usize,
    extent: &descriptor::ExtentLine,
) -> Result<PartKind> {
    let file_len = len_of(&device.facts());
    if let ExtentKind::Flat { at, .. } = extent.kind {
        mapped::check_within(FORMAT, "an extent", at, extent.len, file_len)?;
        return Ok(PartKind::Flat { file, at });
    }
    let (_, sparse) = SparseExtent::open(device, file, file_len).await?;
    match sparse {
        Some(sparse) if sparse.len >= extent.len => Ok(PartKind::Sparse(sparse)),
        sparse => {
            let len = sparse.map_or(0, |sparse| sparse.len);
            let text = format!("an extent of {len} bytes, where the descriptor has {}", extent.len);
            Err(damaged(FORMAT, text))
        }
    }
}

/// The parent of a delta link ("Delta Links"), which must not have changed since.
async fn parent(
    opener: &ImageFileOpener<'_>,
    file: &ChainFile,
    descriptor: &Descriptor,
) -> Result<Option<ChainFile>> {
    let Some((wanted, path)) = &descriptor.parent else { return Ok(None) };
    if let Some(own) = opener.own_backing().await? {
        return Ok(Some(own));
    }
    let name = file.device.facts().name.clone();
    if path.is_empty() {
        let text = format!("{name} is a delta link without the name of its parent");
        return Err(unsupported(FORMAT, text, "name it with backing=DEVICE"));
    }
    let path = crate::windows::parent_of_vmdk(path);
    // As a file first: is it the one that the image was made over?
    let raw = opener.named(&name, &path, None, "backing").await?;
    let found =
        match start(&raw.device).await.map_err(|error| error.on(&Arc::from(path.as_str())))? {
            FirstFile::Descriptor(descriptor) | FirstFile::Extent(_, descriptor) => {
                descriptor.content_id
            }
        };
    if found != Some(*wanted) {
        let text = format!("the parent {path:?} was written after {name} was made over it");
        let way = "use the right parent; backing=DEVICE uses this one in spite of that";
        return Err(unsupported(FORMAT, text, way));
    }
    opener.named(&name, &path, Some(FORMAT), "backing").await.map(Some)
}

/// A part of the disk that is in one extent.
struct DiskPart {
    /// Offset on the disk, and length, in bytes.
    start: u64,
    len: u64,
    kind: PartKind,
}

enum PartKind {
    Zero,
    Flat { file: usize, at: u64 },
    Sparse(SparseExtent),
}

/// The parts of the disk, in order.
struct DiskParts(Vec<DiskPart>);

impl BlockMap for DiskParts {
    fn find(&self, at: u64, look: &mut TableLookup<'_>) -> Result<Option<(u64, DiskPlace)>> {
        let behind = self.0.partition_point(|part| part.start <= at);
        let part = behind.checked_sub(1).and_then(|place| self.0.get(place));
        let Some(part) = part else { return Err(blockhaul_block::Error::misfit()) };
        let inside = at - part.start;
        let left = part.len.saturating_sub(inside);
        let found = match &part.kind {
            PartKind::Zero => Some((left, DiskPlace::Zero { stored: false })),
            PartKind::Flat { file, at } => {
                Some((left, DiskPlace::Data { file: *file, at: at + inside }))
            }
            PartKind::Sparse(sparse) => sparse.find(inside, look)?,
        };
        Ok(found.map(|(len, place)| (len.min(left), place)))
    }

    fn is_flat(&self, file: usize) -> bool {
        self.0
            .iter()
            .any(|part| matches!(part.kind, PartKind::Flat { file: flat, .. } if flat == file))
    }
}
