//! Where metrics go: addresses and files.

use std::fmt;
use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{DestinationError, MetricsError};

/// An address or a file for metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// The address that serves them.
    Address(ScrapeAddress),
    /// The file that they are written to, for node_exporter.
    File(PathBuf),
}

/// An address that serves HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScrapeAddress {
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

impl ScrapeAddress {
    /// Whether the listener chooses the port.
    pub fn has_free_port(&self) -> bool {
        matches!(self, ScrapeAddress::Tcp { address, .. } if address.port() == 0)
    }
}

impl FromStr for Destination {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Destination, DestinationError> {
        let Some(path) = text.strip_prefix("textfile:") else {
            return text.parse().map(Destination::Address);
        };
        let path = Path::new(path);
        match (path.file_stem(), path.extension()) {
            (Some(_), Some(ending)) if ending == "prom" => {
                Ok(Destination::File(path.to_path_buf()))
            }
            _ => Err(DestinationError::FileName),
        }
    }
}

impl FromStr for ScrapeAddress {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<ScrapeAddress, DestinationError> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err(DestinationError::NoPath),
                path => Ok(ScrapeAddress::Unix(path.into())),
            };
        }
        let found = text.to_socket_addrs().map_err(|error| match error.kind() {
            ErrorKind::InvalidInput => DestinationError::Form { text: text.to_string() },
            _ => DestinationError::Lookup { text: text.to_string(), reason: error.to_string() },
        })?;
        // Of a name's addresses, as of localhost, the first is sufficient.
        let found = found.into_iter().find(|address| address.ip().is_loopback());
        let Some(address) = found else {
            return Err(DestinationError::NotLoopback { text: text.to_string() });
        };
        let name = text.rsplit_once(':').map_or(text, |(host, _)| host).to_string();
        Ok(ScrapeAddress::Tcp { address, name })
    }
}

impl fmt::Display for ScrapeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScrapeAddress::Tcp { address, .. } => write!(f, "{address}"),
            ScrapeAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The destinations of a command: at most one of each kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Destinations {
    /// The address that serves them.
    pub address: Option<ScrapeAddress>,
    /// The file that they are written to.
    pub file: Option<PathBuf>,
    /// The page is served, too.
    pub page: bool,
}

impl Destinations {
    /// Collects destinations, for a process that may leave the current directory. `page`: the address serves the
    /// page, too.
    ///
    /// # Errors
    /// There are two of one kind, the page has no address, or the current directory is unknown.
    pub fn new(given: &[Destination], page: bool) -> Result<Destinations, MetricsError> {
        let absolute = |path: &Path| {
            std::path::absolute(path).map_err(|error| MetricsError::Directory { error })
        };
        let mut all = Destinations { page, ..Destinations::default() };
        for one in given {
            match one {
                Destination::File(_) if all.file.is_some() => {
                    return Err(MetricsError::SeveralFiles);
                }
                Destination::Address(_) if all.address.is_some() => {
                    return Err(MetricsError::SeveralAddresses);
                }
                Destination::File(path) => all.file = Some(absolute(path)?),
                Destination::Address(ScrapeAddress::Unix(path)) => {
                    all.address = Some(ScrapeAddress::Unix(absolute(path)?));
                }
                Destination::Address(tcp) => all.address = Some(tcp.clone()),
            }
        }
        if page && all.address.is_none() {
            return Err(MetricsError::PageWithoutAddress);
        }
        Ok(all)
    }

    /// Each destination alone, for a command that goes on without one that cannot be used.
    pub fn each(self) -> impl Iterator<Item = Destinations> {
        let Destinations { address, file, page } = self;
        let served =
            address.map(|address| Destinations { address: Some(address), file: None, page });
        let written = file.map(|file| Destinations { file: Some(file), ..Destinations::default() });
        served.into_iter().chain(written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_of_this_machine() {
        let tcp = |address: &str, name: &str| ScrapeAddress::Tcp {
            address: address.parse().unwrap(),
            name: name.to_string(),
        };
        assert_eq!("127.0.0.1:9".parse(), Ok(tcp("127.0.0.1:9", "127.0.0.1")));
        assert_eq!("[::1]:9".parse(), Ok(tcp("[::1]:9", "[::1]")));
        assert_eq!("unix:/a:b".parse(), Ok(ScrapeAddress::Unix("/a:b".into())));
        for wrong in ["", "9100", "127.0.0.1", "unix:", "0.0.0.0:9", "192.0.2.1:80", "[::]:1"] {
            assert!(wrong.parse::<ScrapeAddress>().is_err(), "{wrong}");
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
