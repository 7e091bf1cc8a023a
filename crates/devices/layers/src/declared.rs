//! How the layers of this crate are declared: a constant with what help, manual and parser need, and
//! a function that makes the layer.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{Args, Below, Layer, LayerKind, Opening, Param, ParamKind};

/// The declaration of a layer.
pub struct Declared {
    pub(crate) name: &'static str,
    pub(crate) summary: &'static str,
    pub(crate) manual: &'static str,
    pub(crate) example: &'static str,
    pub(crate) needs_content: bool,
    pub(crate) params: &'static [Param],
    pub(crate) configure: fn(&Args) -> Result<Arc<dyn Layer>>,
}

impl LayerKind for Declared {
    fn name(&self) -> &'static str {
        self.name
    }

    fn summary(&self) -> &'static str {
        self.summary
    }

    fn manual(&self) -> &'static str {
        self.manual
    }

    fn example(&self) -> &'static str {
        self.example
    }

    fn params(&self) -> &'static [Param] {
        self.params
    }

    fn needs_content(&self) -> bool {
        self.needs_content
    }

    fn configure(&self, args: &Args) -> Result<Arc<dyn Layer>> {
        (self.configure)(args)
    }
}

/// A layer whose `wrap` is a function.
pub(crate) fn layer(
    wrap: impl Fn(Arc<dyn Device>) -> Result<Arc<dyn Device>> + Send + Sync + 'static,
) -> Result<Arc<dyn Layer>> {
    Ok(Arc::new(Wrap(wrap)))
}

struct Wrap<F>(F);

impl<F> Layer for Wrap<F>
where
    F: Fn(Arc<dyn Device>) -> Result<Arc<dyn Device>> + Send + Sync,
{
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        (self.0)(inner)
    }
}

/// A layer that is put over a device by a function that must know what else is below.
pub(crate) fn opened(
    open: impl Fn(Below) -> Result<Arc<dyn Device>> + Send + Sync + 'static,
) -> Result<Arc<dyn Layer>> {
    Ok(Arc::new(OpenWith(open)))
}

struct OpenWith<F>(F);

impl<F> Layer for OpenWith<F>
where
    F: Fn(Below) -> Result<Arc<dyn Device>> + Send + Sync,
{
    fn wrap(&self, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        (self.0)(Below { device, reopen: None, export: None })
    }

    fn open(self: Arc<Self>, below: Below) -> Opening<Arc<dyn Device>> {
        Box::pin(std::future::ready((self.0)(below)))
    }
}

/// A parameter without a default.
pub(crate) const fn param(name: &'static str, kind: ParamKind, doc: &'static str) -> Param {
    Param { name, kind, default: None, doc }
}

/// A parameter with a default.
pub(crate) const fn param_or(
    name: &'static str,
    kind: ParamKind,
    default: &'static str,
    doc: &'static str,
) -> Param {
    Param { name, kind, default: Some(default), doc }
}

/// A wrong value, or one that does not suit the device.
pub(crate) fn usage(text: impl Into<String>) -> Error {
    Error::new(Kind::Usage, text.into())
}

/// An answer of the device below that breaks the contract.
pub(crate) fn misfit() -> Error {
    Error::new(Kind::Io, "the device gave an answer that does not fit")
}
