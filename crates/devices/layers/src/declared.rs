//! What the declarations of layers have in common: parameters, and layers made of functions.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{Below, Layer, Opening, Param, ParamKind};

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
        (self.0)(Below::alone(device))
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
