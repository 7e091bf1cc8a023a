//! The registry of all devices, layers and gates of this workspace: for the command, and for the Python package.

use std::time::Duration;

use blockhaul_catalog::{LayerKind, Registry};

/// Limits of the connections that devices make.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Time without a byte after which a connection is dropped, and maximum time of a handshake; zero:
    /// never.
    pub timeout: Duration,
    /// Bytes per second below which a connection is dropped; 0: no minimum.
    pub min_rate: u64,
}

impl ConnectionLimits {
    /// The options of a connection.
    pub fn connection(&self) -> blockhaul_client::Options {
        let ConnectionLimits { timeout, min_rate } = *self;
        let mut options =
            blockhaul_client::Options { timeout, min_rate, ..blockhaul_client::Options::default() };
        if !timeout.is_zero() {
            options.connect_timeout = options.connect_timeout.min(timeout);
        }
        options
    }
}

/// Everything that can be opened. Servers are asked for these metadata contexts besides
/// `base:allocation`.
pub fn device_registry(limits: &ConnectionLimits, contexts: &[String]) -> Registry {
    let mut options = limits.connection();
    options.contexts.extend_from_slice(contexts);
    let mut backends = blockhaul_backends::all();
    #[cfg(feature = "formats")]
    backends.extend(blockhaul_formats::all());
    backends.extend(blockhaul_store::all());
    let limits = blockhaul_kubevirt::Options {
        connect_timeout: options.connect_timeout,
        timeout: options.timeout,
    };
    backends.extend(blockhaul_kubevirt::all(limits));
    backends.extend(blockhaul_client::all(options));
    backends.extend(blockhaul_nbdkit_devices::devices::all());
    #[cfg(feature = "nbdkit-plugins")]
    backends.extend(blockhaul_cabi::all());
    backends.extend(blockhaul_script::all());
    backends.extend(blockhaul_python::all());
    #[cfg(feature = "vddk")]
    backends.extend(blockhaul_vddk::all());
    Registry {
        backends,
        layers: layer_kinds(),
        gates: blockhaul_nbdkit_devices::gates::all(),
        path: blockhaul_backends::PATH_SCHEME,
        command: "command",
        ..Registry::default()
    }
}

/// Every kind of layer, by name.
pub fn layer_kinds() -> Vec<&'static LayerKind> {
    let mut kinds = blockhaul_layers::all();
    kinds.extend(blockhaul_nbdkit_devices::layers::all());
    kinds.sort_unstable_by_key(|kind| kind.name);
    kinds
}
