//! The kind of storage `restic:REPO#SNAPSHOT/PATH`.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, ConnectionSettings, Intent, ObjectList, OpenFuture, OpenedDevice,
    Param, ParamKind, ParamValues, Preparation, TargetMaking, without_login_password,
};

use crate::ResticOptions;
use crate::cache::BlobCache;
use crate::content::FileContent;
use crate::device::ResticDevice;
use crate::list::SnapshotList;
use crate::loads::BlobLoads;
#[cfg(feature = "remote")]
use crate::object_storage::RemoteStorage;
use crate::password::PasswordSource;
use crate::repository::{Repository, RepositoryReader};
use crate::snapshot::{self, SnapshotFilter};
use crate::storage::{DirectoryStorage, RepositoryStorage};
use crate::tree;
use crate::writer::pack::PACK_SIZE;
use crate::writer::person::Person;
use crate::writer::place::{BackupPlace, BackupRequest};
use crate::writer::plan::BackupPlan;
use crate::writer::session::CompressionMode;

/// The name of the snapshot that a copy makes.
const NEW: &str = "new";
/// Memory for blobs.
const CACHE: u64 = 64 << 20;

/// Files in the snapshots of restic.
pub(crate) struct ResticBackend {
    options: ResticOptions,
}

impl ResticBackend {
    /// With these time limits.
    pub(crate) fn new(options: ResticOptions) -> ResticBackend {
        ResticBackend { options }
    }
}

const PARAMS: &[Param] = &[
    Param {
        name: "password-file",
        kind: ParamKind::Text,
        default: None,
        doc: "File with the password; RESTIC_PASSWORD_FILE, RESTIC_PASSWORD_COMMAND or RESTIC_PASSWORD in the \
              environment if not given.",
    },
    Param {
        name: "password-command",
        kind: ParamKind::Text,
        default: None,
        doc: "Command that prints the password; it is run without a shell.",
    },
    Param {
        name: "host",
        kind: ParamKind::Text,
        default: None,
        doc: "For latest: only snapshots of this host; for new: the host of the snapshot [default: this one].",
    },
    Param {
        name: "tag",
        kind: ParamKind::Text,
        default: None,
        doc: "For latest: only snapshots with all of these tags, separated by commas; for new: its tags.",
    },
    Param {
        name: "parent",
        kind: ParamKind::Text,
        default: None,
        doc: "For new: the snapshot with the earlier backup, or none [default: the newest one of the host with PATH].",
    },
    Param {
        name: "compression",
        kind: ParamKind::Text,
        default: Some("auto"),
        doc: "For new: auto, max or off; repositories of version 1 have none.",
    },
    Param {
        name: "init",
        kind: ParamKind::Switch,
        default: None,
        doc: "For new: make the repository if it does not exist.",
    },
    Param {
        name: "cache",
        kind: ParamKind::Size,
        default: Some("64M"),
        doc: "Memory for blobs that were read.",
    },
];

impl Backend for ResticBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["restic"]
    }

    fn operand(&self) -> &'static str {
        "REPO#SNAPSHOT/PATH"
    }

    fn summary(&self) -> &'static str {
        "a file in a snapshot of a restic repository, read-only: SNAPSHOT is latest or the beginning of an identifier; or new, \
         for a copy to a new snapshot. REPO is a directory, a place in s3://, gs:// or az:// with the options of these, or rest:https://HOST/PATH/. blockhaul info --list restic:REPO \
         lists snapshots and files"
    }

    fn example(&self) -> &'static str {
        r#"
export RESTIC_PASSWORD=secret
blockhaul copy random:8M "restic:repo#new/vm1/vda?init=on"
blockhaul copy --range 1M:64k pattern:8M "restic:repo#new/vm1/vda"
blockhaul info "restic:repo#latest/vm1/vda"
"#
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn takes_others(&self) -> bool {
        true
    }

    fn connecting(&self, settings: &ConnectionSettings) -> Option<Arc<dyn Backend>> {
        let timeout = settings.timeout;
        let shorter = Some(timeout).filter(|timeout| !timeout.is_zero());
        let connect_timeout = self.options.connect_timeout;
        let connect_timeout =
            shorter.map_or(connect_timeout, |shorter| connect_timeout.min(shorter));
        Some(Arc::new(ResticBackend::new(ResticOptions { connect_timeout, timeout })))
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let options = self.options;
        Box::pin(async move {
            let typed = ResticDescription::parse(&target, options)?;
            if target.intent.write {
                return Err(read_only());
            }
            if typed.snapshot == NEW {
                let text = "restic: #new/PATH is the target of a copy, and cannot be read";
                let remedy = "write #latest/PATH to read the newest backup";
                return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
            }
            let opened = blockhaul_io::offload(move || typed.open()).await;
            let device = opened.map_err(lost)??;
            let shared: Arc<dyn Device> = Arc::new(device.clone());
            Ok(OpenedDevice { device: shared, more: Some(Arc::new(device)) })
        })
    }

    fn target_making(&self, _: &BackendTarget) -> TargetMaking {
        TargetMaking::NewVersion
    }

    fn open_target(&self, target: BackendTarget) -> OpenFuture<(OpenedDevice, Preparation)> {
        let options = self.options;
        Box::pin(async move {
            let typed = ResticDescription::parse(&target, options)?;
            let name = typed.name.clone();
            let opened = typed.open_target(target.intent).await;
            opened.map_err(|error| error.on(&name))
        })
    }

    fn list(&self, target: &BackendTarget) -> Option<OpenFuture<Box<dyn ObjectList>>> {
        let typed = ResticDescription::parse(target, self.options);
        Some(Box::pin(async move {
            let typed = typed?;
            let list = blockhaul_io::offload(move || typed.list()).await.map_err(lost)??;
            Ok(Box::new(list) as Box<dyn ObjectList>)
        }))
    }
}

fn read_only() -> Error {
    let text = "restic: snapshots are read-only";
    let remedy = "serve with --readonly or under --layer cow, copy it to another device, or copy a disk to \
                  restic:REPO#new/PATH";
    Error::new(Kind::Unsupported, text).with_remedy(remedy)
}

pub(crate) fn lost(lost: blockhaul_io::LostCompletion) -> Error {
    Error::new(Kind::Io, "cannot read the repository").because(lost)
}

/// A description, checked.
struct ResticDescription {
    name: Arc<str>,
    repository: String,
    /// Options of its place.
    others: Vec<(String, String)>,
    options: ResticOptions,
    snapshot: String,
    path: String,
    filter: SnapshotFilter,
    password: PasswordSource,
    cache: u64,
    parent: Option<String>,
    compression: CompressionMode,
    init: bool,
}

/// The beginnings of places as restic writes them: no directory is meant.
const SCHEMES: [&str; 11] =
    ["sftp", "s3", "rest", "rclone", "b2", "azure", "az", "gs", "swift", "local", "dav"];

impl ResticDescription {
    fn parse(target: &BackendTarget, options: ResticOptions) -> Result<ResticDescription> {
        let (text, args) = (target.text()?, &target.args);
        let (repository, place) = text.split_once('#').unwrap_or((text, ""));
        let (snapshot, path) = place.split_once('/').unwrap_or((place, ""));
        if repository.is_empty() {
            let text = "restic: no repository";
            let remedy = "write restic:DIRECTORY#SNAPSHOT/PATH";
            return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
        }
        if !repository.contains("://")
            && let Some((scheme, _)) = repository.split_once(':')
            && SCHEMES.contains(&scheme)
        {
            let text = format!("restic: {scheme}: is no place that is supported as it is written");
            let remedy = "write a directory (./NAME if its name begins so), s3://BUCKET/NAME, gs://BUCKET/NAME, \
                          az://CONTAINER/NAME or rest:https://HOST/PATH/";
            return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
        }
        if !repository.contains("://") {
            ParamValues::check("restic", PARAMS, args.others())?;
        }
        let password = PasswordSource::choose(
            args.text("password-file"),
            args.text("password-command"),
            |name| std::env::var(name).ok(),
        )?;
        for name in ["host", "tag"] {
            if args.text(name).is_some_and(|value| value.split(',').any(str::is_empty)) {
                let text = format!("restic: {name}= has an empty value");
                let remedy = "write a value, or leave the option out";
                return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
            }
        }
        let tags = args.text("tag").unwrap_or_default().split(',');
        let filter = SnapshotFilter {
            host: args.text("host").map(str::to_owned),
            tags: tags.filter(|tag| !tag.is_empty()).map(str::to_owned).collect(),
        };
        let compression = args.text("compression").unwrap_or("auto");
        let compression = CompressionMode::parse(compression).ok_or_else(|| {
            let text = format!("restic: compression: {compression:?} is unknown");
            Error::new(Kind::Usage, text).with_remedy("write auto, max or off")
        })?;
        Ok(ResticDescription {
            name: without_login_password(&format!("restic:{text}")).into(),
            repository: repository.to_owned(),
            others: args.others().to_vec(),
            options,
            snapshot: snapshot.to_owned(),
            path: path.to_owned(),
            filter,
            password,
            cache: args.size("cache").unwrap_or(CACHE),
            parent: args.text("parent").map(str::to_owned),
            compression,
            init: args.switch("init"),
        })
    }

    fn reader(&self) -> Result<RepositoryReader> {
        let password = self.password.read()?;
        Ok(RepositoryReader::open(self.storage()?, &password)?)
    }

    fn storage(&self) -> Result<Arc<dyn RepositoryStorage>> {
        if !self.repository.contains("://") {
            return Ok(Arc::new(DirectoryStorage::new(&self.repository)));
        }
        object_storage(&self.repository, &self.others, self.options)
    }

    /// Opens the file. Blocks.
    fn open(&self) -> Result<ResticDevice> {
        self.open_file().map_err(|error| error.on(&self.name))
    }

    fn open_file(&self) -> Result<ResticDevice> {
        let reader = self.reader()?;
        // Before the index, which then has the blobs of these snapshots.
        let snapshot = snapshot::find(&reader, &self.snapshot, &self.filter)?;
        let repository = Repository::load(reader)?;
        let node = tree::find(&repository, &snapshot.tree, &self.path)?;
        let content = FileContent::new(&repository, &node)?;
        drop(node);
        let (reader, packs) = repository.into_parts();
        let loads = BlobLoads::new(reader, packs, content, BlobCache::new(self.cache));
        Ok(ResticDevice::new(&self.name, &snapshot, loads))
    }

    /// Opens the target of a copy. Nothing is written before it is prepared.
    async fn open_target(self, intent: Intent) -> Result<(OpenedDevice, Preparation)> {
        if self.snapshot != NEW {
            return Err(read_only());
        }
        if intent.grows || intent.extends {
            let text = "restic: the size of the source must be known";
            let remedy = "copy to a file first, and that to the repository";
            return Err(Error::new(Kind::Unsupported, text).with_remedy(remedy));
        }
        let name = self.name.clone();
        let checked = blockhaul_io::offload(move || self.plan(intent.target_size)).await;
        let plan = checked.map_err(lost)??;
        let device = plan.device(&name);
        let target = device.clone();
        let preparation = Preparation::new(move || {
            Box::pin(async move {
                let begun = blockhaul_io::offload(move || plan.begin(&target)).await;
                begun.map_err(lost)?.map_err(|error| error.on(&name))
            })
        });
        let shared: Arc<dyn Device> = Arc::new(device);
        Ok((OpenedDevice { device: shared, more: None }, preparation))
    }

    fn plan(self, size: Option<u64>) -> Result<BackupPlan> {
        let path = self.path.clone();
        BackupPlan::check(self.place()?, &path, size)
    }

    /// The repository of a backup. Blocks.
    fn place(self) -> Result<BackupPlace> {
        let storage = self.storage()?;
        let password = self.password.read()?;
        let request = BackupRequest {
            host: self.filter.host,
            tags: self.filter.tags,
            parent: self.parent,
            compression: self.compression,
            init: self.init,
            pack_size: PACK_SIZE,
        };
        Ok(BackupPlace { storage, password, request, person: Person::here() })
    }

    fn list(&self) -> Result<SnapshotList> {
        let listed = || {
            let reader = self.reader()?;
            let snapshots = match &self.snapshot[..] {
                "" => snapshot::all(&reader, &self.filter)?,
                name => vec![snapshot::find(&reader, name, &self.filter)?],
            };
            let repository = Repository::load(reader)?;
            Ok(SnapshotList::new(repository, snapshots, &self.path))
        };
        listed().map_err(|error: Error| error.on(&self.name))
    }
}

/// The name, the repository and the directory in its snapshots of the store `restic:REPO#DIRECTORY`. Blocks.
///
/// # Errors
/// The description is wrong, or the password cannot be read.
pub(crate) fn store_place(
    target: &BackendTarget,
    options: ResticOptions,
) -> Result<(Arc<str>, BackupPlace, String)> {
    let typed = ResticDescription::parse(target, options)?;
    if typed.parent.is_some() {
        let text = "restic: parent: points of a store have their own";
        return Err(Error::new(Kind::Usage, text).with_remedy("leave parent= out"));
    }
    let (name, folder) = (typed.name.clone(), format!("{}/{}", typed.snapshot, typed.path));
    Ok((name, typed.place()?, folder))
}

/// What a repository behind a REST server begins with.
#[cfg(feature = "remote")]
const REST: &str = "rest:";

#[cfg(feature = "remote")]
fn object_storage(
    location: &str,
    typed: &[(String, String)],
    options: ResticOptions,
) -> Result<Arc<dyn RepositoryStorage>> {
    let ResticOptions { connect_timeout, timeout } = options;
    let limits = blockhaul_remote::RemoteOptions { connect_timeout, timeout };
    if let Some(url) = location.strip_prefix(REST) {
        let place = blockhaul_remote::RestPlace::open(url, typed, limits)?;
        return Ok(Arc::new(RemoteStorage::new(place, &without_login_password(location))));
    }
    let place = blockhaul_remote::ObjectPlace::open(location, typed, limits)?;
    Ok(Arc::new(RemoteStorage::new(place, location)))
}

#[cfg(not(feature = "remote"))]
fn object_storage(
    location: &str,
    _typed: &[(String, String)],
    _options: ResticOptions,
) -> Result<Arc<dyn RepositoryStorage>> {
    let text = format!("restic: {location} is no directory");
    let remedy = "use a program that was built with the feature remote";
    Err(Error::new(Kind::Unsupported, text).with_remedy(remedy))
}
