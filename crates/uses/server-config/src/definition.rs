//! A configuration file as data.

use std::path::PathBuf;

use blockhaul_catalog::DeviceSpec;
use blockhaul_jobs::{ExportConfig, intent};
use blockhaul_server::Limits;

use crate::client_pattern::ClientPattern;
use crate::error::{ConfigErrorKind, ConfigFileError};

/// The contents of a configuration file. It names files of secrets, and holds none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerConfigFile {
    /// The file, as the user names it.
    pub path: PathBuf,
    /// The exports, in the order of the file; at least one.
    pub exports: Vec<ConfiguredExport>,
    /// The rights of clients: the first rule that matches a client holds, and a client that matches none
    /// has no rights. Empty: each client has all rights.
    pub clients: Vec<ClientRights>,
    /// Where the server listens.
    pub listen: ListenTable,
    /// Whether and how the server uses TLS.
    pub tls: TlsTable,
    /// Limits, in the order of the file.
    pub limits: Vec<ConfiguredLimit>,
    /// What the server publishes.
    pub metrics: MetricsTable,
    /// Threads that serve, from 0 to 1024; 0 is one for each core.
    pub workers: u16,
    /// The line of `workers`, from 1; 0 if it is absent.
    pub workers_line: usize,
    /// The directory that keeps dirty bitmaps beyond the end of the server.
    pub bitmaps: Option<PathBuf>,
    /// The line of `bitmaps`, from 1; 0 if it is absent.
    pub bitmaps_line: usize,
}

impl ServerConfigFile {
    /// These limits with those of the file in their place.
    ///
    /// # Errors
    /// The first limit that is unknown, has an invalid value, or does not go with the others.
    pub fn limits_over(&self, mut limits: Limits) -> Result<Limits, ConfigFileError> {
        for limit in &self.limits {
            let set = limits.set(&format!("{}={}", limit.name, limit.value));
            set.map_err(|why| self.limit_fault(limit, &why))?;
        }
        let last = self.limits.iter().find(|limit| limit.name == "bytes").or(self.limits.last());
        match (limits.check(), last) {
            (Err(why), Some(limit)) => Err(self.limit_fault(limit, &why)),
            _ => Ok(limits),
        }
    }

    fn limit_fault(&self, limit: &ConfiguredLimit, why: &str) -> ConfigFileError {
        let known = || Limits::TABLE.iter().map(|known| known.name);
        let why = why.strip_prefix(&format!("{}: ", limit.name)).unwrap_or(why);
        let fault = self.fault(limit.line, why).about(limit.name.clone());
        if known().any(|name| name == limit.name) {
            fault
        } else {
            fault.guessing(&limit.name, known())
        }
    }

    /// A fault of the text on a line, from 1.
    pub fn fault(&self, line: usize, text: impl Into<String>) -> ConfigFileError {
        ConfigFileError::new(ConfigErrorKind::Text, &self.path, line, text)
    }
}

/// A table `[[export]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredExport {
    /// The line on which the table begins, from 1.
    pub line: usize,
    /// The name for clients, at most 4096 bytes without NUL; it may be empty.
    pub name: String,
    /// The text for users; may be empty.
    pub description: String,
    /// The device.
    pub device: DeviceSpec,
    /// Layers over the device, `NAME[?key=value&…]`, the first innermost.
    pub layers: Vec<String>,
    /// Whether no client may write.
    pub readonly: bool,
}

impl ConfiguredExport {
    /// The export in the form of the table of a server.
    pub fn config(&self) -> ExportConfig {
        ExportConfig {
            name: self.name.clone(),
            description: self.description.clone(),
            spec: self.device.clone(),
            intent: intent(self.readonly),
            layers: self.layers.clone(),
        }
    }
}

/// A table `[[client]]`: the rights and rates of the clients that match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientRights {
    /// The line on which the table begins, from 1.
    pub line: usize,
    /// The clients.
    pub pattern: ClientPattern,
    /// The names of the exports that they see; `None`: all.
    pub exports: Option<Vec<String>>,
    /// Whether they may write, to exports that can be written.
    pub write: bool,
    /// Bytes per second of reads and writes, above 0; `None`: no limit.
    pub rate: Option<u64>,
    /// Requests per second, above 0; `None`: no limit.
    pub iops: Option<u64>,
}

/// The table `[listen]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListenTable {
    /// The line on which the table begins, from 1; 0 if it is absent.
    pub line: usize,
    /// Unix sockets.
    pub unix: Vec<PathBuf>,
    /// TCP ports; 0 is a free one.
    pub ports: Vec<u16>,
    /// Addresses or host names on which each port is opened; empty: all addresses.
    pub addresses: Vec<String>,
}

/// The table `[tls]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsTable {
    /// The line on which the table begins, from 1; 0 if it is absent.
    pub line: usize,
    /// `off`, `on` or `require`; `None`: `require` if certificates or keys are given, else `off`.
    pub mode: Option<String>,
    /// The directory with the certificates of the server.
    pub certificates: Option<PathBuf>,
    /// The file of pre-shared keys.
    pub psk: Option<PathBuf>,
    /// Whether clients must have certificates of the authority.
    pub verify_peer: bool,
}

/// A key of the table `[limits]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredLimit {
    /// The line of the key, from 1.
    pub line: usize,
    /// The name of the limit ([`Limits::TABLE`]).
    pub name: String,
    /// The value, as on the command line.
    pub value: String,
}

/// The table `[metrics]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MetricsTable {
    /// The line on which the table begins, from 1; 0 if it is absent.
    pub line: usize,
    /// Addresses and files, as `--metrics` has them.
    pub destinations: Vec<String>,
    /// The line of the addresses, from 1; 0 if there are none.
    pub destinations_line: usize,
    /// Whether the page is served at the address.
    pub page: bool,
}
