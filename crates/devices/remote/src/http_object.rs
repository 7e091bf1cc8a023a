//! A resource of an HTTP server that is read by ranges.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use blockhaul_block::{Error, Kind, Result};
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CACHE_CONTROL, CONTENT_LENGTH, HeaderMap, HeaderValue,
    LOCATION, RANGE,
};
use reqwest::{Client, Method, Request, Response, StatusCode, Url};
use tokio::time::{Instant, timeout, timeout_at};

use crate::device::RemoteObject;
use crate::failure::{Failure, NextStep, Repetitions};
use crate::http_stream::HttpStream;
use crate::response::{ContentRange, ObjectVersion, changed, check_encoding, refusal};

/// Redirects that are followed for one request.
pub(crate) const REDIRECTS_MAX: usize = 10;
/// Bytes that must arrive within the time limit.
pub(crate) const PIECE: usize = 256 << 10;

/// A resource as the user names it, and how it is requested.
#[derive(Clone)]
pub(crate) struct HttpResource {
    pub(crate) client: Client,
    pub(crate) url: Url,
    /// Fields of each request to the server in the URL. They may be secrets.
    pub(crate) fields: HeaderMap,
    /// Time for a response to begin, and for each [`PIECE`] of its body; zero: none.
    pub(crate) limit: Duration,
}

impl HttpResource {
    /// Sends a request to `url`, which begins where redirects lead; the response, and its own place.
    pub(crate) async fn get(
        &self,
        method: &Method,
        from: &Url,
        fields: &HeaderMap,
    ) -> Result<(Response, Url), Failure> {
        let mut url = from.clone();
        for _ in 0..=REDIRECTS_MAX {
            let response = self.send(method, &url, fields).await?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok((response, url));
            }
            url = next_place(&url, &response)?;
        }
        let text = format!("the server redirects more than {REDIRECTS_MAX} times");
        Err(Failure::last(
            Error::new(Kind::Unsupported, text).with_remedy("check the URL with curl -L"),
        ))
    }

    async fn send(
        &self,
        method: &Method,
        url: &Url,
        fields: &HeaderMap,
    ) -> Result<Response, Failure> {
        let mut request = self.request(method, url);
        request.headers_mut().extend(fields.clone());
        let sent = within(self.limit, self.client.execute(request)).await;
        sent.ok_or_else(|| Failure::late("answered", self.limit))?.map_err(lost)
    }

    /// A request to `url`, with the fields for that server.
    pub(crate) fn request(&self, method: &Method, url: &Url) -> Request {
        let mut request = Request::new(method.clone(), url.clone());
        let own = request.headers_mut();
        own.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        // Other servers must not see secrets.
        if url.origin() == self.url.origin() {
            own.extend(self.fields.clone());
        }
        request
    }

    /// Fills `buf` from `filled` on with the body of a response; less if the body is shorter.
    pub(crate) async fn fill(
        &self,
        response: &mut Response,
        buf: &mut [u8],
        filled: &mut usize,
    ) -> Result<(), Failure> {
        let mut piece = 0;
        let mut due = self.due();
        while *filled < buf.len() {
            let Some(more) = self.chunk(response, due).await? else { return Ok(()) };
            let count = more.len().min(buf.len() - *filled);
            buf[*filled..*filled + count].copy_from_slice(&more[..count]);
            *filled += count;
            piece += count;
            if piece >= PIECE {
                (piece, due) = (0, self.due());
            }
        }
        Ok(())
    }

    /// The body of a response; none if it has more than `most` bytes.
    pub(crate) async fn body(
        &self,
        mut response: Response,
        most: usize,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let mut bytes = Vec::new();
        let (mut piece, mut due) = (0, self.due());
        while let Some(more) = self.chunk(&mut response, due).await? {
            if more.len() > most - bytes.len() {
                return Ok(None);
            }
            bytes.extend_from_slice(&more);
            piece += more.len();
            if piece >= PIECE {
                (piece, due) = (0, self.due());
            }
        }
        Ok(Some(bytes))
    }

    /// The next bytes of a body; none at its end.
    pub(crate) async fn chunk(
        &self,
        response: &mut Response,
        due: Option<Instant>,
    ) -> Result<Option<bytes::Bytes>, Failure> {
        let next = response.chunk();
        let received = match due {
            None => Ok(next.await),
            Some(due) => timeout_at(due, next).await,
        };
        let late = |_| Failure::late(&format!("sent {} KiB", PIECE >> 10), self.limit);
        received.map_err(late)?.map_err(lost)
    }

    /// The time at which the next [`PIECE`] must be here.
    pub(crate) fn due(&self) -> Option<Instant> {
        due(self.limit)
    }
}

/// The time at which `limit` has passed; none if it is zero.
pub(crate) fn due(limit: Duration) -> Option<Instant> {
    (!limit.is_zero()).then(|| Instant::from_std(blockhaul_io::now()) + limit)
}

/// The result of `work`, unless it takes longer than `limit`; zero: none.
pub(crate) async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    if limit.is_zero() { Some(work.await) } else { timeout(limit, work).await.ok() }
}

/// A connection that cannot be made, or that ended. The URL may be signed.
pub(crate) fn lost(error: reqwest::Error) -> Failure {
    Failure::of_connection(&error.without_url())
}

/// The place that a redirect names.
pub(crate) fn next_place(url: &Url, response: &Response) -> Result<Url, Failure> {
    let refused = |text: String, remedy: &'static str| {
        Failure::last(Error::new(Kind::Unsupported, text).with_remedy(remedy))
    };
    let status = response.status();
    let place = response.headers().get(LOCATION).and_then(|place| place.to_str().ok());
    let place = place.and_then(|place| url.join(place).ok());
    let Some(mut next) = place else {
        return Err(refused(
            format!("the server answers \"{status}\" and names no place"),
            "check the URL",
        ));
    };
    next.set_fragment(None);
    match (url.scheme(), next.scheme()) {
        (_, "https") | ("http", "http") => Ok(next),
        ("https", "http") => {
            let text = "the server redirects from https to http, where others can read and change the disk";
            Err(refused(text.to_owned(), "if that is wanted, use the URL that it redirects to"))
        }
        (_, scheme) => {
            let text = format!("the server redirects to the scheme {scheme:?}");
            Err(refused(text, "use the URL of a file"))
        }
    }
}

/// An object that is read by ranges.
pub(crate) struct HttpObject {
    resource: HttpResource,
    /// Where redirects led the last request.
    place: Mutex<Url>,
    size: u64,
    version: ObjectVersion,
}

/// Finds out size and abilities of a resource.
///
/// # Errors
/// The server refuses or fails, or does not tell the size.
pub(crate) async fn open(resource: HttpResource) -> Result<Box<dyn RemoteObject>> {
    let mut repetitions = Repetitions::opening();
    loop {
        match probe(&resource, repetitions.has_begun()).await {
            Ok(found) => return Ok(found),
            // A server that is not there will not be there in a moment, either.
            Err(failure)
                if failure.error.kind() == Kind::Disconnected && failure.error.is_complete() =>
            {
                return Err(failure.error);
            }
            Err(failure) => repetitions.wait(failure, 0).await?,
        }
    }
}

/// Requests the first byte.
async fn probe(resource: &HttpResource, fresh: bool) -> Result<Box<dyn RemoteObject>, Failure> {
    let fields = range_fields(0, 1, fresh);
    let (response, place) = resource.get(&Method::GET, &resource.url, &fields).await?;
    check_encoding(response.headers(), &place)?;
    let version = ObjectVersion::of(response.headers());
    let found = ContentRange::of(response.headers());
    let size = match response.status() {
        StatusCode::OK => {
            let Some(size) = length(&response) else { return Err(no_size()) };
            return Ok(Box::new(HttpStream::new(resource.clone(), response, size, version)));
        }
        StatusCode::PARTIAL_CONTENT => match found {
            Some(ContentRange { range: Some((0, _)), total: Some(total) }) => total,
            Some(ContentRange { range: Some((0, _)), total: None }) => {
                head_length(resource, &place).await?
            }
            _ => return Err(bad_range()),
        },
        StatusCode::RANGE_NOT_SATISFIABLE => match found.and_then(|found| found.total) {
            Some(0) => 0,
            // A cache that has another version, or a server that says nothing.
            _ if fresh && head_length(resource, &place).await? == 0 => 0,
            _ => return Err(Failure::passing(no_range())),
        },
        _ => return Err(refusal(response, place != resource.url).await),
    };
    if i64::try_from(size).is_err() {
        let text = format!("the server names a size of {size} bytes, more than any disk has");
        return Err(Failure::last(Error::new(Kind::Invalid, text).with_remedy("check the server")));
    }
    let place = Mutex::new(place);
    Ok(Box::new(HttpObject { resource: resource.clone(), place, size, version }))
}

/// The length by a HEAD request.
async fn head_length(resource: &HttpResource, place: &Url) -> Result<u64, Failure> {
    let (response, _) = resource.get(&Method::HEAD, place, &HeaderMap::new()).await?;
    if !response.status().is_success() {
        return Err(no_size());
    }
    length(&response).ok_or_else(no_size)
}

fn length(response: &Response) -> Option<u64> {
    response.headers().get(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

fn no_size() -> Failure {
    let error = Error::new(Kind::Unsupported, "the server does not tell the size");
    Failure::last(error.with_remedy("copy from a pipe: curl URL | blockhaul copy - TARGET"))
}

fn bad_range() -> Failure {
    let text = "the server answers with another range than the one it was asked for";
    let error = Error::new(Kind::Unsupported, text);
    Failure::last(error.with_remedy("copy from a pipe: curl URL | blockhaul copy - TARGET"))
}

fn no_range() -> Error {
    let text = "the server refuses a range that is inside the disk (416)";
    Error::new(Kind::Io, text).with_remedy("check the server, and caches in front of it")
}

/// The fields of a request for the bytes from `at` to `end`. `fresh`: past caches.
fn range_fields(at: u64, end: u64, fresh: bool) -> HeaderMap {
    let mut fields = HeaderMap::new();
    let range = format!("bytes={at}-{}", end - 1);
    fields.extend(HeaderValue::from_str(&range).ok().map(|range| (RANGE, range)));
    if fresh {
        fields.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    }
    fields
}

impl HttpObject {
    fn place(&self) -> Url {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_place(&self, url: Url) {
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = url;
    }

    /// Requests the rest of `buf`, and receives at least a part of it.
    async fn part(
        &self,
        at: u64,
        buf: &mut [u8],
        filled: &mut usize,
        fresh: bool,
    ) -> Result<(), Failure> {
        let begin = at + *filled as u64;
        let end = at + buf.len() as u64;
        let mut fields = range_fields(begin, end, fresh);
        fields.extend(self.version.condition());
        let from = self.place();
        let (mut response, place) = self.resource.get(&Method::GET, &from, &fields).await?;
        let last = self.check(&response, begin).transpose();
        let Some(last) = last else {
            let failure = refusal(response, place != self.resource.url).await;
            if failure.next == NextStep::Locate {
                self.set_place(self.resource.url.clone());
            }
            return Err(failure);
        };
        let last = last?.min(end);
        check_encoding(response.headers(), &place)?;
        if place != from {
            self.set_place(place);
        }
        // No more than `buf` has.
        let most = usize::try_from(last - at).unwrap_or(buf.len());
        self.resource.fill(&mut response, &mut buf[..most], filled).await?;
        if *filled < most {
            let text = format!(
                "the server sent {} bytes instead of {}",
                at + *filled as u64 - begin,
                last - begin
            );
            return Err(Failure::passing(Error::new(Kind::Disconnected, text)));
        }
        Ok(())
    }

    /// The end of the bytes in a response; none if it is a refusal like any other.
    fn check(&self, response: &Response, begin: u64) -> Result<Option<u64>, Failure> {
        let found = ContentRange::of(response.headers());
        let is_other_size =
            found.and_then(|found| found.total).is_some_and(|total| total != self.size);
        let is_same = self.version.fits(&ObjectVersion::of(response.headers())) && !is_other_size;
        match response.status() {
            StatusCode::PRECONDITION_FAILED => Err(Failure::last(changed())),
            StatusCode::OK | StatusCode::PARTIAL_CONTENT if !is_same => {
                Err(Failure::last(changed()))
            }
            StatusCode::RANGE_NOT_SATISFIABLE if is_other_size => Err(Failure::last(changed())),
            StatusCode::RANGE_NOT_SATISFIABLE => Err(Failure::passing(no_range())),
            StatusCode::PARTIAL_CONTENT => match found.and_then(|found| found.range) {
                Some((first, end)) if first == begin => Ok(Some(end)),
                _ => Err(bad_range()),
            },
            StatusCode::OK if begin == 0 && length(response) == Some(self.size) => {
                Ok(Some(self.size))
            }
            StatusCode::OK => {
                let text = "the server has sent the object from its beginning instead of a range";
                let error = Error::new(Kind::Io, text)
                    .with_remedy("check the server, and caches in front of it");
                Err(Failure::passing(error))
            }
            _ => Ok(None),
        }
    }
}

#[async_trait]
impl RemoteObject for HttpObject {
    fn size(&self) -> u64 {
        self.size
    }

    fn version(&self) -> Option<String> {
        self.version.name()
    }

    async fn read(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        let mut repetitions = Repetitions::new();
        while filled < buf.len() {
            let before = filled;
            if let Err(failure) = self.part(at, buf, &mut filled, repetitions.has_begun()).await {
                repetitions.wait(failure, filled - before).await?;
            }
        }
        Ok(())
    }
}

/// The field for a user and a password.
pub(crate) fn basic(
    user: &str,
    password: &str,
) -> Result<(reqwest::header::HeaderName, HeaderValue)> {
    let encoded = openssl::base64::encode_block(format!("{user}:{password}").as_bytes());
    let wrong = |_| {
        Error::new(Kind::Invalid, "the user or the password has characters that are not allowed")
    };
    let mut value = HeaderValue::from_str(&format!("Basic {encoded}")).map_err(wrong)?;
    value.set_sensitive(true);
    Ok((AUTHORIZATION, value))
}
