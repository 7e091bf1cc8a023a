//! What to query: the exports of an NBD server, or a device of this program.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Can, Device, Error, Facts, Kind};
use blockhaul_catalog::{ConnectionSettings, Intent, Registry, Spec, Stack};
use blockhaul_client::options::{OptionSession, Place};
use blockhaul_client::{Address, Connected, Options, ServerProcess};
use blockhaul_wire::ExportFlags;
use blockhaul_wire::handshake::Protocol;
use blockhaul_wire::handshake::client::{ExportInfo, Negotiated};
use blockhaul_wire::uri::Uri;

use super::content;
use super::map::Shown;
use super::report::{Export, Of, Report};
use crate::devices;
use crate::exit::Failure;

/// What to query.
pub enum Subject {
    /// An NBD server.
    Server(Box<Server>),
    /// A device that this program opens.
    Device {
        /// The registry for opening it.
        registry: Registry,
        /// The description as typed.
        spec: Spec,
    },
}

/// An NBD server.
pub struct Server {
    place: Place,
    /// The canonical URI; none for servers that were started for this command.
    uri: Option<Uri>,
    /// The server, if it was started for this command: ends on drop.
    process: Option<Arc<ServerProcess>>,
    options: Options,
}

impl Subject {
    /// Parses the description; starts the server of a command. Connections are dropped after
    /// `timeout` without a byte.
    pub fn new(spec: Spec, timeout: Duration) -> Result<Subject, Failure> {
        let settings = ConnectionSettings::with_timeout(timeout);
        let options = Options { full_info: true, ..Options::default().connecting(&settings) };
        let registry = devices::registry(timeout);
        match &spec {
            Spec::Command(words) => {
                let process = ServerProcess::start(words)
                    .map_err(|error| Failure::opening("device", &spec.to_string(), &error))?;
                let place = Place {
                    name: spec.to_string(),
                    address: Address::Unix(process.socket().to_path_buf()),
                    export: String::new(),
                    tls: None,
                };
                let server = Server { place, uri: None, process: Some(process), options };
                Ok(Subject::Server(Box::new(server)))
            }
            Spec::Scheme { scheme, .. } if registry.backend(scheme)?.schemes().contains(&"nbd") => {
                let text = spec.to_string();
                let cannot = |error| Failure::opening("device", &text, &error);
                let place = Place::parse(&text).map_err(cannot)?;
                let uri = Uri::parse(&text).ok();
                let server = Server { place, uri, process: None, options };
                Ok(Subject::Server(Box::new(server)))
            }
            _ => {
                registry.target(&spec, Intent::READ)?;
                Ok(Subject::Device { registry, spec })
            }
        }
    }

    /// The facts of the one export or device.
    pub async fn report(&self, content: bool) -> Result<Report, Failure> {
        match self {
            Subject::Server(server) => server.report(content).await,
            Subject::Device { registry, spec } => {
                let stack = open(registry, spec).await?;
                let facts = stack.device().facts();
                let content =
                    if content { content::guess(stack.device().clone()).await } else { None };
                let export = Export { content, ..export_of(&facts) };
                Ok(Report { of: Of::Device(facts.name.to_string()), exports: vec![export] })
            }
        }
    }

    /// The facts that need no query of an export.
    pub async fn head(&self) -> Result<Report, Failure> {
        let Subject::Server(server) = self else { return self.report(false).await };
        let session = server.session().await?;
        let of = of(session.protocol(), session.tls(), session.replies());
        session.abort().await;
        Ok(Report { of, exports: Vec::new() })
    }

    /// The facts of all exports; and the failures of some of them.
    pub async fn list(&self, content: bool) -> Result<(Report, Option<Failure>), Failure> {
        match self {
            Subject::Server(server) => server.list(content).await,
            Subject::Device { .. } => Ok((self.report(content).await?, None)),
        }
    }

    /// The canonical URI.
    pub async fn uri(&self) -> Result<String, Failure> {
        let text = match self {
            Subject::Server(server) => {
                let Server { uri, place, options, .. } = &**server;
                if let Some(uri) = uri {
                    // Like nbdinfo: a URI is printed only if the server answers.
                    let session = OptionSession::connect(place.clone(), options).await;
                    session.map_err(|error| opening(&place.name, &error))?.abort().await;
                    return Ok(canonical(uri));
                }
                if blockhaul_wire::uri::is_http(&place.name) {
                    let session = OptionSession::connect(place.clone(), options).await;
                    session.map_err(|error| opening(&place.name, &error))?.abort().await;
                    return Ok(place.name.clone());
                }
                place.name.clone()
            }
            Subject::Device { spec, .. } => spec.to_string(),
        };
        let why = format!("{text} has no URI: use --uri with a server that has an address");
        Err(Failure::new(crate::exit::FAILED, why))
    }

    /// The device, for its contents; with the extents of a server that reports them.
    pub async fn contents(&self) -> Result<Arc<dyn Device>, Failure> {
        let stack = match self {
            Subject::Server(server) => {
                let contexts = vec![blockhaul_block::BASE_ALLOCATION.to_string()];
                Stack::over(server.connect(&server.place.export, contexts).await?.device)
            }
            Subject::Device { registry, spec } => open(registry, spec).await?,
        };
        Ok(stack.device().clone())
    }

    /// The device, for extents in these contexts.
    pub async fn device(
        &self,
        contexts: &[String],
    ) -> Result<(Arc<dyn Device>, Vec<Shown>), Failure> {
        let (stack, facts, whose) = match self {
            Subject::Server(server) => {
                let connected = server.connect(&server.place.export, contexts.to_vec()).await?;
                // Not what is emulated: nbdinfo fails without the context.
                let facts = connected.device.facts();
                (Stack::over(connected.device), facts, "server")
            }
            Subject::Device { registry, spec } => {
                let stack = open(registry, spec).await?;
                let facts = stack.device().facts();
                (stack, facts, "device")
            }
        };
        let shown = contexts.iter().map(|name| match facts.context(name) {
            Some(context) => Ok(Shown { context, name: name.clone() }),
            None => {
                let text = format!("--map: {whose} does not support metadata context \"{name}\"");
                Err(Failure::from(Error::new(Kind::Unsupported, text)))
            }
        });
        let shown = shown.collect::<Result<_, _>>()?;
        let stack = devices::sparing_of_queries(stack).await;
        let device = stack.map_err(|error| opening(&facts.name, &error))?.device().clone();
        Ok((device, shown))
    }
}

async fn open(registry: &Registry, spec: &Spec) -> Result<Stack, Failure> {
    let opened = registry.open(spec, Vec::new(), Intent::READ).await;
    opened.map_err(|error| opening(&spec.to_string(), &error))
}

fn opening(name: &str, error: &Error) -> Failure {
    Failure::opening("device", name, error)
}

/// The facts of devices of this program, with their names.
#[cfg(feature = "fuse")]
pub fn report_of(devices: &[(&str, std::sync::Arc<Facts>)]) -> Report {
    let all: Vec<_> = devices.iter().map(|(_, facts)| facts.name.to_string()).collect();
    let exports = devices
        .iter()
        .map(|(name, facts)| Export { name: (*name).to_string(), ..export_of(facts) })
        .collect();
    Report { of: Of::Device(all.join(", ")), exports }
}

/// A device of this program in the form of an export.
fn export_of(facts: &Facts) -> Export {
    let can = facts.can.difference(facts.emulated);
    let mut flags = ExportFlags::HAS_FLAGS
        .with(ExportFlags::READ_ONLY, !facts.can.contains(Can::WRITE))
        .with(ExportFlags::ROTATIONAL, facts.rotational);
    for (ability, flag) in [
        (Can::FLUSH, ExportFlags::SEND_FLUSH),
        (Can::FUA, ExportFlags::SEND_FUA),
        (Can::TRIM, ExportFlags::SEND_TRIM),
        (Can::ZERO, ExportFlags::SEND_WRITE_ZEROES),
        (Can::FAST_ZERO, ExportFlags::SEND_FAST_ZERO),
        (Can::CACHE, ExportFlags::SEND_CACHE),
        (Can::MULTI_CONN, ExportFlags::CAN_MULTI_CONN),
    ] {
        flags = flags.with(flag, can.contains(ability));
    }
    Export {
        description: Some(facts.description.clone()).filter(|text| !text.is_empty()),
        size: facts.size,
        contexts: facts.contexts.clone(),
        flags,
        block: Some([facts.block.minimum, facts.block.preferred, facts.block.maximum]),
        ..Export::default()
    }
}

/// What is known of an export besides its facts.
struct Reported {
    name: String,
    description: Option<String>,
    contexts: Vec<String>,
    content: Option<String>,
}

impl Server {
    async fn report(&self, content: bool) -> Result<Report, Failure> {
        let export = &self.place.export;
        let mut session = self.session().await?;
        let protocol = session.protocol();
        let tls = session.tls();
        let replies = session.replies();
        let asked = match protocol {
            Some(Protocol::Newstyle) => None,
            _ => match session.info(export).await {
                Ok(info) => Some((info, contexts(&mut session, export).await)),
                Err(error) if error.kind() == Kind::Unsupported => None,
                Err(error) => return Err(self.failed(&error)),
            },
        };
        session.abort().await;
        let (info, contexts, of) = match asked {
            Some((info, contexts)) => (info, contexts, of(protocol, tls, replies)),
            None => {
                let Negotiated { info, contexts, protocol, tls, replies, .. } = self
                    .connect(export, vec![blockhaul_block::BASE_ALLOCATION.to_string()])
                    .await?
                    .negotiated;
                let contexts = contexts.into_iter().map(|context| context.name).collect();
                (info, contexts, self::of(Some(protocol), tls, replies))
            }
        };
        let name = info.name.clone().unwrap_or_else(|| export.clone());
        let description = info.description.clone();
        let content = if content { self.content(export).await? } else { None };
        let reported = Reported { name, description, contexts, content };
        let export = self.export(export, &info, reported);
        Ok(Report { of, exports: vec![export] })
    }

    async fn list(&self, content: bool) -> Result<(Report, Option<Failure>), Failure> {
        let mut session = self.session().await?;
        let of = of(session.protocol(), session.tls(), session.replies());
        let entries = session.list().await.map_err(|error| self.failed(&error))?;
        let mut found = Vec::new();
        let mut failed = None;
        for entry in entries {
            match session.info(&entry.name).await {
                Ok(info) => {
                    let contexts = contexts(&mut session, &entry.name).await;
                    found.push((entry, info, contexts));
                }
                Err(error) => {
                    let text = format!("export {:?}: {error}", entry.name);
                    failed = Some(Failure::new(crate::exit::FAILED, text));
                    // A refusal concerns one export; other errors end the session.
                    if matches!(error.kind(), Kind::Disconnected | Kind::TimedOut | Kind::Io) {
                        break;
                    }
                }
            }
        }
        session.abort().await;
        let mut exports = Vec::new();
        for (entry, info, contexts) in found {
            let content = if content { self.content(&entry.name).await? } else { None };
            let reported = Some(entry.description).filter(|text| !text.is_empty());
            let description = reported.or_else(|| info.description.clone());
            let name = entry.name.clone();
            let reported = Reported { name, description, contexts, content };
            exports.push(self.export(&entry.name, &info, reported));
        }
        Ok((Report { of, exports }, failed))
    }

    /// What is shown of an export that was asked for by this name.
    fn export(&self, asked: &str, info: &ExportInfo, reported: Reported) -> Export {
        let Reported { name, description, contexts, content } = reported;
        let of_export = |uri| canonical(&Uri { export: asked.to_string(), ..uri });
        let uri = self.uri.clone().map(of_export);
        let block = info.block_sizes.map(|sizes| [sizes.minimum, sizes.preferred, sizes.maximum]);
        let size = info.size;
        let flags = info.flags;
        Export { name, description, size, content, uri, contexts, flags, block }
    }

    async fn content(&self, export: &str) -> Result<Option<String>, Failure> {
        Ok(content::guess(self.connect(export, Vec::new()).await?.device).await)
    }

    async fn session(&self) -> Result<OptionSession, Failure> {
        let session = OptionSession::connect(self.place.clone(), &self.options).await;
        session.map_err(|error| self.failed(&error))
    }

    async fn connect(&self, export: &str, contexts: Vec<String>) -> Result<Connected, Failure> {
        let tls = self.place.tls.clone();
        let options = Options { contexts, tls, ..self.options.clone() };
        let connected =
            blockhaul_client::connect(&self.place.name, &self.place.address, export, &options);
        connected.await.map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &Error) -> Failure {
        match self.process.as_ref().and_then(|process| process.ended()) {
            Some(how) => opening(&self.place.name, &Error::new(error.kind(), how)),
            None => opening(&self.place.name, error),
        }
    }
}

/// The canonical form, with escapes in upper case as libnbd has them.
fn canonical(uri: &Uri) -> String {
    let mut escaped = 0;
    let upper = |c: char| {
        // In a canonical form each % is followed by two digits.
        escaped = if c == '%' { 2 } else { i32::max(escaped - 1, -1) };
        if escaped >= 0 { c.to_ascii_uppercase() } else { c }
    };
    uri.to_string().chars().map(upper).collect()
}

/// Contexts of an export; none if the server does not list them.
async fn contexts(session: &mut OptionSession, export: &str) -> Vec<String> {
    let contexts = session.contexts(export).await.unwrap_or_default();
    contexts.into_iter().map(|context| context.name).collect()
}

fn of(protocol: Option<Protocol>, tls: bool, replies: blockhaul_wire::Replies) -> Of {
    let protocol = match protocol {
        Some(Protocol::Oldstyle) => "oldstyle",
        Some(Protocol::Newstyle) => "newstyle",
        Some(Protocol::FixedNewstyle) | None => "newstyle-fixed",
    };
    Of::Server { protocol, tls, replies }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_in_upper_case_and_nothing_else() {
        let uri = Uri::parse("nbd://host/a%5cab%c3%bcfe").unwrap();
        assert_eq!(canonical(&uri), "nbd://host:10809/a%5Cab%C3%BCfe");
    }
}
