//! A page blob: its properties, pages and extents.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Error, Extents, Kind, Result};
use bytes::Bytes;
use futures_util::StreamExt as _;
use http::Method;
use object_store::client::HttpResponse;
use tokio::time::timeout_at;

use super::lease::{BlobLease, in_use};
use super::page_ranges::PageRanges;
use super::requests::{BlobCall, BlobRequests, CallFailure};
use crate::device::RemoteObject;
use crate::failure::{Failure, Repetitions};
use crate::http_object::due;
use crate::store_failure::is_bucket_missing;
use crate::store_object::{StoreObject, StoreResource};

/// Bytes of a page.
pub(super) const PAGE: u32 = 512;
/// Bytes of a request with contents (Put Page).
pub(super) const WRITE_MAX: u32 = 4 << 20;
/// Bytes of a blob whose pages are asked for at a time, and bytes of the response.
const EXTENTS_MAX: u64 = 4 << 30;
const LIST_MAX: usize = 16 << 20;
/// Ranges in a response.
const RANGES_MAX: u32 = 10_000;

/// What the service says about a blob.
pub(super) struct BlobProperties {
    pub(super) size: u64,
    /// `PageBlob`, `BlockBlob` or `AppendBlob`.
    kind: String,
    /// Whether another program has a lease without an end: a virtual machine, of its disk.
    has_endless_lease: bool,
    /// Its version, which each write changes, and a lease does not.
    pub(super) etag: Option<String>,
}

impl BlobProperties {
    /// Checks that the blob can be opened, `to_write` if so.
    ///
    /// # Errors
    /// It is no page blob, or in use.
    pub(super) fn check(&self, to_write: bool) -> Result<()> {
        if self.kind != "PageBlob" {
            let kind = blockhaul_wire::printable(self.kind.as_bytes(), 40);
            let text = format!("the blob exists, and is a {kind}, not a PageBlob");
            let remedy =
                "leave out blob-type=PageBlob to read it; else remove it or choose another name";
            return Err(Error::new(Kind::Unsupported, text).with_remedy(remedy));
        }
        if to_write && self.has_endless_lease {
            return Err(in_use());
        }
        Ok(())
    }
}

/// An open page blob. Its methods run on the thread of requests.
pub(super) struct PageBlob {
    pub(super) requests: Arc<BlobRequests>,
    pub(super) object: StoreObject,
    pub(super) size: u64,
    /// None: it is read-only.
    pub(super) lease: Option<Arc<BlobLease>>,
    limit: Duration,
}

impl PageBlob {
    /// A blob of `size` bytes, with the lease of one that is written.
    pub(super) fn new(
        resource: &StoreResource,
        requests: Arc<BlobRequests>,
        object: StoreObject,
        size: u64,
        lease: Option<Arc<BlobLease>>,
    ) -> PageBlob {
        PageBlob { requests, object, size, lease, limit: resource.limit }
    }

    /// Fills `buf` with the bytes at `at`.
    ///
    /// # Errors
    /// The service refuses or fails.
    pub(super) async fn read(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        self.object.read(at, buf).await
    }

    /// Writes bytes, at most [`WRITE_MAX`]. They are durable then.
    ///
    /// # Errors
    /// The service refuses or fails.
    pub(super) async fn write(&self, at: u64, bytes: Bytes) -> Result<()> {
        self.change(at, bytes.len() as u64, "update", bytes).await
    }

    /// Writes zeroes that stay allocated.
    ///
    /// # Errors
    /// The service refuses or fails.
    pub(super) async fn write_zeroes(&self, at: u64, len: u64) -> Result<()> {
        let most = len.min(u64::from(WRITE_MAX));
        let zeroes = Bytes::from(vec![0; usize::try_from(most).unwrap_or_default()]);
        let mut done = 0;
        while done < len {
            let part = most.min(len - done);
            let part_len = usize::try_from(part).unwrap_or_default();
            self.write(at + done, zeroes.slice(..part_len)).await?;
            done += part;
        }
        Ok(())
    }

    /// Removes the contents of pages, which read as zeroes then.
    ///
    /// # Errors
    /// The service refuses or fails.
    pub(super) async fn clear(&self, at: u64, len: u64) -> Result<()> {
        self.change(at, len, "clear", Bytes::new()).await
    }

    async fn change(&self, at: u64, len: u64, how: &str, body: Bytes) -> Result<()> {
        let Some(lease) = &self.lease else {
            return Err(Error::new(Kind::ReadOnly, "the device is read-only"));
        };
        let mut repetitions = Repetitions::new();
        loop {
            let id = lease.id()?;
            let fields = vec![
                ("page-write", how.to_owned()),
                ("range", range(at, len)),
                ("lease-id", id.clone()),
            ];
            let body = body.clone();
            let (method, component) = (Method::PUT, "page");
            let call = BlobCall { method, component, fields, body, ..BlobCall::default() };
            let Err(failed) = self.requests.send(call).await else { return Ok(()) };
            let is_of_lease = failed.is_of_lease();
            let CallFailure { failure, is_open, .. } = failed;
            if is_of_lease {
                lease.check(&id).await?;
                repetitions.wait(Failure::passing(failure.error), 0).await?;
                continue;
            }
            if is_open {
                lease.change(&id).await?;
            }
            repetitions.wait(failure, 0).await?;
        }
    }

    /// The extents from `at` on, `len` bytes or fewer.
    ///
    /// # Errors
    /// The service refuses or fails, or its response is no list.
    pub(super) async fn extents(&self, at: u64, len: u64) -> Result<Extents> {
        let len = len.min(EXTENTS_MAX);
        let mut repetitions = Repetitions::new();
        loop {
            let call = BlobCall {
                component: "pagelist",
                query: vec![("maxresults", RANGES_MAX.to_string())],
                fields: vec![("range", range(at, len))],
                ..BlobCall::default()
            };
            let received = match self.requests.send(call).await {
                Ok(response) => self.text(response).await,
                Err(failed) => Err(failed.failure),
            };
            match received {
                Ok(text) => return Ok(PageRanges::parse(&text)?.extents(at, len)),
                Err(failure) => repetitions.wait(failure, 0).await?,
            }
        }
    }

    /// The text of a response.
    async fn text(&self, response: HttpResponse) -> Result<String, Failure> {
        let due = due(self.limit);
        let mut body = response.into_body().bytes_stream();
        let mut bytes = Vec::new();
        loop {
            let next = match due {
                None => body.next().await,
                Some(due) => {
                    let late = |_| Failure::late("sent the list of pages", self.limit);
                    timeout_at(due, body.next()).await.map_err(late)?
                }
            };
            let Some(more) = next else { break };
            let more = more.map_err(|error| {
                let text = format!(
                    "the list of pages is cut off: {}",
                    crate::failure::first_cause(&error)
                );
                Failure::passing(Error::new(Kind::Disconnected, text))
            })?;
            bytes.extend_from_slice(&more);
            if bytes.len() > LIST_MAX {
                let text = format!("the list of pages has more than {LIST_MAX} bytes");
                let error = Error::new(Kind::Unsupported, text);
                return Err(Failure::last(error.with_remedy("check the endpoint: endpoint=URL")));
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// The value of the field for a range.
fn range(at: u64, len: u64) -> String {
    format!("bytes={at}-{}", at + len - 1)
}

/// The properties of a blob; none if it does not exist.
///
/// # Errors
/// The service refuses or fails, or has no such container.
pub(super) async fn properties(requests: &BlobRequests) -> Result<Option<BlobProperties>> {
    let mut repetitions = Repetitions::opening();
    let response = loop {
        let call = BlobCall { method: Method::HEAD, ..BlobCall::default() };
        let failed = match requests.send(call).await {
            Ok(response) => break response,
            Err(failed) => failed,
        };
        let error = &failed.failure.error;
        if error.kind() == Kind::NotFound && !is_bucket_missing(error) {
            return Ok(None);
        }
        repetitions.wait(failed.failure, 0).await?;
    };
    let field = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    let size = field("content-length").and_then(|size| size.parse().ok());
    let size = size.filter(|size| i64::try_from(*size).is_ok()).ok_or_else(|| {
        let error = Error::new(Kind::Invalid, "the service does not tell the size of the blob");
        error.with_remedy("check the endpoint: endpoint=URL")
    })?;
    Ok(Some(BlobProperties {
        size,
        kind: field("x-ms-blob-type").unwrap_or("blob of unknown type").to_owned(),
        has_endless_lease: field("x-ms-lease-duration") == Some("infinite"),
        etag: field("etag").map(str::to_owned),
    }))
}

/// Makes an empty blob of `size` bytes, unless there is one with its name. Returns its version.
///
/// # Errors
/// There is one, or the service refuses or fails.
pub(super) async fn create(requests: &BlobRequests, size: u64) -> Result<Option<String>> {
    let mut repetitions = Repetitions::opening();
    loop {
        let call = BlobCall {
            method: Method::PUT,
            fields: vec![
                ("blob-type", "PageBlob".to_owned()),
                ("blob-content-length", size.to_string()),
            ],
            is_new: true,
            ..BlobCall::default()
        };
        let failed = match requests.send(call).await {
            Ok(response) => {
                let etag = response.headers().get("etag").and_then(|value| value.to_str().ok());
                return Ok(etag.map(str::to_owned));
            }
            Err(failed) => failed,
        };
        if failed.is("BlobAlreadyExists") {
            let error = Error::new(Kind::InUse, "a blob with this name was made meanwhile");
            return Err(error.with_remedy("copy again, or choose another name"));
        }
        repetitions.wait(failed.failure, 0).await?;
    }
}
