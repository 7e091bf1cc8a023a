//! What the operating system offers around files and sockets: other processes, users, locks,
//! descriptors that were inherited, and files to remove at the end; and mappings of files that other processes may make shorter. None of
//! it needs a worker.
//!
//! With `io` and `cabi` this is where `unsafe` may be, each block with its reason.

mod cleanup;
mod credentials;
mod descriptors;
mod fuse;
mod identity;
mod lock;
mod peer_memory;
mod process;

pub use cleanup::{CleanupList, CleanupOnDrop};
pub use credentials::{PeerCredentials, leads_session};
pub use descriptors::inherited;
pub use fuse::{clone_fuse, open_fuse};
pub use identity::UserIdentity;
pub use lock::{lock_shared, locked_by_others, unlock};
pub use peer_memory::PeerMemory;
pub use process::{ResourceUsage, processor_time, serves_writeback, wait_with_cost};
