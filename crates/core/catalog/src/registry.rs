//! The control plane: turns descriptions into devices.

use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Weak};

use crate::backend::{Backend, BackendTarget};
use crate::claims::{ClaimOwner, Claims, Warnings};
use crate::foreign;
use crate::gate::{AnyKind, AnyLayer, GateKind};
use crate::image_bitmaps::BitmapSlot;
use crate::layer::{Layer, LayerKind};
use crate::near::nearest;
use crate::opening::{Intent, OpenedDevice, Preparation, TargetMaking};
use crate::stack::{LayeredExports, Stack};
use crate::{
    ConnectionSettings, DeviceSpec, Exports, NamePolicy, OpenContext, ParamValues, Shutdown,
    parse_options, percent_decode,
};
use blockhaul_block::{DeviceExt as _, Error, Kind, Result};

/// The scheme of files of other machines.
const SSH: &str = "ssh";

/// What a file of another machine is called.
fn of_host(host: &str, path: &str) -> String {
    format!("for a file of the machine {host} write {SSH}://{host}{path}")
}

/// All kinds of storage and layers of a program.
#[derive(Clone)]
pub struct Registry {
    /// Kinds of storage.
    pub backends: Vec<Arc<dyn Backend>>,
    /// Kinds of layers.
    pub layers: Vec<&'static LayerKind>,
    /// Kinds of gates, which `--layer` puts before exports.
    pub gates: Vec<&'static GateKind>,
    /// The scheme of bare paths.
    pub path: &'static str,
    /// The scheme of `[ CMD … ]`.
    pub command: &'static str,
    /// Lets the storage and gates of this registry stop the server.
    pub shutdown: Shutdown,
    /// Whether devices named in files may be opened.
    pub names: NamePolicy,
    /// The storages that are open.
    pub claims: Arc<Claims>,
    /// The owner of the devices that this registry opens.
    pub owner: ClaimOwner,
    /// Where warnings of claims go besides the log, as long as it exists.
    pub warnings: Weak<Warnings>,
    /// For the bitmaps of an image, as long as it exists: who opens the image keeps them right.
    pub bitmaps: Weak<BitmapSlot>,
}

impl Default for Registry {
    /// Nothing can be opened. Storages are claimed in the table of the process.
    fn default() -> Registry {
        Registry {
            backends: Vec::new(),
            layers: Vec::new(),
            gates: Vec::new(),
            path: "",
            command: "",
            shutdown: Shutdown::default(),
            names: NamePolicy::default(),
            claims: Claims::for_process(),
            owner: ClaimOwner::default(),
            warnings: Weak::new(),
            bitmaps: Weak::new(),
        }
    }
}

impl Registry {
    /// The same registry for the devices of another owner.
    #[must_use]
    pub fn owned_by(&self, owner: ClaimOwner) -> Registry {
        Registry { owner, ..self.clone() }
    }

    /// The same registry, for another owner if it has none.
    fn or_owned_by(&self, label: impl FnOnce() -> String) -> Registry {
        if self.owner.is_named() { self.clone() } else { self.owned_by(ClaimOwner::new(label())) }
    }

    /// The same registry for the command that this process runs ([`ClaimOwner::command`]).
    #[must_use]
    pub fn for_command(self) -> Registry {
        Registry { owner: ClaimOwner::command(), ..self }
    }

    /// The same registry, whose devices connect to servers with these settings. Contexts are added to those
    /// that this registry asks for.
    #[must_use]
    pub fn connecting(mut self, settings: &ConnectionSettings) -> Registry {
        for backend in &mut self.backends {
            if let Some(connecting) = backend.connecting(settings) {
                *backend = connecting;
            }
        }
        self
    }

    /// The kind of storage of a scheme.
    ///
    /// # Errors
    /// [`Kind::Usage`] with the known ones, if there is none.
    pub fn backend(&self, scheme: &str) -> Result<&Arc<dyn Backend>> {
        self.answering(scheme, "")
    }

    /// The same; `rest` is the text after the scheme, for messages.
    fn answering(&self, scheme: &str, rest: &str) -> Result<&Arc<dyn Backend>> {
        let found = self.backends.iter().find(|backend| backend.schemes().contains(&scheme));
        found.ok_or_else(|| {
            let text = format!(
                "unknown scheme {scheme:?}; {}; for a file whose name has a colon write file:PATH or \
                 ./PATH",
                self.instead_of(scheme, rest)
            );
            Error::new(Kind::Usage, text)
        })
    }

    /// What the user may mean by a path that does not exist.
    fn meant_by(&self, path: &Path) -> Option<String> {
        let text = path.to_str()?;
        let named = self.backends.iter().find(|backend| backend.schemes().contains(&text));
        if let Some(backend) = named.filter(|backend| !backend.operand().is_empty()) {
            return Some(format!("for the device write {text}:{}", backend.operand()));
        }
        // As scp writes it.
        let remote = text.split_once(":/").filter(|(host, _)| host.contains('@'));
        if let Some((host, path)) = remote.filter(|_| self.schemes().any(|scheme| scheme == SSH)) {
            return Some(of_host(host, &format!("/{path}")));
        }
        let (file, options) = text.split_once('?')?;
        let there = options.contains('=') && Path::new(file).exists();
        there.then(|| format!("options need the scheme: write {}:{text}", self.path))
    }

    /// What the user may mean by an unknown scheme.
    fn instead_of(&self, scheme: &str, rest: &str) -> String {
        let meant = self.backends.iter().find_map(|backend| backend.instead_of(scheme, rest));
        if let Some(meant) = meant {
            return meant;
        }
        let layers = self.layers_and_gates();
        let is_layer = |name: &str| {
            format!(
                "{name} is a layer: use --layer (serve), or --source-layer or --target-layer (copy)"
            )
        };
        if layers.iter().any(|kind| kind.name() == scheme) {
            return is_layer(scheme);
        }
        if let Some(meant) = foreign::instead_of(scheme) {
            return meant.to_string();
        }
        let known: Vec<_> = self.schemes().collect();
        if known.contains(&SSH)
            && rest.starts_with('/')
            && nearest(scheme, known.iter().copied()).is_none()
        {
            return of_host(scheme, rest);
        }
        let layer = || nearest(scheme, layers.iter().map(AnyKind::name));
        match nearest(scheme, known.iter().copied()) {
            Some(near) => format!("did you mean {near}?"),
            None => layer().map_or_else(|| format!("known are {}", known.join(", ")), is_layer),
        }
    }

    /// The schemes that a user can write.
    fn schemes(&self) -> impl Iterator<Item = &'static str> {
        let all = self.backends.iter().flat_map(|backend| backend.schemes().iter().copied());
        all.filter(|scheme| *scheme != self.command)
    }

    /// Makes a layer from `NAME[?key=value&…]`.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the name or an option is unknown, a value is invalid, or it is a gate;
    /// and errors of what the layer needs (a file, a directory).
    pub fn layer(&self, text: &str) -> Result<Arc<dyn Layer>> {
        match self.layer_or_gate(text)? {
            AnyLayer::Layer(layer) => Ok(layer),
            AnyLayer::Gate(_) => {
                let name = text.split_once('?').map_or(text, |(name, _)| name);
                let text =
                    format!("{name} decides about clients, and cannot be put over a device here");
                Err(Error::new(Kind::Usage, text))
            }
        }
    }

    /// Makes a layer or a gate from `NAME[?key=value&…]`.
    ///
    /// # Errors
    /// Like [`Registry::layer`].
    pub fn layer_or_gate(&self, text: &str) -> Result<AnyLayer> {
        let (name, options) = text.split_once('?').unwrap_or((text, ""));
        let kind = self.kind(name)?;
        let args = ParamValues::check(name, kind.params(), &parse_options(options)?)?;
        kind.configure(&args, &self.shutdown)
    }

    /// All kinds of layers and gates, by name.
    pub fn layers_and_gates(&self) -> Vec<AnyKind> {
        let layers = self.layers.iter().copied().map(AnyKind::Layer);
        let mut all: Vec<_> = layers.chain(self.gates.iter().copied().map(AnyKind::Gate)).collect();
        all.sort_by_key(AnyKind::name);
        all
    }

    /// The kind of layer or gate of this name.
    ///
    /// # Errors
    /// [`Kind::Usage`] with the known ones, if there is none.
    pub fn kind(&self, name: &str) -> Result<AnyKind> {
        let all = self.layers_and_gates();
        all.iter().find(|kind| kind.name() == name).copied().ok_or_else(|| {
            let known: Vec<_> = all.iter().map(AnyKind::name).collect();
            let meant = match nearest(name, known.iter().copied()) {
                _ if self.schemes().any(|scheme| scheme == name) => {
                    format!("{name} is a device: write {name}:… in place of the device")
                }
                Some(near) => format!("did you mean {near}?"),
                None => foreign::instead_of(name)
                    .map_or_else(|| format!("known are {}", known.join(", ")), str::to_string),
            };
            Error::new(Kind::Usage, format!("unknown layer {name:?}; {meant}"))
        })
    }

    /// Checks a description without opening anything.
    ///
    /// # Errors
    /// [`Kind::Usage`] if its scheme or an option is unknown, or a value is invalid.
    pub fn target(
        &self,
        spec: &DeviceSpec,
        intent: Intent,
    ) -> Result<(&Arc<dyn Backend>, BackendTarget)> {
        self.target_in(spec, intent, OpenContext::new(self))
    }

    fn target_in(
        &self,
        spec: &DeviceSpec,
        intent: Intent,
        context: OpenContext,
    ) -> Result<(&Arc<dyn Backend>, BackendTarget)> {
        let plain = |scheme: &'static str, rest: OsString, command, context| {
            let backend = self.backend(scheme)?;
            let args = ParamValues::check(scheme, backend.params(), &[])?;
            Ok((
                backend,
                BackendTarget { scheme: String::new(), rest, command, args, intent, context },
            ))
        };
        match spec {
            DeviceSpec::Path(path) => {
                plain(self.path, path.clone().into_os_string(), Vec::new(), context)
            }
            DeviceSpec::Command(words) => {
                plain(self.command, OsString::new(), words.clone(), context)
            }
            DeviceSpec::Pipe => {
                let text = "- is a pipe and cannot be used here; copy reads from and writes to it";
                Err(Error::new(Kind::Usage, text))
            }
            DeviceSpec::Scheme { scheme, .. } if *scheme == self.command => {
                let text = format!("unknown scheme {scheme:?}; write the command as [ CMD ARG… ]");
                Err(Error::new(Kind::Usage, text))
            }
            DeviceSpec::Scheme { scheme, rest } => {
                let backend = self.answering(scheme, rest)?;
                let (rest, options) = if backend.raw() {
                    (rest.clone(), Vec::new())
                } else {
                    let (rest, options) = rest.split_once('?').unwrap_or((rest, ""));
                    (percent_decode(rest)?, parse_options(options)?)
                };
                let args = if backend.takes_others() {
                    ParamValues::check_known(scheme, backend.params(), &options)
                } else {
                    ParamValues::check(scheme, backend.params(), &options)
                };
                let args = args.map_err(|error| of_outer(&rest, error))?;
                let scheme = scheme.clone();
                let rest = rest.into();
                let command = Vec::new();
                Ok((backend, BackendTarget { scheme, rest, command, args, intent, context }))
            }
        }
    }

    /// Opens a device with layers over it, the last one outermost. Call it on a worker.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the description is invalid; [`Kind::InUse`] if another device of this process
    /// uses the storage; and errors of the storage and the layers.
    pub async fn open(
        &self,
        spec: &DeviceSpec,
        layers: Vec<Arc<dyn Layer>>,
        intent: Intent,
    ) -> Result<Stack> {
        let intent = below(&layers, intent);
        let opened = self.open_within(spec, intent, OpenContext::new(self)).await?;
        Stack::new(opened, layers, intent).await
    }

    /// Opens a device without layers; it may open others through `context`.
    pub(crate) async fn open_within(
        &self,
        spec: &DeviceSpec,
        intent: Intent,
        context: OpenContext,
    ) -> Result<OpenedDevice> {
        let (backend, target) = self.target_in(spec, intent, context)?;
        backend.open(target).await.map_err(|error| self.with_hint(spec, error))
    }

    /// Opens the target of a copy without layers; it may open others through `context`.
    pub(crate) async fn open_target_within(
        &self,
        spec: &DeviceSpec,
        intent: Intent,
        context: OpenContext,
    ) -> Result<(OpenedDevice, Preparation)> {
        let (backend, target) = self.target_in(spec, intent, context)?;
        backend.open_target(target).await.map_err(|error| self.with_hint(spec, error))
    }

    /// Whether the preparation of [`Registry::open_target`] makes the target.
    pub fn target_making(&self, spec: &DeviceSpec) -> TargetMaking {
        let target = self.target(spec, Intent::TARGET);
        target.map_or(TargetMaking::Never, |(backend, target)| backend.target_making(&target))
    }

    /// Whether a copy to this target can be continued with a journal.
    pub fn can_have_journal(&self, spec: &DeviceSpec) -> bool {
        let target = self.target(spec, Intent::TARGET);
        target.is_ok_and(|(backend, _)| backend.can_have_journal())
    }

    /// Opens the target of a copy like [`Registry::open`], but does not change its contents until
    /// the [`Preparation`] is run.
    ///
    /// # Errors
    /// Those of [`Registry::open`], or if the target cannot be written.
    pub async fn open_target(
        &self,
        spec: &DeviceSpec,
        layers: Vec<Arc<dyn Layer>>,
        intent: Intent,
    ) -> Result<(Stack, Preparation)> {
        let context = OpenContext::new(self);
        let (opened, preparation) = self.open_target_within(spec, intent, context).await?;
        Ok((Stack::new(opened, layers, intent).await?, preparation))
    }

    /// Creates a disk of `size` bytes, in place of one that exists, and flushes it. Runs on a worker.
    ///
    /// # Errors
    /// If the disk cannot be created.
    pub async fn create(&self, spec: &DeviceSpec, size: u64) -> Result<()> {
        let (stack, preparation) = self.open_target(spec, Vec::new(), Intent::target(size)).await?;
        preparation.run().await?;
        stack.device().flush().await
    }

    /// The error, with what the user may mean if a path does not exist.
    fn with_hint(&self, spec: &DeviceSpec, error: Error) -> Error {
        match (spec, error.kind()) {
            (DeviceSpec::Path(path), Kind::NotFound) => match self.meant_by(path) {
                Some(hint) => Error::new(Kind::Usage, format!("{error}; {hint}")),
                None => error,
            },
            _ => error,
        }
    }

    /// Opens storage whose clients get separate devices, with layers over each; `None` if all share
    /// one device ([`Registry::open`]). Call it on a worker.
    ///
    /// # Errors
    /// Those of [`Registry::open`].
    pub async fn exports(
        &self,
        spec: &DeviceSpec,
        layers: &[Arc<dyn Layer>],
        intent: Intent,
    ) -> Result<Option<Arc<dyn Exports>>> {
        // The clients share raw bytes, whatever handles they have.
        let context = OpenContext::new(&self.or_owned_by(|| format!("the exports of {spec}")));
        let intent = below(layers, intent);
        let (backend, target) = self.target_in(spec, intent, context)?;
        let Some(opening) = backend.exports(&target) else { return Ok(None) };
        let inner = opening.await?;
        Ok(Some(Arc::new(LayeredExports { inner, layers: layers.into(), intent })))
    }
}

/// The intent for a device that is read through these layers.
fn below(layers: &[Arc<dyn Layer>], intent: Intent) -> Intent {
    let reads_image = !intent.write && layers.iter().any(|layer| layer.reads_image());
    Intent { image: intent.image || reads_image, ..intent }
}

/// An error of the options of a device whose inner device is a URI: a `?` of the URI began them.
fn of_outer(inner: &str, error: Error) -> Error {
    if !inner.contains("://") {
        return error;
    }
    error.with_remedy("in a device inside another, write %3f for ?")
}
