//! The kind of storage `oci://REGISTRY/NAME:TAG`.

use std::path::PathBuf;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, ConnectionSettings, Intent, OpenFuture, OpenedDevice, Param, ParamKind,
    ParamValues, parse_options,
};
use reqwest::Url;
use reqwest::header::{AUTHORIZATION, HeaderMap};

use super::blob::ImageSource;
use super::credentials::{self, RegistryLogin};
use super::device::{DiskChoice, load, open};
use super::layout::ImageLayout;
use super::manifest::Platform;
use super::read_progress::ReadProgress;
use super::reference::{ImageReference, is_tag};
use super::registry::Registry;
use crate::client::client;
use crate::files::read_text;
use crate::http_backend::{CA, SECRET_MAX, header_fields, is_local};
use crate::{RemoteOptions, runtime};

/// Disks in images of container registries.
pub(crate) struct OciBackend {
    options: RemoteOptions,
}

impl OciBackend {
    /// With these time limits.
    pub(crate) fn new(options: RemoteOptions) -> OciBackend {
        OciBackend { options }
    }
}

const PARAMS: &[Param] = &[
    Param {
        name: "arch",
        kind: ParamKind::Text,
        default: None,
        doc: "Architecture in an image for several, such as amd64, arm64 or arm/v7; that of this machine if not given.",
    },
    Param {
        name: "disk",
        kind: ParamKind::Text,
        default: None,
        doc: "The disk in the image: NAME for /disk/NAME, or a path. Of an artefact, the title of the file. The only one \
              if not given.",
    },
    Param {
        name: "password-file",
        kind: ParamKind::Text,
        default: None,
        doc: "File with the password of USER. Without a user the credentials are those of skopeo, podman and docker: \
              REGISTRY_AUTH_FILE, ${XDG_RUNTIME_DIR}/containers/auth.json, ~/.config/containers/auth.json, \
              ~/.docker/config.json, and of the credential helpers that these name.",
    },
    Param {
        name: "header-file",
        kind: ParamKind::Text,
        default: None,
        doc: "File with fields of each request to the registry, one a line. Other servers do not get them.",
    },
    CA,
    Param {
        name: "insecure",
        kind: ParamKind::Switch,
        default: None,
        doc: "Use http in place of https. If not given: for a registry on the loopback interface.",
    },
];

impl Backend for OciBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["oci"]
    }

    fn operand(&self) -> &'static str {
        "//[USER@]REGISTRY/NAME[:TAG][@DIGEST][#key=value&…]"
    }

    fn summary(&self) -> &'static str {
        "the disk in an image of a container registry, read-only: in a containerDisk (KubeVirt) the file in its directory \
         /disk, in an artefact (ORAS) its file. oci:DIRECTORY[:TAG] is an image in a local directory, as skopeo writes it. \
         The image is read once, into a temporary file in TMPDIR [default: /var/tmp], and no byte is used before all digests \
         are verified"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy qcow2:oci://REGISTRY/disks/vm1:1.0 disk.raw
blockhaul copy "oci://REGISTRY/disks/vm1:1.0#arch=arm64" disk.qcow2
"#
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn raw(&self) -> bool {
        true
    }

    fn connecting(&self, settings: &ConnectionSettings) -> Option<Arc<dyn Backend>> {
        Some(Arc::new(OciBackend::new(self.options.connecting(settings))))
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let options = self.options;
        Box::pin(async move { open_image(&target, options).await })
    }
}

async fn open_image(target: &BackendTarget, options: RemoteOptions) -> Result<OpenedDevice> {
    let typed = ImageDescription::parse(target.text()?)?;
    let name = typed.name.clone();
    if target.intent.write {
        let error = Error::new(Kind::Unsupported, "images of registries are read-only");
        let remedy = "write to a file, or serve the image under --layer cow";
        return Err(error.with_remedy(remedy).on(&name));
    }
    let named = |error: Error| error.on(&name);
    let prepared = blockhaul_io::offload(move || typed.prepare(options)).await;
    let lost = |error| Error::new(Kind::Io, "cannot read the files").because(error);
    let (source, choice) = prepared.map_err(lost)?.map_err(named)?;
    log::info!("{name}: the image is read into a temporary file, and verified");
    let progress = ReadProgress::new(&name);
    let work = async move { load(&source, &choice, progress).await };
    let disk = runtime::run(work).await.map_err(named)?;
    let intent =
        Intent { image: target.intent.image, direct: target.intent.direct, ..Intent::READ };
    open(&name, disk, &target.context, intent).await.map_err(named)
}

/// A description, checked.
struct ImageDescription {
    name: Arc<str>,
    place: ImagePlace,
    args: ParamValues,
}

enum ImagePlace {
    Registry { user: Option<String>, image: ImageReference },
    Layout(ImageLayout),
}

impl ImageDescription {
    fn parse(rest: &str) -> Result<ImageDescription> {
        let (text, options) = rest.split_once('#').unwrap_or((rest, ""));
        let args = ParamValues::check("oci", PARAMS, &parse_options(options)?)?;
        let wrong = |why: &str, remedy: &'static str| {
            Error::new(Kind::Usage, format!("oci: {why}")).with_remedy(remedy)
        };
        let Some(named) = text.strip_prefix("//") else {
            let of_registry = ["password-file", "header-file", "ca", "insecure"];
            if of_registry.iter().any(|option| args.text(option).is_some()) {
                let why = "a local directory has no password-file, header-file, ca and insecure";
                return Err(wrong(why, "write oci://REGISTRY/NAME:TAG for an image in a registry"));
            }
            let (folder, tag) = match text.rsplit_once(':') {
                Some((folder, tag)) if is_tag(tag) => (folder, Some(tag.to_owned())),
                _ => (text, None),
            };
            if folder.is_empty() {
                return Err(wrong(
                    "no image",
                    "write oci://REGISTRY/NAME:TAG or oci:DIRECTORY:TAG",
                ));
            }
            let place = ImagePlace::Layout(ImageLayout { folder: folder.into(), tag });
            let name = format!("oci:{text}").into();
            return Ok(ImageDescription { name, place, args });
        };
        let (host, path) = named.split_once('/').unwrap_or((named, ""));
        let (user, host) = match host.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, host),
        };
        if user.is_some_and(|user| user.contains(':')) {
            let why = "a password in a description is visible to other users of this machine";
            return Err(wrong(why, "put the password into a file, and add #password-file=FILE"));
        }
        if args.text("password-file").is_some() != user.is_some() {
            let why = "a user and password-file belong together";
            return Err(wrong(why, "write oci://USER@REGISTRY/NAME:TAG#password-file=FILE"));
        }
        let image = ImageReference::parse(&format!("{host}/{path}"))?;
        let user = user.map(blockhaul_catalog::percent_decode).transpose()?;
        let name = format!("oci://{host}/{path}").into();
        Ok(ImageDescription { name, place: ImagePlace::Registry { user, image }, args })
    }

    /// Reads the files with settings. Blocks.
    fn prepare(self, options: RemoteOptions) -> Result<(ImageSource, DiskChoice)> {
        let ImageDescription { place, args, .. } = self;
        let architecture = args.text("arch");
        let choice = DiskChoice {
            platform: architecture.map_or_else(Platform::own, Platform::linux),
            is_strict: architecture.is_some(),
            disk: args.text("disk").map(str::to_owned),
        };
        let (user, image) = match place {
            ImagePlace::Layout(layout) => return Ok((ImageSource::Layout(layout), choice)),
            ImagePlace::Registry { user, image } => (user, image),
        };
        let file = |name: &str| args.text(name).map(PathBuf::from);
        let base = Url::parse(&format!("http://{}/", image.host()));
        let is_loopback = base.is_ok_and(|url| is_local(&url));
        let is_insecure = match args.text("insecure") {
            Some(_) => args.switch("insecure"),
            None => is_loopback && file("ca").is_none(),
        };
        if is_insecure && file("ca").is_some() {
            let error = Error::new(Kind::Usage, "oci: ca is for https");
            return Err(error.with_remedy("leave out ca or insecure=on"));
        }
        let fields = file("header-file")
            .map_or_else(|| Ok(HeaderMap::new()), |file| header_fields(&file))?;
        let login = match (user, file("password-file")) {
            (Some(user), Some(file)) => {
                let password = read_text(&file, SECRET_MAX)?;
                let password = password.trim_end_matches(['\r', '\n']).to_owned();
                Some(RegistryLogin::Password(user, password))
            }
            _ if fields.contains_key(AUTHORIZATION) => None,
            _ => credentials::find(&image)?,
        };
        if is_insecure && !is_loopback && (login.is_some() || !fields.is_empty()) {
            log::warn!(
                "credentials for {} are sent without TLS: others on the network can read them",
                image.host()
            );
        }
        let client = client(options, file("ca").as_deref(), 1)?;
        let scheme = if is_insecure { "http" } else { "https" };
        let version = image.version.clone();
        let registry = Registry::new(client, scheme, image, fields, login, options.timeout)?;
        Ok((ImageSource::Registry(Box::new(registry), version), choice))
    }
}
