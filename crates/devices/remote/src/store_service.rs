//! The connections of object stores: the client of this crate, as `object_store` uses it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use blockhaul_wire::printable;
use futures_util::StreamExt as _;
use http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use http_body_util::BodyExt as _;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use reqwest::{Body, Client, Request};

use crate::client::SENT_PIECE;
use crate::response::{PAUSE_MAX, retry_after};
use crate::service_words::ServiceWords;

/// Services on this machine that know its credentials, and the time for their response: elsewhere nobody answers.
const METADATA_HOSTS: [&str; 4] =
    ["169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata"];
const METADATA_TIME: Duration = Duration::from_secs(2);

/// Bytes and time of the text of a refusal, and bytes of it that are shown.
const BODY_MAX: usize = 16 << 10;
const BODY_TIME: Duration = Duration::from_secs(1);
const TEXT_MAX: usize = 300;

/// A client for `object_store`.
#[derive(Debug, Clone)]
pub(crate) struct StoreService {
    pub(crate) client: Client,
    /// Time for a response to begin, and for each [`SENT_PIECE`] of the request; zero: none.
    pub(crate) limit: Duration,
    /// Whether a server has answered: before, one that is not there is an error at once.
    pub(crate) has_answered: Arc<AtomicBool>,
}

/// The cause of an error: the machine has no service for credentials, and nothing else names any.
#[derive(Debug)]
pub(crate) struct AbsentCredentials;

impl std::fmt::Display for AbsentCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no credentials")
    }
}

impl std::error::Error for AbsentCredentials {}

/// The cause of an error: no response in time.
#[derive(Debug)]
pub(crate) struct ResponseTimeout;

impl std::fmt::Display for ResponseTimeout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the service does not answer in time")
    }
}

impl std::error::Error for ResponseTimeout {}

/// The cause of an error: a response that is no success, and that is not repeated.
#[derive(Debug)]
pub(crate) struct ServiceRefusal {
    pub(crate) status: u16,
    /// The service's word for the error; may be empty.
    pub(crate) code: String,
    /// The service's sentence; may be empty.
    pub(crate) message: String,
    /// The region that the service names.
    pub(crate) region: Option<String>,
}

impl std::fmt::Display for ServiceRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // What follows in other lines is the number of the request.
        let words: Vec<_> =
            self.message.lines().next().unwrap_or_default().split_whitespace().collect();
        let message = printable(words.join(" ").trim_end_matches('.').as_bytes(), TEXT_MAX);
        let part = if message.is_empty() { String::new() } else { format!(" ({message})") };
        let verb = if self.status < 500 { "refuses" } else { "fails" };
        write!(f, "the service {verb}{part}")
    }
}

impl std::error::Error for ServiceRefusal {}

impl ServiceRefusal {
    async fn of(response: HttpResponse) -> ServiceRefusal {
        let (head, body) = response.into_parts();
        let field = |name: &str| Some(head.headers.get(name)?.to_str().ok()?.to_owned());
        let mut text = Vec::new();
        let mut body = body.bytes_stream();
        while text.len() < BODY_MAX
            && let Ok(Some(Ok(more))) = tokio::time::timeout(BODY_TIME, body.next()).await
        {
            text.extend_from_slice(&more);
        }
        let words = ServiceWords::of(&String::from_utf8_lossy(&text));
        ServiceRefusal {
            status: head.status.as_u16(),
            code: words.code.or_else(|| field("x-ms-error-code")).unwrap_or_default(),
            message: words.message.unwrap_or_default(),
            region: field("x-amz-bucket-region").or(words.region),
        }
    }
}

/// The storage class and the checksum of an object, where its service says them.
#[derive(Debug, Clone, Default)]
pub(crate) struct ObjectFields(Vec<String>);

/// Fields of responses, each with its meaning. That of Google's service says which checksums it has.
const OBJECT_FIELDS: [(&str, &str); 10] = [
    ("x-amz-storage-class", "storage class"),
    ("x-goog-storage-class", "storage class"),
    ("x-ms-access-tier", "access tier"),
    ("x-amz-checksum-sha256", "SHA-256"),
    ("x-amz-checksum-sha1", "SHA-1"),
    ("x-amz-checksum-crc64nvme", "CRC64NVME"),
    ("x-amz-checksum-crc32c", "CRC32C"),
    ("x-amz-checksum-crc32", "CRC32"),
    ("x-ms-blob-content-md5", "MD5"),
    ("x-goog-hash", "checksum"),
];

impl ObjectFields {
    fn of(fields: &HeaderMap) -> ObjectFields {
        let shown = |(field, meaning): (&str, &str)| {
            let value = fields.get(field)?;
            Some(format!("{meaning} {}", printable(value.as_bytes(), 80)))
        };
        ObjectFields(OBJECT_FIELDS.into_iter().filter_map(shown).collect())
    }

    /// These fields and those of another response.
    pub(crate) fn with(mut self, other: ObjectFields) -> ObjectFields {
        let more: Vec<_> = other.0.into_iter().filter(|field| !self.0.contains(field)).collect();
        self.0.extend(more);
        self
    }
}

impl std::fmt::Display for ObjectFields {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|field| write!(f, ", {field}"))
    }
}

impl HttpConnector for StoreService {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for StoreService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_metadata = request.uri().host().is_some_and(|host| METADATA_HOSTS.contains(&host));
        let mut request = request;
        // A token that is empty is none.
        let is_empty = |token: &HeaderValue| token.as_bytes().trim_ascii() == b"Bearer";
        if request.headers().get(AUTHORIZATION).is_some_and(is_empty) {
            request.headers_mut().remove(AUTHORIZATION);
        }
        let pieces = request.body().content_length() / SENT_PIECE;
        let limit = self.limit * u32::try_from(1 + pieces).unwrap_or(u32::MAX);
        let request = Request::try_from(request.map(Body::wrap));
        let request =
            request.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error.without_url()))?;
        if is_metadata {
            let answered = tokio::time::timeout(METADATA_TIME, self.send(request, limit)).await;
            return match answered {
                Ok(Ok(response)) if response.status().is_success() => Ok(response),
                _ => Err(HttpError::new(HttpErrorKind::Unknown, AbsentCredentials)),
            };
        }
        let response = self.send(request, limit).await?;
        if matches!(response.status().as_u16(), 429 | 503)
            && let Some(pause) = retry_after(response.headers())
        {
            tokio::time::sleep(pause.min(PAUSE_MAX)).await;
        }
        let status = response.status().as_u16();
        let kind = match status {
            // As if it had not been sent: these are repeated, whatever the request is.
            408 | 429 | 500 | 502..=504 | 506 | 508..=599 => HttpErrorKind::Request,
            300..=303 | 305.. => HttpErrorKind::Unknown,
            _ => {
                let mut response = response;
                let fields = ObjectFields::of(response.headers());
                response.extensions_mut().insert(fields);
                return Ok(response);
            }
        };
        Err(HttpError::new(kind, ServiceRefusal::of(response).await))
    }
}

impl StoreService {
    async fn send(&self, request: Request, limit: Duration) -> Result<HttpResponse, HttpError> {
        let sending = self.client.execute(request);
        let sent = if limit.is_zero() {
            sending.await
        } else {
            let late = |_| HttpError::new(HttpErrorKind::Timeout, ResponseTimeout);
            tokio::time::timeout(limit, sending).await.map_err(late)?
        };
        let response = sent.map_err(|error| {
            let again = self.has_answered.load(Ordering::Relaxed);
            let kind = if again { HttpErrorKind::Connect } else { HttpErrorKind::Unknown };
            let kind = if error.is_connect() { kind } else { HttpErrorKind::Interrupted };
            HttpError::new(kind, error.without_url())
        })?;
        self.has_answered.store(true, Ordering::Relaxed);
        let response = http::Response::<Body>::from(response);
        let lost =
            |error: reqwest::Error| HttpError::new(HttpErrorKind::Interrupted, error.without_url());
        Ok(response.map(|body| HttpResponseBody::new(body.map_err(lost))))
    }
}
