//! The objects of a bucket.

use std::sync::Arc;

use blockhaul_block::Result;
use blockhaul_catalog::{ObjectEntry, ObjectList, OpenFuture};
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use object_store::ObjectMeta;
use tokio::sync::Mutex;

use crate::runtime;
use crate::store_failure::failure;
use crate::store_object::{StoreResource, shown_etag, shown_time};

/// Objects of a page: those of one response of a service.
const PAGE: usize = 1000;

/// The objects below a name, or all of a bucket.
pub(crate) struct StoreList(Arc<Mutex<BoxStream<'static, Result<ObjectEntry>>>>);

impl StoreList {
    /// The objects below the name of `resource`.
    pub(crate) fn new(resource: &StoreResource) -> StoreList {
        let (kind, prefix) = (resource.kind, resource.key.clone());
        let prefix = Some(&prefix).filter(|prefix| !prefix.as_ref().is_empty());
        let found = resource.store.list(prefix);
        let entry = move |found: object_store::Result<ObjectMeta>| {
            found.map(entry).map_err(|error| failure(kind, &error).error)
        };
        StoreList(Arc::new(Mutex::new(found.map(entry).fuse().boxed())))
    }
}

impl ObjectList for StoreList {
    fn page(&mut self) -> OpenFuture<Vec<ObjectEntry>> {
        let found = self.0.clone();
        Box::pin(runtime::run(async move {
            let mut found = found.lock().await;
            // The entries of a response are there at once.
            let page = (&mut *found).ready_chunks(PAGE).next().await;
            page.unwrap_or_default().into_iter().collect()
        }))
    }
}

fn entry(found: ObjectMeta) -> ObjectEntry {
    ObjectEntry {
        name: found.location.to_string(),
        size: found.size,
        changed: Some(shown_time(&found)),
        etag: found.e_tag.as_deref().map(shown_etag),
    }
}
