//! Requests to an HTTP/1.1 server, one after the other on a connection, for devices whose bytes are the
//! bodies of answers. Redirects are not followed: the fields of a request may be secrets.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::http::{self, EXCERPT_MAX, HEAD_MAX, HttpResponse};
use blockhaul_wire::printable;

use crate::connect::{ServerAddress, WaitReason, dial};
use crate::http_head::{BODY_MAX, head, more};
use crate::link::HandshakeLink;

/// Bytes that must arrive within the timeout.
const PIECE: usize = 256 << 10;

/// An HTTP server.
#[derive(Debug, Clone)]
pub struct HttpServer {
    /// Where it listens.
    pub address: ServerAddress,
    /// The field `Host`.
    pub host: String,
    /// TLS, if it is required.
    pub tls: Option<Arc<blockhaul_tls::TlsConnector>>,
    /// Time for dialling and the handshake of TLS; zero: none.
    pub connect_timeout: Duration,
    /// Time for an answer to begin, and for each 256 KiB of its body; zero: none.
    pub timeout: Duration,
}

impl HttpServer {
    /// Makes a connection. Call it on a worker, which carries out its requests.
    ///
    /// # Errors
    /// The server cannot be reached, or one side of TLS refuses the other.
    pub async fn connect(&self) -> Result<HttpConnection> {
        let awaited = WaitReason::new("connection");
        let work = async {
            let mut link = HandshakeLink::new(dial(&self.address).await?);
            if let Some(connector) = &self.tls {
                awaited.set("answer in the handshake of TLS");
                link.secure(connector).await?;
            }
            Ok(link)
        };
        let link = awaited.within(self.connect_timeout, work).await.map_err(|error| {
            let error = match error.kind() {
                Kind::NotFound | Kind::Io => {
                    error.or_remedy("check that the server runs, and where it listens")
                }
                Kind::Refused => error.or_remedy("check what the server requires"),
                _ => error,
            };
            error.reworded(format!("cannot connect to {}: {}", self.address, error.text()))
        })?;
        let host = self.host.clone();
        Ok(HttpConnection {
            link,
            host,
            timeout: self.timeout,
            body: Body::None,
            answers: 0,
            closes: false,
        })
    }
}

/// A connection to an HTTP server.
pub struct HttpConnection {
    link: HandshakeLink,
    host: String,
    timeout: Duration,
    body: Body,
    /// Answers that were received completely.
    answers: u64,
    closes: bool,
}

/// What is left of the body of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    None,
    /// This many bytes.
    Length(u64),
    /// This many bytes of a chunk, then more chunks.
    Chunk(u64),
    /// A chunk begins, or the end.
    BeforeChunk,
    /// All until the connection ends.
    UntilEnd,
}

impl HttpConnection {
    /// Sends a GET request, and returns the head of its answer. `target`: path and query, without spaces and
    /// control characters. `fields`: lines that end with CRLF.
    ///
    /// # Errors
    /// The connection is lost, or what comes is no answer.
    pub async fn get(&mut self, target: &str, fields: &str) -> Result<HttpResponse> {
        if self.body != Body::None || self.closes {
            return Err(Error::new(Kind::Disconnected, "an answer was not received completely"));
        }
        let version = env!("CARGO_PKG_VERSION");
        let host = &self.host;
        let mut out = format!(
            "GET {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: blockhaul/{version}\r\n\
             Accept-Encoding: identity\r\n{fields}\r\n"
        )
        .into_bytes();
        // Until the answer is here.
        self.closes = true;
        let awaited = WaitReason::new("answer to the HTTP request");
        let answers = self.answers;
        let link = &mut self.link;
        let answer = awaited.within(self.timeout, async {
            link.say(&mut out).await?;
            head(link, answers).await.map_err(|error| link.doubted(error))
        });
        let answer = answer.await?;
        self.closes = answer.closes || answer.status == 101;
        self.body = match (answer.status, answer.chunked, answer.length) {
            (101 | 204 | 304, ..) | (_, false, Some(0)) => Body::None,
            (_, true, _) => Body::BeforeChunk,
            (_, false, Some(length)) => Body::Length(length),
            (_, false, None) => Body::UntilEnd,
        };
        self.closes |= self.body == Body::UntilEnd;
        Ok(answer)
    }

    /// Whether another request can be sent.
    pub fn is_reusable(&self) -> bool {
        self.body == Body::None && !self.closes
    }

    /// Whether an answer was received on this connection before: then the server may have closed it since.
    pub fn has_answered(&self) -> bool {
        self.answers > 0
    }

    /// Fills `buf` with the body, which must end there.
    ///
    /// # Errors
    /// [`Kind::Io`] if it is shorter or longer; or the connection is lost.
    pub async fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        let wanted = buf.len();
        let mut filled = 0;
        while filled < wanted {
            let most = wanted.min(filled + PIECE);
            match self.read(&mut buf[filled..most]).await? {
                0 => {
                    let text = format!("the server sent {filled} bytes instead of {wanted}");
                    return Err(Error::new(Kind::Io, text));
                }
                read => filled += read,
            }
        }
        if self.read(&mut [0]).await? > 0 {
            let text =
                format!("the server sent more than the {wanted} bytes that it was asked for");
            return Err(Error::new(Kind::Io, text));
        }
        Ok(())
    }

    /// The body, at most `most` bytes.
    ///
    /// # Errors
    /// [`Kind::TooLarge`] if it is longer; or the connection is lost.
    pub async fn text(&mut self, most: usize) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let start = body.len();
            body.resize(most.saturating_add(1).min(start + (16 << 10)), 0);
            let read = self.read(&mut body[start..]).await?;
            body.truncate(start + read);
            if body.len() > most {
                let text = format!("the answer of the server has more than {most} bytes");
                return Err(Error::new(Kind::TooLarge, text));
            }
            if read == 0 {
                return Ok(body);
            }
        }
    }

    /// An answer that is no success as an error, with the beginning of its text.
    pub async fn refusal(&mut self, answer: &HttpResponse) -> Error {
        let mut body = vec![0; EXCERPT_MAX];
        let mut filled = 0;
        let due = blockhaul_io::now() + BODY_MAX;
        while filled < body.len() {
            let left = due.saturating_duration_since(blockhaul_io::now());
            // One at a time: what came before the connection was cut counts.
            let room = &mut body[filled..=filled];
            // Without all of it the status says enough.
            match blockhaul_io::timeout(left, self.read(room)).await {
                Ok(Ok(read)) if read > 0 => filled += read,
                _ => break,
            }
        }
        let said = printable(body[..filled].trim_ascii(), EXCERPT_MAX);
        let mut text = format!("the server answers \"{}\"", answer.line);
        if !said.is_empty() {
            text += &format!(": \"{said}\"");
        }
        let (kind, next) = match answer.status {
            300..=399 => {
                (Kind::Unsupported, "redirects are not followed: use the URL that it names")
            }
            401 | 403 | 407 => (Kind::Refused, ""),
            404 | 410 => (Kind::NotFound, ""),
            408 | 429 | 500..=599 => (Kind::Io, ""),
            _ => (Kind::Unsupported, ""),
        };
        if let Some(place) =
            answer.location.as_ref().filter(|_| (300..=399).contains(&answer.status))
        {
            text += &format!(", which names {place}");
        }
        if !next.is_empty() {
            text += &format!("; {next}");
        }
        Error::new(kind, text)
    }

    /// Reads some bytes of the body; 0: it has ended.
    async fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        let limit = self.timeout;
        let awaited = WaitReason::new("more of the answer");
        awaited.within(limit, self.read_on(out)).await
    }

    async fn read_on(&mut self, out: &mut [u8]) -> Result<usize> {
        let cut =
            || Error::new(Kind::Disconnected, "the server closed the connection within an answer");
        let receive = |error| Error::system("receive", error);
        let link = &mut self.link;
        if self.body == Body::BeforeChunk {
            let length = chunk(link).await?;
            self.body = if length == 0 { Body::None } else { Body::Chunk(length) };
        }
        let left = match self.body {
            Body::None | Body::BeforeChunk => {
                self.answers += 1;
                return Ok(0);
            }
            Body::UntilEnd => {
                while link.window.bytes().is_empty() {
                    if !more(link).await? {
                        self.body = Body::None;
                        return Ok(0);
                    }
                }
                let count = link.window.bytes().len().min(out.len());
                out[..count].copy_from_slice(&link.window.bytes()[..count]);
                link.window.consume(count);
                return Ok(count);
            }
            Body::Length(left) | Body::Chunk(left) => left,
        };
        let count = usize::try_from(left).map_or(out.len(), |left| left.min(out.len()));
        if !link.window.payload(&link.stream, &mut out[..count]).await.map_err(receive)? {
            return Err(cut());
        }
        let left = left - count as u64;
        self.body = match self.body {
            Body::Length(_) if left == 0 => Body::None,
            Body::Length(_) => Body::Length(left),
            _ if left > 0 => Body::Chunk(left),
            _ => {
                while link.window.bytes().len() < 2 {
                    if !more(link).await? {
                        return Err(cut());
                    }
                }
                if !link.window.bytes().starts_with(b"\r\n") {
                    return Err(Error::new(
                        Kind::Io,
                        "a chunk of the answer is longer than it says",
                    ));
                }
                link.window.consume(2);
                Body::BeforeChunk
            }
        };
        Ok(count)
    }
}

/// The length of the next chunk; after the last one also the fields behind it are consumed.
async fn chunk(link: &mut HandshakeLink) -> Result<u64> {
    let wrong = |error: http::HttpError| Error::new(Kind::Io, error.to_string());
    let cut =
        || Error::new(Kind::Disconnected, "the server closed the connection within an answer");
    let length = loop {
        match http::chunk(link.window.bytes()).map_err(wrong)? {
            Some((length, used)) => {
                link.window.consume(used);
                break length;
            }
            None if more(link).await? => {}
            None => return Err(cut()),
        }
    };
    if length > 0 {
        return Ok(length);
    }
    let mut seen = 0;
    loop {
        let bytes = link.window.bytes();
        let Some(end) = bytes.windows(2).position(|two| two == b"\r\n") else {
            if seen + bytes.len() > HEAD_MAX {
                return Err(Error::new(Kind::Io, "the answer has too many fields behind its body"));
            }
            if !more(link).await? {
                return Err(cut());
            }
            continue;
        };
        seen += end + 2;
        link.window.consume(end + 2);
        if end == 0 {
            return Ok(0);
        }
        if seen > HEAD_MAX {
            return Err(Error::new(Kind::Io, "the answer has too many fields behind its body"));
        }
    }
}
