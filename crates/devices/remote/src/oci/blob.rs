//! Where the parts of an image are, and a blob of it in one pass.

use std::fs::File;
use std::io::Read as _;

use blockhaul_block::{Error, Kind, Result};
use bytes::Bytes;
use reqwest::{Response, StatusCode};

use super::digest::ContentDigest;
use super::layout::ImageLayout;
use super::manifest::Descriptor;
use super::reference::ImageVersion;
use super::registry::Registry;
use crate::failure::{Failure, Repetitions};
use crate::response::ContentRange;
use crate::runtime::blocking;

/// Bytes of a file that are read at a time.
const PIECE: usize = 1 << 20;

/// The place of an image.
pub(super) enum ImageSource {
    Registry(Box<Registry>, ImageVersion),
    Layout(ImageLayout),
}

impl ImageSource {
    /// The bytes of the manifest or index that the image is named by, and their digest.
    ///
    /// # Errors
    /// They cannot be read, or are others than those of the digest.
    pub(super) async fn top(&self) -> Result<(Vec<u8>, ContentDigest)> {
        match self {
            ImageSource::Registry(registry, ImageVersion::Digest(digest)) => {
                let bytes = registry.manifest(&digest.to_string(), Some(digest)).await?;
                Ok((bytes, digest.clone()))
            }
            ImageSource::Registry(registry, version) => {
                let bytes = registry.manifest(&version.in_url(), None).await?;
                let digest = ContentDigest::of(&bytes);
                Ok((bytes, digest))
            }
            ImageSource::Layout(layout) => {
                let layout = layout.clone();
                blocking(move || {
                    let digest = layout.find()?;
                    Ok((layout.small_blob(&digest)?, digest))
                })
                .await
            }
        }
    }

    /// The bytes of a manifest that an index names.
    ///
    /// # Errors
    /// They cannot be read, or are others than those of the digest.
    pub(super) async fn manifest(&self, found: &Descriptor) -> Result<Vec<u8>> {
        match self {
            ImageSource::Registry(registry, _) => {
                registry.manifest(&found.digest.to_string(), Some(&found.digest)).await
            }
            ImageSource::Layout(_) => self.small_blob(found).await,
        }
    }

    /// The bytes of a configuration.
    ///
    /// # Errors
    /// They cannot be read, or are others than those of the digest.
    pub(super) async fn small_blob(&self, found: &Descriptor) -> Result<Vec<u8>> {
        match self {
            ImageSource::Registry(registry, _) => registry.small_blob(&found.digest).await,
            ImageSource::Layout(layout) => {
                let (layout, digest) = (layout.clone(), found.digest.clone());
                blocking(move || layout.small_blob(&digest)).await
            }
        }
    }
}

/// A blob that is read once, from its beginning to its end. Its reader checks the digest.
pub(super) struct BlobReader<'a> {
    source: &'a ImageSource,
    blob: &'a Descriptor,
    /// Bytes that were read.
    at: u64,
    open: OpenBlob,
    /// Bytes since the last failure.
    received: usize,
    repetitions: Repetitions,
}

enum OpenBlob {
    None,
    /// A response, and its bytes that were read before.
    Response(Box<Response>, u64),
    File(File),
}

impl<'a> BlobReader<'a> {
    pub(super) fn new(source: &'a ImageSource, blob: &'a Descriptor) -> BlobReader<'a> {
        let repetitions = Repetitions::new();
        BlobReader { source, blob, at: 0, open: OpenBlob::None, received: 0, repetitions }
    }

    /// The next bytes; none behind as many as the manifest names.
    ///
    /// # Errors
    /// The blob cannot be read, or has another length.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            match self.part().await {
                Ok(None) if self.at == self.blob.size => return Ok(None),
                Ok(Some(more)) if more.is_empty() => {}
                Ok(Some(more)) => {
                    self.at += more.len() as u64;
                    if self.at > self.blob.size {
                        return Err(self.other_length("more"));
                    }
                    return Ok(Some(more));
                }
                Ok(None) if matches!(self.open, OpenBlob::File(_)) => {
                    return Err(self.other_length("less"));
                }
                Ok(None) => {
                    let text = "the registry closed the connection within a blob";
                    self.again(Failure::passing(Error::new(Kind::Disconnected, text))).await?;
                }
                Err(failure) => self.again(failure).await?,
            }
        }
    }

    fn other_length(&self, how: &str) -> Error {
        let Descriptor { digest, size, .. } = self.blob;
        let text = format!("{digest} has {how} than the {size} bytes that the manifest names");
        Error::new(Kind::Io, text).with_remedy("check the registry, and caches in front of it")
    }

    async fn again(&mut self, failure: Failure) -> Result<()> {
        self.open = OpenBlob::None;
        let received = std::mem::take(&mut self.received);
        self.repetitions.wait(failure, received).await
    }

    async fn part(&mut self) -> Result<Option<Bytes>, Failure> {
        match (&mut self.open, self.source) {
            (OpenBlob::None, ImageSource::Layout(layout)) => {
                let (layout, digest) = (layout.clone(), self.blob.digest.clone());
                let file = blocking(move || layout.open(&digest)).await.map_err(Failure::last)?;
                self.open = OpenBlob::File(file);
                Ok(Some(Bytes::new()))
            }
            (OpenBlob::None, ImageSource::Registry(registry, _)) => {
                let response = registry.blob(&self.blob.digest, self.at).await?;
                let skip = match response.status() {
                    StatusCode::PARTIAL_CONTENT => {
                        let found = ContentRange::of(response.headers());
                        let first = found.and_then(|found| found.range).map(|range| range.0);
                        if first != Some(self.at) {
                            let text = "the registry sends another range than it was asked for";
                            return Err(Failure::passing(Error::new(Kind::Io, text)));
                        }
                        0
                    }
                    _ => self.at,
                };
                self.open = OpenBlob::Response(Box::new(response), skip);
                Ok(Some(Bytes::new()))
            }
            (OpenBlob::Response(response, skip), ImageSource::Registry(registry, _)) => {
                let Some(mut more) = registry.chunk(response).await? else { return Ok(None) };
                let known = usize::try_from(*skip).unwrap_or(usize::MAX).min(more.len());
                *skip -= known as u64;
                let rest = more.split_off(known);
                self.received += rest.len();
                Ok(Some(rest))
            }
            (OpenBlob::File(file), _) => {
                let mut file = file.try_clone().map_err(unreadable)?;
                let read = blocking(move || {
                    let mut piece = vec![0; PIECE];
                    let len = file.read(&mut piece).map_err(|error| {
                        Error::system("cannot read a blob of the layout", error)
                    })?;
                    piece.truncate(len);
                    Ok(piece)
                });
                let piece = read.await.map_err(Failure::last)?;
                Ok(Some(Bytes::from(piece)).filter(|piece| !piece.is_empty()))
            }
            (OpenBlob::Response(..), ImageSource::Layout(_)) => Ok(None),
        }
    }
}

fn unreadable(error: std::io::Error) -> Failure {
    Failure::last(Error::system("cannot read a blob of the layout", error))
}
