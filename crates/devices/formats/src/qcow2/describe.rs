//! What an image says about itself, for users: options, snapshots, bitmaps, and the images below.

use std::sync::Arc;

use blockhaul_block::{Device, Error, FileId, Kind, Result};
use blockhaul_catalog::{Intent, OpenContext};

pub use super::bitmap::BitmapDescription;
pub use super::header::OpenObstacle;
use super::header::{CompressionType, Header, autoclear, compatible, incompatible};
use super::image::FileHeader;
pub use super::snapshot::SnapshotFacts;
use super::{bitmap, header, snapshot};
use crate::named::{ChainFile, NamingImage, folder_of};

/// Most images of a chain.
const CHAIN_MAX: usize = 200;

/// An image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Qcow2Description {
    /// 2 or 3.
    pub version: u32,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Cluster size in bytes.
    pub cluster: u64,
    /// Width of refcounts in bits.
    pub refcount_bits: u32,
    /// How clusters are compressed: `zlib` or `zstd`.
    pub compression: &'static str,
    /// Whether clusters are divided into subclusters.
    pub subclusters: bool,
    /// Whether refcounts are only written when the image is closed.
    pub lazy_refcounts: bool,
    /// Whether refcounts may be wrong, and whether any table may be wrong.
    pub dirty: bool,
    /// See `dirty`.
    pub corrupt: bool,
    /// The name of the backing file, and its format.
    pub backing: Option<String>,
    /// See `backing`.
    pub backing_format: Option<String>,
    /// Whether data is in another file, that file's name, and whether it is a raw image.
    pub external_data: bool,
    /// See `external_data`.
    pub data_file: Option<String>,
    /// See `external_data`.
    pub data_file_raw: bool,
    /// Internal snapshots, in their order.
    pub snapshots: Vec<SnapshotDescription>,
    /// Persistent bitmaps, in their order; none if the image says that they are not consistent.
    pub bitmaps: Vec<BitmapDescription>,
}

/// An internal snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotDescription {
    /// Its number, which need not be one.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Size of its disk in bytes.
    pub size: u64,
    /// When it was made, and of what.
    pub facts: SnapshotFacts,
}

/// Finds out whether an image can be opened from its first bytes: a cluster, or all of a shorter file.
/// None also if they are damaged.
pub fn obstacle(first: &[u8]) -> Option<OpenObstacle> {
    header::obstacle(first)
}

/// Describes the image in a device.
///
/// # Errors
/// If the device holds no image, or a damaged one.
pub async fn describe(device: &Arc<dyn Device>) -> Result<Qcow2Description> {
    let head = FileHeader::read(device).await?;
    describe_head(device, &head).await
}

async fn describe_head(device: &Arc<dyn Device>, head: &FileHeader) -> Result<Qcow2Description> {
    let FileHeader { header, file_len } = head;
    let snapshots = snapshot::list(device, *file_len, header).await?;
    let size_of = |size: Option<u64>| size.unwrap_or(header.size);
    let snapshots = snapshots.into_iter().map(|one| SnapshotDescription {
        size: size_of(one.size),
        id: one.id,
        name: one.name,
        facts: one.facts,
    });
    Ok(Qcow2Description {
        version: header.version,
        size: header.size,
        cluster: header.cluster(),
        refcount_bits: 1 << header.refcounts.order,
        compression: match header.compression {
            CompressionType::Deflate => "zlib",
            CompressionType::Zstd => "zstd",
        },
        subclusters: header.is_extended(),
        lazy_refcounts: header.compatible & compatible::LAZY_REFCOUNTS != 0,
        dirty: header.has(incompatible::DIRTY),
        corrupt: header.has(incompatible::CORRUPT),
        backing: header.backing.clone(),
        backing_format: header.backing_format.clone(),
        external_data: header.has(incompatible::DATA_FILE),
        data_file: header.data_file.clone(),
        data_file_raw: header.autoclear & autoclear::RAW_DATA_FILE != 0,
        snapshots: snapshots.collect(),
        bitmaps: bitmap::describe(device, *file_len, header).await?,
    })
}

/// An image of a chain, or the raw disk at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChainLink {
    /// The name of the device that holds it.
    pub name: String,
    /// Length of that device in bytes.
    pub len: u64,
    /// None: a raw disk, or an image of another format.
    pub image: Option<Qcow2Description>,
    /// The format, as the image above tells it; of the first one `qcow2`.
    pub format: Option<String>,
}

/// Describes the image that `description` names, and all those below it, the top first. Files that
/// images name are opened as the policy of `context` says.
///
/// # Errors
/// Those of [`describe`] and of opening a file, [`Kind::Unsupported`] if the policy refuses it, and
/// [`Kind::Invalid`] if the chain is a loop.
pub async fn describe_chain(context: &OpenContext, description: &str) -> Result<Vec<ChainLink>> {
    let links = walk_chain(context, description).await?;
    Ok(links.into_iter().map(|(link, _)| link).collect())
}

/// The same, with the devices.
pub(super) async fn walk_chain(
    context: &OpenContext,
    description: &str,
) -> Result<Vec<(ChainLink, ChainFile)>> {
    let mut links: Vec<(ChainLink, ChainFile)> = Vec::new();
    let mut seen: Vec<Vec<FileId>> = Vec::new();
    let mut storage = ChainFile::new(context.open(description, Intent::READ).await?);
    let mut folder = folder_of(description);
    let mut format = Some("qcow2".to_string());
    loop {
        let facts = storage.device.facts();
        if links.len() == CHAIN_MAX || !facts.files.is_empty() && seen.contains(&facts.files) {
            let text = format!(
                "qcow2: the chain of backing files is a loop, or too long, at {}",
                facts.name
            );
            return Err(Error::new(Kind::Invalid, text));
        }
        seen.push(facts.files.clone());
        let name = facts.name.to_string();
        let len = crate::storage::len_of(&facts);
        if format.as_deref() != Some("qcow2") {
            links.push((ChainLink { name, len, image: None, format }, storage));
            return Ok(links);
        }
        let head =
            FileHeader::read(&storage.device).await.map_err(|error| error.on(&facts.name))?;
        let image =
            describe_head(&storage.device, &head).await.map_err(|error| error.on(&facts.name))?;
        let link = ChainLink { name, len, image: Some(image), format };
        let Header { backing: Some(named), backing_format, .. } = head.header else {
            links.push((link, storage));
            return Ok(links);
        };
        let from = NamingImage { format: "qcow2", file: &facts.name, folder: folder.as_deref() };
        let below = from.device(&named, "backing")?;
        let opened =
            from.open(context, &named, &below.description, "backing", Intent::READ).await?;
        links.push((link, std::mem::replace(&mut storage, ChainFile::new(opened))));
        (folder, format) = (folder_of(&below.description), backing_format.or(below.format));
    }
}
