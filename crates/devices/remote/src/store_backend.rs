//! The kinds of storage `s3://BUCKET/NAME`, `gs://BUCKET/NAME` and `az://CONTAINER/NAME`.

use std::path::PathBuf;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, ConnectionSettings, Intent, ObjectList, OpenFuture, OpenedDevice,
    Param, ParamKind, ParamValues, Preparation, TargetMaking,
};
use object_store::path::Path;

use crate::client::client;
use crate::device::RemoteDevice;
use crate::http_backend::{CA, CONNECTIONS, connections};
use crate::identity::storage_ids;
use crate::store_failure::{StoreKind, is_bucket_missing, is_forbidden};
use crate::store_list::StoreList;
use crate::store_object::{StoreResource, open};
use crate::store_service::StoreService;
use crate::stores::{StoreBucket, StoreSettings, build};
use crate::upload::Upload;
use crate::upload_device::UploadDevice;
use crate::{RemoteOptions, page_blob, runtime};

/// Whether the options say that the object is a page blob of Azure.
fn is_page_blob(args: &ParamValues) -> bool {
    args.text("blob-type") == Some(PAGE_BLOB)
}

/// A kind of object store.
pub(crate) struct StoreBackend {
    kind: StoreKind,
    options: RemoteOptions,
}

impl StoreBackend {
    /// With these time limits.
    pub(crate) fn new(kind: StoreKind, options: RemoteOptions) -> StoreBackend {
        StoreBackend { kind, options }
    }
}

const ENDPOINT: Param = Param {
    name: "endpoint",
    kind: ParamKind::Text,
    default: None,
    doc: "URL of the service, if it is not the vendor's own (MinIO, Ceph, SeaweedFS, R2, an emulator).",
};
const ANONYMOUS: Param = Param {
    name: "anonymous",
    kind: ParamKind::Switch,
    default: Some("off"),
    doc: "Send no credentials: for public objects.",
};
const S3_PARAMS: &[Param] = &[
    ENDPOINT,
    Param {
        name: "region",
        kind: ParamKind::Text,
        default: None,
        doc: "Region of the bucket; that of the environment or the profile, else us-east-1, if not given.",
    },
    Param {
        name: "profile",
        kind: ParamKind::Text,
        default: None,
        doc: "Profile in ~/.aws/credentials and ~/.aws/config; AWS_PROFILE, else default, if not given.",
    },
    Param {
        name: "path-style",
        kind: ParamKind::Switch,
        default: Some("on"),
        doc: "Name the bucket in the path of URLs, not in the host.",
    },
    ANONYMOUS,
    CA,
    CONNECTIONS,
];
const GCS_PARAMS: &[Param] = &[ENDPOINT, ANONYMOUS, CA, CONNECTIONS];
const ACCOUNT: Param = Param {
    name: "account",
    kind: ParamKind::Text,
    default: None,
    doc: "The storage account; AZURE_STORAGE_ACCOUNT if not given.",
};
const AZURE_PARAMS: &[Param] = &[ACCOUNT, ENDPOINT, ANONYMOUS, CA, CONNECTIONS];
const BLOB_PARAMS: &[Param] = &[
    ACCOUNT,
    Param {
        name: "blob-type",
        kind: ParamKind::Choice(&["BlockBlob", PAGE_BLOB]),
        default: Some("BlockBlob"),
        doc: "Type of the blob. A PageBlob is a disk for virtual machines: it is written at random places, in pages of \
              512 bytes, by one program at a time, which has its lease, and it has holes. A copy makes one if there is none.",
    },
    ENDPOINT,
    ANONYMOUS,
    CA,
    CONNECTIONS,
];
const PAGE_BLOB: &str = "PageBlob";

/// The options of a kind of object store, for objects that are read and written as a whole.
pub(crate) fn params(kind: StoreKind) -> &'static [Param] {
    match kind {
        StoreKind::S3 => S3_PARAMS,
        StoreKind::Gcs => GCS_PARAMS,
        StoreKind::Azure => AZURE_PARAMS,
    }
}

impl Backend for StoreBackend {
    fn schemes(&self) -> &'static [&'static str] {
        match self.kind {
            StoreKind::S3 => &["s3"],
            StoreKind::Gcs => &["gs"],
            StoreKind::Azure => &["az"],
        }
    }

    fn operand(&self) -> &'static str {
        match self.kind {
            StoreKind::Azure => "//CONTAINER/NAME",
            _ => "//BUCKET/NAME",
        }
    }

    fn summary(&self) -> &'static str {
        match self.kind {
            StoreKind::S3 => {
                "an object in Amazon S3 or a service that speaks its protocol, read, or written as a whole by a copy. Credentials are those of the \
                 aws command: AWS_ACCESS_KEY_ID and others in the environment, a profile, a web identity, the \
                 metadata service of the machine"
            }
            StoreKind::Gcs => {
                "an object in Google Cloud Storage, read, or written as a whole by a copy. Credentials are those of the gcloud command: \
                 GOOGLE_APPLICATION_CREDENTIALS, the application default credentials, the metadata service of the \
                 machine"
            }
            StoreKind::Azure => {
                "a blob in Azure Blob Storage, read, or written as a whole by a copy; a page blob (blob-type=PageBlob) also at \
                 random places. Credentials are in AZURE_STORAGE_KEY, \
                 AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, else those of a service principal, a \
                 workload or the machine"
            }
        }
    }

    fn example(&self) -> &'static str {
        match self.kind {
            StoreKind::S3 => {
                r#"
blockhaul copy disk.raw s3://BUCKET/disk.raw
blockhaul copy "s3://BUCKET/disk.raw?endpoint=https://HOST:9000&profile=backup" disk.raw
"#
            }
            StoreKind::Gcs => {
                r#"
blockhaul copy as-qcow2:disk.raw gs://BUCKET/disk.qcow2
blockhaul copy qcow2:gs://BUCKET/disk.qcow2 disk.raw
"#
            }
            StoreKind::Azure => {
                r#"
blockhaul copy disk.raw "az://CONTAINER/disk.raw?account=NAME"
blockhaul serve --layer cow "az://CONTAINER/disk.raw?account=NAME"
blockhaul serve "az://CONTAINER/vm1.raw?account=NAME&blob-type=PageBlob"
"#
            }
        }
    }

    fn params(&self) -> &'static [Param] {
        match self.kind {
            StoreKind::Azure => BLOB_PARAMS,
            kind => params(kind),
        }
    }

    fn connecting(&self, settings: &ConnectionSettings) -> Option<Arc<dyn Backend>> {
        Some(Arc::new(StoreBackend::new(self.kind, self.options.connecting(settings))))
    }

    fn target_making(&self, target: &BackendTarget) -> TargetMaking {
        if is_page_blob(&target.args) { TargetMaking::IfAbsent } else { TargetMaking::Always }
    }

    fn list(&self, target: &BackendTarget) -> Option<OpenFuture<Box<dyn ObjectList>>> {
        let (kind, options, target) = (self.kind, self.options, target.clone());
        Some(Box::pin(async move {
            let typed = StoreDescription::list(kind, &target.scheme, target.text()?, &target.args)?;
            let resource = typed.resource(kind, options).await?;
            Ok(Box::new(StoreList::new(&resource)) as Box<dyn ObjectList>)
        }))
    }

    fn open_target(&self, target: BackendTarget) -> OpenFuture<(OpenedDevice, Preparation)> {
        let (kind, options) = (self.kind, self.options);
        Box::pin(async move { open_upload(&target, kind, options).await })
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let (kind, options) = (self.kind, self.options);
        Box::pin(async move { open_store(&target, kind, options).await })
    }
}

async fn open_store(
    target: &BackendTarget,
    kind: StoreKind,
    options: RemoteOptions,
) -> Result<OpenedDevice> {
    let typed = StoreDescription::parse(kind, target)?;
    let name = typed.name.clone();
    if is_page_blob(&target.args) {
        let (opened, preparation) = open_page_blob(target, typed, options).await?;
        preparation.run().await?;
        return Ok(opened);
    }
    if target.intent.write {
        let text = "an object cannot be written at random places";
        let remedy = "copy to it as a whole, or write to a file";
        let error = Error::new(Kind::Unsupported, text).with_remedy(remedy);
        return Err(error.on(&name));
    }
    let connections = typed.connections;
    let resource = typed.resource(kind, options).await?;
    let identity = resource.identity("");
    let claim = target.claim(storage_ids(identity), &name, false)?;
    let object = runtime::run(open(resource)).await.map_err(|error| error.on(&name))?;
    let device = RemoteDevice::new(&name, Arc::new(object), connections).claimed(identity, claim);
    Ok(OpenedDevice { device: Arc::new(device.clone()), more: Some(Arc::new(device)) })
}

async fn open_page_blob(
    target: &BackendTarget,
    typed: StoreDescription,
    options: RemoteOptions,
) -> Result<(OpenedDevice, Preparation)> {
    let (name, connections) = (typed.name.clone(), typed.connections);
    let resource = typed.resource(StoreKind::Azure, options).await?;
    page_blob::opening::open(target, &name, resource, connections).await
}

/// Opens the target of a copy: an object that is written as a whole.
async fn open_upload(
    target: &BackendTarget,
    kind: StoreKind,
    options: RemoteOptions,
) -> Result<(OpenedDevice, Preparation)> {
    let typed = StoreDescription::parse(kind, target)?;
    if is_page_blob(&target.args) {
        return open_page_blob(target, typed, options).await;
    }
    let Intent { target_size: Some(size), grows: false, extends: false, .. } = target.intent else {
        let text = "an object is written as a whole, from a source whose size is known";
        let remedy = "for an image copy as-qcow2:DEVICE to it; else copy to a file first";
        let error = Error::new(Kind::Unsupported, text).with_remedy(remedy);
        return Err(error.on(&typed.name));
    };
    let name = typed.name.clone();
    let connections = typed.connections;
    let resource = typed.resource(kind, options).await?;
    let identity = resource.identity("");
    let claim = target.claim(storage_ids(identity), &name, false)?;
    let upload = Arc::new(Upload::new(&name, resource.clone(), size, connections));
    runtime::run(check_bucket(resource)).await.map_err(|error| error.on(&name))?;
    let begun = upload.clone();
    let device = UploadDevice::new(&name, upload, identity, claim);
    let preparation = Preparation::with_record(move |record| {
        Box::pin(async move {
            let begin = async move { begun.begin(record).await };
            runtime::run(begin).await.map_err(|error| error.on(&name))
        })
    });
    Ok((OpenedDevice { device: Arc::new(device), more: None }, preparation))
}

/// Checks that the service answers and has the bucket.
async fn check_bucket(resource: StoreResource) -> Result<()> {
    let Err(error) = open(resource).await else { return Ok(()) };
    // The object need not exist, and who may write may be refused to read.
    let is_absent = error.kind() == Kind::NotFound && !is_bucket_missing(&error);
    if is_absent || is_forbidden(&error) { Ok(()) } else { Err(error) }
}

/// The description of an object, checked.
pub(crate) struct StoreDescription {
    name: Arc<str>,
    key: Path,
    authority: Option<PathBuf>,
    /// Requests that are under way at most.
    pub(crate) connections: usize,
    settings: StoreSettings,
}

impl StoreDescription {
    fn parse(kind: StoreKind, target: &BackendTarget) -> Result<StoreDescription> {
        StoreDescription::of(kind, &target.scheme, target.text()?, &target.args)
    }

    /// The object `SCHEME:TEXT` with these options.
    ///
    /// # Errors
    /// [`Kind::Usage`]
    pub(crate) fn of(
        kind: StoreKind,
        scheme: &str,
        text: &str,
        args: &ParamValues,
    ) -> Result<StoreDescription> {
        let parts = text.strip_prefix("//").and_then(|text| text.split_once('/'));
        let parts = parts.filter(|(_, key)| !key.is_empty());
        StoreDescription::parse_parts(kind, scheme, (text, parts), args)
    }

    /// The objects below `SCHEME:TEXT`, or all of a bucket.
    ///
    /// # Errors
    /// [`Kind::Usage`]
    pub(crate) fn list(
        kind: StoreKind,
        scheme: &str,
        text: &str,
        args: &ParamValues,
    ) -> Result<StoreDescription> {
        let place = text.strip_prefix("//").map(|text| text.trim_end_matches('/'));
        let parts = place.map(|place| place.split_once('/').unwrap_or((place, "")));
        StoreDescription::parse_parts(kind, scheme, (text, parts), args)
    }

    /// `parts`: bucket and name.
    fn parse_parts(
        kind: StoreKind,
        scheme: &str,
        (text, parts): (&str, Option<(&str, &str)>),
        args: &ParamValues,
    ) -> Result<StoreDescription> {
        let name: Arc<str> = format!("{scheme}:{text}").into();
        let wrong = |why: String| Error::new(Kind::Usage, format!("{name}: {why}"));
        let form = if kind == StoreKind::Azure { "CONTAINER" } else { "BUCKET" };
        let remedy = format!("write {scheme}://{form}/NAME");
        let Some((bucket, key)) = parts.filter(|(bucket, _)| !bucket.is_empty()) else {
            return Err(wrong("no bucket, or no name in it".to_owned()).with_remedy(remedy));
        };
        let is_odd = |c: char| !(c.is_ascii_alphanumeric() || "-._$".contains(c));
        if bucket.contains(is_odd) {
            return Err(wrong(format!("{bucket:?} is no name of a bucket")).with_remedy(remedy));
        }
        let key = object_key(key).map_err(|why| {
            wrong(why).with_remedy("rename the object: this version cannot name it")
        })?;
        check_endpoint(args)
            .map_err(|why| wrong(why).with_remedy("write endpoint=https://HOST[:PORT]"))?;
        let number = connections(args);
        let connections = number.map_err(|why| wrong(why).with_remedy("write connections=16"))?;
        let own = |name: &str| args.text(name).map(str::to_owned);
        let settings = StoreSettings {
            bucket: bucket.to_owned(),
            endpoint: own("endpoint"),
            region: own("region"),
            profile: own("profile"),
            account: own("account"),
            is_path_style: args.switch("path-style"),
            is_anonymous: args.switch("anonymous"),
        };
        let authority = own("ca").map(PathBuf::from);
        Ok(StoreDescription { name, key, authority, connections, settings })
    }

    /// The object, with the store that it is in. Call it on a worker.
    ///
    /// # Errors
    /// Settings or credentials are missing or wrong.
    pub(crate) async fn resource(
        self,
        kind: StoreKind,
        options: RemoteOptions,
    ) -> Result<StoreResource> {
        let name = self.name.clone();
        let prepared = blockhaul_io::offload(move || self.prepare(kind, options)).await;
        let lost = |error| Error::new(Kind::Io, "cannot read the files").because(error);
        prepared.map_err(lost)?.map_err(|error| error.on(&name))
    }

    /// The object, with the store that it is in. Reads files and the environment. Blocks.
    ///
    /// # Errors
    /// Settings or credentials are missing or wrong.
    pub(crate) fn prepare(self, kind: StoreKind, options: RemoteOptions) -> Result<StoreResource> {
        let client = client(options, self.authority.as_deref(), self.connections)?;
        let service = StoreService { client, limit: options.timeout, has_answered: Arc::default() };
        let StoreBucket { store, address, account } = build(kind, &self.settings, service)?;
        let (key, limit) = (self.key, options.timeout);
        Ok(StoreResource { store, kind, key, bucket: address, limit, account })
    }
}

/// The name of an object, or why the library cannot name it.
fn object_key(key: &str) -> Result<Path, String> {
    if key.starts_with('/') || key.ends_with('/') {
        return Err("a name that begins or ends with / is not supported".to_owned());
    }
    Path::parse(key)
        .map_err(|_| "a name with //, ., .. or control characters is not supported".to_owned())
}

fn check_endpoint(args: &ParamValues) -> Result<(), String> {
    let Some(endpoint) = args.text("endpoint") else { return Ok(()) };
    let url =
        reqwest::Url::parse(endpoint).map_err(|error| format!("endpoint: not a URL: {error}"))?;
    match (url.scheme(), url.host_str(), url.password()) {
        (_, _, Some(_)) => Err("endpoint: a password in a URL is visible to others".to_owned()),
        ("http" | "https", Some(_), None) => Ok(()),
        _ => Err("endpoint: not a URL of http or https".to_owned()),
    }
}
