//! The NBD schemes and `[ CMD … ]` for the registry of devices.

use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;

use block::{Another, Backend, Device, Error, Kind, Opened, Opening, Result, Target};
use wire::uri::{Transport, Uri};

use crate::connect::{Address, Options, connect_keeping};
use crate::{Connected, ServerProcess};

/// The backends of this crate, connecting with these options.
pub fn all(options: Options) -> Vec<&'static dyn Backend> {
    // A program makes its registry once and keeps it to its end.
    let options: &'static Options = Box::leak(Box::new(options));
    vec![
        Box::leak(Box::new(NbdUri { options })) as &'static dyn Backend,
        Box::leak(Box::new(NbdCommand { options })) as &'static dyn Backend,
    ]
}

struct NbdUri {
    options: &'static Options,
}

impl Backend for NbdUri {
    fn schemes(&self) -> &'static [&'static str] {
        &["nbd", "nbd+unix", "nbds", "nbds+unix", "nbd+vsock", "nbds+vsock", "nbd+ssh", "nbds+ssh"]
    }

    fn operand(&self) -> &'static str {
        "//[HOST[:PORT]]/[EXPORT][?socket=PATH]"
    }

    fn summary(&self) -> &'static str {
        "an export of an NBD server, by its URI"
    }

    fn raw(&self) -> bool {
        true
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        let options = self.options;
        Box::pin(async move {
            let uri = format!("{}:{}", target.scheme, target.text()?);
            let (address, export) = parse(&uri)?;
            let place = Place { name: uri, address, export, options, process: None };
            place.open().await
        })
    }
}

struct NbdCommand {
    options: &'static Options,
}

impl Backend for NbdCommand {
    fn schemes(&self) -> &'static [&'static str] {
        &["command"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "written [ CMD ARG… ]: an NBD server that is started for this run, by socket activation"
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        let options = self.options;
        Box::pin(async move {
            let process = ServerProcess::start(&target.command)?;
            let place = Place {
                name: process.name().to_string(),
                address: Address::Unix(process.socket().to_path_buf()),
                export: String::new(),
                options,
                process: Some(process),
            };
            place.open().await
        })
    }
}

/// Where a URI points: address and export. What this version cannot reach is refused here.
pub(crate) fn parse(uri: &str) -> Result<(Address, String)> {
    let wrong = |error: wire::uri::Error| Error::new(Kind::Usage, format!("{uri}: {error}"));
    let parsed = Uri::parse(uri).map_err(wrong)?;
    let unsupported = |what: &str| {
        let text = format!("{uri}: {what} is not supported yet; connect over TCP or a Unix socket");
        Err(Error::new(Kind::Unsupported, text))
    };
    if parsed.tls.is_some() {
        return unsupported("TLS");
    }
    let address = match parsed.transport {
        Transport::Tcp { host, port } => Address::Tcp(host, port),
        Transport::Unix { socket } => {
            Address::Unix(PathBuf::from(std::ffi::OsString::from_vec(socket)))
        }
        Transport::Vsock { .. } => return unsupported("vsock"),
    };
    Ok((address, parsed.export))
}

/// An export that any number of connections can be made to.
#[derive(Clone)]
struct Place {
    name: String,
    address: Address,
    export: String,
    options: &'static Options,
    /// The server, if it was started for this.
    process: Option<Arc<ServerProcess>>,
}

impl Place {
    async fn open(self) -> Result<Opened> {
        let device = self.connect().await?;
        Ok(Opened { device, more: Some(Arc::new(self)) })
    }

    async fn connect(&self) -> Result<Arc<dyn Device>> {
        let (process, name) = (self.process.clone(), &self.name);
        let connected =
            connect_keeping(process, name, &self.address, &self.export, self.options).await;
        connected.map(|Connected { device, .. }| device).map_err(|error| {
            match self.process.as_ref().and_then(|process| process.ended()) {
                Some(how) => Error::new(error.kind(), format!("{}: {how}", self.name)),
                None => error,
            }
        })
    }
}

impl Another for Place {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let place = self.clone();
        Box::pin(async move { place.connect().await })
    }
}
