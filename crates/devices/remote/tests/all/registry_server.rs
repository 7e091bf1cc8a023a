//! A small registry (OCI distribution specification): it has images, takes images, wants tokens, and redirects.

use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::server::{HttpRequest, read_request};

/// A response: status, fields (each ended by CRLF), body.
pub type RegistryAnswer = (u16, String, Vec<u8>);

/// A field of responses that are sent in half.
pub const CUT: &str = "X-Cut: yes\r\n";

type RegistryChoice = dyn Fn(&HttpRequest) -> Option<RegistryAnswer> + Send + Sync;

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
    pub address: SocketAddr,
    shared: Arc<SharedRegistry>,
}

struct SharedRegistry {
    contents: Mutex<RegistryContents>,
    /// Answers in place of the registry.
    choice: Box<RegistryChoice>,
    requests: Mutex<Vec<HttpRequest>>,
}

pub fn digest(bytes: &[u8]) -> String {
    let hex: String =
        openssl::sha::sha256(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

impl RegistryServer {
    pub fn start(
        choice: impl Fn(&HttpRequest) -> Option<RegistryAnswer> + Send + Sync + 'static,
    ) -> RegistryServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(SharedRegistry {
            contents: Mutex::default(),
            choice: Box::new(choice),
            requests: Mutex::default(),
        });
        let all = shared.clone();
        // It ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = all.clone();
                stream.set_nodelay(true).unwrap();
                thread::spawn(move || shared.talk(stream));
            }
        });
        RegistryServer { address, shared }
    }

    pub fn plain() -> RegistryServer {
        RegistryServer::start(|_| None)
    }

    pub fn spec(&self, image: &str) -> String {
        format!("oci://{}/{image}", self.address)
    }

    pub fn requests(&self) -> Vec<HttpRequest> {
        self.shared.requests.lock().unwrap().clone()
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

fn answer(status: u16) -> RegistryAnswer {
    (status, String::new(), Vec::new())
}

impl SharedRegistry {
    fn talk(&self, stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        while let Some(request) = read_request(&mut stream) {
            let Some(body) = read_body(&mut stream, &request) else { return };
            self.requests.lock().unwrap().push(request.clone());
            let chosen = (self.choice)(&request);
            let (status, fields, body) = chosen.unwrap_or_else(|| self.serve(&request, body));
            let length = body.len();
            let mut bytes =
                format!("HTTP/1.1 {status} Status\r\n{fields}Content-Length: {length}\r\n\r\n")
                    .into_bytes();
            if request.method != "HEAD" {
                bytes.extend_from_slice(&body);
            }
            // The connection ends within the body.
            let is_cut = fields.contains(CUT);
            if is_cut {
                bytes.truncate(bytes.len() - length / 2);
            }
            if stream.get_mut().write_all(&bytes).is_err() || is_cut {
                return;
            }
        }
    }

    fn serve(&self, request: &HttpRequest, body: Vec<u8>) -> RegistryAnswer {
        let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
        let Some(path) = path.strip_prefix("/v2/") else { return answer(404) };
        let mut contents = self.contents.lock().unwrap();
        let query = query.replace("%3A", ":");
        let wanted = query.split('&').find_map(|pair| pair.strip_prefix("digest="));
        if path.is_empty() {
            return answer(200);
        }
        if let Some((name, upload)) = path.split_once("/blobs/uploads/") {
            return take(&mut contents, request, (name, upload), wanted, body);
        }
        if let Some((_, digest)) = path.split_once("/blobs/") {
            return match contents.blobs.get(digest) {
                Some(bytes) => send(request, bytes),
                None => answer(404),
            };
        }
        match request.method.as_str() {
            "PUT" => {
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
    body: Vec<u8>,
) -> RegistryAnswer {
    let number = upload.parse().unwrap_or_else(|_| {
        contents.count += 1;
        contents.count
    });
    let part = contents.uploads.entry(number).or_default();
    part.extend_from_slice(&body);
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
pub fn send(request: &HttpRequest, bytes: &[u8]) -> RegistryAnswer {
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

fn read_body(stream: &mut BufReader<TcpStream>, request: &HttpRequest) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    if let Some(length) = request.field("content-length") {
        body.resize(length.parse().unwrap(), 0);
        stream.read_exact(&mut body).ok()?;
    } else if request.field("transfer-encoding").is_some() {
        loop {
            let mut line = String::new();
            std::io::BufRead::read_line(stream, &mut line).ok().filter(|len| *len > 0)?;
            let len = usize::from_str_radix(line.trim(), 16).unwrap();
            let mut part = vec![0; len + 2];
            stream.read_exact(&mut part).ok()?;
            body.extend_from_slice(&part[..len]);
            if len == 0 {
                break;
            }
        }
    }
    Some(body)
}
