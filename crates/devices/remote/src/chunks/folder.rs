//! The places of objects of a disk in chunks: a part of an object store.

use async_trait::async_trait;
use blockhaul_block::{Error, Kind, Result};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStoreExt as _, PutMode, PutOptions, UpdateVersion};
use tokio::sync::Semaphore;

use crate::device::RemoteObject as _;
use crate::store_failure::{StoreKind, failure, is_bucket_missing, is_conflict};
use crate::store_object::{StoreObject, StoreResource};

/// An object, and the version that it has at its service.
pub(crate) struct FoundObject {
    pub(crate) bytes: Bytes,
    pub(crate) version: UpdateVersion,
}

/// A place with objects. Its methods run on the thread of requests.
#[async_trait]
pub(crate) trait ObjectFolder: Send + Sync + 'static {
    /// The object with this name, if there is one.
    ///
    /// # Errors
    /// The object has more than `most` bytes, or cannot be read.
    async fn get(&self, name: &str, most: u64) -> Result<Option<FoundObject>>;

    /// Fills `buf` with the bytes at offset `at` of an object of `whole` bytes that never changes. False: there is no such
    /// object.
    ///
    /// # Errors
    /// The object has another size, or cannot be read.
    async fn read(&self, name: &str, whole: u64, at: u64, buf: &mut [u8]) -> Result<bool>;

    /// Writes an object that nobody else writes. It is durable then.
    ///
    /// # Errors
    /// The object cannot be written; part of it may be there.
    async fn put(&self, name: &str, bytes: Bytes) -> Result<()>;

    /// Replaces the object if it has this version, or creates it if there is none. None: it has another one.
    ///
    /// # Errors
    /// The object cannot be written; it may be there nevertheless.
    async fn replace(
        &self,
        name: &str,
        bytes: Bytes,
        expected: Option<&UpdateVersion>,
    ) -> Result<Option<UpdateVersion>>;

    /// Removes an object, which need not exist.
    ///
    /// # Errors
    /// The object remains.
    async fn remove(&self, name: &str) -> Result<()>;

    /// The names of all objects, in any order.
    fn names(&self) -> BoxStream<'static, Result<String>>;

    /// Keeps other writers on this machine away until the folder is dropped. False: only the lease does.
    ///
    /// # Errors
    /// [`Kind::InUse`]
    async fn lock(&self) -> Result<bool>;

    /// Whether the lock still keeps others away. False: only the lease does.
    ///
    /// # Errors
    /// [`Kind::InUse`]: the lock was removed, and another writer may have one.
    async fn holds_lock(&self) -> Result<bool> {
        Ok(false)
    }
}

/// The objects of a store whose names begin with a prefix.
pub(crate) struct StoreFolder {
    pub(crate) resource: StoreResource,
    /// One for each request that may be under way.
    pub(crate) turns: Semaphore,
}

impl StoreFolder {
    /// The objects below the name of `resource`, with at most `connections` requests under way.
    pub(crate) fn new(resource: StoreResource, connections: usize) -> StoreFolder {
        StoreFolder { resource, turns: Semaphore::new(connections) }
    }

    /// The name of an object in the store.
    pub(crate) fn at(&self, name: &str) -> Path {
        Path::from_iter(self.resource.key.parts().chain(Path::from(name).parts()))
    }

    /// The names of the objects and folders in a folder, without it.
    ///
    /// # Errors
    /// The service fails.
    pub(crate) async fn names_in(&self, folder: &str) -> Result<Vec<String>> {
        let _turn = self.turns.acquire().await;
        let prefix = self.at(folder);
        let listed = self.resource.store.list_with_delimiter(Some(&prefix)).await;
        let listed = listed.map_err(|error| unlisted(self.resource.kind, &error))?;
        let objects = listed.objects.iter().map(|object| &object.location);
        let all = objects.chain(&listed.common_prefixes);
        Ok(all.filter_map(|name| name.filename().map(str::to_owned)).collect())
    }

    /// The names of the objects below a folder, without it.
    pub(crate) fn names_below(&self, folder: &Path) -> BoxStream<'static, Result<String>> {
        let prefix = Path::from_iter(self.resource.key.parts().chain(folder.parts()));
        let kind = self.resource.kind;
        let found = self.resource.store.list(Some(&prefix));
        let inside = move |found: object_store::Result<object_store::ObjectMeta>| {
            let location = found.map_err(|error| unlisted(kind, &error))?.location;
            let parts = location.prefix_match(&prefix).into_iter().flatten();
            Ok(Path::from_iter(parts).to_string())
        };
        found.map(inside).boxed()
    }

    /// Fills `buf` with the bytes at offset `at` of an object that never changes. False: there is no such object.
    ///
    /// # Errors
    /// The object is shorter, or cannot be read.
    pub(crate) async fn range(&self, name: &str, at: u64, buf: &mut [u8]) -> Result<bool> {
        let _turn = self.turns.acquire().await;
        let resource = StoreResource { key: self.at(name), ..self.resource.clone() };
        match StoreObject::of_any_size(resource).read(at, buf).await {
            Err(error) if is_absent(&error) => Ok(false),
            read => read.map(|()| true),
        }
    }

    pub(crate) fn failed(&self, error: &object_store::Error) -> Error {
        failure(self.resource.kind, error).error
    }
}

#[async_trait]
impl ObjectFolder for StoreFolder {
    async fn get(&self, name: &str, most: u64) -> Result<Option<FoundObject>> {
        // Nobody closes it.
        let _turn = self.turns.acquire().await;
        let found = self.resource.store.get_opts(&self.at(name), GetOptions::default()).await;
        let found = match found.map_err(|error| self.failed(&error)) {
            Err(error) if is_absent(&error) => return Ok(None),
            found => found?,
        };
        if found.meta.size > most {
            return Err(other_size(name, found.meta.size));
        }
        let meta = &found.meta;
        let version = UpdateVersion { e_tag: meta.e_tag.clone(), version: meta.version.clone() };
        let bytes = found.bytes().await.map_err(|error| self.failed(&error))?;
        Ok(Some(FoundObject { bytes, version }))
    }

    async fn read(&self, name: &str, whole: u64, at: u64, buf: &mut [u8]) -> Result<bool> {
        let _turn = self.turns.acquire().await;
        let resource = StoreResource { key: self.at(name), ..self.resource.clone() };
        match StoreObject::constant(resource, whole).read(at, buf).await {
            Err(error) if is_absent(&error) => Ok(false),
            read => read.map(|()| true),
        }
    }

    async fn put(&self, name: &str, bytes: Bytes) -> Result<()> {
        let _turn = self.turns.acquire().await;
        let put = self.resource.store.put(&self.at(name), bytes.into()).await;
        put.map(drop).map_err(|error| self.failed(&error))
    }

    async fn replace(
        &self,
        name: &str,
        bytes: Bytes,
        expected: Option<&UpdateVersion>,
    ) -> Result<Option<UpdateVersion>> {
        let mode = expected.cloned().map_or(PutMode::Create, PutMode::Update);
        let options = PutOptions { mode, ..PutOptions::default() };
        match self.resource.store.put_opts(&self.at(name), bytes.into(), options).await {
            Ok(put) => Ok(Some(UpdateVersion { e_tag: put.e_tag, version: put.version })),
            Err(error) if is_conflict(&error) => Ok(None),
            Err(error) => Err(self.failed(&error)),
        }
    }

    async fn remove(&self, name: &str) -> Result<()> {
        let _turn = self.turns.acquire().await;
        let removed = self.resource.store.delete(&self.at(name)).await;
        match removed.map_err(|error| self.failed(&error)) {
            Err(error) if is_absent(&error) => Ok(()),
            removed => removed,
        }
    }

    fn names(&self) -> BoxStream<'static, Result<String>> {
        self.names_below(&Path::default())
    }

    async fn lock(&self) -> Result<bool> {
        Ok(false)
    }
}

/// The error of a list. [`Kind::Invalid`]: others have put an object there whose name is none of ours.
fn unlisted(kind: StoreKind, error: &object_store::Error) -> Error {
    let is_name = matches!(error, object_store::Error::InvalidPath { .. });
    let error = failure(kind, error).error;
    if !is_name {
        return error;
    }
    Error::new(Kind::Invalid, "an object has a name that cannot be used")
        .because(error)
        .with_remedy("remove that object")
}

/// Whether an error says that an object does not exist in its bucket.
pub(crate) fn is_absent(error: &Error) -> bool {
    error.kind() == Kind::NotFound && !is_bucket_missing(error)
}

/// The error of an object with another size than that of all of its kind.
pub(crate) fn other_size(name: &str, size: u64) -> Error {
    let text = format!("{name} has {size} bytes: it is damaged, or belongs to others");
    Error::new(Kind::Io, text).with_remedy("restore it from a backup, or write that part again")
}
