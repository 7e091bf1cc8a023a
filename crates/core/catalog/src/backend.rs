//! Kinds of storage, and what they are asked to open.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use crate::opening::{Intent, Opened, Opening, Preparation};
use crate::{Args, Exports, OpenContext, Param};
use blockhaul_block::{Error, Kind, Result};

/// What a backend is asked to open.
#[derive(Debug, Clone)]
pub struct Target {
    /// The scheme under which it was asked for; empty for bare paths and commands.
    pub scheme: String,
    /// What stands behind the scheme: percent-decoded, without options, unless the backend has a
    /// grammar of its own ([`Backend::raw`]); then all of it as typed.
    pub rest: OsString,
    /// For `[ CMD … ]`: the words.
    pub command: Vec<OsString>,
    /// Checked options.
    pub args: Args,
    /// What it is opened for.
    pub intent: Intent,
    /// Opens the devices that this one consists of. Storage that can ask for the end of the server (plugins) does so
    /// by its registry's [`shutdown`](crate::Registry::shutdown).
    pub context: OpenContext,
}

impl Target {
    /// What stands behind the scheme, as a path.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(&self.rest)
    }

    /// What stands behind the scheme, as text.
    ///
    /// # Errors
    /// [`Kind::Usage`] where it is not UTF-8.
    pub fn text(&self) -> Result<&str> {
        self.rest.to_str().ok_or_else(|| Error::new(Kind::Usage, "the name is not UTF-8"))
    }
}

/// A kind of storage.
pub trait Backend: Send + Sync {
    /// The schemes it answers to; the first is its name.
    fn schemes(&self) -> &'static [&'static str];

    /// What stands behind the scheme, for the help: `SIZE`, `PATH`.
    fn operand(&self) -> &'static str;

    /// One line for the help.
    fn summary(&self) -> &'static str;

    /// Lines for a shell which show its use, for the help. They can be pasted as they are in an empty
    /// folder, come to an end and succeed; of 92 columns at most.
    fn example(&self) -> &'static str {
        ""
    }

    /// Its options.
    fn params(&self) -> &'static [Param] {
        &[]
    }

    /// Whether it parses what stands behind the scheme by itself (URIs).
    fn raw(&self) -> bool {
        false
    }

    /// Whether it runs foreign code in this process, which may as well run in one of its own.
    fn runs_foreign_code(&self) -> bool {
        false
    }

    /// Whether it takes options of any other name, too ([`Args::others`]).
    fn takes_others(&self) -> bool {
        false
    }

    /// What to write instead of `scheme:rest`, whose scheme nobody answers to, where this kind of storage
    /// knows what is meant: a phrase for the message.
    fn instead_of(&self, scheme: &str, rest: &str) -> Option<String> {
        let _ = (scheme, rest);
        None
    }

    /// Opens a device.
    fn open(&self, target: Target) -> Opening<Opened>;

    /// Opens the target of a copy without changing what it holds. The facts are those of the prepared
    /// target. Kinds of storage that opening does not change need not implement this.
    fn open_target(&self, target: Target) -> Opening<(Opened, Preparation)> {
        let opening = self.open(target);
        Box::pin(async move { Ok((opening.await?, Preparation::default())) })
    }

    /// For servers: opens storage whose clients each get devices of their own. `None`: all clients
    /// share the device of [`Backend::open`].
    fn exports(&self, target: &Target) -> Option<Opening<Arc<dyn Exports>>> {
        let _ = target;
        None
    }
}
