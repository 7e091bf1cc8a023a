//! Repositories behind servers that speak restic's REST protocol, versions 1 and 2.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{ParamValues, percent_decode, without_login_password};
use bytes::Bytes;
use reqwest::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE};
use reqwest::{Body, Method, Response, StatusCode, Url};
use tokio::sync::Semaphore;

use crate::client::{SENT_PIECE, client};
use crate::failure::{Failure, NextStep, Repetitions};
use crate::http_backend::{CA, CONNECTIONS, connections, is_local};
use crate::http_object::{HttpResource, basic, lost, within};
use crate::place::{CREATED_MAX, RemotePlace, other_bytes, unconfirmed};
use crate::response::{ContentRange, refusal};
use crate::{RemoteOptions, runtime};

/// The folder of packs, in which a server has no other folders.
const PACKS: &str = "data";
/// The folders that each repository has.
const FOLDERS: [&str; 5] = [PACKS, "index", "keys", "locks", "snapshots"];
/// A list with sizes; servers of the first version send names alone.
const LIST_TYPE: &str = "application/vnd.x.restic.rest.v2";
/// Longest list: 2 million names.
const LIST_MAX: u64 = 256 << 20;
/// Time for another program that makes the same file.
const SETTLED: Duration = Duration::from_millis(300);
const USER: &str = "RESTIC_REST_USERNAME";
const PASSWORD: &str = "RESTIC_REST_PASSWORD";

/// A repository behind a server.
pub struct RestPlace {
    server: Arc<RestServer>,
    connections: usize,
}

struct RestServer {
    resource: HttpResource,
    /// One for each request that may be under way.
    turns: Semaphore,
    /// Whether it has answered: before, one that is not there is an error at once.
    has_answered: AtomicBool,
}

/// A response that is a success.
struct RestAnswer {
    status: StatusCode,
    fields: HeaderMap,
    body: Vec<u8>,
}

impl RestPlace {
    /// The repository at `http(s)://[USER[:PASSWORD]@]HOST[:PORT]/PATH`, with the options of files of web servers. User
    /// and password are those of the environment if the URL has none, as restic takes them. No request is sent.
    ///
    /// # Errors
    /// [`Kind::Usage`]: the URL or an option is invalid. A file cannot be read.
    pub fn open(
        location: &str,
        options: &[(String, String)],
        limits: RemoteOptions,
    ) -> Result<RestPlace> {
        let shown = without_login_password(location).into_owned();
        let wrong = |why: String, remedy: &'static str| {
            Error::new(Kind::Usage, format!("rest:{shown}: {why}")).with_remedy(remedy)
        };
        let form = "write rest:https://HOST[:PORT]/PATH/";
        let mut url =
            Url::parse(location).map_err(|error| wrong(format!("not a URL: {error}"), form))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
            return Err(wrong("not a URL of http or https".to_owned(), form));
        }
        if url.query().is_some() {
            return Err(wrong("the URL has a query".to_owned(), form));
        }
        let args = ParamValues::check("rest", &[CA, CONNECTIONS], options)?;
        let authority = args.text("ca").map(PathBuf::from);
        if authority.is_some() && url.scheme() != "https" {
            return Err(wrong("ca is for https".to_owned(), "use https, or leave out ca"));
        }
        let connections = connections(&args).map_err(|why| wrong(why, "write connections=16"))?;
        let client = client(limits, authority.as_deref(), connections)?;
        let mut fields = HeaderMap::new();
        if let Some((user, password)) = login(&url)? {
            fields.extend([basic(&user, &password)?]);
            if url.scheme() == "http" && !is_local(&url) {
                let host = url.host_str().unwrap_or_default();
                log::warn!(
                    "the password for {host} is sent without TLS: others on the network can read it"
                );
            }
        }
        // Both are possible: the URL has a host.
        let (_, _) = (url.set_username(""), url.set_password(None));
        url.set_fragment(None);
        if !url.path().ends_with('/') {
            let path = format!("{}/", url.path());
            url.set_path(&path);
        }
        let resource = HttpResource { client, url, fields, limit: limits.timeout };
        let turns = Semaphore::new(connections);
        let server = RestServer { resource, turns, has_answered: AtomicBool::new(false) };
        Ok(RestPlace { server: Arc::new(server), connections })
    }

    fn run<T: Send + 'static, F: Future<Output = Result<T>> + Send + 'static>(
        &self,
        work: impl FnOnce(Arc<RestServer>) -> F,
    ) -> Result<T> {
        runtime::wait(work(self.server.clone()))
    }
}

/// User and password: of the URL, or else of the environment.
fn login(url: &Url) -> Result<Option<(String, String)>> {
    let password = url.password().map(percent_decode).transpose()?;
    if password.is_some() {
        log::warn!(
            "a password in a URL is visible to other users of this machine: set {USER} and {PASSWORD} instead"
        );
    }
    if password.is_none() && url.username().is_empty() {
        let variable = |name| std::env::var(name).unwrap_or_default();
        let user = variable(USER);
        return Ok((!user.is_empty()).then(|| (user, variable(PASSWORD))));
    }
    Ok(Some((percent_decode(url.username())?, password.unwrap_or_default())))
}

/// The name at the server of a file: packs are in one folder there.
fn server_name(file: &str) -> String {
    let pack = file.strip_prefix("data/").and_then(|rest| rest.split_once('/'));
    pack.map_or_else(|| file.to_owned(), |(_, name)| format!("{PACKS}/{name}"))
}

impl RemotePlace for RestPlace {
    fn connections(&self) -> usize {
        self.connections
    }

    fn names(&self, folder: &str) -> Result<Vec<String>> {
        let folder = folder.to_owned();
        self.run(async move |server| match folder.split_once('/') {
            // The server has no list of these.
            None if folder.is_empty() => {
                let has_config = server.size("config").await?.is_some();
                let config = has_config.then_some("config");
                Ok(FOLDERS.into_iter().chain(config).map(str::to_owned).collect())
            }
            None => server.list(&folder).await,
            Some((above, begin)) => {
                let mut names = server.list(above).await?;
                names.retain(|name| name.starts_with(begin));
                Ok(names)
            }
        })
    }

    fn names_below(&self, folder: &str) -> Result<Vec<String>> {
        self.names(folder)
    }

    fn whole(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let name = server_name(name);
        self.run(async move |server| server.whole(&name, most).await)
    }

    fn range(&self, name: &str, at: u64, len: usize) -> Result<Option<Vec<u8>>> {
        let name = server_name(name);
        self.run(async move |server| server.range(&name, at, len).await)
    }

    fn size(&self, name: &str) -> Result<Option<u64>> {
        let name = server_name(name);
        self.run(async move |server| server.size(&name).await)
    }

    fn make(&self) -> Result<()> {
        self.run(async move |server| {
            let mut url = server.resource.url.clone();
            url.set_query(Some("create=true"));
            let mut repetitions = Repetitions::opening();
            loop {
                // A repository that exists stays as it is.
                match server.send(&Method::POST, &url, &HeaderMap::new(), Some(Bytes::new())).await
                {
                    Ok(response) if response.status().is_success() => return Ok(()),
                    Ok(response) => repetitions.wait(refused(response).await, 0).await?,
                    Err(failure) => repetitions.wait(failure, 0).await?,
                }
            }
        })
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (name, bytes) = (server_name(name), Bytes::copy_from_slice(bytes));
        self.run(async move |server| {
            match server.post(&name, &bytes).await? {
                true => server.confirm(&name, bytes.len() as u64).await,
                // Its name is that of its contents, so it is the same file unless it is damaged.
                false if server.has(&name, &bytes).await? => Ok(()),
                false => Err(other_bytes(&name)),
            }
        })
    }

    /// A server may replace the file: then the bytes of the last writer stay, and it alone finds them here.
    fn create(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        let (name, bytes) = (server_name(name), Bytes::copy_from_slice(bytes));
        self.run(async move |server| {
            if let Some(found) = server.whole(&name, CREATED_MAX).await? {
                return Ok(found == bytes);
            }
            let is_posted = server.post(&name, &bytes).await?;
            if is_posted {
                tokio::time::sleep(SETTLED).await;
            }
            server.has(&name, &bytes).await
        })
    }

    fn remove(&self, name: &str) -> Result<()> {
        let name = server_name(name);
        self.run(async move |server| {
            let (method, none) = (Method::DELETE, HeaderMap::new());
            server.exchange(&method, &name, &none, CREATED_MAX).await.map(drop)
        })
    }
}

impl RestServer {
    fn url(&self, name: &str) -> Result<Url> {
        let joined = self.resource.url.join(name);
        joined.map_err(|error| Error::new(Kind::Invalid, "no name for a URL").because(error))
    }

    /// Sends one request; the response, whatever it says.
    async fn send(
        &self,
        method: &Method,
        url: &Url,
        fields: &HeaderMap,
        body: Option<Bytes>,
    ) -> Result<Response, Failure> {
        let resource = &self.resource;
        let Some(body) = body else {
            let (response, _) = resource.get(method, url, fields).await?;
            return Ok(response);
        };
        let mut request = resource.request(method, url);
        let pieces = u32::try_from(body.len() / SENT_PIECE).unwrap_or(u32::MAX);
        let limit = resource.limit.saturating_mul(pieces.saturating_add(1));
        let own = request.headers_mut();
        own.extend(fields.clone());
        own.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        own.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        *request.body_mut() = Some(Body::from(body));
        let sent = within(limit, resource.client.execute(request)).await;
        sent.ok_or_else(|| Failure::late("confirmed the file", limit))?.map_err(lost)
    }

    /// Sends a request until it succeeds, and receives at most `most` bytes. None: there is no such file.
    async fn exchange(
        &self,
        method: &Method,
        name: &str,
        fields: &HeaderMap,
        most: u64,
    ) -> Result<Option<RestAnswer>> {
        let _turn = self.turns.acquire().await;
        let url = self.url(name)?;
        let mut repetitions = Repetitions::new();
        loop {
            let failure = match self.attempt(method, &url, fields, most).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            let is_absent = failure.error.kind() == Kind::Disconnected
                && !self.has_answered.load(Ordering::Relaxed);
            if is_absent {
                return Err(failure.error);
            }
            repetitions.wait(failure, 0).await?;
        }
    }

    async fn attempt(
        &self,
        method: &Method,
        url: &Url,
        fields: &HeaderMap,
        most: u64,
    ) -> Result<Option<RestAnswer>, Failure> {
        let mut response = self.send(method, url, fields, None).await?;
        self.has_answered.store(true, Ordering::Relaxed);
        let status = response.status();
        if status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if status == StatusCode::RANGE_NOT_SATISFIABLE {
            return Err(Failure::last(Error::new(Kind::Invalid, "the file ends earlier")));
        }
        if !status.is_success() {
            return Err(refused(response).await);
        }
        let (fields, mut body) = (response.headers().clone(), Vec::new());
        if method == Method::HEAD {
            return Ok(Some(RestAnswer { status, fields, body }));
        }
        let expected = response.content_length();
        if expected.is_some_and(|length| length > most) {
            return Err(Failure::last(too_long(most)));
        }
        while let Some(more) = self.resource.chunk(&mut response, self.resource.due()).await? {
            if (body.len() + more.len()) as u64 > most {
                return Err(Failure::last(too_long(most)));
            }
            body.extend_from_slice(&more);
        }
        if expected.is_some_and(|length| length != body.len() as u64) {
            let text = "the server sent less than the file has";
            return Err(Failure::passing(Error::new(Kind::Disconnected, text)));
        }
        Ok(Some(RestAnswer { status, fields, body }))
    }

    async fn whole(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let found = self.exchange(&Method::GET, name, &HeaderMap::new(), most).await?;
        Ok(found.map(|found| found.body))
    }

    async fn range(&self, name: &str, at: u64, len: usize) -> Result<Option<Vec<u8>>> {
        if len == 0 {
            return Ok(Some(Vec::new()));
        }
        let end = at.saturating_add(len as u64);
        let range = HeaderValue::from_str(&format!("bytes={at}-{}", end - 1));
        let fields = HeaderMap::from_iter(range.ok().map(|range| (RANGE, range)));
        let Some(found) = self.exchange(&Method::GET, name, &fields, len as u64).await? else {
            return Ok(None);
        };
        let range = ContentRange::of(&found.fields).and_then(|found| found.range);
        let is_right = found.status == StatusCode::PARTIAL_CONTENT
            && range.is_some_and(|(first, _)| first == at)
            // A file that has these bytes alone.
            || found.status == StatusCode::OK && at == 0;
        if !is_right {
            let error = Error::new(Kind::Unsupported, "the server does not send ranges of files");
            return Err(
                error.with_remedy("use a server with ranges: rest-server, or rclone serve restic")
            );
        }
        if found.body.len() != len {
            let text = format!("the file ends before byte {end}");
            return Err(Error::new(Kind::Invalid, text));
        }
        Ok(Some(found.body))
    }

    async fn size(&self, name: &str) -> Result<Option<u64>> {
        let found = self.exchange(&Method::HEAD, name, &HeaderMap::new(), 0).await?;
        let Some(found) = found else { return Ok(None) };
        let length =
            found.fields.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let length = length.ok_or_else(|| {
            let error = Error::new(
                Kind::Unsupported,
                format!("the server does not tell the size of {name}"),
            );
            error.with_remedy("use rest-server, or rclone serve restic")
        })?;
        Ok(Some(length))
    }

    async fn list(&self, folder: &str) -> Result<Vec<String>> {
        let fields = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(LIST_TYPE))]);
        let found = self.exchange(&Method::GET, &format!("{folder}/"), &fields, LIST_MAX).await?;
        let Some(found) = found else { return Ok(Vec::new()) };
        names(&found.body).ok_or_else(|| {
            let error = Error::new(
                Kind::Unsupported,
                "the server answers with something else than a list of files",
            );
            error.with_remedy("check the URL: it is that of a repository of restic's REST protocol")
        })
    }

    /// Sends a file. False: the server has a file with this name, or refuses to say whether.
    async fn post(&self, name: &str, bytes: &Bytes) -> Result<bool> {
        let _turn = self.turns.acquire().await;
        let url = self.url(name)?;
        let mut repetitions = Repetitions::new();
        loop {
            let sent = self.send(&Method::POST, &url, &HeaderMap::new(), Some(bytes.clone())).await;
            let failure = match sent {
                Ok(response) if response.status().is_success() => return Ok(true),
                Ok(response) => {
                    let is_there = matches!(response.status().as_u16(), 403 | 409 | 412);
                    let failure = refused(response).await;
                    if is_there && self.is_there(&url).await {
                        return Ok(false);
                    }
                    failure
                }
                Err(failure) => failure,
            };
            let is_repeated = failure.next != NextStep::GiveUp;
            // The server may have the file, although its answer was lost.
            if let Err(error) = repetitions.wait(failure, 0).await {
                return if is_repeated && self.is_there(&url).await {
                    Ok(false)
                } else {
                    Err(error)
                };
            }
        }
    }

    async fn is_there(&self, url: &Url) -> bool {
        let found = self.attempt(&Method::HEAD, url, &HeaderMap::new(), 0).await;
        matches!(found, Ok(Some(_)))
    }

    /// Checks the length of a file that was written.
    async fn confirm(&self, name: &str, length: u64) -> Result<()> {
        match self.size(name).await? {
            Some(found) if found == length => Ok(()),
            Some(_) => Err(other_bytes(name)),
            None => Err(unconfirmed(name)),
        }
    }

    /// Whether a file has these bytes.
    async fn has(&self, name: &str, bytes: &Bytes) -> Result<bool> {
        match self.whole(name, bytes.len() as u64).await {
            Ok(found) => Ok(found.is_some_and(|found| found == *bytes)),
            Err(error) if error.kind() == Kind::Invalid => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The names of a list of either version.
fn names(body: &[u8]) -> Option<Vec<String>> {
    // A folder without files, of some servers.
    if body.trim_ascii() == b"null" {
        return Some(Vec::new());
    }
    let list: Vec<serde_json::Value> = serde_json::from_slice(body).ok()?;
    let name = |entry: serde_json::Value| match entry {
        serde_json::Value::String(name) => Some(name),
        entry => entry.get("name")?.as_str().map(str::to_owned),
    };
    list.into_iter().map(name).collect()
}

fn too_long(most: u64) -> Error {
    let text = format!("the server sends more than {most} bytes");
    Error::new(Kind::Invalid, text).with_remedy("check the server, and run restic check")
}

/// A response that is no success.
async fn refused(response: Response) -> Failure {
    let status = response.status().as_u16();
    let Failure { error, next } = refusal(response, false).await;
    let error = match status {
        401 => error.with_remedy(format!("set {USER} and {PASSWORD}")),
        403 => error.with_remedy(
            "check the rights of the user: a server may allow only what is below its name, or only additions",
        ),
        413 => error.with_kind(Kind::NoSpace).with_remedy("free space at the server, or raise its quota"),
        507 => error.with_remedy("free space at the server, or raise its quota"),
        405 => error.with_remedy("check the URL: the server may be none of restic's REST protocol"),
        _ => error,
    };
    Failure { error, next }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn lists_of_both_versions_are_read() {
        let some = Some(vec!["ab".to_owned(), "cd".to_owned()]);
        assert_eq!(names(br#"["ab","cd"]"#), some);
        assert_eq!(names(br#"[{"name":"ab","size":1},{"name":"cd","size":2}]"#), some);
        assert_eq!(names(b" null\n"), Some(Vec::new()));
        for bad in ["", "{}", "[1]", "[{}]", "<html>"] {
            assert_eq!(names(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn packs_are_in_one_folder() {
        assert_eq!(server_name("data/ab/abcd"), "data/abcd");
        assert_eq!(server_name("index/abcd"), "index/abcd");
        assert_eq!(server_name("config"), "config");
    }

    #[test]
    fn urls_are_checked_and_passwords_are_not_shown() {
        let limits = RemoteOptions { connect_timeout: Duration::ZERO, timeout: Duration::ZERO };
        let open = |location: &str, options: &[(&str, &str)]| {
            let options: Vec<_> = options
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect();
            RestPlace::open(location, &options, limits)
        };
        for (location, options) in [
            ("ftp://u:secret@h/x/", &[][..]),
            ("http://u:secret@/x/", &[]),
            ("http://u:secret@h/x?y", &[]),
            ("http://u:secret@h/x", &[("ca", "f")]),
            ("http://u:secret@h/x", &[("connections", "0")]),
            ("http://u:secret@h/x", &[("other", "0")]),
        ] {
            let error = open(location, options).err().unwrap();
            assert_eq!(error.kind(), Kind::Usage, "{location}: {error}");
            assert!(!format!("{error:?} {:?}", error.remedy()).contains("secret"), "{error:?}");
        }
        let place = open("https://u:secret%40@h/a", &[]).unwrap();
        assert_eq!(place.server.resource.url.as_str(), "https://h/a/");
        assert_eq!(place.server.url("data/x").unwrap().as_str(), "https://h/a/data/x");
        assert!(!format!("{:?}", place.server.resource.fields).contains("secret"));
    }
}
