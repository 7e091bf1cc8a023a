//! Names of images.

use blockhaul_block::{Error, Kind, Result};

use super::digest::ContentDigest;

/// Bytes of the longest name of a repository and of the longest tag (OCI distribution specification).
const NAME_MAX: usize = 255;
const TAG_MAX: usize = 128;

/// The name of an image in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ImageReference {
    /// The host of the registry, with its port if one was given.
    pub(super) registry: String,
    /// The repository.
    pub(super) name: String,
    /// The version of the image.
    pub(super) version: ImageVersion,
}

/// The version of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ImageVersion {
    /// A name that may get another image later.
    Tag(String),
    /// One image for ever.
    Digest(ContentDigest),
}

impl ImageReference {
    /// Parses `REGISTRY/NAME[:TAG][@DIGEST]`. An image with neither a tag nor a digest has the tag `latest`.
    ///
    /// # Errors
    /// [`Kind::Usage`]
    pub(super) fn parse(text: &str) -> Result<ImageReference> {
        let wrong = |why: &str| {
            let remedy = "write oci://REGISTRY/NAME:TAG or oci://REGISTRY/NAME@sha256:DIGEST";
            Error::new(Kind::Usage, format!("oci://{text}: {why}")).with_remedy(remedy)
        };
        let (registry, rest) = text.split_once('/').unwrap_or((text, ""));
        if rest.is_empty() {
            return Err(wrong("no name of an image"));
        }
        if registry.is_empty() {
            return Err(wrong("no registry"));
        }
        let (named, digest) = match rest.split_once('@') {
            Some((named, digest)) => (named, Some(digest)),
            None => (rest, None),
        };
        // A port is in the part before the first slash.
        let (name, tag) = match named.split_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (named, None),
        };
        if name.len() > NAME_MAX || !name.split('/').all(is_component) {
            return Err(wrong(
                "the name may have lower-case letters, digits, and . _ - / between them",
            ));
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(wrong("the tag may have letters, digits, and . _ -"));
        }
        let version = match digest {
            Some(digest) => ImageVersion::Digest(
                ContentDigest::parse(digest).map_err(|error| wrong(&error.text()))?,
            ),
            None => ImageVersion::Tag(tag.unwrap_or("latest").to_owned()),
        };
        let is_short = registry == "docker.io" && !name.contains('/');
        let name = if is_short { format!("library/{name}") } else { name.to_owned() };
        Ok(ImageReference { registry: registry.to_owned(), name, version })
    }

    /// The host that answers for the registry.
    pub(super) fn host(&self) -> &str {
        match self.registry.as_str() {
            "docker.io" => "registry-1.docker.io",
            host => host,
        }
    }
}

impl ImageVersion {
    /// The version in the URL of a manifest.
    pub(super) fn in_url(&self) -> String {
        match self {
            ImageVersion::Tag(tag) => tag.clone(),
            ImageVersion::Digest(digest) => digest.to_string(),
        }
    }
}

/// Whether a text is a part of a name: letters and digits, with separators between them.
fn is_component(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_edge = |byte: Option<&u8>| byte.is_some_and(|byte| is_plain(*byte));
    let bytes = text.as_bytes();
    is_edge(bytes.first())
        && is_edge(bytes.last())
        && bytes.iter().all(|byte| is_plain(*byte) || b"._-".contains(byte))
        && !text.contains("..")
}

/// Whether a text is a tag.
pub(super) fn is_tag(text: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.len() <= TAG_MAX
        && text.bytes().next().is_some_and(is_word)
        && text.bytes().all(|byte| is_word(byte) || b".-".contains(&byte))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_registry_and_a_version() {
        let parsed = |text: &str| {
            let found = ImageReference::parse(text).unwrap();
            (found.host().to_owned(), found.name.clone(), found.version.in_url())
        };
        let all =
            |host: &str, name: &str, version: &str| (host.into(), name.into(), version.into());
        assert_eq!(parsed("h:5000/a/b-c:v1.2_x"), all("h:5000", "a/b-c", "v1.2_x"));
        assert_eq!(parsed("quay.io/x"), all("quay.io", "x", "latest"));
        assert_eq!(
            parsed("docker.io/alpine:3"),
            all("registry-1.docker.io", "library/alpine", "3")
        );
        let digest = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(parsed(&format!("h/a:t@{digest}")), all("h", "a", &digest));
        for wrong in [
            "",
            "h",
            "/a",
            "h/",
            "h/A",
            "h/a:",
            "h/a b",
            "h/a/../b",
            "h/a//b",
            "h/-a",
            "h/a:x/y",
            "h/a@sha256:0",
            "h/a@md5:0",
            "h/a:é",
            &format!("h/{}", "a".repeat(256)),
            &format!("h/a:{}", "a".repeat(129)),
        ] {
            assert_eq!(ImageReference::parse(wrong).unwrap_err().kind(), Kind::Usage, "{wrong}");
        }
    }
}
