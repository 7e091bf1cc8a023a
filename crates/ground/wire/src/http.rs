//! The HTTP/1.1 exchange in front of NBD: a request to upgrade the connection, and its answer
//! (RFC 9110, sections 7.8 and 15.2.2). Incus and LXD serve volumes so. Answers to other requests, and
//! the heads of the chunks of their bodies.

use std::fmt;

use crate::printable;

/// Maximum bytes of a request or an answer, up to the empty line.
pub const HEAD_MAX: usize = 16 << 10;
/// Maximum bytes of a refusal's text that are shown, before escaping.
pub const EXCERPT_MAX: usize = 1 << 10;

/// The answer of a server that goes on with NBD.
pub const SWITCHING: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: nbd\r\n\r\n";
/// The answer to a request for something else.
pub const UPGRADE_REQUIRED: &[u8] =
    b"HTTP/1.1 426 Upgrade Required\r\nConnection: close, Upgrade\r\n\
    Upgrade: nbd\r\nContent-Type: text/plain\r\nContent-Length: 54\r\n\r\n\
    this server speaks NBD: send GET or POST, Upgrade: nbd";
/// The answer to what is no request.
pub const BAD_REQUEST: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";

/// Why the exchange failed; one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpError(String);

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for HttpError {}

/// The method of a request to upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// GET: Incus, snapshots of LXD.
    Get,
    /// POST.
    Post,
}

impl Method {
    /// The method of this name, in any case.
    pub fn parse(name: &str) -> Option<Method> {
        [Method::Get, Method::Post]
            .into_iter()
            .find(|known| known.name().eq_ignore_ascii_case(name))
    }

    /// The name in a request.
    pub fn name(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Post => "POST",
        }
    }
}

/// A request to upgrade. Its parts hold no spaces and no control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpgradeRequest {
    /// The method; `None`: POST, then GET at a server that has no POST there.
    pub method: Option<Method>,
    /// Path and query.
    pub target: String,
    /// The server's name, with a port other than the usual one.
    pub host: String,
}

impl UpgradeRequest {
    /// The request as it is sent with this method.
    pub fn emit(&self, method: Method, out: &mut Vec<u8>) {
        let UpgradeRequest { target, host, .. } = self;
        // A POST without a length may be answered with 411.
        let length = if method == Method::Post { "Content-Length: 0\r\n" } else { "" };
        let method = method.name();
        let version = env!("CARGO_PKG_VERSION");
        let text = format!(
            "{method} {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: blockhaul/{version}\r\n\
             Connection: Upgrade\r\nUpgrade: nbd\r\n{length}\r\n"
        );
        out.extend_from_slice(text.as_bytes());
    }
}

/// The answer of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpResponse {
    /// The status: 100 to 999.
    pub status: u16,
    /// The first line, printable.
    pub line: String,
    /// Whether NBD follows: status 101, and an upgrade to `nbd`.
    pub upgraded: bool,
    /// Bytes of the body, if it says so.
    pub length: Option<u64>,
    /// The body comes in chunks, which say its length (RFC 9112, section 7.1).
    pub chunked: bool,
    /// The server closes the connection after the body.
    pub closes: bool,
    /// Where it sends the client instead, printable.
    pub location: Option<String>,
    /// Bytes of all of which the body is a range, if it says so (RFC 9110, section 14.4).
    pub total: Option<u64>,
}

/// Parses the head of an answer; see the crate.
///
/// # Errors
/// It is no HTTP answer, or too long.
pub fn answer(bytes: &[u8]) -> Result<Option<(HttpResponse, usize)>, HttpError> {
    let start = &bytes[..bytes.len().min(7)];
    if b"NBDMAGIC".starts_with(start) && !start.is_empty() {
        let text = "it speaks NBD without HTTP: write nbd:// or nbd+unix://";
        return Err(HttpError(text.to_owned()));
    }
    if !b"HTTP/1.".starts_with(start) {
        let shown = printable(bytes, 64);
        return Err(HttpError(format!("its answer is not HTTP/1.1: \"{shown}\"")));
    }
    let Some(head) = HttpHead::parse(bytes, "answer")? else { return Ok(None) };
    let line = printable(head.line, 256);
    let wrong = || HttpError(format!("its answer has no status: \"{line}\""));
    let digits = head.line.split(|byte| *byte == b' ').nth(1).ok_or_else(wrong)?;
    let status = std::str::from_utf8(digits).ok().filter(|text| text.len() == 3);
    let status = status.and_then(|text| text.parse().ok()).filter(|status| *status >= 100);
    let status = status.ok_or_else(wrong)?;
    let length = head.field("content-length").next();
    let length = length.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
    let upgraded = status == 101 && head.has("upgrade", "nbd");
    let chunked = head.has("transfer-encoding", "chunked");
    let closes = head.has("connection", "close") || head.line.starts_with(b"HTTP/1.0");
    let location = head.field("location").next().map(|place| printable(place, 256));
    let total = head.field("content-range").next();
    let total = total.and_then(|range| {
        let (_, total) = std::str::from_utf8(range).ok()?.rsplit_once('/')?;
        total.trim().parse().ok()
    });
    let used = head.used;
    let answer = HttpResponse { status, line, upgraded, length, chunked, closes, location, total };
    Ok(Some((answer, used)))
}

/// Longest line before a chunk, with its extensions.
const CHUNK_LINE_MAX: usize = 1 << 10;

/// Parses the line before a chunk: the bytes of the chunk, 0 for the last one; see the crate.
///
/// # Errors
/// It is none, or too long.
pub fn chunk(bytes: &[u8]) -> Result<Option<(u64, usize)>, HttpError> {
    let seen = &bytes[..bytes.len().min(CHUNK_LINE_MAX)];
    let Some(end) = seen.windows(2).position(|two| two == b"\r\n") else {
        return if seen.len() < CHUNK_LINE_MAX {
            Ok(None)
        } else {
            Err(HttpError("the line before a chunk of the answer is too long".to_owned()))
        };
    };
    let digits = seen[..end].split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let text = std::str::from_utf8(digits).ok();
    let text = text.filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let length = text.and_then(|text| u64::from_str_radix(text, 16).ok());
    let shown = printable(&seen[..end], 64);
    let wrong = || HttpError(format!("\"{shown}\" is not the length of a chunk"));
    Ok(Some((length.ok_or_else(wrong)?, end + 2)))
}

/// Parses the head of a request: whether it asks for an upgrade to NBD; see the crate.
///
/// # Errors
/// It is no HTTP request, or too long.
pub fn request(bytes: &[u8]) -> Result<Option<(bool, usize)>, HttpError> {
    let start = &bytes[..bytes.len().min(8)];
    if !start.iter().all(|byte| (b' '..=b'~').contains(byte)) {
        return Err(HttpError("what came is not an HTTP request".to_owned()));
    }
    let Some(head) = HttpHead::parse(bytes, "request")? else { return Ok(None) };
    let mut words = head.line.split(|byte| *byte == b' ');
    let method = words.next();
    let _ = words.next();
    let version = words.next();
    if version != Some(b"HTTP/1.1") || words.next().is_some() {
        let line = printable(head.line, 64);
        return Err(HttpError(format!("\"{line}\" is not a request of HTTP/1.1")));
    }
    let body = head.field("content-length").any(|length| length != b"0");
    let body = body || head.field("transfer-encoding").next().is_some();
    let known = [Some(&b"GET"[..]), Some(b"POST")].contains(&method) && !body;
    let asks = head.has("connection", "upgrade") && head.has("upgrade", "nbd");
    Ok(Some((known && asks, head.used)))
}

/// The first line and the fields of a message.
struct HttpHead<'a> {
    line: &'a [u8],
    fields: &'a [u8],
    used: usize,
}

impl<'a> HttpHead<'a> {
    fn parse(bytes: &'a [u8], what: &str) -> Result<Option<HttpHead<'a>>, HttpError> {
        let seen = &bytes[..bytes.len().min(HEAD_MAX)];
        let Some(end) = seen.windows(4).position(|four| four == b"\r\n\r\n") else {
            return if bytes.len() < HEAD_MAX {
                Ok(None)
            } else {
                Err(HttpError(format!("the {what} has more than {HEAD_MAX} bytes of header")))
            };
        };
        let head = &bytes[..end + 2];
        let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let fields = &head[(line.len() + 1).min(head.len())..];
        Ok(Some(HttpHead { line: line.trim_ascii(), fields, used: end + 4 }))
    }

    /// The values of the fields of this name.
    fn field(&self, name: &'static str) -> impl Iterator<Item = &'a [u8]> {
        self.fields.split(|byte| *byte == b'\n').filter_map(move |line| {
            let colon = line.iter().position(|byte| *byte == b':')?;
            let (found, value) = line.split_at(colon);
            found.eq_ignore_ascii_case(name.as_bytes()).then(|| value[1..].trim_ascii())
        })
    }

    /// Whether a field is a list that has this word.
    fn has(&self, name: &'static str, word: &str) -> bool {
        self.field(name).any(|value| {
            let mut words = value.split(|byte| *byte == b',');
            words.any(|found| found.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_sent_is_understood() {
        for method in [Method::Get, Method::Post] {
            let sent = UpgradeRequest { method: None, target: "/a?b".into(), host: "h:1".into() };
            let mut bytes = Vec::new();
            sent.emit(method, &mut bytes);
            assert_eq!(request(&bytes).unwrap(), Some((true, bytes.len())));
            assert_eq!(request(&bytes[..bytes.len() - 1]).unwrap(), None);
        }
        let (found, used) = answer(SWITCHING).unwrap().unwrap();
        assert!(found.upgraded && used == SWITCHING.len());
        for refusal in [UPGRADE_REQUIRED, BAD_REQUEST] {
            let (found, used) = answer(refusal).unwrap().unwrap();
            assert!(!found.upgraded);
            assert_eq!(found.length, Some((refusal.len() - used) as u64));
        }
    }

    #[test]
    fn answers_are_judged() {
        let bytes = b"HTTP/1.1 101 x\r\nupgrade:websocket, NBD\r\n\r\nNBDMAGIC";
        let (found, used) = answer(bytes).unwrap().unwrap();
        assert!(found.upgraded && &bytes[used..] == b"NBDMAGIC");
        let of = |bytes: &[u8]| answer(bytes).unwrap().unwrap().0;
        assert!(!of(b"HTTP/1.1 101 x\r\nUpgrade: sftp\r\n\r\n").upgraded);
        assert!(!of(b"HTTP/1.1 101 x\r\n\r\n").upgraded);
        assert!(!of(b"HTTP/1.1 200 OK\r\nUpgrade: nbd\r\n\r\n").upgraded);
        assert_eq!(of(b"HTTP/1.1 404 No \x1b[1m\r\n\r\n").line, "HTTP/1.1 404 No \\u{1b}[1m");
        for (wrong, why) in [
            (&b"NBDMAGICIHAVEOPT"[..], "without HTTP"),
            (b"\x15\x03\x01", "not HTTP/1.1"),
            (b"HTTP/2 200\r\n\r\n", "not HTTP/1.1"),
            (b"HTTP/1.1\r\n\r\n", "no status"),
            (b"HTTP/1.1 -10 x\r\n\r\n", "no status"),
            (b"HTTP/1.1 10111 x\r\n\r\n", "no status"),
        ] {
            let error = answer(wrong).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let endless = [&b"HTTP/1.1 101 x\r\n"[..], &b"a: b\r\n".repeat(HEAD_MAX)].concat();
        assert!(answer(&endless).unwrap_err().to_string().contains("16384 bytes"));
        assert_eq!(answer(&endless[..HEAD_MAX - 1]), Ok(None));
    }

    #[test]
    fn bodies_are_announced() {
        let of = |bytes: &[u8]| answer(bytes).unwrap().unwrap().0;
        let found = of(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, Chunked\r\n\r\n");
        assert!(found.chunked && !found.closes && found.length.is_none());
        assert!(of(b"HTTP/1.1 200 OK\r\nconnection: Close\r\n\r\n").closes);
        assert!(of(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n").closes);
        let found = of(b"HTTP/1.1 302 x\r\nLocation: https://other/\x07\r\n\r\n");
        assert_eq!(found.location.as_deref(), Some("https://other/\\u{7}"));
        let total = |range| of(format!("HTTP/1.1 206 x\r\n{range}\r\n\r\n").as_bytes()).total;
        assert_eq!(total("Content-Range: bytes 0-9/1234"), Some(1234));
        assert_eq!(total("content-range: bytes */5"), Some(5));
        assert_eq!(total("Content-Range: bytes 0-9/*"), None);
        assert_eq!(total("Content-Range: bytes 0-9"), None);
        assert_eq!(total("Content-Length: 9"), None);
        assert_eq!(chunk(b"1aF;x=y\r\nrest"), Ok(Some((0x1af, 9))));
        assert_eq!(chunk(b"0\r\n"), Ok(Some((0, 3))));
        assert_eq!(chunk(b"12"), Ok(None));
        for wrong in [&b"\r\n"[..], b"-1\r\n", b"+1\r\n", b"x\r\n", b"10000000000000000\r\n"] {
            assert!(chunk(wrong).is_err(), "{}", printable(wrong, 64));
        }
        assert!(chunk(&[b'1'; 2000]).is_err());
    }

    #[test]
    fn requests_are_judged() {
        let of = |bytes: &[u8]| request(bytes).unwrap().unwrap().0;
        let good = "GET / HTTP/1.1\r\nConnection: keep-alive, Upgrade\r\nUpgrade: nbd\r\n\r\n";
        assert!(of(good.as_bytes()));
        assert!(!of(good.replace("GET", "PUT").as_bytes()));
        assert!(!of(good.replace("nbd", "websocket").as_bytes()));
        assert!(!of(good.replace("Connection", "X").as_bytes()));
        assert!(!of(good.replace("Upgrade: nbd", "Upgrade: nbd\r\nContent-Length: 5").as_bytes()));
        assert!(request(good.replace("1.1", "1.0").as_bytes()).is_err());
        assert!(request(b"\x16\x03\x01").is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            front in prop::sample::select(vec!["", "HTTP/1.1 101 x\r\n", "GET / HTTP/1.1\r\n"]),
        ) {
            let bytes = [front.as_bytes(), &bytes, b"\r\n\r\n"].concat();
            for used in [chunk(&bytes).map(|found| found.map(|found| found.1)),
                         answer(&bytes).map(|found| found.map(|found| found.1)),
                         request(&bytes).map(|found| found.map(|found| found.1))] {
                if let Ok(Some(used)) = used {
                    prop_assert!(used <= bytes.len());
                }
            }
        }
    }
}
