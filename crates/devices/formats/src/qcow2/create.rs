//! New images, as targets of copies.
//!
//! Everything that can be refused is refused before the file is touched: the image exists in memory
//! first. [`Preparation`] empties the file and writes the tables.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{BackendTarget, DeviceSpec, DirectMode, Intent, OpenedDevice, Preparation};

use super::chain::{ChainLevel, Qcow2Chain};
use super::entry::EntryLayout;
use super::error::usage;
use super::header::{
    Header, MAGIC, autoclear, compatible, extension, feature_table, incompatible, push_extension,
};
use super::image::{ImageMetadata, ImageOptions};
use super::refcount::Width;
use super::words::bytes_of;
use super::write::ImageWriter;
use crate::bytes::index;
use crate::named::{ChainFile, folder_of};
use crate::storage;

/// Length in bytes of the header with the compression type, padded, and of that of version 2.
const HEADER_LEN: u32 = 112;
const HEADER_LEN_V2: u32 = 72;
/// log2 of the bits of a refcount in version 2, and the default.
const REFCOUNT_ORDER: u32 = 4;
/// Names of features are written to clusters that are larger: in smaller ones they leave too little
/// room for names of files.
const NAMES_CLUSTER: u64 = 4096;
/// Longest L1 table in bytes; QEMU reads as much.
const L1_MAX: u64 = 32 << 20;
/// Smallest cluster in bytes with subclusters.
const SUBCLUSTERS_MIN: u64 = 16 << 10;

/// What a new image is to be.
struct NewImageOptions {
    /// Size of the disk in bytes, a multiple of 512.
    size: u64,
    cluster_bits: u32,
    subclusters: bool,
    /// 2 or 3.
    version: u32,
    /// log2 of the bits of a refcount.
    refcount_order: u32,
    lazy_refcounts: bool,
    /// Compressed clusters, once there are some, are made by zstd.
    zstd: bool,
    /// Name and format of the backing file, as the image names it.
    backing: Option<(String, &'static str)>,
    data_file: Option<String>,
    /// The data file is a raw image of the disk.
    data_file_raw: bool,
}

/// The clusters of the tables of a new image, after its header.
struct NewImageTables {
    l1_entries: u64,
    table: u64,
    table_len: u64,
    blocks: u64,
    blocks_len: u64,
    l1: u64,
    /// Number of all clusters.
    end: u64,
}

/// Creates the image that the user described, for a copy of `size` bytes.
pub(super) async fn open(target: &BackendTarget, size: u64) -> Result<(OpenedDevice, Preparation)> {
    let description = target.text()?;
    let wanted = NewImageOptions::new(target, description, size)?;
    let tables = wanted.tables()?;
    let first = wanted.first_cluster(&tables)?;
    let header = Header::parse(&first)?;
    let below = match target.args.text("backing") {
        None => None,
        Some(backing) => {
            let intent = Intent { direct: target.intent.direct, ..Intent::READ_IMAGE };
            Some(ChainFile::new(target.context.open(backing, intent).await?))
        }
    };
    let (external, data_ready) = data_file(target, &wanted).await?;
    let (opened, file_ready) =
        target.context.open_target(description, intent(target, &wanted)?).await?;
    let file = ChainFile::new(opened);
    for other in below.iter().chain(&external) {
        check_apart(&file, other)?;
    }
    let image = Arc::new(wanted.image(target, &header, &tables, &file, external.as_ref())?);
    let device = file.device.clone();
    let mut levels = vec![ChainLevel { image: Some(image), file, external }];
    levels.extend(below.map(|file| ChainLevel { image: None, file, external: None }));
    let opened = Arc::new(Qcow2Chain { levels }).opened()?;
    let preparation = Preparation::new(move || {
        Box::pin(async move {
            file_ready.run().await?;
            data_ready.run().await?;
            wanted.write(&device, &tables, &first).await
        })
    });
    Ok((opened, preparation))
}

/// Refuses an image that would replace a file that it needs.
fn check_apart(file: &ChainFile, other: &ChainFile) -> Result<()> {
    let facts = file.device.facts();
    let others = other.device.facts();
    if facts.files.iter().any(|id| others.files.contains(id)) {
        Err(usage(format!("the new image {} would replace {}", facts.name, others.name)))
    } else {
        Ok(())
    }
}

/// What the file of a new image is opened for.
fn intent(target: &BackendTarget, wanted: &NewImageOptions) -> Result<Intent> {
    if target.intent.direct == DirectMode::On {
        let text = "qcow2: a new image cannot be written with direct I/O: leave out --direct";
        return Err(Error::new(Kind::Unsupported, text));
    }
    // All clusters with their entries and refcounts, and those that are replaced before a flush.
    let most = wanted.size.saturating_mul(4).saturating_add(256 << 20).min(1 << 55);
    let intent = Intent { image: true, exclusive: true, ..Intent::growing(most) };
    Ok(intent.direct(target.intent.direct))
}

async fn data_file(
    target: &BackendTarget,
    wanted: &NewImageOptions,
) -> Result<(Option<ChainFile>, Preparation)> {
    let Some(description) = target.args.text("data-file") else {
        return Ok((None, Preparation::default()));
    };
    let intent = Intent { direct: target.intent.direct, ..Intent::target(wanted.size) };
    let (opened, ready) = target.context.open_target(description, intent).await?;
    let storage = ChainFile::new(opened);
    let size = storage.device.facts().size;
    if size < wanted.size {
        let text = format!("the data file has {size} bytes, and the disk {}", wanted.size);
        return Err(Error::new(Kind::NoSpace, text));
    }
    Ok((Some(storage), ready))
}

impl NewImageOptions {
    fn new(target: &BackendTarget, description: &str, size: u64) -> Result<NewImageOptions> {
        let args = &target.args;
        if description.is_empty() {
            return Err(usage("requires a device: qcow2:PATH"));
        }
        if args.text("snapshot").is_some() {
            return Err(usage("a new image has no snapshots: leave out snapshot=NAME"));
        }
        let cluster = args.size("cluster").unwrap_or(64 << 10);
        if !cluster.is_power_of_two() || !(512..=2 << 20).contains(&cluster) {
            return Err(usage(format!(
                "clusters of {cluster} bytes: use a power of two, 512 to 2M"
            )));
        }
        let subclusters = args.text("subclusters").is_some() && args.switch("subclusters");
        if subclusters && cluster < SUBCLUSTERS_MIN {
            return Err(usage("subclusters need clusters of at least 16k"));
        }
        let folder = folder_of(description);
        let named = |text| name_of(text, folder.as_deref());
        let backing =
            match (args.text("backing").map(named).transpose()?, args.text("backing-format")) {
                (None, _) => None,
                (Some((name, _)), Some("raw")) => Some((name, "raw")),
                (Some((name, _)), Some(_)) => Some((name, "qcow2")),
                (Some(both), None) => Some(both),
            };
        let data_file = args.text("data-file").map(named).transpose()?.map(|(name, _)| name);
        if backing.is_some() && data_file.is_some() {
            return Err(usage(
                "an image with data-file has no backing file: leave out one of both",
            ));
        }
        let size = size.checked_next_multiple_of(512).filter(|&size| i64::try_from(size).is_ok());
        let size = size.ok_or_else(|| usage("the disk is too large"))?;
        let wanted = NewImageOptions {
            size,
            cluster_bits: cluster.trailing_zeros(),
            subclusters,
            version: if args.text("version") == Some("2") { 2 } else { 3 },
            refcount_order: refcount_order(args.number("refcount-bits").unwrap_or(16))?,
            lazy_refcounts: args.switch("lazy-refcounts"),
            zstd: args.text("compression") == Some("zstd"),
            backing,
            data_file,
            data_file_raw: args.switch("data-file-raw"),
        };
        wanted.check_version()?;
        Ok(wanted)
    }

    fn check_version(&self) -> Result<()> {
        if self.data_file_raw && self.data_file.is_none() {
            return Err(usage("data-file-raw needs data-file"));
        }
        let new = [
            ("subclusters", self.subclusters),
            ("refcount-bits", self.refcount_order != REFCOUNT_ORDER),
            ("lazy-refcounts", self.lazy_refcounts),
            ("compression=zstd", self.zstd),
            ("data-file", self.data_file.is_some()),
        ];
        match new.into_iter().find(|one| one.1 && self.version < 3) {
            Some((name, _)) => Err(usage(format!("version=2 has no {name}: use version=3"))),
            None => Ok(()),
        }
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn tables(&self) -> Result<NewImageTables> {
        let cluster = self.cluster();
        let l2_entries = cluster / if self.subclusters { 16 } else { 8 };
        let l1_entries = self.size.div_ceil(l2_entries << self.cluster_bits);
        if l1_entries * 8 > L1_MAX {
            let size = self.size;
            return Err(usage(format!(
                "clusters of {cluster} bytes are too small for a disk of {size}: use cluster=64k or more"
            )));
        }
        let l1_len = (l1_entries * 8).div_ceil(cluster);
        let per_block = cluster / 8 * Width::of_order(self.refcount_order).per_word();
        let mut table_len = 1;
        let mut blocks_len = 1;
        loop {
            let end = 1 + table_len + blocks_len + l1_len;
            let needed = end.div_ceil(per_block);
            if needed > blocks_len {
                blocks_len = needed;
            } else if blocks_len > table_len * cluster / 8 {
                table_len += 1;
            } else {
                let blocks = 1 + table_len;
                let l1 = blocks + blocks_len;
                return Ok(NewImageTables {
                    l1_entries,
                    table: 1,
                    table_len,
                    blocks,
                    blocks_len,
                    l1,
                    end,
                });
            }
        }
    }

    fn features(&self) -> u64 {
        let data_file = if self.data_file.is_some() { incompatible::DATA_FILE } else { 0 };
        let subclusters = if self.subclusters { incompatible::EXTENDED_L2 } else { 0 };
        let zstd = if self.zstd { incompatible::COMPRESSION } else { 0 };
        data_file | subclusters | zstd
    }

    /// The first cluster ("Header", "Header extensions").
    fn first_cluster(&self, tables: &NewImageTables) -> Result<Vec<u8>> {
        let is_new = self.version >= 3;
        let len = if is_new { HEADER_LEN } else { HEADER_LEN_V2 };
        let mut bytes = vec![0; index(len.into())];
        let offset = |cluster: u64| (cluster << self.cluster_bits).to_be_bytes();
        let short = |number: u64| u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes();
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(4, &self.version.to_be_bytes());
        put(20, &self.cluster_bits.to_be_bytes());
        put(24, &self.size.to_be_bytes());
        put(36, &short(tables.l1_entries));
        put(40, &offset(if tables.l1_entries == 0 { 0 } else { tables.l1 }));
        put(48, &offset(tables.table));
        put(56, &short(tables.table_len));
        if is_new {
            put(72, &self.features().to_be_bytes());
            let lazy = if self.lazy_refcounts { compatible::LAZY_REFCOUNTS } else { 0 };
            put(80, &lazy.to_be_bytes());
            let raw = if self.data_file_raw { autoclear::RAW_DATA_FILE } else { 0 };
            put(88, &raw.to_be_bytes());
            put(96, &self.refcount_order.to_be_bytes());
            put(100, &HEADER_LEN.to_be_bytes());
            put(104, &[u8::from(self.zstd)]);
        }
        let format = self.backing.as_ref().map(|(_, format)| (extension::BACKING_FORMAT, *format));
        let data = self.data_file.as_ref().map(|name| (extension::DATA_FILE, name.as_str()));
        for (kind, text) in format.into_iter().chain(data) {
            push_extension(&mut bytes, kind, text.as_bytes());
        }
        if is_new && self.cluster() > NAMES_CLUSTER {
            push_extension(&mut bytes, extension::FEATURE_NAMES, &feature_table());
        }
        push_extension(&mut bytes, extension::END, &[]);
        if let Some((name, _)) = &self.backing {
            let at = bytes.len() as u64;
            bytes.extend(name.as_bytes());
            bytes[8..16].copy_from_slice(&at.to_be_bytes());
            bytes[16..20].copy_from_slice(&short(name.len() as u64));
        }
        if bytes.len() as u64 > self.cluster() {
            let cluster = self.cluster();
            return Err(usage(format!(
                "the names of other files do not fit in a cluster of {cluster} bytes: use a larger one"
            )));
        }
        bytes.resize(index(self.cluster()), 0);
        Ok(bytes)
    }

    /// The image as it is before its first write.
    fn image(
        &self,
        target: &BackendTarget,
        header: &Header,
        tables: &NewImageTables,
        file: &ChainFile,
        external: Option<&ChainFile>,
    ) -> Result<ImageMetadata> {
        let facts = file.device.facts();
        let file_len = tables.end << self.cluster_bits;
        if facts.size < file_len {
            let text =
                format!("the tables of the image need {file_len} bytes; it has {}", facts.size);
            return Err(Error::new(Kind::NoSpace, text).on(&facts.name));
        }
        let data_len = external.map(|storage| storage.device.facts().size);
        let layout = EntryLayout::new(header, file_len, data_len.unwrap_or(file_len));
        let blocks = tables.blocks..tables.blocks + tables.blocks_len;
        let mut entries: Vec<u64> = blocks.map(|block| block << self.cluster_bits).collect();
        entries.resize(index(tables.table_len * self.cluster() / 8), 0);
        let used: HashSet<u64> = (0..tables.end).collect();
        let writer = ImageWriter::new(&file.device, header, layout, entries, used);
        let memory = target.args.size("cache").unwrap_or(0);
        let options =
            ImageOptions { snapshot: None, data_len, memory, write: true, keeps_bitmaps: false };
        let l1 = vec![0; index(tables.l1_entries)];
        let mut image = ImageMetadata::new(header, self.size, layout, l1, Some(writer), options);
        let is_zero = external.is_none_or(|storage| storage.device.facts().zeroed);
        image.is_new = is_zero;
        if target.args.switch("compress") {
            image.pack()?;
        }
        Ok(image)
    }

    /// Writes the tables, and then the header that names them.
    async fn write(
        &self,
        file: &Arc<dyn Device>,
        tables: &NewImageTables,
        first: &[u8],
    ) -> Result<()> {
        let words = index(self.cluster() / 8);
        let at = |cluster: u64| cluster << self.cluster_bits;
        let width = Width::of_order(self.refcount_order);
        let per_block = words as u64 * width.per_word();
        let mut table = vec![0; words * index(tables.table_len)];
        for (number, entry) in (0..tables.blocks_len).zip(&mut table) {
            *entry = at(tables.blocks + number);
            let mut block = vec![0; words];
            let used = tables.end.saturating_sub(number * per_block).min(per_block);
            for cluster in 0..used {
                width.set(&mut block, cluster, 1);
            }
            storage::write(file, at(tables.blocks + number), &bytes_of(&block)).await?;
        }
        storage::write(file, at(tables.table), &bytes_of(&table)).await?;
        let empty = vec![0; index(self.cluster())];
        // As in files of QEMU, the last cluster need not be whole.
        let mut left = tables.l1_entries * 8;
        for cluster in tables.l1..tables.end {
            let part = left.min(self.cluster());
            storage::write(file, at(cluster), &empty[..index(part)]).await?;
            left -= part;
        }
        storage::flush(file).await?;
        storage::write(file, 0, first).await
    }
}

/// log2 of the bits of a refcount.
fn refcount_order(bits: u64) -> Result<u32> {
    if bits.is_power_of_two() && bits <= 64 {
        Ok(bits.trailing_zeros())
    } else {
        Err(usage(format!("refcounts of {bits} bits: use a power of two, 1 to 64")))
    }
}

/// The name of a device as an image names it, and its format. A file in the folder of the image is
/// named relative to that, so that both can be moved together.
fn name_of(description: &str, folder: Option<&Path>) -> Result<(String, &'static str)> {
    let unknown = || {
        let text = format!(
            "{description:?} cannot be named in an image: use a path, qcow2:PATH or an NBD URI"
        );
        usage(text)
    };
    let (path, format) = match DeviceSpec::parse(OsStr::new(description))? {
        DeviceSpec::Path(path) => (path, "raw"),
        DeviceSpec::Scheme { scheme, rest } if scheme == "file" || scheme == "qcow2" => {
            let (path, _) = rest.split_once('?').unwrap_or((&rest, ""));
            let path = PathBuf::from(blockhaul_catalog::percent_decode(path)?);
            (path, if scheme == "file" { "raw" } else { "qcow2" })
        }
        DeviceSpec::Scheme { scheme, .. } if scheme.starts_with("nbd") => {
            return Ok((description.to_string(), "raw"));
        }
        _ => return Err(unknown()),
    };
    let absolute = |path: &Path| std::path::absolute(path).map_err(|_| unknown());
    let path = absolute(&path)?;
    let folder = match folder {
        Some(folder) if folder.as_os_str().is_empty() => Some(absolute(Path::new("."))?),
        Some(folder) => Some(absolute(folder)?),
        None => None,
    };
    let is_beside = folder.is_some() && path.parent() == folder.as_deref();
    let name = if is_beside { path.file_name() } else { Some(path.as_os_str()) };
    let name = name.and_then(OsStr::to_str).ok_or_else(unknown)?;
    // A colon would end the name of a protocol.
    let name = if is_beside && name.contains(':') { format!("./{name}") } else { name.to_string() };
    if name.len() > 1023 {
        return Err(usage(format!("{name:?} is longer than 1023 bytes")));
    }
    Ok((name, format))
}
