//! Parses the parts of a URI: scheme, authority, parameters, percent-encoding.

use std::net::Ipv6Addr;

use super::nbd::{PARAMETERS, SCHEMES, TlsParameters, TlsType, Transport, Uri, UriError};
use crate::{limits, magic, printable};

impl Uri {
    /// Parses a URI.
    ///
    /// # Errors
    /// An [`UriError`] whose text says what to write instead.
    pub fn parse(text: &str) -> Result<Uri, UriError> {
        if text.len() > limits::URI {
            return Err(UriError(format!("NBD URI is too long: {} bytes", text.len())));
        }
        let (scheme, rest) = split_scheme(text)?;
        let (secure, kind) = scheme_of(scheme)?;
        let rest = skip_slashes(text, scheme, rest)?;
        // A fragment names a part of a document; an export has none.
        if rest.contains('#') {
            return Err(UriError(format!(
                "\"{}\" contains a \"#\": write it as \"%23\"",
                shown(text)
            )));
        }
        let (place, query) = match rest.split_once('?') {
            Some((place, query)) => (place, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = match place.split_once('/') {
            Some((authority, path)) => (authority, path),
            None => (place, ""),
        };
        let export = decode_text("export name", path)?;
        if export.len() > limits::STRING {
            return Err(UriError(format!(
                "export name is too long: {} bytes, at most {} are allowed",
                export.len(),
                limits::STRING
            )));
        }
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, rest)) => (Some(user), rest),
            None => (None, authority),
        };
        let parameters = UriParameters::parse(query.unwrap_or(""))?;
        let UriParameters { socket, nbd_port, compress, .. } = parameters;
        let mut transport = transport(kind, scheme, authority, socket)?;
        transport.take(nbd_port, compress.unwrap_or(false));
        let mut tls = parameters.tls;
        let user = user.map(|user| decode_text("user name", user)).transpose()?;
        if let (Transport::Ssh { user: login, .. }, false) = (&mut transport, secure) {
            // libnbd gives the user of nbds+ssh to TLS.
            login.clone_from(&user);
        }
        if let Transport::Ssh { user, host, .. } = &transport {
            no_option("user name", user.as_deref().unwrap_or_default())?;
            no_option("host name", host)?;
        }
        if let Some(user) = user {
            if tls.username.as_ref().is_some_and(|other| *other != user) {
                let text = "the user before \"@\" and the parameter \"tls-username\" differ";
                return Err(UriError(text.to_owned()));
            }
            tls.username = Some(user);
        }
        // The user and the TLS parameters are useless without TLS, but harmless: libnbd accepts
        // them.
        Ok(Uri { transport, export, tls: secure.then_some(tls) })
    }
}

impl Transport {
    /// Takes the port of the NBD server, which counts more than that of the authority, and what is
    /// said about compression. Transports without one ignore them, as in libnbd.
    fn take(&mut self, given: Option<u16>, compressed: bool) {
        match self {
            Transport::Tcp { port, .. } => *port = given.unwrap_or(*port),
            Transport::Vsock { port, .. } => *port = given.map_or(*port, u32::from),
            Transport::Ssh { nbd_port, compress, .. } => {
                *nbd_port = given.unwrap_or(*nbd_port);
                *compress = compressed;
            }
            Transport::Unix { .. } => {}
        }
    }
}

impl std::str::FromStr for Uri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Uri, UriError> {
        Uri::parse(text)
    }
}

/// The scheme, and what follows its colon.
fn split_scheme(text: &str) -> Result<(&str, &str), UriError> {
    let found = text.split_once(':').filter(|(scheme, _)| is_scheme(scheme));
    found.ok_or_else(|| {
        UriError(format!(
            "\"{}\" is not an NBD URI, it does not start with a scheme; to connect to a local socket \
             write \"nbd+unix:///?socket=PATH\"",
            shown(text)
        ))
    })
}

/// What follows the slashes behind the scheme's colon.
fn skip_slashes<'a>(text: &str, scheme: &str, rest: &'a str) -> Result<&'a str, UriError> {
    rest.strip_prefix("//").ok_or_else(|| {
        UriError(format!(
            "\"{}\" lacks the slashes after its scheme: write \"{}://...\"",
            shown(text),
            shown(scheme)
        ))
    })
}

/// The port of SSH servers.
const SSH_PORT: u16 = 22;

#[derive(Clone, Copy, PartialEq, Eq)]
enum TransportKind {
    Tcp,
    Unix,
    Vsock,
    Ssh,
}

/// Whether the text before the first colon can be a scheme (RFC 3986, section 3.1).
pub(super) fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

fn scheme_of(scheme: &str) -> Result<(bool, TransportKind), UriError> {
    Ok(match scheme.to_ascii_lowercase().as_str() {
        "nbd" => (false, TransportKind::Tcp),
        "nbds" => (true, TransportKind::Tcp),
        "nbd+unix" => (false, TransportKind::Unix),
        "nbds+unix" => (true, TransportKind::Unix),
        "nbd+vsock" => (false, TransportKind::Vsock),
        "nbds+vsock" => (true, TransportKind::Vsock),
        "nbd+ssh" => (false, TransportKind::Ssh),
        "nbds+ssh" => (true, TransportKind::Ssh),
        _ => {
            return Err(UriError(format!(
                "unknown scheme \"{}:\" in an NBD URI, known are {}",
                shown(scheme),
                SCHEMES.join(", ")
            )));
        }
    })
}

fn transport(
    kind: TransportKind,
    scheme: &str,
    authority: &str,
    socket: Option<Vec<u8>>,
) -> Result<Transport, UriError> {
    match (kind, socket) {
        (TransportKind::Unix, None) => Err(UriError(format!(
            "\"{scheme}:\" requires a socket: write \"{scheme}:///EXPORT?socket=PATH\""
        ))),
        (TransportKind::Unix, Some(_)) if !authority.is_empty() => Err(UriError(format!(
            "\"{scheme}:\" takes no host, but \"{}\" precedes the export: write \
             \"{scheme}:///EXPORT?socket=PATH\", with three slashes",
            shown(authority)
        ))),
        (TransportKind::Unix | TransportKind::Ssh, Some(socket)) if socket.is_empty() => {
            Err(UriError("the parameter \"socket\" is empty".to_owned()))
        }
        (TransportKind::Unix | TransportKind::Ssh, Some(socket)) if socket[1..].contains(&0) => {
            Err(UriError("the parameter \"socket\" contains a NUL after its start".to_owned()))
        }
        (TransportKind::Ssh, socket) => ssh(authority, socket),
        (TransportKind::Unix, Some(socket)) => Ok(Transport::Unix { socket }),
        (_, Some(_)) => {
            let secure = if scheme[3..].starts_with(['s', 'S']) { "s" } else { "" };
            Err(UriError(format!(
                "the parameter \"socket\" is not allowed with \"{scheme}:\": write \
                 \"nbd{secure}+unix:///EXPORT?socket=PATH\""
            )))
        }
        (TransportKind::Tcp, None) => tcp(authority),
        (TransportKind::Vsock, None) => vsock(authority),
    }
}

fn tcp(authority: &str) -> Result<Transport, UriError> {
    let (host, port) = host_and_port(authority, magic::PORT)?;
    Ok(Transport::Tcp { host, port })
}

fn ssh(authority: &str, socket: Option<Vec<u8>>) -> Result<Transport, UriError> {
    if socket.as_ref().is_some_and(|socket| socket[0] == 0) {
        let text = "the parameter \"socket\" cannot be an abstract socket of another machine";
        return Err(UriError(text.to_owned()));
    }
    let (host, port) = host_and_port(authority, SSH_PORT)?;
    // The configuration of SSH may have another port for this host.
    let after = authority.rsplit_once(']').map_or(authority, |(_, after)| after);
    let port = after.split_once(':').is_some_and(|(_, port)| !port.is_empty()).then_some(port);
    let nbd_port = magic::PORT;
    Ok(Transport::Ssh { user: None, host, port, socket, nbd_port, compress: false })
}

/// Refuses what the command `ssh` would take for an option.
fn no_option(what: &str, text: &str) -> Result<(), UriError> {
    if text.starts_with('-') {
        Err(UriError(format!("a {what} cannot start with \"-\"")))
    } else {
        Ok(())
    }
}

/// A host and a port; `usual` if it has none.
pub(super) fn host_and_port(authority: &str, usual: u16) -> Result<(String, u16), UriError> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let Some((host, port)) = rest.split_once(']') else {
                return Err(UriError(format!("\"{}\" lacks a \"]\"", shown(authority))));
            };
            let address = decode_text("host", host)?;
            // The resolver handles a zone (fe80::1%eth0, "%25" in a URI).
            let numeric = address.split_once('%').map_or(address.as_str(), |(numeric, _)| numeric);
            if numeric.parse::<Ipv6Addr>().is_err() {
                return Err(UriError(format!("\"{}\" is not an IPv6 address", shown(&address))));
            }
            match port {
                "" => (address, ""),
                _ => match port.strip_prefix(':') {
                    Some(port) => (address, port),
                    None => {
                        return Err(UriError(format!(
                            "\"{}\" follows the address, where only a port is allowed",
                            shown(port)
                        )));
                    }
                },
            }
        }
        None => {
            let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
            if port.contains(':') {
                return Err(UriError(format!(
                    "\"{}\" has several colons: write IPv6 addresses in brackets, \
                     \"nbd://[::1]:{}/\"",
                    shown(authority),
                    magic::PORT
                )));
            }
            (decode_text("host", host)?, port)
        }
    };
    if let Some(c) =
        host.chars().find(|c| c.is_control() || c.is_whitespace() || "/[]".contains(*c))
    {
        return Err(UriError(format!("a host name cannot contain {c:?}")));
    }
    // In brackets only addresses are accepted, so a colon here came from an escape.
    if !authority.starts_with('[') && host.contains(':') {
        return Err(UriError("a host name cannot contain ':'".to_owned()));
    }
    let host = if host.is_empty() { "localhost".to_owned() } else { host };
    let port = match port {
        "" => usual,
        _ => number(port).filter(|port| *port != 0).ok_or_else(|| {
            UriError(format!("port \"{}\" is not a number from 1 to 65535", shown(port)))
        })?,
    };
    Ok((host, port))
}

fn vsock(authority: &str) -> Result<Transport, UriError> {
    let (cid, port) = authority.split_once(':').unwrap_or((authority, ""));
    let cid = match cid {
        "" => VSOCK_HOST,
        _ => number(cid).ok_or_else(|| {
            UriError(format!("\"{}\" is not a vsock context ID (a number)", shown(cid)))
        })?,
    };
    let port = match port {
        "" => magic::PORT.into(),
        _ => number(port)
            .ok_or_else(|| UriError(format!("\"{}\" is not a vsock port", shown(port))))?,
    };
    Ok(Transport::Vsock { cid, port })
}

/// Digits only: `parse` would accept a sign.
fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

#[derive(Default)]
struct UriParameters {
    socket: Option<Vec<u8>>,
    nbd_port: Option<u16>,
    compress: Option<bool>,
    tls: TlsParameters,
}

impl UriParameters {
    fn parse(query: &str) -> Result<UriParameters, UriError> {
        let mut parameters = UriParameters::default();
        for part in query.split(['&', ';']).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let Some(again) = parameters.take(name, value)? else {
                return Err(UriError(format!(
                    "unknown parameter \"{}\" in an NBD URI, known are {}",
                    shown(name),
                    PARAMETERS.join(", ")
                )));
            };
            if again {
                return Err(UriError(format!("the parameter \"{name}\" is given twice")));
            }
        }
        Ok(parameters)
    }

    /// Takes a parameter with its value: whether it was there before; `None` if it is none of ours.
    fn take(&mut self, name: &str, value: &str) -> Result<Option<bool>, UriError> {
        Ok(Some(match name {
            "nbd-port" => self.nbd_port.replace(nbd_port(value)?).is_some(),
            "compress" => self.compress.replace(boolean(name, value)?).is_some(),
            "tls-priority" => {
                return Err(UriError(
                    "\"tls-priority\" is not supported, as it can make TLS weaker: leave it out"
                        .to_owned(),
                ));
            }
            _ => return take_parameter(name, value, &mut self.socket, &mut self.tls),
        }))
    }
}

fn nbd_port(value: &str) -> Result<u16, UriError> {
    number(value).filter(|port| *port != 0).ok_or_else(|| {
        UriError(format!(
            "the parameter \"nbd-port\" is \"{}\", not a number from 1 to 65535",
            shown(value)
        ))
    })
}

/// Takes a parameter with its value: whether it was there before; `None` if it is none of ours.
pub(super) fn take_parameter(
    name: &str,
    value: &str,
    socket: &mut Option<Vec<u8>>,
    tls: &mut TlsParameters,
) -> Result<Option<bool>, UriError> {
    Ok(Some(match name {
        "socket" => socket.replace(decode(name, value)?).is_some(),
        "tls-certificates" => tls.certificates.replace(decode_text(name, value)?).is_some(),
        "tls-psk-file" => tls.psk_file.replace(decode_text(name, value)?).is_some(),
        "tls-hostname" => tls.hostname.replace(decode_text(name, value)?).is_some(),
        "tls-verify-peer" => tls.verify_peer.replace(boolean(name, value)?).is_some(),
        "tls-username" => tls.username.replace(decode_text(name, value)?).is_some(),
        "tls-type" => tls.kind.replace(tls_type(value)?).is_some(),
        _ => return Ok(None),
    }))
}

fn tls_type(value: &str) -> Result<TlsType, UriError> {
    match value {
        "x509" => Ok(TlsType::X509),
        "psk" => Ok(TlsType::Psk),
        "anon" => Err(UriError(
            "\"tls-type=anon\" is not supported, as it does not authenticate the server: use x509 or psk"
                .to_owned(),
        )),
        _ => Err(UriError(format!(
            "the parameter \"tls-type\" is \"{}\", but must be x509 or psk",
            shown(value)
        ))),
    }
}

fn boolean(name: &str, value: &str) -> Result<bool, UriError> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" | "on" => Ok(true),
        "0" | "false" | "f" | "no" | "n" | "off" => Ok(false),
        _ => Err(UriError(format!(
            "the parameter \"{name}\" is \"{}\", but must be true or false",
            shown(value)
        ))),
    }
}

/// Percent-decodes. Bytes that should have been escaped are kept.
fn decode(what: &str, text: &str) -> Result<Vec<u8>, UriError> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|digit| char::from(digit).to_digit(16));
        let (Some(high), Some(low)) = (digit(), digit()) else {
            return Err(UriError(format!(
                "a \"%\" without two hexadecimal digits after it in {what} \"{}\": write \"%25\" for a \
                 percent sign",
                shown(text)
            )));
        };
        #[expect(clippy::cast_possible_truncation, reason = "two hexadecimal digits")]
        let byte = (high * 16 + low) as u8;
        out.push(byte);
    }
    Ok(out)
}

/// Percent-decodes to text without NUL.
pub(super) fn decode_text(what: &str, text: &str) -> Result<String, UriError> {
    match String::from_utf8(decode(what, text)?) {
        Ok(decoded) if decoded.contains('\0') => {
            Err(UriError(format!("{what} \"{}\" contains a NUL", shown(text))))
        }
        Ok(decoded) => Ok(decoded),
        Err(_) => Err(UriError(format!("{what} \"{}\" is not UTF-8 when decoded", shown(text)))),
    }
}

fn shown(text: &str) -> String {
    printable(text.as_bytes(), 256)
}

/// Context ID of the host of a virtual machine.
const VSOCK_HOST: u32 = 2;
