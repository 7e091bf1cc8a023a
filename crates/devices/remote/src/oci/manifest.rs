//! Manifests: what an image consists of (OCI image specification, Docker's image manifest version 2, schema 2).

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::printable;
use serde_json::Value;

use super::digest::ContentDigest;

/// Bytes of a manifest, an index or a configuration; registries refuse larger ones.
pub(super) const MANIFEST_MAX: usize = 4 << 20;
/// Indexes within one another.
pub(super) const NESTED_MAX: usize = 3;
/// Layers of an image.
const LAYERS_MAX: usize = 1000;
const SHOWN_MAX: usize = 120;
/// Platforms that are listed in a message.
const PLATFORMS_SHOWN: usize = 10;

/// The types of manifests that are read.
pub(super) const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
                                 application/vnd.docker.distribution.manifest.list.v2+json, \
                                 application/vnd.docker.distribution.manifest.v2+json";
const CONFIGURATIONS: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];

/// A blob or a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) media_type: String,
    pub(super) digest: ContentDigest,
    pub(super) size: u64,
    /// The name of the file, of a blob that is a file.
    pub(super) title: Option<String>,
}

/// What the bytes of a manifest are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Manifest {
    /// Images for several platforms.
    Index(Vec<(Option<Platform>, Descriptor)>),
    /// The layers of a container, the lowest first.
    Container { config: Descriptor, layers: Vec<Descriptor> },
    /// Blobs that are files.
    Artifact(Vec<Descriptor>),
}

/// A platform.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Platform {
    pub(super) os: String,
    pub(super) architecture: String,
    pub(super) variant: Option<String>,
}

impl Platform {
    /// Linux on this architecture, as `ARCH` or `ARCH/VARIANT`.
    pub(super) fn linux(architecture: &str) -> Platform {
        let (architecture, variant) = match architecture.split_once('/') {
            Some((architecture, variant)) => (architecture, Some(variant.to_owned())),
            None => (architecture, None),
        };
        Platform { os: "linux".to_owned(), architecture: architecture.to_owned(), variant }
    }

    /// Linux on this machine's architecture, by the name that images have for it.
    pub(super) fn own() -> Platform {
        Platform::linux(match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "x86" => "386",
            "aarch64" => "arm64",
            "powerpc64" => "ppc64le",
            "loongarch64" => "loong64",
            other => other,
        })
    }

    fn of(value: &Value) -> Option<Platform> {
        let text = |name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
        let (os, architecture) = (text("os")?, text("architecture")?);
        Some(Platform { os, architecture, variant: text("variant") })
    }

    fn is_for(&self, wanted: &Platform) -> bool {
        self.os == wanted.os
            && self.architecture == wanted.architecture
            && (wanted.variant.is_none() || self.variant == wanted.variant)
    }

    fn shown(&self) -> String {
        let variant = self.variant.as_ref().map(|variant| format!("/{variant}"));
        let text = format!("{}/{}{}", self.os, self.architecture, variant.unwrap_or_default());
        printable(text.as_bytes(), SHOWN_MAX)
    }
}

impl Manifest {
    /// Parses the bytes of a manifest, which are those of its digest.
    ///
    /// # Errors
    /// They are none, or of another type.
    pub(super) fn parse(bytes: &[u8]) -> Result<Manifest> {
        let value: Value =
            serde_json::from_slice(bytes).map_err(|_| damaged("it is no JSON".to_owned()))?;
        if value.get("schemaVersion").and_then(Value::as_u64) != Some(2) {
            let text = "the manifest of the image is of Docker's schema 1 or unknown";
            let remedy = "push the image again with a current program";
            return Err(Error::new(Kind::Unsupported, text).with_remedy(remedy));
        }
        let list = |name: &str| value.get(name).and_then(Value::as_array);
        match (list("manifests"), list("layers")) {
            // Two programs could see two images (CVE-2021-41190).
            (Some(_), Some(_)) => Err(damaged("it is a manifest and an index".to_owned())),
            (Some(manifests), None) => {
                let entry = |value| {
                    let platform = Value::get(value, "platform").and_then(Platform::of);
                    Ok((platform, Descriptor::parse(value)?))
                };
                Ok(Manifest::Index(manifests.iter().map(entry).collect::<Result<_>>()?))
            }
            (None, Some(layers)) => {
                if layers.len() > LAYERS_MAX {
                    return Err(damaged(format!("it has more than {LAYERS_MAX} layers")));
                }
                let layers = layers.iter().map(Descriptor::parse).collect::<Result<Vec<_>>>()?;
                let config = value.get("config").ok_or_else(|| damaged("no config".to_owned()))?;
                let config = Descriptor::parse(config)?;
                if CONFIGURATIONS.contains(&config.media_type.as_str()) {
                    return Ok(Manifest::Container { config, layers });
                }
                Ok(Manifest::Artifact(layers))
            }
            (None, None) => {
                let own = value.get("mediaType").and_then(Value::as_str).unwrap_or("none");
                let shown = printable(own.as_bytes(), SHOWN_MAX);
                let text = format!("the manifest of the image is of an unknown type ({shown})");
                let remedy = "name an image with layers, or an artefact with files";
                Err(Error::new(Kind::Unsupported, text).with_remedy(remedy))
            }
        }
    }
}

/// The manifest of an index for a platform.
///
/// # Errors
/// [`Kind::NotFound`] if there is none.
pub(super) fn choose(
    entries: Vec<(Option<Platform>, Descriptor)>,
    wanted: &Platform,
) -> Result<Descriptor> {
    let is_for = |entry: &&(Option<Platform>, Descriptor)| {
        entry.0.as_ref().is_some_and(|platform| platform.is_for(wanted))
    };
    if let Some((_, found)) = entries.iter().find(is_for) {
        return Ok(found.clone());
    }
    // An artefact has no platform.
    let mut bare = entries.iter().filter(|(platform, _)| platform.is_none());
    if let (Some((_, only)), None) = (bare.next(), bare.next()) {
        return Ok(only.clone());
    }
    let mut names: Vec<_> =
        entries.iter().filter_map(|(one, _)| one.as_ref()).map(Platform::shown).collect();
    let more = if names.len() > PLATFORMS_SHOWN { ", …" } else { "" };
    names.truncate(PLATFORMS_SHOWN);
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let text = format!("the image is not for {}: its platforms are {names}{more}", wanted.shown());
    Err(Error::new(Kind::NotFound, text).with_remedy("choose one with arch="))
}

impl Descriptor {
    fn parse(value: &Value) -> Result<Descriptor> {
        let text =
            |value: &Value, name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
        let media_type = text(value, "mediaType").unwrap_or_default();
        let digest = text(value, "digest").ok_or_else(|| damaged("no digest".to_owned()))?;
        let digest = ContentDigest::parse(&digest)?;
        let size = value.get("size").and_then(Value::as_u64);
        let size = size.filter(|size| i64::try_from(*size).is_ok());
        let size = size.ok_or_else(|| damaged(format!("no size of {digest}")))?;
        let notes = value.get("annotations");
        let title = notes.and_then(|notes| text(notes, "org.opencontainers.image.title"));
        Ok(Descriptor { media_type, digest, size, title })
    }
}

fn damaged(why: String) -> Error {
    let text = format!("the manifest of the image is damaged: {why}");
    Error::new(Kind::Invalid, text).with_remedy("push the image again")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    fn descriptor(number: u8, more: &str) -> String {
        let digest = ContentDigest::of(&[number]);
        format!("{{\"mediaType\":\"t{number}\",\"size\":{number},\"digest\":\"{digest}\"{more}}}")
    }

    fn parse(text: &str) -> Result<Manifest> {
        Manifest::parse(text.as_bytes())
    }

    #[test]
    fn containers_artefacts_and_indexes_are_told_apart() {
        let layers = descriptor(1, ",\"annotations\":{\"org.opencontainers.image.title\":\"d\"}");
        let manifest = |config: &str| {
            let config = descriptor(2, "").replace("t2", config);
            parse(&format!("{{\"schemaVersion\":2,\"config\":{config},\"layers\":[{layers}]}}"))
                .unwrap()
        };
        for config in CONFIGURATIONS {
            assert!(
                matches!(manifest(config), Manifest::Container { layers, .. } if layers.len() == 1)
            );
        }
        let Manifest::Artifact(files) = manifest("application/vnd.oci.empty.v1+json") else {
            panic!()
        };
        assert_eq!((files[0].title.as_deref(), files[0].size), (Some("d"), 1));
        let platform = |os: &str, arch: &str, more: &str| {
            format!(",\"platform\":{{\"os\":\"{os}\",\"architecture\":\"{arch}\"{more}}}")
        };
        let entries = [
            descriptor(1, &platform("linux", "arm64", ",\"variant\":\"v8\"")),
            descriptor(2, &platform("unknown", "unknown", "")),
            descriptor(3, &platform("windows", "amd64", "")),
            descriptor(4, &platform("linux", "amd64", "")),
            descriptor(5, ""),
        ];
        let index = |entries: &[String]| match parse(&format!(
            "{{\"schemaVersion\":2,\"manifests\":[{}]}}",
            entries.join(",")
        ))
        .unwrap()
        {
            Manifest::Index(entries) => entries,
            other => panic!("{other:?}"),
        };
        let size = |entries: &[String], arch: &str| {
            choose(index(entries), &Platform::linux(arch)).map(|found| found.size)
        };
        assert_eq!(size(&entries, "amd64").unwrap(), 4);
        assert_eq!(size(&entries, "arm64").unwrap(), 1);
        assert_eq!(size(&entries, "arm64/v8").unwrap(), 1);
        assert_eq!(size(&entries[..4], "arm64/v7").unwrap_err().kind(), Kind::NotFound);
        assert_eq!(size(&entries, "s390x").unwrap(), 5, "the only one without a platform");
        let said = size(&entries[..4], "s390x").unwrap_err().to_string();
        assert!(
            said.contains("linux/arm64/v8, unknown/unknown, windows/amd64, linux/amd64"),
            "{said}"
        );
    }

    #[test]
    fn other_documents_are_refused() {
        let layer = descriptor(1, "");
        for (text, why) in [
            ("".to_owned(), "no JSON"),
            ("[]".to_owned(), "schema 1"),
            ("{\"schemaVersion\":1,\"fsLayers\":[]}".to_owned(), "schema 1"),
            ("{\"schemaVersion\":2,\"mediaType\":\"x/\\u001b\"}".to_owned(), "unknown type (x/"),
            ("{\"schemaVersion\":2,\"manifests\":[],\"layers\":[]}".to_owned(), "and an index"),
            (format!("{{\"schemaVersion\":2,\"layers\":[{layer}]}}"), "no config"),
            ("{\"schemaVersion\":2,\"config\":{},\"layers\":[{}]}".to_owned(), "no digest"),
            (
                format!("{{\"schemaVersion\":2,\"manifests\":[{}]}}", layer.replace(":1,", ":-1,")),
                "no size",
            ),
            (
                "{\"schemaVersion\":2,\"manifests\":[{\"digest\":\"md5:0\"}]}".to_owned(),
                "is no digest",
            ),
        ] {
            let said = parse(&text).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
    }
}
