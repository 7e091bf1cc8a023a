//! `blockhaul serve`: exports, listeners, readiness, and the orderly stop.
//!
//! - `exports`: what is served. `listen`: Unix, TCP and vsock sockets, sockets from systemd, clean-up.
//!   `single`: standard input and output. `background`: leaving the terminal. `command`: `--run`.
//!   `tls`: `--tls`. `control`: `--control`. `stdio`: what plugins see of it. `stop`: why it ends.
//!   `system`: `--swap` and other wishes. `fresh`: `--per-client`. `trace`: `--trace`.
//!   `figures`: `--metrics`. `notify`: what a service manager is told.

mod background;
mod command;
mod control;
mod exports;
mod figures;
mod fresh;
mod listen;
mod notify;
mod single;
mod stdio;
mod stop;
mod system;
mod tls;
mod trace;

use std::ffi::OsString;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use io::{Identity, Remote, Runtime};
use server::{Config, Limits, Offers, Server};

use crate::brackets::Groups;
use crate::exit::{FAILED, Failure, HELD, Outcome, plain};
use crate::metrics::{self, Address};
use crate::{args, devices, logger, out, signals};
use background::Background;
use control::{Control, Operations};
use exports::{Opened, Wanted};
use listen::{Listening, Where};
use notify::Notify;
use single::Single;
use stop::{Stop, Stopper};
use tls::Secured;

/// Time that clients have to read their last replies; waited twice at most, so that they delay a stop
/// by less than a second.
const PATIENCE: Duration = Duration::from_millis(400);
/// Time that devices have to close after one has held requests for too long.
const CLOSING: Duration = Duration::from_secs(1);
/// How often signals are looked for while devices close.
const LOOK: Duration = Duration::from_millis(20);

/// Starts this program again in the background with these words, and returns when its server is ready.
pub fn again_in_background(words: &[OsString]) -> Outcome {
    background::start_with(words.iter().cloned(), std::process::Stdio::inherit())
}

/// Whether the service manager has made the sockets.
pub fn is_activated() -> bool {
    std::env::var("LISTEN_PID").is_ok_and(|pid| pid == std::process::id().to_string())
}

/// Runs `blockhaul serve`.
pub fn run(args: &args::Serve, groups: &Groups) -> Outcome {
    logger::start(args.verbose || args.trace);
    logger::set_format(args.log_format);
    if args.no_locks {
        backends::disable_locks();
    }
    let mut registry = devices::registry(Duration::from_secs(60));
    if let Some(again) = args.isolate {
        registry = devices::isolated(registry, again);
    }
    let wanted = Wanted::new(args, groups, registry)?;
    let limits = limits(args)?;
    allow_files(&limits);
    let secured = Secured::new(&args.tls)?;
    let tls = secured.open()?;
    if args.oldstyle && matches!(tls, server::Tls::Require(_)) {
        let text = "--oldstyle: clients that are greeted so cannot have TLS, which --tls requires";
        return Err(Failure::usage(text));
    }
    let identity = match (args.user.as_deref(), args.group.as_deref()) {
        (None, None) => None,
        (user, group) => Some(Identity::find(user, group).map_err(Failure::usage)?),
    };
    let metrics = args.metrics.clone().map(Address::absolute).transpose();
    let metrics =
        metrics.map_err(|error| Failure::usage(format!("--metrics: {}", plain(&error))))?;
    let inherited = listen::activation()?;
    let activated = !inherited.is_empty();
    if activated && args.run.is_some() {
        return Err(Failure::usage(
            "--run is of no use with sockets from the environment (LISTEN_FDS)",
        ));
    }
    if !args.ip_addr.is_empty() && args.port.is_empty() && !args.unix.is_empty() {
        return Err(Failure::usage("--ip-addr is of no use with --unix alone: add --port"));
    }
    if args.single && args.port.contains(&0) {
        return Err(Failure::usage(
            "--port 0 prints a port where --single has its client: name a port",
        ));
    }
    let foreground = args.foreground || args.run.is_some() || args.exit_with_parent;
    let foreground = foreground || activated || args.single;
    if !foreground && !args.in_background {
        return background::start();
    }
    if args.exit_with_parent {
        listen::tie_to_parent()?;
    }
    let background = if args.in_background { Background::enter()? } else { Background::none() };
    let single = if args.single { Some(Single::take()?) } else { None };
    if args.single {
        cabi::stdio_is_a_client();
    }
    stdio::guard();
    if args.swap {
        system::keep_memory()?;
    }

    let (completer, stopped) = io::ticket();
    let stopper = Stopper::new(completer);
    let listeners = Where::new(args, inherited);
    let cleanup = listeners.cleanup();
    let made = cleanup.clone();
    // Before there are other threads.
    let control = args.control.as_deref().map(|path| Control::bind(path, &cleanup)).transpose()?;
    let on_signal = stopper.clone();
    let caught = signals::catch()?;
    let config = args.engine.config(usize::from(args.workers));
    let runtime = Runtime::start(&config).map_err(|error| {
        Failure::new(FAILED, format!("cannot start workers: {}", plain(&error)))
    })?;
    let operations = Shared::default();
    let reload = operations.clone();
    let job = Job {
        operations,
        notify: Notify::new(),
        metrics,
        identity,
        exit_with_parent: args.exit_with_parent,
        wanted,
        listeners,
        single,
        control,
        background,
        stopper,
        limits,
        offers: Offers {
            structured: !args.no_structured,
            extended: !args.no_extended && !args.no_structured,
            contexts: !args.no_contexts,
            block_sizes: !args.no_block_sizes,
            preferred: args.preferred_block,
            fixed_newstyle: args.mask_handshake.is_none_or(|mask| mask & 1 != 0),
            no_zeroes: args.mask_handshake.is_none_or(|mask| mask & 2 != 0),
            oldstyle: args.oldstyle,
        },
        uri_export: args.uri_export.clone(),
        print_uri: args.print_uri,
        selinux_label: args.selinux_label.clone(),
        secured,
        tls,
        pidfile: args.pidfile.clone(),
        run: args.run.clone(),
        verbose: args.verbose,
    };
    let (sender, served) = mpsc::channel();
    let serving = caught.until_dropped();
    drop(runtime.remote().spawn(move || async move {
        let mut job = job;
        let outcome = job.serve(stopped).await;
        // This very function waits for it.
        let _ = sender.send((outcome, job.wanted.open));
        drop(serving);
    }));
    // This thread has nothing else to do: one more would rest beside the workers of each server.
    let first = move |signal| on_signal.stop(Stop::Signal(signal));
    let mut attention = caught.on_stop(first, move || cleanup.clean());
    if !args.hangup_stops {
        // What has come of it is in the log.
        let hangup = move || reload.with(|operations| drop(operations.reload()));
        attention = attention.on_hangup(Box::new(hangup));
    }
    attention.wait();
    let (outcome, open) =
        served.recv().map_err(|_| Failure::new(FAILED, "the server ended without a result"))?;
    made.clean();
    // Not on a worker: the server of `[ CMD ]` is awaited here, which ends when workers have closed
    // their connections. Nor on this thread: a second signal ends the program whatever it waits for.
    let (sender, closed) = mpsc::channel::<()>();
    let closing = std::thread::Builder::new().name("closing".into()).spawn(move || {
        drop((open, runtime));
        drop(sender);
    });
    let held = matches!(outcome, Ok(End { held: true, .. }));
    let begun = Instant::now();
    // What holds requests may never let go.
    while closing.is_ok() && !(held && begun.elapsed() > CLOSING) {
        if closed.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout) {
            break;
        }
        attention.look();
    }
    match held {
        true => std::process::exit(i32::from(outcome.map_or(HELD, |end| end.status))),
        false => outcome.map(|end| end.status),
    }
}

/// Descriptors that a server needs besides those of its connections: files, workers, listeners.
const OTHER_FILES: u64 = 512;

/// Has the system allow as many descriptors as there may be connections, if it can.
fn allow_files(limits: &Limits) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let needed = limits.connections as u64 + OTHER_FILES;
    let mut files = getrlimit(Resource::Nofile);
    if files.current.is_none_or(|current| current >= needed) {
        return;
    }
    files.current = Some(files.maximum.map_or(needed, |most| most.min(needed)));
    // Where it cannot, connections are refused when there are none left.
    let _ = setrlimit(Resource::Nofile, files);
}

/// How a server ended.
struct End {
    status: u8,
    /// Devices still hold requests.
    held: bool,
}

/// What clients may cost.
fn limits(args: &args::Serve) -> Result<Limits, Failure> {
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
        limits.set(limit).map_err(|why| Failure::usage(format!("--limit {why}")))?;
    }
    if limits.client_bytes < io::Pool::cost(limits.payload as usize) {
        let least = block::format_size(io::Pool::cost(limits.payload as usize));
        let text = format!("--limit bytes: the longest request needs {least}; or lower payload");
        return Err(Failure::usage(text));
    }
    Ok(limits)
}

/// All that the server needs to know once it runs.
struct Job {
    operations: Shared,
    notify: Notify,
    metrics: Option<Address>,
    identity: Option<Identity>,
    exit_with_parent: bool,
    wanted: Wanted,
    listeners: Where,
    single: Option<Single>,
    control: Option<Control>,
    background: Background,
    stopper: Stopper,
    limits: Limits,
    offers: Offers,
    uri_export: Option<String>,
    print_uri: bool,
    selinux_label: Option<String>,
    secured: Secured,
    tls: server::Tls,
    pidfile: Option<std::path::PathBuf>,
    run: Option<String>,
    verbose: bool,
}

impl Job {
    async fn serve(&mut self, stopped: io::Ticket<Stop>) -> Result<End, Failure> {
        let Opened { exports, visits, running } = self.wanted.open().await?;
        let label = system::SocketLabel::set(self.selinux_label.as_deref())?;
        let listening = self.listeners.bind().await?;
        drop(label);
        let server = Server::new(Config {
            exports,
            visits,
            limits: self.limits.clone(),
            offers: self.offers,
            pool: io::Pool::new(self.limits.all_bytes),
            tls: self.tls.clone(),
        });
        let told = self.uri_export.as_deref().unwrap_or(self.wanted.name()).to_string();
        let uri = listening.uri(&told, &self.secured);
        log::debug!("serving {} with {} at {uri}", self.wanted.shown(), io::engine_name());
        let Listening { listeners, addresses, cleanup: _cleanup } = listening;
        let listening: Vec<_> = listeners
            .into_iter()
            .map(|listener| io::start(server.clone().listen(listener)))
            .collect();
        if let Some(path) = &self.pidfile {
            write_pid(path)?;
        }
        let mut say: String = addresses.free_ports.iter().map(|port| format!("{port}\n")).collect();
        if self.print_uri {
            say += &for_people(&uri);
        }
        let metrics = self.metrics.take().map(|address| serve_figures(&address, &server));
        let metrics = metrics.transpose()?;
        if let Some(identity) = &self.identity {
            let given = self.control.as_ref().map_or(Ok(()), |control| control.give_to(identity));
            let given = given.and_then(|()| self.listeners.cleanup().give_to(identity));
            let assumed = given.and_then(|()| identity.assume());
            assumed.map_err(|error| cannot_become(identity, &error))?;
            if self.exit_with_parent {
                // The kernel forgets it when the user changes.
                listen::tie_to_parent()?;
            }
        }
        self.background.ready(&say, self.verbose)?;
        let operations = Arc::new(Operations {
            server: server.clone(),
            exports: running,
            stopper: self.stopper.clone(),
            worker: Remote::to(io::worker()),
            secured: self.secured.clone(),
            notify: self.notify.clone(),
        });
        self.operations.set(&operations);
        let control = self.control.take().map(|control| control.start(&operations)).transpose()?;
        let mut child = match &self.run {
            None => None,
            Some(script) => {
                let stopper = self.stopper.clone();
                let ended = move |status| stopper.stop(Stop::Command(status));
                let mut variables = addresses.variables(&told, &uri);
                variables.extend(self.secured.variables());
                Some(command::start(script, &variables, ended)?)
            }
        };
        stdio::let_go();
        let rest = self.single.take().map(|single| {
            let (socket, rest) = single.split();
            let (server, stopper) = (server.clone(), self.stopper.clone());
            drop(io::spawn(async move {
                server.serve(socket).await;
                stopper.stop(Stop::Left);
            }));
            rest
        });
        self.notify.ready(&format!("serving {} at {uri}", self.wanted.shown()));
        let alive = self.notify.interval().map(|interval| {
            let notify = self.notify.clone();
            io::start(async move {
                loop {
                    notify.alive();
                    io::sleep(interval).await;
                }
            })
        });
        let why = match stopped.await.unwrap_or(Stop::Command(FAILED)) {
            Stop::Signal(_) if io::ends_by_itself() => Stop::Ended,
            why => why,
        };
        self.notify.stopping("stopping: requests in progress are finished");
        if let (Stop::Signal(_) | Stop::Asked, Some(child)) = (&why, &mut child) {
            child.stop();
        }
        let held = server.stop(PATIENCE).await;
        // They hold the server, and with it what is served.
        drop((control, metrics, operations));
        alive.into_iter().for_each(io::Task::cancel);
        listening.into_iter().for_each(io::Task::cancel);
        if let Some(rest) = rest {
            rest.wait(PATIENCE);
        }
        let status = match (why, child) {
            (Stop::Command(status), _) => status,
            (Stop::Signal(signal), Some(_)) => signals::status(signal),
            (Stop::Ended, Some(child)) => io::offload(move || child.wait()).await.unwrap_or(FAILED),
            (Stop::Signal(_) | Stop::Left | Stop::Asked | Stop::Ended, _) => 0,
        };
        if held == 0 {
            return Ok(End { status, held: false });
        }
        let requests = if held == 1 { "request" } else { "requests" };
        log::warn!(held; "devices held {held} {requests} for longer than --drain-timeout");
        Ok(End { status: if status == 0 { HELD } else { status }, held: true })
    }
}

/// What is asked of a server while it runs, for whoever may be there before it.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Weak<Operations>>>);

impl Shared {
    fn set(&self, operations: &Arc<Operations>) {
        let weak = Arc::downgrade(operations);
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = weak;
    }

    /// Does something, if the server is there.
    fn with(&self, work: impl FnOnce(&Operations)) {
        let weak = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        if let Some(operations) = weak.upgrade() {
            work(&operations);
        }
    }
}

/// Serves figures; says where if that is not known.
fn serve_figures(address: &Address, server: &Arc<Server>) -> Result<metrics::Server, Failure> {
    let serving = metrics::Server::start(address, figures::page(server))?;
    if matches!(address, Address::Tcp(asked) if asked.port() == 0) {
        out::error(&format!("blockhaul: serve: metrics on {}\n", serving.address()));
    }
    Ok(serving)
}

/// A failure to change the user.
fn cannot_become(identity: &Identity, error: &std::io::Error) -> Failure {
    let user = identity.uid().map(|uid| format!("user {uid} and ")).unwrap_or_default();
    let (gid, why) = (identity.gid(), plain(error));
    let text = format!("cannot change to {user}group {gid}: {why}: start it as root");
    Failure::new(crate::exit::OPEN, text)
}

/// What `--print-uri` prints, as nbdkit.
fn for_people(uri: &str) -> String {
    let quoted = command::quoted(uri);
    format!(
        "{uri}\nShell-quoted URI: {quoted}\nCommand to query the NBD endpoint:\n  nbdinfo {quoted}\n"
    )
}

fn write_pid(path: &Path) -> Result<(), Failure> {
    std::fs::write(path, format!("{}\n", std::process::id())).map_err(|error| {
        let text = format!("cannot write the process id to {}: {}", path.display(), plain(&error));
        Failure::new(FAILED, text)
    })
}
