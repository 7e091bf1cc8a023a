//! The HTTP exchange in front of NBD: asks a server to go on with NBD, and says why it does not.

use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::http::{self, Answer, EXCERPT_MAX, HEAD_MAX, Request};
use blockhaul_wire::printable;

use crate::connect::{Awaited, Options};
use crate::link::{Link, unheard};

/// Maximum number of answers before the last one (status 1xx).
pub(crate) const INTERIM_MAX: u32 = 8;
/// Maximum time to wait for the text of a refusal.
pub(crate) const BODY_MAX: Duration = Duration::from_secs(1);

/// Sends the request, over TLS if the options say so, and reads the answer: NBD comes next.
pub(crate) async fn upgrade(
    link: &mut Link,
    request: &Request,
    options: &Options,
    awaited: &Awaited,
) -> Result<()> {
    if let Some(connector) = &options.tls {
        awaited.set("answer in the handshake of TLS");
        link.secure(connector).await?;
    }
    let mut out = Vec::new();
    request.emit(&mut out);
    link.say(&mut out).await?;
    awaited.set("answer to the HTTP request");
    let mut interim = 0;
    loop {
        let wrong = |error: http::Error| Error::new(Kind::Invalid, error.to_string());
        let Some((answer, used)) = http::answer(link.window.bytes()).map_err(wrong)? else {
            if !more(link).await? {
                let text = "the server closed the connection before it answered the HTTP request";
                return Err(Error::new(Kind::Disconnected, text));
            }
            continue;
        };
        link.window.consume(used);
        link.unanswered = false;
        interim += 1;
        match answer.status {
            _ if answer.upgraded => return Ok(()),
            100 | 102 | 103 if interim < INTERIM_MAX => {}
            _ => return Err(refusal(link, &answer).await),
        }
    }
}

/// Receives more bytes; false at the end of the stream.
pub(crate) async fn more(link: &mut Link) -> Result<bool> {
    if link.window.bytes().len() * 2 > link.window.capacity() {
        link.window.grow(HEAD_MAX + EXCERPT_MAX);
    }
    let filled = link.window.fill(&link.stream).await;
    if filled.is_ok() {
        link.unanswered = false;
    }
    filled.map_err(unheard)
}

/// An answer that is no upgrade, with the beginning of its text.
async fn refusal(link: &mut Link, answer: &Answer) -> Error {
    let most = answer.length.unwrap_or(u64::MAX).min(EXCERPT_MAX as u64);
    let most = if answer.status < 200 { 0 } else { most as usize };
    let due = blockhaul_io::now() + BODY_MAX;
    let mut body = Vec::new();
    loop {
        // A receive that is given up loses what came before it.
        let seen = link.window.bytes();
        body.clear();
        body.extend_from_slice(&seen[..seen.len().min(most)]);
        let left = due.saturating_duration_since(blockhaul_io::now());
        let filled =
            if body.len() < most { blockhaul_io::timeout(left, more(link)).await } else { break };
        // Without all of it the status says enough.
        if !matches!(filled, Ok(Ok(true))) {
            break;
        }
    }
    let body = printable(&body, EXCERPT_MAX);
    let mut text = format!("the server does not go on with NBD, it answers \"{}\"", answer.line);
    if !body.is_empty() {
        text += &format!(": \"{body}\"");
    }
    let kind = match answer.status {
        401 | 403 | 407 => Kind::Refused,
        404 | 410 => Kind::NotFound,
        408 | 429 | 500..600 => Kind::Io,
        _ => Kind::Unsupported,
    };
    Error::new(kind, text)
}
