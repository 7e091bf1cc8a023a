//! Shows any [`blockhaul_block::Device`] as a file, or several as the files of a directory, through
//! the kernel's FUSE.
//!
//! Each worker reads requests from a descriptor of its own (FUSE_DEV_IOC_CLONE) and submits them at
//! once, as many as there are; replies go to the same descriptor. What the device completes within
//! `submit` is answered without another task. With few requests in flight, one worker handles them all.
//!
//! A disk may have a handle for each worker ([`HandleSource`]), so that a request stays on the worker that has
//! read it. When the kernel asks for attributes, or a request goes beyond the end, the disk is opened
//! again to learn its size; later requests use the new handles if that has changed.
//!
//! Data of a read that the device leaves in the kernel ([`blockhaul_io::ParkedPayload`]) goes to the FUSE device
//! by splice(2). Reads are at most 512 KiB long for this, by the mount option max_read: a sequential read
//! over a Unix socket from our server then costs the mount a third less processor time, and the server
//! half, as its payloads stay in the kernel, too.
//!
//! - [`protocol`]: the messages, without I/O. `channel`: a descriptor that they go through.
//! - [`Session`]: requests and the device. `files`: the files that are shown. `seek`: SEEK_DATA and
//!   SEEK_HOLE. `in_flight`: what can be interrupted. `session::standby`: workers that leave the
//!   requests to others.
//! - [`mountpoint`]: mounts and unmounts. `file_system`: mounts the file system of a disk that is shown.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

mod channel;
mod file_system;
mod files;
mod in_flight;
pub mod mountpoint;
pub mod protocol;
mod seek;
mod session;

pub use file_system::{FileSystem, FileSystemError, FileSystemErrorKind, FileSystemTarget};
pub use files::{DISK, DISKS_MAX, Files, INFO, Info, Permissions, refused_name};
pub use session::{
    DiskMount, HandleReopener, HandleSource, MountConfig, MountEnd, PageCacheMode, Session,
};
