//! `xz`: random access to the contents of an xz file.
//!
//! - `index`: the positions of its blocks. Each is decoded whole, independently, and cached.

mod index;

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{Layer, LayerBase, LayerKind, OpenFuture, ParamKind, ParamValues};
use blockhaul_io::{Data, Reservation};
use crc32fast::hash as crc32;
use lzma_rust2::{Action, Status, XzStream};

use crate::declared::{param_or, usage};
use crate::packed::{PackedContent, PackedFile, PackedIndex, PackedPart, UnpackedDevice};
use crate::per_disk::PerDisk;
use crate::scratch::ScratchMemory;
use index::{XzBlock, XzIndex};

/// The layer `xz`.
pub static XZ: LayerKind = LayerKind {
    name: "xz",
    summary: "decompresses an xz file, with random access",
    manual:
        "The device below is an xz file; its content is served read-only. Blocks of the file are \
located by its index, decompressed separately, and checked; the last `xz-max-depth` are cached \
for all connections, and a block that several requests need is decompressed once. Memory: the \
longest block times the depth, and twice for each of two blocks that are decompressed at a \
time, each with its dictionary.

Make files for this layer with small blocks: `xz --block-size=16MiB`; a file of one block is \
decompressed from its start for every part of it. Files with blocks above `xz-max-block` are \
refused.",
    example: r#"
blockhaul copy sample:16M - | xz -0 --block-size=1MiB > disk.raw.xz
blockhaul copy --verify --source-layer xz disk.raw.xz disk.raw
"#,
    needs_content: true,
    writes_below: false,
    transparent: false,
    params: &[
        param_or("xz-max-block", ParamKind::Size, "512M", "Maximum size of a block."),
        param_or("xz-max-depth", ParamKind::Number, "8", "Number of decompressed blocks to cache."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

/// Maximum number of blocks decoded at a time.
const DECODERS: u64 = 2;
/// Maximum dictionary besides that of the longest block: that of `xz -9`.
const DICTIONARY: u64 = 64 << 20;

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let most = args.size("xz-max-block").unwrap_or(512 << 20);
    let depth = args.number("xz-max-depth").unwrap_or(8);
    if depth == 0 || depth > 1 << 16 {
        return Err(usage("xz: xz-max-depth must be from 1 to 65536"));
    }
    // A block is one buffer.
    if most == 0 || most > 4 << 30 {
        return Err(usage("xz: xz-max-block must be from 1 to 4G"));
    }
    Ok(Arc::new(Xz { most, depth: depth as usize, files: PerDisk::default() }))
}

struct Xz {
    most: u64,
    depth: usize,
    files: PerDisk<PackedContent<XzIndex>>,
}

impl Layer for Xz {
    fn wrap(&self, _inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Err(Error::new(Kind::Unsupported, "xz: the file must be opened with the layer"))
    }

    fn reads_image(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, below: LayerBase) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(async move {
            let facts = below.device.facts();
            let index = async {
                let index = XzIndex::read(&below.device).await?;
                if index.longest > self.most {
                    return Err(Error::new(
                        Kind::TooLarge,
                        format!(
                            "xz: {} has a block of {} bytes, but xz-max-block is {}: compress it with \
                             xz --block-size",
                            facts.name, index.longest, self.most
                        ),
                    ));
                }
                Ok(index)
            };
            let content = PackedContent::open(&self.files, &below, self.depth, index).await?;
            let inner = below.device;
            let scratch = ScratchMemory::for_device(&inner);
            Ok(UnpackedDevice::over(&facts, XzHandle { inner, content, scratch }))
        })
    }
}

impl PackedIndex for XzIndex {
    const FILE: &'static str = "an xz file";

    fn size(&self) -> u64 {
        self.size
    }

    fn part_at(&self, at: u64) -> Option<PackedPart> {
        let number = self.find(at);
        let block = self.blocks.get(number)?;
        Some(PackedPart { number: number as u64, start: block.start, len: block.len })
    }
}

/// A handle.
struct XzHandle {
    inner: Arc<dyn Device>,
    content: Arc<PackedContent<XzIndex>>,
    scratch: ScratchMemory,
}

impl PackedFile for XzHandle {
    type Index = XzIndex;

    fn content(&self) -> &PackedContent<XzIndex> {
        &self.content
    }

    fn decoder(&self, part: PackedPart) -> u64 {
        part.number % DECODERS
    }

    async fn decode(&self, part: PackedPart) -> Result<Data> {
        let content = &self.content;
        let number = part.number;
        let block = content.index.blocks[number as usize];
        let packed = self.packed(block).await?;
        let longest = content.index.longest;
        let decoded = blockhaul_io::offload(move || decode(&packed, block, longest)).await;
        let decoded =
            decoded.map_err(|lost| Error::new(Kind::Io, "cannot decode").because(lost))?;
        let data = decoded.map_err(|why| {
            let text = format!("block {number} of the xz file, at offset {}: {why}", block.at);
            Error::new(Kind::Io, text)
        })?;
        content.kept.keep(number, data.clone());
        Ok(data)
    }
}

impl XzHandle {
    /// A stream's header and the block as it is in the file, with its padding.
    async fn packed(&self, block: XzBlock) -> Result<Vec<u8>> {
        let len = block.packed.next_multiple_of(4);
        let most = block.len.saturating_add(block.len / 8).saturating_add(1 << 20);
        if len > most {
            let text = format!("a block of {} bytes that takes {len}", block.len);
            return Err(Error::new(Kind::Invalid, text));
        }
        let mut bytes = vec![0xfd, b'7', b'z', b'X', b'Z', 0, 0, block.check];
        let sum = crc32(&bytes[6..8]);
        bytes.extend(sum.to_le_bytes());
        let header = bytes.len();
        bytes.resize(header + len as usize, 0);
        self.scratch.fill(&self.inner, block.at, &mut bytes[header..]).await?;
        Ok(bytes)
    }
}

/// Decodes a block after its stream's header, and verifies it.
fn decode(packed: &[u8], block: XzBlock, longest: u64) -> Result<Data, String> {
    let dictionary = longest.max(DICTIONARY) + (1 << 20);
    let limit = u32::try_from(dictionary / 1024).unwrap_or(u32::MAX);
    let mut stream = XzStream::new_mem_limit(false, limit);
    let mut buf = Reservation::unpooled(block.len as usize).into_buf();
    let mut made = 0;
    let mut status = Status::Ok;
    // The decoder compares the block's lengths with an index, whatever the checksum type.
    for input in [packed, &block.end_of_stream()] {
        let mut taken = 0;
        while taken < input.len() {
            let done = stream.process(&input[taken..], &mut buf[made..], Action::Run);
            let done = done.map_err(|error| error.to_string())?;
            taken += done.bytes_consumed;
            made += done.bytes_produced;
            status = done.status;
            if done.bytes_consumed == 0 && done.bytes_produced == 0 {
                break;
            }
        }
    }
    if status != Status::StreamEnd || made < buf.len() {
        return Err(format!(
            "it contains {made} bytes, not {}, or its checksum is wrong",
            block.len
        ));
    }
    Ok(buf.into())
}
