//! Hosts nbdkit's filters, of the releases whose layout is known: shared objects between the host
//! and a plugin. For the rest of this crate, a chain of filters over a plugin looks like one
//! plugin.
//!
//! - `abi`: the layout. `chain`: the backends and their life. `calls`: their configuration, and calls
//!   before a backend is opened. `context`: open backends. `data`: requests down the chain. `bottom`:
//!   the plugin at its end. `zeroes`: what emulated zero requests write.
//! - `face`: the chain as a plugin. `functions`: functions that filters call.
//!
//! A process has only one chain, as in nbdkit: some callbacks of filters get no pointer of ours. It
//! is made once and never freed, so that pointers into it stay valid; whichever side opens a
//! backend closes and frees it.

mod abi;
mod bottom;
mod calls;
mod chain;
mod context;
mod data;
mod face;
mod functions;
mod zeroes;

pub use chain::{about, hosts};
pub(crate) use chain::{find, set_up};
pub(crate) use face::face;
