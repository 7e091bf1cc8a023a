//! The part of HTTP/1.1 that the metrics listener needs: short requests without a body, one for each
//! connection.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use blockhaul_io::Stream;

use crate::destination::ScrapeAddress;
use crate::peer_listener;

/// Longer requests are refused: those of Prometheus and browsers are much shorter.
pub const REQUEST_MAX: usize = 8 << 10;

/// Maximum time for a request, and for sending a reply or an event.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// The headers of every reply. Pages of other origins can neither read a reply nor embed it, and
/// ours loads nothing from elsewhere.
const STRICT: &str = "Connection: close\r\n\
    Cache-Control: no-store\r\n\
    Content-Security-Policy: default-src 'self'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'\r\n\
    Cross-Origin-Resource-Policy: same-origin\r\n\
    Referrer-Policy: no-referrer\r\n\
    X-Content-Type-Options: nosniff\r\n";

/// Reads the head of a request. `Some(None)`: it is longer than [`REQUEST_MAX`]; `None`: the peer
/// closed the connection before its end.
pub async fn read(peer: &Stream) -> std::io::Result<Option<Option<Vec<u8>>>> {
    let mut request = Vec::new();
    loop {
        if let Some(end) = request.windows(4).position(|four| four == b"\r\n\r\n") {
            request.truncate(end);
            return Ok(Some(Some(request)));
        }
        if request.len() >= REQUEST_MAX {
            return Ok(Some(None));
        }
        if !peer_listener::receive(peer, &mut request).await? {
            return Ok(None);
        }
    }
}

/// A request that can be answered.
#[derive(Debug, PartialEq, Eq)]
pub struct HttpRequest<'a> {
    /// Only the head of the reply is requested.
    pub head: bool,
    /// The path, without the query.
    pub path: &'a str,
    /// Host and port, as the client names this server; HTTP/1.0 allows to leave them out.
    pub host: Option<&'a str>,
}

/// Parses the head of a request; else returns the status of the reply.
pub fn parse(request: &[u8]) -> Result<HttpRequest<'_>, &'static str> {
    const BAD: &str = "400 Bad Request";
    let text = std::str::from_utf8(request).map_err(|_| BAD)?;
    let mut lines = text.split("\r\n");
    let words: Vec<_> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else { return Err(BAD) };
    if !version.starts_with("HTTP/1.") || target.is_empty() {
        return Err(BAD);
    }
    let mut host = None;
    for line in lines {
        let (name, value) = line.split_once(':').ok_or(BAD)?;
        if name.eq_ignore_ascii_case("host") && host.replace(value.trim()).is_some() {
            return Err(BAD);
        }
    }
    if host.is_none() && version != "HTTP/1.0" {
        return Err(BAD);
    }
    if method != "GET" && method != "HEAD" {
        return Err("405 Method Not Allowed");
    }
    // The absolute form of a target, which proxies send, has a host that overrides the header.
    let path = match target.strip_prefix("http://") {
        None => target,
        Some(rest) => {
            let start = rest.find('/').unwrap_or(rest.len());
            host = Some(&rest[..start]);
            &rest[start..]
        }
    };
    let path = path.split('?').next().unwrap_or_default();
    Ok(HttpRequest { head: method == "HEAD", path: if path.is_empty() { "/" } else { path }, host })
}

/// Whether a client may name a server on this address so. A page of another site whose name leads
/// to this machine (DNS rebinding) names that site. A proxy before a Unix socket may pass any name.
pub fn is_ours(host: Option<&str>, address: &ScrapeAddress) -> bool {
    let (Some(host), ScrapeAddress::Tcp { name, .. }) = (host, address) else { return true };
    let (host, port) = match host.rfind(':') {
        Some(colon) if !host.ends_with(']') => host.split_at(colon),
        _ => (host, ""),
    };
    if !port.chars().skip(1).all(|digit| digit.is_ascii_digit()) {
        return false;
    }
    let inner = host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
    let is_v6 = inner.is_some_and(|inner| inner.parse().is_ok_and(|ip: Ipv6Addr| ip.is_loopback()));
    let is_v4 = host.parse().is_ok_and(|ip: Ipv4Addr| ip.is_loopback());
    is_v6 || is_v4 || ["localhost", name].iter().any(|name| host.eq_ignore_ascii_case(name))
}

/// A reply with its body.
#[derive(Debug)]
pub struct HttpReply {
    status: &'static str,
    kind: &'static str,
    body: Vec<u8>,
}

impl HttpReply {
    /// A body of this media type.
    pub fn ok(kind: &'static str, body: impl Into<Vec<u8>>) -> HttpReply {
        HttpReply { status: "200 OK", kind, body: body.into() }
    }

    /// A status that is not a success, with a text for users.
    pub fn refused(status: &'static str, text: &str) -> HttpReply {
        let body =
            if text.is_empty() { format!("{status}\n") } else { format!("{status}: {text}\n") };
        HttpReply { status, kind: "text/plain; charset=utf-8", body: body.into_bytes() }
    }

    /// The bytes to send; `head`: without the body.
    pub fn bytes(self, head: bool) -> Vec<u8> {
        let allow = if self.status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
        let HttpReply { status, kind, body } = self;
        let len = body.len();
        let mut bytes = format!(
            "HTTP/1.1 {status}\r\n{STRICT}{allow}Content-Type: {kind}\r\nContent-Length: {len}\r\n\r\n"
        )
        .into_bytes();
        if !head {
            bytes.extend_from_slice(&body);
        }
        bytes
    }
}

/// The head of a stream of events, which ends with the connection.
pub fn events_head() -> String {
    format!("HTTP/1.1 200 OK\r\n{STRICT}Content-Type: text/event-stream\r\n\r\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_parsed_strictly() {
        let request = |path, host| Ok(HttpRequest { head: false, path, host });
        assert_eq!(parse(b"GET /a?b HTTP/1.1\r\nhOsT:  x:1 \r\nA: b"), request("/a", Some("x:1")));
        assert_eq!(parse(b"GET / HTTP/1.0"), request("/", None));
        assert_eq!(parse(b"GET http://h HTTP/1.1\r\nHost: x"), request("/", Some("h")));
        assert!(parse(b"HEAD / HTTP/1.0").unwrap().head);
        for bad in [
            "",
            "GET",
            "GET  HTTP/1.1",
            "GET / HTTP/1.1",
            "GET / SPDY/9\r\nHost: x",
            "GET / HTTP/1.1\r\nHost",
            "GET / HTTP/1.1\r\nHost: a\r\nHost: b",
            "GET / / HTTP/1.1\r\nHost: a",
        ] {
            assert_eq!(parse(bad.as_bytes()), Err("400 Bad Request"), "{bad}");
        }
        assert_eq!(parse(b"\xff\xfe"), Err("400 Bad Request"));
        assert_eq!(parse(b"POST / HTTP/1.0"), Err("405 Method Not Allowed"));
    }

    #[test]
    fn only_names_of_this_machine_are_ours() {
        let address: ScrapeAddress = "localhost:9".parse().unwrap();
        for ours in ["localhost", "LOCALHOST:8080", "127.0.0.1:9", "127.9.9.9", "[::1]", "[::1]:9"]
        {
            assert!(is_ours(Some(ours), &address), "{ours}");
        }
        for other in [
            "",
            "evil.example",
            "evil.example:9",
            "localhost.evil.example",
            "192.0.2.1:9",
            "localhost:9x",
            "[::2]:9",
            "::1",
            "127.0.0.1.evil.example",
            "[::1",
            "localhost:1:2",
        ] {
            assert!(!is_ours(Some(other), &address), "{other}");
            assert!(is_ours(Some(other), &ScrapeAddress::Unix("/s".into())), "{other}");
        }
        assert!(is_ours(None, &address), "HTTP/1.0");
        let ScrapeAddress::Tcp { address, .. } = address else { panic!() };
        let named = ScrapeAddress::Tcp { address, name: "build-7".to_string() };
        assert!(is_ours(Some("Build-7:9"), &named), "as it was given");
    }
}
