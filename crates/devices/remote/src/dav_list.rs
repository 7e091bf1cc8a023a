//! The files in a directory of a WebDAV server.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{ObjectEntry, ObjectList, OpenFuture, percent_decode};
use reqwest::Url;

use crate::dav_entries::{DavEntry, read_entries, request_properties};
use crate::failure::Failure;
use crate::http_object::HttpResource;
use crate::runtime;
use crate::store_object::shown_etag;

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
            let (found, place) = request(&resource).await.map_err(|failure| failure.error)?;
            files(found, &place)
        }))
    }
}

/// The entries in the response of the server, and the URL of the directory.
async fn request(resource: &HttpResource) -> Result<(Vec<DavEntry>, Url), Failure> {
    let mut place = resource.url.clone();
    if !place.path().ends_with('/') {
        place.set_path(&format!("{}/", place.path()));
    }
    let (response, place) = request_properties(resource, &place, "1").await?;
    if response.status().as_u16() == 405 {
        let error = Error::new(Kind::Unsupported, "the server has no list of its files (WebDAV)");
        return Err(Failure::last(error.with_remedy("name a file")));
    }
    Ok((read_entries(resource, response).await?, place))
}

/// The files of a list, by their places in the directory at `place`.
fn files(found: Vec<DavEntry>, place: &Url) -> Result<Vec<ObjectEntry>> {
    let mut list = DirectoryFiles::new(place)?;
    found.into_iter().for_each(|entry| list.add(entry));
    list.files()
}

/// The files of a directory that were found in a list.
struct DirectoryFiles<'a> {
    place: &'a Url,
    /// The path of the directory, decoded, without a slash at its end.
    folder: String,
    files: Vec<ObjectEntry>,
    names_folder: bool,
}

impl<'a> DirectoryFiles<'a> {
    fn new(place: &'a Url) -> Result<DirectoryFiles<'a>> {
        let folder = percent_decode(place.path().trim_end_matches('/'))?;
        Ok(DirectoryFiles { place, folder, files: Vec::new(), names_folder: false })
    }

    fn add(&mut self, entry: DavEntry) {
        let path = self.path(&entry.href);
        if path.as_deref().is_some_and(|path| path.trim_end_matches('/') == self.folder) {
            self.names_folder = true;
            return;
        }
        if entry.is_directory {
            return;
        }
        let inside = path.as_deref().and_then(|path| path.strip_prefix(self.folder.as_str()));
        let name = inside.and_then(|name| name.strip_prefix('/')).map(str::to_owned);
        let DavEntry { href, size, changed, etag, .. } = entry;
        // A file without a size cannot be read.
        if let (Some(name), Some(size)) = (name, size) {
            let etag = etag.as_deref().map(shown_etag);
            self.files.push(ObjectEntry { name, size, changed, etag });
        } else {
            let href = blockhaul_wire::printable(href.as_bytes(), 256);
            log::warn!("the list lacks {href}: it has no size, or no name of this directory");
        }
    }

    /// The path of a URL, which may be relative to that of the list.
    fn path(&self, href: &str) -> Option<String> {
        let url = self.place.join(href).ok().filter(|_| !href.is_empty())?;
        percent_decode(url.path()).ok()
    }

    fn files(self) -> Result<Vec<ObjectEntry>> {
        if self.names_folder {
            return Ok(self.files);
        }
        let text = "the list of the server (WebDAV) does not name the directory itself";
        let error = Error::new(Kind::Unsupported, text);
        Err(error.with_remedy("check the URL; a proxy in front of the server may change paths"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;
    use crate::dav_entries;

    fn entries(text: &str, place: &Url) -> Result<Vec<ObjectEntry>> {
        files(dav_entries::entries(text)?, place)
    }

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
        let found = entries(LIST, &url("/a/")).unwrap();
        let first = ObjectEntry {
            name: "b &%.raw".to_owned(),
            size: 70,
            changed: Some("1994-11-07T08:49:37Z".to_owned()),
            etag: Some("7-1".to_owned()),
        };
        let second = ObjectEntry { name: "c".to_owned(), size: 9, changed: None, etag: None };
        assert_eq!(found, [first, second]);
        assert_eq!(entries(LIST, &url("/other/")).unwrap_err().kind(), Kind::Unsupported);
        for wrong in ["<a></b>", "", "<a/>", "<multistatus/>", &"<multistatus>".repeat(99)] {
            assert!(entries(wrong, &url("/")).is_err(), "{wrong}");
        }
        (0..LIST.len()).filter(|at| LIST.is_char_boundary(*at)).for_each(|at| {
            assert!(entries(&LIST[..at], &url("/a/")).is_err());
        });
    }

    fn url(path: &str) -> Url {
        Url::parse("http://host").unwrap().join(path).unwrap()
    }

    fn names(folder: &str, responses: &[&str]) -> Vec<String> {
        let own = format!("<response><href>{folder}</href></response>");
        let text = format!("<multistatus>{own}{}</multistatus>", responses.concat());
        let found = entries(&text, &url(folder)).unwrap();
        found.into_iter().map(|entry| entry.name).collect()
    }

    fn file(href: &str, properties: &str) -> String {
        let size = "<getcontentlength>7</getcontentlength>";
        let prop = format!("<propstat><prop>{size}{properties}</prop></propstat>");
        format!("<response><href>{href}</href>{prop}</response>")
    }

    #[test]
    fn names_of_locks_are_not_those_of_files() {
        let lock = "<lockdiscovery><activelock><lockroot><href>/a/other</href></lockroot><locktoken>\
                    <href>urn:uuid:1</href></locktoken></activelock></lockdiscovery>";
        assert_eq!(names("/a/", &[&file("/a/b", lock)]), ["b"]);
        let odd = "<x><getcontentlength>9</getcontentlength><collection/></x>";
        assert_eq!(names("/a/", &[&file("/a/b", odd)]), ["b"]);
    }

    #[test]
    fn paths_are_compared_decoded() {
        assert_eq!(names("/%7euser/", &[&file("/~user/b", "")]), ["b"]);
        assert_eq!(names("/~user/", &[&file("/%7Euser/%c3%a4", ""), &file("c", "")]), ["ä", "c"]);
        assert_eq!(names("/%C3%A4/", &[&file("/%c3%a4/b", "")]), ["b"]);
        // Others are left out with a warning: no text, no size, another directory.
        let no_size = "<response><href>/a/b</href></response>";
        let left_out = [&file("/a/%ff", ""), no_size, &file("/ab/c", ""), &file("", "")];
        assert!(names("/a/", &left_out).is_empty());
        assert!(entries(LIST, &url("/%ff/")).is_err());
    }
}
