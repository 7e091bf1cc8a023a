//! A file on a WebDAV server that is written once: one request sends it while it is written, to a temporary name.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use blockhaul_block::{Error, Kind, PendingRequest, Reply, Result};
use futures_util::stream;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HeaderValue};
use reqwest::{Body, Method, Request, Response, Url};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::dav_target::{DavTarget, unchanged, write_refusal};
use crate::device::RemoteObject;
use crate::failure::Failure;
use crate::http_object::{REDIRECTS_MAX, lost, next_place, open};
use crate::put_body::PutBody;
use crate::runtime;
use crate::upload_device::ObjectUpload;

/// Time for the server to refuse or redirect the request before the first byte of the file is sent; curl's.
const EXPECT_TIME: Duration = Duration::from_secs(1);
/// Interval of checks for a connection that does not move.
const LOOK: Duration = Duration::from_millis(200);
/// Time for a connection that is ended to end.
const END_TIME: Duration = Duration::from_secs(1);

/// A file that is sent.
pub(crate) struct DavUpload {
    target: DavTarget,
    /// Bytes of the file, and whether it may be shorter.
    size: u64,
    grows: bool,
    body: PutBody,
    stage: watch::Sender<PutStage>,
    /// The number of the request that may send the file: each redirect begins another one.
    attempt: AtomicU64,
    is_complete: AtomicBool,
    /// A part of the file was sent, or the server has confirmed it.
    may_exist: AtomicBool,
    state: Mutex<DavUploadState>,
}

#[derive(Default)]
struct DavUploadState {
    task: Option<AbortHandle>,
    /// The file, if it exists and may be read.
    object: Option<Arc<dyn RemoteObject>>,
}

/// How far the request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PutStage {
    /// It was not sent.
    Idle,
    /// The server may refuse it before the file is sent.
    Asking,
    Sending,
    /// The server has confirmed it.
    Stored,
    Failed,
}

impl DavUpload {
    /// A file of `size` bytes; or, if it `grows`, of at most so many.
    pub(crate) fn new(target: DavTarget, size: u64, grows: bool) -> DavUpload {
        DavUpload {
            target,
            size,
            grows,
            body: PutBody::new((!grows).then_some(size)),
            stage: watch::Sender::new(PutStage::Idle),
            attempt: AtomicU64::new(0),
            is_complete: AtomicBool::new(false),
            may_exist: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, DavUploadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the request, and waits until the server accepts it.
    ///
    /// # Errors
    /// The server refuses it.
    pub(crate) async fn begin(self: Arc<DavUpload>) -> Result<()> {
        if self.size == 0 {
            // A copy of nothing sends no request.
            return self.complete().await;
        }
        self.start();
        self.until(|stage| stage != PutStage::Asking).await
    }

    fn start(self: &Arc<DavUpload>) {
        self.stage.send_replace(PutStage::Asking);
        let upload = self.clone();
        let task = tokio::spawn(async move {
            let stage = match upload.deliver().await {
                Ok(()) => {
                    upload.may_exist.store(true, Ordering::Relaxed);
                    PutStage::Stored
                }
                Err(error) => {
                    upload.body.fail(error);
                    PutStage::Failed
                }
            };
            upload.stage.send_replace(stage);
        });
        self.lock().task = Some(task.abort_handle());
    }

    /// Waits for a stage.
    ///
    /// # Errors
    /// The request has failed.
    async fn until(&self, reached: impl Fn(PutStage) -> bool) -> Result<()> {
        let mut stages = self.stage.subscribe();
        let is_end = |stage: &PutStage| *stage == PutStage::Failed || reached(*stage);
        // The sender is part of the upload.
        let _ = stages.wait_for(is_end).await;
        self.body.failed().map_or(Ok(()), Err)
    }

    fn is_asking(&self) -> bool {
        *self.stage.borrow() == PutStage::Asking
    }

    /// Sends the file, where redirects lead.
    async fn deliver(self: &Arc<DavUpload>) -> Result<()> {
        let mut url = self.target.temporary.clone();
        let mut expects = true;
        for _ in 0..=REDIRECTS_MAX {
            let response = match self.answer(self.request(&url, expects, true)).await {
                Ok(response) => response,
                Err(failure) => return Err(self.explained(&url, failure).await),
            };
            match response.status().as_u16() {
                301 | 302 | 303 | 307 | 308 if self.is_asking() => {
                    url = next_place(&url, &response).map_err(|failure| failure.error)?;
                }
                207 => return Err(write_refusal(&self.target.resource, response).await.error),
                417 if expects && self.is_asking() => expects = false,
                200..=299 if self.body.is_sent() => return Ok(()),
                200..=399 => {
                    let status = response.status();
                    let text = format!("the server answers \"{status}\" before it has the file");
                    let remedy = "check the server, and proxies in front of it";
                    return Err(Error::new(Kind::Io, text).with_remedy(remedy));
                }
                _ => return Err(write_refusal(&self.target.resource, response).await.error),
            }
        }
        let text = format!("the server redirects more than {REDIRECTS_MAX} times");
        Err(Error::new(Kind::Unsupported, text).with_remedy("check the URL with curl -L"))
    }

    /// The request for the file. `sends`: its body follows unless the server refuses it within [`EXPECT_TIME`].
    fn request(self: &Arc<DavUpload>, url: &Url, expects: bool, sends: bool) -> Request {
        let number = self.attempt.fetch_add(1, Ordering::Relaxed) + 1;
        let upload = self.clone();
        let body = stream::unfold(true, move |is_first| {
            let upload = upload.clone();
            async move {
                if is_first && !upload.may_send(number, sends).await {
                    return Some((Err(std::io::Error::other("the request was given up")), false));
                }
                match upload.body.next().await {
                    Ok(next) => next.map(|next| (Ok(next), false)),
                    Err(error) => Some((Err(std::io::Error::other(error.to_string())), false)),
                }
            }
        });
        let mut request = self.target.resource.request(&Method::PUT, url);
        let fields = request.headers_mut();
        fields.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        if !self.grows {
            fields.insert(CONTENT_LENGTH, HeaderValue::from(self.size));
        }
        if expects {
            fields.insert(EXPECT, HeaderValue::from_static("100-continue"));
        }
        *request.body_mut() = Some(Body::wrap_stream(body));
        request
    }

    /// Waits for a refusal, which ends the request; then whether the request may send the file.
    async fn may_send(&self, number: u64, sends: bool) -> bool {
        tokio::time::sleep(EXPECT_TIME).await;
        let is_latest = sends && self.attempt.load(Ordering::Relaxed) == number;
        if is_latest {
            self.may_exist.store(true, Ordering::Relaxed);
            self.stage.send_replace(PutStage::Sending);
        }
        is_latest
    }

    /// The response to a request, however long it takes, while the connection moves.
    async fn answer(&self, request: Request) -> Result<Response, Failure> {
        let resource = &self.target.resource;
        let mut sent = pin!(resource.client.execute(request));
        let (begun, mut ended) = (blockhaul_io::now(), None::<Instant>);
        loop {
            if let Ok(response) = timeout(LOOK, sent.as_mut()).await {
                return response.map_err(lost);
            }
            if resource.limit.is_zero() {
                continue;
            }
            if self.body.is_sent() {
                let ended = *ended.get_or_insert_with(blockhaul_io::now);
                // The server may write the file again.
                let limit = resource.limit.max(ended.duration_since(begun));
                if blockhaul_io::elapsed(ended) > limit {
                    return Err(Failure::late("confirmed the file", limit));
                }
            } else if !self.is_asking() && self.body.idle() > resource.limit {
                return Err(Failure::late("taken more data", resource.limit));
            }
        }
    }

    /// The error of a connection that ended: the server may have refused the file, and closed the connection before its
    /// response was read.
    async fn explained(self: &Arc<DavUpload>, url: &Url, failure: Failure) -> Error {
        let is_lost = failure.error.kind() == Kind::Disconnected && !self.is_asking();
        if is_lost && self.body.failed().is_none() {
            let again = self.answer(self.request(url, true, false));
            if let Ok(Ok(response)) = timeout(EXPECT_TIME, again).await
                && response.status().is_client_error() | response.status().is_server_error()
                && response.status().as_u16() != 417
            {
                return write_refusal(&self.target.resource, response).await.error;
            }
        }
        let remedy = "see the log of the server, check its free space, and copy again";
        let error = failure.error.or_remedy(remedy);
        match error.kind() {
            // Another connection cannot continue the file: nobody need try.
            Kind::Disconnected | Kind::TimedOut => error.with_kind(Kind::Io),
            _ => error,
        }
    }

    async fn store(self: &Arc<DavUpload>) -> Result<Option<Arc<dyn RemoteObject>>> {
        let size = self.body.end()?;
        if self.grows && size == 0 && self.target.size_before() > 0 {
            let lost = self.target.size_before();
            let text = format!("the source is empty: {lost} bytes of the target would be lost");
            let remedy = "remove the target first if that is intended";
            return Err(Error::new(Kind::Invalid, text).with_remedy(remedy));
        }
        if *self.stage.borrow() == PutStage::Idle {
            self.start();
        }
        self.until(|stage| stage == PutStage::Stored).await.map_err(unchanged)?;
        self.target.check_size(size).await.map_err(unchanged)?;
        self.target.publish(size).await?;
        self.is_complete.store(true, Ordering::Release);
        let mut resource = self.target.resource.clone();
        resource.url = self.target.place.clone();
        let object = match open(resource).await {
            Ok(object) => object,
            // Who may write may be refused to read.
            Err(error) if error.kind() == Kind::Refused => return Ok(None),
            Err(error) => return Err(error),
        };
        if object.size() != size {
            let text = format!("the file has {} bytes instead of {size}", object.size());
            let remedy = "check whether others write to it, and copy again";
            return Err(Error::new(Kind::Io, text).with_remedy(remedy));
        }
        Ok(Some(object.into()))
    }
}

#[async_trait]
impl ObjectUpload for DavUpload {
    fn size(&self) -> u64 {
        self.size
    }

    fn grows(&self) -> bool {
        self.grows
    }

    fn put(self: Arc<Self>, at: u64, len: u64, bytes: Option<&[u8]>) -> Result<PendingRequest> {
        if !self.body.put(at, len, bytes)? {
            return Ok(PendingRequest::ready(Ok(Reply::Done)));
        }
        let (completer, pending) = PendingRequest::completer();
        runtime::spawn(async move {
            completer.complete(self.body.room().await.map(|()| Reply::Done));
        })?;
        Ok(pending)
    }

    async fn complete(self: Arc<Self>) -> Result<()> {
        if self.is_complete.load(Ordering::Acquire) {
            return Ok(());
        }
        match self.store().await {
            Ok(object) => {
                self.lock().object = object;
                Ok(())
            }
            Err(error) => {
                self.body.fail(error.clone());
                Err(error)
            }
        }
    }

    fn object(&self) -> Option<Arc<dyn RemoteObject>> {
        self.lock().object.clone()
    }

    fn is_given_up(&self) -> bool {
        *self.stage.borrow() != PutStage::Idle && !self.is_complete.load(Ordering::Acquire)
    }

    async fn abort(&self) {
        let task = self.lock().task.take();
        if let Some(task) = task {
            task.abort();
            let ended = async {
                while !task.is_finished() {
                    tokio::task::yield_now().await;
                }
            };
            // A task that waits ends at once.
            let _ = timeout(END_TIME, ended).await;
        }
        self.target.remove(self.may_exist.load(Ordering::Relaxed)).await;
    }
}
