//! A small WebDAV server with files in memory, and faults.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use crate::http_server::{
    HttpAnswer, HttpConnection, HttpRequest, HttpServer, answer, read_body, response_bytes,
};

/// A fault of one response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DavFault {
    None,
    /// A status with these fields, each ended by CRLF, before the body of the request is read.
    Status(u16, String),
    /// A status with this body, once the body of the request is read.
    Body(u16, String),
    /// A status after this many bytes of the body, then the end of the connection.
    StatusWithin(u16, usize),
    /// Only this many bytes of the body are stored.
    Shortened(usize),
    /// The request is carried out, and the connection ends without a response.
    Mute,
    /// The connection ends after this many bytes of the body.
    Cut(usize),
}

/// The files of a server, by their decoded paths, with a number for each version.
#[derive(Debug, Default)]
pub struct DavFiles {
    pub files: BTreeMap<String, (Arc<Vec<u8>>, u64)>,
    pub directories: BTreeSet<String>,
    pub locks: BTreeSet<String>,
    pub versions: u64,
    pub has_tags: bool,
}

impl DavFiles {
    pub fn put(&mut self, path: &str, bytes: Vec<u8>) {
        self.versions += 1;
        self.files.insert(path.to_owned(), (Arc::new(bytes), self.versions));
    }

    pub fn make_directory(&mut self, path: &str) {
        self.directories.insert(path.to_owned());
    }

    pub fn lock(&mut self, path: &str) {
        self.locks.insert(path.to_owned());
    }

    pub fn names(&self) -> Vec<&str> {
        self.files.keys().map(String::as_str).collect()
    }
}

type DavChoice = dyn Fn(usize, &HttpRequest, &Mutex<DavFiles>) -> DavFault + Send + Sync;

/// A server on the loopback interface.
pub struct DavServer {
    server: HttpServer,
    shared: Arc<SharedDav>,
}

struct SharedDav {
    files: Mutex<DavFiles>,
    fault: Box<DavChoice>,
    lingers: bool,
}

impl DavServer {
    /// Starts a server with the directories `/` and `/d`; `fault` gets the number of each request.
    pub fn start(
        fault: impl Fn(usize, &HttpRequest, &Mutex<DavFiles>) -> DavFault + Send + Sync + 'static,
    ) -> DavServer {
        DavServer::with(true, Box::new(fault))
    }

    /// A server that closes connections without reading what is left of a request.
    pub fn abrupt(
        fault: impl Fn(usize, &HttpRequest, &Mutex<DavFiles>) -> DavFault + Send + Sync + 'static,
    ) -> DavServer {
        DavServer::with(false, Box::new(fault))
    }

    fn with(lingers: bool, fault: Box<DavChoice>) -> DavServer {
        let directories = ["/", "/d"].map(str::to_owned).into();
        let files = Mutex::new(DavFiles { directories, has_tags: true, ..DavFiles::default() });
        let shared = Arc::new(SharedDav { files, fault, lingers });
        let all = shared.clone();
        let server = HttpServer::start(None, move |number, request, stream| {
            let fault = (all.fault)(number, request, &all.files);
            all.serve(stream, request, &fault)
        });
        DavServer { server, shared }
    }

    pub fn plain() -> DavServer {
        DavServer::start(|_, _, _| DavFault::None)
    }

    pub fn url(&self, path: &str) -> String {
        format!("dav://{}{path}", self.address())
    }

    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    pub fn requests(&self) -> Vec<HttpRequest> {
        self.server.requests()
    }

    pub fn files(&self) -> std::sync::MutexGuard<'_, DavFiles> {
        self.shared.files.lock().unwrap()
    }

    pub fn bytes(&self, path: &str) -> Option<Arc<Vec<u8>>> {
        self.files().files.get(path).map(|(bytes, _)| bytes.clone())
    }
}

impl SharedDav {
    /// None: the connection ends.
    fn serve(
        &self,
        stream: &mut HttpConnection,
        request: &HttpRequest,
        fault: &DavFault,
    ) -> Option<()> {
        let has_body = request.method == "PUT";
        if let DavFault::Status(status, fields) = fault {
            let fields =
                if has_body { format!("{fields}Connection: close\r\n") } else { fields.clone() };
            send(stream, request, (*status, fields, b"no".to_vec()))?;
            return (!has_body).then_some(());
        }
        let most = match fault {
            DavFault::StatusWithin(_, most) | DavFault::Cut(most) => *most,
            _ => usize::MAX,
        };
        let mut body = Vec::new();
        if has_body {
            if request.field("expect").is_some() {
                stream.get_mut().write_all(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
            }
            body = read_body(stream, request, most)?;
        }
        match fault {
            DavFault::StatusWithin(status, _) => {
                let fields = "Connection: close\r\n".to_owned();
                send(stream, request, (*status, fields, b"no".to_vec()));
                if self.lingers {
                    // As Apache and nginx: else the response may be lost with the data that nobody reads.
                    stream.get_mut().end_writing();
                    let _ = std::io::copy(stream, &mut std::io::sink());
                }
                return None;
            }
            DavFault::Body(status, body) => {
                let answer = (*status, String::new(), body.clone().into_bytes());
                return send(stream, request, answer);
            }
            DavFault::Cut(_) => return None,
            DavFault::Shortened(len) => body.truncate(*len),
            _ => {}
        }
        let answer = self.carry_out(request, body);
        if *fault == DavFault::Mute {
            return None;
        }
        send(stream, request, answer)
    }

    fn carry_out(&self, request: &HttpRequest, body: Vec<u8>) -> HttpAnswer {
        let mut files = self.files.lock().unwrap();
        let path = path_of(&request.target);
        let parent = |path: &str| match path.rsplit_once('/').unwrap().0 {
            "" => "/".to_owned(),
            parent => parent.to_owned(),
        };
        let plain = path.trim_end_matches('/');
        let is_directory = files.directories.contains(if plain.is_empty() { "/" } else { plain });
        let file = files.files.get(&path).cloned();
        match request.method.as_str() {
            "OPTIONS" => (200, "DAV: 1,2\r\nAllow: OPTIONS\r\n".to_owned(), Vec::new()),
            "PROPFIND" => {
                let property = match &file {
                    _ if is_directory => {
                        "<D:resourcetype><D:collection/></D:resourcetype>".to_owned()
                    }
                    Some((bytes, version)) => {
                        let etag = format!("<D:getetag>\"v{version}\"</D:getetag>");
                        format!(
                            "<D:resourcetype/><D:getcontentlength>{}</D:getcontentlength>{}",
                            bytes.len(),
                            if files.has_tags { etag } else { String::new() }
                        )
                    }
                    None => return answer(404),
                };
                let lock = files.locks.contains(&path).then_some(
                    "<D:lockdiscovery><D:activelock><D:owner>someone</D:owner><D:locktoken><D:href>urn:uuid:7\
                     </D:href></D:locktoken></D:activelock></D:lockdiscovery>",
                );
                let text = format!(
                    "<D:multistatus xmlns:D=\"DAV:\"><D:response><D:href>{}</D:href><D:propstat><D:prop>{property}{}\
                     </D:prop></D:propstat></D:response></D:multistatus>",
                    request.target,
                    lock.unwrap_or_default()
                );
                (207, String::new(), text.into_bytes())
            }
            "GET" | "HEAD" => match file {
                Some((bytes, version)) => {
                    let etag = format!("ETag: \"v{version}\"\r\n");
                    match request.range().filter(|_| !bytes.is_empty()) {
                        Some((first, last)) => {
                            let end = bytes.len().min(last as usize + 1);
                            let range = format!(
                                "{etag}Content-Range: bytes {first}-{}/{}\r\n",
                                end - 1,
                                bytes.len()
                            );
                            (206, range, bytes[first as usize..end].to_vec())
                        }
                        None => (200, etag, bytes.to_vec()),
                    }
                }
                None => answer(404),
            },
            "PUT" if files.locks.contains(&path) => answer(423),
            "PUT" if !files.directories.contains(&parent(&path)) => answer(409),
            "PUT" if is_directory => answer(405),
            "PUT" => {
                files.put(&path, body);
                answer(201)
            }
            "DELETE" => match files.files.remove(&path) {
                Some(_) => answer(204),
                None => answer(404),
            },
            "MOVE" => move_file(&mut files, request, &path, file),
            _ => answer(405),
        }
    }
}

fn move_file(
    files: &mut DavFiles,
    request: &HttpRequest,
    from: &str,
    file: Option<(Arc<Vec<u8>>, u64)>,
) -> HttpAnswer {
    let Some(file) = file else { return answer(404) };
    let to = request.field("destination").unwrap().strip_prefix("http://").unwrap();
    let to = path_of(&to[to.find('/').unwrap()..]);
    let there = files.files.get(&to).map(|(_, version)| *version);
    if files.locks.contains(&to) {
        return answer(423);
    }
    if let Some(condition) = request.field("if") {
        let is_met =
            there.is_some_and(|version| condition.ends_with(&format!("([\"v{version}\"])")));
        if !is_met {
            return answer(412);
        }
    }
    let is_there = there.is_some() || files.directories.contains(&to);
    if is_there && request.field("overwrite") == Some("F") {
        return answer(412);
    }
    // As the standard says: a directory is replaced, too.
    files.directories.remove(&to);
    files.files.remove(from);
    files.files.insert(to, file);
    answer(if is_there { 204 } else { 201 })
}

fn path_of(target: &str) -> String {
    blockhaul_catalog::percent_decode(target).unwrap()
}

fn send(stream: &mut HttpConnection, request: &HttpRequest, answer: HttpAnswer) -> Option<()> {
    stream.get_mut().write_all(&response_bytes(request, &answer)).ok()
}
