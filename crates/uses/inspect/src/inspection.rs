//! The facts of the exports of an NBD server, or of a device of a registry.

use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, Device, Error, Facts, Kind};
use blockhaul_catalog::{ArchivedDisk, DeviceSpec, Intent, Layer, ObjectList, Registry, Stack};
use blockhaul_client::options::{ConnectTarget, OptionSession};
use blockhaul_client::{ConnectOptions, DeviceConnection, ServerAddress, ServerProcess};
use blockhaul_transfer::{make_layers, sparing_of_queries};
use blockhaul_wire::ReplyForm;
use blockhaul_wire::handshake::GreetingForm;
use blockhaul_wire::handshake::client::{ClientHandshakeResult, ExportInfo};
use blockhaul_wire::uri::Uri;

use crate::archive;
use crate::content;
use crate::error::{InspectionError, Result};
use crate::file_facts::FileFacts;
use crate::map::MapContext;
use crate::partitions;
use crate::report::{ExportFacts, ExportOwner, InspectionReport};

/// An inspection of a device, or of an NBD server and its exports.
///
/// A server that was started for it ends when the inspection is dropped, which waits for the server and therefore
/// happens outside of a worker.
pub struct Inspection(Origin);

/// Origin of the facts.
enum Origin {
    Server(Box<InspectedServer>),
    Device(Box<InspectedDevice>),
}

/// A device of a registry.
struct InspectedDevice {
    registry: Registry,
    spec: DeviceSpec,
    /// First innermost.
    layers: Vec<Arc<dyn Layer>>,
}

/// Facts of contents, for which the device is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ContentQuery {
    /// The kind of the contents, which the program `file` finds out.
    pub kind: bool,
    /// The partition table.
    pub partitions: bool,
    /// The disks of an OVA. One with several disks is then no error, but a report without exports.
    pub archive: bool,
}

/// An NBD server.
struct InspectedServer {
    place: ConnectTarget,
    /// The canonical URI; none for servers that were started for this inspection.
    uri: Option<Uri>,
    /// The server, if it was started for this inspection: ends on drop.
    process: Option<Arc<ServerProcess>>,
    options: ConnectOptions,
}

impl Inspection {
    /// An inspection of this device or server. A server of `[ CMD ]` is started; connections to servers have these
    /// options, and the registry opens all other devices, and all that have layers, the first one innermost.
    ///
    /// # Errors
    /// The description is invalid, or the server cannot be started.
    pub fn new(
        spec: DeviceSpec,
        layers: &[String],
        registry: Registry,
        options: ConnectOptions,
    ) -> Result<Inspection> {
        let options = ConnectOptions { full_info: true, ..options };
        let layers = make_layers(&registry, layers)?;
        match &spec {
            _ if !layers.is_empty() => Inspection::of_device(spec, layers, registry),
            DeviceSpec::Command(words) => {
                let name = spec.to_string();
                let process =
                    ServerProcess::start(words).map_err(|error| opening(&name, &error))?;
                let address = ServerAddress::Unix(process.socket().to_path_buf());
                let place = ConnectTarget { name, address, export: String::new(), tls: None };
                let server = InspectedServer { place, uri: None, process: Some(process), options };
                Ok(Inspection(Origin::Server(Box::new(server))))
            }
            DeviceSpec::Scheme { scheme, .. }
                if scheme.starts_with("nbd")
                    && registry.backend(scheme)?.schemes().contains(&"nbd") =>
            {
                let text = spec.to_string();
                let place = ConnectTarget::parse(&text).map_err(|error| opening(&text, &error))?;
                let server =
                    InspectedServer { place, uri: Uri::parse(&text).ok(), process: None, options };
                Ok(Inspection(Origin::Server(Box::new(server))))
            }
            _ => Inspection::of_device(spec, layers, registry),
        }
    }

    fn of_device(
        spec: DeviceSpec,
        layers: Vec<Arc<dyn Layer>>,
        registry: Registry,
    ) -> Result<Inspection> {
        registry.target(&spec, Intent::READ)?;
        Ok(Inspection(Origin::Device(Box::new(InspectedDevice { registry, spec, layers }))))
    }

    /// The facts of the export that the description names, or of the device, and those of its contents.
    ///
    /// # Errors
    /// The server or the device cannot be opened.
    pub async fn report(&self, content: ContentQuery) -> Result<InspectionReport> {
        match &self.0 {
            Origin::Server(server) => server.report(content).await,
            Origin::Device(device) => device.report(content).await,
        }
    }

    /// The facts of a server that need no query of an export, without exports; the report of a device.
    ///
    /// # Errors
    /// The server or the device cannot be opened.
    pub async fn server(&self) -> Result<InspectionReport> {
        let Origin::Server(server) = &self.0 else {
            return self.report(ContentQuery::default()).await;
        };
        let session = server.session().await?;
        let owner = owner(session.protocol(), session.tls(), session.replies());
        session.abort().await;
        Ok(InspectionReport { owner, exports: Vec::new() })
    }

    /// The facts of all exports that the server lists, or of the device; and the error of the last export whose facts
    /// the server does not report.
    ///
    /// # Errors
    /// The server or the device cannot be opened, or the server has no list.
    pub async fn list(
        &self,
        content: ContentQuery,
    ) -> Result<(InspectionReport, Option<InspectionError>)> {
        match &self.0 {
            Origin::Server(server) => server.list(content).await,
            Origin::Device(_) => Ok((self.report(content).await?, None)),
        }
    }

    /// The objects of a service below the name in the description; `None` for servers and devices that are no objects.
    ///
    /// # Errors
    /// The description is invalid, or the service has no list.
    pub async fn objects(&self) -> Result<Option<Box<dyn ObjectList>>> {
        let Origin::Device(device) = &self.0 else { return Ok(None) };
        let InspectedDevice { registry, spec, layers } = &**device;
        let (backend, target) = registry.target(spec, Intent::READ)?;
        let Some(list) = backend.list(&target).filter(|_| layers.is_empty()) else {
            return Ok(None);
        };
        list.await.map(Some).map_err(|error| opening(&spec.to_string(), &error))
    }

    /// The canonical URI of a server that answers; `None` for devices and servers without one.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn uri(&self) -> Result<Option<String>> {
        let Origin::Server(server) = &self.0 else { return Ok(None) };
        let InspectedServer { uri, place, options, .. } = &**server;
        let uri = match uri {
            Some(uri) => canonical(uri),
            None if blockhaul_wire::uri::is_http(&place.name) => place.name.clone(),
            None => return Ok(None),
        };
        // Like nbdinfo: a URI is printed only if the server answers.
        let session = OptionSession::connect(place.clone(), options).await;
        session.map_err(|error| opening(&place.name, &error))?.abort().await;
        Ok(Some(uri))
    }

    /// The device for its contents, with the extents of a server that reports them.
    ///
    /// # Errors
    /// The server or the device cannot be opened.
    pub async fn device(&self) -> Result<Arc<dyn Device>> {
        let stack = match &self.0 {
            Origin::Server(server) => {
                let contexts = vec![BASE_ALLOCATION.to_string()];
                Stack::over(server.connect(&server.place.export, contexts).await?.device)
            }
            Origin::Device(device) => device.open().await?,
        };
        Ok(stack.device().clone())
    }

    /// The device for extents in the metadata contexts of these names.
    ///
    /// # Errors
    /// The server or the device cannot be opened, or has no such context.
    pub async fn device_with_contexts(
        &self,
        names: &[String],
    ) -> Result<(Arc<dyn Device>, Vec<MapContext>)> {
        let (stack, facts) = match &self.0 {
            Origin::Server(server) => {
                let connected = server.connect(&server.place.export, names.to_vec()).await?;
                // Not what is emulated: nbdinfo fails without the context.
                let facts = connected.device.facts();
                (Stack::over(connected.device), facts)
            }
            Origin::Device(device) => {
                let stack = device.open().await?;
                let facts = stack.device().facts();
                (stack, facts)
            }
        };
        let mut contexts = Vec::new();
        for name in names {
            match facts.context(name) {
                Some(context) => contexts.push(MapContext { context, name: name.clone() }),
                None => return Err(self.no_context(name, &facts).await),
            }
        }
        let stack = sparing_of_queries(stack).await;
        let device = stack.map_err(|error| opening(&facts.name, &error))?.device().clone();
        Ok((device, contexts))
    }
}

impl Inspection {
    /// The error that there is no metadata context of this name.
    async fn no_context(&self, name: &str, facts: &Facts) -> InspectionError {
        let name = name.to_string();
        match &self.0 {
            Origin::Server(server) => {
                let known = server.contexts().await;
                InspectionError::Context { name, is_remote: true, known }
            }
            Origin::Device(_) => {
                let known = facts.contexts.clone();
                InspectionError::Context { name, is_remote: false, known }
            }
        }
    }
}

impl InspectedServer {
    /// Contexts of the export; none if the server does not list them.
    async fn contexts(&self) -> Vec<String> {
        let Ok(mut session) = self.session().await else { return Vec::new() };
        let found = contexts(&mut session, &self.place.export).await;
        session.abort().await;
        found
    }
}

impl InspectedDevice {
    async fn open(&self) -> Result<Stack> {
        let opened = self.registry.open(&self.spec, self.layers.clone(), Intent::READ).await;
        opened.map_err(|error| opening(&self.spec.to_string(), &error))
    }

    /// The facts of the file, and the disks of an OVA, which has a hint to one of them.
    async fn file_and_disks(&self) -> Result<(Option<FileFacts>, Vec<ArchivedDisk>)> {
        let mut file = FileFacts::find(&self.registry, &self.spec).await;
        let disks = archive::disks(&self.registry, &self.spec).await;
        let disks = disks.map_err(|error| opening(&self.spec.to_string(), &error))?;
        if let (Some(FileFacts { hint: Some(hint), .. }), [_, _, ..]) = (&mut file, &disks[..]) {
            *hint = archive::first_disk(hint);
        }
        Ok((file, disks))
    }

    async fn report(&self, content: ContentQuery) -> Result<InspectionReport> {
        let (file, disks) = match self.layers[..] {
            [] if content.archive => self.file_and_disks().await?,
            [] => (FileFacts::find(&self.registry, &self.spec).await, Vec::new()),
            _ => (None, Vec::new()),
        };
        if disks.len() > 1 && !matches!(self.spec, DeviceSpec::Path(_)) {
            let owner = ExportOwner::Device { name: self.spec.to_string(), file, disks };
            return Ok(InspectionReport { owner, exports: Vec::new() });
        }
        let stack = self.open().await?;
        let facts = stack.device().facts();
        let name = facts.name.to_string();
        let mut export = ExportFacts::of_device(&facts);
        // The bytes of an image are no disk: their kind would mislead.
        if file.as_ref().is_none_or(|file| file.hint.is_none()) {
            export.add_content(stack.device(), content).await;
        }
        let owner = ExportOwner::Device { name, file, disks };
        Ok(InspectionReport { owner, exports: vec![export] })
    }
}

impl ExportFacts {
    /// Adds facts of the contents of a device. A failure must not affect the rest of the report.
    async fn add_content(&mut self, device: &Arc<dyn Device>, content: ContentQuery) {
        if content.kind {
            self.content = content::guess(device.clone()).await;
        }
        if content.partitions {
            self.partitions = partitions::find(device).await;
        }
    }
}

fn opening(name: &str, error: &Error) -> InspectionError {
    InspectionError::opening(name, error)
}

/// Texts about an export, which servers report in several ways.
struct ExportTexts {
    name: String,
    description: Option<String>,
    contexts: Vec<String>,
}

impl InspectedServer {
    async fn report(&self, content: ContentQuery) -> Result<InspectionReport> {
        let export = &self.place.export;
        let mut session = self.session().await?;
        let protocol = session.protocol();
        let tls = session.tls();
        let replies = session.replies();
        let reported = match protocol {
            Some(GreetingForm::Newstyle) => None,
            _ => match session.info(export).await {
                Ok(info) => Some((info, contexts(&mut session, export).await)),
                Err(error) if error.kind() == Kind::Unsupported => None,
                Err(error) => return Err(self.failed(&error)),
            },
        };
        session.abort().await;
        let (info, contexts, owner) = match reported {
            Some((info, contexts)) => (info, contexts, owner(protocol, tls, replies)),
            None => {
                let ClientHandshakeResult { info, contexts, protocol, tls, replies, .. } =
                    self.connect(export, vec![BASE_ALLOCATION.to_string()]).await?.negotiated;
                let contexts = contexts.into_iter().map(|context| context.name).collect();
                (info, contexts, owner(Some(protocol), tls, replies))
            }
        };
        let name = info.name.clone().unwrap_or_else(|| export.clone());
        let description = info.description.clone();
        let texts = ExportTexts { name, description, contexts };
        let mut facts = self.export(export, &info, texts);
        self.add_content(export, &mut facts, content).await?;
        let export = facts;
        Ok(InspectionReport { owner, exports: vec![export] })
    }

    async fn list(
        &self,
        content: ContentQuery,
    ) -> Result<(InspectionReport, Option<InspectionError>)> {
        let mut session = self.session().await?;
        let owner = owner(session.protocol(), session.tls(), session.replies());
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
                    let kind = error.kind();
                    failed = Some(InspectionError::Export { name: entry.name, error });
                    // A refusal concerns one export; other errors end the session.
                    if matches!(kind, Kind::Disconnected | Kind::TimedOut | Kind::Io) {
                        break;
                    }
                }
            }
        }
        session.abort().await;
        let mut exports = Vec::new();
        for (entry, info, contexts) in found {
            let reported = Some(entry.description).filter(|text| !text.is_empty());
            let description = reported.or_else(|| info.description.clone());
            let name = entry.name.clone();
            let texts = ExportTexts { name, description, contexts };
            let mut facts = self.export(&entry.name, &info, texts);
            self.add_content(&entry.name, &mut facts, content).await?;
            exports.push(facts);
        }
        Ok((InspectionReport { owner, exports }, failed))
    }

    /// The facts of an export that was requested by this name.
    fn export(&self, requested: &str, info: &ExportInfo, texts: ExportTexts) -> ExportFacts {
        let ExportTexts { name, description, contexts } = texts;
        let of_export = |uri| canonical(&Uri { export: requested.to_string(), ..uri });
        let uri = self.uri.clone().map(of_export);
        let block = info.block_sizes.map(|sizes| [sizes.minimum, sizes.preferred, sizes.maximum]);
        let size = info.size;
        let flags = info.flags;
        ExportFacts {
            name,
            description,
            size,
            uri,
            contexts,
            flags,
            block,
            ..ExportFacts::default()
        }
    }

    async fn add_content(
        &self,
        export: &str,
        facts: &mut ExportFacts,
        content: ContentQuery,
    ) -> Result<()> {
        if content != ContentQuery::default() {
            let device = self.connect(export, Vec::new()).await?.device;
            facts.add_content(&device, content).await;
        }
        Ok(())
    }

    async fn session(&self) -> Result<OptionSession> {
        let session = OptionSession::connect(self.place.clone(), &self.options).await;
        session.map_err(|error| self.failed(&error))
    }

    async fn connect(&self, export: &str, contexts: Vec<String>) -> Result<DeviceConnection> {
        let tls = self.place.tls.clone();
        let options = ConnectOptions { contexts, tls, ..self.options.clone() };
        let connected =
            blockhaul_client::connect(&self.place.name, &self.place.address, export, &options);
        connected.await.map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &Error) -> InspectionError {
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

fn owner(protocol: Option<GreetingForm>, tls: bool, replies: ReplyForm) -> ExportOwner {
    let protocol = match protocol {
        Some(GreetingForm::Oldstyle) => "oldstyle",
        Some(GreetingForm::Newstyle) => "newstyle",
        Some(GreetingForm::FixedNewstyle) | None => "newstyle-fixed",
    };
    ExportOwner::Server { protocol, tls, replies }
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
