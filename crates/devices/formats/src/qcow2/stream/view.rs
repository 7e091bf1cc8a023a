//! `as-qcow2:DEVICE`: a device whose contents are an image of another device, made as they are read.

use std::sync::Arc;

use blockhaul_block::emulate::emulate;
use blockhaul_block::{
    Access, Can, Device, Error, Facts, FileRange, Kind, Op, Outcome, Pending, Reply, Request,
    Result, fence,
};
use blockhaul_catalog::{Another, Backend, Intent, Opened, Opening, Param, ParamKind, Target};
use blockhaul_io::{Pool, Reservation};

use super::plan::{Placed, Tables};
use super::{Codec, StreamOptions, changed, plan, table};
use crate::bytes::index;
use crate::pack::{Ahead, Made, Packed, Stored, pool};
use crate::qcow2::error::usage;

/// The backend `as-qcow2:DEVICE`.
pub struct AsQcow2;

impl Backend for AsQcow2 {
    fn schemes(&self) -> &'static [&'static str] {
        &["as-qcow2"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "a qcow2 image of DEVICE, made as it is read; DEVICE must not change in the meantime. It is a path, \
         or any device, where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:64M disk.raw && blockhaul copy as-qcow2:disk.raw disk.qcow2
blockhaul copy 'as-qcow2:disk.raw?zstd=3' - > small.qcow2
"#
    }

    fn params(&self) -> &'static [Param] {
        &[
            Param {
                name: "cluster",
                kind: ParamKind::Size,
                default: Some("64k"),
                doc: "Cluster size: a power of two, 512 to 2M.",
            },
            Param {
                name: "zstd",
                kind: ParamKind::Number,
                default: None,
                doc: "Compress clusters with zstd at this level, 1 to 19: all of them when the device is opened, \
                      for their lengths, and those that do not fit in memory again when they are read. If not \
                      given, clusters are not compressed.",
            },
            Param {
                name: "zlib",
                kind: ParamKind::Number,
                default: None,
                doc: "The same with deflate, 1 to 9: larger images, which programs older than QEMU 5.1 read.",
            },
            Param {
                name: "memory",
                kind: ParamKind::Size,
                default: Some("32M"),
                doc: "Memory for compressed clusters.",
            },
        ]
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move { open(&target).await })
    }
}

async fn open(target: &Target) -> Result<Opened> {
    if target.intent.write {
        let text =
            "as-qcow2: an image that is made as it is read cannot be written: copy it to a file";
        return Err(Error::new(Kind::Unsupported, text));
    }
    // The tables that are made describe the contents of now.
    let intent = Intent { direct: target.intent.direct, ..Intent::READ_IMAGE };
    let options = options(target)?;
    let opened = target.context.open(target.text()?, intent).await?;
    let source = fence(emulate(opened.device));
    let (tables, made) = plan(&source, options).await?;
    let pool = pool(tables.cluster());
    let image = Image { tables: Arc::new(tables), made: Arc::new(made), options, pool };
    let device = Arc::new(View::new(source, image.clone()));
    let more = opened.more.map(|more| Arc::new(More { more, image }) as Arc<dyn Another>);
    Ok(Opened { device, more })
}

fn options(target: &Target) -> Result<StreamOptions> {
    let usual = StreamOptions::default();
    let cluster = target.args.size("cluster").unwrap_or(usual.cluster.into());
    let cluster = u32::try_from(cluster).map_err(|_| usage("the cluster size is above 2M"))?;
    let [zstd, zlib] = ["zstd", "zlib"].map(|name| target.args.number(name));
    let above = |most: u8| usage(format!("the compression level is above {most}"));
    let codec = match (zstd, zlib) {
        (None, None) => None,
        (Some(level), None) => Some(Codec::Zstd(i32::try_from(level).map_err(|_| above(19))?)),
        (None, Some(level)) => Some(Codec::Deflate(u8::try_from(level).map_err(|_| above(9))?)),
        (Some(_), Some(_)) => return Err(usage("leave out one of zstd and zlib")),
    };
    let memory = target.args.size("memory").unwrap_or(usual.memory);
    Ok(StreamOptions { cluster, codec, memory })
}

/// What all handles share.
#[derive(Clone)]
struct Image {
    tables: Arc<Tables>,
    made: Arc<Made>,
    options: StreamOptions,
    /// Memory for clusters of the source.
    pool: Pool,
}

struct More {
    more: Arc<dyn Another>,
    image: Image,
}

impl Another for More {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let more = self.more.clone();
        let image = self.image.clone();
        Box::pin(async move {
            let source = fence(emulate(more.another().await?));
            Ok(Arc::new(View::new(source, image)) as Arc<dyn Device>)
        })
    }
}

/// A handle.
struct View {
    facts: Arc<Facts>,
    parts: Arc<Parts>,
}

struct Parts {
    source: Arc<dyn Device>,
    /// Size of the source in bytes.
    size: u64,
    image: Image,
}

impl View {
    fn new(source: Arc<dyn Device>, image: Image) -> View {
        let below = source.facts();
        let mut facts = Facts::new(format!("as-qcow2:{}", below.name), image.tables.len());
        facts.description.clone_from(&below.description);
        // All handles read the same, and nothing is ever written.
        facts.can = Can::MULTI_CONN;
        facts.rotational = below.rotational;
        facts.in_flight = below.in_flight;
        facts.files.clone_from(&below.files);
        facts.block.maximum = facts.block.maximum.min(below.block.maximum);
        let parts = Parts { size: below.size, source, image };
        View { facts: Arc::new(facts), parts: Arc::new(parts) }
    }
}

impl Device for View {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        let Op::Read(room) = request.op else {
            return Error::new(Kind::ReadOnly, "an image that is made as it is read").into();
        };
        let at = request.at;
        let len = room.len() as u64;
        if let Some((source_at, plain)) = self.parts.plain(at, len)
            && plain == len
        {
            return self.parts.source.submit(Request::read(source_at, room));
        }
        let parts = self.parts.clone();
        Pending::start(async move { parts.read(at, room).await })
    }

    fn file_at(&self, at: u64, len: u64, access: Access) -> Option<FileRange> {
        if access != Access::Read {
            return None;
        }
        let (at, len) = self.parts.plain(at, len)?;
        self.parts.source.file_at(at, len, access)
    }
}

impl Parts {
    /// The longest prefix of a range that is plain bytes of the source: their offset there, and
    /// length.
    fn plain(&self, at: u64, len: u64) -> Option<(u64, u64)> {
        let tables = &self.image.tables;
        // Compressed data is checked against its length.
        if self.image.options.codec.is_some() || at < tables.offset(tables.parts.data) {
            return None;
        }
        let mut placed = tables.placed(at).skip_while(|placed| placed.end() <= at);
        let mut last = placed.next().filter(|first| first.host <= at)?;
        let start = last.number * tables.cluster() + (at - last.host);
        let end = at + len;
        while last.end() < end
            && let Some(next) = placed.next()
            && next.number == last.number + 1
            && next.host == last.end()
        {
            last = next;
        }
        let len = (last.end().min(end) - at).min(self.size.checked_sub(start)?);
        (len > 0).then_some((start, len))
    }

    async fn read(&self, at: u64, room: Reservation) -> Outcome {
        let mut buf = room.into_buf();
        let tables = &self.image.tables;
        let data = tables.offset(tables.parts.data);
        let of_tables = index(data.saturating_sub(at)).min(buf.len());
        let (front, rest) = buf.split_at_mut(of_tables);
        self.fill_tables(at, front).await;
        if !rest.is_empty() {
            self.fill_data(at.max(data), rest).await?;
        }
        Ok(Reply::Data(buf.into()))
    }

    async fn fill_tables(&self, at: u64, out: &mut [u8]) {
        let Image { tables, options, .. } = &self.image;
        let mut next = at;
        let mut rest = out;
        while !rest.is_empty() {
            let cluster = next / tables.cluster();
            let bytes = table(tables, *options, cluster);
            let start = index(next % tables.cluster());
            let len = bytes.len().saturating_sub(start).min(rest.len());
            let (part, behind) = rest.split_at_mut(len);
            part.copy_from_slice(&bytes[start..start + len]);
            (next, rest) = (next + len as u64, behind);
            // Tables are computed, and may be many.
            blockhaul_io::yield_now().await;
        }
    }

    /// Fills a range of the data.
    async fn fill_data(&self, at: u64, out: &mut [u8]) -> Result<()> {
        // Between compressed clusters there is nothing.
        out.fill(0);
        let Image { tables, made, options, pool } = &self.image;
        let end = at + out.len() as u64;
        let placed = tables.placed(at).skip_while(|placed| placed.end() <= at);
        let wanted: Vec<Placed> = placed.take_while(|placed| placed.host < end).collect();
        let numbers = wanted.iter().map(|placed| placed.number);
        let ahead = Ahead::new(&self.source, pool, tables.cluster(), options.packing(), numbers);
        let mut ahead = ahead.with_made(made);
        let mut places = wanted.iter();
        while let Some(piece) = ahead.next().await {
            for packed in piece? {
                let place = places.next().ok_or_else(Error::misfit)?;
                put(&packed, place, at, out)?;
            }
        }
        Ok(())
    }
}

/// Copies the part of a cluster that is within `out`, which begins at `at` of the image.
fn put(packed: &Packed, place: &Placed, at: u64, out: &mut [u8]) -> Result<()> {
    if packed.number != place.number || packed.stored != place.stored {
        return Err(changed());
    }
    debug_assert!(packed.stored != Stored::Not);
    let start = at.max(place.host);
    let end = (at + out.len() as u64).min(place.end());
    let from = index(start - place.host);
    let to = index(end - place.host);
    let bytes = packed.bytes.bytes().get(from..to).ok_or_else(Error::misfit)?;
    out[index(start - at)..index(end - at)].copy_from_slice(bytes);
    Ok(())
}
