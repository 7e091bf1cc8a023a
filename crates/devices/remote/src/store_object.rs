//! An object in an object store, read by ranges.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use blockhaul_block::{Error, FileId, Kind, Result};
use futures_util::StreamExt as _;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt as _};
use tokio::time::timeout_at;

use crate::device::RemoteObject;
use crate::failure::{Failure, Repetitions};
use crate::http_object::{PIECE, due};
use crate::identity::identity_of;
use crate::page_blob::requests::AzureAccount;
use crate::store_failure::{StoreKind, failure};
use crate::store_service::ObjectFields;

/// A store of objects that are uploaded in parts.
pub(crate) trait WritableStore: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> WritableStore for T {}

/// A store, and an object in it.
#[derive(Clone)]
pub(crate) struct StoreResource {
    pub(crate) store: Arc<dyn WritableStore>,
    pub(crate) kind: StoreKind,
    pub(crate) key: Path,
    /// URL of the service, with the bucket.
    pub(crate) bucket: Arc<str>,
    /// Time for each [`PIECE`] of a response; zero: none.
    pub(crate) limit: Duration,
    /// The account of an object of Azure.
    pub(crate) account: Option<AzureAccount>,
}

impl StoreResource {
    /// The number of the object with this name below the address of the resource, whatever description was typed.
    pub(crate) fn identity(&self, below: &str) -> FileId {
        let address = format!("{}/{}{below}", self.bucket, self.key);
        identity_of(&address)
    }
}

/// The size of an object that never changes and is not known.
const ANY_SIZE: u64 = u64::MAX;

/// An object that is read by ranges.
pub(crate) struct StoreObject {
    resource: StoreResource,
    /// Bytes; [`ANY_SIZE`]: unknown.
    size: u64,
    /// None: an object with this name never changes.
    version: Option<ObjectMeta>,
    fields: ObjectFields,
}

/// Finds out the size of an object.
///
/// # Errors
/// The service refuses or fails.
pub(crate) async fn open(resource: StoreResource) -> Result<StoreObject> {
    let StoreResource { store, kind, key, .. } = &resource;
    // The response to a HEAD request does not say what is wrong.
    let first = GetOptions { range: Some(GetRange::Bounded(0..1)), ..GetOptions::default() };
    let mut fields = ObjectFields::default();
    let version = match store.get_opts(key, first).await {
        Ok(found) => {
            fields = object_fields(&resource, found.extensions).await;
            found.meta
        }
        // An empty object has no range.
        Err(error) => match store.head(key).await {
            Ok(version) if version.size == 0 => version,
            _ => return Err(failure(*kind, &error).error),
        },
    };
    if i64::try_from(version.size).is_err() {
        let text = format!("the service names a size of {} bytes", version.size);
        return Err(Error::new(Kind::Invalid, text).with_remedy("check the service"));
    }
    Ok(StoreObject { resource, size: version.size, version: Some(version), fields })
}

/// What the service says about an object with this response. Azure says more in one without contents.
async fn object_fields(resource: &StoreResource, found: http::Extensions) -> ObjectFields {
    let of = |found: http::Extensions| found.get().cloned().unwrap_or_default();
    let fields: ObjectFields = of(found);
    if resource.kind != StoreKind::Azure {
        return fields;
    }
    let head = GetOptions { head: true, ..GetOptions::default() };
    // Who may read the contents may be refused the rest.
    let head = resource.store.get_opts(&resource.key, head).await;
    fields.with(head.map(|head| of(head.extensions)).unwrap_or_default())
}

impl StoreObject {
    /// An object of this size that never changes. It need not exist.
    pub(crate) fn constant(resource: StoreResource, size: u64) -> StoreObject {
        StoreObject { resource, size, version: None, fields: ObjectFields::default() }
    }

    /// An object of unknown size that never changes. It need not exist.
    pub(crate) fn of_any_size(resource: StoreResource) -> StoreObject {
        StoreObject::constant(resource, ANY_SIZE)
    }

    /// Requests the rest of `buf`.
    async fn part(&self, at: u64, buf: &mut [u8], filled: &mut usize) -> Result<(), Failure> {
        let StoreResource { store, kind, key, limit, .. } = &self.resource;
        let failed = |error: object_store::Error| failure(*kind, &error);
        let begin = at + *filled as u64;
        let mut options = GetOptions {
            range: Some(GetRange::Bounded(begin..at + buf.len() as u64)),
            ..GetOptions::default()
        };
        if let Some(version) = &self.version {
            match &version.e_tag {
                Some(etag) => options.if_match = Some(etag.clone()),
                None => options.if_unmodified_since = Some(version.last_modified),
            }
        }
        let found = store.get_opts(key, options).await.map_err(failed)?;
        let end = at + buf.len() as u64;
        if self.size == ANY_SIZE && found.meta.size < end {
            let text = format!("the object ends at {}, before byte {end}", found.meta.size);
            return Err(Failure::last(Error::new(Kind::Invalid, text)));
        }
        if self.version.is_none() && self.size != ANY_SIZE && found.meta.size != self.size {
            let text = format!("the object has {} bytes instead of {}", found.meta.size, self.size);
            let remedy = "restore it, or write that part of the disk again";
            return Err(Failure::last(Error::new(Kind::Io, text).with_remedy(remedy)));
        }
        let is_other = |version: &ObjectMeta| found.meta.e_tag != version.e_tag;
        let is_resized = self.version.is_some() && found.meta.size != self.size;
        if self.version.as_ref().is_some_and(is_other) || is_resized {
            return Err(Failure::last(crate::response::changed()));
        }
        let mut body = found.into_stream();
        let (mut piece, mut until) = (0, due(*limit));
        while *filled < buf.len() {
            let next = match until {
                None => body.next().await,
                Some(until) => {
                    let late = |_| Failure::late(&format!("sent {} KiB", PIECE >> 10), *limit);
                    timeout_at(until, body.next()).await.map_err(late)?
                }
            };
            let Some(more) = next else {
                return Err(Failure::passing(Error::new(
                    Kind::Disconnected,
                    "the service sent less than it was asked for",
                )));
            };
            let more = more.map_err(failed)?;
            let count = more.len().min(buf.len() - *filled);
            buf[*filled..*filled + count].copy_from_slice(&more[..count]);
            *filled += count;
            piece += count;
            if piece >= PIECE {
                (piece, until) = (0, due(*limit));
            }
        }
        Ok(())
    }
}

#[async_trait]
impl RemoteObject for StoreObject {
    fn size(&self) -> u64 {
        self.size
    }

    fn version(&self) -> Option<String> {
        let version = self.version.as_ref()?;
        Some(version.e_tag.clone().unwrap_or_else(|| version.last_modified.to_string()))
    }

    fn description(&self) -> String {
        let version = self.version.as_ref().map(description);
        version.map(|version| format!("{version}{}", self.fields)).unwrap_or_default()
    }

    async fn read(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        let mut repetitions = Repetitions::new();
        while filled < buf.len() {
            let before = filled;
            if let Err(failure) = self.part(at, buf, &mut filled).await {
                repetitions.wait(failure, filled - before).await?;
            }
        }
        Ok(())
    }
}

/// The time of a version of an object and its ETag, which has the number of parts where the object was sent in several.
fn description(version: &ObjectMeta) -> String {
    let changed = shown_time(version);
    let Some(etag) = &version.e_tag else { return format!("object of {changed}") };
    let etag = shown_etag(etag);
    let parts = etag.rsplit_once('-').and_then(|(_, parts)| parts.parse::<u32>().ok());
    let parts = parts.map(|parts| format!(", {parts} parts")).unwrap_or_default();
    format!("object of {changed}, ETag {etag}{parts}")
}

/// The time of the last change of an object.
pub(crate) fn shown_time(version: &ObjectMeta) -> String {
    version.last_modified.format("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// An ETag for users.
pub(crate) fn shown_etag(etag: &str) -> String {
    blockhaul_wire::printable(etag.trim_matches('"').as_bytes(), 80)
}
