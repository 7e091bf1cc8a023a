//! `as-qcow2:DEVICE`: a device whose contents are an image of another device, made as they are read.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Result};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};
use blockhaul_io::Pool;

use super::plan::{StreamCluster, StreamTables};
use super::{Codec, StreamOptions, plan, table};
use crate::image_view::{self, ImagePart, ImageView, changed};
use crate::pack::{ClusterReadAhead, CompressedClusters, pool};
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

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            let options = options(&target)?;
            image_view::open(&target, async |source| {
                let (tables, made) = plan(source, options).await?;
                let pool = pool(tables.cluster());
                Ok(Qcow2StreamImage { tables, made, options, pool })
            })
            .await
        })
    }
}

fn options(target: &BackendTarget) -> Result<StreamOptions> {
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
struct Qcow2StreamImage {
    tables: StreamTables,
    made: CompressedClusters,
    options: StreamOptions,
    /// Memory for clusters of the source.
    pool: Pool,
}

impl ImageView for Qcow2StreamImage {
    const SCHEME: &'static str = "as-qcow2";

    fn len(&self) -> u64 {
        self.tables.len()
    }

    fn plain(&self, size: u64, at: u64, len: u64) -> Option<(u64, u64)> {
        let tables = &self.tables;
        // Compressed data is checked against its length.
        if self.options.codec.is_some() || at < tables.offset(tables.parts.data) {
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
        let len = (last.end().min(end) - at).min(size.checked_sub(start)?);
        (len > 0).then_some((start, len))
    }

    async fn fill(&self, source: &Arc<dyn Device>, part: &mut ImagePart<'_>) -> Result<()> {
        let data = self.tables.offset(self.tables.parts.data);
        // Between tables and compressed clusters there is nothing.
        part.bytes.fill(0);
        self.put_tables(part).await;
        if part.end() > data { self.put_data(source, part).await } else { Ok(()) }
    }
}

impl Qcow2StreamImage {
    async fn put_tables(&self, part: &mut ImagePart<'_>) {
        let cluster = self.tables.cluster();
        let end = part.end().div_ceil(cluster).min(self.tables.parts.data);
        for number in part.at / cluster..end {
            part.put(number * cluster, &table(&self.tables, self.options, number));
            // Tables are computed, and may be many.
            blockhaul_io::yield_now().await;
        }
    }

    async fn put_data(&self, source: &Arc<dyn Device>, part: &mut ImagePart<'_>) -> Result<()> {
        let Qcow2StreamImage { tables, made, options, pool } = self;
        let (at, end) = (part.at.max(tables.offset(tables.parts.data)), part.end());
        let placed = tables.placed(at).skip_while(|placed| placed.end() <= at);
        let wanted: Vec<StreamCluster> = placed.take_while(|placed| placed.host < end).collect();
        let numbers = wanted.iter().map(|placed| placed.number);
        let ahead =
            ClusterReadAhead::new(source, pool, tables.cluster(), options.packing(), numbers);
        let mut ahead = ahead.with_made(made);
        let mut places = wanted.iter();
        while let Some(piece) = ahead.next().await {
            for packed in piece? {
                let place = places.next().ok_or_else(Error::misfit)?;
                if packed.number != place.number || packed.stored != place.stored {
                    return Err(changed("qcow2"));
                }
                part.put(place.host, packed.bytes.bytes());
            }
        }
        Ok(())
    }
}
