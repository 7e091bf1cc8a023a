//! Where metrics go: addresses and files of `--metrics`.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::exit::Failure;

/// One value of `--metrics`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// They are served there.
    Address(Address),
    /// They are written to this file, for node_exporter.
    File(PathBuf),
}

/// Where HTTP is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A loopback address and port; port 0 takes a free one.
    Tcp {
        /// The address.
        address: SocketAddr,
        /// The host as it was given: a name, or the address.
        name: String,
    },
    /// A Unix socket, removed on exit.
    Unix(PathBuf),
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Destination, String> {
        let Some(path) = text.strip_prefix("textfile:") else {
            return text.parse().map(Destination::Address);
        };
        let path = Path::new(path);
        match (path.file_stem(), path.extension()) {
            (Some(_), Some(ending)) if ending == "prom" => {
                Ok(Destination::File(path.to_path_buf()))
            }
            _ => Err("textfile: requires a file name that ends in .prom: node_exporter reads no \
                      other files"
                .to_string()),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("unix: requires a path, as unix:PATH".to_string()),
                path => Ok(Address::Unix(path.into())),
            };
        }
        let found = text.to_socket_addrs().map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidInput => format!(
                "{text:?} is neither HOST:PORT, as localhost:9100, nor unix:PATH, nor textfile:PATH"
            ),
            _ => format!(
                "cannot look up the host of {text:?}: {error}; check the name, or write 127.0.0.1"
            ),
        })?;
        // Of a name's addresses, as of localhost, the first is sufficient.
        let found = found.into_iter().find(|address| address.ip().is_loopback());
        let Some(address) = found else {
            return Err(format!(
                "{text:?} is not a loopback address (127.0.0.1, ::1, localhost): use a proxy to serve the \
                 metrics to other machines"
            ));
        };
        let name = text.rsplit_once(':').map_or(text, |(host, _)| host).to_string();
        Ok(Address::Tcp { address, name })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { address, .. } => write!(f, "{address}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The destinations of a command: at most one of each kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Destinations {
    /// Where they are served.
    pub address: Option<Address>,
    /// The file that they are written to.
    pub file: Option<PathBuf>,
    /// The page is served, too.
    pub page: bool,
}

impl Destinations {
    /// Those of `--metrics` and `--page`, for a process that may leave the current directory.
    pub fn new(given: &[Destination], page: bool) -> Result<Destinations, Failure> {
        let wrong = |why: &str| Err(Failure::usage(format!("--metrics: {why}")));
        let absolute = |path: &Path| {
            std::path::absolute(path).map_err(|error| {
                Failure::usage(format!("--metrics: {}", crate::exit::plain(&error)))
            })
        };
        let mut all = Destinations { page, ..Destinations::default() };
        for one in given {
            match one {
                Destination::File(_) if all.file.is_some() => {
                    return wrong("give at most one textfile:");
                }
                Destination::Address(_) if all.address.is_some() => {
                    return wrong("give at most one address");
                }
                Destination::File(path) => all.file = Some(absolute(path)?),
                Destination::Address(Address::Unix(path)) => {
                    all.address = Some(Address::Unix(absolute(path)?));
                }
                Destination::Address(tcp) => all.address = Some(tcp.clone()),
            }
        }
        if page && all.address.is_none() {
            let text = "--page requires an address to listen on: add --metrics localhost:PORT";
            return Err(Failure::usage(text));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_of_this_machine() {
        let tcp = |address: &str, name: &str| Address::Tcp {
            address: address.parse().unwrap(),
            name: name.to_string(),
        };
        assert_eq!("127.0.0.1:9".parse(), Ok(tcp("127.0.0.1:9", "127.0.0.1")));
        assert_eq!("[::1]:9".parse(), Ok(tcp("[::1]:9", "[::1]")));
        assert_eq!("unix:/a:b".parse(), Ok(Address::Unix("/a:b".into())));
        for wrong in ["", "9100", "127.0.0.1", "unix:", "0.0.0.0:9", "192.0.2.1:80", "[::]:1"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_end_as_the_collector_wants() {
        let file: Destination = "textfile:/var/lib/x.prom".parse().unwrap();
        assert_eq!(file, Destination::File("/var/lib/x.prom".into()));
        for wrong in
            ["textfile:", "textfile:/x", "textfile:.prom", "textfile:/x.prom.gz", "textfile:x/"]
        {
            assert!(wrong.parse::<Destination>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn one_of_each_kind_and_a_page_needs_an_address() {
        let all: Vec<Destination> =
            ["textfile:a.prom", "localhost:9"].iter().map(|text| text.parse().unwrap()).collect();
        let both = Destinations::new(&all, true).unwrap();
        assert!(both.file.unwrap().is_absolute() && both.address.is_some() && both.page);
        assert!(Destinations::new(&all[..1], true).is_err());
        assert!(Destinations::new(&[all[0].clone(), all[0].clone()], false).is_err());
        assert!(Destinations::new(&[all[1].clone(), all[1].clone()], false).is_err());
        assert_eq!(Destinations::new(&[], false).unwrap(), Destinations::default());
    }
}
