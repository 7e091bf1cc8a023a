//! Small listeners beside the main work of a command.
//!
//! - [`peer_listener`]: accepts a few peers, with a task for each.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

pub mod peer_listener;
