//! Properties of files and directories of a WebDAV server (RFC 4918): requests for them, and the responses.

use blockhaul_block::{Error, Kind, Result};
use quick_xml::Reader;
use quick_xml::events::Event;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Response, Url};

use crate::failure::Failure;
use crate::http_object::HttpResource;
use crate::response::refusal;

/// Bytes of a list, which a server sends in one response.
const LIST_MAX: usize = 16 << 20;
/// Most elements around another one.
const DEPTH_MAX: usize = 64;

/// A file or directory of a response.
#[derive(Debug, Default)]
pub(crate) struct DavEntry {
    /// Its URL, as the server writes it.
    pub(crate) href: String,
    /// Bytes.
    pub(crate) size: Option<u64>,
    /// The time of the last change, as `2026-01-31T12:00:00Z`.
    pub(crate) changed: Option<String>,
    /// The entity tag, with its quotes.
    pub(crate) etag: Option<String>,
    /// The status of the request for it alone.
    pub(crate) status: Option<u16>,
    /// Whether it is a directory.
    pub(crate) is_directory: bool,
    /// The locks on it.
    pub(crate) locks: Vec<DavLock>,
    /// The lock that is being read.
    open_lock: DavLock,
}

/// A lock on a file or directory.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct DavLock {
    /// The token, a URI.
    pub(crate) token: String,
    /// The owner, as the client has written it.
    pub(crate) owner: String,
}

/// A standard method, whose name is a token.
pub(crate) fn method(name: &str) -> Method {
    Method::from_bytes(name.as_bytes()).unwrap_or_default()
}

/// Requests the properties of the file or directory at `place` with this depth, `0` or `1`: the response, and its own
/// place.
///
/// # Errors
/// The server does not answer.
pub(crate) async fn request_properties(
    resource: &HttpResource,
    place: &Url,
    depth: &'static str,
) -> Result<(Response, Url), Failure> {
    let depth = (HeaderName::from_static("depth"), HeaderValue::from_static(depth));
    let fields = HeaderMap::from_iter([depth]);
    resource.get(&method("PROPFIND"), place, &fields).await
}

/// The entries of the response of a server.
///
/// # Errors
/// The server refuses, or the response is too long or no list.
pub(crate) async fn read_entries(
    resource: &HttpResource,
    response: Response,
) -> Result<Vec<DavEntry>, Failure> {
    if response.status().as_u16() != 207 {
        return Err(refusal(response, false).await);
    }
    let Some(bytes) = resource.body(response, LIST_MAX).await? else {
        let text = format!("the list of the server has more than {LIST_MAX} bytes");
        let error = Error::new(Kind::Unsupported, text);
        return Err(Failure::last(error.with_remedy("list a directory with fewer files")));
    };
    let text = String::from_utf8(bytes).map_err(|_| Failure::last(no_list()))?;
    entries(&text).map_err(Failure::last)
}

/// The error of a response that is no list.
pub(crate) fn no_list() -> Error {
    let error = Error::new(Kind::Unsupported, "the response of the server is no list of WebDAV");
    error.with_remedy("check the URL")
}

/// The entries of a response.
///
/// # Errors
/// The text is no list.
pub(crate) fn entries(text: &str) -> Result<Vec<DavEntry>> {
    let mut reader = Reader::from_str(text);
    let mut list = EntryReader::default();
    loop {
        match reader.read_event().map_err(|_| no_list())? {
            Event::Start(start) => list.begin(start.local_name().as_ref())?,
            Event::Empty(empty) => {
                list.begin(empty.local_name().as_ref())?;
                list.end();
            }
            Event::Text(part) => list.value += &part.decode().map_err(|_| no_list())?,
            Event::GeneralRef(part) => list.value.push(reference(&part).ok_or_else(no_list)?),
            Event::End(_) => list.end(),
            Event::Eof if list.around.is_empty() => return Ok(list.entries),
            Event::Eof => return Err(no_list()),
            _ => {}
        }
    }
}

/// The part of a list that was read.
#[derive(Default)]
struct EntryReader {
    /// Names of the elements around the next event.
    around: Vec<Vec<u8>>,
    value: String,
    entry: DavEntry,
    entries: Vec<DavEntry>,
}

impl EntryReader {
    fn begin(&mut self, element: &[u8]) -> Result<()> {
        let is_root = self.around.is_empty();
        if is_root != (element == b"multistatus") || self.around.len() == DEPTH_MAX {
            return Err(no_list());
        }
        self.value.clear();
        self.around.push(element.to_vec());
        Ok(())
    }

    /// Properties may have elements of the same names inside, such as the address of a lock.
    fn end(&mut self) {
        let around: Vec<&[u8]> = self.around.iter().map(Vec::as_slice).collect();
        let value = self.value.trim();
        match around[..] {
            [_, b"response"] => self.entries.push(std::mem::take(&mut self.entry)),
            [_, b"response", b"href"] => value.clone_into(&mut self.entry.href),
            [_, b"response", b"status"] => {
                self.entry.status = value.split(' ').nth(1).and_then(|code| code.parse().ok());
            }
            [_, b"response", b"propstat", b"prop", b"resourcetype", b"collection"] => {
                self.entry.is_directory = true;
            }
            [
                _,
                b"response",
                b"propstat",
                b"prop",
                b"lockdiscovery",
                b"activelock",
                ref inside @ ..,
            ] => {
                self.entry.set_lock(inside, value);
            }
            // A property that the file does not have is empty.
            [_, b"response", b"propstat", b"prop", property] if !value.is_empty() => {
                self.entry.set(property, value);
            }
            _ => {}
        }
        self.around.pop();
        self.value.clear();
    }
}

/// The character that a reference such as `&amp;` stands for.
fn reference(part: &quick_xml::events::BytesRef<'_>) -> Option<char> {
    if let Some(found) = part.resolve_char_ref().ok()? {
        return Some(found);
    }
    quick_xml::escape::resolve_xml_entity(&part.decode().ok()?)?.chars().next()
}

impl DavEntry {
    fn set(&mut self, property: &[u8], value: &str) {
        match property {
            b"getcontentlength" => self.size = value.parse().ok(),
            b"getetag" => self.etag = Some(value.to_owned()),
            b"getlastmodified" => {
                let parsed = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(value);
                self.changed =
                    parsed.ok().map(|time| time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
            }
            _ => {}
        }
    }

    /// An element below a lock. The lock itself ends last.
    fn set_lock(&mut self, inside: &[&[u8]], value: &str) {
        let lock = &mut self.open_lock;
        match inside {
            [] => self.locks.push(std::mem::take(lock)),
            [b"locktoken", b"href"] => value.clone_into(&mut lock.token),
            [b"owner", ..] if !value.is_empty() => value.clone_into(&mut lock.owner),
            _ => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn locks_have_a_token_and_an_owner() {
        let lock = |owner: &str, token: &str| {
            format!(
                "<activelock><locktype><write/></locktype><owner>{owner}</owner><locktoken><href>{token}</href>\
                 </locktoken><lockroot><href>/a</href></lockroot></activelock>"
            )
        };
        let locks =
            [lock("<href>mailto:o</href>", "urn:uuid:1"), lock("me", "urn:uuid:2")].concat();
        let text = format!(
            "<multistatus><response><href>/a</href><propstat><prop><lockdiscovery>{locks}</lockdiscovery>\
             <getetag>W/\"1\"</getetag></prop></propstat></response><response><href>/b</href></response></multistatus>"
        );
        let found = entries(&text).unwrap();
        let lock = |owner: &str, token: &str| DavLock { token: token.into(), owner: owner.into() };
        assert_eq!(found[0].locks, [lock("mailto:o", "urn:uuid:1"), lock("me", "urn:uuid:2")]);
        assert_eq!(found[0].etag.as_deref(), Some("W/\"1\""));
        assert!(found[1].locks.is_empty() && found[1].etag.is_none());
    }
}
