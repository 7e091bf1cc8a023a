//! Signed requests to a blob of Azure.

use std::error::Error as _;
use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderName, HeaderValue, IF_NONE_MATCH};
use http::{Method, Request};
use object_store::azure::{AzureAuthorizer, AzureCredential};
use object_store::client::{
    CredentialProvider, HttpError, HttpErrorKind, HttpResponse, HttpService as _,
};
use reqwest::Url;

use crate::crypto::OpenSslCrypto;
use crate::failure::Failure;
use crate::store_failure::{StoreKind, failure};
use crate::store_object::StoreResource;
use crate::store_service::{ServiceRefusal, StoreService};

/// The version of the protocol of requests without a signature; signed ones get that of the library.
const VERSION: &str = "2023-11-03";

/// An account, with the way in which its requests are signed.
#[derive(Debug, Clone)]
pub(crate) struct AzureAccount {
    pub(crate) name: String,
    pub(crate) service: StoreService,
    /// `None`: requests are not signed.
    pub(crate) credentials: Option<Arc<dyn CredentialProvider<Credential = AzureCredential>>>,
}

/// Requests to one blob.
pub(super) struct BlobRequests {
    account: AzureAccount,
    url: Url,
}

/// A request to a blob.
#[derive(Debug, Clone, Default)]
pub(super) struct BlobCall {
    pub(super) method: Method,
    /// The part of the blob that is meant, such as `page`; empty: the blob.
    pub(super) component: &'static str,
    /// Further parameters of the URL.
    pub(super) query: Vec<(&'static str, String)>,
    /// Names without `x-ms-`.
    pub(super) fields: Vec<(&'static str, String)>,
    /// Whether the blob must not exist yet.
    pub(super) is_new: bool,
    pub(super) body: Bytes,
}

/// A request that failed.
pub(super) struct CallFailure {
    pub(super) failure: Failure,
    /// The status and the word of the service, if it has refused.
    pub(super) refusal: Option<(u16, String)>,
    /// Whether the service may carry out the request nevertheless, or has done so.
    pub(super) is_open: bool,
}

impl CallFailure {
    /// Whether the service has refused with this word.
    pub(super) fn is(&self, code: &str) -> bool {
        self.refusal.as_ref().is_some_and(|refusal| refusal.1 == code)
    }

    /// Whether the lease of the request is not that of the blob.
    pub(super) fn is_of_lease(&self) -> bool {
        let refusal = self.refusal.as_ref();
        refusal
            .is_some_and(|(status, code)| matches!(status, 409 | 412) && code.starts_with("Lease"))
    }

    fn of(error: HttpError) -> CallFailure {
        let refused = error.source().and_then(|cause| cause.downcast_ref::<ServiceRefusal>());
        let refusal = refused.map(|refused| (refused.status, refused.code.clone()));
        let passes = matches!(
            error.kind(),
            HttpErrorKind::Request
                | HttpErrorKind::Connect
                | HttpErrorKind::Interrupted
                | HttpErrorKind::Timeout
        );
        let is_open = match &refusal {
            Some((status, _)) => *status >= 500 && *status != 503,
            None => error.kind() != HttpErrorKind::Connect,
        };
        let error = object_store::Error::Generic { store: "Azure", source: Box::new(error) };
        let error = failure(StoreKind::Azure, &error).error;
        let failure = if passes { Failure::passing(error) } else { Failure::last(error) };
        CallFailure { failure, refusal, is_open }
    }

    fn last(error: Error) -> CallFailure {
        CallFailure { failure: Failure::last(error), refusal: None, is_open: false }
    }
}

impl BlobRequests {
    /// Requests to the object of a resource, if it is one of Azure.
    pub(super) fn new(resource: &StoreResource) -> Option<BlobRequests> {
        let account = resource.account.clone()?;
        let mut url = Url::parse(&resource.bucket).ok()?;
        url.path_segments_mut().ok()?.extend(resource.key.parts());
        Some(BlobRequests { account, url })
    }

    /// Sends a request once; the response, which is a success.
    pub(super) async fn send(&self, call: BlobCall) -> Result<HttpResponse, CallFailure> {
        let BlobCall { method, component, query, fields, is_new, body } = call;
        let mut url = self.url.clone();
        if !component.is_empty() {
            url.query_pairs_mut().append_pair("comp", component);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let wrong = || {
            let error =
                Error::new(Kind::Invalid, "the request has characters that are not allowed");
            CallFailure::last(error.with_remedy("check the name of the blob"))
        };
        let mut request = Request::builder().method(&method).uri(url.as_str());
        if method == Method::PUT {
            request = request.header(CONTENT_LENGTH, body.len());
        }
        if is_new {
            request = request.header(IF_NONE_MATCH, "*");
        }
        let request = request.body(body.into());
        let mut request = request.map_err(|_| wrong())?;
        for (name, value) in fields {
            let name = HeaderName::from_bytes(format!("x-ms-{name}").as_bytes());
            let value = HeaderValue::from_str(&value);
            let name = name.map_err(|_| wrong())?;
            request.headers_mut().insert(name, value.map_err(|_| wrong())?);
        }
        self.sign(&mut request).await?;
        self.account.service.call(request).await.map_err(CallFailure::of)
    }

    async fn sign(
        &self,
        request: &mut object_store::client::HttpRequest,
    ) -> Result<(), CallFailure> {
        let AzureAccount { name, credentials, .. } = &self.account;
        let Some(credentials) = credentials else {
            request.headers_mut().insert("x-ms-version", HeaderValue::from_static(VERSION));
            return Ok(());
        };
        let failed = |error: object_store::Error| CallFailure {
            failure: failure(StoreKind::Azure, &error),
            refusal: None,
            is_open: false,
        };
        let credential = credentials.get_credential().await.map_err(failed)?;
        let crypto = OpenSslCrypto;
        let authorizer = AzureAuthorizer::new(&credential, name).with_crypto(&crypto);
        authorizer.try_authorize(request).map_err(failed)
    }
}
