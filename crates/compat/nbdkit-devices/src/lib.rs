//! Devices, layers and gates that exist because nbdkit has them as plugins and filters: with the
//! same names, parameters and behaviour, so that users of nbdkit find them without nbdkit.
//!
//! Each has a file. To add one, write its file and add a line to the list of its kind:
//! [`devices::all`], [`layers::all`] or [`gates::all`].
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod devices;
pub mod gates;
pub mod layers;
