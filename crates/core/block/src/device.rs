//! The central trait.

use std::sync::Arc;

use crate::{Facts, PendingRequest, Request};

/// A random-access block device, open and ready for requests. The documentation of the crate `blockhaul_block` has the
/// contract.
pub trait Device: Send + Sync {
    /// The current facts of the device: a snapshot that callers keep.
    fn facts(&self) -> Arc<Facts>;

    /// Starts one request. Must not block.
    fn submit(&self, request: Request) -> PendingRequest;

    /// A lease on the longest prefix of the range `at..at + len` that maps to plain bytes of a
    /// file, for offload by the kernel (reflink, copy_file_range); those bytes are not freed or
    /// moved while the lease exists. Only devices that neither change, count, delay, limit, record
    /// nor refuse requests implement this; all others keep the default.
    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        let _ = (at, len, access);
        None
    }
}

/// The purpose of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseAccess {
    /// The bytes are read.
    Read,
    /// The bytes are replaced.
    Write,
}

/// Part of a file that maps one to one to a device's bytes.
#[derive(Debug, Clone)]
pub struct FileRange {
    /// The file.
    pub file: blockhaul_io::File,
    /// Offset in the file, in bytes.
    pub at: u64,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Requests to the range bypass the page cache (reads, if it does not hold the bytes): callers
    /// that use the cache for this file defeat its direct I/O.
    pub past_cache: bool,
}

impl<D: Device + ?Sized> Device for Arc<D> {
    fn facts(&self) -> Arc<Facts> {
        (**self).facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        (**self).submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        (**self).file_at(at, len, access)
    }
}
