//! The workers' part of a server: opens devices and sockets, changes the user, signals readiness,
//! and stops.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhaul_io::WorkerHandle;
use blockhaul_jobs::{ExportTable, Jobs};
use blockhaul_metrics::Destinations;
use blockhaul_metrics::peer_listener::PeerListener;
use blockhaul_os::{CleanupOnDrop, UserIdentity};
use blockhaul_qmp::Monitor;
use blockhaul_server::{Limits, Offers, Server, ServerConfig, ServiceNotifier};
use blockhaul_server_config::RunningConfig;
use blockhaul_transfer::shell_word;

use super::background::BackgroundProcess;
use super::control::{ControlSocket, Operations, SharedOperations};
use super::listen::{self, BoundListeners, ListenAddresses, ListenConfig};
use super::monitor::{self, MonitorConnection};
use super::single::{self, SingleClient};
use super::stop::{StopReason, Stopper};
use super::tls::TlsSettings;
use super::{command, figures, status, stdio, system, vhost};
use crate::exit::{CommandFailure, FAILED, plain};
use crate::metrics::CommandMetrics;
use crate::{logger, signals};

/// Time for clients to read their last replies; waited twice at most, so that they delay a stop by
/// less than a second.
const PATIENCE: Duration = Duration::from_millis(400);

/// Everything that a running server needs.
pub struct ServerSetup {
    /// The configuration file, if there is one.
    pub config: Option<Arc<RunningConfig>>,
    pub operations: SharedOperations,
    pub notify: ServiceNotifier,
    pub metrics: Destinations,
    pub identity: Option<UserIdentity>,
    pub exit_with_parent: bool,
    pub table: Arc<ExportTable>,
    pub listeners: ListenConfig,
    pub single: Option<SingleClient>,
    pub control: Option<ControlSocket>,
    /// Sockets of the monitor protocol.
    pub qmp: Vec<ControlSocket>,
    /// Clients of that protocol that are there already.
    pub qmp_clients: Vec<MonitorConnection>,
    /// Commands of that protocol, to be run first.
    pub first_commands: Vec<String>,
    /// It listens for NBD clients from the beginning.
    pub listens: bool,
    pub background: BackgroundProcess,
    pub stopper: Stopper,
    pub limits: Limits,
    pub offers: Offers,
    pub uri_export: Option<String>,
    /// The program that shows an export, if the URI is to be printed.
    pub print_uri: Option<&'static str>,
    pub selinux_label: Option<String>,
    pub secured: TlsSettings,
    pub tls: blockhaul_server::TlsPolicy,
    pub pidfile: Option<std::path::PathBuf>,
    /// The file is removed at the end; nbdkit leaves it.
    pub removes_pidfile: bool,
    pub run: Option<String>,
    pub verbose: bool,
    /// What is served, and to whom, is printed.
    pub announced: bool,
}

impl ServerSetup {
    /// Serves until it is stopped.
    pub async fn serve(
        &mut self,
        stopped: blockhaul_io::Ticket<StopReason>,
    ) -> Result<ServerOutcome, CommandFailure> {
        let opened = self.open().await?;
        let running = self.start(opened).await?;
        let why = match stopped.await.unwrap_or(StopReason::Command(FAILED)) {
            StopReason::Signal(_) if signals::ends_by_itself() => StopReason::Ended,
            why => why,
        };
        Ok(self.stop(running, why).await)
    }

    /// Opens the exports and binds the sockets; nothing is accepted yet.
    async fn open(&mut self) -> Result<OpenServer, CommandFailure> {
        let exports = self.table.open().await;
        let exports = match &self.config {
            Some(config) => config.guard(exports.map_err(|error| config.locate(error))?),
            None => exports?,
        };
        let label = system::SocketLabel::set(self.selinux_label.as_deref())?;
        let listening = self.listeners.bind().await?;
        drop(label);
        let server = Server::new(ServerConfig {
            exports,
            limits: self.limits.clone(),
            offers: self.offers,
            pool: blockhaul_io::Pool::new(self.limits.all_bytes),
            tls: self.tls.clone(),
        });
        let export = self.uri_export.as_deref().unwrap_or(self.table.config().name()).to_string();
        let uri = if !listening.addresses.has_nbd && listening.addresses.vhost.is_some() {
            let socket = listening.addresses.vhost.as_deref().unwrap_or(Path::new(""));
            format!("vhost-user socket {}", socket.display())
        } else if self.offers.http {
            listening.http_uri(&export, &self.secured)
        } else {
            listening.uri(&export, &self.secured)
        };
        log::debug!(
            "serving {} with {} at {uri}",
            self.table.config().shown(),
            blockhaul_io::engine_name()
        );
        Ok(OpenServer { server, listening, export, uri })
    }

    /// Accepts clients, and reports that once the user has changed. The monitor's first commands
    /// run before that.
    async fn start(&mut self, opened: OpenServer) -> Result<RunningServer, CommandFailure> {
        let OpenServer { server, listening, export, uri } = opened;
        let BoundListeners { listeners, vhost, addresses, cleanup } = listening;
        let mut accepting: Vec<_> = (listeners.into_iter())
            .map(|listener| blockhaul_io::start(server.clone().listen(listener)))
            .collect();
        accepting.extend(vhost.into_iter().map(|(export, listener)| {
            blockhaul_io::start(vhost::listen(server.clone(), listener, export))
        }));
        let operations = Arc::new(self.operations(&server));
        let monitor = self.monitor(&operations).await?;
        self.write_pidfile()?;
        let page = Arc::new(status::StatusPage::new(&self.operations));
        let published = (figures::text(&server, &self.table, &operations.jobs), page.status());
        let here = WorkerHandle::to(blockhaul_io::worker());
        let metrics = CommandMetrics::start(&self.metrics, "serve", published, &here)?;
        if self.announced {
            self.announce(&addresses, &uri);
        }
        self.change_user()?;
        self.background.ready(&self.printed(&addresses, &uri), self.verbose)?;
        let control = self.control.take().map(|control| control.start(&operations));
        let (sockets, printing) = match &monitor {
            Some(monitor) => self.start_monitor(&operations, monitor),
            None => (Vec::new(), Vec::new()),
        };
        let child = self.start_command(&addresses, &export, &uri)?;
        stdio::let_go();
        let rest = self.single.take().map(|single| self.serve_single(single, &server));
        self.notify.ready(&format!("serving {} at {uri}", self.table.config().shown()));
        self.operations.set(&operations);
        let alive = self.notify.interval().map(|interval| self.tell_alive(interval));
        Ok(RunningServer {
            server,
            operations,
            accepting,
            control,
            monitor: monitor.map(|monitor| (monitor, sockets)),
            printing,
            page,
            metrics,
            child,
            rest,
            alive,
            _cleanup: cleanup,
        })
    }

    /// Ends the jobs, the clients and everything that a client can connect to.
    async fn stop(&self, running: RunningServer, why: StopReason) -> ServerOutcome {
        let begun = Instant::now();
        let RunningServer { server, operations, accepting, control, monitor, .. } = running;
        let mut child = running.child;
        self.notify.stopping("stopping: waiting for requests in progress");
        if let (StopReason::Signal(_) | StopReason::Asked, Some(child)) = (&why, &mut child) {
            child.stop();
        }
        blockhaul_python::give_up_starts();
        let held = operations.jobs.end_service(&self.table, server.stop(PATIENCE)).await;
        running.page.end(&operations);
        running.metrics.end().await;
        // They hold the server, and with it its exports.
        if let Some((monitor, _)) = &monitor {
            monitor.stop();
        }
        drop((control, monitor, operations));
        running.alive.into_iter().for_each(blockhaul_io::Task::cancel);
        accepting.into_iter().for_each(blockhaul_io::Task::cancel);
        if let Some(rest) = running.rest {
            rest.wait(PATIENCE);
        }
        for rest in running.printing {
            // Their sessions end on this worker.
            let _ = blockhaul_io::offload(move || rest.wait(PATIENCE)).await;
        }
        if held > 0 {
            let requests = if held == 1 { "request" } else { "requests" };
            log::warn!(held; "devices held {held} {requests} for longer than --drain-timeout");
        }
        ServerOutcome { status: status_of(why, child).await, held: held > 0, begun }
    }

    /// What `ctl` and the monitor can do with this server.
    fn operations(&self, server: &Arc<Server>) -> Operations {
        let files = self.table.config().job_files.as_ref();
        let found = files.map(|files| files.found()).unwrap_or_default();
        Operations {
            config: self.config.clone(),
            reloads: Arc::default(),
            server: server.clone(),
            table: self.table.clone(),
            stopper: self.stopper.clone(),
            worker: WorkerHandle::to(blockhaul_io::worker()),
            secured: self.secured.clone(),
            notify: self.notify.clone(),
            jobs: Arc::new(Jobs::from_records(found)),
        }
    }

    fn write_pidfile(&self) -> Result<(), CommandFailure> {
        let Some(path) = &self.pidfile else { return Ok(()) };
        write_pid(path)?;
        if self.removes_pidfile {
            self.listeners.cleanup().remember_file(path);
        }
        Ok(())
    }

    /// The output of `--print-uri` and of ports that the kernel has chosen.
    fn printed(&self, addresses: &ListenAddresses, uri: &str) -> String {
        let ports = addresses.free_ports.iter().map(|port| format!("{port}\n"));
        let uri = self.print_uri.map(|program| for_people(uri, program));
        ports.chain(uri).collect()
    }

    fn announce(&self, addresses: &ListenAddresses, uri: &str) {
        let wanted = self.table.config();
        let (access, audience) = (wanted.access(), addresses.audience(&self.secured));
        logger::announce(&format!("serving {} ({access}) at {uri} {audience}", wanted.shown()));
    }

    /// Changes to the user of `--user` and `--group`, with the sockets.
    fn change_user(&self) -> Result<(), CommandFailure> {
        let Some(identity) = &self.identity else { return Ok(()) };
        let mut sockets = self.control.iter().chain(&self.qmp);
        let given = sockets.try_for_each(|socket| socket.give_to(identity));
        let given = given.and_then(|()| self.listeners.cleanup().give_to(identity));
        let assumed = given.and_then(|()| identity.assume());
        assumed.map_err(|error| cannot_become(identity, &error))?;
        // The kernel resets it when the user changes.
        if self.exit_with_parent { listen::tie_to_parent() } else { Ok(()) }
    }

    /// The monitor, if there is one, after the commands of the command line.
    async fn monitor(
        &self,
        operations: &Operations,
    ) -> Result<Option<Arc<Monitor>>, CommandFailure> {
        if self.qmp.is_empty() && self.qmp_clients.is_empty() && self.first_commands.is_empty() {
            return Ok(None);
        }
        monitor::start(operations, self.listens, &self.first_commands).await.map(Some)
    }

    /// Serves its sockets until the first result is dropped, and its clients. The second one is for
    /// those at standard output.
    fn start_monitor(
        &mut self,
        operations: &Operations,
        monitor: &Arc<Monitor>,
    ) -> (Vec<PeerListener>, Vec<single::PendingOutput>) {
        let worker = &operations.worker;
        let sockets = std::mem::take(&mut self.qmp).into_iter();
        let serving = sockets.map(|socket| monitor.serve(socket.into_listener(), worker));
        let clients = std::mem::take(&mut self.qmp_clients).into_iter();
        let printing = clients.filter_map(|client| {
            monitor.serve_connection(client.socket, worker);
            client.rest
        });
        (serving.collect(), printing.collect())
    }

    /// Starts the command of `--run`, whose end stops the server.
    fn start_command(
        &self,
        addresses: &ListenAddresses,
        export: &str,
        uri: &str,
    ) -> Result<Option<command::RunningCommand>, CommandFailure> {
        let Some(script) = &self.run else { return Ok(None) };
        let stopper = self.stopper.clone();
        let ended = move |status| stopper.stop(StopReason::Command(status));
        let mut variables = addresses.variables(export, uri);
        variables.extend(self.secured.variables());
        command::start(script, &variables, ended).map(Some)
    }

    /// Serves the client of `--single`, whose end stops the server; some output may still be in
    /// transit to standard output.
    fn serve_single(&self, single: SingleClient, server: &Arc<Server>) -> single::PendingOutput {
        let (socket, rest) = single.split();
        let server = server.clone();
        let stopper = self.stopper.clone();
        drop(blockhaul_io::spawn(async move {
            server.serve(socket).await;
            stopper.stop(StopReason::Left);
        }));
        rest
    }

    /// Notifies the service manager's watchdog that this worker runs.
    fn tell_alive(&self, interval: Duration) -> blockhaul_io::Task<()> {
        let notify = self.notify.clone();
        blockhaul_io::start(async move {
            loop {
                notify.alive();
                blockhaul_io::sleep(interval).await;
            }
        })
    }
}

/// A server that accepts no clients yet.
struct OpenServer {
    server: Arc<Server>,
    listening: BoundListeners,
    /// Name of the export in `uri`.
    export: String,
    uri: String,
}

/// A server with everything that ends when it stops.
struct RunningServer {
    server: Arc<Server>,
    operations: Arc<Operations>,
    accepting: Vec<blockhaul_io::Task<()>>,
    control: Option<PeerListener>,
    /// The monitor, and its sockets.
    monitor: Option<(Arc<Monitor>, Vec<PeerListener>)>,
    /// Output of the monitor's clients at standard output.
    printing: Vec<single::PendingOutput>,
    page: Arc<status::StatusPage>,
    metrics: CommandMetrics,
    child: Option<command::RunningCommand>,
    rest: Option<single::PendingOutput>,
    alive: Option<blockhaul_io::Task<()>>,
    /// Removes socket files.
    _cleanup: CleanupOnDrop,
}

/// Exit status of a server that stops for a reason, after its command has ended.
async fn status_of(why: StopReason, child: Option<command::RunningCommand>) -> u8 {
    match (why, child) {
        (StopReason::Command(status), _) => status,
        (StopReason::Signal(signal), Some(_)) => signals::status(signal),
        (StopReason::Ended, Some(child)) => {
            blockhaul_io::offload(move || child.wait()).await.unwrap_or(FAILED)
        }
        (StopReason::Signal(_) | StopReason::Left | StopReason::Asked | StopReason::Ended, _) => 0,
    }
}

/// How a server ended.
pub struct ServerOutcome {
    /// Exit status of the program.
    pub status: u8,
    /// Devices still have requests in flight.
    pub held: bool,
    /// When the stop began.
    pub begun: Instant,
}

/// A failure to change the user.
fn cannot_become(identity: &UserIdentity, error: &std::io::Error) -> CommandFailure {
    let user = identity.uid().map(|uid| format!("user {uid} and ")).unwrap_or_default();
    let gid = identity.gid();
    let why = plain(error);
    let text = format!("cannot change to {user}group {gid}: {why}: start it as root");
    CommandFailure::new(crate::exit::OPEN, text)
}

/// The output of `--print-uri`, in the form of nbdkit's.
fn for_people(uri: &str, program: &str) -> String {
    let quoted = shell_word(uri);
    format!(
        "{uri}\nShell-quoted URI: {quoted}\nCommand to query the NBD endpoint:\n  {program} {quoted}\n"
    )
}

/// Refuses a file that is something else than a process id.
pub(crate) fn check_pidfile(path: &Path) -> Result<(), CommandFailure> {
    // Longer than any number.
    const LONGEST: u64 = 32;
    if !std::fs::metadata(path).is_ok_and(|data| data.is_file()) {
        return Ok(());
    }
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut text));
    let is_number = text.trim_ascii().iter().all(u8::is_ascii_digit);
    // A file that cannot be read is reported when it is written.
    if read.is_ok() && (!is_number || text.len() as u64 == LONGEST) {
        let text = format!(
            "--pidfile {}: the file exists and holds no process id: choose another name, or remove it",
            path.display()
        );
        return Err(CommandFailure::usage(text));
    }
    Ok(())
}

pub(crate) fn write_pid(path: &Path) -> Result<(), CommandFailure> {
    std::fs::write(path, format!("{}\n", std::process::id())).map_err(|error| {
        let text = format!("cannot write the process ID to {}: {}", path.display(), plain(&error));
        CommandFailure::new(FAILED, text)
    })
}
