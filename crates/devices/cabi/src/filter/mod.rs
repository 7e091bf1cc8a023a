//! Hosts nbdkit's filters, of the one release whose layout is known: shared objects between the host and
//! a plugin. A chain of filters over a plugin looks to the rest of this crate like one plugin.
//!
//! - `abi`: the layout. `chain`: the backends, their life and configuration. `context`: what is open of
//!   each of them. `data`: requests down the chain. `bottom`: the plugin at its end.
//! - `face`: the chain as a plugin. `functions`: what filters call.
//!
//! One chain exists in a process, as in nbdkit: filters' callbacks get no pointer of ours in some places.
//! It is made once and never freed, so that pointers into it are good for ever; what is open of it is
//! freed by whoever closes it.

mod abi;
mod bottom;
mod chain;
mod context;
mod data;
mod face;
mod functions;

pub use chain::about;
pub(crate) use chain::set_up;
pub(crate) use face::face;

/// Bytes that are written at a time where zeroing is done by writing.
const ZEROES: usize = 1 << 20;

/// What is written then: it begins on a page, as the bytes of all writes do.
#[repr(align(4096))]
struct Zeroes([u8; ZEROES]);

static NOTHING: Zeroes = Zeroes([0; ZEROES]);

const _: () = assert!(align_of::<Zeroes>() == blockhaul_io::ALIGN);
