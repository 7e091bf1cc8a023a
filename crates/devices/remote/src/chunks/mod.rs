//! Disks in chunks: a writable disk whose chunks are objects below a local directory or in an object store.
//!
//! Objects with chunks and with pages of the index never change: each write makes one with a new name. A flush writes
//! the chunks and the pages that have changed, and then the manifest, on the condition that it is still that of this
//! writer. The disk is therefore always as at the last flush, whenever the program is killed, and a writer that was
//! replaced by another one cannot change it, however late its requests arrive.
//!
//! - `backend`: the kind of storage `chunks:`. `device`: its device. `opening`: writers one after another, and disks that
//!   are made. `lease`: the time of a writer.
//! - `disk`: reads and writes; `buffer`: the bytes of a chunk in memory; `table`: versions of chunks, buffers in use.
//!   `commit`: flushes, renewals of the lease, closing.
//! - `layout`: the bytes of objects. `folder`: objects of a store; `local_folder`: those of a directory.

pub(crate) mod backend;
mod buffer;
mod commit;
mod device;
mod disk;
pub(crate) mod folder;
mod layout;
mod lease;
mod local_folder;
mod opening;
mod table;
#[cfg(test)]
mod tests;
