//! Files that images consist of, and the names of files in images: backing files, extents, parents.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::emulate::emulate;
use blockhaul_block::{Device, Error, Kind, Result, fence};
use blockhaul_catalog::{
    BackendTarget, DeviceSpec, HandleOpener, Intent, NamePolicy, OpenContext, OpenFuture,
    OpenedDevice, QemuNode, QemuPlace, options_of_json,
};

/// A device with a file of the chain.
pub(crate) struct ChainFile {
    /// The first handle, fenced.
    pub(crate) device: Arc<dyn Device>,
    more: Option<Arc<dyn HandleOpener>>,
}

impl ChainFile {
    pub(crate) fn new(opened: OpenedDevice) -> ChainFile {
        ChainFile { device: fence(emulate(opened.device)), more: opened.more }
    }

    /// The same with a device over each handle.
    pub(crate) fn over<F>(self, layer: F) -> ChainFile
    where
        F: Fn(Arc<dyn Device>) -> Arc<dyn Device> + Clone + Send + Sync + 'static,
    {
        let ChainFile { device, more } = self;
        let more = more.map(|more| {
            Arc::new(LayeredHandles { more, layer: layer.clone() }) as Arc<dyn HandleOpener>
        });
        ChainFile::new(OpenedDevice { device: layer(device), more })
    }

    /// The device as it was opened.
    pub(crate) fn opened(self) -> OpenedDevice {
        OpenedDevice { device: self.device, more: self.more }
    }

    pub(crate) fn has_more(&self) -> bool {
        self.more.is_some()
    }

    pub(crate) async fn another(&self) -> Result<Arc<dyn Device>> {
        match &self.more {
            None => Ok(self.device.clone()),
            Some(more) => Ok(fence(emulate(more.another().await?))),
        }
    }
}

/// Further handles with a device over each.
struct LayeredHandles<F> {
    more: Arc<dyn HandleOpener>,
    layer: F,
}

impl<F> HandleOpener for LayeredHandles<F>
where
    F: Fn(Arc<dyn Device>) -> Arc<dyn Device> + Clone + Send + Sync + 'static,
{
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let more = self.more.clone();
        let layer = self.layer.clone();
        Box::pin(async move { Ok(layer(fence(emulate(more.another().await?)))) })
    }
}

/// The context for names in the image of a target: the option `names`, or else what the command
/// decides.
pub(crate) fn context_for_names(target: &BackendTarget) -> OpenContext {
    match target.args.text("names") {
        Some("allow") => target.context.with_names(NamePolicy::Allow),
        Some(_) => target.context.with_names(NamePolicy::Refuse),
        None => target.context.clone(),
    }
}

/// A device that an image names.
pub(crate) struct NamedDevice {
    /// The description of the device.
    pub(crate) description: String,
    /// QEMU's name of the format that the name tells, if it does.
    pub(crate) format: Option<String>,
}

/// The image that a name comes from.
pub(crate) struct NamingImage<'a> {
    /// The scheme of the format, for messages.
    pub(crate) format: &'static str,
    pub(crate) file: &'a str,
    /// The directory that relative names begin at, if the image is given by a path.
    pub(crate) folder: Option<&'a Path>,
}

impl NamingImage<'_> {
    fn unsupported(&self, what: String, way: &str) -> Error {
        Error::new(Kind::Unsupported, format!("{}: {what}: {way}", self.format))
    }

    /// Opens a device that the image names, if the policy of `context` allows it; `option` is the
    /// option by which the user can name it instead.
    pub(crate) async fn open(
        &self,
        context: &OpenContext,
        named: &str,
        description: &str,
        option: &str,
        intent: Intent,
    ) -> Result<OpenedDevice> {
        let opened = context.open_named_in(self.file, description, intent).await;
        let policy = context.registry().names;
        let format = self.format;
        opened.map_err(|error| match (error.kind(), policy) {
            (Kind::Refused, NamePolicy::Refuse) => {
                let remedy = format!(
                    "if you trust the image, allow it with \"{format}:…?names=allow\", or name a device with \
                     {option}=DEVICE"
                );
                // No permission of the system is missing.
                error.with_kind(Kind::Unsupported).with_remedy(remedy)
            }
            _ => {
                let why = error.located();
                error.reworded(format!("{format}: {} names {named:?}: {why}", self.file))
            }
        })
    }

    /// The device of a name in an image: a path, relative to the image, a URI, or a node of QEMU in JSON.
    pub(crate) fn device(&self, named: &str, option: &str) -> Result<NamedDevice> {
        let Some(options) = named.strip_prefix("json:") else {
            return Ok(NamedDevice { description: self.description(named, option)?, format: None });
        };
        let node = options_of_json(options).and_then(|given| QemuNode::from_options(&given));
        let node = node.map_err(|error| {
            let what = format!("{} names {named:?}: {}", self.file, error.text());
            self.unsupported(what, &format!("name the device with {option}=DEVICE"))
        })?;
        let description = self.node(named, &node, option)?;
        Ok(NamedDevice { description, format: node.format })
    }

    /// The description of the device with the bytes of a node.
    fn node(&self, named: &str, node: &QemuNode, option: &str) -> Result<String> {
        // Within JSON a path begins at the directory of the process, as in QEMU: no other file is opened.
        let from = NamingImage { folder: Some(Path::new("")), ..*self };
        let refused = match (&node.place, &node.context, &node.tls) {
            (QemuPlace::Zero(_), ..) => "driver 'null-co'",
            (_, Some(_), _) => "'x-dirty-bitmap'",
            (.., Some(_)) => "'tls-creds'",
            (QemuPlace::Nbd(uri), ..) => return Ok(uri.clone()),
            (QemuPlace::Name(name), ..) => return from.description(name, option),
            (QemuPlace::Path(path), ..) => {
                return from.path(&path.to_string_lossy(), option);
            }
        };
        let what = format!("{} names {named:?}; {refused} is not supported there", self.file);
        Err(self.unsupported(what, &format!("name the device with {option}=DEVICE")))
    }

    /// The description of a device for a path, relative to the image, or a URI.
    fn description(&self, named: &str, option: &str) -> Result<String> {
        let way = format!("name the device with {option}=DEVICE");
        // As QEMU: a colon before any slash ends the name of a protocol.
        let protocol = named.split_once(':').filter(|(scheme, _)| !scheme.contains('/'));
        let path = match protocol {
            Some(("file", path)) => path,
            Some((_, rest)) if rest.starts_with("//") => return Ok(named.to_string()),
            Some((protocol, _)) => {
                let what =
                    format!("{} names {named:?}; protocol {protocol:?} is not known", self.file);
                return Err(self.unsupported(what, &way));
            }
            None => named,
        };
        self.path(path, option)
    }

    /// The description of a file for a path in an image; never that of another device.
    pub(crate) fn path(&self, path: &str, option: &str) -> Result<String> {
        let way = format!("name the device with {option}=DEVICE");
        if path.starts_with('/') {
            return Ok(path.to_string());
        }
        let Some(folder) = self.folder else {
            let what = format!(
                "{} names {path:?}, relative to its own directory, but is not given by a path",
                self.file
            );
            return Err(self.unsupported(what, &way));
        };
        match folder.join(path).to_str() {
            // Never a scheme, whatever the name is.
            Some(path) if path.starts_with('/') => Ok(path.to_string()),
            Some(path) => Ok(format!("./{path}")),
            None => Err(self.unsupported("the path of the image is not UTF-8".into(), &way)),
        }
    }
}

/// The directory of a file, if the description is that of one.
pub(crate) fn folder_of(description: &str) -> Option<PathBuf> {
    let path = match DeviceSpec::parse(OsStr::new(description)).ok()? {
        DeviceSpec::Path(path) => path,
        DeviceSpec::Scheme { scheme, rest } if scheme == "file" => {
            let path = rest.split_once('?').map_or(rest.as_str(), |(path, _)| path);
            PathBuf::from(blockhaul_catalog::percent_decode(path).ok()?)
        }
        _ => return None,
    };
    // A descriptor has no name.
    path.file_name()?;
    path.parent().map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_images_are_paths_beside_them_or_uris() {
        let description = |folder: Option<&str>, named: &str| {
            let folder = folder.map(Path::new);
            NamingImage { format: "qcow2", file: "top.qcow2", folder }.device(named, "backing")
        };
        for (folder, named, wanted) in [
            ("", "base.raw", "./base.raw"),
            ("images", "base.raw", "./images/base.raw"),
            ("/images", "sub/a:b", "/images/sub/a:b"),
            ("/images", "/disks/a:b", "/disks/a:b"),
            ("/images", "file:base.raw", "/images/base.raw"),
            ("", "./memory:1G", "././memory:1G"),
            ("x", "nbd://host/disk", "nbd://host/disk"),
        ] {
            let device = description(Some(folder), named).unwrap();
            assert_eq!((device.description.as_str(), device.format), (wanted, None));
        }
        for (folder, named, wanted, format) in [
            (
                Some("/images"),
                r#"json:{"driver":"qcow2","file.filename":"a"}"#,
                "./a",
                Some("qcow2"),
            ),
            (
                None,
                r#"json:{"file":{"driver":"file","filename":"memory:1G"}}"#,
                "./memory:1G",
                None,
            ),
            (None, r#"json:{"driver":"host_device","filename":"/dev/x"}"#, "/dev/x", None),
            (None, r#"json:{"driver":"nbd","path":"/s"}"#, "nbd+unix://?socket=/s", Some("raw")),
            (None, r#"json:{"filename":"file:/a b"}"#, "/a b", None),
        ] {
            let device = description(folder, named).unwrap();
            assert_eq!((device.description.as_str(), device.format.as_deref()), (wanted, format));
        }
        assert!(matches!(
            DeviceSpec::parse(OsStr::new(
                &description(Some("memory:1G"), "a").unwrap().description
            ))
            .unwrap(),
            DeviceSpec::Path(_)
        ));
        for (folder, named, why) in [
            (None, "a", "own directory"),
            (Some(""), "memory:1G", "\"memory\""),
            (None, r#"json:{"driver":"raw","filename":"memory:1G"}"#, "\"memory\""),
            (Some(""), "json:{}", "must be specified"),
            (Some(""), "json:{", "EOF"),
            (Some(""), r#"json:{"driver":"ssh","path":"p"}"#, "'ssh'"),
            (Some(""), r#"json:{"driver":"qcow2","file":{"driver":"http","url":"u"}}"#, "'http'"),
            (Some(""), r#"json:{"driver":"null-co"}"#, "'null-co'"),
            (
                Some(""),
                r#"json:{"driver":"nbd","path":"/s","x-dirty-bitmap":"b"}"#,
                "'x-dirty-bitmap'",
            ),
            (Some(""), r#"json:{"driver":"nbd","path":"/s","tls-creds":"t"}"#, "'tls-creds'"),
        ] {
            let error = description(folder, named).err().unwrap().to_string();
            assert!(error.contains("backing=DEVICE") && error.contains(why), "{error}");
        }
        assert_eq!(folder_of("file:/a/b%20c?lock=off"), Some("/a".into()));
        assert_eq!(folder_of("b.qcow2"), Some("".into()));
        assert_eq!(folder_of("nbd://host/a"), None);
    }
}
