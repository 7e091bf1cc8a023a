//! The HTTP exchange in front of NBD: asks a server to go on with NBD, and says why it does not.

use std::fmt;
use std::sync::{Arc, OnceLock};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::http::{self, EXCERPT_MAX, HttpResponse, Method, UpgradeRequest};
use blockhaul_wire::printable;
use serde_json::Value;

use crate::connect::{ConnectOptions, ServerAddress, WaitReason, dial};
use crate::http_head::{BODY_MAX, head, more};
use crate::link::HandshakeLink;

/// Where an HTTP server listens, and what to ask it for.
#[derive(Clone)]
pub struct HttpAddress {
    /// A Unix socket, or a host and a port.
    pub address: ServerAddress,
    /// The request.
    pub request: UpgradeRequest,
    /// The method that the server has accepted, for further connections.
    accepted: Arc<OnceLock<Method>>,
}

impl HttpAddress {
    /// This request at this address. Clones share the method that the server accepts.
    pub fn new(address: ServerAddress, request: UpgradeRequest) -> HttpAddress {
        HttpAddress { address, request, accepted: Arc::default() }
    }

    /// Identifies the export's server among others: requests of both methods reach the same volume.
    pub(crate) fn server_name(&self) -> String {
        format!("{:?} {}", self.address, self.request.target)
    }

    /// The methods to try, in order.
    fn methods(&self) -> &[Method] {
        match self.request.method.or(self.accepted.get().copied()) {
            Some(Method::Get) => &[Method::Get],
            Some(Method::Post) => &[Method::Post],
            None => &[Method::Post, Method::Get],
        }
    }
}

impl PartialEq for HttpAddress {
    fn eq(&self, other: &HttpAddress) -> bool {
        (&self.address, &self.request) == (&other.address, &other.request)
    }
}

impl Eq for HttpAddress {}

impl fmt::Debug for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HttpAddress").field(&self.address).field(&self.request).finish()
    }
}

/// Connects, and asks the server to go on with NBD, over TLS if the options say so. GET follows POST where the
/// server has no POST.
pub(crate) async fn dial_http(
    http: &HttpAddress,
    options: &ConnectOptions,
    awaited: &WaitReason,
) -> Result<HandshakeLink> {
    let mut refused: Option<Refusal> = None;
    for method in http.methods() {
        let refusal = match upgraded(http, *method, options, awaited).await? {
            Ok(link) => {
                // Another connection may have set the same method.
                let _ = http.accepted.set(*method);
                return Ok(link);
            }
            Err(refusal) => refusal,
        };
        let is_method_unknown = refusal.is_method_unknown();
        // The answer to the method that the server knows says more.
        if refused.is_none() || !refusal.is_method_missing() {
            refused = Some(refusal);
        }
        if !is_method_unknown {
            break;
        }
    }
    Err(refused.map_or_else(Error::misfit, Refusal::into_error))
}

/// One connection and one request.
async fn upgraded(
    http: &HttpAddress,
    method: Method,
    options: &ConnectOptions,
    awaited: &WaitReason,
) -> Result<std::result::Result<HandshakeLink, Refusal>> {
    let mut link = HandshakeLink::new(dial(&http.address).await?);
    let answer = ask(&mut link, &http.request, method, options, awaited).await;
    let answer = answer.map_err(|error| link.doubted(error))?;
    if answer.upgraded {
        return Ok(Ok(link));
    }
    let body = excerpt(&mut link, &answer).await;
    Ok(Err(Refusal { message: message(&answer, &body), answer, method }))
}

async fn ask(
    link: &mut HandshakeLink,
    request: &UpgradeRequest,
    method: Method,
    options: &ConnectOptions,
    awaited: &WaitReason,
) -> Result<HttpResponse> {
    if let Some(connector) = &options.tls {
        awaited.set("answer in the handshake of TLS");
        link.secure(connector).await?;
    }
    let mut out = Vec::new();
    request.emit(method, &mut out);
    link.say(&mut out).await?;
    awaited.set("answer to the HTTP request");
    head(link, 0).await
}

/// The beginning of the body of an answer.
async fn excerpt(link: &mut HandshakeLink, answer: &HttpResponse) -> Vec<u8> {
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
    body
}

/// The message for a reader in the body of an answer, printable: text, or the member of a JSON object that says
/// what is wrong. Pages of HTML and other JSON are for programs.
fn message(answer: &HttpResponse, body: &[u8]) -> Option<String> {
    let body = match http::chunk(body) {
        Ok(Some((length, used))) if answer.chunked => {
            let rest = &body[used..];
            &rest[..rest.len().min(usize::try_from(length).unwrap_or(usize::MAX))]
        }
        _ => body,
    };
    match body.trim_ascii().first() {
        None | Some(b'<') => None,
        Some(b'{' | b'[') => {
            let reply: Value = serde_json::from_slice(body).ok()?;
            let said = reply["error"].as_str().or(reply["message"].as_str())?;
            Some(printable(said.as_bytes(), EXCERPT_MAX)).filter(|said| !said.is_empty())
        }
        Some(_) => Some(printable(body, EXCERPT_MAX)),
    }
}

/// An answer that is no upgrade.
struct Refusal {
    answer: HttpResponse,
    message: Option<String>,
    method: Method,
}

impl Refusal {
    /// The server refuses the method, whatever the path.
    fn is_method_missing(&self) -> bool {
        [405, 501].contains(&self.answer.status)
    }

    /// Another method may be right.
    fn is_method_unknown(&self) -> bool {
        self.is_method_missing() || self.answer.status == 404
    }

    fn into_error(self) -> Error {
        Error::new(self.kind(), self.text()).with_remedy(self.remedy())
    }

    fn kind(&self) -> Kind {
        match self.answer.status {
            401 | 403 | 407 => Kind::Refused,
            404 | 410 => Kind::NotFound,
            408 | 429 | 500 | 502..600 => Kind::Io,
            _ => Kind::Unsupported,
        }
    }

    fn text(&self) -> String {
        let HttpResponse { line, .. } = &self.answer;
        let text = format!("the server does not go on with NBD, it answers \"{line}\"");
        match &self.message {
            Some(message) if !repeats(line, message) => format!("{text}: \"{message}\""),
            _ => text,
        }
    }

    fn remedy(&self) -> String {
        let other = match self.method {
            Method::Get => "POST",
            Method::Post => "GET",
        };
        match self.answer.status {
            300..400 if let Some(place) = &self.answer.location => {
                format!("redirects are not followed: use the address {place}")
            }
            400 => "check the path and query of the URI, and that no other client is connected".into(),
            401 | 403 | 407 => {
                "check that the server trusts the client's certificate (tls-certificates=DIR), and what its \
                 user may do"
                    .into()
            }
            404 | 410 => "check the path and query of the URI".into(),
            405 | 501 => format!("check the path of the URI, or add method={other} to it"),
            408 | 429 | 500 | 502..600 => {
                "try again; if the answer stays, see the log of the server, or restart it".into()
            }
            _ => "check that the path of the URI is that of an NBD export".into(),
        }
    }
}

/// Whether a message has the words of the status line.
fn repeats(line: &str, message: &str) -> bool {
    line.to_ascii_lowercase().ends_with(&message.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(head: &str, body: &str) -> Option<String> {
        let head = format!("HTTP/1.1 500 x\r\n{head}\r\n");
        let (answer, _) = http::answer(head.as_bytes()).unwrap().unwrap();
        message(&answer, body.as_bytes())
    }

    #[test]
    fn the_message_of_a_body_is_for_readers() {
        let of = |body: &str| said("", body);
        assert_eq!(of(r#"{"type":"error","error":"no volume"}"#).as_deref(), Some("no volume"));
        assert_eq!(of(r#"{"kind":"Status","message":"no pod"}"#).as_deref(), Some("no pod"));
        assert_eq!(of("{\"error\":\"\u{1b}[1m\"}").as_deref(), None);
        assert_eq!(of(r#"{"error":"\u001b[1m"}"#).as_deref(), Some("\\u{1b}[1m"));
        for silent in ["", "\r\n", "<html>", r#"{"error":"cut"#, r#"{"error":{}}"#, "[1]"] {
            assert_eq!(of(silent), None, "{silent}");
        }
        assert_eq!(of(&"[".repeat(EXCERPT_MAX)), None);
        assert_eq!(of("busy").as_deref(), Some("busy"));
        let chunked = "Transfer-Encoding: chunked\r\n";
        assert_eq!(said(chunked, "4\r\nbusy\r\n0\r\n\r\n").as_deref(), Some("busy"));
        assert_eq!(said(chunked, "ffffffffffffffff\r\nbusy").as_deref(), Some("busy"));
    }
}
