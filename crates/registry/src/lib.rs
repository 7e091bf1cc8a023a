//! The registry of all devices, layers and gates of this workspace: for programs and the library.

use blockhaul_catalog::{LayerKind, Registry};

/// The registry of all devices, layers and gates of this workspace. Features of the crate decide which image
/// formats and plugins it has. Connections have the default settings ([`Registry::connecting`] changes them).
pub fn device_registry() -> Registry {
    let options = blockhaul_client::ConnectOptions::default();
    let mut backends = blockhaul_backends::all();
    #[cfg(feature = "formats")]
    backends.extend(blockhaul_formats::all());
    backends.extend(blockhaul_store::all());
    #[cfg(feature = "restic")]
    backends.extend(blockhaul_restic::all(blockhaul_restic::ResticOptions {
        connect_timeout: options.connect_timeout,
        timeout: options.timeout,
    }));
    let limits = blockhaul_kubevirt::KubeVirtOptions {
        connect_timeout: options.connect_timeout,
        timeout: options.timeout,
    };
    backends.extend(blockhaul_kubevirt::all(limits));
    #[cfg(feature = "remote")]
    backends.extend(blockhaul_remote::all(blockhaul_remote::RemoteOptions {
        connect_timeout: options.connect_timeout,
        timeout: options.timeout,
    }));
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

/// The kinds of layers, sorted by name.
pub fn layer_kinds() -> Vec<&'static LayerKind> {
    let mut kinds = blockhaul_layers::all();
    kinds.extend(blockhaul_nbdkit_devices::layers::all());
    kinds.sort_unstable_by_key(|kind| kind.name);
    kinds
}
