//! Heads of HTTP answers, received over a connection.

use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::http::{self, EXCERPT_MAX, HEAD_MAX, HttpResponse};

use crate::link::{HandshakeLink, receive_error};

/// Maximum number of answers before the last one (status 1xx).
const INTERIM_MAX: u32 = 8;
/// Maximum time to wait for the text of a refusal.
pub(crate) const BODY_MAX: Duration = Duration::from_secs(1);

/// The head of the next answer that is not an interim one. `answers`: how many came before it on this
/// connection.
pub(crate) async fn head(link: &mut HandshakeLink, answers: u64) -> Result<HttpResponse> {
    let mut interim = 0;
    loop {
        let wrong = |error: http::HttpError| Error::new(Kind::Invalid, error.to_string());
        let Some((answer, used)) = http::answer(link.window.bytes()).map_err(wrong)? else {
            if !more(link).await? {
                // On a used connection that is how servers end idle ones.
                let before = if answers > 0 { " again" } else { "" };
                let text = format!(
                    "the server closed the connection before it answered the HTTP request{before}"
                );
                return Err(Error::new(Kind::Disconnected, text));
            }
            continue;
        };
        link.window.consume(used);
        link.unanswered = false;
        interim += 1;
        match answer.status {
            100 | 102 | 103 if interim < INTERIM_MAX => {}
            _ => return Ok(answer),
        }
    }
}

/// Receives more bytes; false at the end of the stream.
pub(crate) async fn more(link: &mut HandshakeLink) -> Result<bool> {
    if link.window.bytes().len() * 2 > link.window.capacity() {
        link.window.grow(HEAD_MAX + EXCERPT_MAX);
    }
    let filled = link.window.fill(&link.stream).await;
    if filled.is_ok() {
        link.unanswered = false;
    }
    filled.map_err(receive_error)
}
