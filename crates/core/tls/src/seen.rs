//! What callbacks of a handshake have seen.

/// What a handshake has told by the way.
#[derive(Default)]
pub(crate) struct Seen {
    /// The user that a client named.
    pub(crate) user: Option<String>,
    /// Nobody of that name has a key.
    pub(crate) unknown: bool,
    /// The secrets of the session (RFC 8446, section 7.1).
    pub(crate) client_secret: Option<Vec<u8>>,
    pub(crate) server_secret: Option<Vec<u8>>,
}

/// A name that a stranger sent, for messages: its first 128 characters, all but printable ASCII escaped.
pub(crate) fn escaped(name: &[u8]) -> String {
    String::from_utf8_lossy(name).chars().take(128).flat_map(char::escape_default).collect()
}
