//! The kind of storage `https://HOST/PATH`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, ConnectionSettings, Intent, ObjectList, OpenFuture, OpenedDevice,
    Param, ParamKind, ParamValues, Preparation, TargetMaking, parse_options,
};
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use crate::client::client;
use crate::dav_list::DavList;
use crate::dav_target::DavTarget;
use crate::dav_upload::DavUpload;
use crate::device::RemoteDevice;
use crate::files::read_text;
use crate::http_object::{HttpResource, basic, open};
use crate::identity::{identity_of_url, storage_ids};
use crate::upload_device::UploadDevice;
use crate::{RemoteOptions, runtime};

/// Largest file with fields of requests or a password.
pub(crate) const SECRET_MAX: u64 = 64 << 10;
/// Most requests under way.
pub(crate) const CONNECTIONS_MAX: u64 = 64;

/// The kind of storage `https://HOST/PATH`.
pub(crate) struct HttpBackend {
    options: RemoteOptions,
}

impl HttpBackend {
    /// With these time limits.
    pub(crate) fn new(options: RemoteOptions) -> HttpBackend {
        HttpBackend { options }
    }
}

/// The file with the authorities that servers are checked against.
pub(crate) const CA: Param = Param {
    name: "ca",
    kind: ParamKind::Text,
    default: None,
    doc: "File with the certificates of the authorities that may have signed the server's, in PEM; the authorities \
          of the system if not given.",
};

/// The number of requests under way.
pub(crate) const CONNECTIONS: Param = Param {
    name: "connections",
    kind: ParamKind::Number,
    default: Some("16"),
    doc: "Maximum requests under way, each on a connection of its own, 1 to 64.",
};

const PARAMS: &[Param] = &[
    Param {
        name: "header-file",
        kind: ParamKind::Text,
        default: None,
        doc: "File with fields of each request to the server in the URL, such as \"Authorization: Bearer TOKEN\", one \
              a line. Other servers, to which it redirects, do not get them.",
    },
    Param {
        name: "password-file",
        kind: ParamKind::Text,
        default: None,
        doc: "File with the password of USER.",
    },
    CA,
    CONNECTIONS,
];

impl Backend for HttpBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["https", "http", "davs", "dav"]
    }

    fn operand(&self) -> &'static str {
        "//[USER@]HOST[:PORT]/PATH[?QUERY][#key=value&…]"
    }

    fn summary(&self) -> &'static str {
        "a file of an HTTP or WebDAV server, read in requests for ranges; where the server has no ranges, in one \
         pass from the beginning. A copy writes a file of a WebDAV server (davs:, dav:) as a whole. Options follow a #, \
         because the query belongs to the server. Redirects are followed \
         once for all requests. A proxy is taken from the environment (http_proxy, https_proxy, no_proxy)"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy https://HOST/disk.raw disk.raw
blockhaul copy as-qcow2:disk.raw davs://USER@HOST/disk.qcow2#password-file=FILE
blockhaul serve --layer cow "qcow2:https://HOST/disk.qcow2#ca=ca.pem&header-file=fields"
"#
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn raw(&self) -> bool {
        true
    }

    fn connecting(&self, settings: &ConnectionSettings) -> Option<Arc<dyn Backend>> {
        Some(Arc::new(HttpBackend { options: self.options.connecting(settings) }))
    }

    fn list(&self, target: &BackendTarget) -> Option<OpenFuture<Box<dyn ObjectList>>> {
        let (options, target) = (self.options, target.clone());
        Some(Box::pin(async move { list(&target, options).await }))
    }

    fn target_making(&self, _: &BackendTarget) -> TargetMaking {
        TargetMaking::Always
    }

    /// A file is sent by one request, which nothing continues.
    fn can_have_journal(&self) -> bool {
        false
    }

    fn open_target(&self, target: BackendTarget) -> OpenFuture<(OpenedDevice, Preparation)> {
        let options = self.options;
        Box::pin(async move { open_upload(&target, options).await })
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let options = self.options;
        Box::pin(async move { open_http(&target, options).await })
    }
}

impl RemoteOptions {
    /// The same with the settings of a command.
    pub(crate) fn connecting(self, settings: &ConnectionSettings) -> RemoteOptions {
        let timeout = settings.timeout;
        let is_shorter = !timeout.is_zero() && timeout < self.connect_timeout;
        let connect_timeout = if is_shorter { timeout } else { self.connect_timeout };
        RemoteOptions { timeout, connect_timeout }
    }
}

async fn open_http(target: &BackendTarget, options: RemoteOptions) -> Result<OpenedDevice> {
    let typed = HttpDescription::parse(&target.scheme, target.text()?)?;
    let name: Arc<str> = typed.name().into();
    if target.intent.write {
        return Err(no_random_writes(target).on(&name));
    }
    let connections = typed.connections;
    let identity = identity_of_url(&typed.url);
    let resource = typed.resource(options).await.map_err(|error| error.on(&name))?;
    let claim = target.claim(storage_ids(identity), &name, false)?;
    let object = runtime::run(open(resource)).await.map_err(|error| error.on(&name))?;
    log::debug!("{name}: {} bytes, ranges: {}", object.size(), !object.is_stream());
    let device = RemoteDevice::new(&name, object.into(), connections).claimed(identity, claim);
    Ok(OpenedDevice { device: Arc::new(device.clone()), more: Some(Arc::new(device)) })
}

fn no_random_writes(target: &BackendTarget) -> Error {
    let (text, remedy) = if target.scheme.starts_with("dav") {
        let text = "a file of a WebDAV server cannot be written at random places";
        (text, "copy to it as a whole, or write to a local file")
    } else {
        let text = "files of HTTP servers are read-only";
        (
            text,
            "if it is a WebDAV server, write davs:// or dav://; else write to a file or an object store",
        )
    };
    Error::new(Kind::Unsupported, text).with_remedy(remedy)
}

/// Opens the target of a copy: a file of a WebDAV server that is written as a whole.
async fn open_upload(
    target: &BackendTarget,
    options: RemoteOptions,
) -> Result<(OpenedDevice, Preparation)> {
    let typed = HttpDescription::parse(&target.scheme, target.text()?)?;
    let name: Arc<str> = typed.name().into();
    let named = |error: Error| error.on(&name);
    if !target.scheme.starts_with("dav") {
        return Err(named(no_random_writes(target)));
    }
    let Intent { target_size, grows, extends, image, .. } = target.intent;
    let Some(size) = target_size.filter(|_| !(extends || image && grows)) else {
        let text = "a file of a WebDAV server is written as a whole";
        let remedy = "for an image copy as-qcow2:DEVICE to it; else copy to a local file first";
        return Err(named(Error::new(Kind::Unsupported, text).with_remedy(remedy)));
    };
    let why = match (typed.url.path().ends_with('/'), typed.url.query()) {
        (true, _) => Some("the target is a directory: its URL ends with /"),
        (_, Some(_)) => {
            Some("the URL of a target cannot have a query (write %3F for a ? in a name)")
        }
        _ => None,
    };
    if let Some(why) = why {
        let error = Error::new(Kind::Usage, why).with_remedy("write davs://HOST/PATH/NAME");
        return Err(named(error));
    }
    let identity = identity_of_url(&typed.url);
    let resource = typed.resource(options).await.map_err(named)?;
    let claim = target.claim(storage_ids(identity), &name, false)?;
    let checked = runtime::run(DavTarget::check(resource)).await.map_err(named)?;
    let upload = Arc::new(DavUpload::new(checked, size, grows));
    let begun = upload.clone();
    let device = UploadDevice::new(&name, upload, identity, claim);
    let preparation = Preparation::new(move || {
        Box::pin(async move { runtime::run(begun.begin()).await.map_err(|error| error.on(&name)) })
    });
    Ok((OpenedDevice { device: Arc::new(device), more: None }, preparation))
}

/// The files of a directory of a WebDAV server.
async fn list(target: &BackendTarget, options: RemoteOptions) -> Result<Box<dyn ObjectList>> {
    let typed = HttpDescription::parse(&target.scheme, target.text()?)?;
    let name: Arc<str> = typed.name().into();
    if !target.scheme.starts_with("dav") {
        let error = Error::new(Kind::Unsupported, "a web server has no list of its files");
        let remedy = "name a file; if it is a WebDAV server, write dav:// or davs://";
        return Err(error.with_remedy(remedy).on(&name));
    }
    let resource = typed.resource(options).await.map_err(|error| error.on(&name))?;
    Ok(Box::new(DavList::new(resource)))
}

/// A description, checked.
struct HttpDescription {
    url: Url,
    authority: Option<PathBuf>,
    headers: Option<PathBuf>,
    password: Option<PathBuf>,
    connections: usize,
}

impl HttpDescription {
    fn parse(scheme: &str, rest: &str) -> Result<HttpDescription> {
        let shown = rest.split(['?', '#']).next().unwrap_or_default();
        let wrong = |why: &str, remedy: &'static str| {
            // What may be a password is not shown.
            let host = shown.rsplit_once('@').map_or(shown, |(_, host)| host);
            let host = host.trim_start_matches('/');
            Error::new(Kind::Usage, format!("{scheme}://{host}: {why}")).with_remedy(remedy)
        };
        let form = "write https://HOST/PATH";
        let (place, options) = rest.split_once('#').unwrap_or((rest, ""));
        let transport = match scheme {
            "dav" => "http",
            "davs" => "https",
            scheme => scheme,
        };
        if !place.starts_with("//") {
            return Err(wrong("no host", form));
        }
        let url = Url::parse(&format!("{transport}:{place}"));
        let url = url.map_err(|error| wrong(&format!("not a URL: {error}"), form))?;
        if url.host_str().is_none_or(str::is_empty) {
            return Err(wrong("no host", form));
        }
        if url.password().is_some() {
            let remedy = "put the password into a file, and add #password-file=FILE";
            return Err(wrong(
                "a password in a URL is visible to other users of this machine",
                remedy,
            ));
        }
        let args = ParamValues::check(scheme, PARAMS, &parse_options(options)?)?;
        let file = |name: &str| args.text(name).map(PathBuf::from);
        let authority = file("ca");
        if authority.is_some() && url.scheme() != "https" {
            return Err(wrong("ca is for https", "use https, or leave out ca"));
        }
        let password = file("password-file");
        if password.is_some() && url.username().is_empty() {
            return Err(wrong("no user for the password", "write https://USER@HOST/PATH"));
        }
        let connections = connections(&args).map_err(|why| wrong(&why, "write #connections=16"))?;
        Ok(HttpDescription { url, authority, headers: file("header-file"), password, connections })
    }

    /// The URL without what may be secret.
    fn name(&self) -> String {
        let mut url = self.url.clone();
        url.set_query(None);
        // Both are possible: the URL has a host.
        let _ = url.set_username("");
        url.to_string()
    }

    /// The resource. Call it on a worker.
    async fn resource(self, options: RemoteOptions) -> Result<HttpResource> {
        let read = blockhaul_io::offload(move || self.prepare(options)).await;
        read.map_err(|error| Error::new(Kind::Io, "cannot read the files").because(error))?
    }

    /// Reads the files. Blocks.
    fn prepare(self, options: RemoteOptions) -> Result<HttpResource> {
        let HttpDescription { mut url, authority, headers, password, connections } = self;
        let client = client(options, authority.as_deref(), connections)?;
        let mut fields = match headers {
            Some(file) => header_fields(&file)?,
            None => HeaderMap::new(),
        };
        if !url.username().is_empty() {
            let password = match password {
                Some(file) => read_text(&file, SECRET_MAX)?,
                None => String::new(),
            };
            let user = blockhaul_catalog::percent_decode(url.username())?;
            fields.extend([basic(&user, password.trim_end_matches(['\r', '\n']))?]);
            // Possible: the URL has a host.
            let _ = url.set_username("");
        }
        if !fields.is_empty() && url.scheme() == "http" && !is_local(&url) {
            log::warn!(
                "the fields for {} are sent without TLS: others on the network can read them",
                self_host(&url)
            );
        }
        Ok(HttpResource { client, url, fields, limit: options.timeout })
    }
}

fn self_host(url: &Url) -> &str {
    url.host_str().unwrap_or_default()
}

/// Whether requests stay on this machine.
pub(crate) fn is_local(url: &Url) -> bool {
    match self_host(url) {
        "localhost" => true,
        host => {
            host.trim_matches(['[', ']']).parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
        }
    }
}

/// The option `connections`, or what is wrong with it.
pub(crate) fn connections(args: &ParamValues) -> Result<usize, String> {
    let number = args.number("connections").filter(|number| (1..=CONNECTIONS_MAX).contains(number));
    let number = number.and_then(|number| usize::try_from(number).ok());
    number.ok_or_else(|| format!("connections may be 1 to {CONNECTIONS_MAX}"))
}

/// The fields in a file, which stay out of logs. Blocks.
///
/// # Errors
/// The file cannot be read, or a line is no field.
pub(crate) fn header_fields(file: &Path) -> Result<HeaderMap> {
    let text = read_text(file, SECRET_MAX)?;
    let mut fields = HeaderMap::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let field = line.split_once(':').and_then(|(name, value)| {
            let name = HeaderName::from_bytes(name.trim().as_bytes()).ok()?;
            Some((name, HeaderValue::from_str(value.trim()).ok()?))
        });
        let Some((name, mut value)) = field else {
            let text = format!("{}, line {}: not a field of a request", file.display(), number + 1);
            let remedy = "write NAME: VALUE, one a line";
            return Err(Error::new(Kind::Invalid, text).with_remedy(remedy));
        };
        value.set_sensitive(true);
        fields.append(name, value);
    }
    Ok(fields)
}
