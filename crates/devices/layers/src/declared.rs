//! Helpers for declarations of layers: parameters, and layers made of functions.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{Layer, LayerBase, OpenFuture, Param, ParamKind};

/// A layer whose `wrap` is a function.
///
/// # Errors
/// None: functions that read options of a layer return this type.
pub fn layer(
    wrap: impl Fn(Arc<dyn Device>) -> Result<Arc<dyn Device>> + Send + Sync + 'static,
) -> Result<Arc<dyn Layer>> {
    Ok(Arc::new(FunctionLayer(wrap)))
}

struct FunctionLayer<F>(F);

impl<F> Layer for FunctionLayer<F>
where
    F: Fn(Arc<dyn Device>) -> Result<Arc<dyn Device>> + Send + Sync,
{
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        (self.0)(inner)
    }
}

/// A layer put over a device by a function that also needs the other facts of what is below.
///
/// # Errors
/// None, as for [`layer`].
pub fn opened(
    open: impl Fn(LayerBase) -> Result<Arc<dyn Device>> + Send + Sync + 'static,
) -> Result<Arc<dyn Layer>> {
    Ok(Arc::new(OpenWith { open, keeps_writes: false }))
}

/// The same for one that holds writes that a flush does not pass on ([`Layer::keeps_writes`]).
///
/// # Errors
/// None, as for [`layer`].
pub fn opened_keeping(
    keeps_writes: bool,
    open: impl Fn(LayerBase) -> Result<Arc<dyn Device>> + Send + Sync + 'static,
) -> Result<Arc<dyn Layer>> {
    Ok(Arc::new(OpenWith { open, keeps_writes }))
}

struct OpenWith<F> {
    open: F,
    keeps_writes: bool,
}

impl<F> Layer for OpenWith<F>
where
    F: Fn(LayerBase) -> Result<Arc<dyn Device>> + Send + Sync,
{
    fn wrap(&self, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        (self.open)(LayerBase::alone(device))
    }

    fn open(self: Arc<Self>, below: LayerBase) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(std::future::ready((self.open)(below)))
    }

    fn keeps_writes(&self) -> bool {
        self.keeps_writes
    }
}

/// A parameter without a default.
pub const fn param(name: &'static str, kind: ParamKind, doc: &'static str) -> Param {
    Param { name, kind, default: None, doc }
}

/// A parameter with a default.
pub const fn param_or(
    name: &'static str,
    kind: ParamKind,
    default: &'static str,
    doc: &'static str,
) -> Param {
    Param { name, kind, default: Some(default), doc }
}

/// An invalid value, or one that does not fit the device.
pub fn usage(text: impl Into<String>) -> Error {
    Error::new(Kind::Usage, text.into())
}
