//! `blockhaul serve`: a device, its listeners, readiness, and the orderly stop.
//!
//! - `listen`: Unix and TCP sockets, sockets from systemd, clean-up. `background`: leaving the
//!   terminal. `command`: `--run`. `tls`: `--tls`.

mod background;
mod command;
mod listen;
mod tls;

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use block::{Intent, Layer, Registry, Spec};
use io::{Completer, Runtime};
use server::{Config, Export, Limits, Offers, Server};

use crate::brackets::Groups;
use crate::exit::{FAILED, Failure, Outcome, USAGE, plain};
use crate::{args, devices, logger, signals};
use background::Background;
use listen::{Listening, Where};
pub use tls::Mode;
use tls::Secured;

/// Time in which requests under way may end before connections are cut; waited twice at most, so that
/// a stop takes less than a second.
const PATIENCE: Duration = Duration::from_millis(400);

/// Why the server is to stop.
enum Stop {
    /// A signal asked for it.
    Signal(i32),
    /// The command of `--run` has ended with this exit status.
    Command(u8),
}

/// Completes the wait for the stop; whoever is first says why.
#[derive(Clone)]
struct Stopper(Arc<Mutex<Option<Completer<Stop>>>>);

impl Stopper {
    fn stop(&self, why: Stop) {
        let completer = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(completer) = completer {
            completer.complete(why);
        }
    }
}

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
    logger::start(args.verbose);
    let spec = groups.spec(&args.device)?;
    let registry = devices::registry(Duration::from_secs(60));
    let intent = if args.readonly { Intent::READ } else { Intent::WRITE };
    registry.target(&spec, intent)?;
    let layers = devices::layers(&registry, &args.layer)?;
    let secured = Secured::new(&args.tls)?;
    let tls = secured.open()?;
    let inherited = listen::activation()?;
    let activated = !inherited.is_empty();
    if activated && (args.run.is_some() || args.port.is_some() || !args.unix.is_empty()) {
        return Err(Failure::usage(
            "the sockets come from the environment (LISTEN_FDS): leave out --unix, --port and --run",
        ));
    }
    if args.ip_addr.is_some() && args.port.is_none() && !args.unix.is_empty() {
        return Err(Failure::usage("--ip-addr is of no use with --unix alone: add --port"));
    }
    let foreground = args.foreground || args.run.is_some() || args.exit_with_parent || activated;
    if !foreground && !args.in_background {
        return background::start();
    }
    if args.exit_with_parent {
        listen::tie_to_parent()?;
    }
    let background = if args.in_background { Background::enter()? } else { Background::none() };

    let (completer, stopped) = io::ticket();
    let stopper = Stopper(Arc::new(Mutex::new(Some(completer))));
    let listeners = Where::new(args, inherited);
    let cleanup = listeners.cleanup();
    let on_signal = stopper.clone();
    let caught = signals::catch()?;
    let config = args.engine.config(usize::from(args.workers));
    let runtime = Runtime::start(&config).map_err(|error| {
        Failure::new(FAILED, format!("cannot start workers: {}", plain(&error)))
    })?;
    let job = Job {
        spec,
        registry,
        layers,
        intent,
        listeners,
        background,
        stopper,
        name: args.export.clone(),
        description: args.description.clone(),
        limits: Limits {
            handshake: args.timeout,
            requests: args.threads.map_or(Limits::default().requests, |n| n as usize),
            ..Limits::default()
        },
        offers: Offers {
            structured: !args.no_structured,
            extended: !args.no_extended && !args.no_structured,
            contexts: !args.no_contexts,
        },
        any_name: args.any_name,
        uri_export: args.uri_export.clone(),
        print_uri: args.print_uri,
        memory: args.memory,
        secured,
        tls,
        pidfile: args.pidfile.clone(),
        run: args.run.clone(),
        verbose: args.verbose,
        open: None,
    };
    let (sender, served) = mpsc::channel();
    let end = caught.end();
    drop(runtime.remote().spawn(move || async move {
        let mut job = job;
        let outcome = job.serve(stopped).await;
        // This very function waits for it.
        let _ = sender.send((outcome, job.open));
        end.close();
    }));
    // The main thread has nothing else to do.
    caught.attend(move |signal| on_signal.stop(Stop::Signal(signal)), move || cleanup.clean());
    let (outcome, open) =
        served.recv().map_err(|_| Failure::new(FAILED, "the server ended without a result"))?;
    // Not on a worker: the server of `[ CMD ]` is awaited here, which ends when workers have closed
    // their connections.
    drop(open);
    outcome
}

/// All that the server needs to know once it runs.
struct Job {
    spec: Spec,
    registry: Registry,
    layers: Vec<Arc<dyn Layer>>,
    intent: Intent,
    listeners: Where,
    background: Background,
    stopper: Stopper,
    name: String,
    description: String,
    limits: Limits,
    offers: Offers,
    any_name: bool,
    uri_export: Option<String>,
    print_uri: bool,
    memory: u64,
    secured: Secured,
    tls: server::Tls,
    pidfile: Option<std::path::PathBuf>,
    run: Option<String>,
    verbose: bool,
    /// What was opened.
    open: Option<block::Stack>,
}

impl Job {
    async fn serve(&mut self, stopped: io::Ticket<Stop>) -> Outcome {
        let mut visits = self.visits().await?;
        let mut exports = Vec::new();
        if visits.is_none() {
            let layers = self.layers.clone();
            let export = self.export().await?;
            let shared =
                block::Shared::new(&export.name, &export.description, export.device.clone());
            visits = match self.any_name {
                false => block::gated(shared, &layers),
                true => {
                    let shared = shared.under_any_name();
                    Some(block::gated(shared.clone(), &layers).unwrap_or(shared))
                }
            };
            exports.push(export);
        }
        let listening = self.listeners.bind().await?;
        let server = Server::new(Config {
            exports,
            visits,
            limits: self.limits.clone(),
            offers: self.offers,
            pool: io::Pool::new(self.memory),
            tls: self.tls.clone(),
        });
        let told = self.uri_export.as_deref().unwrap_or(&self.name).to_string();
        let uri = listening.uri(&told, &self.secured);
        log::debug!("serving {} with {} at {uri}", self.spec, io::engine_name());
        let Listening { listeners, addresses, cleanup: _cleanup } = listening;
        let listening: Vec<_> = listeners
            .into_iter()
            .map(|listener| io::start(server.clone().listen(listener)))
            .collect();
        if let Some(path) = &self.pidfile {
            write_pid(path)?;
        }
        let mut say = addresses.free_port.map(|port| format!("{port}\n")).unwrap_or_default();
        if self.print_uri {
            say += &for_people(&uri);
        }
        self.background.ready(&say, self.verbose)?;
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
        let why = stopped.await.unwrap_or(Stop::Command(FAILED));
        if let (Stop::Signal(_), Some(child)) = (&why, &mut child) {
            child.stop();
        }
        let left = server.stop(PATIENCE).await;
        // They hold the server, and with it what is served.
        listening.into_iter().for_each(io::Task::cancel);
        if left > 0 {
            log::warn!("{left} connections had requests under way and were cut");
        }
        Ok(match why {
            Stop::Command(status) => status,
            Stop::Signal(signal) if child.is_some() => signals::status(signal),
            Stop::Signal(_) => 0,
        })
    }

    /// Storage that has devices of their own for its clients, if this is such.
    async fn visits(&mut self) -> Result<Option<Arc<dyn block::Exports>>, Failure> {
        let opened = self.registry.exports(&self.spec, &self.layers, self.intent).await;
        opened.map_err(|error| Failure::opening("device", &self.spec.to_string(), &error))
    }

    /// The one device that all clients share.
    async fn export(&mut self) -> Result<Export, Failure> {
        let layers = std::mem::take(&mut self.layers);
        let stack = self.registry.open(&self.spec, layers, self.intent).await;
        let stack = stack.map_err(|error| {
            let failure = Failure::opening("device", &self.spec.to_string(), &error);
            match (error.kind(), self.intent.write) {
                (block::Kind::ReadOnly | block::Kind::Refused, true) => {
                    Failure::new(failure.status(), format!("{failure}, or serve it with -r"))
                }
                _ => failure,
            }
        })?;
        self.open = Some(stack.clone());
        let device = match self.intent.write {
            true => stack.device().clone(),
            // Some backends can be written however they were opened.
            false => self.readonly(&stack)?,
        };
        let (name, description) = (self.name.clone(), self.description.clone());
        Ok(Export { name, description, device })
    }

    /// The device behind a layer that refuses to change it.
    fn readonly(&self, stack: &block::Stack) -> Result<Arc<dyn block::Device>, Failure> {
        let device = stack.device().clone();
        if !device.facts().can.contains(block::Can::WRITE) {
            return Ok(device);
        }
        let layer = self.registry.layer("readonly")?;
        Ok(block::Stack::over(layer.wrap(device)?)?.device().clone())
    }
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

/// A failure to listen: the arguments are fine, the system refuses.
fn cannot_listen(place: &str, why: &str) -> Failure {
    Failure::new(crate::exit::OPEN, format!("cannot listen on {place}: {why}"))
}

/// A wrong environment for socket activation.
fn wrong_environment(text: &str) -> Failure {
    Failure::new(USAGE, text)
}

/// Descriptors of listening sockets that came with the process.
type Inherited = Vec<OwnedFd>;
