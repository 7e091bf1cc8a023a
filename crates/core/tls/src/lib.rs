//! TLS over streams, both sides, with certificates or pre-shared keys.
//!
//! - [`TlsAcceptor`], [`TlsConnector`]: the configuration of each side, and its handshake, by OpenSSL.
//! - `records`: the record layer of TLS 1.3, which moves payloads between pool buffers and sockets
//!   without an extra copy; `wrapped`: OpenSSL's own, for TLS 1.2.
//! - `seen`: what the callbacks of a handshake record. `names`: names of certificates. `alert`: why
//!   a peer ends the session.
//! - `psk`: files of pre-shared keys. [`make`]: makes them, and certificates. `exposed`: warns of those
//!   that every user can read.
//!
//! After the handshake, [`blockhaul_io::RecvWindow::secure`] and
//! [`blockhaul_io::SendQueue::secure`] take the session's halves.

mod alert;
mod context;
mod error;
mod exposed;
mod handshake;
pub mod make;
mod names;
mod psk;
mod records;
mod seen;
mod wrapped;

pub use context::{
    ConnectorConfig, RecordImplementation, TlsAcceptor, TlsConnector, TlsCredentials,
    usual_certificates,
};
pub use error::{TlsError, TlsErrorKind};
pub use handshake::{TlsSession, TlsSessionInfo};
pub use names::{CertificateNames, DistinguishedName, NameSyntaxError};
#[cfg(fuzzing)]
pub use records::fuzz;

/// The version of OpenSSL that is in use.
pub fn library_version() -> &'static str {
    openssl::version::version()
}
