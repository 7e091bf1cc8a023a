//! The zeroes that emulated zero requests write.

/// Bytes per write of an emulated zero request.
pub(super) const ZEROES: usize = 1 << 20;

/// The zeroes to write: page-aligned, as the data of all writes is.
#[repr(align(4096))]
pub(super) struct ZeroBuffer(pub(super) [u8; ZEROES]);

pub(super) static NOTHING: ZeroBuffer = ZeroBuffer([0; ZEROES]);

const _: () = assert!(align_of::<ZeroBuffer>() == blockhaul_io::ALIGN);
