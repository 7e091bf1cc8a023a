//! Page blobs of Azure: disks that are written at random places, in pages of 512 bytes.
//!
//! - `opening`: blobs that exist, and new ones. `device`: the device of a blob.
//! - `blob`: reads, writes and extents of a blob. `lease`: the right of one program to write it.
//! - `requests`: signed requests, which `object_store` does not have for page blobs. `page_ranges`: lists of pages.

mod blob;
mod device;
mod lease;
pub(crate) mod opening;
mod page_ranges;
pub(crate) mod requests;
