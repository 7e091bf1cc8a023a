//! A small HTTP server with one object, and faults.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use openssl::ssl::SslContext;

use crate::http_server::{HttpRequest, HttpServer};

/// A fault of one response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Ranges are ignored.
    NoRanges,
    /// A status with these fields, each ended by CRLF.
    Status(u16, String),
    /// The connection ends after this many bytes of the body.
    Cut(usize),
    /// At most this many bytes of the range, as a valid response.
    Shorter(usize),
    /// The connection ends before the response.
    Drop,
    /// The response begins after this time.
    Delay(Duration),
    /// The body comes in chunks.
    Chunked,
    /// A response of HTTP/1.0, which ends with the connection.
    Http10,
    /// The connection ends after the response.
    Close,
    /// These fields more.
    Fields(String),
    /// These bytes instead of a response, then the end of the connection.
    Bytes(Vec<u8>),
    /// No response; the connection stays open for this time.
    Silent(Duration),
    /// A body without end.
    Endless,
    /// The body in pieces of this many bytes, with a pause between them.
    Slow(usize, Duration),
    /// The range begins this many bytes later than it was asked for.
    Shifted(u64),
    /// The size of the object is not told.
    NoSize,
}

/// What the server has.
#[derive(Debug, Clone)]
pub struct ServedObject {
    pub bytes: Arc<Vec<u8>>,
    pub etag: Option<String>,
    pub modified: Option<String>,
}

impl ServedObject {
    pub fn new(bytes: Vec<u8>) -> ServedObject {
        let etag = Some("\"one\"".to_owned());
        let modified = Some("Sun, 06 Nov 1994 08:49:37 GMT".to_owned());
        ServedObject { bytes: Arc::new(bytes), etag, modified }
    }
}

type FaultChoice = dyn Fn(usize, &HttpRequest, &Mutex<ServedObject>) -> Fault + Send + Sync;

/// A server on the loopback interface.
pub struct ObjectServer {
    server: HttpServer,
}

impl ObjectServer {
    /// Starts a server; `fault` gets the number of each request.
    pub fn start(
        object: ServedObject,
        fault: impl Fn(usize, &HttpRequest, &Mutex<ServedObject>) -> Fault + Send + Sync + 'static,
    ) -> ObjectServer {
        ObjectServer::serve(object, None, Box::new(fault))
    }

    /// Starts a server with TLS.
    pub fn secure(object: ServedObject, context: SslContext) -> ObjectServer {
        ObjectServer::serve(object, Some(context), Box::new(|_, _, _| Fault::None))
    }

    fn serve(
        object: ServedObject,
        tls: Option<SslContext>,
        fault: Box<FaultChoice>,
    ) -> ObjectServer {
        let object = Mutex::new(object);
        let server = HttpServer::start(tls, move |number, request, stream| {
            let fault = fault(number, request, &object);
            let object = object.lock().unwrap().clone();
            let ends = answer(stream.get_mut(), request, &object, &fault).unwrap_or(true);
            (!ends).then_some(())
        });
        ObjectServer { server }
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}://{}{path}", self.server.scheme(), self.server.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    pub fn requests(&self) -> Vec<HttpRequest> {
        self.server.requests()
    }

    pub fn connections(&self) -> usize {
        self.server.connections()
    }
}

/// Sends a response; whether the connection ends.
fn answer(
    out: &mut impl Write,
    request: &HttpRequest,
    object: &ServedObject,
    fault: &Fault,
) -> std::io::Result<bool> {
    match fault {
        Fault::Drop => return Ok(true),
        Fault::Delay(time) => thread::sleep(*time),
        Fault::Silent(time) => {
            thread::sleep(*time);
            return Ok(true);
        }
        Fault::Bytes(bytes) => {
            out.write_all(bytes)?;
            return Ok(true);
        }
        Fault::Status(status, fields) => {
            let text = "no";
            let length = text.len();
            write!(
                out,
                "HTTP/1.1 {status} Fault\r\n{fields}Content-Length: {length}\r\n\r\n{text}"
            )?;
            return Ok(false);
        }
        _ => {}
    }
    let size = object.bytes.len() as u64;
    let mut head = String::new();
    if let Some(etag) = &object.etag {
        head += &format!("ETag: {etag}\r\n");
    }
    if let Some(modified) = &object.modified {
        head += &format!("Last-Modified: {modified}\r\n");
    }
    let condition = request.field("if-match");
    let time = request.field("if-unmodified-since");
    if condition.is_some_and(|etag| Some(etag) != object.etag.as_deref())
        || time.is_some_and(|time| Some(time) != object.modified.as_deref())
    {
        write!(out, "HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n")?;
        return Ok(false);
    }
    let range = request.range().filter(|_| *fault != Fault::NoRanges);
    let (status, first, end) = match range {
        Some((first, _)) if first >= size => {
            let fields = format!("Content-Range: bytes */{size}\r\nContent-Length: 0\r\n");
            write!(out, "HTTP/1.1 416 Range Not Satisfiable\r\n{fields}\r\n")?;
            return Ok(false);
        }
        Some((first, last)) => {
            let shift = if let Fault::Shifted(shift) = fault { *shift } else { 0 };
            let mut end = size.min(last + 1);
            if let Fault::Shorter(most) = fault {
                end = end.min(first + *most as u64);
            }
            let total = if *fault == Fault::NoSize { "*".to_owned() } else { size.to_string() };
            let from = first + shift;
            head += &format!("Content-Range: bytes {from}-{}/{total}\r\n", end - 1 + shift);
            ("206 Partial Content", first, end)
        }
        None => ("200 OK", 0, size),
    };
    let body = &object.bytes[first as usize..end as usize];
    let ends = matches!(fault, Fault::Http10 | Fault::Close | Fault::Endless | Fault::Cut(_));
    if ends {
        head += "Connection: close\r\n";
    }
    if let Fault::Fields(more) = fault {
        head += more;
    }
    let version = if *fault == Fault::Http10 { "1.0" } else { "1.1" };
    match fault {
        Fault::Chunked => head += "Transfer-Encoding: chunked\r\n",
        Fault::Http10 | Fault::Endless => {}
        _ => head += &format!("Content-Length: {}\r\n", body.len()),
    }
    write!(out, "HTTP/{version} {status}\r\n{head}\r\n")?;
    if request.method == "HEAD" {
        return Ok(ends);
    }
    match fault {
        Fault::Cut(most) => out.write_all(&body[..body.len().min(*most)])?,
        Fault::Chunked => {
            for part in body.chunks(1000) {
                write!(out, "{:x}\r\n", part.len())?;
                out.write_all(part)?;
                out.write_all(b"\r\n")?;
            }
            out.write_all(b"0\r\n\r\n")?;
        }
        Fault::Endless => loop {
            out.write_all(if body.is_empty() { b"x" } else { body })?;
        },
        Fault::Slow(bytes, pause) => {
            for part in body.chunks(*bytes) {
                out.write_all(part)?;
                out.flush()?;
                thread::sleep(*pause);
            }
        }
        _ => out.write_all(body)?,
    }
    out.flush()?;
    Ok(ends)
}
