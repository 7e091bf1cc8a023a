//! Compressed clusters: a deflate stream or a zstd frame, followed by anything up to the end of a
//! sector ("Compressed Clusters Descriptor").

use std::cell::RefCell;

use zstd::stream::raw::{DParameter, Decoder, Operation as _};

use super::header::CompressionType;
use crate::inflate::short;

/// Largest window of a zstd frame, as a power of two: 8 MiB, four times the largest cluster. A
/// frame may ask for any amount of memory.
const WINDOW_BITS_MAX: u32 = 23;

thread_local! {
    /// A decoder has some 100 KiB of tables: each thread keeps its own.
    static ZSTD: RefCell<Option<Decoder<'static>>> = const { RefCell::new(None) };
}

/// Fills `out`, a cluster, from compressed bytes. The work is bounded by the length of both.
///
/// # Errors
/// What is wrong with the compressed bytes.
pub(super) fn unpack(kind: CompressionType, packed: &[u8], out: &mut [u8]) -> Result<(), String> {
    match kind {
        CompressionType::Deflate => crate::inflate::raw(packed, out),
        CompressionType::Zstd => ZSTD.with_borrow_mut(|state| {
            if state.is_none() {
                *state = Some(decoder().map_err(|error| error.to_string())?);
            }
            match state {
                Some(decoder) => unzstd(decoder, packed, out),
                None => Err("no decoder".into()),
            }
        }),
    }
}

fn decoder() -> std::io::Result<Decoder<'static>> {
    let mut decoder = Decoder::new()?;
    decoder.set_parameter(DParameter::WindowLogMax(WINDOW_BITS_MAX))?;
    Ok(decoder)
}

fn unzstd(decoder: &mut Decoder<'static>, packed: &[u8], out: &mut [u8]) -> Result<(), String> {
    decoder.reinit().map_err(|error| error.to_string())?;
    let mut taken = 0;
    let mut made = 0;
    while made < out.len() {
        let step = decoder.run_on_buffers(&packed[taken..], &mut out[made..]);
        let step = step.map_err(|error| format!("no valid zstd frame: {error}"))?;
        taken += step.bytes_read;
        made += step.bytes_written;
        let ended = step.remaining == 0 || step.bytes_read == 0 && step.bytes_written == 0;
        if ended && made < out.len() {
            return Err(short(made, out.len()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(kind: CompressionType, content: &[u8]) -> Vec<u8> {
        match kind {
            CompressionType::Deflate => miniz_oxide::deflate::compress_to_vec(content, 6),
            CompressionType::Zstd => zstd::bulk::compress(content, 3).unwrap(),
        }
    }

    #[test]
    fn a_cluster_is_exactly_what_was_compressed() {
        let content: Vec<u8> = (0..65536_u32).map(|n| (n * n / 7) as u8).collect();
        for kind in [CompressionType::Deflate, CompressionType::Zstd] {
            let mut input = packed(kind, &content);
            let len = input.len();
            input.extend([0xaa; 300]);
            let mut out = vec![0; content.len()];
            unpack(kind, &input, &mut out).unwrap();
            assert!(out == content, "{kind:?}");
            for cut in [0, 1, len / 2] {
                assert!(unpack(kind, &input[..cut], &mut out).is_err(), "{kind:?} {cut}");
            }
            let mut longer = vec![0; content.len() + 1];
            assert!(unpack(kind, &input[..len], &mut longer).is_err(), "{kind:?}");
            unpack(kind, &input, &mut out).expect("an error does not stay");
        }
    }

    #[test]
    fn a_cluster_that_unpacks_to_more_ends_at_its_length() {
        let bomb = vec![0; 16 << 20];
        for kind in [CompressionType::Deflate, CompressionType::Zstd] {
            let mut out = vec![1; 4096];
            let result = unpack(kind, &packed(kind, &bomb), &mut out);
            // A frame may declare a window beyond the limit: refused, and nothing allocated.
            assert!(result.is_err() || out.iter().all(|&byte| byte == 0), "{kind:?}");
        }
    }
}
