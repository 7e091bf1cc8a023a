//! The HTTP exchange in front of NBD: asks a server to go on with NBD, and says why it does not.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::http::{Answer, EXCERPT_MAX, Request};
use blockhaul_wire::printable;

use crate::connect::{Awaited, Options};
use crate::http_head::{BODY_MAX, head, more};
use crate::link::Link;

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
    let answer = head(link, 0).await?;
    if answer.upgraded { Ok(()) } else { Err(refusal(link, &answer).await) }
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
