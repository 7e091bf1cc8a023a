//! A handle to an image, as a device.

use std::sync::Arc;

use super::image::MappedImage;
use super::parts::MappedParts;
use super::{extents, read};
use crate::assembly::{RunReader as _, packed_pool, piece_pool};
use blockhaul_block::{
    BASE_ALLOCATION, BlockSizes, Can, Device, Error, Facts, FileRange, Kind, LeaseAccess, Op,
    PendingRequest, Request,
};

/// An open image.
pub(super) struct MappedDevice {
    facts: Arc<Facts>,
    parts: Arc<MappedParts>,
}

impl MappedDevice {
    /// A handle over its own handles to the devices. All of them are fenced and have all
    /// emulations.
    pub(super) fn new(
        name: &str,
        image: Arc<MappedImage>,
        files: Vec<Arc<dyn Device>>,
        backing: Option<Arc<dyn Device>>,
    ) -> MappedDevice {
        let facts = Arc::new(facts(name, &image, &files, backing.as_ref()));
        let pieces = piece_pool();
        let packed = packed_pool(read::longest_packed(image.unit));
        MappedDevice {
            facts,
            parts: Arc::new(MappedParts { image, files, backing, pieces, packed }),
        }
    }
}

fn facts(
    name: &str,
    image: &MappedImage,
    files: &[Arc<dyn Device>],
    backing: Option<&Arc<dyn Device>>,
) -> Facts {
    let mut facts = Facts::new(format!("{}:{name}", image.format), image.size);
    // All handles share what they know, and nothing is written.
    facts.can = Can::EXTENTS | Can::MULTI_CONN;
    facts.allocation_unit = u32::try_from(image.unit).unwrap_or(1 << 20);
    if let Some(first) = files.first() {
        let first = first.facts();
        facts.description.clone_from(&first.description);
        facts.rotational = first.rotational;
        facts.in_flight = first.in_flight;
    }
    for one in files.iter().chain(backing) {
        let one = one.facts();
        facts.block.maximum = facts.block.maximum.min(one.block.maximum);
        facts.one_handle |= one.one_handle;
        facts.files.extend(one.files.iter().copied());
    }
    // What is in the disk counts in sectors; reads have any alignment.
    facts.advertised = image.sector.map(|sector| {
        let own = facts.advertised_or_own();
        BlockSizes { minimum: own.minimum.max(sector), preferred: own.preferred.max(sector), ..own }
    });
    facts.files.sort_unstable();
    facts.files.dedup();
    facts.contexts = vec![BASE_ALLOCATION.to_string()];
    facts
}

impl Device for MappedDevice {
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
            _ => Error::new(Kind::ReadOnly, "images of this format are read-only").into(),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        if access != LeaseAccess::Read {
            return None;
        }
        let parts = &self.parts;
        let runs = parts.image.runs_now(at, at.checked_add(len)?, 1)?.ok()?;
        parts.file_range(*runs.first()?, access)
    }
}
