//! `blockhaul serve`: the command line, listeners, readiness, and the orderly stop. The exports and their jobs
//! are in the crate `blockhaul_jobs`.
//!
//! - `export_arguments`: the exports of the command line. `config`: the configuration file. `listen`: Unix, TCP and vsock sockets, sockets from
//!   systemd, cleanup. `single`: standard input and output. `background`: going to the background.
//!   `command`: `--run`. `tls`: `--tls`. `control`: `--control`. `stdio`: standard streams of plugins.
//!   `stop`: why it ends. `system`: `--swap` and similar options. `job`: the workers' part of all this, from
//!   opening devices to the stop. `figures`: `--metrics`. `vhost`: `--vhost-user`. `monitor`: `--qmp`. `status`:
//!   `--page`. `notify`: messages to a service manager.

pub(crate) mod background;
pub(crate) mod command;
mod config;
pub(crate) mod control;
pub mod export_arguments;
mod figures;
pub(crate) mod job;
mod listen;
mod monitor;
mod single;
mod status;
pub(crate) mod stdio;
pub(crate) mod stop;
mod system;
mod tls;
#[cfg(feature = "vhost")]
mod vhost;
#[cfg(not(feature = "vhost"))]
mod vhost {
    //! Nothing: no option names a socket.

    /// Never called.
    pub async fn listen<S>(_: S, _: blockhaul_io::Listener, _: String) {}
}

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use blockhaul_io::Runtime;
use blockhaul_jobs::{ExportTable, ExportTableConfig};
use blockhaul_metrics::Destinations;
use blockhaul_os::{CleanupList, UserIdentity};
use blockhaul_server::{Limits, Offers, ServiceNotifier};
use blockhaul_server_config::{RunningConfig, ServerConfigFile};

use crate::brackets::Groups;
use crate::exit::{CommandFailure, CommandResult, FAILED, HELD, plain};
use crate::{args, devices, logger, signals};
use background::{BackgroundProcess, WorkingDirectory};
use control::{ControlSocket, SharedOperations};
use export_arguments::export_config;
use job::{ServerOutcome, ServerSetup};
use listen::ListenConfig;
use monitor::MonitorConnection;
use single::SingleClient;
use stop::{StopReason, Stopper};
use tls::TlsSettings;

/// Maximum time for devices to close after one has held requests for too long.
const CLOSING: Duration = Duration::from_secs(1);
/// Interval of checks for signals while devices close.
const LOOK: Duration = Duration::from_millis(20);

/// Restarts this program in the background with these words, and returns when its server is ready.
pub fn again_in_background(words: &[OsString]) -> CommandResult {
    background::start_with(words.iter().cloned(), std::process::Stdio::inherit())
}

/// Whether the service manager has created the sockets.
pub fn is_activated() -> bool {
    std::env::var("LISTEN_PID").is_ok_and(|pid| pid == std::process::id().to_string())
}

/// Runs `blockhaul serve`.
pub fn run(mut args: args::ServeArgs, groups: &Groups) -> CommandResult {
    let verbose = args.verbose || args.trace;
    if args.as_nbdkit {
        // nbdkit logs no changes.
        logger::start(verbose);
    } else {
        logger::start_server(verbose);
    }
    logger::set_format(args.log.log_format);
    logger::set_quiet_clients(args.quiet_clients && !args.verbose);
    if args.no_locks {
        blockhaul_backends::disable_locks();
    }
    if args.check_config {
        return config::check(&mut args, groups);
    }
    let asked = ServeConfig::check(&mut args, groups)?;
    if asked.goes_to_background(&args) {
        return background::start("serve");
    }
    let (background, single) = enter(&args)?;
    serve(&args, asked, background, single)
}

/// The parsed command line, with all checks possible before anything is opened, while the terminal
/// is still available.
struct ServeConfig {
    /// The file of `--config`.
    file: Option<ServerConfigFile>,
    wanted: ExportTableConfig,
    limits: Limits,
    secured: TlsSettings,
    tls: blockhaul_server::TlsPolicy,
    identity: Option<UserIdentity>,
    metrics: Destinations,
    /// Sockets from the service manager.
    inherited: listen::InheritedSockets,
}

impl ServeConfig {
    fn check(args: &mut args::ServeArgs, groups: &Groups) -> Result<ServeConfig, CommandFailure> {
        let file = config::read(args)?;
        let mut registry = devices::registry(Duration::from_secs(60));
        if let Some(again) = args.isolate {
            registry = devices::isolated(registry, again);
        }
        let wanted = export_config(args, groups, registry, file.as_ref())?;
        let limits = limits(args)?;
        let limits = match &file {
            Some(file) => file.limits_over(limits)?,
            None => limits,
        };
        allow_files(&limits);
        let secured = TlsSettings::new(&args.tls)?;
        let tls = secured.open().map_err(|failure| match &file {
            Some(file) => failure
                .reworded(file.fault(file.tls.line, failure.facts()).about("tls").to_string()),
            None => failure,
        })?;
        let identity = match (args.user.as_deref(), args.group.as_deref()) {
            (None, None) => None,
            (user, group) => Some(UserIdentity::find(user, group).map_err(CommandFailure::usage)?),
        };
        let metrics = Destinations::new(&args.metrics, args.page)?;
        if let Some(path) = &args.pidfile {
            job::check_pidfile(path)?;
        }
        let inherited = listen::activation()?;
        fit_together(args, &tls, !inherited.is_empty())?;
        Ok(ServeConfig { file, wanted, limits, secured, tls, identity, metrics, inherited })
    }

    /// A server whose sockets are from the service manager stays where that started it.
    fn goes_to_background(&self, args: &args::ServeArgs) -> bool {
        args.background && !args.in_background && self.inherited.is_empty()
    }
}

/// Sets up this process for the server: its parent, standard streams and memory.
fn enter(
    args: &args::ServeArgs,
) -> Result<(BackgroundProcess, Option<SingleClient>), CommandFailure> {
    if args.exit_with_parent {
        listen::tie_to_parent()?;
    }
    let background = if !args.in_background {
        BackgroundProcess::none()
    } else if args.as_nbdkit {
        BackgroundProcess::enter(WorkingDirectory::Root)
    } else {
        BackgroundProcess::enter(WorkingDirectory::Kept)
    };
    let single = if args.single { Some(SingleClient::take()?) } else { None };
    if args.single {
        crate::plugin_host::stdio_is_a_client();
        blockhaul_python::stdio_is_a_client();
    }
    stdio::guard();
    if args.swap {
        system::keep_memory()?;
    }
    Ok((background, single))
}

/// Serves on workers, while this thread waits for signals; then closes everything.
fn serve(
    args: &args::ServeArgs,
    asked: ServeConfig,
    background: BackgroundProcess,
    single: Option<SingleClient>,
) -> CommandResult {
    let (completer, stopped) = blockhaul_io::ticket();
    let stopper = Stopper::new(completer);
    let listeners = ListenConfig::new(args, asked.inherited);
    let cleanup = listeners.cleanup();
    // Before there are other threads.
    let (control, qmp) = control_sockets(args, &cleanup)?;
    let qmp_clients = args.qmp_client.iter().map(MonitorConnection::open);
    let qmp_clients = qmp_clients.collect::<Result<_, _>>()?;
    let caught = signals::catch()?;
    let runtime = workers(args)?;
    let operations = SharedOperations::default();
    let table = Arc::new(ExportTable::new(asked.wanted));
    let own_limits = limits(args)?;
    let config = asked.file.map(|file| RunningConfig::new(file, own_limits, table.clone()));
    let mut job = ServerSetup {
        config: config.map(Arc::new),
        operations: operations.clone(),
        notify: ServiceNotifier::new(),
        metrics: asked.metrics,
        identity: asked.identity,
        exit_with_parent: args.exit_with_parent,
        table,
        listeners,
        single,
        control,
        qmp,
        qmp_clients,
        first_commands: args.qmp_run.clone(),
        listens: !args.waits_for_monitor(),
        background,
        stopper: stopper.clone(),
        limits: asked.limits,
        offers: offers(args),
        uri_export: args.uri_export.clone(),
        print_uri: args.print_uri.then_some(information_command(args)),
        selinux_label: args.selinux_label.clone(),
        secured: asked.secured,
        tls: asked.tls,
        pidfile: args.pidfile.clone(),
        removes_pidfile: !args.as_nbdkit && !args.keep_pidfile,
        run: args.run.clone(),
        verbose: args.verbose,
        announced: is_announced(args),
    };
    let (sender, served) = mpsc::channel();
    let serving = caught.until_dropped();
    drop(runtime.remote().spawn(move || async move {
        let outcome = job.serve(stopped).await;
        // This function waits for it.
        let _ = sender.send((outcome, job.table));
        drop(serving);
    }));
    // This thread has nothing else to do, and an extra one per server would be idle.
    let first = move |signal| stopper.stop(StopReason::Signal(signal));
    let removed = cleanup.clone();
    let mut attention = caught.on_stop(first, move || removed.clean());
    if !args.hangup_stops {
        attention = attention.on_hangup(Box::new(move || operations.reload()));
    }
    attention.wait();
    let (outcome, open) = served
        .recv()
        .map_err(|_| CommandFailure::new(FAILED, "the server ended without a result"))?;
    cleanup.clean();
    finish(outcome, (open, runtime), args.drain_timeout, || attention.look())
}

/// The sockets of `--control` and `--qmp`.
fn control_sockets(
    args: &args::ServeArgs,
    cleanup: &CleanupList,
) -> Result<(Option<ControlSocket>, Vec<ControlSocket>), CommandFailure> {
    let control = args.control.as_deref();
    let control =
        control.map(|path| ControlSocket::bind("--control", path, cleanup)).transpose()?;
    let qmp = args.qmp.iter().map(|path| ControlSocket::bind("--qmp", path, cleanup));
    Ok((control, qmp.collect::<Result<_, _>>()?))
}

/// Starts the workers.
fn workers(args: &args::ServeArgs) -> Result<Runtime, CommandFailure> {
    let config = args.engine.config(usize::from(args.workers));
    Runtime::start(&config).map_err(|error| {
        CommandFailure::new(FAILED, format!("cannot start workers: {}", plain(&error)))
    })
}

/// The command that shows an export, for those who read the URI.
fn information_command(args: &args::ServeArgs) -> &'static str {
    if args.as_nbdkit { "nbdinfo" } else { "blockhaul info" }
}

/// Whether the server says where it listens.
fn is_announced(args: &args::ServeArgs) -> bool {
    let is_used_by_one = args.single || args.run.is_some() || is_activated();
    !args.quiet && !args.waits_for_monitor() && !is_used_by_one
}

/// Closes the exports (`open`), and returns the exit status. A device that holds requests has
/// `drain`, from the beginning of the stop on; then the process ends without it.
fn finish(
    outcome: Result<ServerOutcome, CommandFailure>,
    open: impl Send + 'static,
    drain: Duration,
    look: impl FnMut(),
) -> CommandResult {
    let ServerOutcome { status, held, begun } = match outcome {
        Ok(end) => end,
        Err(failure) => {
            close(move || drop(open), None, look);
            return Err(failure);
        }
    };
    let closing = move || {
        drop(open);
        // Even after a long stop they have time for short work.
        crate::plugin::wait_for_end(drain.saturating_sub(begun.elapsed()).max(CLOSING))
    };
    let ended = close(closing, held.then_some(CLOSING), look);
    if ended == Some(true) && !held {
        return Ok(status);
    }
    // What was given up may hold threads for ever.
    blockhaul_script::kill_all();
    blockhaul_python::kill_all();
    std::process::exit(i32::from(if status == 0 { HELD } else { status }))
}

/// Refuses incompatible options.
fn fit_together(
    args: &args::ServeArgs,
    tls: &blockhaul_server::TlsPolicy,
    activated: bool,
) -> Result<(), CommandFailure> {
    let why = if args.oldstyle && matches!(tls, blockhaul_server::TlsPolicy::Require(_)) {
        "--oldstyle: oldstyle clients cannot use TLS, which --tls requires"
    } else if args.http_upgrade && matches!(tls, blockhaul_server::TlsPolicy::On(_)) {
        "--http-upgrade: TLS starts before the request, for all clients or none: use --tls require or off"
    } else if activated && args.run.is_some() {
        "--run cannot be used with socket activation (LISTEN_FDS)"
    } else if !args.ip_addr.is_empty() && args.port.is_empty() && !args.unix.is_empty() {
        "--ip-addr has no effect with only --unix: add --port"
    } else if args.single && args.port.contains(&0) {
        "--port 0 prints the port on standard output, which --single uses for the client: give a port"
    } else {
        return Ok(());
    };
    Err(CommandFailure::usage(why))
}

/// The features offered in the handshake.
fn offers(args: &args::ServeArgs) -> Offers {
    let greeted_with = |bit: u16| args.mask_handshake.is_none_or(|mask| mask & bit != 0);
    Offers {
        structured: !args.no_structured,
        extended: !args.no_extended && !args.no_structured,
        contexts: !args.no_contexts,
        block_sizes: !args.no_block_sizes,
        preferred: args.preferred_block,
        fixed_newstyle: greeted_with(1),
        no_zeroes: greeted_with(2),
        oldstyle: args.oldstyle,
        http: args.http_upgrade,
    }
}

/// Runs `work`, which closes the exports and ends the workers; gives up after `limit`, if there is
/// one: devices that hold requests may never release them. Returns the result of the work, if it
/// has ended.
///
/// Not on a worker: this waits for the server of `[ CMD ]`, which ends when workers have closed
/// their connections. Nor on this thread: a second signal must end the program at any time.
pub(crate) fn close<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
    limit: Option<Duration>,
    mut look: impl FnMut(),
) -> Option<T> {
    let (sender, closed) = mpsc::channel();
    let closing = std::thread::Builder::new().name("closing".into()).spawn(move || {
        // The caller may have given up.
        let _ = sender.send(work());
    });
    let begun = Instant::now();
    while closing.is_ok() && limit.is_none_or(|limit| begun.elapsed() <= limit) {
        match closed.recv_timeout(LOOK) {
            Ok(done) => return Some(done),
            Err(RecvTimeoutError::Timeout) => look(),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    None
}

/// Descriptors that a server needs besides its connections: files, workers, listeners.
const OTHER_FILES: u64 = 512;

/// Raises the descriptor limit to the maximum number of connections, if possible.
fn allow_files(limits: &Limits) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let needed = limits.connections as u64 + OTHER_FILES;
    let mut files = getrlimit(Resource::Nofile);
    if files.current.is_none_or(|current| current >= needed) {
        return;
    }
    files.current = Some(files.maximum.map_or(needed, |most| most.min(needed)));
    // If that fails, connections are refused when there are no descriptors left.
    let _ = setrlimit(Resource::Nofile, files);
}

/// The limits of clients.
fn limits(args: &args::ServeArgs) -> Result<Limits, CommandFailure> {
    let mut limits = Limits {
        handshake: args.timeout,
        all_bytes: args.memory,
        drain: args.drain_timeout,
        ..Limits::default()
    };
    if let Some(requests) = args.threads {
        limits.requests = requests as usize;
    }
    for limit in &args.limit {
        limits.set(limit).map_err(|why| CommandFailure::usage(format!("--limit {why}")))?;
    }
    limits.check().map_err(|why| CommandFailure::usage(format!("--limit {why}")))?;
    Ok(limits)
}
