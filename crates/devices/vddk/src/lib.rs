//! `vddk:`: disks of VMware, through the library libvixDiskLib of VMware's Virtual Disk Development
//! Kit, versions 6.5 to 9, which is loaded at run time.
//!
//! - `backend`: the scheme. `options`: its parameters; `secret`: passwords.
//! - `library`: the functions of the library, as safe ones; `statistics`: their calls.
//! - `session`: the thread that opens and closes, and connections that disks share.
//! - `disk`: what all handles to a disk share; `handle`: one handle, as a device.
//! - `allocation`: the allocated blocks of a disk; `scan`: each part of them is asked for once; `query`:
//!   how. `trial`: whether reads go on meanwhile.
//! - `saved`: that map in a file.
//!
//! The library runs in a process of its own, unless `isolate=off` says otherwise: a crash in it is
//! an error here. In that process, calls that block run on threads of their handle. The library
//! answers reads and writes on its own threads, in any order.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod allocation;
mod backend;
mod changes;
mod disk;
mod handle;
mod library;
mod options;
mod query;
mod saved;
mod scan;
mod secret;
mod session;
mod statistics;
mod trial;

pub use backend::VddkBackend;

/// Every kind of storage of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<std::sync::Arc<dyn blockhaul_catalog::Backend>> {
    vec![std::sync::Arc::new(VddkBackend)]
}
