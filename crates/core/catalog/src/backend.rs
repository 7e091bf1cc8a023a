//! Kinds of storage, the targets that they open, and how a device opens those that it consists of.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use crate::claims::{Claim, ClaimRequest, ClaimUse, CompositeStorage, StorageIds};
use crate::object_list::ObjectList;
use crate::opening::{Intent, OpenFuture, OpenedDevice, Preparation, TargetMaking};
use crate::{ConnectionSettings, DeviceSpec, Exports, Param, ParamValues, Registry};
use blockhaul_block::{Error, Kind, Result};

/// A target for a backend to open.
#[derive(Debug, Clone)]
pub struct BackendTarget {
    /// The scheme that was typed; empty for bare paths and commands.
    pub scheme: String,
    /// The text after the scheme: percent-decoded, without options, unless the backend has its own
    /// grammar ([`Backend::raw`]); then all of it as typed.
    pub rest: OsString,
    /// For `[ CMD … ]`: the words.
    pub command: Vec<OsString>,
    /// Checked options.
    pub args: ParamValues,
    /// The purpose of opening it.
    pub intent: Intent,
    /// Opens the devices that this one consists of. Storage that can stop the server (plugins) uses
    /// its registry's [`shutdown`](crate::Registry::shutdown).
    pub context: OpenContext,
}

impl BackendTarget {
    /// The text after the scheme, as a path.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(&self.rest)
    }

    /// Claims the storage of this target for its intent, until the claim is dropped. `name` is for
    /// warnings. `shares_writes`: raw bytes may be written beside other writers that allow it.
    ///
    /// # Errors
    /// [`Kind::InUse`] if another device of this process uses the storage in a way that does not
    /// fit. A device that was just closed may still have its claim for moments.
    pub fn claim(&self, ids: StorageIds, name: &str, shares_writes: bool) -> Result<Claim> {
        let Registry { claims, owner, warnings, .. } = self.context.registry();
        let usage = ClaimUse::from_intent(&self.intent);
        let is_image = self.intent.image;
        let request = ClaimRequest { usage, owner: owner.clone(), shares_writes, is_image };
        let mut claim = claims.claim(ids, request, name)?;
        if let Some(warning) = claim.warning.take() {
            log::warn!("{warning}");
            if let Some(warnings) = warnings.upgrade() {
                warnings.add(warning);
            }
        }
        Ok(claim)
    }

    /// The text after the scheme.
    ///
    /// # Errors
    /// [`Kind::Usage`] if it is not UTF-8.
    pub fn text(&self) -> Result<&str> {
        self.rest.to_str().ok_or_else(|| Error::new(Kind::Usage, "the name is not UTF-8"))
    }
}

/// A kind of storage.
pub trait Backend: Send + Sync {
    /// The schemes that it handles; the first is its name.
    fn schemes(&self) -> &'static [&'static str];

    /// The operand after the scheme, for the help: `SIZE`, `PATH`.
    fn operand(&self) -> &'static str;

    /// One line for the help.
    fn summary(&self) -> &'static str;

    /// Shell lines that show its use, for the help. They must work when pasted in an empty
    /// directory, end and succeed; at most 92 columns.
    fn example(&self) -> &'static str {
        ""
    }

    /// Its options.
    fn params(&self) -> &'static [Param] {
        &[]
    }

    /// Whether it parses the text after the scheme itself (URIs).
    fn raw(&self) -> bool {
        false
    }

    /// Whether it runs foreign code in this process, which can run in a separate process instead.
    fn runs_foreign_code(&self) -> bool {
        false
    }

    /// Whether it also accepts undeclared options ([`ParamValues::others`]).
    fn takes_others(&self) -> bool {
        false
    }

    /// What to write instead of `scheme:rest` with an unknown scheme, if this kind of storage knows
    /// what is meant: a phrase for the message.
    fn instead_of(&self, scheme: &str, rest: &str) -> Option<String> {
        let _ = (scheme, rest);
        None
    }

    /// The same kind of storage, whose devices connect to servers with these settings, and ask for these
    /// contexts besides those of this one. `None`: it makes no connections.
    fn connecting(&self, settings: &ConnectionSettings) -> Option<Arc<dyn Backend>> {
        let _ = settings;
        None
    }

    /// Opens a device.
    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice>;

    /// Opens the target of a copy without changing its contents. The facts are those of the
    /// prepared target. Kinds of storage that do not change on open need not implement this.
    fn open_target(&self, target: BackendTarget) -> OpenFuture<(OpenedDevice, Preparation)> {
        let opening = self.open(target);
        Box::pin(async move { Ok((opening.await?, Preparation::default())) })
    }

    /// Whether [`Backend::open_target`] accepts a target that does not exist, and leaves its making to the
    /// [`Preparation`].
    fn target_making(&self, target: &BackendTarget) -> TargetMaking {
        let _ = target;
        TargetMaking::Never
    }

    /// Whether a copy to a target of this kind can be continued with a journal.
    fn can_have_journal(&self) -> bool {
        true
    }

    /// Lists the objects of a service below a name. `None`: the storage is no part of a list.
    fn list(&self, target: &BackendTarget) -> Option<OpenFuture<Box<dyn ObjectList>>> {
        let _ = target;
        None
    }

    /// For servers: opens storage whose clients get separate devices. `None`: all clients share the
    /// device of [`Backend::open`].
    fn exports(&self, target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        let _ = target;
        None
    }
}

/// Maximum nesting of devices: more than a user writes by hand.
const DEPTH_MAX: u8 = 16;

/// Whether devices named in a file, such as the backing file of an image, may be opened. The writer
/// of the file chooses what is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NamePolicy {
    /// None may be opened.
    #[default]
    Refuse,
    /// All may be opened, with the program's permissions.
    Allow,
}

/// What a backend needs to open further devices: the registry, and the name policy. The default has
/// no kinds of storage.
#[derive(Clone, Default)]
pub struct OpenContext {
    registry: Registry,
    /// Nesting depth of this device.
    depth: u8,
}

impl OpenContext {
    /// For a device that the user has described.
    pub fn new(registry: &Registry) -> OpenContext {
        OpenContext { registry: registry.clone(), depth: 0 }
    }

    /// The same with another policy for names in files: for a device whose user decides about them.
    #[must_use]
    pub fn with_names(&self, names: NamePolicy) -> OpenContext {
        let registry = Registry { names, ..self.registry.clone() };
        OpenContext { registry, ..self.clone() }
    }

    /// The same with one more kind of storage, for devices within this one.
    #[must_use]
    pub fn with_backend(&self, backend: Arc<dyn Backend>) -> OpenContext {
        let mut registry = self.registry.clone();
        registry.backends.push(backend);
        OpenContext { registry, ..self.clone() }
    }

    /// The same for one part of a device that consists of several, such as `part 1`.
    #[must_use]
    pub fn for_part(&self, whole: &CompositeStorage, name: impl Into<Arc<str>>) -> OpenContext {
        let registry = self.registry.owned_by(self.registry.owner.part(whole, name));
        OpenContext { registry, ..self.clone() }
    }

    /// All kinds of storage and layers.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Opens a device from a description that is part of the user's own. Call it on a worker.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the description is invalid, or devices are nested too deeply; and errors
    /// of opening the device.
    pub async fn open(&self, description: &str, intent: Intent) -> Result<OpenedDevice> {
        let (spec, inside) = self.inside(description)?;
        self.registry.open_within(&spec, intent, inside).await
    }

    /// Opens the target of a copy like [`OpenContext::open`], without changing its contents until
    /// the [`Preparation`] is run. Call it on a worker.
    ///
    /// # Errors
    /// Those of [`OpenContext::open`].
    pub async fn open_target(
        &self,
        description: &str,
        intent: Intent,
    ) -> Result<(OpenedDevice, Preparation)> {
        let (spec, inside) = self.inside(description)?;
        self.registry.open_target_within(&spec, intent, inside).await
    }

    /// The description of a device of this one, and what that device gets.
    fn inside(&self, description: &str) -> Result<(DeviceSpec, OpenContext)> {
        if self.depth == DEPTH_MAX {
            let text = format!("more than {DEPTH_MAX} devices within one another");
            return Err(Error::new(Kind::Usage, text));
        }
        // The bitmaps of a device within another one are not those of the disk.
        let registry = Registry { bitmaps: Weak::new(), ..self.registry.clone() };
        let inside = OpenContext { depth: self.depth + 1, registry };
        Ok((DeviceSpec::parse(OsStr::new(description))?, inside))
    }

    /// Opens a device named in `file`, if the registry's policy allows it ([`Registry::names`]).
    /// Call it on a worker.
    ///
    /// # Errors
    /// [`Kind::Refused`] if it does not, and those of [`OpenContext::open`].
    pub async fn open_named_in(
        &self,
        file: &str,
        description: &str,
        intent: Intent,
    ) -> Result<OpenedDevice> {
        match self.registry.names {
            NamePolicy::Allow => self.open(description, intent).await,
            NamePolicy::Refuse => {
                let text = format!("{file} names {description:?}, which is not opened");
                Err(Error::new(Kind::Refused, text).because(NameRefused))
            }
        }
    }
}

/// The cause of an error: [`NamePolicy::Refuse`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NameRefused;

impl NameRefused {
    /// Whether it is the cause of an error.
    pub fn caused(error: &Error) -> bool {
        std::error::Error::source(error).is_some_and(|cause| cause.is::<NameRefused>())
    }
}

impl fmt::Display for NameRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("whoever can write the file chooses the name")
    }
}

impl std::error::Error for NameRefused {}

impl fmt::Debug for OpenContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenContext(depth {})", self.depth)
    }
}
