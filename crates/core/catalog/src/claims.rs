//! Claims on storage: one storage has one owner in a process.
//!
//! Locks of files keep processes apart, not the doors of one process: two exports, the nodes of a
//! monitor, mounted names, the targets of jobs. A [`Claims`] table records the storages that are
//! open, by identity, with the use of each. A claim that does not fit another is refused.
//! The rules are those of QEMU's image locking (its block permissions), with one exception: reading
//! a raw file beside a writer only causes a warning.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::opening::Intent;
use blockhaul_block::{Error, FileId, Kind, Result};

/// Identity of a storage.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StorageId {
    /// Device and inode of a file, or the number of a block device and 0.
    File(FileId),
    /// Address and name of an export of an NBD server.
    Export(String),
}

impl StorageId {
    /// The export `name` of the NBD server that listens on a Unix socket.
    pub fn unix_export(socket: &Path, name: &str) -> StorageId {
        // A path that cannot be completed is that of no other server, either.
        let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.to_path_buf());
        StorageId::Export(format!("{} {name}", socket.display()))
    }

    /// The export `name` of the NBD server at a host and port.
    pub fn tcp_export(host: &str, port: u16, name: &str) -> StorageId {
        // The names of this machine.
        let host = if matches!(host, "127.0.0.1" | "::1") { "localhost" } else { host };
        StorageId::Export(format!("{host} {port} {name}"))
    }
}

/// All identities of a storage.
#[derive(Debug, Clone, Default)]
pub struct StorageIds {
    /// The storage itself, by each of its names: a loop device over a whole file is that file.
    pub same: Vec<StorageId>,
    /// Storages that contain it: the disk of a partition, the file below a part of it.
    pub below: Vec<StorageId>,
}

/// The use of a storage by one claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimUse {
    /// Raw bytes are read.
    Read,
    /// A disk image is read, or is below one: a change by others damages its contents.
    ReadImage,
    /// Raw bytes are read and written.
    Write,
    /// A disk image is written: its tables are in the memory of one device.
    WriteImage,
    /// A copy or a job writes all of it.
    CopyTarget,
}

impl ClaimUse {
    /// The use that an intent describes.
    pub(crate) fn from_intent(intent: &Intent) -> ClaimUse {
        match (intent.write, intent.image) {
            (true, _) if intent.exclusive => ClaimUse::CopyTarget,
            (true, true) => ClaimUse::WriteImage,
            (true, false) => ClaimUse::Write,
            (false, true) => ClaimUse::ReadImage,
            (false, false) => ClaimUse::Read,
        }
    }

    fn writes(self) -> bool {
        self.is_exclusive() || self == ClaimUse::Write
    }

    /// Whether no other device may write to the storage, not even one of the same owner.
    fn is_exclusive(self) -> bool {
        matches!(self, ClaimUse::WriteImage | ClaimUse::CopyTarget)
    }

    fn shown(self) -> &'static str {
        match self {
            ClaimUse::Read => "for reading",
            ClaimUse::ReadImage => "as a disk image",
            ClaimUse::Write => "for writing",
            ClaimUse::WriteImage => "for writing as a disk image",
            ClaimUse::CopyTarget => "as the target of a copy",
        }
    }
}

/// The owner of claims: an export, a node, a mounted name, a job. Claims of one owner on a raw file
/// share it. Without a label, each claim has an owner of its own.
#[derive(Debug, Clone, Default)]
pub struct ClaimOwner {
    label: Option<Arc<str>>,
    /// NBD clients can use its device instead of opening the storage again.
    is_export: bool,
}

impl ClaimOwner {
    /// An owner that messages call `label`, such as `the mounted file "a"`. Each call makes another owner.
    pub fn new(label: impl Into<Arc<str>>) -> ClaimOwner {
        ClaimOwner { label: Some(label.into()), is_export: false }
    }

    /// An export of an NBD server that messages call `label`, such as `export "a"`. Each call makes another
    /// owner.
    pub fn export(label: impl Into<Arc<str>>) -> ClaimOwner {
        ClaimOwner { is_export: true, ..ClaimOwner::new(label) }
    }

    /// The command that this process runs, which opens some storages twice. Not for what users of a
    /// running program open: exports, nodes, mounted names, jobs.
    pub fn command() -> ClaimOwner {
        static COMMAND: LazyLock<ClaimOwner> = LazyLock::new(|| ClaimOwner::new("this command"));
        COMMAND.clone()
    }

    /// Whether it owns more than one claim.
    pub(crate) fn is_named(&self) -> bool {
        self.0.is_some()
    }

    fn is(&self, other: &ClaimOwner) -> bool {
        matches!((&self.label, &other.label), (Some(one), Some(other)) if Arc::ptr_eq(one, other))
    }
}

impl fmt::Display for ClaimOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label.as_deref().unwrap_or("this program"))
    }
}

/// A request for a claim.
#[derive(Debug, Clone)]
pub(crate) struct ClaimRequest {
    pub(crate) usage: ClaimUse,
    pub(crate) owner: ClaimOwner,
    /// Writers of raw bytes may share the storage with writers that allow it, too.
    pub(crate) shares_writes: bool,
}

/// The storages that are open.
#[derive(Default)]
pub struct Claims(Mutex<Table>);

#[derive(Default)]
struct Table {
    /// The number of the next claim.
    next: u64,
    claims: HashMap<u64, ClaimRequest>,
    /// The claims on a storage; `true`: the storage itself, `false`: a storage inside it.
    on: HashMap<StorageId, Vec<(u64, bool)>>,
}

/// A claim on a storage, which ends when this is dropped.
pub struct Claim {
    claims: Arc<Claims>,
    number: u64,
    ids: StorageIds,
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Claim({:?})", self.ids)
    }
}

impl Claims {
    /// The table of this process. In a simulation, whose machines share a process, each call makes a
    /// table.
    pub fn for_process() -> Arc<Claims> {
        static CLAIMS: LazyLock<Arc<Claims>> = LazyLock::new(Arc::default);
        if blockhaul_io::is_simulated() { Arc::default() } else { CLAIMS.clone() }
    }

    /// Claims a storage.
    ///
    /// # Errors
    /// [`Kind::InUse`] if another claim does not allow it; the message names both owners.
    pub(crate) fn claim(
        self: &Arc<Claims>,
        ids: StorageIds,
        request: ClaimRequest,
        name: &str,
    ) -> Result<Claim> {
        let mut table = self.table();
        let itself = ids.same.iter().map(|id| (id, true));
        let below = ids.below.iter().map(|id| (id, false));
        let mut warning = None;
        for (id, is_itself) in itself.clone().chain(below.clone()) {
            // Two parts of one storage do not meet.
            let meeting = |&&(_, holds_itself): &&(u64, bool)| is_itself || holds_itself;
            for (number, _) in table.on.get(id).into_iter().flatten().filter(meeting) {
                let Some(held) = table.claims.get(number) else { continue };
                match Verdict::of(held, &request) {
                    Verdict::Allow => {}
                    Verdict::Warn => warning = Some(held.clone()),
                    Verdict::Refuse => return Err(refusal(held, &request)),
                }
            }
        }
        if let Some(held) = warning {
            log::warn!(
                "{name}: already open {} by {}, and {} opens it {}: readers may see half-finished writes",
                held.usage.shown(),
                held.owner,
                request.owner,
                request.usage.shown()
            );
        }
        let number = table.next;
        table.next += 1;
        let places: Vec<_> =
            itself.chain(below).map(|(id, is_itself)| (id.clone(), is_itself)).collect();
        for (id, is_itself) in places {
            table.on.entry(id).or_default().push((number, is_itself));
        }
        table.claims.insert(number, request);
        Ok(Claim { claims: self.clone(), number, ids })
    }

    /// Whether a further device of this owner would be refused: one of its devices writes an image.
    pub fn is_exclusive(&self, owner: &ClaimOwner) -> bool {
        let table = self.table();
        table.claims.values().any(|held| held.usage.is_exclusive() && held.owner.is(owner))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Its state cannot be inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut table = self.claims.table();
        table.claims.remove(&self.number);
        for id in self.ids.same.iter().chain(&self.ids.below) {
            if let Some(claims) = table.on.get_mut(id) {
                claims.retain(|(number, _)| *number != self.number);
                if claims.is_empty() {
                    table.on.remove(id);
                }
            }
        }
    }
}

/// Whether two claims on one storage fit.
enum Verdict {
    Allow,
    Warn,
    Refuse,
}

impl Verdict {
    fn of(held: &ClaimRequest, new: &ClaimRequest) -> Verdict {
        let exclusive = held.usage.is_exclusive() || new.usage.is_exclusive();
        let is_image = |one: &ClaimRequest| one.usage == ClaimUse::ReadImage;
        match (held.usage.writes(), new.usage.writes()) {
            (false, false) => Verdict::Allow,
            (true, true) if exclusive => Verdict::Refuse,
            _ if held.owner.is(&new.owner) => Verdict::Allow,
            (true, true) if held.shares_writes && new.shares_writes => Verdict::Allow,
            (true, true) => Verdict::Refuse,
            _ if exclusive || is_image(held) || is_image(new) => Verdict::Refuse,
            _ => Verdict::Warn,
        }
    }
}

fn refusal(held: &ClaimRequest, new: &ClaimRequest) -> Error {
    let are_exports = held.owner.is_export && new.owner.is_export;
    let remedy = match (held.usage, new.usage) {
        (_, ClaimUse::CopyTarget) => "choose another target, or close it there first".to_string(),
        (ClaimUse::Write, ClaimUse::Write) if are_exports => {
            "serve it under one name (all its clients share the disk), make one export read-only, or use \
             file:PATH?lock=off for both"
                .to_string()
        }
        (ClaimUse::Write, ClaimUse::Write) => {
            "open it once, open one of them read-only, or use file:PATH?lock=off for both".to_string()
        }
        (ClaimUse::Write | ClaimUse::WriteImage, usage) if usage.writes() && are_exports => {
            "serve it under one name: all its clients share the disk".to_string()
        }
        (ClaimUse::WriteImage, usage) if !usage.writes() && held.owner.is_export => format!(
            "connect to {} instead, or add a read-only snapshot of it (ctl snapshot-add)",
            held.owner
        ),
        (ClaimUse::Read | ClaimUse::ReadImage, _) => {
            "open it read-only, or close it there first".to_string()
        }
        _ => "close it there first".to_string(),
    };
    let text = format!(
        "already open {} by {}; {} cannot open it {}: {remedy}",
        held.usage.shown(),
        held.owner,
        new.owner,
        new.usage.shown()
    );
    Error::new(Kind::InUse, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ClaimUse::{CopyTarget, Read, ReadImage, Write, WriteImage};

    fn request(usage: ClaimUse, owner: &ClaimOwner) -> ClaimRequest {
        ClaimRequest { usage, owner: owner.clone(), shares_writes: false }
    }

    fn ids(same: &[u64], below: &[u64]) -> StorageIds {
        let ids =
            |numbers: &[u64]| numbers.iter().map(|&number| StorageId::File((number, 0))).collect();
        StorageIds { same: ids(same), below: ids(below) }
    }

    /// Whether `new` is granted while `held` is.
    fn fits(held: ClaimRequest, new: ClaimRequest) -> bool {
        let claims = Arc::new(Claims::default());
        let _held = claims.claim(ids(&[1], &[]), held, "disk").unwrap();
        claims.claim(ids(&[1], &[]), new, "disk").is_ok()
    }

    #[test]
    fn one_writer_and_readers_of_raw_bytes() {
        let all = [Read, ReadImage, Write, WriteImage, CopyTarget];
        for (held, granted) in [
            (Read, [true, true, true, false, false]),
            (ReadImage, [true, true, false, false, false]),
            (Write, [true, false, false, false, false]),
            (WriteImage, [false; 5]),
            (CopyTarget, [false; 5]),
        ] {
            for (new, granted) in all.into_iter().zip(granted) {
                let (one, other) = (ClaimOwner::new("one"), ClaimOwner::new("other"));
                let fits = fits(request(held, &one), request(new, &other));
                assert_eq!(fits, granted, "{held:?} then {new:?}");
            }
        }
    }

    #[test]
    fn one_owner_shares_raw_bytes_but_not_an_image() {
        let owner = ClaimOwner::new("export \"a\"");
        for (held, new, granted) in [
            (Write, Write, true),
            (ReadImage, CopyTarget, true),
            (WriteImage, Read, true),
            (WriteImage, WriteImage, false),
            (Write, CopyTarget, false),
        ] {
            let fits = fits(request(held, &owner), request(new, &owner));
            assert_eq!(fits, granted, "{held:?} then {new:?}");
        }
        let nobody = ClaimOwner::default();
        assert!(!fits(request(Write, &nobody), request(Write, &nobody)));
        for usage in [Read, ReadImage, Write, WriteImage, CopyTarget] {
            let claims = Arc::new(Claims::default());
            let _held = claims.claim(ids(&[1], &[]), request(usage, &owner), "disk").unwrap();
            assert_eq!(claims.is_exclusive(&owner), usage.is_exclusive(), "{usage:?}");
            assert!(!claims.is_exclusive(&ClaimOwner::new("export \"b\"")));
        }
    }

    #[test]
    fn writers_share_raw_bytes_if_all_allow_it() {
        let owner = ClaimOwner::default();
        let sharing = |usage| ClaimRequest { shares_writes: true, ..request(usage, &owner) };
        assert!(fits(sharing(Write), sharing(Write)));
        assert!(!fits(sharing(Write), request(Write, &owner)));
        assert!(!fits(sharing(WriteImage), sharing(WriteImage)));
        assert!(!fits(sharing(Write), sharing(CopyTarget)));
    }

    #[test]
    fn a_part_meets_the_whole_and_not_another_part() {
        let claims = Arc::new(Claims::default());
        let owner = ClaimOwner::default();
        let claim = |ids| claims.claim(ids, request(Write, &owner), "disk");
        let one = claim(ids(&[2], &[1])).unwrap();
        let other = claim(ids(&[3], &[1])).unwrap();
        assert!(claim(ids(&[1], &[])).is_err());
        assert!(claim(ids(&[4, 2], &[])).is_err(), "by another name");
        assert!(claim(ids(&[5], &[2])).is_err(), "a part of the part");
        drop((one, other));
        drop(claim(ids(&[1], &[])).unwrap());
        assert!(claims.table().on.is_empty() && claims.table().claims.is_empty());
    }

    #[test]
    fn a_refusal_names_both_owners_and_what_helps() {
        let exports = ["export \"a\"", "export \"b\""].map(ClaimOwner::export);
        let others = ["the mounted file \"a\"", "the mounted file \"b\""].map(ClaimOwner::new);
        for (held, new, of_exports, of_others) in [
            (Write, Write, "serve it under one name", "open it once"),
            (Write, Write, "file:PATH?lock=off for both", "file:PATH?lock=off for both"),
            (WriteImage, WriteImage, "serve it under one name", "close it there first"),
            (WriteImage, ReadImage, "connect to export \"a\" instead", "close it there first"),
            (Write, ReadImage, "close it there first", "close it there first"),
            (ReadImage, Write, "open it read-only", "open it read-only"),
            (Write, CopyTarget, "choose another target", "choose another target"),
            (CopyTarget, Write, "close it there first", "close it there first"),
        ] {
            for ([one, other], remedy) in [(&exports, of_exports), (&others, of_others)] {
                let claims = Arc::new(Claims::default());
                let claim =
                    |usage, owner| claims.claim(ids(&[1], &[]), request(usage, owner), "disk");
                let _held = claim(held, one).unwrap();
                let error = claim(new, other).unwrap_err();
                assert_eq!(error.kind(), Kind::InUse);
                let text = error.text();
                for word in [&one.to_string(), &other.to_string(), remedy] {
                    assert!(text.contains(word), "{held:?} then {new:?}: {text}");
                }
            }
        }
    }
}
