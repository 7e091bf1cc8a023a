//! A small registry (OCI distribution specification): it has images, takes images, wants tokens, and redirects.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use openssl::ssl::SslContext;

use crate::http_server::{
    HttpAnswer, HttpConnection, HttpRequest, HttpServer, answer, read_body, response_bytes,
};

/// A field of responses that are sent in half.
pub const CUT: &str = "X-Cut: yes\r\n";

type RegistryChoice = dyn Fn(&HttpRequest) -> Option<HttpAnswer> + Send + Sync;

/// The contents of a registry.
#[derive(Debug, Default)]
pub struct RegistryContents {
    pub blobs: BTreeMap<String, Arc<Vec<u8>>>,
    /// By `NAME/manifests/TAG` or `NAME/manifests/DIGEST`: type and bytes.
    pub manifests: BTreeMap<String, (String, Vec<u8>)>,
    uploads: BTreeMap<usize, Vec<u8>>,
    count: usize,
}

/// A registry on the loopback interface.
pub struct RegistryServer {
    server: HttpServer,
    shared: Arc<SharedRegistry>,
}

struct SharedRegistry {
    contents: Mutex<RegistryContents>,
    /// Answers in place of the registry.
    choice: Box<RegistryChoice>,
}

pub fn digest(bytes: &[u8]) -> String {
    let hex: String =
        openssl::sha::sha256(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

impl RegistryServer {
    pub fn start(
        choice: impl Fn(&HttpRequest) -> Option<HttpAnswer> + Send + Sync + 'static,
    ) -> RegistryServer {
        RegistryServer::serve(None, Box::new(choice))
    }

    /// Starts a registry with TLS.
    pub fn secure(
        context: SslContext,
        choice: impl Fn(&HttpRequest) -> Option<HttpAnswer> + Send + Sync + 'static,
    ) -> RegistryServer {
        RegistryServer::serve(Some(context), Box::new(choice))
    }

    fn serve(tls: Option<SslContext>, choice: Box<RegistryChoice>) -> RegistryServer {
        let shared = Arc::new(SharedRegistry { contents: Mutex::default(), choice });
        let all = shared.clone();
        let server = HttpServer::start(tls, move |_, request, stream| all.talk(stream, request));
        RegistryServer { server, shared }
    }

    pub fn plain() -> RegistryServer {
        RegistryServer::start(|_| None)
    }

    pub fn spec(&self, image: &str) -> String {
        format!("oci://{}/{image}", self.address())
    }

    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    pub fn requests(&self) -> Vec<HttpRequest> {
        self.server.requests()
    }

    pub fn contents(&self) -> std::sync::MutexGuard<'_, RegistryContents> {
        self.shared.contents.lock().unwrap()
    }

    /// Stores a blob; its descriptor.
    pub fn add_blob(&self, media_type: &str, bytes: Vec<u8>, more: &str) -> String {
        let (digest, size) = (digest(&bytes), bytes.len());
        self.contents().blobs.insert(digest.clone(), Arc::new(bytes));
        format!("{{\"mediaType\":\"{media_type}\",\"digest\":\"{digest}\",\"size\":{size}{more}}}")
    }

    /// Stores a manifest with a tag; its digest.
    pub fn add_manifest(&self, name: &str, tag: &str, text: String) -> String {
        let digest = digest(text.as_bytes());
        let mut contents = self.contents();
        for version in [tag, &digest] {
            let known = (
                "application/vnd.oci.image.manifest.v1+json".to_owned(),
                text.clone().into_bytes(),
            );
            contents.manifests.insert(format!("{name}/manifests/{version}"), known);
        }
        digest
    }
}

impl SharedRegistry {
    /// None: the connection ends.
    fn talk(&self, stream: &mut HttpConnection, request: &HttpRequest) -> Option<()> {
        let body = read_body(stream, request, usize::MAX)?;
        let request = HttpRequest { body, ..request.clone() };
        let answer = (self.choice)(&request).unwrap_or_else(|| self.serve(&request));
        let mut bytes = response_bytes(&request, &answer);
        // The connection ends within the body.
        let is_cut = answer.1.contains(CUT);
        if is_cut {
            bytes.truncate(bytes.len() - answer.2.len() / 2);
        }
        stream.get_mut().write_all(&bytes).ok()?;
        (!is_cut).then_some(())
    }

    fn serve(&self, request: &HttpRequest) -> HttpAnswer {
        let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
        let Some(path) = path.strip_prefix("/v2/") else { return answer(404) };
        let mut contents = self.contents.lock().unwrap();
        let query = query.replace("%3A", ":");
        let wanted = query.split('&').find_map(|pair| pair.strip_prefix("digest="));
        if path.is_empty() {
            return answer(200);
        }
        if let Some((name, upload)) = path.split_once("/blobs/uploads/") {
            return take(&mut contents, request, (name, upload), wanted);
        }
        if let Some((_, digest)) = path.split_once("/blobs/") {
            return match contents.blobs.get(digest) {
                Some(bytes) => send(request, bytes),
                None => answer(404),
            };
        }
        match request.method.as_str() {
            "PUT" => {
                let body = request.body.clone();
                let kind = request.field("content-type").unwrap_or_default().to_owned();
                let (name, _) = path.split_once("/manifests/").unwrap();
                let own = digest(&body);
                let by_digest = format!("{name}/manifests/{own}");
                contents.manifests.insert(by_digest, (kind.clone(), body.clone()));
                contents.manifests.insert(path.to_owned(), (kind, body));
                (
                    201,
                    format!("Docker-Content-Digest: {own}\r\nLocation: /v2/{path}\r\n"),
                    Vec::new(),
                )
            }
            _ => match contents.manifests.get(path) {
                Some((kind, bytes)) => {
                    let own = digest(bytes);
                    (
                        200,
                        format!("Content-Type: {kind}\r\nDocker-Content-Digest: {own}\r\n"),
                        bytes.clone(),
                    )
                }
                None => {
                    let text =
                        r#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}"#;
                    (404, "Content-Type: application/json\r\n".to_owned(), text.into())
                }
            },
        }
    }
}

/// A step of a push.
fn take(
    contents: &mut RegistryContents,
    request: &HttpRequest,
    (name, upload): (&str, &str),
    wanted: Option<&str>,
) -> HttpAnswer {
    let number = upload.parse().unwrap_or_else(|_| {
        contents.count += 1;
        contents.count
    });
    let part = contents.uploads.entry(number).or_default();
    part.extend_from_slice(&request.body);
    let end = part.len().saturating_sub(1);
    let place = format!("Location: /v2/{name}/blobs/uploads/{number}\r\nRange: 0-{end}\r\n");
    match (request.method.as_str(), wanted) {
        ("PUT", Some(wanted)) => {
            let bytes = contents.uploads.remove(&number).unwrap();
            assert_eq!(digest(&bytes), wanted);
            contents.blobs.insert(wanted.to_owned(), Arc::new(bytes));
            let fields = format!(
                "Location: /v2/{name}/blobs/{wanted}\r\nDocker-Content-Digest: {wanted}\r\n"
            );
            (201, fields, Vec::new())
        }
        _ => (202, place, Vec::new()),
    }
}

/// A blob, or the end of it.
pub fn send(request: &HttpRequest, bytes: &[u8]) -> HttpAnswer {
    let first = request.field("range").and_then(|range| range.strip_prefix("bytes="));
    let first = first.and_then(|range| range.split_once('-')?.0.parse::<usize>().ok());
    match first {
        Some(first) => {
            let field =
                format!("Content-Range: bytes {first}-{}/{}\r\n", bytes.len() - 1, bytes.len());
            (206, field, bytes[first..].to_vec())
        }
        None => (200, String::new(), bytes.to_vec()),
    }
}
