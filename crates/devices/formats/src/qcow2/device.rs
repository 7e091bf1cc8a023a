//! A handle to an image, as a device.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Compression, ContextSet, Device, Error, Facts, FileRange, Kind,
    LeaseAccess, Op, PendingRequest, Reply, Request,
};
use blockhaul_io::WorkerHandle;

use super::image::ImageMetadata;
use super::parts::{ALLOCATION_DEPTH, BackingImage, ImageParts};
use super::{extents, read, write};
use crate::assembly::{RunReader as _, packed_pool, piece_pool};

/// Prefix of the contexts of persistent bitmaps.
const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// An open image.
pub(super) struct Qcow2Device {
    facts: Arc<Facts>,
    parts: Arc<ImageParts>,
}

impl Qcow2Device {
    /// A handle over its own handles to the devices. All of them are fenced and have all
    /// emulations.
    pub(super) fn new(
        image: Arc<ImageMetadata>,
        file: Arc<dyn Device>,
        external: Option<Arc<dyn Device>>,
        mut backing: Option<BackingImage>,
    ) -> Qcow2Device {
        let is_external = external.is_some();
        let data = external.unwrap_or_else(|| file.clone());
        let mut facts = facts(&image, &file, &data, backing.as_ref());
        if let Some(backing) = backing.as_mut().filter(|_| image.shows_below) {
            add_bitmaps(backing, &mut facts.contexts);
        }
        if let Some(writer) = &image.writer {
            writer.enter();
        }
        let parts = ImageParts {
            worker: WorkerHandle::to(blockhaul_io::worker()),
            pieces: piece_pool(),
            packed: packed_pool(read::longest_packed(image.layout.cluster())),
            image,
            file,
            data,
            is_external,
            backing,
        };
        if parts.image.writer.is_some() {
            let fast = if parts.zeroes_fast() { Can::FAST_ZERO } else { Can::empty() };
            facts.can |= (Can::CHANGES - Can::FAST_ZERO) | Can::FLUSH | fast;
            facts.compression = compression(&parts);
            let packs = parts.image.packs;
            facts.takes_parked = parts.data.facts().takes_parked && !packs;
            if let (Compression::All(unit), true) = (facts.compression, packs) {
                facts.block.preferred = facts.block.preferred.max(unit).min(facts.block.maximum);
            }
            facts.flush_failures_stay = true;
            facts.zeroed = parts.image.is_new && parts.backing.is_none();
        }
        Qcow2Device { facts: Arc::new(facts), parts: Arc::new(parts) }
    }

    /// The parts that its requests work with.
    pub(super) fn parts(&self) -> &ImageParts {
        &self.parts
    }
}

/// Which writes are compressed.
fn compression(parts: &ImageParts) -> Compression {
    let cluster = u32::try_from(parts.image.layout.cluster()).unwrap_or(0);
    match (parts.is_external, parts.image.packs) {
        (true, _) => Compression::None,
        (false, false) => Compression::Asked(cluster),
        (false, true) => Compression::All(cluster),
    }
}

fn facts(
    image: &ImageMetadata,
    file: &Arc<dyn Device>,
    data: &Arc<dyn Device>,
    backing: Option<&BackingImage>,
) -> Facts {
    let below = file.facts();
    let mut facts = Facts::new(format!("qcow2:{}", below.name), image.size);
    facts.description.clone_from(&below.description);
    // All handles share what they know, and a flush covers all of it.
    facts.can = Can::EXTENTS | Can::MULTI_CONN;
    facts.rotational = below.rotational;
    facts.in_flight = below.in_flight;
    facts.allocation_unit = u32::try_from(image.layout.unit()).unwrap_or(1);
    let devices = [file, data].into_iter().chain(backing.map(|backing| &backing.device));
    for one in devices {
        let one = one.facts();
        facts.block.maximum = facts.block.maximum.min(one.block.maximum);
        facts.one_handle |= one.one_handle;
        facts.files.extend(one.files.iter().copied());
    }
    facts.files.sort_unstable();
    facts.files.dedup();
    facts.contexts = vec![BASE_ALLOCATION.to_string(), ALLOCATION_DEPTH.to_string()];
    let names = image.bitmaps.iter().map(|bitmap| format!("{DIRTY_BITMAP}{}", bitmap.name));
    facts.contexts.extend(names);
    facts
}

/// Shows the bitmaps of the image below, as far as their names are new.
fn add_bitmaps(backing: &mut BackingImage, names: &mut Vec<String>) {
    if backing.depth.is_none() {
        return;
    }
    let facts = backing.device.facts();
    for name in facts.contexts.iter().filter(|name| name.starts_with(DIRTY_BITMAP)) {
        let is_new = names.len() < ContextSet::MAX && !names.contains(name);
        if let Some(context) = facts.context(name).filter(|_| is_new) {
            names.push(name.clone());
            backing.bitmaps.push(context);
        }
    }
}

impl Device for Qcow2Device {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => read::submit(&self.parts, at, room),
            Op::Extents(contexts) => {
                let parts = self.parts.clone();
                let range = (at, at.saturating_add(len));
                PendingRequest::start(
                    async move { extents::list(&parts, range, contexts, flags).await },
                )
            }
            _ if self.parts.image.writer.is_none() => {
                Error::new(Kind::ReadOnly, "the image is open for reading only").into()
            }
            Op::Write(data) => write::data::submit(&self.parts, at, data, flags),
            Op::Zero | Op::Trim => {
                let range = (at, at.saturating_add(len));
                write::zero::submit(&self.parts, range, matches!(op, Op::Trim), flags)
            }
            Op::Flush => {
                let parts = self.parts.clone();
                PendingRequest::start(async move { parts.flush().await.map(|()| Reply::Done) })
            }
            Op::Cache => Error::new(Kind::Unsupported, "the image has no cache").into(),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        // While an image is written, its clusters may be freed.
        if access != LeaseAccess::Read || self.parts.image.writer.is_some() {
            return None;
        }
        let parts = &self.parts;
        let runs = parts.image.runs_now(at, at.checked_add(len)?, 1)?.ok()?;
        parts.file_range(*runs.first()?, access)
    }
}
