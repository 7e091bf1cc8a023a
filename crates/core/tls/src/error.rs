//! Why TLS cannot be used, or a session cannot start.

use std::fmt;

use openssl::error::ErrorStack;
use openssl::ssl;

/// What the caller can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsErrorKind {
    /// A file is missing or cannot be read.
    File,
    /// The settings are inconsistent, or a file has the wrong contents.
    Setup,
    /// The peer failed to authenticate, rejected our credentials, or does not speak TLS.
    Refused,
    /// The connection failed.
    Lost,
    /// The peer closed the connection during the handshake.
    Closed,
}

/// One line: what was tried, and why it failed.
#[derive(Debug, Clone)]
pub struct TlsError {
    kind: TlsErrorKind,
    text: String,
    remedy: Option<&'static str>,
}

impl TlsError {
    /// An error of this kind.
    pub(crate) fn new(kind: TlsErrorKind, text: impl Into<String>) -> TlsError {
        TlsError { kind, text: text.into(), remedy: None }
    }

    /// OpenSSL rejects its input.
    pub(crate) fn setup(what: impl fmt::Display, stack: &ErrorStack) -> TlsError {
        TlsError::new(TlsErrorKind::Setup, format!("{what}: {}", first(stack)))
    }

    /// The same error with what the user can do about it.
    pub(crate) fn with_remedy(self, remedy: &'static str) -> TlsError {
        TlsError { remedy: Some(remedy), ..self }
    }

    /// What the caller can do about it.
    pub fn kind(&self) -> TlsErrorKind {
        self.kind
    }

    /// The message without the remedy.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What the user can do about it, if the message does not say so.
    pub fn remedy(&self) -> Option<&'static str> {
        self.remedy
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        match self.remedy {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for TlsError {}

/// The reason in OpenSSL's words, without its codes.
pub(crate) fn reason(error: &ssl::Error) -> String {
    match (error.ssl_error(), error.io_error()) {
        (Some(stack), _) => alert(&first(stack)),
        (None, Some(error)) => error.to_string(),
        (None, None) => "the other side closed the connection".to_string(),
    }
}

/// OpenSSL prefixes the peer's alerts with the version that introduced them: no peer speaks SSL 3
/// here.
fn alert(reason: &str) -> String {
    // OpenSSL 3.5 writes "ssl/tls" for what was first in SSL 3.
    let versions = ["sslv3 alert ", "ssl/tls alert ", "tlsv1 alert ", "tlsv13 alert "];
    match versions.iter().find_map(|version| reason.strip_prefix(version)) {
        Some(alert) => format!("the other side gave up: {alert}"),
        None => reason.to_string(),
    }
}

/// The first error of a stack is the deepest.
pub(crate) fn first(stack: &ErrorStack) -> String {
    let reason = stack.errors().first().and_then(|error| error.reason());
    reason.map_or_else(|| "OpenSSL gives no reason".to_string(), str::to_lowercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alerts_are_told_without_the_version_that_had_them_first() {
        assert_eq!(
            alert("ssl/tls alert bad certificate"),
            "the other side gave up: bad certificate"
        );
        assert_eq!(alert("sslv3 alert bad certificate"), "the other side gave up: bad certificate");
        assert_eq!(alert("tlsv1 alert unknown ca"), "the other side gave up: unknown ca");
        assert_eq!(alert("wrong version number"), "wrong version number");
    }
}
