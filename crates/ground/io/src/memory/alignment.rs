//! Alignment of memory for direct I/O.

/// Alignment of every buffer in bytes: enough for O_DIRECT on all common devices.
pub const ALIGN: usize = 4096;
