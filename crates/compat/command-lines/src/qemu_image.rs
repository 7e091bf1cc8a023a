//! Images as QEMU's programs name them: file names, URIs, `json:{…}` and `--image-opts`.

use std::path::PathBuf;

use blockhaul_catalog::{ImageFormat, QemuNode, QemuPlace, only_options};
use serde_json::{Map, Value as Json};

use crate::qemu_storage_daemon::{parameters, text};
use crate::qemu_tls::CredentialsObject;

/// A format of images, of those that this program knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QemuFormat {
    /// The disk, byte for byte.
    Raw,
    /// QEMU's.
    Qcow2,
    /// Another one.
    Other(&'static ImageFormat),
}

impl QemuFormat {
    /// The format of this name, QEMU's.
    pub fn named(name: &str) -> Option<QemuFormat> {
        if name == "raw" {
            Some(QemuFormat::Raw)
        } else {
            ImageFormat::of_qemu_name(name).map(QemuFormat::of)
        }
    }

    /// The format of an image.
    pub fn of(format: &'static ImageFormat) -> QemuFormat {
        if format.scheme == "qcow2" { QemuFormat::Qcow2 } else { QemuFormat::Other(format) }
    }

    /// The format that this device of ours reads; raw for any other.
    pub fn of_scheme(scheme: &str) -> QemuFormat {
        ImageFormat::of_scheme(scheme).map_or(QemuFormat::Raw, QemuFormat::of)
    }

    /// QEMU's name.
    pub fn name(self) -> &'static str {
        match self {
            QemuFormat::Raw => "raw",
            QemuFormat::Qcow2 => "qcow2",
            QemuFormat::Other(format) => format.qemu_name,
        }
    }

    /// Whether it is VMware's.
    pub fn is_vmdk(self) -> bool {
        self.scheme() == "vmdk"
    }

    /// The name of our device.
    fn scheme(self) -> &'static str {
        match self {
            QemuFormat::Raw => "file",
            QemuFormat::Qcow2 => "qcow2",
            QemuFormat::Other(format) => format.scheme,
        }
    }

    fn names_files(self) -> bool {
        match self {
            QemuFormat::Raw => false,
            QemuFormat::Qcow2 => true,
            QemuFormat::Other(format) => format.names_files,
        }
    }
}

/// An image, or a raw disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuImage {
    /// As the user named it.
    pub shown: String,
    /// Where it is.
    pub place: ImageLocation,
    /// None: the first bytes tell it.
    pub format: Option<QemuFormat>,
    /// `x-dirty-bitmap`: the metadata context of the server that takes the place of
    /// `base:allocation`.
    pub context: Option<String>,
    /// `tls-creds` and `tls-hostname`: the name of the credentials, and that of the server.
    tls: Option<(String, String)>,
    /// `cache.direct`: the disk is as long as what direct I/O transfers.
    pub direct: bool,
}

/// Where an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageLocation {
    /// A file or a block device.
    Path(PathBuf),
    /// An export of a server, or another device of ours.
    Uri(String),
}

/// Options of QEMU's driver for tests that limit requests, and change nothing else; those that inject
/// errors are refused.
const BLKDEBUG: &[&str] = &[
    "align",
    "image",
    "max-discard",
    "max-transfer",
    "max-write-zero",
    "opt-discard",
    "opt-write-zero",
];

impl QemuImage {
    /// The image of a file name, which may be `json:{…}` and URIs of NBD.
    ///
    /// # Errors
    /// What is wrong, or not supported, by name.
    pub fn named(name: &str, format: Option<&str>) -> Result<QemuImage, String> {
        let unknown = |format: &str| format!("Could not open '{name}': Unknown driver '{format}'");
        let format =
            format.map(|text| QemuFormat::named(text).ok_or_else(|| unknown(text))).transpose()?;
        if let Some(options) = name.strip_prefix("json:") {
            let mut image = QemuImage::of_options(&parameters(options, "driver")?, name)?;
            image.format = format.or(image.format);
            return image.secured(&[]);
        }
        let shown = name.to_string();
        let protocol = name.split_once(':').filter(|(scheme, _)| !scheme.contains('/'));
        let place = match protocol {
            None => ImageLocation::Path(PathBuf::from(name)),
            // What follows is a path in any case, and must look like one where it is printed.
            Some(("file", path)) if path.contains(':') && !path.contains('/') => {
                ImageLocation::Path(PathBuf::from(format!("./{path}")))
            }
            Some(("file", path)) => ImageLocation::Path(PathBuf::from(path)),
            Some(("nbd", rest)) if !rest.starts_with("//") => {
                ImageLocation::Uri(legacy(name, rest)?)
            }
            Some(("nbd" | "nbds" | "nbd+unix" | "nbds+unix" | "nbd+tcp", _)) => {
                ImageLocation::Uri(name.replacen("nbd+tcp:", "nbd:", 1))
            }
            Some(("null-co", _)) => zeroes(1 << 30),
            Some((other, _)) => {
                return Err(format!("Could not open '{name}': Unknown protocol '{other}'"));
            }
        };
        Ok(QemuImage { shown, place, format, context: None, tls: None, direct: false })
    }

    /// The backing file of this name, in a format that an image tells: raw where that is a protocol.
    ///
    /// # Errors
    /// Those of [`QemuImage::named`].
    pub fn of_backing(name: &str, format: Option<&str>) -> Result<QemuImage, String> {
        QemuImage::named(
            name,
            format.map(|format| if is_protocol(format) { "raw" } else { format }),
        )
    }

    /// The image of `--image-opts`.
    ///
    /// # Errors
    /// Those of [`QemuImage::named`].
    pub fn options(given: &str) -> Result<QemuImage, String> {
        QemuImage::options_with(given, &[])
    }

    /// The same, with these credentials.
    ///
    /// # Errors
    /// Those of [`QemuImage::named`].
    pub fn options_with(given: &str, all: &[CredentialsObject]) -> Result<QemuImage, String> {
        QemuImage::of_options(&parameters(given, "driver")?, given)?.secured(all)
    }

    /// The image at a server that is reached with TLS, if that is asked for.
    fn secured(mut self, all: &[CredentialsObject]) -> Result<QemuImage, String> {
        if let (Some((id, host)), ImageLocation::Uri(uri)) = (self.tls.take(), &self.place) {
            self.place =
                ImageLocation::Uri(CredentialsObject::find(all, &id, false)?.uri(uri, &host));
        }
        Ok(self)
    }

    fn of_options(given: &Map<String, Json>, shown: &str) -> Result<QemuImage, String> {
        if text(given, "driver") == "blkdebug" {
            only_options(given, BLKDEBUG).map_err(|error| error.text())?;
            let image = given.get("image").and_then(Json::as_object);
            let image = image.ok_or("A block device must be specified for \"image\"")?;
            return QemuImage::of_options(image, shown);
        }
        let node = QemuNode::from_options(given).map_err(|error| error.text())?;
        let format = match &node.format {
            None => None,
            Some(name) => {
                Some(QemuFormat::named(name).ok_or_else(|| format!("Unknown driver '{name}'"))?)
            }
        };
        let place = match node.place {
            QemuPlace::Name(name) => return QemuImage::named(&name, format.map(QemuFormat::name)),
            QemuPlace::Path(path) => ImageLocation::Path(path),
            QemuPlace::Nbd(uri) => ImageLocation::Uri(uri),
            QemuPlace::Zero(size) => zeroes(size),
        };
        let QemuNode { context, tls, direct, .. } = node;
        Ok(QemuImage { shown: shown.to_string(), place, format, context, tls, direct })
    }

    /// The description of the device that holds the image.
    pub fn holder(&self) -> String {
        match &self.place {
            ImageLocation::Uri(uri) => uri.clone(),
            ImageLocation::Path(path) => {
                let text = path.to_string_lossy();
                // A colon would make a relative path another device.
                if path.is_absolute() { text.into_owned() } else { format!("./{text}") }
            }
        }
    }

    /// The description of the disk in it, in this format, with further options of the device.
    pub fn disk(&self, format: QemuFormat, options: &[String]) -> String {
        let holder = self.holder();
        let scheme = format.scheme();
        let mut all = options.to_vec();
        match (format, &self.place) {
            (QemuFormat::Raw, ImageLocation::Uri(uri)) => return uri.clone(),
            _ if format.names_files() => all.insert(0, "names=allow".to_string()),
            _ => {}
        }
        let separator = if all.is_empty() { "" } else { "?" };
        format!("{scheme}:{}{separator}{}", encoded(&holder), all.join("&"))
    }

    /// The description of the disk in an export whose first bytes tell its format; none if the format is
    /// known, or the image is no export.
    pub fn unknown_export(&self) -> Option<String> {
        match &self.place {
            ImageLocation::Uri(uri) if self.format.is_none() && uri.starts_with("nbd") => {
                Some(format!("image:{}?names=allow", encoded(uri)))
            }
            _ => None,
        }
    }

    /// The path, if it is a file.
    pub fn path(&self) -> Option<&std::path::Path> {
        match &self.place {
            ImageLocation::Path(path) => Some(path),
            ImageLocation::Uri(_) => None,
        }
    }
}

/// Whether the format of a backing file is a protocol: the file has no format of its own.
pub fn is_protocol(format: &str) -> bool {
    ["file", "host_device", "host_cdrom", "nbd"].contains(&format)
}

/// A description as a part of another one.
pub fn encoded(text: &str) -> String {
    text.replace('%', "%25").replace('?', "%3f").replace('&', "%26")
}

/// `nbd:unix:PATH[:exportname=NAME]` and `nbd:HOST:PORT[:exportname=NAME]` as a URI.
fn legacy(name: &str, rest: &str) -> Result<String, String> {
    let (server, export) = match rest.split_once(":exportname=") {
        Some((server, export)) => (server, export),
        None => (rest, ""),
    };
    match server.strip_prefix("unix:") {
        Some(path) => Ok(format!("nbd+unix:///{}?socket={}", encoded(export), encoded(path))),
        None if server.contains(':') => Ok(format!("nbd://{server}/{}", encoded(export))),
        None => Err(format!("Could not open '{name}': it names no port")),
    }
}

/// A disk of zeroes: a number of bytes.
fn zeroes(size: u64) -> ImageLocation {
    ImageLocation::Uri(format!("zero:{size}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_descriptions() {
        let disk = |name: &str, format: QemuFormat| {
            QemuImage::named(name, None).unwrap().disk(format, &[])
        };
        assert_eq!(disk("a b?c%", QemuFormat::Raw), "file:./a b%3fc%25");
        assert_eq!(disk("/x/d.qcow2", QemuFormat::Qcow2), "qcow2:/x/d.qcow2?names=allow");
        assert_eq!(disk("file:x:y", QemuFormat::named("vpc").unwrap()), "vhd:././x:y?names=allow");
        assert_eq!(disk("nbd:unix:/s:exportname=e", QemuFormat::Raw), "nbd+unix:///e?socket=/s");
        assert_eq!(disk("nbd:localhost:1", QemuFormat::Raw), "nbd://localhost:1/");
        let uri = "nbd+unix:///e?socket=/s";
        assert_eq!(disk(uri, QemuFormat::Qcow2), "qcow2:nbd+unix:///e%3fsocket=/s?names=allow");
    }

    #[test]
    fn options_and_json_name_the_same() {
        let one = QemuImage::options("driver=qcow2,file.driver=file,file.filename=/a,,b").unwrap();
        assert_eq!(one.path().unwrap().to_str(), Some("/a,b"));
        let json = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/a,b"}}"#;
        let other = QemuImage::named(json, None).unwrap();
        assert_eq!((one.format, one.place), (other.format, other.place));
        let quoted = "json:{'driver':'qcow2','file.driver':'file','file.filename':'/a\"b\\'c'}";
        let quoted = QemuImage::named(quoted, None).unwrap();
        assert_eq!(quoted.path().unwrap().to_str(), Some("/a\"b'c"));
        let limited =
            QemuImage::options("driver=blkdebug,align=512,image.driver=raw,image.filename=/a");
        assert_eq!(limited.unwrap().path().unwrap().to_str(), Some("/a"));
        let nothing = QemuImage::named("json:{'driver':'null-co','size':512}", None).unwrap();
        assert_eq!(nothing.disk(QemuFormat::Raw, &[]), "zero:512");
        let nbd =
            "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path=/s,file.export=e";
        assert_eq!(QemuImage::options(nbd).unwrap().holder(), "nbd+unix:///e?socket=/s");
        let export = QemuImage::named("nbd://h/e", None).unwrap();
        assert_eq!(export.unknown_export().as_deref(), Some("image:nbd://h/e?names=allow"));
        let raw = QemuImage::named("nbd://h/e", Some("raw")).unwrap();
        assert_eq!(raw.unknown_export(), None);
        assert_eq!(QemuImage::options("driver=nbd,host=h").unwrap().unknown_export(), None);
        let asks = "driver=nbd,path=/s,x-dirty-bitmap=qemu:dirty-bitmap:b";
        let context = QemuImage::options(asks).unwrap().context;
        assert_eq!(context.as_deref(), Some("qemu:dirty-bitmap:b"));
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        for (name, why) in [
            ("rbd:pool/x", "protocol 'rbd'"),
            ("json:{\"driver\":\"rbd\"}", "driver 'rbd'"),
            ("json:{'driver':'blkdebug','image':{'filename':'x'},'config':'c'}", "'config'"),
            ("json:{\"driver\":\"raw\",\"offset\":1,\"file\":{\"filename\":\"x\"}}", "'offset'"),
            ("json:{", "EOF"),
            ("nbd:x", "port"),
            ("json:{'driver':'nbd','path':'/s','tls-creds':'t'}", "'t'"),
        ] {
            let said = QemuImage::named(name, None).unwrap_err();
            assert!(said.contains(why), "{name}: {said}");
        }
        let said = QemuImage::named("x", Some("cow")).unwrap_err();
        assert!(said.contains("Unknown driver 'cow'"), "{said}");
    }
}
