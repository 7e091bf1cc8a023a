//! Packs that no index names: backups that were ended have left them.

use std::collections::HashSet;

use blockhaul_block::Kind;

use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result, pack_file};
use crate::index::{BlobIndex, BlobKind};
use crate::parallel::try_each;
use crate::repository::RepositoryReader;
use crate::writer::pack::{PackBlob, read_header};

/// Most packs that are looked into: 128 GiB.
const PACKS_MAX: usize = 8192;

/// Most bytes of a pack: restic's option --pack-size has at most 128 MiB.
const PACK_MAX: u64 = 160 << 20;

/// Packs that no index names, with the blobs that their headers name.
#[derive(Default)]
pub(crate) struct OrphanPacks {
    pub(crate) packs: Vec<(Digest, Vec<PackBlob>)>,
    /// Whether no other program may be about to name them.
    pub(crate) is_ours: bool,
}

impl OrphanPacks {
    /// Finds packs that the index does not name, and reads their headers. `is_alone`: no other program adds files. Blocks.
    ///
    /// # Errors
    /// The storage fails. A damaged pack is left out.
    pub(crate) fn find(
        reader: &RepositoryReader,
        index: &BlobIndex,
        is_alone: bool,
    ) -> Result<OrphanPacks> {
        let begins: Vec<u8> = (0..=u8::MAX).collect();
        let mut packs = reader.packs(&begins)?;
        let known: HashSet<&Digest> = index.packs().iter().collect();
        packs.retain(|pack| !known.contains(pack));
        drop(known);
        if packs.len() > PACKS_MAX {
            log::warn!(
                "restic: no index names {} packs: restic prune removes them, or restic repair index names them; {PACKS_MAX} are used",
                packs.len()
            );
            packs.truncate(PACKS_MAX);
        }
        let read = try_each(reader.parallel(), &packs, |pack| match checked(reader, pack) {
            Ok(blobs) => Ok(Some((*pack, blobs))),
            Err(RepositoryFault::Other(error)) if error.kind() == Kind::Refused => {
                log::warn!("restic: {}: the pack is not used", error.located());
                Ok(None)
            }
            Err(RepositoryFault::Other(error)) => Err(RepositoryFault::from(error)),
            // Another program has removed it.
            Err(RepositoryFault::MissingFile { .. }) => Ok(None),
            Err(fault) => {
                log::warn!("restic: {fault}: the pack is not used");
                Ok(None)
            }
        });
        let mut packs: Vec<_> = read?.into_iter().flatten().collect();
        if !is_alone {
            // Another program may be about to name these: those that are used alone are named twice.
            packs.retain(|(_, blobs)| blobs.iter().all(|blob| blob.kind == BlobKind::Data));
        }
        if !packs.is_empty() {
            log::info!("restic: {} packs of backups that were ended are used", packs.len());
        }
        Ok(OrphanPacks { packs, is_ours: is_alone })
    }
}

/// The blobs of a pack whose contents are those that its name says: what a crash has left can be damaged.
fn checked(reader: &RepositoryReader, pack: &Digest) -> Result<Vec<PackBlob>> {
    let file = pack_file(&pack.to_string());
    let bytes = reader.storage().whole(&file, PACK_MAX)?;
    if Digest::of(&bytes) != *pack {
        return Err(RepositoryFault::damaged(&file, "its digest is not its name"));
    }
    read_header(reader, pack)
}
