//! Claims on storage: one storage has one owner in a process.
//!
//! Locks of files keep processes apart, not the doors of one process: two exports, the nodes of a
//! monitor, mounted names, the targets of jobs. A [`Claims`] table records the storages that are
//! open, by identity, with the use of each. A claim that does not fit another is refused.
//! The rules are those of QEMU's image locking (its block permissions), with one exception: reading
//! a raw file beside a writer only causes a warning.

use std::collections::HashMap;
use std::fmt;
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

/// All identities of a storage.
#[derive(Debug, Clone, Default)]
pub struct StorageIds {
    /// The storage itself, by each of its names: a loop device over a whole file is that file.
    pub same: Vec<StorageId>,
    /// Storages that contain it: the disk of a partition, the file below a part of it.
    pub below: Vec<StorageId>,
}

impl StorageIds {
    /// All of them; `true`: the storage itself.
    fn all(&self) -> impl Iterator<Item = (&StorageId, bool)> {
        let same = self.same.iter().map(|id| (id, true));
        same.chain(self.below.iter().map(|id| (id, false)))
    }
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
    label: Option<Arc<Label>>,
    /// The part of a device that it is.
    part: Option<Arc<DevicePart>>,
}

#[derive(Debug)]
struct Label {
    text: Arc<str>,
    /// NBD clients can use its device instead of opening the storage again.
    is_export: bool,
}

/// A part of a device, which may itself be a part of another one.
#[derive(Debug)]
struct DevicePart {
    whole: CompositeStorage,
    name: Arc<str>,
    outer: Option<Arc<DevicePart>>,
}

/// A device that consists of several parts, or storage that shows several names. Each one differs
/// from all others.
#[derive(Debug, Clone, Default)]
pub struct CompositeStorage(Arc<()>);

impl ClaimOwner {
    /// An owner that messages call `label`, such as `the mounted file "a"`. Each call makes another owner.
    pub fn new(label: impl Into<Arc<str>>) -> ClaimOwner {
        ClaimOwner::with(label.into(), false)
    }

    /// An export of an NBD server that messages call `label`, such as `export "a"`. Each call makes another
    /// owner.
    pub fn export(label: impl Into<Arc<str>>) -> ClaimOwner {
        ClaimOwner::with(label.into(), true)
    }

    fn with(text: Arc<str>, is_export: bool) -> ClaimOwner {
        ClaimOwner { label: Some(Arc::new(Label { text, is_export })), part: None }
    }

    /// The same owner for one part of a device, such as `part 1`. Two parts of one device are two
    /// owners: they must not write one storage, either.
    #[must_use]
    pub fn part(&self, whole: &CompositeStorage, name: impl Into<Arc<str>>) -> ClaimOwner {
        let part = DevicePart { whole: whole.clone(), name: name.into(), outer: self.part.clone() };
        ClaimOwner { label: self.label.clone(), part: Some(Arc::new(part)) }
    }

    /// The command that this process runs, which opens some storages twice. Not for what users of a
    /// running program open: exports, nodes, mounted names, jobs.
    pub fn command() -> ClaimOwner {
        static COMMAND: LazyLock<ClaimOwner> = LazyLock::new(|| ClaimOwner::new("this command"));
        COMMAND.clone()
    }

    /// Whether it owns more than one claim.
    pub(crate) fn is_named(&self) -> bool {
        self.label.is_some()
    }

    fn is(&self, other: &ClaimOwner) -> bool {
        matches!((&self.label, &other.label), (Some(one), Some(other)) if Arc::ptr_eq(one, other))
            && !self.is_beside(other)
    }

    /// Whether both are parts of one device, and not the same part.
    fn is_beside(&self, other: &ClaimOwner) -> bool {
        let differ = |one: &DevicePart, other: &DevicePart| {
            Arc::ptr_eq(&one.whole.0, &other.whole.0) && one.name != other.name
        };
        self.parts().any(|one| other.parts().any(|other| differ(one, other)))
    }

    /// The parts that it is, the innermost first.
    fn parts(&self) -> impl Iterator<Item = &DevicePart> {
        std::iter::successors(self.part.as_deref(), |part| part.outer.as_deref())
    }

    fn is_export(&self) -> bool {
        self.label.as_ref().is_some_and(|label| label.is_export)
    }
}

impl fmt::Display for ClaimOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts().try_for_each(|part| write!(f, "{} of ", part.name))?;
        f.write_str(self.label.as_ref().map_or("this program", |label| &label.text))
    }
}

/// Warnings of claims, for the user who opens a device. They are in the log, too.
#[derive(Debug, Default)]
pub struct Warnings(Mutex<Vec<String>>);

impl Warnings {
    pub(crate) fn add(&self, warning: String) {
        self.lock().push(warning);
    }

    /// Those since the last call, in their order.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request for a claim.
#[derive(Debug, Clone)]
pub(crate) struct ClaimRequest {
    pub(crate) usage: ClaimUse,
    pub(crate) owner: ClaimOwner,
    /// Writers of raw bytes may share the storage with writers that allow it, too.
    pub(crate) shares_writes: bool,
    /// The storage holds a disk image in a format.
    pub(crate) is_image: bool,
}

/// The storages that are open.
#[derive(Default)]
pub struct Claims(Mutex<ClaimTable>);

#[derive(Default)]
struct ClaimTable {
    /// The number of the next claim.
    next: u64,
    claims: HashMap<u64, (ClaimRequest, StorageIds)>,
    /// The claims on a storage; `true`: the storage itself, `false`: a storage inside it.
    on: HashMap<StorageId, Vec<(u64, bool)>>,
}

impl ClaimTable {
    /// Checks a request against the claims on these storages but `own`. Returns one that calls for a
    /// warning.
    fn check(
        &self,
        ids: &StorageIds,
        request: &ClaimRequest,
        own: Option<u64>,
    ) -> Result<Option<ClaimRequest>> {
        let mut warning = None;
        for (id, is_itself) in ids.all() {
            // Two parts of one storage do not meet.
            let meeting = |&&(number, holds_itself): &&(u64, bool)| {
                (is_itself || holds_itself) && Some(number) != own
            };
            for (number, _) in self.on.get(id).into_iter().flatten().filter(meeting) {
                let Some((held, _)) = self.claims.get(number) else { continue };
                match Verdict::of(held, request) {
                    Verdict::Allow => {}
                    Verdict::Warn => warning = Some(held.clone()),
                    Verdict::Refuse => return Err(refusal(held, request)),
                }
            }
        }
        Ok(warning)
    }

    fn set_usage(&mut self, number: u64, usage: ClaimUse) {
        if let Some((held, _)) = self.claims.get_mut(&number) {
            held.usage = usage;
        }
    }
}

/// The claims of a node as the target of a job, until this is dropped.
pub struct TargetClaims {
    claims: Arc<Claims>,
    /// The use of each claim before.
    before: Vec<(u64, ClaimUse)>,
}

impl Drop for TargetClaims {
    fn drop(&mut self) {
        let mut table = self.claims.table();
        for (number, usage) in &self.before {
            table.set_usage(*number, *usage);
        }
    }
}

/// A claim on a storage, which ends when this is dropped.
pub struct Claim {
    claims: Arc<Claims>,
    number: u64,
    ids: StorageIds,
    /// What its user must know.
    pub(crate) warning: Option<String>,
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
        let beside = table.check(&ids, &request, None)?;
        let warning = beside.map(|held| {
            format!(
                "{name}: already open {} by {}, and {} opens it {}: readers may see half-finished writes",
                held.usage.shown(),
                held.owner,
                request.owner,
                request.usage.shown()
            )
        });
        let number = table.next;
        table.next += 1;
        for (id, is_itself) in ids.all() {
            table.on.entry(id.clone()).or_default().push((number, is_itself));
        }
        table.claims.insert(number, (request, ids.clone()));
        Ok(Claim { claims: self.clone(), number, ids, warning })
    }

    /// Makes what an owner writes the target of a job, until the result is dropped.
    ///
    /// # Errors
    /// [`Kind::InUse`] if another owner uses a storage of it.
    pub fn claim_as_target(self: &Arc<Claims>, owner: &ClaimOwner) -> Result<TargetClaims> {
        let mut table = self.table();
        let own: Vec<_> = table
            .claims
            .iter()
            .filter(|(_, (held, _))| held.owner.is(owner) && held.usage.writes())
            .map(|(number, (held, ids))| (*number, held.clone(), ids.clone()))
            .collect();
        for (number, held, ids) in &own {
            let target = ClaimRequest { usage: ClaimUse::CopyTarget, ..held.clone() };
            table.check(ids, &target, Some(*number))?;
        }
        for (number, ..) in &own {
            table.set_usage(*number, ClaimUse::CopyTarget);
        }
        let before = own.into_iter().map(|(number, held, _)| (number, held.usage)).collect();
        Ok(TargetClaims { claims: self.clone(), before })
    }

    /// Two owners have exchanged their storages.
    pub fn exchange(&self, one: &ClaimOwner, other: &ClaimOwner) {
        for (held, _) in self.table().claims.values_mut() {
            if held.owner.is(one) {
                held.owner = other.clone();
            } else if held.owner.is(other) {
                held.owner = one.clone();
            }
        }
    }

    /// Gives the targets of a job to the owner who writes to them from now on.
    pub fn hand_over(&self, job: &ClaimOwner, owner: &ClaimOwner) {
        for (held, _) in self.table().claims.values_mut().filter(|(held, _)| held.owner.is(job)) {
            held.owner = owner.clone();
            held.usage = match held.usage {
                ClaimUse::CopyTarget if held.is_image => ClaimUse::WriteImage,
                ClaimUse::CopyTarget => ClaimUse::Write,
                usage => usage,
            };
        }
    }

    /// Whether a further device of this owner would be refused: one of its devices writes an image.
    pub fn is_exclusive(&self, owner: &ClaimOwner) -> bool {
        let table = self.table();
        table.claims.values().any(|(held, _)| held.usage.is_exclusive() && held.owner.is(owner))
    }

    fn table(&self) -> MutexGuard<'_, ClaimTable> {
        // Its state cannot be inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut table = self.claims.table();
        table.claims.remove(&self.number);
        for (id, _) in self.ids.all() {
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
    let are_exports = held.owner.is_export() && new.owner.is_export();
    let remedy = match (held.usage, new.usage) {
        (_, ClaimUse::CopyTarget) => "choose another target, or close it there first".to_string(),
        (_, usage) if usage.writes() && held.owner.is_beside(&new.owner) => {
            "use it once, or open it read-only".to_string()
        }
        (ClaimUse::Write, ClaimUse::Write) if are_exports => {
            "serve it under one name (all its clients share the disk), make one export read-only, or use \
             file:PATH?lock=off for both, which is safe if they show parts that do not overlap"
                .to_string()
        }
        (ClaimUse::Write, ClaimUse::Write) => {
            "open it once, open one of them read-only, or use file:PATH?lock=off for both, which is safe if \
             they show parts that do not overlap"
                .to_string()
        }
        (ClaimUse::Write | ClaimUse::WriteImage, usage) if usage.writes() && are_exports => {
            "serve it under one name: all its clients share the disk".to_string()
        }
        (ClaimUse::WriteImage, usage) if !usage.writes() && held.owner.is_export() => format!(
            "connect to {} instead, or add a read-only snapshot of it (ctl snapshot-add)",
            held.owner
        ),
        (ClaimUse::Read | ClaimUse::ReadImage, _) => {
            "open it read-only, or close it there first".to_string()
        }
        _ => "close it there first".to_string(),
    };
    let text = format!(
        "already open {} by {}; {} cannot open it {}",
        held.usage.shown(),
        held.owner,
        new.owner,
        new.usage.shown()
    );
    Error::new(Kind::InUse, text).with_remedy(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ClaimUse::{CopyTarget, Read, ReadImage, Write, WriteImage};

    fn request(usage: ClaimUse, owner: &ClaimOwner) -> ClaimRequest {
        ClaimRequest { usage, owner: owner.clone(), shares_writes: false, is_image: false }
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
    fn two_parts_of_one_device_are_two_owners() {
        let owner = ClaimOwner::export("export \"a\"");
        let [whole, other] = [(); 2].map(|()| CompositeStorage::default());
        let [one, two] = ["part 1", "part 2"].map(|name| owner.part(&whole, name));
        let inside = two.part(&other, "part 1");
        assert_eq!(inside.to_string(), "part 1 of part 2 of export \"a\"");
        for (held, new, granted) in [
            (&one, &two, false),
            (&one, &inside, false),
            (&two, &inside, true),
            (&one, &one, true),
            (&one, &owner, true),
            // The same device, opened again.
            (&one, &owner.part(&other, "part 2"), true),
        ] {
            for (held, new) in [(held, new), (new, held)] {
                let writes = fits(request(Write, held), request(Write, new));
                assert_eq!(writes, granted, "{held} then {new}");
                assert!(fits(request(Read, held), request(Read, new)));
            }
        }
        let claims = Arc::new(Claims::default());
        let claim = |owner| claims.claim(ids(&[1], &[]), request(Write, owner), "disk");
        let _one = claim(&one).unwrap();
        let error = claim(&two).unwrap_err();
        assert!(error.to_string().contains("use it once"), "{error}");
        assert!(claims.claim_as_target(&owner).is_ok());
    }

    #[test]
    fn a_reader_beside_a_writer_is_warned_about() {
        let owners = ["one", "other"].map(ClaimOwner::new);
        for (held, new, warned) in [
            (Read, Write, true),
            (Write, Read, true),
            (Read, Read, false),
            (Read, ReadImage, false),
        ] {
            let claims = Arc::new(Claims::default());
            let claim = |usage, owner| claims.claim(ids(&[1], &[]), request(usage, owner), "disk");
            let first = claim(held, &owners[0]).unwrap();
            assert_eq!(first.warning, None);
            let second = claim(new, &owners[1]).unwrap();
            assert_eq!(second.warning.is_some(), warned, "{held:?} then {new:?}");
        }
    }

    #[test]
    fn a_refusal_names_both_owners_and_what_helps() {
        let exports = ["export \"a\"", "export \"b\""].map(ClaimOwner::export);
        let others = ["the mounted file \"a\"", "the mounted file \"b\""].map(ClaimOwner::new);
        for (held, new, of_exports, of_others) in [
            (Write, Write, "serve it under one name", "open it once"),
            (Write, Write, "file:PATH?lock=off for both", "file:PATH?lock=off for both"),
            (Write, Write, "parts that do not overlap", "parts that do not overlap"),
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
                assert!(!error.text().contains(remedy), "{error}");
                let text = error.to_string();
                for word in [&one.to_string(), &other.to_string(), remedy] {
                    assert!(text.contains(word), "{held:?} then {new:?}: {text}");
                }
            }
        }
    }

    #[test]
    fn the_target_of_a_job_is_used_by_nobody_else_until_the_job_has_ended() {
        let claims = Arc::new(Claims::default());
        let claim =
            |usage, owner: &ClaimOwner| claims.claim(ids(&[1], &[]), request(usage, owner), "disk");
        let [node, other] = ["node \"n\"", "export \"b\""].map(ClaimOwner::new);
        let _node = claim(Write, &node).unwrap();
        let reader = claim(Read, &other).unwrap();
        assert!(claims.claim_as_target(&node).is_err(), "it is read");
        drop(reader);
        let target = claims.claim_as_target(&node).unwrap();
        assert!(claim(Read, &other).is_err());
        drop(target);
        drop(claim(Read, &other).unwrap());
    }

    #[test]
    fn the_target_of_a_mirror_becomes_the_disk_of_the_export() {
        for (is_image, readable) in [(false, true), (true, false)] {
            let claims = Arc::new(Claims::default());
            let [job, export, other] = ["the mirror", "export \"a\"", "b"].map(ClaimOwner::new);
            let target = ClaimRequest { is_image, ..request(CopyTarget, &job) };
            let _target = claims.claim(ids(&[1], &[]), target, "disk").unwrap();
            claims.hand_over(&job, &export);
            let read = claims.claim(ids(&[1], &[]), request(Read, &other), "disk");
            assert_eq!(read.is_ok(), readable);
            assert_eq!(claims.is_exclusive(&export), is_image);
            claims.exchange(&export, &other);
            assert_eq!(claims.is_exclusive(&other), is_image);
        }
    }
}
