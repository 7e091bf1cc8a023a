//! The NBD protocol as a codec without I/O: bytes in, bytes and decisions out.
//!
//! The crate implements the protocol document (`doc/proto.md` and `doc/uri.md` of the `nbd`
//! project) and its EXTENDED_HEADERS extension as in QEMU and libnbd. It opens no socket, limits
//! all memory that a peer can request ([`limits`]), and does not panic on any input.
//!
//! - [`handshake`]: both roles of the handshake as state machines, and the greeting of old servers.
//! - [`request`], [`reply`], [`status`]: messages of the transmission phase. [`transmission`]: the
//!   client's role there as a state machine.
//! - [`flags`], [`errno`], [`option`], [`magic`], [`limits`]: the numbers and their names.
//! - [`uri`]: NBD URIs. [`http`]: the HTTP exchange in front of NBD.
//!
//! Every parser has the same form: it takes the received bytes, and returns `Ok(None)` if it needs
//! more of them, `Ok(Some((value, consumed)))`, or an [`ProtocolError`] after which the connection cannot
//! be used.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

mod bytes;
mod error;
mod text;

pub mod errno;
pub mod flags;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
pub mod handshake;
pub mod http;
pub mod limits;
pub mod magic;
pub mod option;
pub mod reply;
pub mod request;
pub mod status;
pub mod transmission;
pub mod uri;

pub use bytes::HeaderBytes;
pub use errno::Errno;
pub use error::ProtocolError;
pub use flags::{ClientFlags, CommandFlags, ExportFlags, HandshakeFlags, ReplyFlags};
pub use option::{BlockSizeInfo, InfoSet, ListEntry, MetaContext, OptionCode, OptionError};
pub use reply::ReplyForm;
pub use request::{CommandCode, RequestForm};
pub use text::{printable, unprintable};
