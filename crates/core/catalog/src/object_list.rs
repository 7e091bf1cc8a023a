//! Lists of the objects of a service.

use crate::opening::OpenFuture;

/// An object in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectEntry {
    /// The name in its bucket or on its server.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// The time of the last change, as `2026-01-31T12:00:00Z`.
    pub changed: Option<String>,
    /// The service's identifier of the contents, without quotes.
    pub etag: Option<String>,
}

/// A list that is read in pages. Use it on a worker.
pub trait ObjectList {
    /// The next objects, at least one; none at the end.
    fn page(&mut self) -> OpenFuture<Vec<ObjectEntry>>;
}
