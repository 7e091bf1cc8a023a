//! Scripted NBD peers, both sides, with blocking sockets on threads: a test decides every byte that
//! they send, so that they can violate the protocol in every way.
//!
//! - [`Conversation`]: a connected socket with the protocol's messages as methods, for either role.
//!   [`Conversation::connect`] is the client side, against our server.
//! - [`ScriptedServer`]: a listening server that runs a closure for each connection.
//! - [`Offer`], [`serve`]: a complete plain server over a model, that follows the protocol except
//!   for the given [`ReplyFault`]s; start it with [`ScriptedServer::offer`].
//! - [`ExportServer`]: the HTTP server of KubeVirt, with faults.
//!
//! ```no_run
//! use blockhaul_testkit::model::Model;
//! use blockhaul_testkit::peer::{ReplyFaultKind, Offer, ScriptedServer, ReplyFault};
//! use blockhaul_wire::CommandCode;
//!
//! // The second read is answered with another request's cookie.
//! let offer = Offer::new(Model::new(1 << 20)).spoil(ReplyFault::nth(CommandCode::Read, 2, ReplyFaultKind::WrongCookie));
//! let server = ScriptedServer::offer(offer);
//! println!("{}", server.uri());
//! ```
//!
//! Messages are built here from their numbers, not by `wire`'s encoders, so that an error there is
//! not repeated here.

mod client;
mod conversation;
mod export_server;
mod offer;
mod serve;
mod server;

pub use client::{ExportDescription, OptionReply, PeerReply};
pub use conversation::{Conversation, ScriptResult};
pub use export_server::{ExportFault, ExportServer, ExportedDisk};
pub use offer::{HandshakeFault, HandshakeStyle, Offer, ReplyFault, ReplyFaultKind};
pub use serve::serve;
pub use server::ScriptedServer;
