//! Hosts nbdkit's filters, of the one release whose layout is known: shared objects between the
//! host and a plugin. For the rest of this crate, a chain of filters over a plugin looks like one
//! plugin.
//!
//! - `abi`: the layout. `chain`: the backends, their life and configuration. `context`: open
//!   backends. `data`: requests down the chain. `bottom`: the plugin at its end.
//! - `face`: the chain as a plugin. `functions`: functions that filters call.
//!
//! A process has only one chain, as in nbdkit: some callbacks of filters get no pointer of ours. It
//! is made once and never freed, so that pointers into it stay valid; whichever side opens a
//! backend closes and frees it.

mod abi;
mod bottom;
mod chain;
mod context;
mod data;
mod face;
mod functions;

pub use chain::about;
pub(crate) use chain::{find, set_up};
pub(crate) use face::face;

/// Bytes per write of an emulated zero request.
const ZEROES: usize = 1 << 20;

/// The zeroes to write: page-aligned, as the data of all writes is.
#[repr(align(4096))]
struct Zeroes([u8; ZEROES]);

static NOTHING: Zeroes = Zeroes([0; ZEROES]);

const _: () = assert!(align_of::<Zeroes>() == blockhaul_io::ALIGN);
