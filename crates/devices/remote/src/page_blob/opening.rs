//! Page blobs that are opened, and new ones.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{BackendTarget, OpenedDevice, Preparation};

use super::blob::{PAGE, PageBlob, create, properties};
use super::device::PageBlobDevice;
use super::lease::BlobLease;
use super::requests::BlobRequests;
use crate::identity::storage_ids;
use crate::runtime;
use crate::store_object::{StoreObject, StoreResource, open as open_object};

/// Opens a page blob; one that does not exist is made by the preparation, if the purpose says its size.
///
/// # Errors
/// The service refuses or fails; the blob has another type, or is in use.
pub(crate) async fn open(
    target: &BackendTarget,
    name: &Arc<str>,
    resource: StoreResource,
    connections: usize,
) -> Result<(OpenedDevice, Preparation)> {
    let opened = open_blob(target, name, resource, connections).await;
    opened.map_err(|error| error.on(name))
}

async fn open_blob(
    target: &BackendTarget,
    name: &Arc<str>,
    resource: StoreResource,
    connections: usize,
) -> Result<(OpenedDevice, Preparation)> {
    let intent = target.intent;
    let requests = BlobRequests::new(&resource).map(Arc::new).ok_or_else(|| {
        let error = Error::new(Kind::Usage, "the endpoint has no URL of a blob");
        error.with_remedy("write endpoint=https://HOST")
    })?;
    let identity = resource.identity("");
    let claim = (identity, target.claim(storage_ids(identity), name, false)?);
    let (asked, to_write) = (requests.clone(), intent.write);
    let found = runtime::run(async move {
        let found = properties(&asked).await?;
        found.as_ref().map_or(Ok(()), |found| found.check(to_write))?;
        Ok(found.map(|found| found.size))
    });
    let found = found.await?;
    let lease = intent.write.then(|| BlobLease::new(requests.clone()));
    let is_new = found.is_none();
    let size = match (found, &lease) {
        (Some(size), _) => size,
        (None, Some(_)) => {
            let size = intent.target_size.filter(|_| !intent.grows).ok_or_else(no_blob)?;
            check_size(size)?;
            size
        }
        (None, None) => return Err(no_blob()),
    };
    let object = match &lease {
        // Its version changes with each write.
        Some(_) => StoreObject::constant(resource.clone(), size),
        None => runtime::run(open_object(resource.clone())).await?,
    };
    let blob = PageBlob::new(&resource, requests.clone(), object, size, lease.clone());
    let device = PageBlobDevice::new(name, blob, claim, connections, is_new);
    let opened = OpenedDevice { device: Arc::new(device.clone()), more: Some(Arc::new(device)) };
    let Some(lease) = lease else { return Ok((opened, Preparation::default())) };
    if !is_new {
        runtime::run(async move { lease.acquire().await }).await?;
        return Ok((opened, Preparation::default()));
    }
    let name = name.clone();
    let preparation = Preparation::new(move || {
        Box::pin(async move {
            let begin = async move {
                let made = create(&requests, size).await?;
                lease.acquire().await?;
                // Before the lease, another program may have written to the new blob.
                let found = properties(&requests).await?.and_then(|found| found.etag);
                if made.is_some() && found == made {
                    return Ok(());
                }
                lease.release().await;
                let text = "another program has written to the new blob";
                Err(Error::new(Kind::InUse, text).with_remedy("copy again, or choose another name"))
            };
            runtime::run(begin).await.map_err(|error| error.on(&name))
        })
    });
    Ok((opened, preparation))
}

/// Checks the size of a new blob.
fn check_size(size: u64) -> Result<()> {
    if size == 0 || !size.is_multiple_of(u64::from(PAGE)) {
        let text = format!("a page blob has a multiple of {PAGE} bytes, not {size}");
        let remedy = "add the rest to the source: --source-layer truncate?round-up=512";
        return Err(Error::new(Kind::Unsupported, text).with_remedy(remedy));
    }
    Ok(())
}

fn no_blob() -> Error {
    let error = Error::new(Kind::NotFound, "there is no such blob");
    error.with_remedy("check its name, or make it by a copy of a disk whose size is known")
}
