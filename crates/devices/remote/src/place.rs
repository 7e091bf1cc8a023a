//! Places of servers that are folders of files: repositories of other programs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::ParamValues;
use bytes::Bytes;
use futures_util::StreamExt as _;
use object_store::ObjectStoreExt as _;
use object_store::path::Path;
use openssl::hash::{MessageDigest, hash};

use crate::chunks::folder::{ObjectFolder as _, StoreFolder, is_absent, other_size};
use crate::failure::PAUSE;
use crate::store_backend::{StoreDescription, params};
use crate::store_failure::StoreKind;
use crate::{RemoteOptions, runtime};

/// Attempts to create a file that is neither there nor can be made, and to remove one.
const ATTEMPTS: u32 = 6;
/// Longest file that is created.
pub(crate) const CREATED_MAX: u64 = 1 << 20;

/// A place with files that are written as a whole. Its methods block: call them on threads that may wait.
pub trait RemotePlace: Send + Sync + 'static {
    /// Requests that are under way at most.
    fn connections(&self) -> usize;

    /// The names of the files and folders in a folder, without it, in any order.
    ///
    /// # Errors
    /// The service fails.
    fn names(&self, folder: &str) -> Result<Vec<String>>;

    /// The names of the files in a folder and in the folders in it, without these, in any order.
    ///
    /// # Errors
    /// The service fails.
    fn names_below(&self, folder: &str) -> Result<Vec<String>>;

    /// A whole file of at most `most` bytes, if there is one with this name.
    ///
    /// # Errors
    /// The file has more bytes, or the service fails.
    fn whole(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>>;

    /// `len` bytes of a file at offset `at`, if there is one with this name.
    ///
    /// # Errors
    /// [`Kind::Invalid`]: the file is shorter. The service fails.
    fn range(&self, name: &str, at: u64, len: usize) -> Result<Option<Vec<u8>>>;

    /// Bytes of a file, if there is one with this name.
    ///
    /// # Errors
    /// The service fails.
    fn size(&self, name: &str) -> Result<Option<u64>>;

    /// Makes the folders of a new repository, where the service has folders.
    ///
    /// # Errors
    /// The service fails.
    fn make(&self) -> Result<()> {
        Ok(())
    }

    /// Writes a file whose name is that of its contents. It is durable then: the service has confirmed it.
    ///
    /// # Errors
    /// The service fails, or has other bytes.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Makes a file with contents that no other program writes. False: a file has this name.
    ///
    /// # Errors
    /// [`Kind::Unsupported`]: the service may replace a file. The service fails.
    fn create(&self, name: &str, bytes: &[u8]) -> Result<bool>;

    /// Removes a file, which need not exist.
    ///
    /// # Errors
    /// The service fails.
    fn remove(&self, name: &str) -> Result<()>;
}

/// The objects of a store whose names begin with a prefix.
pub struct ObjectPlace {
    folder: Arc<StoreFolder>,
    connections: usize,
    /// Whether ETags of objects that were sent in one request may be their MD5.
    has_digests: AtomicBool,
}

impl ObjectPlace {
    /// The objects below `s3://BUCKET/NAME`, `gs://BUCKET/NAME` or `az://CONTAINER/NAME`, or all of a bucket, with the
    /// options of that kind of storage. No request is sent.
    ///
    /// # Errors
    /// [`Kind::Usage`]: the location or an option is invalid. Settings or credentials are missing or wrong.
    pub fn open(
        location: &str,
        options: &[(String, String)],
        limits: RemoteOptions,
    ) -> Result<ObjectPlace> {
        let (scheme, _) = location.split_once("://").unwrap_or((location, ""));
        let Some(kind) = StoreKind::of_scheme(scheme) else {
            let text = format!("{scheme}: is no kind of object store");
            let remedy = "choose s3://, gs:// or az://, or rest:https://HOST/PATH/";
            return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
        };
        let args = ParamValues::check(scheme, params(kind), options)?;
        let rest = &location[scheme.len() + 1..];
        let typed = StoreDescription::list(kind, scheme, rest, &args)?;
        let connections = typed.connections;
        let resource = typed.prepare(kind, limits)?;
        let folder = Arc::new(StoreFolder::new(resource, connections));
        Ok(ObjectPlace { folder, connections, has_digests: AtomicBool::new(true) })
    }

    /// The ETag of an object with these bytes at most services. None: it says nothing here.
    fn digest(&self, bytes: &[u8]) -> Option<String> {
        if !self.has_digests.load(Ordering::Relaxed) {
            return None;
        }
        let digest = hash(MessageDigest::md5(), bytes).ok()?;
        Some(digest.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// Whether an ETag may be a digest, and then whether it is this one.
fn is_digest(etag: Option<&str>, digest: Option<&str>) -> Option<bool> {
    let etag = etag?.trim_matches('"');
    let is_hex = etag.len() == 32 && etag.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then_some(etag.eq_ignore_ascii_case(digest?))
}

impl RemotePlace for ObjectPlace {
    fn connections(&self) -> usize {
        self.connections
    }

    fn names(&self, folder: &str) -> Result<Vec<String>> {
        let (objects, folder) = (self.folder.clone(), folder.to_owned());
        runtime::wait(async move { objects.names_in(&folder).await })
    }

    fn names_below(&self, folder: &str) -> Result<Vec<String>> {
        let (objects, folder) = (self.folder.clone(), Path::from(folder));
        runtime::wait(async move {
            let mut found = objects.names_below(&folder);
            let mut names = Vec::new();
            while let Some(name) = found.next().await {
                let name = name?;
                names.push(name.rsplit('/').next().unwrap_or_default().to_owned());
            }
            Ok(names)
        })
    }

    fn whole(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let (objects, name) = (self.folder.clone(), name.to_owned());
        let found = runtime::wait(async move { objects.get(&name, most).await })?;
        Ok(found.map(|found| found.bytes.to_vec()))
    }

    fn range(&self, name: &str, at: u64, len: usize) -> Result<Option<Vec<u8>>> {
        let (objects, name) = (self.folder.clone(), name.to_owned());
        runtime::wait(async move {
            let mut bytes = vec![0; len];
            let is_there = objects.range(&name, at, &mut bytes).await?;
            Ok(is_there.then_some(bytes))
        })
    }

    fn size(&self, name: &str) -> Result<Option<u64>> {
        let (objects, name) = (self.folder.clone(), name.to_owned());
        runtime::wait(async move { Ok(objects.facts(&name).await?.map(|(size, _)| size)) })
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (objects, name) = (self.folder.clone(), name.to_owned());
        let digest = self.digest(bytes);
        let bytes = Bytes::copy_from_slice(bytes);
        let confirmed =
            runtime::wait(async move { objects.put_confirmed(&name, bytes, digest).await })?;
        if confirmed == Confirmation::Contents {
            // Services that encrypt with keys of a user have other ETags.
            self.has_digests.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        let (objects, name) = (self.folder.clone(), name.to_owned());
        let bytes = Bytes::copy_from_slice(bytes);
        runtime::wait(async move { objects.create(&name, bytes).await })
    }

    fn remove(&self, name: &str) -> Result<()> {
        let (objects, name) = (self.folder.clone(), name.to_owned());
        runtime::wait(async move {
            let mut attempt = 0;
            loop {
                match objects.remove(&name).await {
                    // What was removed need not exist: the request is repeated.
                    Err(error) if is_answer_lost(&error) && attempt < ATTEMPTS => {
                        tokio::time::sleep(PAUSE * (1 << attempt)).await;
                        attempt += 1;
                    }
                    removed => return removed,
                }
            }
        })
    }
}

/// What has confirmed an object that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Confirmation {
    Digest,
    Length,
    /// The object was read, because its ETag is no digest.
    Contents,
}

impl StoreFolder {
    /// Size and ETag of an object, if there is one with this name.
    async fn facts(&self, name: &str) -> Result<Option<(u64, Option<String>)>> {
        let _turn = self.turns.acquire().await;
        let found = self.resource.store.head(&self.at(name)).await;
        match found.map_err(|error| self.failed(&error)) {
            Err(error) if is_absent(&error) => Ok(None),
            found => found.map(|found| Some((found.size, found.e_tag))),
        }
    }

    /// Writes an object, and compares what the service has with it. `digest`: its MD5.
    async fn put_confirmed(
        &self,
        name: &str,
        bytes: Bytes,
        digest: Option<String>,
    ) -> Result<Confirmation> {
        let put = {
            let _turn = self.turns.acquire().await;
            self.resource.store.put(&self.at(name), bytes.clone().into()).await
        };
        let lost = match put {
            Ok(put) => {
                if is_digest(put.e_tag.as_deref(), digest.as_deref()) == Some(true) {
                    return Ok(Confirmation::Digest);
                }
                None
            }
            Err(error) => {
                let error = self.failed(&error);
                if !is_answer_lost(&error) {
                    return Err(error);
                }
                Some(error)
            }
        };
        let was_lost = lost.is_some();
        let found = match (self.facts(name).await, lost) {
            // The service has the object, although its answer was lost; or not.
            (Ok(Some(found)), Some(error)) if found.0 != bytes.len() as u64 => return Err(error),
            (Ok(None) | Err(_), Some(error)) => return Err(error),
            (found, _) => found?,
        };
        let Some((size, etag)) = found else { return Err(unconfirmed(name)) };
        if size != bytes.len() as u64 {
            return Err(other_size(name, size));
        }
        match is_digest(etag.as_deref(), digest.as_deref()) {
            Some(true) => Ok(Confirmation::Digest),
            None if !was_lost => Ok(Confirmation::Length),
            _ => {
                let found = self.get(name, size).await?;
                let is_same = found.is_some_and(|found| found.bytes == bytes);
                if is_same { Ok(Confirmation::Contents) } else { Err(unconfirmed(name)) }
            }
        }
    }

    /// Makes an object. False: there is another one with this name.
    async fn create(&self, name: &str, bytes: Bytes) -> Result<bool> {
        let mut failed = None;
        for attempt in 0..ATTEMPTS {
            match self.replace(name, bytes.clone(), None).await {
                Ok(Some(_)) => {
                    // The condition does not hold any more: a service that writes nevertheless ignores it.
                    return match self.replace(name, bytes, None).await {
                        Ok(Some(_)) => Err(unconditional()),
                        Ok(None) => Ok(true),
                        Err(error) if is_answer_lost(&error) => Ok(true),
                        Err(error) => Err(error),
                    };
                }
                Ok(None) => {}
                Err(error) if is_answer_lost(&error) => failed = Some(error),
                Err(error) => return Err(error),
            }
            // The request may have been carried out, although its answer was lost.
            if let Some(found) = self.get(name, CREATED_MAX).await? {
                return Ok(found.bytes == bytes);
            }
            tokio::time::sleep(PAUSE * (1 << attempt)).await;
        }
        Err(failed.unwrap_or_else(|| unconfirmed(name)))
    }
}

/// Whether the service may have carried out a request that failed.
fn is_answer_lost(error: &Error) -> bool {
    matches!(error.kind(), Kind::Disconnected | Kind::TimedOut | Kind::Io)
}

/// The error of a file that is not there after it was written.
pub(crate) fn unconfirmed(name: &str) -> Error {
    let text = format!("the service does not have {name} as it was written");
    let remedy = "check whether others remove or write objects there, and run the command again";
    Error::new(Kind::Io, text).with_remedy(remedy)
}

/// The error of a file with the name of other contents.
pub(crate) fn other_bytes(name: &str) -> Error {
    let text = format!("{name} exists, and has other bytes than its name says");
    Error::new(Kind::Io, text).with_remedy("remove it there, then run restic check --read-data")
}

fn unconditional() -> Error {
    let text = "the service ignores conditions of writes (If-None-Match): two first runs would replace each other's files";
    let remedy = "make the repository with its own program: restic init";
    Error::new(Kind::Unsupported, text).with_remedy(remedy)
}
