//! Layers as tar files: packed by gzip, by zstd, or not.

use std::io;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_layers::Inflater;
use blockhaul_wire::printable;
use zstd::stream::raw::{DParameter, Decoder, Operation as _};

/// The window of zstd is at most 2 to this power, in bytes: that of `zstd` without `--long`.
const WINDOW_LOG_MAX: u32 = 27;
/// Bytes that are decoded at a time.
const PIECE: usize = 256 << 10;
const SHOWN_MAX: usize = 120;

/// A decoder of a layer.
pub(super) enum LayerDecoder {
    Plain,
    Gzip(Box<Inflater>),
    Zstd(Box<ZstdFrames>),
}

/// Frames of zstd, of which some may be skipped.
pub(super) struct ZstdFrames {
    decoder: Decoder<'static>,
    /// Whether the last frame is complete.
    is_complete: bool,
    piece: Vec<u8>,
}

impl LayerDecoder {
    /// The decoder for a layer of this type.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if there is none.
    pub(super) fn of(media_type: &str) -> Result<LayerDecoder> {
        match media_type {
            "application/vnd.oci.image.layer.v1.tar"
            | "application/vnd.docker.image.rootfs.diff.tar" => Ok(LayerDecoder::Plain),
            "application/vnd.oci.image.layer.v1.tar+gzip"
            | "application/vnd.docker.image.rootfs.diff.tar.gzip" => {
                Ok(LayerDecoder::Gzip(Box::default()))
            }
            "application/vnd.oci.image.layer.v1.tar+zstd"
            | "application/vnd.docker.image.rootfs.diff.tar.zstd" => {
                let mut decoder = Decoder::new().map_err(no_decoder)?;
                let limit = DParameter::WindowLogMax(WINDOW_LOG_MAX);
                decoder.set_parameter(limit).map_err(no_decoder)?;
                let piece = vec![0; PIECE];
                Ok(LayerDecoder::Zstd(Box::new(ZstdFrames { decoder, is_complete: false, piece })))
            }
            other => {
                let shown = printable(other.as_bytes(), SHOWN_MAX);
                let text = format!("a layer of the image is of an unknown type ({shown})");
                let remedy = "push the image with layers in tar, packed by gzip or zstd";
                Err(Error::new(Kind::Unsupported, text).with_remedy(remedy))
            }
        }
    }

    /// Decodes bytes, which go to `sink` in parts.
    ///
    /// # Errors
    /// They are damaged, and errors of `sink`.
    pub(super) fn feed(
        &mut self,
        mut input: &[u8],
        mut sink: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        match self {
            LayerDecoder::Plain => sink(input),
            LayerDecoder::Gzip(inflater) => {
                let mut out = Vec::new();
                while !input.is_empty() {
                    out.clear();
                    let before = inflater.taken;
                    let until = inflater.made + PIECE as u64;
                    inflater.step(input, until, &mut out).map_err(damaged)?;
                    let taken = usize::try_from(inflater.taken - before).unwrap_or(0);
                    input = &input[taken..];
                    sink(&out)?;
                }
                Ok(())
            }
            LayerDecoder::Zstd(frames) => frames.feed(input, sink),
        }
    }

    /// Checks that the layer may end here.
    ///
    /// # Errors
    /// It may not.
    pub(super) fn finish(&self) -> Result<()> {
        match self {
            LayerDecoder::Plain => Ok(()),
            LayerDecoder::Gzip(inflater) => inflater.finish().map_err(damaged),
            LayerDecoder::Zstd(frames) if frames.is_complete => Ok(()),
            LayerDecoder::Zstd(_) => Err(damaged("its end is missing".to_owned())),
        }
    }
}

impl ZstdFrames {
    fn feed(&mut self, mut input: &[u8], mut sink: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        loop {
            let status = self.decoder.run_on_buffers(input, &mut self.piece);
            let status = status.map_err(|error| damaged(error.to_string()))?;
            input = &input[status.bytes_read..];
            self.is_complete = status.remaining == 0;
            sink(&self.piece[..status.bytes_written])?;
            let is_full = status.bytes_written == self.piece.len();
            if input.is_empty() && !(is_full && status.remaining > 0) {
                return Ok(());
            }
            if status.bytes_read == 0 && status.bytes_written == 0 {
                return Err(damaged("the decoder makes no progress".to_owned()));
            }
        }
    }
}

fn damaged(why: String) -> Error {
    let text = format!("a layer of the image is damaged: {why}");
    Error::new(Kind::Invalid, text).with_remedy("push the image again")
}

fn no_decoder(error: io::Error) -> Error {
    Error::new(Kind::NoMemory, "no decoder of zstd").because(error)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

    fn decode(kind: &str, bytes: &[u8], piece: usize) -> Result<Vec<u8>> {
        let mut decoder = LayerDecoder::of(kind)?;
        let mut all = Vec::new();
        for part in bytes.chunks(piece) {
            decoder.feed(part, |more| {
                all.extend_from_slice(more);
                Ok(())
            })?;
        }
        decoder.finish().map(|()| all)
    }

    #[test]
    fn frames_follow_each_other_and_some_are_skipped() {
        let content: Vec<u8> =
            (0..900_000_u32).map(|at| (at.wrapping_mul(at) >> 11) as u8).collect();
        let pack = |bytes: &[u8]| zstd::bulk::compress(bytes, 3).unwrap();
        let skipped = [&0x184D_2A50_u32.to_le_bytes()[..], &5_u32.to_le_bytes(), b"notes"].concat();
        let file = [pack(&content[..500_000]), skipped.clone(), pack(&content[500_000..]), skipped]
            .concat();
        for piece in [7, 4096, file.len()] {
            assert!(decode(ZSTD, &file, piece).unwrap() == content, "{piece}");
        }
        let frame = pack(&content);
        for end in [0, 1, 10, frame.len() - 1] {
            assert_eq!(
                decode(ZSTD, &frame[..end], 4096).unwrap_err().kind(),
                Kind::Invalid,
                "{end}"
            );
        }
        assert!(decode(ZSTD, b"no zstd at all", 4096).is_err());
        assert!(decode("application/vnd.oci.image.layer.v1.tar+gzip", &frame, 4096).is_err());
        assert_eq!(decode("application/vnd.oci.image.layer.v1.tar", b"x", 1).unwrap(), b"x");
        let said = decode("text/\u{1b}", b"", 1).unwrap_err().to_string();
        assert!(said.contains("unknown type (text/") && !said.contains('\u{1b}'), "{said}");
    }

    #[test]
    fn windows_are_limited() {
        // A frame without its length and with a window of 2^28 bytes, of which no byte is needed.
        let window = (28 - 10) << 3;
        let frame = [0x28, 0xb5, 0x2f, 0xfd, 0, window, 1, 0, 0];
        assert_eq!(decode(ZSTD, &frame, 100).unwrap_err().kind(), Kind::Invalid);
        let window = (27 - 10) << 3;
        let frame = [0x28, 0xb5, 0x2f, 0xfd, 0, window, 1, 0, 0];
        assert_eq!(decode(ZSTD, &frame, 100).unwrap(), b"");
    }
}
