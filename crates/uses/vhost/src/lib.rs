//! Serves any [`blockhaul_block::Device`] to virtual machines: as a virtio-blk disk, over vhost-user.
//!
//! The front end (QEMU, cloud-hypervisor, libblkio) connects to a Unix socket and passes the memory of
//! the guest, and for each queue a ring in that memory and two event descriptors. Each queue belongs
//! to one worker, which submits its requests at once, as many as there are.
//!
//! - [`serve`]: one front end, from its first message to the end. `session`: what its messages do.
//! - [`protocol`]: the messages, without I/O. `socket`: how they are received and sent.
//! - `memory`: the memory of the guest. `ring`: a split virtqueue in it. `chain`: the memory of one
//!   request. [`blk`]: requests of virtio-blk, and its configuration.
//! - `queue`: requests of a ring that become requests of the device.
//! - `in_flight`: the table from which a restarted server learns which requests it had.
//!
//! # Trust
//! The guest writes to its memory at any time: everything in it is read once, and then checked. The
//! front end owns the descriptors that it passes, and may make their files shorter: that ends its session
//! ([`blockhaul_os::PeerMemory`]). The socket's permissions decide who may connect.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

pub mod blk;
mod chain;
mod in_flight;
mod memory;
pub mod protocol;
mod queue;
mod ring;
mod session;
mod socket;

pub use queue::RequestWatcher;
pub use session::{DeviceReopener, VhostConfig, serve};
