//! Devices that consist of other devices: how one is opened from within another.

use std::ffi::OsStr;
use std::fmt;

use crate::opening::{Intent, Opened};
use crate::{Registry, Spec};
use blockhaul_block::{Error, Kind, Result};

/// Most devices within one another: more than anybody describes by hand.
const DEPTH_MAX: u8 = 16;

/// Whether devices may be opened that a file names, such as the backing file of an image. Whoever can write
/// the file chooses what is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NamePolicy {
    /// None is opened.
    #[default]
    Refuse,
    /// All are, with all that the program may open.
    Allow,
}

/// What a backend needs to open further devices: the kinds of storage there are, and what may be named. The
/// default knows no kind of storage.
#[derive(Clone, Default)]
pub struct OpenContext {
    registry: Registry,
    /// Devices that this one is within.
    depth: u8,
}

impl OpenContext {
    /// For a device that the user has described.
    pub fn new(registry: &Registry) -> OpenContext {
        OpenContext { registry: registry.clone(), depth: 0 }
    }

    /// The kinds of storage and layers there are.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Opens a device by a description that is part of the user's own. Call it on a worker.
    ///
    /// # Errors
    /// [`Kind::Usage`] where the description is wrong, or too many devices are within one another; and
    /// what opening the device gives.
    pub async fn open(&self, description: &str, intent: Intent) -> Result<Opened> {
        if self.depth == DEPTH_MAX {
            let text = format!("more than {DEPTH_MAX} devices within one another");
            return Err(Error::new(Kind::Usage, text));
        }
        let inside = OpenContext { depth: self.depth + 1, ..self.clone() };
        let spec = Spec::parse(OsStr::new(description))?;
        self.registry.open_within(&spec, intent, inside).await
    }

    /// Opens a device that `file` names, where the registry's policy allows it
    /// ([`Registry::names`]). Call it on a worker.
    ///
    /// # Errors
    /// [`Kind::Refused`] where it does not, and those of [`OpenContext::open`].
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
