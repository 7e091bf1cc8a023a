//! What backends of other crates need, too: descriptions, computed reads, devices in a row, and
//! sparse memory.

mod base64;
pub mod computed;
pub mod fill;
pub mod operand;

/// Devices one after the other.
pub mod split {
    pub use crate::split::{is_path, join, part};
}

pub use crate::memory::MemoryDevice;
pub use base64::decode_base64;
