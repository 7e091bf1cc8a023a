//! The messages between the kernel and a FUSE server, without I/O (linux/fuse.h, version 7).
//!
//! All numbers have the machine's byte order. A request is a header of [`HEADER`] bytes and
//! arguments that depend on its operation; a reply is a header of [`REPLY_HEADER`] bytes and a body.

mod decode;
mod encode;
mod numbers;

pub use decode::{InHeader, Init, KernelRequest, MalformedRequest, Operation, SeekTarget, SetAttr};
pub use encode::{
    Attr, DirEntries, InitReply, NodeKind, Statfs, attr, entry, init, init_version, opened,
    position, reply_header, statfs, written,
};
pub use numbers::{
    HEADER, KernelErrno, MAJOR, MINOR, MINOR_LEAST, O_ACCMODE, O_DSYNC, REPLY_HEADER, ROOT,
    WRITE_HEADER, allocate_flags, init_flags, open_flags, set_flags, write_flags,
};
