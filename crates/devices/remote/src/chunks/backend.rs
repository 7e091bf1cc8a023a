//! The kind of storage `chunks:LOCATION`.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Error, FileId, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, ConnectionSettings, OpenFuture, OpenedDevice, Param, ParamKind,
    ParamValues, Preparation, StorageId, StorageIds, TargetMaking,
};

use crate::chunks::device::ChunkDevice;
use crate::chunks::disk::ChunkDisk;
use crate::chunks::folder::{ObjectFolder, StoreFolder};
use crate::chunks::layout::ChunkManifest;
use crate::chunks::local_folder::LocalFolder;
use crate::chunks::opening::{ChunkPlace, no_disk};
use crate::identity::storage_ids;
use crate::store_backend::{StoreDescription, params};
use crate::store_failure::StoreKind;
use crate::{RemoteOptions, runtime};

/// Bytes of a chunk of a new disk.
const CHUNK: u64 = 4 << 20;
/// Bytes of chunks in memory.
const CACHE: u64 = 64 << 20;
/// Lease of a writer, and its range.
const LEASE: Duration = Duration::from_secs(30);
const LEASE_RANGE: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(3600);
/// Files of a directory that are written at a time.
const FILES: usize = 8;

/// Disks in chunks.
pub(crate) struct ChunkBackend {
    options: RemoteOptions,
}

impl ChunkBackend {
    /// With these time limits.
    pub(crate) fn new(options: RemoteOptions) -> ChunkBackend {
        ChunkBackend { options }
    }
}

const PARAMS: &[Param] = &[
    Param {
        name: "size",
        kind: ParamKind::Size,
        default: None,
        doc: "Bytes of a chunk of a new disk, a power of two from 64K to 64M [default: 4M]; those of an existing disk \
              must be the same.",
    },
    Param {
        name: "create",
        kind: ParamKind::Size,
        default: None,
        doc: "Make a disk of this size, unless there is one of this size; a copy makes one of the size of its source.",
    },
    Param {
        name: "cache",
        kind: ParamKind::Size,
        default: Some("64M"),
        doc: "Memory for chunks that were written, or are written in part; at least two chunks are held.",
    },
    Param {
        name: "lease",
        kind: ParamKind::Duration,
        default: Some("30s"),
        doc: "Time after which another writer may open a disk whose writer has ended without closing it, 100ms to 1h.",
    },
];

impl Backend for ChunkBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["chunks"]
    }

    fn operand(&self) -> &'static str {
        "LOCATION"
    }

    fn summary(&self) -> &'static str {
        "a disk in chunks that are objects below s3://BUCKET/NAME, gs://BUCKET/NAME or az://CONTAINER/NAME, or files below \
         a local directory: read and written at random places by one program at a time. Options of s3:, gs: and az: \
         are options of it, too"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy --verify sample:16M "chunks:disk?size=1M"
blockhaul info chunks:disk
blockhaul serve "chunks:s3://BUCKET/disk?create=10G&endpoint=https://HOST:9000"
"#
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn takes_others(&self) -> bool {
        true
    }

    fn connecting(&self, settings: &ConnectionSettings) -> Option<Arc<dyn Backend>> {
        Some(Arc::new(ChunkBackend::new(self.options.connecting(settings))))
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let options = self.options;
        Box::pin(async move {
            let (device, preparation) = open(&target, options).await?;
            preparation.run().await?;
            Ok(device)
        })
    }

    fn target_making(&self, _: &BackendTarget) -> TargetMaking {
        TargetMaking::IfAbsent
    }

    fn open_target(&self, target: BackendTarget) -> OpenFuture<(OpenedDevice, Preparation)> {
        let options = self.options;
        Box::pin(async move { open(&target, options).await })
    }
}

async fn open(
    target: &BackendTarget,
    options: RemoteOptions,
) -> Result<(OpenedDevice, Preparation)> {
    let typed = ChunkDescription::parse(target)?;
    let name = typed.name.clone();
    let opened = typed.open(target, options).await;
    opened.map_err(|error| error.on(&name))
}

/// A description, checked.
struct ChunkDescription {
    name: Arc<str>,
    location: ChunkLocation,
    /// Bytes of a chunk, and of a new disk, if they were typed.
    chunk: Option<u64>,
    create: Option<u64>,
    cache: u64,
    lease: Duration,
}

/// The place of the objects.
enum ChunkLocation {
    Store(StoreKind, Box<StoreDescription>),
    Folder(PathBuf),
}

impl ChunkLocation {
    fn parse(text: &str, args: &ParamValues) -> Result<ChunkLocation> {
        let Some((scheme, _)) = text.split_once("://") else {
            ParamValues::check("chunks", PARAMS, args.others())?;
            let text = text.trim_end_matches('/');
            if text.is_empty() {
                let remedy = "write chunks:DIRECTORY or chunks:s3://BUCKET/NAME";
                return Err(Error::new(Kind::Usage, "chunks: no location").with_remedy(remedy));
            }
            return Ok(ChunkLocation::Folder(PathBuf::from(text)));
        };
        let Some(kind) = StoreKind::of_scheme(scheme) else {
            let text = format!("chunks: no chunks are kept in {scheme}:");
            let remedy = "choose s3://, gs://, az:// or a local directory";
            return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
        };
        let args = ParamValues::check(scheme, params(kind), args.others())?;
        let rest = text[scheme.len() + 1..].trim_end_matches('/');
        let object = StoreDescription::of(kind, scheme, rest, &args)?;
        Ok(ChunkLocation::Store(kind, Box::new(object)))
    }
}

/// The place of the objects of a disk, and its names in this process.
struct OpenLocation {
    folder: Arc<dyn ObjectFolder>,
    /// Chunks that are sent at a time.
    connections: usize,
    /// The number of the directory or of the objects. A directory that does not exist has none.
    identity: Option<FileId>,
    ids: StorageIds,
}

impl ChunkLocation {
    async fn open(self, options: RemoteOptions) -> Result<OpenLocation> {
        let (kind, object) = match self {
            ChunkLocation::Folder(path) => return Ok(OpenLocation::of_directory(path)),
            ChunkLocation::Store(kind, object) => (kind, object),
        };
        let connections = object.connections;
        let resource = object.resource(kind, options).await?;
        // The object whose name has no slash is another one.
        let identity = resource.identity("/");
        let folder = Arc::new(StoreFolder::new(resource, connections));
        Ok(OpenLocation {
            folder,
            connections,
            identity: Some(identity),
            ids: storage_ids(identity),
        })
    }
}

impl OpenLocation {
    fn of_directory(path: PathBuf) -> OpenLocation {
        let identity = std::fs::metadata(&path).map(|found| (found.dev(), found.ino())).ok();
        let whole = std::fs::canonicalize(&path).or_else(|_| std::path::absolute(&path));
        let whole = whole.unwrap_or_else(|_| path.clone());
        let same = vec![StorageId::Export(format!("chunks:{}", whole.display()))];
        let ids = StorageIds { same, below: Vec::new() };
        let folder = Arc::new(LocalFolder::new(path));
        OpenLocation { folder, connections: FILES, identity, ids }
    }
}

impl ChunkDescription {
    fn parse(target: &BackendTarget) -> Result<ChunkDescription> {
        let (text, args) = (target.text()?, &target.args);
        let location = ChunkLocation::parse(text, args)?;
        let (chunk, create) = (args.size("size"), args.size("create"));
        ChunkManifest::check_sizes(create.unwrap_or(0), chunk.unwrap_or(CHUNK))?;
        let lease = args.duration("lease").unwrap_or(LEASE);
        if !LEASE_RANGE.contains(&lease) {
            let text = "chunks: lease: not from 100ms to 1h";
            return Err(Error::new(Kind::Usage, text).with_remedy("write lease=30s"));
        }
        let cache = args.size("cache").unwrap_or(CACHE);
        let name = format!("chunks:{text}").into();
        Ok(ChunkDescription { name, location, chunk, create, cache, lease })
    }

    async fn open(
        self,
        target: &BackendTarget,
        options: RemoteOptions,
    ) -> Result<(OpenedDevice, Preparation)> {
        let ChunkDescription { name, location, chunk, create, cache, lease } = self;
        let intent = target.intent;
        let OpenLocation { folder, connections, identity, ids } = location.open(options).await?;
        let claim = target.claim(ids, &name, false)?;
        let place = ChunkPlace { folder, connections, cache, lease };
        let opened = place.clone();
        let found = if intent.write {
            runtime::run(async move { opened.open_to_write().await }).await?
        } else {
            Some(runtime::run(async move { opened.open_to_read().await }).await?)
        };
        if let Some(disk) = found {
            let device = ChunkDevice::new(&name, disk.clone(), identity, claim);
            check_existing(&disk, chunk, create)?;
            return Ok((opened_device(device), Preparation::default()));
        }
        let size = create.or(intent.target_size.filter(|_| !intent.grows)).ok_or_else(no_disk)?;
        let chunk = chunk.unwrap_or(CHUNK);
        ChunkManifest::check_sizes(size, chunk)?;
        let planned = place.clone();
        let disk = runtime::run(async move { planned.plan(size, chunk).await }).await?;
        let device = ChunkDevice::new(&name, disk.clone(), identity, claim).empty();
        let preparation = Preparation::new(move || {
            Box::pin(async move {
                let begin = async move { place.begin(&disk).await };
                runtime::run(begin).await.map_err(|error| error.on(&name))
            })
        });
        Ok((opened_device(device), preparation))
    }
}

fn opened_device(device: ChunkDevice) -> OpenedDevice {
    OpenedDevice { device: Arc::new(device.clone()), more: Some(Arc::new(device)) }
}

/// Checks that a disk has the sizes that were typed.
fn check_existing(disk: &ChunkDisk, chunk: Option<u64>, create: Option<u64>) -> Result<()> {
    for (option, typed, is) in [("size", chunk, disk.chunk), ("create", create, disk.size)] {
        if typed.is_some_and(|typed| typed != is) {
            let text = format!("the disk exists, with {option}={is}");
            let remedy = format!("leave {option}= out, or choose another place");
            return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
        }
    }
    Ok(())
}
