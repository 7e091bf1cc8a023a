//! The control plane: a description in, a device out.

use std::ffi::OsString;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use crate::emulate::emulate;
use crate::exports::{Layered, gated};
use crate::{
    Args, Device, Error, Exports, Kind, Param, Result, Spec, fence, parse_options, percent_decode,
};

/// What a device is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Intent {
    /// It will be written.
    pub write: bool,
    /// It is the target of a copy of this many bytes: made, or made larger, where it can be.
    pub target_size: Option<u64>,
    /// The copy may be shorter, and is written from the front: what can grow begins empty and is as
    /// long as what was written. Reads behind that are not answered.
    pub grows: bool,
    /// Whether data goes past the page cache, for devices that have one.
    pub direct: Direct,
}

/// Whether data goes past the page cache (O_DIRECT).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direct {
    /// Through the page cache.
    #[default]
    Off,
    /// Past it where that can be done, but for reads of what is there.
    Auto,
    /// Past it, or the device is not opened.
    On,
}

impl Intent {
    /// To be read.
    pub const READ: Intent =
        Intent { write: false, target_size: None, grows: false, direct: Direct::Off };
    /// To be read and written.
    pub const WRITE: Intent = Intent { write: true, ..Intent::READ };

    /// To be the target of a copy of `size` bytes.
    pub fn target(size: u64) -> Intent {
        Intent { target_size: Some(size), ..Intent::WRITE }
    }

    /// To be the target of a copy of unknown length, of at most `most` bytes.
    pub fn growing(most: u64) -> Intent {
        Intent { grows: true, ..Intent::target(most) }
    }

    /// The same, with data going past the page cache or not.
    #[must_use]
    pub fn direct(self, direct: Direct) -> Intent {
        Intent { direct, ..self }
    }
}

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
}

/// A device that is being opened; runs on a worker.
pub type Opening<T> = Pin<Box<dyn Future<Output = Result<T>>>>;

/// An open device and the way to more handles on the same storage.
pub struct Opened {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Opens a further handle, for another lane. `None`: all lanes share the device.
    pub more: Option<Arc<dyn Another>>,
}

impl From<Arc<dyn Device>> for Opened {
    fn from(device: Arc<dyn Device>) -> Opened {
        Opened { device, more: None }
    }
}

/// Opens further handles on storage that is open already.
pub trait Another: Send + Sync {
    /// A further handle; to be called on the worker that will use it.
    fn another(&self) -> Opening<Arc<dyn Device>>;
}

/// A kind of storage.
pub trait Backend: Sync {
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

    /// Whether it takes options of any other name, too ([`Args::others`]).
    fn takes_others(&self) -> bool {
        false
    }

    /// Opens a device.
    fn open(&self, target: Target) -> Opening<Opened>;

    /// For servers: opens storage whose clients each get devices of their own. `None`: all clients
    /// share the device of [`Backend::open`].
    fn exports(&self, target: &Target) -> Option<Opening<Arc<dyn Exports>>> {
        let _ = target;
        None
    }
}

/// A kind of layer.
pub trait LayerKind: Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// One line for the help.
    fn summary(&self) -> &'static str;

    /// Paragraphs for the manual, in Markdown, apart by empty lines; may be empty.
    fn manual(&self) -> &'static str {
        ""
    }

    /// Lines for a shell which show its use, for help and manual. They can be pasted as they are in an
    /// empty folder, come to an end and succeed; of 92 columns at most.
    fn example(&self) -> &'static str {
        ""
    }

    /// Its options.
    fn params(&self) -> &'static [Param];

    /// Those of its options that can be changed while requests pass ([`Layer::change`]).
    fn changeable(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether it shows a part or a form of what is there already. Then a copy through it does not
    /// empty the file below first, nor make it as large as the source.
    fn needs_content(&self) -> bool {
        false
    }

    /// Makes a layer with these options. Handles that it wraps share what the layer keeps (a rate).
    fn configure(&self, args: &Args) -> Result<Arc<dyn Layer>>;
}

/// A layer with its options.
pub trait Layer: Send + Sync {
    /// Puts the layer over a device.
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>>;

    /// Puts the layer over a device for a stack; runs on a worker. For layers that must look at the
    /// device first, or may open it again.
    fn open(self: Arc<Self>, below: Below) -> Opening<Arc<dyn Device>> {
        Box::pin(std::future::ready(self.wrap(below.device)))
    }

    /// Takes new values for options that [`LayerKind::changeable`] names, for requests that come and those
    /// that wait in the layer; `args` has all options. An error changes nothing.
    fn change(&self, args: &Args) -> Result<()> {
        let _ = args;
        Ok(())
    }

    /// For layers that decide about clients instead of requests: what they may open through it.
    /// `None`: it has nothing to do with clients.
    fn gate(&self, inner: Arc<dyn Exports>) -> Option<Arc<dyn Exports>> {
        let _ = inner;
        None
    }

    /// Whether that is all it does ([`Layer::gate`]): over several exports it stands before all.
    fn is_gate(&self) -> bool {
        false
    }
}

/// What a layer in a stack is put over.
pub struct Below {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Opens the device again, with the layers that it has; none where there is nothing to open.
    pub reopen: Option<Arc<dyn Another>>,
    /// For a device that was opened for one client: the name that the client asked for. `None`: all
    /// handles that the layer is put over are on the same storage.
    pub export: Option<String>,
}

/// All kinds of storage and layers that a program knows.
#[derive(Clone, Default)]
pub struct Registry {
    /// Kinds of storage.
    pub backends: Vec<&'static dyn Backend>,
    /// Kinds of layers.
    pub layers: Vec<&'static dyn LayerKind>,
    /// Scheme that takes bare paths.
    pub path: &'static str,
    /// Scheme that takes `[ CMD … ]`.
    pub command: &'static str,
}

impl Registry {
    /// The kind of storage behind a scheme.
    pub fn backend(&self, scheme: &str) -> Result<&'static dyn Backend> {
        let found = self.backends.iter().find(|backend| backend.schemes().contains(&scheme));
        found.copied().ok_or_else(|| {
            let known: Vec<_> =
                self.backends.iter().flat_map(|b| b.schemes().iter().copied()).collect();
            let text = format!(
                "unknown scheme {scheme:?}; known are {}; for a file whose name has a colon write \
                 file:PATH or ./PATH",
                known.join(", ")
            );
            Error::new(Kind::Usage, text)
        })
    }

    /// Makes a layer from `NAME[?key=value&…]`.
    pub fn layer(&self, text: &str) -> Result<Arc<dyn Layer>> {
        let (name, options) = text.split_once('?').unwrap_or((text, ""));
        let kind = self.layer_kind(name)?;
        kind.configure(&Args::check(name, kind.params(), &parse_options(options)?)?)
    }

    /// The kind of layer of this name.
    pub(crate) fn layer_kind(&self, name: &str) -> Result<&'static dyn LayerKind> {
        self.layers.iter().find(|kind| kind.name() == name).copied().ok_or_else(|| {
            let known: Vec<_> = self.layers.iter().map(|kind| kind.name()).collect();
            let text = format!("unknown layer {name:?}; known are {}", known.join(", "));
            Error::new(Kind::Usage, text)
        })
    }

    /// Checks a description without opening anything.
    pub fn target(&self, spec: &Spec, intent: Intent) -> Result<(&'static dyn Backend, Target)> {
        let plain = |scheme: &'static str, rest: OsString, command| {
            let backend = self.backend(scheme)?;
            let args = Args::check(scheme, backend.params(), &[])?;
            Ok((backend, Target { scheme: String::new(), rest, command, args, intent }))
        };
        match spec {
            Spec::Path(path) => plain(self.path, path.clone().into_os_string(), Vec::new()),
            Spec::Command(words) => plain(self.command, OsString::new(), words.clone()),
            Spec::Pipe => {
                let text = "- is a pipe and cannot be used here; copy reads from and writes to it";
                Err(Error::new(Kind::Usage, text))
            }
            Spec::Scheme { scheme, rest } => {
                let backend = self.backend(scheme)?;
                let (rest, options) = match backend.raw() {
                    true => (rest.clone(), Vec::new()),
                    false => {
                        let (rest, options) = rest.split_once('?').unwrap_or((rest, ""));
                        (percent_decode(rest)?, parse_options(options)?)
                    }
                };
                let args = match backend.takes_others() {
                    true => Args::check_known(scheme, backend.params(), &options)?,
                    false => Args::check(scheme, backend.params(), &options)?,
                };
                let (scheme, rest, command) = (scheme.clone(), rest.into(), Vec::new());
                Ok((backend, Target { scheme, rest, command, args, intent }))
            }
        }
    }

    /// Opens a device with layers over it, the last one outermost. Call it on a worker.
    pub async fn open(
        &self,
        spec: &Spec,
        layers: Vec<Arc<dyn Layer>>,
        intent: Intent,
    ) -> Result<Stack> {
        let (backend, target) = self.target(spec, intent)?;
        let Opened { device, more } = backend.open(target).await?;
        let device = assemble(device, &more, &layers, None).await?;
        Ok(Stack { device, more, layers })
    }

    /// Opens storage whose clients each get devices of their own, with layers over each; `None` where
    /// all share one device ([`Registry::open`]). Call it on a worker.
    pub async fn exports(
        &self,
        spec: &Spec,
        layers: &[Arc<dyn Layer>],
        intent: Intent,
    ) -> Result<Option<Arc<dyn Exports>>> {
        let (backend, target) = self.target(spec, intent)?;
        let Some(opening) = backend.exports(&target) else { return Ok(None) };
        let inner = opening.await?;
        let layered: Arc<dyn Exports> = Arc::new(Layered { inner, layers: layers.into() });
        Ok(Some(gated(layered.clone(), layers).unwrap_or(layered)))
    }
}

/// An open device, fenced, with its layers, and the way to more handles.
#[derive(Clone)]
pub struct Stack {
    device: Arc<dyn Device>,
    more: Option<Arc<dyn Another>>,
    layers: Vec<Arc<dyn Layer>>,
}

impl Stack {
    /// A stack over a device that is there already: every handle is this one.
    pub fn over(device: Arc<dyn Device>) -> Result<Stack> {
        Ok(Stack { device: fence(emulate(device)), more: None, layers: Vec::new() })
    }

    /// The first handle.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Whether further handles are connections of their own.
    pub fn has_more(&self) -> bool {
        self.more.is_some()
    }

    /// A further handle for another lane; the first one again where all lanes share it.
    pub async fn another(&self) -> Result<Arc<dyn Device>> {
        match &self.more {
            None => Ok(self.device.clone()),
            Some(more) => assemble(more.another().await?, &self.more, &self.layers, None).await,
        }
    }
}

/// The device with its layers, the first innermost, and the fence before all.
pub(crate) async fn assemble(
    device: Arc<dyn Device>,
    more: &Option<Arc<dyn Another>>,
    layers: &[Arc<dyn Layer>],
    export: Option<&str>,
) -> Result<Arc<dyn Device>> {
    Ok(fence(emulate(pile(device, more, layers, export).await?)))
}

async fn pile(
    mut device: Arc<dyn Device>,
    more: &Option<Arc<dyn Another>>,
    layers: &[Arc<dyn Layer>],
    export: Option<&str>,
) -> Result<Arc<dyn Device>> {
    for (index, layer) in layers.iter().enumerate() {
        let reopen = more.clone().map(|more| {
            Arc::new(Again { more, layers: layers[..index].to_vec() }) as Arc<dyn Another>
        });
        let export = export.map(String::from);
        device = layer.clone().open(Below { device: emulate(device), reopen, export }).await?;
    }
    Ok(device)
}

/// The way to open the lower part of a stack again.
struct Again {
    more: Arc<dyn Another>,
    layers: Vec<Arc<dyn Layer>>,
}

impl Another for Again {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let (more, layers) = (self.more.clone(), self.layers.clone());
        Box::pin(async move {
            let device = more.another().await?;
            Ok(emulate(pile(device, &Some(more), &layers, None).await?))
        })
    }
}

impl Target {
    /// What stands behind the scheme, as a path.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(&self.rest)
    }

    /// What stands behind the scheme, as text.
    pub fn text(&self) -> Result<&str> {
        self.rest.to_str().ok_or_else(|| Error::new(Kind::Usage, "the name is not UTF-8"))
    }
}
