//! Gives an image another backing file, and writes its data down into the one it has.
//!
//! [`rebase`] writes what the old backing file shows and the new one does not to the image, and then
//! changes the names in the header. [`commit`] copies what the image has to its backing file, and then
//! empties the image. At any time both show the same disk.

use std::sync::Arc;

use blockhaul_block::{
    Compression, ContextSet, Device, DeviceExt as _, Error, Kind, Result, ZERO, fence,
};
use blockhaul_catalog::{Intent, OpenContext};
use blockhaul_io::{Buf, Data, is_zero};

use super::chain::{CHANGE, ChainBase, backing_device, open_base};
use super::device::Qcow2Device;
use super::edit::Edit;
use super::error::{unsupported, usage};
use super::header::{self, Header, incompatible};
use super::image::{FileHeader, ImageMetadata, ImageOptions};
use super::parts::{ALLOCATION_DEPTH, BackingImage};
use crate::bytes::index;
use crate::extents::base_of;
use crate::storage::{self, len_of};

/// Longest piece that is read at a time, in bytes.
const PIECE: u64 = 1 << 20;
/// Memory in bytes for tables.
const MEMORY: u64 = 32 << 20;

/// A backing file, as an image names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingName {
    /// A path, relative to the directory of the image, or a URI.
    pub name: String,
    /// Its format, by QEMU's name.
    pub format: String,
}

/// How [`rebase`] treats what the old backing file shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RebaseMode {
    /// What differs is written to the image: the disk stays as it is.
    Safe,
    /// The same, with whole clusters compressed.
    Compressed,
    /// Only the names change. The backing files need not exist.
    Unsafe,
}

/// What happens to an image with internal snapshots. They show the backing file where they have
/// nothing themselves, so that they have other contents when it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotPolicy {
    /// The image is refused.
    Refuse,
    /// Their contents change.
    Change,
}

impl SnapshotPolicy {
    /// The number of snapshots whose contents may change.
    fn of(self, header: &Header) -> Result<u32> {
        let count = header.snapshots.count;
        if count > 0 && self == SnapshotPolicy::Refuse {
            let what =
                format!("the image has internal snapshots ({count}), whose contents would change");
            let way = "delete them first with \"qemu-img snapshot -d\", or accept that with --change-snapshots";
            return Err(unsupported(what, way));
        }
        Ok(count)
    }
}

/// A callback for progress: bytes of the disk that are done, and all bytes of the disk.
pub type ChangeProgress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// The result of [`rebase`] or [`commit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackingChange {
    /// Bytes of the disk that were written.
    pub bytes: u64,
    /// Internal snapshots of the image, whose contents may be others now.
    pub snapshots: u32,
}

/// Gives the image that `description` names, and that nothing else may use, another backing file, or
/// none. Files that images name are opened as the policy of `context` says.
///
/// # Errors
/// [`Kind::Usage`] for a name that does not fit, [`Kind::Unsupported`] if the image cannot be
/// written, has snapshots that must not change or, without [`RebaseMode::Unsafe`], an external data file,
/// and those of the devices.
pub async fn rebase(
    context: &OpenContext,
    description: &str,
    new: Option<&BackingName>,
    how: RebaseMode,
    snapshots: SnapshotPolicy,
    progress: ChangeProgress<'_>,
) -> Result<BackingChange> {
    let is_safe = how != RebaseMode::Unsafe;
    let ChainBase { file, head, below } =
        open_base(context, description, CHANGE, |_| is_safe).await?;
    let file = file.device;
    let shown = file.facts().name.clone();
    let named = |error: Error| error.on(&shown);
    let snapshots = snapshots.of(&head.header).map_err(named)?;
    if is_safe {
        refuse_data_file(&head.header).map_err(named)?;
    }
    // Refused before anything is written.
    let first = first_cluster(&file, &head, new).await.map_err(named)?;
    let written = if is_safe {
        let over = match new {
            None => None,
            Some(new) => {
                let intent = Intent::READ;
                Some(
                    backing_device(context, description, &shown, (&new.name, &new.format), intent)
                        .await?,
                )
            }
        };
        if let Some(over) = &over
            && over.facts().files.iter().any(|id| file.facts().files.contains(id))
        {
            return Err(named(usage("the image cannot be its own backing file")));
        }
        let packs = how == RebaseMode::Compressed;
        let handle = open_handle(&file, &head, below, packs).await.map_err(named)?;
        let written = keep_disk(&handle, over.as_ref(), progress).await?;
        handle.flush().await?;
        written
    } else {
        0
    };
    let put = async {
        // What a change of the image has cleared is not set again.
        let first = match written {
            0 => first,
            _ => first_cluster(&file, &head, new).await?,
        };
        storage::write(&file, 0, &first).await?;
        storage::flush(&file).await
    };
    put.await.map_err(named)?;
    Ok(BackingChange { bytes: written, snapshots })
}

/// The header with the new names.
async fn first_cluster(
    file: &Arc<dyn Device>,
    head: &FileHeader,
    new: Option<&BackingName>,
) -> Result<Vec<u8>> {
    let len = head.header.cluster().min(len_of(&file.facts()));
    let first = storage::read(file, 0, len).await?;
    let names = new.map(|new| (new.name.as_str(), new.format.as_str()));
    let first = header::with_backing(&first, names)?;
    Header::parse(&first)?;
    Ok(first)
}

fn refuse_data_file(header: &Header) -> Result<()> {
    if header.has(incompatible::DATA_FILE) {
        return Err(unsupported("the image has an external data file", "use qemu-img"));
    }
    Ok(())
}

/// The disk in an image, for reading and writing; compressed if `packs`.
async fn open_handle(
    file: &Arc<dyn Device>,
    head: &FileHeader,
    below: Option<BackingImage>,
    packs: bool,
) -> Result<Arc<dyn Device>> {
    let options = ImageOptions {
        snapshot: None,
        data_len: None,
        memory: MEMORY,
        write: true,
        keeps_bitmaps: false,
    };
    let mut image = ImageMetadata::open(file, head, options).await?;
    image.is_rebased = true;
    if packs {
        image.pack()?;
    }
    Ok(fence(Arc::new(Qcow2Device::new(Arc::new(image), file.clone(), None, below))))
}

/// The states of a device at `at`, of at most `len` bytes: one run.
async fn state(
    device: &Arc<dyn Device>,
    contexts: ContextSet,
    at: u64,
    len: u64,
) -> Result<(u64, u64)> {
    let lists = device.extents(at, len, contexts).await?;
    let run = lists.first().and_then(|list| list.runs().first());
    run.map(|run| (run.len.min(len), run.state)).ok_or_else(Error::misfit)
}

/// Whether a part of a device that begins at `at` reads as zeroes, and its length.
async fn zeroes(device: Option<&Arc<dyn Device>>, at: u64, len: u64) -> Result<(u64, bool)> {
    let Some(device) = device.filter(|device| at < device.facts().size) else {
        return Ok((len, true));
    };
    let facts = device.facts();
    let len = len.min(facts.size - at);
    let (len, found) = state(device, base_of(&facts), at, len).await?;
    Ok((len, found & ZERO != 0))
}

/// Bytes of a device, zeroes beyond its end.
async fn bytes(device: Option<&Arc<dyn Device>>, at: u64, out: &mut [u8]) -> Result<()> {
    out.fill(0);
    let Some(device) = device else { return Ok(()) };
    let there = device.facts().size.saturating_sub(at).min(out.len() as u64);
    storage::read_into(device, at, &mut out[..index(there)], None).await?;
    Ok(())
}

/// Writes to an image what it does not have itself, where its new backing file shows something else;
/// returns the number of bytes.
async fn keep_disk(
    handle: &Arc<dyn Device>,
    over: Option<&Arc<dyn Device>>,
    progress: ChangeProgress<'_>,
) -> Result<u64> {
    let facts = handle.facts();
    let depth = facts.context(ALLOCATION_DEPTH).ok_or_else(Error::misfit)?;
    let packs = match facts.compression {
        Compression::All(cluster) => Some(cluster),
        _ => None,
    };
    let unit = u64::from(packs.unwrap_or(facts.allocation_unit).max(1));
    let mut written = 0;
    let mut at = 0;
    while at < facts.size {
        progress(at, facts.size);
        let (len, level) = state(handle, depth, at, facts.size - at).await?;
        if level == 1 {
            at += len;
            continue;
        }
        let (own_len, own) = zeroes(Some(handle), at, len).await?;
        let (len, new) = zeroes(over, at, own_len).await?;
        if own && new {
            at += len;
            continue;
        }
        let mut end = at + len.min(PIECE.max(unit));
        if packs.is_some() {
            // Whole clusters: the disk stays as it is also where the image has the rest of one itself.
            at -= at % unit;
            end = end.next_multiple_of(unit).min(facts.size);
        }
        let len = end - at;
        let (mut old, mut new) = (vec![0; index(len)], vec![0; index(len)]);
        bytes(Some(handle), at, &mut old).await?;
        bytes(over, at, &mut new).await?;
        let same = |one: &(u64, &[u8], &[u8]), next: &(u64, &[u8], &[u8])| {
            (one.1 == one.2) == (next.1 == next.2)
        };
        let units: Vec<_> = old
            .chunks(index(unit))
            .zip(new.chunks(index(unit)))
            .zip((at..).step_by(index(unit)))
            .map(|((old, new), at)| (at, old, new))
            .collect();
        for run in units.chunk_by(same) {
            let Some(&(start, old, new)) = run.first() else { continue };
            if old == new {
                continue;
            }
            let data: Vec<u8> = run.iter().flat_map(|(_, old, _)| old.iter().copied()).collect();
            written += data.len() as u64;
            put(handle, start, data).await?;
        }
        at = end;
        blockhaul_io::yield_now().await;
    }
    Ok(written)
}

/// Writes bytes, or zeroes without data.
async fn put(device: &Arc<dyn Device>, at: u64, data: Vec<u8>) -> Result<()> {
    if is_zero(&data) {
        device.zero(at, data.len() as u64).await
    } else if data.len() as u64 <= u64::from(device.facts().block.maximum) {
        device.write(at, Data::copy_of(&data)).await
    } else {
        storage::write(device, at, &data).await
    }
}

/// Copies what the image that `description` names has to its backing file, and empties the image
/// unless `keep`. Nothing else may use either. The policy of `context` must allow to open the backing
/// file.
///
/// With `base`, what the image has itself goes to that one, which is further down: to copy all images
/// above it, begin with the lowest.
///
/// # Errors
/// [`Kind::Usage`] if the image has no backing file, [`Kind::NoSpace`] if that is smaller than the
/// disk, [`Kind::Unsupported`] if the image has an external data file or snapshots that must not
/// change, and those of the devices.
pub async fn commit(
    context: &OpenContext,
    description: &str,
    base: Option<&BackingName>,
    keep: bool,
    snapshots: SnapshotPolicy,
    progress: ChangeProgress<'_>,
) -> Result<BackingChange> {
    let ChainBase { file, head, .. } = open_base(context, description, CHANGE, |_| false).await?;
    let file = file.device;
    let shown = file.facts().name.clone();
    let named = |error: Error| error.on(&shown);
    let header = &head.header;
    refuse_data_file(header).map_err(named)?;
    let snapshots = snapshots.of(header).map_err(named)?;
    let (name, format) = match base {
        Some(base) => (&base.name, &base.format),
        None => backing_of(header).map_err(named)?,
    };
    // Refuses an image that cannot be emptied before anything is written.
    let handle = open_handle(&file, &head, None, false).await.map_err(named)?;
    let intent = Intent { write: true, exclusive: true, ..Intent::READ };
    let base = backing_device(context, description, &shown, (name, format), intent).await?;
    let (size, base_size) = (header.size, base.facts().size);
    if base_size < size {
        let text = format!(
            "qcow2: the disk has {size} bytes, and its backing file {base_size}: make that larger first with \
             \"blockhaul resize\""
        );
        return Err(named(Error::new(Kind::NoSpace, text)));
    }
    let written = copy_own(&handle, &base, progress).await?;
    base.flush().await?;
    drop(handle);
    if !keep && written > 0 {
        let head = FileHeader::read(&file).await.map_err(named)?;
        let edit = Edit::open(&file, &head, None).await.map_err(named)?;
        edit.run(async |parts, _| parts.cut(0, &|_, _| ()).await).await.map_err(named)?;
    }
    Ok(BackingChange { bytes: written, snapshots })
}

/// The name of the backing file, and its format.
fn backing_of(header: &Header) -> Result<(&String, &String)> {
    let name = header.backing.as_ref().ok_or_else(|| usage("the image has no backing file"))?;
    header.backing_format.as_ref().map(|format| (name, format)).ok_or_else(|| {
        let what = format!("the image does not tell the format of its backing file {name:?}");
        let way = "write it with \"blockhaul rebase --unsafe IMAGE BACKING --format FORMAT\"";
        unsupported(what, way)
    })
}

/// Copies what an image has itself; returns the number of bytes.
async fn copy_own(
    handle: &Arc<dyn Device>,
    base: &Arc<dyn Device>,
    progress: ChangeProgress<'_>,
) -> Result<u64> {
    let facts = handle.facts();
    let depth = facts.context(ALLOCATION_DEPTH).ok_or_else(Error::misfit)?;
    let mut written = 0;
    let mut at = 0;
    while at < facts.size {
        progress(at, facts.size);
        let (len, level) = state(handle, depth, at, facts.size - at).await?;
        if level != 1 {
            at += len;
            continue;
        }
        let (len, is_hole) = zeroes(Some(handle), at, len).await?;
        if is_hole {
            base.zero(at, len).await?;
            written += len;
            at += len;
            continue;
        }
        let len = len.min(PIECE);
        let mut data = Buf::unpooled(index(len));
        bytes(Some(handle), at, &mut data).await?;
        put(base, at, data.to_vec()).await?;
        written += len;
        at += len;
    }
    Ok(written)
}
