//! Checks of responses: which object they are of, which range they have, what refusals mean.

use std::time::Duration;

use blockhaul_block::{Error, Kind};
use blockhaul_wire::printable;
use reqwest::header::{
    CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, HeaderName, HeaderValue, IF_MATCH,
    IF_UNMODIFIED_SINCE, LAST_MODIFIED, RETRY_AFTER,
};
use reqwest::{Response, StatusCode, Url};

use crate::failure::{Failure, NextStep};
use crate::service_words::ServiceWords;

/// Longest pause that a server can ask for.
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Bytes of the text of a refusal that are read, and that are shown.
const BODY_MAX: usize = 4 << 10;
const EXCERPT_MAX: usize = 300;
/// Time for the text of a refusal.
const EXCERPT_TIME: Duration = Duration::from_secs(1);
/// Encodings of content, and the ends of names of files that are stored in them.
const STORED_ENCODINGS: [(&str, &str); 5] =
    [("gzip", ".gz"), ("x-gzip", ".gz"), ("xz", ".xz"), ("zstd", ".zst"), ("x-bzip2", ".bz2")];

/// A field that a request has only if the object has the values of the first response.
pub(crate) type Condition = (HeaderName, HeaderValue);

/// What tells a version of an object from others.
#[derive(Debug, Clone, Default)]
pub(crate) struct ObjectVersion {
    etag: Option<HeaderValue>,
    modified: Option<HeaderValue>,
}

impl ObjectVersion {
    pub(crate) fn of(fields: &HeaderMap) -> ObjectVersion {
        let field = |name| fields.get(name).filter(|value| !value.is_empty()).cloned();
        ObjectVersion { etag: field(ETAG), modified: field(LAST_MODIFIED) }
    }

    /// The entity tag, or the time of the last change.
    pub(crate) fn name(&self) -> Option<String> {
        let name = self.etag.as_ref().or(self.modified.as_ref())?;
        Some(String::from_utf8_lossy(name.as_bytes()).into_owned())
    }

    /// Whether nothing tells this version from others.
    pub(crate) fn is_unknown(&self) -> bool {
        self.etag.is_none() && self.modified.is_none()
    }

    /// Whether both may be the same version. The entity tag of a file that was just written is weak at some servers,
    /// and strong a second later.
    pub(crate) fn fits(&self, other: &ObjectVersion) -> bool {
        let tag = |value: &HeaderValue| {
            let bytes = value.as_bytes();
            bytes.strip_prefix(b"W/").unwrap_or(bytes).to_vec()
        };
        match (&self.etag, &other.etag) {
            (Some(one), Some(other)) => tag(one) == tag(other),
            _ => match (&self.modified, &other.modified) {
                (Some(one), Some(other)) => one == other,
                _ => true,
            },
        }
    }

    /// The condition of later requests: a strong ETag, else the time of the last change.
    pub(crate) fn condition(&self) -> Option<Condition> {
        let strong = self.etag.clone().filter(|etag| !etag.as_bytes().starts_with(b"W/"));
        let strong = strong.map(|etag| (IF_MATCH, etag));
        strong.or_else(|| self.modified.clone().map(|time| (IF_UNMODIFIED_SINCE, time)))
    }
}

/// The field `Content-Range`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContentRange {
    /// The first byte and the byte after the last one; none in a refusal.
    pub(crate) range: Option<(u64, u64)>,
    /// Bytes of the object.
    pub(crate) total: Option<u64>,
}

impl ContentRange {
    pub(crate) fn of(fields: &HeaderMap) -> Option<ContentRange> {
        let text = fields.get(CONTENT_RANGE)?.to_str().ok()?.trim();
        let (range, total) = text.strip_prefix("bytes")?.trim_start().split_once('/')?;
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let total = if total.trim() == "*" { None } else { Some(number(total)?) };
        let range = match range.trim() {
            "*" => None,
            range => {
                let (first, last) = range.split_once('-')?;
                let end = number(last)?.checked_add(1)?;
                Some((number(first)?, end)).filter(|(first, end)| first < end)
            }
        };
        let is_inside = |end| total.is_none_or(|total| end <= total);
        Some(ContentRange { range, total }).filter(|_| range.is_none_or(|(_, end)| is_inside(end)))
    }
}

/// Refuses a body that is not the bytes of the object.
pub(crate) fn check_encoding(fields: &HeaderMap, url: &Url) -> Result<(), Failure> {
    let Some(encoding) = fields.get(CONTENT_ENCODING) else { return Ok(()) };
    let encoding = encoding.to_str().unwrap_or("?").to_ascii_lowercase();
    let path = url.path().to_ascii_lowercase();
    let is_stored =
        STORED_ENCODINGS.iter().any(|(name, end)| *name == encoding && path.ends_with(end));
    if is_stored || ["", "identity", "aws-chunked"].contains(&encoding.as_str()) {
        return Ok(());
    }
    let shown = printable(encoding.as_bytes(), 40);
    let text = format!("the server sends the disk encoded (Content-Encoding: {shown})");
    let remedy = "store the object without Content-Encoding, or make the server send it as it is";
    Err(Failure::last(Error::new(Kind::Unsupported, text).with_remedy(remedy)))
}

/// The error of an object that is another one than when it was opened.
pub(crate) fn changed() -> Error {
    let text = "the object was replaced or changed at the server while it was read";
    // No bytes of the version that was opened can be had any more.
    Error::new(Kind::NotFound, text).with_remedy("start again with the new object")
}

/// The time that a server wants to pass before the next request.
pub(crate) fn retry_after(fields: &HeaderMap) -> Option<Duration> {
    let text = fields.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let due = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?;
    Duration::try_from(due.duration_since(jiff::Timestamp::now())).ok()
}

/// A response that is no success. `moved`: the request went to a place that a redirect named.
pub(crate) async fn refusal(mut response: Response, moved: bool) -> Failure {
    let status = response.status();
    let wait = retry_after(response.headers());
    let excerpt = excerpt(&mut response).await;
    let mut text = format!("the server answers \"{status}\"");
    if !excerpt.is_empty() {
        text += &format!(": \"{excerpt}\"");
    }
    let (kind, remedy) = meaning(status);
    let error = Error::new(kind, text);
    let error = if remedy.is_empty() { error } else { error.with_remedy(remedy) };
    let next = match status.as_u16() {
        // Signed places expire.
        403 | 404 | 410 if moved => NextStep::Locate,
        501 | 505 | 507 => NextStep::GiveUp,
        408 | 425 | 429 | 500..=599 => NextStep::Repeat(wait),
        _ => NextStep::GiveUp,
    };
    Failure { error, next }
}

fn meaning(status: StatusCode) -> (Kind, &'static str) {
    match status.as_u16() {
        401 => (
            Kind::Refused,
            "give a user and a password (https://USER@HOST/…#password-file=FILE) or a token \
             (#header-file=FILE with the line \"Authorization: Bearer TOKEN\")",
        ),
        403 => (
            Kind::Refused,
            "check the permissions of the object, and whether a signed URL has expired",
        ),
        407 => (
            Kind::Refused,
            "name the user of the proxy in https_proxy (http://USER:PASSWORD@HOST:PORT)",
        ),
        404 | 410 => (Kind::NotFound, "check the path in the URL"),
        408 | 425 | 429 => (Kind::Io, "use fewer connections (connections=N), or try again later"),
        507 => (Kind::NoSpace, ""),
        500..=599 => (Kind::Io, "the server has a fault: see its log, or try again later"),
        _ => (Kind::Unsupported, "check the URL: this response is none of a file"),
    }
}

/// The beginning of the text of a response, on one line; of XML and JSON only what says why.
async fn excerpt(response: &mut Response) -> String {
    let mut bytes = Vec::new();
    let read = async {
        while bytes.len() < BODY_MAX {
            match response.chunk().await {
                Ok(Some(more)) => bytes.extend_from_slice(&more[..more.len().min(BODY_MAX)]),
                _ => break,
            }
        }
    };
    // Without its text the status says enough.
    let _ = tokio::time::timeout(EXCERPT_TIME, read).await;
    let brief = ServiceWords::brief(&String::from_utf8_lossy(&bytes));
    let words: Vec<_> = brief.split_whitespace().collect();
    printable(words.join(" ").as_bytes(), EXCERPT_MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    fn fields(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn ranges_are_checked() {
        let range = |text| {
            ContentRange::of(&fields(CONTENT_RANGE, text)).map(|found| (found.range, found.total))
        };
        assert_eq!(range("bytes 0-0/10"), Some((Some((0, 1)), Some(10))));
        assert_eq!(range("bytes 5-9/*"), Some((Some((5, 10)), None)));
        assert_eq!(range("bytes */10"), Some((None, Some(10))));
        for text in [
            "",
            "bytes",
            "bytes 0-0",
            "bytes 1-0/9",
            "bytes 0-9/9",
            "items 0-0/9",
            "bytes -1/9",
            "bytes 0-18446744073709551615/*",
            "bytes 0-0/x",
        ] {
            assert_eq!(range(text).and_then(|found| found.0), None, "{text}");
        }
    }

    #[test]
    fn versions_are_told_apart_by_etag_then_by_time() {
        let version = |etag: &str, time: &str| {
            let mut all = HeaderMap::new();
            all.extend(fields(ETAG, etag));
            all.extend(fields(LAST_MODIFIED, time));
            ObjectVersion::of(&all)
        };
        assert!(version("\"a\"", "x").fits(&version("\"a\"", "y")));
        assert!(!version("\"a\"", "x").fits(&version("\"b\"", "x")));
        assert!(version("W/\"a\"", "x").fits(&version("\"a\"", "x")));
        assert!(!version("W/\"a\"", "x").fits(&version("\"b\"", "x")));
        assert!(!version("", "x").fits(&version("\"b\"", "y")));
        assert!(version("", "").fits(&version("\"b\"", "y")));
        assert_eq!(version("\"a\"", "x").condition().unwrap().0, IF_MATCH);
        assert_eq!(version("W/\"a\"", "x").condition().unwrap().0, IF_UNMODIFIED_SINCE);
        assert_eq!(version("W/\"a\"", "").condition(), None);
    }

    #[test]
    fn pauses_are_seconds_or_dates() {
        assert_eq!(retry_after(&fields(RETRY_AFTER, "7")), Some(Duration::from_secs(7)));
        let past = retry_after(&fields(RETRY_AFTER, "Sun, 06 Nov 1994 08:49:37 GMT"));
        assert_eq!(past, None);
        let due = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(100);
        let due =
            jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&due).unwrap();
        let wait = retry_after(&fields(RETRY_AFTER, &due)).unwrap().as_secs();
        assert!((95..=100).contains(&wait), "{wait}");
    }
}
