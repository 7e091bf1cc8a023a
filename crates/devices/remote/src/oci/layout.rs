//! Images in a local directory (OCI image layout), as skopeo writes them.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};
use serde_json::Value;

use super::digest::ContentDigest;
use super::manifest::MANIFEST_MAX;
use super::registry::check;

/// A directory with images.
#[derive(Debug, Clone)]
pub(super) struct ImageLayout {
    pub(super) folder: PathBuf,
    /// The name of the image; none: the only one.
    pub(super) tag: Option<String>,
}

impl ImageLayout {
    /// The digest of the manifest of the image. Blocks.
    ///
    /// # Errors
    /// There is no such image, or the directory is no layout.
    pub(super) fn find(&self) -> Result<ContentDigest> {
        let wrong = |kind, why: String, remedy: &'static str| {
            let text = format!("{}: {why}", self.folder.display());
            Error::new(kind, text).with_remedy(remedy)
        };
        let text = read(&self.folder.join("index.json"), MANIFEST_MAX)?;
        let index: Value = serde_json::from_slice(&text).unwrap_or_default();
        let Some(entries) = index.get("manifests").and_then(Value::as_array) else {
            return Err(wrong(Kind::Invalid, "no layout of images".into(), "check the directory"));
        };
        let name = |entry: &Value| {
            let name = entry.get("annotations")?.get("org.opencontainers.image.ref.name")?;
            name.as_str().map(str::to_owned)
        };
        let is_wanted = |entry: &&Value| self.tag.is_none() || name(entry) == self.tag;
        let mut found = entries.iter().filter(is_wanted);
        match (found.next(), found.next(), &self.tag) {
            (Some(entry), None, _) | (Some(entry), _, Some(_)) => {
                let digest = entry.get("digest").and_then(Value::as_str).unwrap_or_default();
                ContentDigest::parse(digest)
            }
            (None, ..) => {
                let why = "there is no such image in it".to_owned();
                Err(wrong(Kind::NotFound, why, "check the tag (oci:DIRECTORY:TAG)"))
            }
            (Some(_), ..) => {
                let why = "it has several images".to_owned();
                Err(wrong(Kind::Usage, why, "name one (oci:DIRECTORY:TAG)"))
            }
        }
    }

    /// The bytes of a manifest or of a configuration. Blocks.
    ///
    /// # Errors
    /// It cannot be read, or has another digest.
    pub(super) fn small_blob(&self, digest: &ContentDigest) -> Result<Vec<u8>> {
        let bytes = read(&self.place(digest), MANIFEST_MAX)?;
        check(&bytes, digest)?;
        Ok(bytes)
    }

    /// The file with a blob. Blocks.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(super) fn open(&self, digest: &ContentDigest) -> Result<File> {
        open(&self.place(digest))
    }

    fn place(&self, digest: &ContentDigest) -> PathBuf {
        let (algorithm, hex) = digest.parts();
        self.folder.join("blobs").join(algorithm).join(hex)
    }
}

fn open(path: &Path) -> Result<File> {
    let failed = |error| Error::system(format!("cannot open {}", path.display()), error);
    blockhaul_io::open_regular_file(path).map_err(failed)
}

fn read(path: &Path, most: usize) -> Result<Vec<u8>> {
    let failed = |error| Error::system(format!("cannot read {}", path.display()), error);
    let mut bytes = Vec::new();
    open(path)?.take(most as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() > most {
        let text = format!("{} has more than {most} bytes", path.display());
        return Err(Error::new(Kind::Invalid, text).with_remedy("check the directory"));
    }
    Ok(bytes)
}
