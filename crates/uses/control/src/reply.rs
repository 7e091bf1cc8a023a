//! Replies on the control socket: refusals, and the elements of lists.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::request::RequestError;

/// Why a server refuses a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Kind of the refusal.
    pub kind: RefusalKind,
    /// Message: what is wrong, where, and what to do.
    pub error: String,
}

/// Kind of a [`Refusal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// The request is invalid.
    Usage,
    /// The export, layer, job or client does not exist.
    Absent,
    /// The operation failed. Kinds that this version does not know count as this one.
    #[serde(other)]
    Failed,
}

impl Refusal {
    /// A refusal of an invalid request.
    pub fn usage(error: impl Into<String>) -> Refusal {
        Refusal { kind: RefusalKind::Usage, error: error.into() }
    }

    /// A refusal because an object of that name or number does not exist.
    pub fn absent(error: impl Into<String>) -> Refusal {
        Refusal { kind: RefusalKind::Absent, error: error.into() }
    }

    /// A refusal because the operation failed.
    pub fn failed(error: impl Into<String>) -> Refusal {
        Refusal { kind: RefusalKind::Failed, error: error.into() }
    }
}

impl From<RequestError> for Refusal {
    fn from(error: RequestError) -> Refusal {
        Refusal::usage(error.to_string())
    }
}

/// A connected client, in the list `clients`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientStatus {
    /// Number of the client; never used again.
    pub number: u64,
    /// Address: `ADDRESS:PORT`, `vsock:CID:PORT` or `a local client`.
    pub address: String,
    /// Name of the export; none during the handshake.
    pub export: Option<String>,
    /// Identity by TLS; none without TLS.
    pub tls: Option<TlsIdentity>,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests that completed, by their kind.
    pub requests: BTreeMap<String, u64>,
    /// Bytes of requests that succeeded, by their kind.
    pub bytes: BTreeMap<String, u64>,
    /// Requests that failed.
    pub errors: u64,
    /// Seconds since the client connected.
    pub age: f64,
    /// Whether the client is being disconnected.
    pub leaving: bool,
}

/// Identity of a client by TLS.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TlsIdentity {
    /// Version of TLS.
    pub version: String,
    /// Name of the user, or the name in the certificate; none: the client need not identify itself.
    pub name: Option<String>,
}

/// An export, in the list `exports`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ExportStatus {
    /// Name of the export.
    pub name: String,
    /// Text that clients see.
    pub description: String,
    /// Device that is served, for people.
    pub device: String,
    /// Size in bytes; none if each client has a device of its own.
    pub size: Option<u64>,
    /// Whether clients can connect to the export. A disk of the monitor protocol need not be served.
    pub served: bool,
    /// Whether clients can only read; none if each client has a device of its own.
    pub readonly: Option<bool>,
    /// Connected clients.
    pub clients: u64,
    /// State of the process of an isolated device.
    pub state: Option<String>,
    /// Dirty bitmaps.
    pub bitmaps: Vec<BitmapStatus>,
    /// Layers, from the device to the client.
    pub layers: Vec<LayerStatus>,
}

/// A dirty bitmap of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BitmapStatus {
    /// A bitmap that nothing uses: writes may be missing in it.
    Inconsistent {
        /// Name of the bitmap.
        name: String,
        /// Reason.
        inconsistent: String,
    },
    /// A bitmap in use.
    Consistent {
        /// Name of the bitmap.
        name: String,
        /// Bytes per bit.
        granularity: u64,
        /// Whether writes are marked.
        enabled: bool,
        /// Bytes that are dirty.
        dirty: u64,
    },
}

/// A layer of an export.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LayerStatus {
    /// Name of the layer.
    pub name: String,
    /// Values of the parameters that were set.
    pub options: BTreeMap<String, String>,
    /// Names of the parameters that can be changed.
    pub changeable: Vec<String>,
}
