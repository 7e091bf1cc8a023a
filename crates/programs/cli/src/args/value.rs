//! What the values of options may be.

use std::str::FromStr;

use blockhaul_transfer::{ERROR_ACTION_NAMES, MULTI_CONN_NAMES};
pub use blockhaul_transfer::{
    parse_algorithm as algorithm, parse_direct as direct, parse_duration as duration,
    parse_queue_size as queue_size, parse_range as range, parse_request_size as request_size,
    parse_schedule as schedule, parse_segment as segment, parse_size as size,
    parse_sparse as sparse,
};
use clap::builder::{PossibleValuesParser, TypedValueParser};

pub fn limit(text: &str) -> Result<String, String> {
    blockhaul_server::Limits::default().set(text).map(|()| text.to_string())
}

pub fn rate(text: &str) -> Result<u64, String> {
    blockhaul_catalog::parse_rate(text).map_err(|error| error.text())
}

pub fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) =
        text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=VALUE"))?;
    Ok((name.to_string(), value.to_string()))
}

/// Numbers from `least` to `most`; [`u64::MAX`]: without a limit.
pub fn count<T: TryFrom<u64> + Clone + Send + Sync + 'static>(
    least: u64,
    most: u64,
) -> impl TypedValueParser<Value = T> {
    move |text: &str| {
        blockhaul_catalog::parse_count(text, least, most).map_err(|error| error.text())
    }
}

pub fn port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| format!("{text:?} is not a port: use a number from 0 to 65535"))
}

pub fn multi_conn() -> impl TypedValueParser<Value = blockhaul_engine::MultiConn> {
    PossibleValuesParser::new(MULTI_CONN_NAMES)
        .try_map(|name| blockhaul_transfer::parse_multi_conn(&name))
}

pub fn error_action() -> impl TypedValueParser<Value = blockhaul_transfer::ErrorAction> {
    PossibleValuesParser::new(ERROR_ACTION_NAMES)
        .try_map(|name| blockhaul_transfer::parse_error_action(&name))
}

pub fn total_memory(text: &str) -> Result<u64, String> {
    // The largest request, for reading and for verifying.
    const LEAST: u64 = 2 * blockhaul_engine::MAX_REQUEST as u64;
    match size(text)? {
        bytes if bytes >= LEAST => Ok(bytes),
        _ => Err(format!("{text} is less than {}", blockhaul_catalog::format_size(LEAST))),
    }
}

pub fn memory(text: &str) -> Result<u64, String> {
    // The largest request, and room for what comes with it.
    const LEAST: u64 = 64 << 20;
    match size(text)? {
        bytes if bytes >= LEAST => Ok(bytes),
        _ => Err(format!(
            "{text} is less than the {} that one client may need",
            blockhaul_catalog::format_size(LEAST)
        )),
    }
}

pub fn mask(text: &str) -> Result<u16, String> {
    blockhaul_catalog::parse_number(text)
        .map_err(|_| format!("{text:?} is not a number from 0 to 65535"))
}

/// Whether clients may or must use TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsMode {
    /// They cannot.
    Off,
    /// They may.
    On,
    /// They must.
    Require,
}

/// Which code makes the records of TLS 1.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TlsRecords {
    /// Ours.
    Own,
    /// OpenSSL's.
    Openssl,
}

impl FromStr for TlsMode {
    type Err = String;

    /// nbdkit's words.
    fn from_str(text: &str) -> Result<TlsMode, String> {
        match (blockhaul_catalog::parse_switch(text), text.to_ascii_lowercase().as_str()) {
            (Ok(false), _) => Ok(TlsMode::Off),
            (Ok(true), _) => Ok(TlsMode::On),
            (Err(_), "require" | "required" | "force") => Ok(TlsMode::Require),
            _ => Err(format!("{text:?} is not one of off, on, require")),
        }
    }
}

/// A port for virtual machines: `[CID:]PORT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VsockPlace {
    /// The context id to listen on; none for all that this machine has.
    pub cid: Option<u32>,
    /// The port's number.
    pub port: u32,
}

impl VsockPlace {
    /// Parses `PORT` or `CID:PORT`.
    pub fn from_str(text: &str) -> Result<VsockPlace, String> {
        let number = |part: &str| {
            part.parse::<u32>()
                .map_err(|_| format!("{text:?} is not PORT or CID:PORT, two numbers"))
        };
        match text.split_once(':') {
            None => Ok(VsockPlace { cid: None, port: number(text)? }),
            Some((cid, port)) => Ok(VsockPlace { cid: Some(number(cid)?), port: number(port)? }),
        }
    }
}

/// A socket for virtual machines.
#[cfg(feature = "vhost")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostPlace {
    /// The name of the export; empty for the default one.
    pub export: String,
    /// The socket.
    pub socket: std::path::PathBuf,
}

#[cfg(feature = "vhost")]
impl VhostPlace {
    /// Parses `SOCKET` or `EXPORT=SOCKET`. A path with `=` in it has a `/` before.
    pub fn from_str(text: &str) -> Result<VhostPlace, String> {
        let (export, socket) = match text.split_once('=') {
            Some((export, socket)) if !export.contains('/') => (export, socket),
            _ => ("", text),
        };
        if socket.is_empty() {
            Err(format!("{text:?} names no socket"))
        } else {
            Ok(VhostPlace { export: export.to_string(), socket: socket.into() })
        }
    }
}

/// A client of the monitor protocol that is there from the beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QmpClient {
    /// It waits for a connection at this Unix socket.
    Unix(std::path::PathBuf),
    /// It is connected to this inherited socket.
    Descriptor(i32),
    /// It uses standard input and output.
    Stdio,
}

impl QmpClient {
    /// Parses `unix:PATH`, `fd:N` or `stdio`.
    pub fn from_str(text: &str) -> Result<QmpClient, String> {
        let wrong = || format!("{text:?} is not unix:PATH, fd:N or stdio");
        match text.split_once(':') {
            None if text == "stdio" => Ok(QmpClient::Stdio),
            Some(("unix", path)) if !path.is_empty() => Ok(QmpClient::Unix(path.into())),
            Some(("fd", number)) => number.parse().map(QmpClient::Descriptor).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "vhost")]
    #[test]
    fn sockets_for_virtual_machines_have_an_export() {
        let place = |export: &str, socket: &str| {
            Ok(VhostPlace { export: export.into(), socket: socket.into() })
        };
        assert_eq!(VhostPlace::from_str("/run/s"), place("", "/run/s"));
        assert_eq!(VhostPlace::from_str("a=s=t"), place("a", "s=t"));
        assert_eq!(VhostPlace::from_str("/run/a=b"), place("", "/run/a=b"));
        assert!(VhostPlace::from_str("").is_err());
        assert!(VhostPlace::from_str("a=").is_err());
    }

    #[test]
    fn vsock_places_are_numbers() {
        assert_eq!(VsockPlace::from_str("10809"), Ok(VsockPlace { cid: None, port: 10809 }));
        assert_eq!(VsockPlace::from_str("2:1"), Ok(VsockPlace { cid: Some(2), port: 1 }));
        for bad in ["", ":", "1:", "x", "1:2:3", "-1", "4294967296"] {
            assert!(VsockPlace::from_str(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn modes_have_nbdkits_words() {
        for (text, mode) in
            [("off", TlsMode::Off), ("ON", TlsMode::On), ("required", TlsMode::Require)]
        {
            assert_eq!(text.parse(), Ok(mode));
        }
        assert!("maybe".parse::<TlsMode>().is_err());
    }
}
