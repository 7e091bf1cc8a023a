//! URIs of servers that speak NBD after an HTTP upgrade.
//!
//! ```text
//! nbd+http://host:80/path?query          nbd+https://…       TCP, HTTPS
//! nbd+http://name/path?socket=PATH       nbd+https://…       Unix socket
//! ```
//!
//! Path and query are the server's, but for the parameters of NBD URIs and two more: `export`, the
//! name of the export, and `method`, the request's: GET or POST.

use std::fmt::Write as _;

use super::nbd::{TlsParameters, Transport, UriError};
use super::parse::{decode_text, host_and_port, is_scheme, take_parameter};
use crate::http::{Method, UpgradeRequest};
use crate::{limits, printable};

/// Supported schemes.
pub const SCHEMES: [&str; 2] = ["nbd+http", "nbd+https"];

/// A parsed URI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpUri {
    /// The transport of the server: TCP or a Unix socket.
    pub transport: Transport,
    /// The host of the URI, which the server's certificate is for; `None` where none is named.
    pub host: Option<String>,
    /// What to ask the server for.
    pub request: UpgradeRequest,
    /// The name of the export, empty for the default one.
    pub export: String,
    /// TLS parameters, if the scheme requires HTTPS.
    pub tls: Option<TlsParameters>,
}

/// Whether a text has one of the schemes.
pub fn is_http(text: &str) -> bool {
    let scheme = text.split_once(':').map(|(scheme, _)| scheme.to_ascii_lowercase());
    scheme.is_some_and(|scheme| SCHEMES.contains(&scheme.as_str()))
}

impl HttpUri {
    /// Parses a URI.
    ///
    /// # Errors
    /// An [`UriError`] whose text says what to write instead.
    pub fn parse(text: &str) -> Result<HttpUri, UriError> {
        if text.len() > limits::URI {
            return Err(UriError(format!("the URI is too long: {} bytes", text.len())));
        }
        let shown = || printable(text.as_bytes(), 256);
        let found = text.split_once("://").filter(|(scheme, _)| is_scheme(scheme));
        let Some((scheme, rest)) = found.filter(|_| is_http(text)) else {
            let text = format!("\"{}\" does not begin with nbd+http:// or nbd+https://", shown());
            return Err(UriError(text));
        };
        if rest.contains('#') {
            return Err(UriError(format!("\"{}\" holds a \"#\": write it as \"%23\"", shown())));
        }
        let secure = scheme.eq_ignore_ascii_case(SCHEMES[1]);
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = place.split_at(place.find('/').unwrap_or(place.len()));
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, rest)) => (Some(decode_text("user name", user)?), rest),
            None => (None, authority),
        };
        let mut target = String::from("/");
        escape(path.strip_prefix('/').unwrap_or(path), &mut target);
        let own = HttpUriParameters::take(query, user, &mut target)?;
        let method = own.method.as_deref().map(parse_method).transpose()?;
        let export = own.export.unwrap_or_default();
        if export.len() > limits::STRING {
            return Err(UriError(format!("export name is too long: {} bytes", export.len())));
        }
        let usual = if secure { 443 } else { 80 };
        let host = !authority.is_empty();
        let (name, port) = host_and_port(authority, usual)?;
        let field = host_field(&name, port, usual);
        let transport = match own.socket {
            Some(socket) if socket.is_empty() => {
                return Err(UriError("the parameter \"socket\" is empty".to_owned()));
            }
            Some(socket) if socket[1..].contains(&0) => {
                let text = "the parameter \"socket\" holds a NUL behind its start";
                return Err(UriError(text.to_owned()));
            }
            Some(socket) => Transport::Unix { socket },
            None => Transport::Tcp { host: name.clone(), port },
        };
        let named = host || matches!(transport, Transport::Tcp { .. });
        Ok(HttpUri {
            transport,
            host: named.then_some(name),
            request: UpgradeRequest { method, target, host: field },
            export,
            tls: secure.then_some(own.tls),
        })
    }
}

/// The parameters of a URI that are not the server's.
struct HttpUriParameters {
    export: Option<String>,
    method: Option<String>,
    socket: Option<Vec<u8>>,
    tls: TlsParameters,
}

impl HttpUriParameters {
    /// Takes them out of a query; appends the others to `target`.
    fn take(
        query: &str,
        user: Option<String>,
        target: &mut String,
    ) -> Result<HttpUriParameters, UriError> {
        let tls = TlsParameters { username: user, ..Default::default() };
        let mut own = HttpUriParameters { export: None, method: None, socket: None, tls };
        let mut separator = '?';
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let again = match name {
                "export" => own.export.replace(decode_text(name, value)?).is_some(),
                "method" => own.method.replace(value.to_owned()).is_some(),
                _ => match take_parameter(name, value, &mut own.socket, &mut own.tls)? {
                    Some(again) => again,
                    None => {
                        target.push(std::mem::replace(&mut separator, '&'));
                        escape(part, target);
                        false
                    }
                },
            };
            if again {
                return Err(UriError(format!("the parameter \"{name}\" stands twice")));
            }
        }
        Ok(own)
    }
}

fn parse_method(name: &str) -> Result<Method, UriError> {
    Method::parse(name).ok_or_else(|| {
        let name = printable(name.as_bytes(), 64);
        UriError(format!("the parameter \"method\" is \"{name}\", it may be GET or POST"))
    })
}

/// The value of the field `Host`; the port is left out if it is the usual one.
fn host_field(name: &str, port: u16, usual: u16) -> String {
    let mut field = String::new();
    if name.contains(':') {
        let _ = write!(field, "[{name}]");
    } else {
        escape(name, &mut field);
    }
    if port != usual {
        let _ = write!(field, ":{port}");
    }
    field
}

/// Appends text to a request's line or field: what cannot stand there is escaped, escapes stay.
fn escape(text: &str, out: &mut String) {
    for byte in text.bytes() {
        match byte {
            b'!'..=b'~' => out.push(char::from(byte)),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> HttpUri {
        HttpUri::parse(text).unwrap()
    }

    #[test]
    fn path_and_query_are_the_servers() {
        let uri =
            parsed("nbd+https://me@lxd:8443/1.0/v/nbd?project=a&export=e%20f&tls-hostname=x&b");
        assert_eq!(uri.transport, Transport::Tcp { host: "lxd".into(), port: 8443 });
        assert_eq!(uri.request.target, "/1.0/v/nbd?project=a&b");
        assert_eq!((uri.request.host.as_str(), uri.export.as_str()), ("lxd:8443", "e f"));
        let tls = uri.tls.unwrap();
        assert_eq!((tls.hostname.as_deref(), tls.username.as_deref()), (Some("x"), Some("me")));
        assert_eq!(uri.request.method, None);
    }

    #[test]
    fn hosts_ports_and_sockets() {
        let uri = parsed("NBD+HTTP://[::1]?method=get");
        assert_eq!(uri.transport, Transport::Tcp { host: "::1".into(), port: 80 });
        let UpgradeRequest { method, target, host } = uri.request;
        assert_eq!((method, &*target, &*host), (Some(Method::Get), "/", "[::1]"));
        let uri = parsed("nbd+https:///p?socket=/run/a%20b");
        assert_eq!(uri.transport, Transport::Unix { socket: b"/run/a b".to_vec() });
        assert_eq!((uri.host, uri.request.host.as_str()), (None, "localhost"));
        let uri = parsed("nbd+http://incus/p?socket=s");
        assert_eq!((uri.host.as_deref(), uri.request.host.as_str()), (Some("incus"), "incus"));
    }

    #[test]
    fn nothing_breaks_out_of_the_request() {
        let uri = parsed("nbd+http://h/a b\r\nX: y?q=\n\u{e4}");
        assert_eq!(uri.request.target, "/a%20b%0D%0AX:%20y?q=%0A%C3%A4");
        for (wrong, why) in [
            ("nbd+http://a\r\nb/", "host name"),
            ("nbd+http://h/?method=PUT", "GET or POST"),
            ("nbd+http://h/?export=a&export=b", "twice"),
            ("nbd+http://h/?socket=", "empty"),
            ("nbd+http://h/?socket=a%00b", "NUL"),
            ("nbd+http://h:0/", "port"),
            ("nbd+http://h/#f", "%23"),
            ("nbd+http:/h", "does not begin"),
            ("nbd://h", "does not begin"),
            ("nbd+http://h/?tls-type=anon", "anon"),
        ] {
            let error = HttpUri::parse(wrong).unwrap_err().to_string();
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }
}
