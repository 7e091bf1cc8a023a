//! The files in a directory of a WebDAV server.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{ObjectEntry, ObjectList, OpenFuture, percent_decode};
use quick_xml::Reader;
use quick_xml::events::Event;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Url};

use crate::failure::Failure;
use crate::http_object::HttpResource;
use crate::response::refusal;
use crate::runtime;
use crate::store_object::shown_etag;

/// Bytes of a list, which a server sends in one response.
const LIST_MAX: usize = 16 << 20;

/// The files in a directory, without those in directories below it.
pub(crate) struct DavList(Option<HttpResource>);

impl DavList {
    /// The files in the directory at the URL of `resource`.
    pub(crate) fn new(resource: HttpResource) -> DavList {
        DavList(Some(resource))
    }
}

impl ObjectList for DavList {
    fn page(&mut self) -> OpenFuture<Vec<ObjectEntry>> {
        let resource = self.0.take();
        Box::pin(runtime::run(async move {
            let Some(resource) = resource else { return Ok(Vec::new()) };
            let (text, place) = request(&resource).await.map_err(|failure| failure.error)?;
            entries(&text, place.path())
        }))
    }
}

/// The response of the server, and the URL of the directory.
async fn request(resource: &HttpResource) -> Result<(String, Url), Failure> {
    let mut place = resource.url.clone();
    if !place.path().ends_with('/') {
        place.set_path(&format!("{}/", place.path()));
    }
    let depth = (HeaderName::from_static("depth"), HeaderValue::from_static("1"));
    let fields = HeaderMap::from_iter([depth]);
    // A standard method, whose name is a token.
    let method = Method::from_bytes(b"PROPFIND").unwrap_or_default();
    let (mut response, place) = resource.get(&method, &place, &fields).await?;
    if response.status().as_u16() == 405 {
        let error = Error::new(Kind::Unsupported, "the server has no list of its files (WebDAV)");
        return Err(Failure::last(error.with_remedy("name a file")));
    }
    if response.status().as_u16() != 207 {
        return Err(refusal(response, false).await);
    }
    let mut bytes = Vec::new();
    while let Some(more) = resource.chunk(&mut response, resource.due()).await? {
        bytes.extend_from_slice(&more);
        if bytes.len() > LIST_MAX {
            let text = format!("the list of the server has more than {LIST_MAX} bytes");
            let error = Error::new(Kind::Unsupported, text);
            return Err(Failure::last(error.with_remedy("list a directory with fewer files")));
        }
    }
    let text = String::from_utf8(bytes).map_err(|_| Failure::last(no_list()))?;
    Ok((text, place))
}

fn no_list() -> Error {
    let error = Error::new(Kind::Unsupported, "the response of the server is no list of WebDAV");
    error.with_remedy("check the URL")
}

/// A file or directory of a response.
#[derive(Default)]
struct DavEntry {
    href: String,
    size: Option<u64>,
    changed: Option<String>,
    etag: Option<String>,
    is_directory: bool,
}

/// The files of a response, by their places in the directory with this path.
fn entries(text: &str, folder: &str) -> Result<Vec<ObjectEntry>> {
    let mut reader = Reader::from_str(text);
    let (mut files, mut found, mut value) = (Vec::new(), DavEntry::default(), String::new());
    loop {
        match reader.read_event().map_err(|_| no_list())? {
            Event::Start(start) => {
                value.clear();
                if start.local_name().as_ref() == b"response" {
                    found = DavEntry::default();
                }
                found.is_directory |= start.local_name().as_ref() == b"collection";
            }
            Event::Empty(empty) => {
                found.is_directory |= empty.local_name().as_ref() == b"collection"
            }
            Event::Text(part) => value += &part.decode().map_err(|_| no_list())?,
            Event::GeneralRef(part) => value.push(reference(&part).ok_or_else(no_list)?),
            Event::End(end) if end.local_name().as_ref() == b"response" => {
                files.extend(std::mem::take(&mut found).file(folder));
            }
            Event::End(end) => found.set(end.local_name().as_ref(), value.trim()),
            Event::Eof => return Ok(files),
            _ => {}
        }
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
            b"href" => value.clone_into(&mut self.href),
            b"getcontentlength" => self.size = value.parse().ok(),
            b"getetag" => self.etag = Some(shown_etag(value)),
            b"getlastmodified" => {
                let parsed = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(value);
                self.changed =
                    parsed.ok().map(|time| time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
            }
            _ => {}
        }
    }

    fn file(self, folder: &str) -> Option<ObjectEntry> {
        let DavEntry { href, size, changed, etag, is_directory } = self;
        // A URL, or its path.
        let path = Url::parse(&href).map_or(href, |url| url.path().to_owned());
        let name = percent_decode(path.strip_prefix(folder)?).ok()?;
        let is_file = !is_directory && !name.is_empty();
        // A file without a size cannot be read.
        let size = size.filter(|_| is_file)?;
        Some(ObjectEntry { name, size, changed, etag })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    const LIST: &str = r#"<?xml version="1.0"?>
<D:multistatus xmlns:D="DAV:" xmlns:x="urn:x">
<D:response><D:href>/a/</D:href><D:propstat><D:prop><D:resourcetype><D:collection/></D:resourcetype></D:prop></D:propstat></D:response>
<D:response><D:href>/a/b%20&amp;%25.raw</D:href><D:propstat><D:prop><D:resourcetype/>
<D:getcontentlength>70</D:getcontentlength><D:getetag>"7-1"</D:getetag>
<D:getlastmodified>Mon, 07 Nov 1994 08:49:37 GMT</D:getlastmodified></D:prop></D:propstat></D:response>
<D:response><D:href>http://h/a/c</D:href><D:propstat><D:prop><D:getcontentlength>9</D:getcontentlength></D:prop></D:propstat></D:response>
</D:multistatus>"#;

    #[test]
    fn files_are_found_and_directories_are_not() {
        let found = entries(LIST, "/a/").unwrap();
        let first = ObjectEntry {
            name: "b &%.raw".to_owned(),
            size: 70,
            changed: Some("1994-11-07T08:49:37Z".to_owned()),
            etag: Some("7-1".to_owned()),
        };
        let second = ObjectEntry { name: "c".to_owned(), size: 9, changed: None, etag: None };
        assert_eq!(found, [first, second]);
        assert!(entries(LIST, "/other/").unwrap().is_empty());
        assert!(entries("<a></b>", "/").is_err());
        (0..LIST.len()).filter(|at| LIST.is_char_boundary(*at)).for_each(|at| {
            let _ = entries(&LIST[..at], "/a/");
        });
    }
}
