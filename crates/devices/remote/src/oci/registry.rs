//! Requests to a registry (OCI distribution specification), with the credentials that it wants.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::printable;
use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE, WWW_AUTHENTICATE,
};
use reqwest::{Client, Method, Response, Url};
use serde_json::Value;

use super::challenge::{Challenge, TokenService, challenge};
use super::credentials::RegistryLogin;
use super::digest::ContentDigest;
use super::manifest::{ACCEPT as MANIFESTS, MANIFEST_MAX};
use super::reference::ImageReference;
use crate::failure::{Failure, Repetitions};
use crate::http_object::{HttpResource, basic, lost};
use crate::response::refusal;

/// Bytes of the response of a token service.
const TOKEN_MAX: usize = 256 << 10;
const LOGIN: &str =
    "log in (skopeo login REGISTRY), or write oci://USER@REGISTRY/…#password-file=FILE";

/// A registry, with the repository of an image.
pub(super) struct Registry {
    pub(super) client: Client,
    /// `https://HOST/v2/NAME/`.
    base: Url,
    image: ImageReference,
    /// Fields of each request to the registry. They may be secrets.
    fields: HeaderMap,
    login: Option<RegistryLogin>,
    limit: Duration,
    /// The field that the registry has accepted last.
    authorization: Mutex<Option<HeaderValue>>,
}

impl Registry {
    /// The registry of an image; `scheme`: http or https.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the host is invalid.
    pub(super) fn new(
        client: Client,
        scheme: &str,
        image: ImageReference,
        fields: HeaderMap,
        login: Option<RegistryLogin>,
        limit: Duration,
    ) -> Result<Registry> {
        let base = Url::parse(&format!("{scheme}://{}/v2/{}/", image.host(), image.name));
        // Characters in the host must not make it a user, a query or a path.
        let path = format!("/v2/{}/", image.name);
        let is_plain = |base: &Url| {
            let has_more = base.query().is_some() || base.fragment().is_some();
            let has_user = !base.username().is_empty() || base.password().is_some();
            base.path() == path && !has_more && !has_user
        };
        let base = base.ok().filter(is_plain).ok_or_else(|| {
            let shown = printable(image.registry.as_bytes(), 100);
            let error = Error::new(Kind::Usage, format!("{shown:?} is no host of a registry"));
            error.with_remedy("write oci://HOST[:PORT]/NAME:TAG")
        })?;
        Ok(Registry { client, base, image, fields, login, limit, authorization: Mutex::default() })
    }

    fn resource(&self) -> HttpResource {
        let mut fields = self.fields.clone();
        let authorization = self.authorization.lock().unwrap_or_else(PoisonError::into_inner);
        fields.extend(authorization.clone().map(|value| (AUTHORIZATION, value)));
        let (client, url) = (self.client.clone(), self.base.clone());
        HttpResource { client, url, fields, limit: self.limit }
    }

    /// Requests what is at a path of the repository. A token that has expired is renewed once.
    async fn get(&self, path: &str, fields: &HeaderMap) -> Result<(Response, Url), Failure> {
        let wrong = |_| Failure::last(Error::new(Kind::Usage, "no path of a registry"));
        let url = self.base.join(path).map_err(wrong)?;
        let mut is_renewed = false;
        loop {
            let (response, place) = self.resource().get(&Method::GET, &url, fields).await?;
            // Where a redirect led, nobody may ask for the credentials of the registry.
            let is_own = place.origin() == self.base.origin();
            if response.status().as_u16() != 401 || !is_own || is_renewed {
                return Ok((response, place));
            }
            self.authenticate(&response).await?;
            is_renewed = true;
        }
    }

    async fn authenticate(&self, response: &Response) -> Result<(), Failure> {
        let all = response.headers().get_all(WWW_AUTHENTICATE).iter();
        let wanted = challenge(all.filter_map(|field| field.to_str().ok()));
        let value = match (wanted, &self.login) {
            (Some(Challenge::Bearer(service)), _) => self.token(&service).await?,
            (Some(Challenge::Basic), Some(RegistryLogin::Password(user, password))) => {
                basic(user, password).map_err(Failure::last)?.1
            }
            _ => {
                let text = "the registry wants credentials, and there are none for it";
                let error = Error::new(Kind::Refused, text);
                return Err(Failure::last(error.with_remedy(LOGIN)));
            }
        };
        *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        Ok(())
    }

    /// A token of the service that the registry names.
    async fn token(&self, service: &TokenService) -> Result<HeaderValue, Failure> {
        let refused = |text: String, remedy: &'static str| {
            Failure::last(Error::new(Kind::Refused, text).with_remedy(remedy))
        };
        let realm = Url::parse(&service.realm).ok().filter(|url| url.has_host());
        let Some(mut realm) = realm else {
            return Err(refused(
                "the registry names no service of tokens".to_owned(),
                "check the registry",
            ));
        };
        let is_secure = realm.scheme() == "https";
        if !(is_secure || realm.scheme() == "http" && self.base.scheme() == "http") {
            let text = "the registry names a service of tokens without TLS, to which no credentials are sent";
            return Err(refused(text.to_owned(), "check the registry"));
        }
        let own = format!("repository:{}:pull", self.image.name);
        let scope = service.scope.clone().unwrap_or(own);
        let mut form = vec![("scope", scope)];
        form.extend(service.service.clone().map(|service| ("service", service)));
        let mut resource = HttpResource {
            client: self.client.clone(),
            url: realm.clone(),
            fields: HeaderMap::new(),
            limit: self.limit,
        };
        let response = if let Some(RegistryLogin::Identity(token)) = &self.login {
            form.push(("grant_type", "refresh_token".to_owned()));
            form.push(("client_id", "blockhaul".to_owned()));
            form.push(("refresh_token", token.clone()));
            let mut body = realm.clone();
            body.set_query(None);
            body.query_pairs_mut().extend_pairs(&form);
            let mut request = resource.request(&Method::POST, &realm);
            let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
            request.headers_mut().insert(CONTENT_TYPE, kind);
            *request.body_mut() = Some(body.query().unwrap_or_default().to_owned().into());
            self.client.execute(request).await.map_err(lost)?
        } else {
            if let Some(RegistryLogin::Password(user, password)) = &self.login {
                resource.fields.extend([basic(user, password).map_err(Failure::last)?]);
            }
            realm.query_pairs_mut().extend_pairs(&form);
            resource.get(&Method::GET, &realm, &HeaderMap::new()).await?.0
        };
        if !response.status().is_success() {
            return Err(self.refused(response).await);
        }
        let text = body(&resource, response, TOKEN_MAX).await?;
        let found: Value = serde_json::from_slice(&text).unwrap_or_default();
        let token = ["token", "access_token"].iter().find_map(|name| found.get(*name)?.as_str());
        let value = token.and_then(|token| HeaderValue::from_str(&format!("Bearer {token}")).ok());
        let Some(mut value) = value else {
            return Err(refused(
                "the service of tokens sends none".to_owned(),
                "check the registry",
            ));
        };
        value.set_sensitive(true);
        Ok(value)
    }

    async fn refused(&self, response: Response) -> Failure {
        let status = response.status().as_u16();
        let Failure { error, next } = refusal(response, false).await;
        let error = match status {
            401 | 403 => error.with_kind(Kind::Refused).with_remedy(LOGIN),
            404 => error.with_remedy("check the name of the image and its tag"),
            _ => error,
        };
        Failure { error, next }
    }

    /// The bytes of a manifest. Those of a digest are checked.
    ///
    /// # Errors
    /// The registry refuses or fails, or sends other bytes.
    pub(super) async fn manifest(
        &self,
        version: &str,
        digest: Option<&ContentDigest>,
    ) -> Result<Vec<u8>> {
        let accept = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(MANIFESTS))]);
        let (bytes, fields) = self.small(&format!("manifests/{version}"), &accept).await?;
        let told = fields.get("docker-content-digest").and_then(|digest| digest.to_str().ok());
        let told = told.map(ContentDigest::parse).transpose()?;
        for digest in digest.into_iter().chain(&told) {
            check(&bytes, digest)?;
        }
        Ok(bytes)
    }

    /// A blob of at most [`MANIFEST_MAX`] bytes.
    ///
    /// # Errors
    /// The registry refuses or fails, or sends other bytes.
    pub(super) async fn small_blob(&self, digest: &ContentDigest) -> Result<Vec<u8>> {
        let (bytes, _) = self.small(&format!("blobs/{digest}"), &HeaderMap::new()).await?;
        check(&bytes, digest)?;
        Ok(bytes)
    }

    async fn small(&self, path: &str, fields: &HeaderMap) -> Result<(Vec<u8>, HeaderMap)> {
        let mut repetitions = Repetitions::opening();
        loop {
            match self.small_once(path, fields).await {
                Ok(found) => return Ok(found),
                Err(failure)
                    if failure.error.kind() == Kind::Disconnected
                        && failure.error.is_complete() =>
                {
                    return Err(failure.error);
                }
                Err(failure) => repetitions.wait(failure, 0).await?,
            }
        }
    }

    async fn small_once(
        &self,
        path: &str,
        fields: &HeaderMap,
    ) -> Result<(Vec<u8>, HeaderMap), Failure> {
        let (response, _) = self.get(path, fields).await?;
        if !response.status().is_success() {
            return Err(self.refused(response).await);
        }
        let fields = response.headers().clone();
        Ok((body(&self.resource(), response, MANIFEST_MAX).await?, fields))
    }

    /// The response with the bytes of a blob from an offset on.
    pub(super) async fn blob(
        &self,
        digest: &ContentDigest,
        from: u64,
    ) -> Result<Response, Failure> {
        let mut fields = HeaderMap::new();
        if from > 0 {
            let range = HeaderValue::from_str(&format!("bytes={from}-"));
            fields.extend(range.ok().map(|range| (RANGE, range)));
        }
        let (response, _) = self.get(&format!("blobs/{digest}"), &fields).await?;
        if !response.status().is_success() {
            return Err(self.refused(response).await);
        }
        Ok(response)
    }

    /// The next bytes of a blob.
    pub(super) async fn chunk(
        &self,
        response: &mut Response,
    ) -> Result<Option<bytes::Bytes>, Failure> {
        let resource = self.resource();
        resource.chunk(response, resource.due()).await
    }
}

/// Checks bytes before they are used.
///
/// # Errors
/// [`Kind::Io`] if they have another digest.
pub(super) fn check(bytes: &[u8], digest: &ContentDigest) -> Result<()> {
    if digest.is_of(bytes) { Ok(()) } else { Err(other_bytes(digest)) }
}

/// The error of bytes that are not those of a digest.
pub(super) fn other_bytes(digest: &ContentDigest) -> Error {
    let text = format!("the bytes are not those of {digest}");
    Error::new(Kind::Io, text).with_remedy("check the registry, and caches in front of it")
}

/// The body of a response, which has at most `most` bytes.
async fn body(
    resource: &HttpResource,
    response: Response,
    most: usize,
) -> Result<Vec<u8>, Failure> {
    resource.body(response, most).await?.ok_or_else(|| {
        let text = format!("the registry sends more than {most} bytes");
        let error = Error::new(Kind::Invalid, text);
        Failure::last(error.with_remedy("check the name of the image"))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;
    use crate::RemoteOptions;
    use crate::runtime::block_on;

    fn registry(scheme: &str, host: &str) -> Result<Registry> {
        let options = RemoteOptions { connect_timeout: Duration::ZERO, timeout: Duration::ZERO };
        let client = crate::client::client(options, None, 1).unwrap();
        let image = ImageReference::parse(&format!("{host}/a/b:1")).unwrap();
        let login = RegistryLogin::Password("me".to_owned(), "hidden".to_owned());
        Registry::new(client, scheme, image, HeaderMap::new(), Some(login), Duration::ZERO)
    }

    #[test]
    fn credentials_go_to_no_service_without_tls() {
        let registry = registry("https", "registry.example.com").unwrap();
        for realm in ["http://127.0.0.1:1/token", "ftp://h/", "token", "http:", "data:x", ""] {
            let service = TokenService { realm: realm.to_owned(), service: None, scope: None };
            let refused = block_on(registry.token(&service)).map(drop).unwrap_err().error;
            let said = refused.to_string();
            assert!(refused.kind() == Kind::Refused && !said.contains("hidden"), "{realm}: {said}");
        }
    }

    #[test]
    fn a_host_is_a_host_and_nothing_more() {
        for wrong in ["a b", "h:x", "u:p@h", "h?x", "h#x"] {
            assert_eq!(
                registry("https", wrong).map(drop).unwrap_err().kind(),
                Kind::Usage,
                "{wrong}"
            );
        }
        assert_eq!(registry("http", "h:5000").unwrap().base.as_str(), "http://h:5000/v2/a/b/");
    }
}
