//! Emulates missing abilities in one visible place, never inside a backend.
//!
//! [`emulate`] adds only layers for what the facts lack, and records it in
//! [`Facts::emulated`](crate::Facts::emulated). Nothing is pretended: a missing trim, flush or cache
//! stays missing, as callers can simply omit these.

mod align;
mod extents;
mod fua;
mod supply;
mod zero;

use std::sync::Arc;

use crate::{Can, Device};

/// Adds all emulations that the device needs.
///
/// Zero: by writing zeroes. FUA: by a flush after the request. Extents: everything is data. Offsets
/// and lengths that are not multiples of the minimum block: by read-modify-write of partial blocks.
pub fn emulate(device: Arc<dyn Device>) -> Arc<dyn Device> {
    let can = device.facts().can;
    let mut device = device;
    if can.contains(Can::WRITE) && !can.contains(Can::ZERO) {
        device = Arc::new(zero::Zero::new(device));
    }
    if can.contains(Can::WRITE | Can::FLUSH) && !can.contains(Can::FUA) {
        device = Arc::new(fua::Fua::new(device));
    }
    if !can.contains(Can::EXTENTS) {
        device = Arc::new(extents::AllData::new(device));
    }
    if device.facts().block.minimum > 1 {
        device = Arc::new(align::Align::new(device));
    }
    device
}
