//! What an NBD URI consists of, and its canonical form.

use std::fmt;
use std::fmt::Write as _;

use crate::magic;

/// A parsed URI. Its `Display` is the canonical form.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Uri {
    /// The transport of the server.
    pub transport: Transport,
    /// The export's name, decoded; empty for the default one.
    pub export: String,
    /// TLS parameters, if the scheme requires TLS (`nbds`).
    pub tls: Option<TlsParameters>,
}

/// The transport of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// TCP.
    Tcp {
        /// Host name or address, without the brackets of IPv6. An empty one in the URI is
        /// `localhost`.
        host: String,
        /// Port, 10809 if the URI has none.
        port: u16,
    },
    /// A Unix socket.
    Unix {
        /// Path of the socket, as bytes; the first is NUL in the abstract namespace.
        socket: Vec<u8>,
    },
    /// A socket of the machine that an SSH server runs on, reached through that server.
    Ssh {
        /// Login name, from the authority; none with TLS, where that is the TLS user.
        user: Option<String>,
        /// Host name or address, without the brackets of IPv6. An empty one in the URI is
        /// `localhost`.
        host: String,
        /// Port of the SSH server, if the URI has one.
        port: Option<u16>,
        /// Path of a Unix socket there; without it, the NBD server is at a port of that machine's
        /// `localhost`.
        socket: Option<Vec<u8>>,
        /// That port, 10809 if the URI has none.
        nbd_port: u16,
        /// Whether SSH compresses what it transfers.
        compress: bool,
    },
    /// A virtual machine socket.
    Vsock {
        /// Context ID, 2 (the host) if the URI has none.
        cid: u32,
        /// Port, 10809 if the URI has none.
        port: u32,
    },
}

/// Parameters that only matter to TLS.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct TlsParameters {
    /// User name for PSK, from the authority.
    pub username: Option<String>,
    /// Directory with certificates.
    pub certificates: Option<String>,
    /// File with pre-shared keys.
    pub psk_file: Option<String>,
    /// Name to check the server's certificate against, instead of the host.
    pub hostname: Option<String>,
    /// Whether to check the server's certificate.
    pub verify_peer: Option<bool>,
    /// The authentication method; by default derived from the other parameters.
    pub kind: Option<TlsType>,
}

/// The authentication method of a TLS session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TlsType {
    /// Certificates.
    X509,
    /// Pre-shared keys.
    Psk,
}

/// Supported schemes.
pub const SCHEMES: [&str; 8] =
    ["nbd", "nbds", "nbd+unix", "nbds+unix", "nbd+vsock", "nbds+vsock", "nbd+ssh", "nbds+ssh"];

/// Supported parameters, in the order of the canonical form.
pub const PARAMETERS: [&str; 9] = [
    "socket",
    "nbd-port",
    "compress",
    "tls-certificates",
    "tls-psk-file",
    "tls-hostname",
    "tls-verify-peer",
    "tls-type",
    "tls-username",
];

/// Whether a text looks like an NBD URI: one of the known schemes, and `://`. It may still be
/// invalid.
pub fn is_uri(text: &str) -> bool {
    text.split_once("://")
        .is_some_and(|(scheme, _)| SCHEMES.contains(&scheme.to_ascii_lowercase().as_str()))
}

impl fmt::Display for Uri {
    /// The canonical form, as in libnbd, but always valid: special characters are escaped.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls.is_some() { "nbds" } else { "nbd" })?;
        f.write_str(match self.transport {
            Transport::Tcp { .. } => "://",
            Transport::Unix { .. } => "+unix://",
            Transport::Vsock { .. } => "+vsock://",
            Transport::Ssh { .. } => "+ssh://",
        })?;
        if let Some(user) = self.tls.as_ref().and_then(|tls| tls.username.as_ref()) {
            write!(f, "{}@", EscapedBytes(user.as_bytes(), UNRESERVED))?;
        }
        match &self.transport {
            Transport::Tcp { host, port } if host.contains(':') => {
                write!(f, "[{}]:{port}", EscapedBytes(host.as_bytes(), ":"))?;
            }
            Transport::Tcp { host, port } => {
                write!(f, "{}:{port}", EscapedBytes(host.as_bytes(), UNRESERVED))?;
            }
            Transport::Vsock { cid, port } => write!(f, "{cid}:{port}")?,
            Transport::Ssh { user, host, port, .. } => {
                if let Some(user) = user {
                    write!(f, "{}@", EscapedBytes(user.as_bytes(), UNRESERVED))?;
                }
                if host.contains(':') {
                    write!(f, "[{}]", EscapedBytes(host.as_bytes(), ":"))?;
                } else {
                    write!(f, "{}", EscapedBytes(host.as_bytes(), UNRESERVED))?;
                }
                if let Some(port) = port {
                    write!(f, ":{port}")?;
                }
            }
            Transport::Unix { .. } => {}
        }
        write!(f, "/{}", EscapedBytes(self.export.as_bytes(), "/:@"))?;
        let mut separator = '?';
        let mut parameter = |name: &str, value: &[u8]| {
            let before = std::mem::replace(&mut separator, '&');
            write!(f, "{before}{name}={}", EscapedBytes(value, "/:@"))
        };
        if let Transport::Unix { socket } | Transport::Ssh { socket: Some(socket), .. } =
            &self.transport
        {
            parameter("socket", socket)?;
        }
        if let Transport::Ssh { nbd_port, compress, .. } = self.transport {
            if nbd_port != magic::PORT {
                parameter("nbd-port", nbd_port.to_string().as_bytes())?;
            }
            if compress {
                parameter("compress", b"true")?;
            }
        }
        let Some(tls) = &self.tls else { return Ok(()) };
        let texts = [
            ("tls-certificates", &tls.certificates),
            ("tls-psk-file", &tls.psk_file),
            ("tls-hostname", &tls.hostname),
        ];
        for (name, value) in texts {
            if let Some(value) = value {
                parameter(name, value.as_bytes())?;
            }
        }
        if let Some(verify) = tls.verify_peer {
            parameter("tls-verify-peer", if verify { b"true" } else { b"false" })?;
        }
        if let Some(kind) = tls.kind {
            parameter("tls-type", if kind == TlsType::Psk { b"psk" } else { b"x509" })?;
        }
        Ok(())
    }
}

/// Why a text is not a usable NBD URI; one line, with what to write instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UriError(pub(super) String);

impl fmt::Display for UriError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UriError {}

/// Escape all characters but the unreserved ones.
const UNRESERVED: &str = "";

/// Bytes escaped for a URI, except the unreserved characters of RFC 3986 and those in the second
/// field.
struct EscapedBytes<'a>(&'a [u8], &'static str);

impl fmt::Display for EscapedBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            let c = char::from(*byte);
            if c.is_ascii_alphanumeric() || "-._~".contains(c) || self.1.contains(c) {
                f.write_char(c)?;
            } else {
                write!(f, "%{byte:02x}")?;
            }
        }
        Ok(())
    }
}
