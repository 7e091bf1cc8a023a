//! A file on a WebDAV server that a copy makes or replaces (RFC 4918): checks before anything is sent, the temporary
//! file beside it, and the step that makes the temporary file the target.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::printable;
use reqwest::header::{ALLOW, CONTENT_LENGTH, ETAG, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Response, Url};

use crate::dav_entries::{DavEntry, DavLock, method, no_list, read_entries, request_properties};
use crate::failure::{Failure, NextStep, Repetitions};
use crate::http_object::HttpResource;
use crate::response::refusal;

/// Bytes of the name of the target that the name of the temporary file has: file systems limit names to 255 bytes,
/// some to 143.
const NAME_MAX: usize = 64;
/// Bytes of the owner and the token of a lock that are shown.
const LOCK_MAX: usize = 100;
/// Attempts to remove a temporary file that the server may still be writing.
const REMOVALS: u32 = 3;
const ENABLE: &str = "enable writes there (Apache: Dav On; nginx: dav_methods PUT DELETE MOVE), or choose another \
                      server";

/// A file to be made or replaced.
pub(crate) struct DavTarget {
    pub(crate) resource: HttpResource,
    /// The file, where redirects led.
    pub(crate) place: Url,
    /// The temporary file.
    pub(crate) temporary: Url,
    /// The file before the copy.
    before: DavState,
}

/// What a URL of the server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DavState {
    Absent,
    Directory,
    /// A file, with its size and entity tag where the server tells them.
    File(Option<u64>, Option<String>),
}

impl DavState {
    /// Whether both may be the same file. The entity tag of a new file is weak at some servers.
    fn fits(&self, other: &DavState) -> bool {
        let DavState::File(one, one_tag) = self else { return self == other };
        let DavState::File(other, other_tag) = other else { return false };
        one == other && strong(one_tag) == strong(other_tag)
    }

    /// Whether both are certainly not the same file.
    fn differs(&self, other: &DavState) -> bool {
        match (self, other) {
            (DavState::File(one, one_tag), DavState::File(other, other_tag)) => {
                let has_sizes = one.is_some() && other.is_some();
                let has_tags = one_tag.is_some() && other_tag.is_some();
                has_sizes && one != other || has_tags && strong(one_tag) != strong(other_tag)
            }
            _ => self != other,
        }
    }
}

impl DavTarget {
    /// Checks a target: the server accepts writes, it is no directory and has no lock, and its directory exists.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) async fn check(resource: HttpResource) -> Result<DavTarget> {
        let (before, locks, place) = look(&resource, &resource.url).await?;
        if before == DavState::Directory {
            let error = Error::new(Kind::Unsupported, "the target is a directory of the server");
            return Err(error.with_remedy("name a file in it"));
        }
        if let Some(lock) = locks.first() {
            return Err(locked("the target", Some(lock)));
        }
        let temporary = temporary_beside(&place)?;
        let target = DavTarget { resource, place, temporary, before };
        target.check_directory().await?;
        target.check_methods().await?;
        Ok(target)
    }

    /// Bytes of the file that is replaced; 0 if there is none.
    pub(crate) fn size_before(&self) -> u64 {
        match self.before {
            DavState::File(size, _) => size.unwrap_or(0),
            _ => 0,
        }
    }

    async fn check_directory(&self) -> Result<()> {
        let Ok(directory) = self.place.join(".") else { return Ok(()) };
        // What may be written need not be listed.
        let Ok((response, _)) = request_properties(&self.resource, &directory, "0").await else {
            return Ok(());
        };
        match response.status().as_u16() {
            404 | 410 => Err(no_directory()),
            // A lock on a directory protects its list of names, too.
            207 => match self.lock_of(response).await {
                Some(lock) => Err(locked("the directory of the target", Some(&lock))),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// The first lock of the first entry of a list.
    async fn lock_of(&self, response: Response) -> Option<DavLock> {
        let entries = read_entries(&self.resource, response).await.ok()?;
        entries.into_iter().next()?.locks.into_iter().next()
    }

    /// Checks that the server has the methods of a copy.
    async fn check_methods(&self) -> Result<()> {
        let options = HeaderMap::new();
        let (response, _) =
            request(&self.resource, &Method::OPTIONS, &self.place, &options).await?;
        let fields = response.headers();
        let allowed = fields.get(ALLOW).and_then(|methods| methods.to_str().ok());
        let has = |name: &str| {
            let mut methods = allowed.unwrap_or_default().split(',');
            methods.any(|method| method.trim().eq_ignore_ascii_case(name))
        };
        let is_dav = fields.contains_key("dav");
        if response.status().is_success() && allowed.is_some() && !is_dav && !has("PUT") {
            let shown = printable(allowed.unwrap_or_default().as_bytes(), LOCK_MAX);
            let text = format!("the server accepts no writes here: its methods are {shown}");
            return Err(Error::new(Kind::Unsupported, text).with_remedy(ENABLE));
        }
        if is_dav || has("MOVE") {
            return Ok(());
        }
        // A file that does not exist cannot be moved, and a method that does not exist is refused as such.
        let (response, _) =
            request(&self.resource, &method("MOVE"), &self.temporary, &self.move_fields(None)?)
                .await?;
        if matches!(response.status().as_u16(), 405 | 501) {
            let status = response.status();
            let text = format!("the server cannot rename files: it answers \"{status}\" to MOVE");
            return Err(Error::new(Kind::Unsupported, text).with_remedy(ENABLE));
        }
        Ok(())
    }

    /// Checks that the server has all `size` bytes of the temporary file.
    ///
    /// # Errors
    /// It has not, or does not tell.
    pub(crate) async fn check_size(&self, size: u64) -> Result<()> {
        let found = match look(&self.resource, &self.temporary).await?.0 {
            DavState::File(Some(found), _) if found == size => return Ok(()),
            DavState::File(Some(found), _) => format!("{found} bytes"),
            DavState::File(None, _) => "an unknown number of bytes".to_owned(),
            DavState::Absent => "no file".to_owned(),
            DavState::Directory => "a directory".to_owned(),
        };
        let text = format!("the server has stored {found} instead of {size} bytes");
        Err(Error::new(Kind::Io, text)
            .with_remedy("check the free space and the log of the server, and copy again"))
    }

    /// Makes the temporary file of `size` bytes the target, if that is as it was before the copy.
    ///
    /// # Errors
    /// The server refuses, or others have changed the target. It is unchanged then.
    pub(crate) async fn publish(&self, size: u64) -> Result<()> {
        let mut condition = self.condition();
        let mut repetitions = Repetitions::opening();
        loop {
            // Some servers ignore conditions.
            self.check_unchanged().await?;
            let fields = self.move_fields(condition.as_deref())?;
            let sent = self.resource.get(&method("MOVE"), &self.temporary, &fields).await;
            let failure = match sent {
                Ok((response, _)) => match response.status().as_u16() {
                    200 | 201 | 204 => return Ok(()),
                    412 if condition.is_some() => {
                        // An error if the target has changed. Other servers know locks only as conditions.
                        condition = None;
                        continue;
                    }
                    412 => return Err(changed()),
                    423 => Failure::last(self.lock_error().await),
                    207 => match write_refusal(&self.resource, response).await {
                        Failure { error, .. } if error.kind() == Kind::InUse => {
                            Failure::last(self.lock_error().await)
                        }
                        failure => failure,
                    },
                    _ => write_refusal(&self.resource, response).await,
                },
                Err(failure) => failure,
            };
            if !matches!(failure.next, NextStep::Repeat(_)) {
                let error = failure.error;
                // After a lost response the target may be the new file.
                return Err(if repetitions.has_begun() { error } else { unchanged(error) });
            }
            if self.is_published(size).await? {
                return Ok(());
            }
            repetitions.wait(failure, 0).await?;
        }
    }

    /// Whether the target is the file of `size` bytes that the temporary file was, after a response was lost.
    ///
    /// # Errors
    /// The temporary file is gone, and the target is not certainly another file than before: an old file may have the
    /// same size.
    async fn is_published(&self, size: u64) -> Result<bool> {
        if look(&self.resource, &self.temporary).await?.0 != DavState::Absent {
            return Ok(false);
        }
        let (now, ..) = look(&self.resource, &self.place).await?;
        let has_size = matches!(now, DavState::File(found, _) if found == Some(size));
        if has_size && now.differs(&self.before) {
            return Ok(true);
        }
        let text = "the connection ended during the last step (MOVE), the temporary file is gone, and nothing shows \
                    that the target is the new file";
        let error = Error::new(Kind::Io, text);
        Err(error.with_remedy("compare the target with the source, or copy again"))
    }

    async fn check_unchanged(&self) -> Result<()> {
        let (now, locks, _) = look(&self.resource, &self.place).await?;
        if let Some(lock) = locks.first() {
            return Err(locked("the target", Some(lock)));
        }
        if now.fits(&self.before) { Ok(()) } else { Err(changed()) }
    }

    async fn lock_error(&self) -> Error {
        let found = look(&self.resource, &self.place).await;
        let lock = found.ok().and_then(|(_, locks, _)| locks.into_iter().next());
        if lock.is_some() {
            return locked("the target", lock.as_ref());
        }
        match self.check_directory().await {
            Err(error) if error.kind() == Kind::InUse => error,
            _ => locked("the target", None),
        }
    }

    /// The condition that the target is still the same file.
    fn condition(&self) -> Option<String> {
        let DavState::File(_, Some(etag)) = &self.before else { return None };
        let is_strong = etag.starts_with('"') && etag.ends_with('"');
        is_strong.then(|| format!("<{}> ([{etag}])", self.place))
    }

    fn move_fields(&self, condition: Option<&str>) -> Result<HeaderMap> {
        let wrong = |_| {
            let text = "the URL or the entity tag has characters that no request can have";
            Error::new(Kind::Unsupported, text).with_remedy("choose another name")
        };
        let value = |text: &str| HeaderValue::from_str(text).map_err(wrong);
        let overwrite = if self.before == DavState::Absent { "F" } else { "T" };
        let mut fields = HeaderMap::new();
        fields.insert(HeaderName::from_static("destination"), value(self.place.as_str())?);
        fields.insert(HeaderName::from_static("overwrite"), HeaderValue::from_static(overwrite));
        if let Some(condition) = condition {
            fields.insert(HeaderName::from_static("if"), value(condition)?);
        }
        Ok(fields)
    }

    /// Removes the temporary file, if there is one. `may_exist`: the server may have made it.
    pub(crate) async fn remove(&self, may_exist: bool) {
        let mut why = String::new();
        for attempt in 0..REMOVALS {
            let fields = HeaderMap::new();
            match request(&self.resource, &Method::DELETE, &self.temporary, &fields).await {
                Ok((response, _)) if response.status().is_success() => return,
                Ok((response, _)) if response.status().as_u16() == 404 => why.clear(),
                Ok((response, _)) => why = format!("the server answers \"{}\"", response.status()),
                Err(error) => {
                    why = error.text().to_owned();
                    break;
                }
            }
            // The server may learn of the end of the connection, and store what it has, only now.
            if attempt + 1 < REMOVALS {
                tokio::time::sleep(crate::failure::PAUSE).await;
            }
        }
        if may_exist && !why.is_empty() {
            log::warn!("the temporary file {} remains at the server: {why}", self.temporary);
        }
    }
}

/// What a URL is, its locks, and where redirects led.
async fn look(resource: &HttpResource, url: &Url) -> Result<(DavState, Vec<DavLock>, Url)> {
    let mut repetitions = Repetitions::opening();
    loop {
        match look_once(resource, url).await {
            Ok(found) => return Ok(found),
            // A server that is not there will not be there in a moment, either.
            Err(failure)
                if failure.error.kind() == Kind::Disconnected && failure.error.is_complete() =>
            {
                return Err(failure.error);
            }
            Err(failure) => repetitions.wait(failure, 0).await?,
        }
    }
}

async fn look_once(
    resource: &HttpResource,
    url: &Url,
) -> Result<(DavState, Vec<DavLock>, Url), Failure> {
    let (response, place) = request_properties(resource, url, "0").await?;
    // Servers redirect from the name of a directory to the name with a slash.
    let is_directory = place.path().ends_with('/');
    let state = match response.status().as_u16() {
        404 | 410 => DavState::Absent,
        _ if is_directory && !url.path().ends_with('/') => DavState::Directory,
        207 => {
            let found = read_entries(resource, response).await?.into_iter().next();
            let entry = found.ok_or_else(|| Failure::last(no_list()))?;
            let state = state_of(resource, &place, &entry).await?;
            return Ok((state, entry.locks, place));
        }
        400 | 403 | 405 | 501 => return look_without_properties(resource, url).await,
        _ => return Err(refusal(response, false).await),
    };
    Ok((state, Vec::new(), place))
}

async fn state_of(
    resource: &HttpResource,
    place: &Url,
    entry: &DavEntry,
) -> Result<DavState, Failure> {
    if entry.is_directory {
        return Ok(DavState::Directory);
    }
    if entry.size.is_some() {
        return Ok(DavState::File(entry.size, entry.etag.clone()));
    }
    Ok(look_without_properties(resource, place).await?.0)
}

/// The characters of an entity tag without the mark of a weak one.
fn strong(tag: &Option<String>) -> Option<&str> {
    tag.as_deref().map(|tag| tag.trim_start_matches("W/"))
}

/// The same at servers that write files, and have no properties.
async fn look_without_properties(
    resource: &HttpResource,
    url: &Url,
) -> Result<(DavState, Vec<DavLock>, Url), Failure> {
    let (response, place) = resource.get(&Method::HEAD, url, &HeaderMap::new()).await?;
    let text = |name: HeaderName| {
        let field = response.headers().get(name)?.to_str().ok()?;
        Some(field.trim().to_owned())
    };
    let state = match response.status().as_u16() {
        404 | 410 => DavState::Absent,
        _ if place.path().ends_with('/') => DavState::Directory,
        200..=299 => {
            DavState::File(text(CONTENT_LENGTH).and_then(|size| size.parse().ok()), text(ETAG))
        }
        _ => return Err(refusal(response, false).await),
    };
    Ok((state, Vec::new(), place))
}

/// The response to a request that may be sent again.
async fn request(
    resource: &HttpResource,
    method: &Method,
    url: &Url,
    fields: &HeaderMap,
) -> Result<(Response, Url)> {
    let mut repetitions = Repetitions::opening();
    loop {
        let failure = match resource.get(method, url, fields).await {
            Ok((response, place)) => match response.status().as_u16() {
                429 | 500 | 503 | 504 => refusal(response, false).await,
                _ => return Ok((response, place)),
            },
            Err(failure) => failure,
        };
        repetitions.wait(failure, 0).await?;
    }
}

/// The refusal of a request that writes.
pub(crate) async fn write_refusal(resource: &HttpResource, response: Response) -> Failure {
    let (status, url) = (response.status(), response.url().clone());
    let status = status.as_u16();
    if status == 207 {
        return Failure::last(part_refusal(resource, response).await);
    }
    let Failure { error, next } = refusal(response, false).await;
    let error = error.reworded(format!("{} for {url}", error.text()));
    let (kind, remedy) = match status {
        403 => (Kind::Refused, "check the permissions of the directory at the server"),
        404 | 409 => return Failure::last(no_directory()),
        405 | 501 => (Kind::Unsupported, ENABLE),
        411 => (Kind::Unsupported, "the server needs the size before: copy to a file first"),
        413 => (
            Kind::NoSpace,
            "raise the limit of the server (nginx: client_max_body_size; Apache: LimitRequestBody)",
        ),
        423 => return Failure::last(locked("the target", None)),
        500 => {
            // nginx, when the directory does not exist.
            let remedy = "check that the directory of the target exists at the server and can be written, and see the \
                          log of the server";
            return Failure { error: error.with_remedy(remedy), next };
        }
        502 => (
            Kind::Unsupported,
            "write the URL as the server knows it; a proxy in front of it must change the field Destination, too",
        ),
        507 => (Kind::NoSpace, "free some space at the server"),
        _ => return Failure { error, next },
    };
    Failure::last(error.with_kind(kind).with_remedy(remedy))
}

/// The error of a response with a status for each file, which servers send only for failures of one of them.
async fn part_refusal(resource: &HttpResource, response: Response) -> Error {
    let url = response.url().clone();
    let entries = match read_entries(resource, response).await {
        Ok(entries) => entries,
        Err(failure) => return failure.error,
    };
    let statuses: Vec<u16> = entries.iter().filter_map(|entry| entry.status).collect();
    if statuses.contains(&423) {
        return locked("the target", None);
    }
    let named = statuses.iter().find(|status| **status >= 400);
    let named =
        named.map_or_else(String::new, |status| format!(" ({status} for one of its parts)"));
    let text = format!("the server answers \"207 Multi-Status\"{named} for {url}");
    Error::new(Kind::Io, text).with_remedy("see the log of the server")
}

/// The error of a request that has left the target as it was.
pub(crate) fn unchanged(error: Error) -> Error {
    let state = "the target is as it was before";
    let remedy = error.remedy().map_or(state.to_owned(), |remedy| format!("{remedy}; {state}"));
    error.with_remedy(remedy)
}

fn no_directory() -> Error {
    let error =
        Error::new(Kind::NotFound, "the directory of the target does not exist at the server");
    error.with_remedy("check the URL, or make the directory (curl -X MKCOL URL)")
}

fn changed() -> Error {
    let text = "the target was made, replaced or removed by others during the copy";
    Error::new(Kind::InUse, text).with_remedy("check who writes to it, and copy again")
}

/// The error of a lock on `place`. None: one on the target or on its directory.
fn locked(place: &str, lock: Option<&DavLock>) -> Error {
    let shown = |text: &str| printable(text.as_bytes(), LOCK_MAX);
    let name = match lock {
        Some(DavLock { token, owner }) if owner.is_empty() => format!(" ({})", shown(token)),
        Some(DavLock { token, owner }) => format!(" by {} ({})", shown(owner), shown(token)),
        None => " or its directory".to_owned(),
    };
    let text = match lock {
        Some(_) => format!("{place} is locked{name}"),
        None => format!("{place}{name} is locked"),
    };
    Error::new(Kind::InUse, text).with_remedy("unlock it, or wait until the lock expires")
}

/// A new name beside a file. It has no characters that a server may encode in its own way, and begins with that of the
/// file: servers refuse names that begin with a dot.
fn temporary_beside(place: &Url) -> Result<Url> {
    let last = place.path().rsplit('/').next().unwrap_or_default();
    let name = blockhaul_catalog::percent_decode(last).unwrap_or_else(|_| last.to_owned());
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = name.chars().map(plain).take(NAME_MAX).collect();
    let mut bytes = [0; 8];
    let random = openssl::rand::rand_bytes(&mut bytes);
    random.map_err(|error| Error::new(Kind::Io, "no random number").because(error))?;
    let random = u64::from_be_bytes(bytes);
    let mut temporary = place.clone();
    if let Ok(mut parts) = temporary.path_segments_mut() {
        parts.pop().push(&format!("{name}.blockhaul-{random:016x}"));
    }
    Ok(temporary)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_are_beside_the_target_short_plain_and_new() {
        let long = format!("{}é.raw", "a".repeat(240));
        for name in ["a b.raw", "a%20%25%23%3F.raw", "é", "%ff%2f", &long] {
            let place = Url::parse(&format!("http://host/x%20y/{name}")).unwrap();
            let (one, two) = (temporary_beside(&place).unwrap(), temporary_beside(&place).unwrap());
            assert_ne!(one, two);
            let path = one.path().strip_prefix("/x%20y/").unwrap();
            assert!(path.len() < 100 && !path.contains(['/', '%']) && path.contains(".blockhaul-"));
            assert!(one.path().ends_with(|c: char| c.is_ascii_hexdigit()), "{one}");
        }
    }
}
