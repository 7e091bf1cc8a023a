//! Makes the disk in an image larger or smaller.
//!
//! At any time the image has the old size or the new one. Entries beyond the end of the disk are
//! cleared before it grows over them, and after it has shrunk.

use blockhaul_block::{Error, Kind, RequestFlags, Result};
use blockhaul_catalog::{OpenContext, parse_size};

use super::backing_change::ChangeProgress;
use super::chain::{CHANGE, ChainBase, open_base};
use super::edit::Edit;
use super::entry::EntryLayout;
use super::error::{unsupported, usage};
use super::header::{Header, incompatible};
use super::image::FileHeader;
use super::parts::ImageParts;
use super::write::zero::EraseMode;
use super::{bitmap, snapshot};

/// Offset of the size of the disk in the header.
const SIZE_AT: u64 = 24;
/// Longest L1 table in bytes; QEMU reads as much.
const L1_MAX: u64 = 32 << 20;
/// Sizes are multiples of this number of bytes.
const SECTOR: u64 = 512;

/// A new size, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewSize {
    /// This size.
    To(u64),
    /// This many bytes more.
    By(u64),
    /// This many bytes fewer.
    Less(u64),
}

impl NewSize {
    /// Parses SIZE, +SIZE or -SIZE, each a number with a unit.
    ///
    /// # Errors
    /// [`Kind::Usage`] if it is no size.
    pub fn parse(text: &str) -> Result<NewSize> {
        match (text.strip_prefix('+'), text.strip_prefix('-')) {
            (Some(more), _) => parse_size(more).map(NewSize::By),
            (None, Some(less)) => parse_size(less).map(NewSize::Less),
            (None, None) => parse_size(text).map(NewSize::To),
        }
    }

    /// The new size of a disk of `old` bytes.
    ///
    /// # Errors
    /// [`Kind::Usage`] if it would be negative, or larger than 2^63 - 1.
    pub fn of(self, old: u64) -> Result<u64> {
        let new = match self {
            NewSize::To(size) => Some(size),
            NewSize::By(more) => old.checked_add(more),
            NewSize::Less(less) => old.checked_sub(less),
        };
        let wrong = || {
            let text = format!("the disk has {old} bytes: its new size is below 0, or too large");
            Error::new(Kind::Usage, text)
        };
        new.filter(|&size| i64::try_from(size).is_ok()).ok_or_else(wrong)
    }

    /// The same, refused if it is less and that is not wanted.
    ///
    /// # Errors
    /// Those of [`NewSize::of`], and [`Kind::Usage`] if the disk would get smaller.
    pub fn checked(self, old: u64, shrink: bool) -> Result<u64> {
        let new = self.of(old)?;
        if new < old && !shrink {
            let text = format!(
                "the disk would get smaller, {new} instead of {old} bytes, and its end would be lost: add \
                 --shrink to allow that"
            );
            return Err(Error::new(Kind::Usage, text));
        }
        Ok(new)
    }
}

/// Changes the size of the disk in the image that `description` names, which nothing else may use,
/// and returns the new size: rounded up to 512 bytes. New bytes read as zeroes. `shrink` allows a
/// smaller size. An image with a backing file grows only if `context` allows to open it. `progress` gets the
/// bytes between both ends of the disk.
///
/// # Errors
/// [`Kind::Usage`] for a size that is not possible, [`Kind::Unsupported`] if the image has an
/// external data file, bitmaps, or snapshots without a size of their own, and those of the device.
pub async fn resize(
    context: &OpenContext,
    description: &str,
    wanted: NewSize,
    shrink: bool,
    progress: ChangeProgress<'_>,
) -> Result<u64> {
    let grows = |header: &Header| wanted.of(header.size).is_ok_and(|size| size > header.size);
    let ChainBase { file, head, below } = open_base(context, description, CHANGE, grows).await?;
    let file = file.device;
    let name = file.facts().name.clone();
    let named = |error: Error| error.on(&name);
    let old = head.header.size;
    let new = wanted.checked(old, shrink)?;
    let new = new.checked_next_multiple_of(SECTOR).filter(|&new| i64::try_from(new).is_ok());
    let new = new.ok_or_else(|| usage("the disk is too large"))?;
    refuse(&file, &head).await.map_err(named)?;
    let entries = l1_entries(&head, new)?;
    let head = if entries > head.header.l1.entries {
        let edit = Edit::open(&file, &head, None).await.map_err(named)?;
        let grown = edit.run(async |parts, header| parts.grow_l1(header, entries).await);
        let file_len = grown.await.map_err(named)?;
        FileHeader { file_len, ..FileHeader::read(&file).await? }
    } else {
        head
    };
    let edit = Edit::open(&file, &head, below).await.map_err(named)?;
    // A table of clusters may cover more than the disk has.
    let total = new.abs_diff(old);
    let count = |done: u64, _: u64| progress(done.min(total), total);
    let change = async |parts: &ImageParts, _: &Header| {
        if new < old { parts.shrink(new, &count).await } else { parts.grow(old, new, &count).await }
    };
    edit.run(change).await.map_err(named)?;
    progress(total, total);
    Ok(new)
}

/// Refuses images whose other parts would be wrong for another size.
async fn refuse(
    file: &std::sync::Arc<dyn blockhaul_block::Device>,
    head: &FileHeader,
) -> Result<()> {
    let FileHeader { header, file_len } = head;
    if header.has(incompatible::DATA_FILE) {
        let way = "use \"qemu-img resize\", which changes both";
        return Err(unsupported("the image has an external data file", way));
    }
    if let Some(one) = bitmap::describe(file, *file_len, header).await?.first() {
        let what =
            format!("the image has a bitmap, {:?}, which has the size of the disk", one.name);
        let way = "remove it first with \"blockhaul bitmap remove\", or use \"qemu-img resize\"";
        return Err(unsupported(what, way));
    }
    let snapshots = snapshot::list(file, *file_len, header).await?;
    // QEMU refuses all snapshots of version 2.
    let has_no_size = |one: &&snapshot::InternalSnapshot| one.size.is_none() || header.version < 3;
    if let Some(one) = snapshots.iter().find(has_no_size) {
        let what = format!("snapshot {:?} has no size of its own", one.name);
        let way =
            "delete it, or convert the image to version 3 with \"qemu-img amend -o compat=1.1\"";
        return Err(unsupported(what, way));
    }
    Ok(())
}

/// The number of entries of the L1 table that a disk needs.
fn l1_entries(head: &FileHeader, size: u64) -> Result<u32> {
    let layout = EntryLayout::new(&head.header, head.file_len, head.file_len);
    let entries = size.div_ceil(layout.l2_covers());
    let fits = u32::try_from(entries).ok().filter(|_| entries <= L1_MAX / 8);
    fits.ok_or_else(|| {
        let most = (L1_MAX / 8).saturating_mul(layout.l2_covers());
        let cluster = head.header.cluster();
        usage(format!(
            "with clusters of {cluster} bytes the disk has at most {most}: copy it to an image with larger ones"
        ))
    })
}

impl ImageParts {
    async fn shrink(&self, new: u64, progress: ChangeProgress<'_>) -> Result<()> {
        self.put_header(SIZE_AT, &new.to_be_bytes()).await?;
        self.cut(new.div_ceil(self.image.layout.cluster()), progress).await?;
        self.drop_empty_blocks().await
    }

    async fn grow(&self, old: u64, new: u64, progress: ChangeProgress<'_>) -> Result<()> {
        let cluster = self.image.layout.cluster();
        self.cut(old.div_ceil(cluster), progress).await?;
        // What was beyond the end of the disk: the rest of its last cluster, and the backing file.
        let below = self.backing.as_ref().map_or(0, |backing| backing.size);
        let end = below.max(old).next_multiple_of(cluster).min(new);
        if old < end {
            self.erase((old, end), EraseMode::Zero, RequestFlags::empty()).await?;
        }
        self.put_header(SIZE_AT, &new.to_be_bytes()).await
    }
}
