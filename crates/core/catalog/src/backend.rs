//! Kinds of storage, and the targets that they open.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use crate::opening::{Intent, Opened, Opening, Preparation};
use crate::{Args, Exports, OpenContext, Param};
use blockhaul_block::{Error, Kind, Result};

/// A target for a backend to open.
#[derive(Debug, Clone)]
pub struct Target {
    /// The scheme that was typed; empty for bare paths and commands.
    pub scheme: String,
    /// The text after the scheme: percent-decoded, without options, unless the backend has its own
    /// grammar ([`Backend::raw`]); then all of it as typed.
    pub rest: OsString,
    /// For `[ CMD … ]`: the words.
    pub command: Vec<OsString>,
    /// Checked options.
    pub args: Args,
    /// The purpose of opening it.
    pub intent: Intent,
    /// Opens the devices that this one consists of. Storage that can stop the server (plugins) uses
    /// its registry's [`shutdown`](crate::Registry::shutdown).
    pub context: OpenContext,
}

impl Target {
    /// The text after the scheme, as a path.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(&self.rest)
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

    /// Whether it also accepts undeclared options ([`Args::others`]).
    fn takes_others(&self) -> bool {
        false
    }

    /// What to write instead of `scheme:rest` with an unknown scheme, if this kind of storage knows
    /// what is meant: a phrase for the message.
    fn instead_of(&self, scheme: &str, rest: &str) -> Option<String> {
        let _ = (scheme, rest);
        None
    }

    /// Opens a device.
    fn open(&self, target: Target) -> Opening<Opened>;

    /// Opens the target of a copy without changing its contents. The facts are those of the
    /// prepared target. Kinds of storage that do not change on open need not implement this.
    fn open_target(&self, target: Target) -> Opening<(Opened, Preparation)> {
        let opening = self.open(target);
        Box::pin(async move { Ok((opening.await?, Preparation::default())) })
    }

    /// For servers: opens storage whose clients get separate devices. `None`: all clients share the
    /// device of [`Backend::open`].
    fn exports(&self, target: &Target) -> Option<Opening<Arc<dyn Exports>>> {
        let _ = target;
        None
    }
}
