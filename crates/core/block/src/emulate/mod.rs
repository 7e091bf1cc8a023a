//! Abilities that a device lacks, supplied in one visible place, never inside a backend.
//!
//! [`emulate`] looks at the facts and puts over the device only what is missing; what was supplied is
//! noted in [`Facts::emulated`]. Nothing is pretended: trim, flush and cache stay absent when they are
//! absent, because leaving them out is what callers handle best.

mod align;
mod extents;
mod fua;
mod zero;

use std::sync::Arc;

use crate::{Can, Device, Facts};

/// The device with everything that can be supplied.
///
/// Zero: by writing zeroes. FUA: by a flush after the request. Extents: everything is data. Offsets and
/// lengths that are no multiples of the minimum block: by reading and writing back partial blocks.
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

/// The facts with an ability added, marked as emulated: requests of all others pass as they are.
fn supply(below: &Facts, can: Can) -> Facts {
    let mut facts = Facts::same(below);
    facts.can |= can;
    facts.emulated |= can;
    facts
}
