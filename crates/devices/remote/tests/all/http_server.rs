//! The common part of the servers of the tests: connections, with TLS or without, requests, their bodies, and responses.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use openssl::ssl::{Ssl, SslContext, SslStream};

/// A request as it came.
#[derive(Debug, Clone)]
pub struct HttpRequest {
    pub method: String,
    pub target: String,
    /// Names in lower case.
    pub fields: BTreeMap<String, String>,
    /// Empty before a server has read it.
    pub body: Vec<u8>,
}

impl HttpRequest {
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// First and last byte of the range.
    pub fn range(&self) -> Option<(u64, u64)> {
        let (first, last) = self.field("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    }
}

/// A response: status, fields (each ended by CRLF), body.
pub type HttpAnswer = (u16, String, Vec<u8>);

/// A response without a body.
pub fn answer(status: u16) -> HttpAnswer {
    (status, String::new(), Vec::new())
}

/// The bytes of a response to a request.
pub fn response_bytes(request: &HttpRequest, (status, fields, body): &HttpAnswer) -> Vec<u8> {
    let has_body = !matches!(status, 204 | 304);
    let length =
        if has_body { format!("Content-Length: {}\r\n", body.len()) } else { String::new() };
    let mut bytes = format!("HTTP/1.1 {status} Status\r\n{fields}{length}\r\n").into_bytes();
    if has_body && request.method != "HEAD" {
        bytes.extend_from_slice(body);
    }
    bytes
}

/// The socket of a connection, with TLS or without.
pub trait HttpSocket: Read + Write {
    /// Ends the sending direction.
    fn end_writing(&self);
}

impl HttpSocket for TcpStream {
    fn end_writing(&self) {
        self.shutdown(Shutdown::Write).unwrap();
    }
}

impl HttpSocket for SslStream<TcpStream> {
    fn end_writing(&self) {
        self.get_ref().end_writing();
    }
}

/// A connection of a client.
pub type HttpConnection = BufReader<Box<dyn HttpSocket>>;

/// A server on the loopback interface, which ends with the process.
pub struct HttpServer {
    pub address: SocketAddr,
    log: Arc<RequestLog>,
    has_tls: bool,
}

#[derive(Default)]
struct RequestLog {
    requests: Mutex<Vec<HttpRequest>>,
    connections: AtomicUsize,
}

impl HttpServer {
    /// Starts a server. `serve` gets the number of each request, and sends the response; none: the connection ends.
    pub fn start(
        tls: Option<SslContext>,
        serve: impl Fn(usize, &HttpRequest, &mut HttpConnection) -> Option<()> + Send + Sync + 'static,
    ) -> HttpServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let log = Arc::new(RequestLog::default());
        let server = HttpServer { address, log: log.clone(), has_tls: tls.is_some() };
        let serve = Arc::new(serve);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, serve, tls) = (log.clone(), serve.clone(), tls.clone());
                log.connections.fetch_add(1, Ordering::SeqCst);
                // Head and body are sent apart.
                stream.set_nodelay(true).unwrap();
                thread::spawn(move || {
                    let socket: Box<dyn HttpSocket> = match tls {
                        None => Box::new(stream),
                        Some(context) => {
                            let mut stream =
                                SslStream::new(Ssl::new(&context).unwrap(), stream).unwrap();
                            if stream.accept().is_err() {
                                return;
                            }
                            Box::new(stream)
                        }
                    };
                    let mut connection = BufReader::new(socket);
                    while let Some(request) = read_request(&mut connection) {
                        let number = {
                            let mut requests = log.requests.lock().unwrap();
                            requests.push(request.clone());
                            requests.len() - 1
                        };
                        if serve(number, &request, &mut connection).is_none() {
                            return;
                        }
                    }
                });
            }
        });
        server
    }

    /// The scheme of its URLs.
    pub fn scheme(&self) -> &'static str {
        if self.has_tls { "https" } else { "http" }
    }

    pub fn requests(&self) -> Vec<HttpRequest> {
        self.log.requests.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        self.log.connections.load(Ordering::SeqCst)
    }
}

fn read_request(stream: &mut impl BufRead) -> Option<HttpRequest> {
    let mut line = String::new();
    stream.read_line(&mut line).ok().filter(|read| *read > 0)?;
    let mut words = line.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut fields = BTreeMap::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        fields.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    Some(HttpRequest { method, target, fields, body: Vec::new() })
}

/// At least the first `most` bytes of the body of a request, or all of it. None: the connection has ended.
pub fn read_body(
    stream: &mut HttpConnection,
    request: &HttpRequest,
    most: usize,
) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    if let Some(length) = request.field("content-length") {
        body.resize(length.parse::<usize>().unwrap().min(most), 0);
        stream.read_exact(&mut body).ok()?;
        return Some(body);
    }
    if request.field("transfer-encoding").is_none() {
        return Some(body);
    }
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).ok().filter(|len| *len > 0)?;
        let len = usize::from_str_radix(line.trim(), 16).unwrap();
        let mut part = vec![0; len + 2];
        stream.read_exact(&mut part).ok()?;
        body.extend_from_slice(&part[..len]);
        if len == 0 || body.len() >= most {
            return Some(body);
        }
    }
}
