//! Deflate streams (RFC 1951), which end at the length of the output.

use std::cell::RefCell;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_PARSE_ZLIB_HEADER, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF,
};
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

thread_local! {
    /// A decoder has some 10 KiB of tables: each thread keeps its own.
    static STATE: RefCell<Box<DecompressorOxide>> = RefCell::default();
}

/// Fills `out` from a stream without a header.
///
/// # Errors
/// What is wrong with the stream.
pub(crate) fn raw(packed: &[u8], out: &mut [u8]) -> Result<(), String> {
    fill(packed, out, 0)
}

/// Fills `out` from a stream with zlib's header (RFC 1950).
///
/// # Errors
/// What is wrong with the stream.
pub(crate) fn zlib(packed: &[u8], out: &mut [u8]) -> Result<(), String> {
    fill(packed, out, TINFL_FLAG_PARSE_ZLIB_HEADER)
}

fn fill(packed: &[u8], out: &mut [u8], flags: u32) -> Result<(), String> {
    let flags = flags | TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, made) = STATE.with_borrow_mut(|state| {
        state.init();
        let (status, _, made) = decompress(state, packed, out, 0, flags);
        (status, made)
    });
    match status {
        TINFLStatus::Done | TINFLStatus::HasMoreOutput if made == out.len() => Ok(()),
        TINFLStatus::Done | TINFLStatus::HasMoreOutput => Err(short(made, out.len())),
        TINFLStatus::Adler32Mismatch => Err("its checksum is wrong".into()),
        _ => Err(format!("no valid deflate stream after {made} bytes")),
    }
}

/// The error about a stream that contains too little.
pub(crate) fn short(made: usize, wanted: usize) -> String {
    format!("it contains {made} of {wanted} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_fills_the_output_or_is_refused() {
        let content: Vec<u8> = (0..70_000_u32).map(|n| (n.wrapping_mul(n) / 7) as u8).collect();
        let mut packed = miniz_oxide::deflate::compress_to_vec_zlib(&content, 6);
        let mut out = vec![0; content.len()];
        zlib(&packed, &mut out).unwrap();
        assert!(out == content);
        zlib(&packed, &mut vec![0; 1000]).expect("the rest is not wanted");
        assert!(zlib(&packed, &mut vec![0; content.len() + 1]).is_err());
        assert!(raw(&packed, &mut out).is_err());
        let last = packed.len() - 1;
        packed[last] ^= 1;
        assert_eq!(zlib(&packed, &mut out).unwrap_err(), "its checksum is wrong");
    }
}
