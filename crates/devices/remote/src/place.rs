//! Parts of object stores that are read as folders of files which never change: repositories of other programs.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::ParamValues;
use futures_util::StreamExt as _;
use object_store::path::Path;

use crate::chunks::folder::{ObjectFolder as _, StoreFolder};
use crate::store_backend::{StoreDescription, params};
use crate::store_failure::StoreKind;
use crate::{RemoteOptions, runtime};

/// The objects of a store whose names begin with a prefix. Its methods block: call them on threads that may wait.
pub struct ObjectPlace {
    folder: Arc<StoreFolder>,
    connections: usize,
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
            return Err(Error::new(Kind::Usage, text).with_remedy("choose s3://, gs:// or az://"));
        };
        let args = ParamValues::check(scheme, params(kind), options)?;
        let rest = &location[scheme.len() + 1..];
        let typed = StoreDescription::list(kind, scheme, rest, &args)?;
        let connections = typed.connections;
        let resource = typed.prepare(kind, limits)?;
        let folder = Arc::new(StoreFolder::new(resource, connections));
        Ok(ObjectPlace { folder, connections })
    }

    /// Requests that are under way at most.
    pub fn connections(&self) -> usize {
        self.connections
    }

    /// The names of the objects in a folder, without it, in any order.
    ///
    /// # Errors
    /// The service fails.
    pub fn names(&self, folder: &str) -> Result<Vec<String>> {
        let (objects, folder) = (self.folder.clone(), Path::from(folder));
        runtime::wait(async move {
            let mut found = objects.names_below(&folder);
            let mut names = Vec::new();
            while let Some(name) = found.next().await {
                names.push(name?);
            }
            Ok(names)
        })
    }

    /// A whole object of at most `most` bytes, if there is one with this name.
    ///
    /// # Errors
    /// The object has more bytes, or the service fails.
    pub fn whole(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let (objects, name) = (self.folder.clone(), name.to_owned());
        let found = runtime::wait(async move { objects.get(&name, most).await })?;
        Ok(found.map(|found| found.bytes.to_vec()))
    }

    /// `len` bytes of an object at offset `at`, if there is one with this name.
    ///
    /// # Errors
    /// The object is shorter, or the service fails.
    pub fn range(&self, name: &str, at: u64, len: usize) -> Result<Option<Vec<u8>>> {
        let (objects, name) = (self.folder.clone(), name.to_owned());
        runtime::wait(async move {
            let mut bytes = vec![0; len];
            let is_there = objects.range(&name, at, &mut bytes).await?;
            Ok(is_there.then_some(bytes))
        })
    }
}
