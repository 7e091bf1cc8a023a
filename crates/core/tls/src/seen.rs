//! What the callbacks of a handshake have recorded.

/// Side results of a handshake.
#[derive(Default)]
pub(crate) struct HandshakeData {
    /// The user that a client named, as its bytes.
    pub(crate) user: Option<Vec<u8>>,
    /// There is no key for that user.
    pub(crate) unknown: bool,
    /// The secrets of the session (RFC 8446, section 7.1).
    pub(crate) client_secret: Option<Vec<u8>>,
    pub(crate) server_secret: Option<Vec<u8>>,
}

/// An unauthenticated name, for messages: its first 128 characters, all but printable ASCII
/// escaped.
pub(crate) fn escaped(name: &[u8]) -> String {
    String::from_utf8_lossy(name).chars().take(128).flat_map(char::escape_default).collect()
}
