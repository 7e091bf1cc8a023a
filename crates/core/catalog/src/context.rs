//! Devices that consist of other devices: how one opens another.

use std::ffi::OsStr;
use std::fmt;

use crate::opening::{Intent, Opened, Preparation};
use crate::{Registry, Spec};
use blockhaul_block::{Error, Kind, Result};

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

    /// All kinds of storage and layers.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Opens a device from a description that is part of the user's own. Call it on a worker.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the description is invalid, or devices are nested too deeply; and errors
    /// of opening the device.
    pub async fn open(&self, description: &str, intent: Intent) -> Result<Opened> {
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
    ) -> Result<(Opened, Preparation)> {
        let (spec, inside) = self.inside(description)?;
        self.registry.open_target_within(&spec, intent, inside).await
    }

    /// The description of a device of this one, and what that device gets.
    fn inside(&self, description: &str) -> Result<(Spec, OpenContext)> {
        if self.depth == DEPTH_MAX {
            let text = format!("more than {DEPTH_MAX} devices within one another");
            return Err(Error::new(Kind::Usage, text));
        }
        let inside = OpenContext { depth: self.depth + 1, ..self.clone() };
        Ok((Spec::parse(OsStr::new(description))?, inside))
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
    ) -> Result<Opened> {
        match self.registry.names {
            NamePolicy::Allow => self.open(description, intent).await,
            NamePolicy::Refuse => {
                let text = format!(
                    "{file} names {description:?}, which is not opened: whoever can write the file chooses \
                     the name"
                );
                Err(Error::new(Kind::Refused, text))
            }
        }
    }
}

impl fmt::Debug for OpenContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenContext(depth {})", self.depth)
    }
}
