//! The process of an isolated storage: starts it, detects its end, and restarts it, with a pause
//! after repeated early ends.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{BackendTarget, StorageFigure};
use blockhaul_io::{Completer, Interest};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::report::ReportFile;
use super::{ProcessConfig, RestartPolicy};
use blockhaul_client::options::{ConnectTarget, OptionSession};
use blockhaul_client::{ConnectOptions, ServerAddress, ServerProcess};

/// Maximum time until a process has ended once its connections are closed.
const END: Duration = Duration::from_secs(2);
/// Interval of checks.
const LOOK: Duration = Duration::from_millis(5);
/// A process that has run for this long is restarted at once.
const STEADY: Duration = Duration::from_secs(30);
/// Pause before the next start after two early ends in a row; doubles with each further one.
const PAUSE: Duration = Duration::from_millis(500);
/// Maximum pause: a broken plugin costs two starts a minute, and only while clients connect.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Keeps a process available for clients.
pub(super) struct ProcessKeeper {
    target: BackendTarget,
    fate: Arc<ProcessRecord>,
    present: Mutex<ProcessState>,
}

enum ProcessState {
    /// It runs, or its end was not detected yet.
    Running(Arc<IsolatedProcess>),
    /// It is being started; these callers wait for it.
    Starting(Vec<Completer<Result<Arc<IsolatedProcess>>>>),
    /// It could not be started.
    Down,
}

impl ProcessKeeper {
    /// Starts the first process, and waits until it serves.
    pub(super) async fn start(
        target: &BackendTarget,
        again: RestartPolicy,
        process: ProcessConfig,
    ) -> Result<Arc<ProcessKeeper>> {
        let fate = Arc::new(ProcessRecord::new(target, again, process));
        let present =
            Mutex::new(ProcessState::Running(IsolatedProcess::start(target, &fate).await?));
        Ok(Arc::new(ProcessKeeper { target: target.clone(), fate, present }))
    }

    /// The process, a new one if the last has ended; an error says why there is none, and when to
    /// expect one.
    pub(super) async fn present(self: &Arc<ProcessKeeper>) -> Result<Arc<IsolatedProcess>> {
        let starting = {
            let mut present = self.lock();
            if let ProcessState::Running(apart) = &*present {
                match apart.process.status() {
                    None => return Ok(apart.clone()),
                    Some(how) => apart.report(how),
                }
            }
            let (completer, ticket) = blockhaul_io::ticket();
            match &mut *present {
                ProcessState::Starting(waiting) => waiting.push(completer),
                other => {
                    self.fate.may_start()?;
                    *other = ProcessState::Starting(vec![completer]);
                    // Spawned, because the caller may leave while others wait for it, too.
                    drop(blockhaul_io::spawn(self.clone().start_again()));
                }
            }
            ticket
        };
        let lost = |_| Error::new(Kind::Io, format!("{}: the server stops", self.fate.name));
        starting.await.map_err(lost)?
    }

    async fn start_again(self: Arc<ProcessKeeper>) {
        let begun = blockhaul_io::now();
        let started = IsolatedProcess::start(&self.target, &self.fate).await;
        let next = match &started {
            Ok(apart) => {
                self.fate.started(apart.process.id());
                ProcessState::Running(apart.clone())
            }
            Err(error) => {
                let text = error.text();
                let why = text.strip_prefix(&format!("{}: ", self.fate.name)).unwrap_or(&text);
                self.fate.died(why, blockhaul_io::elapsed(begun));
                ProcessState::Down
            }
        };
        let before = std::mem::replace(&mut *self.lock(), next);
        if let ProcessState::Starting(waiting) = before {
            waiting.into_iter().for_each(|one| one.complete(started.clone()));
        }
    }

    /// The state of the process, for users: `process 77`, `process 77, started 2 times`; and what it
    /// counts.
    pub(super) fn state(&self) -> String {
        let times = self.fate.past().starts;
        let starts = if times > 1 { format!(", started {times} times") } else { String::new() };
        match &*self.lock() {
            ProcessState::Running(apart) => match apart.process.status() {
                None => format!("process {}{starts}{}", apart.process.id(), apart.counted()),
                Some(how) => format!("ended with {how}{starts}"),
            },
            ProcessState::Starting(_) => format!("starting{starts}"),
            ProcessState::Down => format!("down{starts}"),
        }
    }

    /// What the process counts, for metrics; nothing while there is none.
    pub(super) fn figures(&self) -> Vec<StorageFigure> {
        match &*self.lock() {
            ProcessState::Running(apart) if !apart.has_ended() => {
                let report = apart.report.as_ref();
                report.map(|report| report.figures(apart.process.id())).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// Whether there is no process, and there will be none.
    pub(super) fn is_over(&self) -> bool {
        let gone = match &*self.lock() {
            ProcessState::Running(apart) => apart.has_ended(),
            ProcessState::Starting(_) => false,
            ProcessState::Down => true,
        };
        gone && self.fate.again == RestartPolicy::Never
    }

    fn lock(&self) -> MutexGuard<'_, ProcessState> {
        self.present.lock().expect("no panic under this lock")
    }
}

/// What is known of all processes of a storage.
struct ProcessRecord {
    /// The name of the storage, without its parameters, which may be secret.
    name: String,
    again: RestartPolicy,
    /// The working directory of the first start: a background server changes it later, but file
    /// names are relative to it.
    folder: Option<PathBuf>,
    process: ProcessConfig,
    past: Mutex<ProcessHistory>,
}

#[derive(Default)]
struct ProcessHistory {
    /// Number of processes that were started and served.
    starts: u64,
    /// Number of early ends in a row, up to the last.
    young: u32,
    /// How the last one ended, and when the next may start; `None`: at once.
    last: String,
    not_before: Option<Instant>,
}

impl ProcessRecord {
    fn new(target: &BackendTarget, again: RestartPolicy, process: ProcessConfig) -> ProcessRecord {
        let shown = || format!("{}:{}", target.scheme, target.rest.display());
        let name = process.name.clone().unwrap_or_else(shown);
        let name = name.split('?').next().unwrap_or_default().to_string();
        let past = ProcessHistory { starts: 1, ..ProcessHistory::default() };
        let folder = std::env::current_dir().ok();
        ProcessRecord { name, again, folder, process, past: Mutex::new(past) }
    }

    fn past(&self) -> MutexGuard<'_, ProcessHistory> {
        self.past.lock().expect("no panic under this lock")
    }

    fn started(&self, process: u32) {
        let name = &self.name;
        self.past().starts += 1;
        log::warn!(
            device = name, process;
            "{name}: restarted as process {process}; its data in memory is lost"
        );
    }

    /// A process has ended, or did not start: `how`, after running for `lived`.
    fn died(&self, how: &str, lived: Duration) {
        let mut past = self.past();
        past.young = if lived < STEADY { past.young.saturating_add(1) } else { 0 };
        let pause = pause(past.young);
        past.not_before = (!pause.is_zero()).then(|| blockhaul_io::now() + pause);
        past.last = how.to_string();
        let name = &self.name;
        let young = past.young;
        drop(past);
        let next = match self.again {
            RestartPolicy::Never => "it is not restarted, and its clients get errors".to_string(),
            RestartPolicy::ForClients if pause.is_zero() => {
                "it will be restarted for the next client".to_string()
            }
            RestartPolicy::ForClients => format!(
                "{young} processes ended early, so the next one is started after {} s at the earliest",
                pause.as_secs_f32()
            ),
        };
        log::error!(device = name, error = how; "{name}: {how}; {next}");
    }

    /// Whether another process may be started now.
    fn may_start(&self) -> Result<()> {
        let past = self.past();
        let name = &self.name;
        let last = &past.last;
        if self.again == RestartPolicy::Never {
            return Err(Error::new(Kind::Io, format!("{name}: {last}")));
        }
        let left = past.not_before.map(|time| time.saturating_duration_since(blockhaul_io::now()));
        match left {
            Some(left) if !left.is_zero() => {
                let left = left.as_secs_f32();
                let text = format!("{name}: {last}; it can be restarted in {left:.1} s");
                Err(Error::new(Kind::Io, text))
            }
            _ => Ok(()),
        }
    }
}

/// The pause after this many early ends in a row. A single one may be an accident.
fn pause(young: u32) -> Duration {
    match young {
        0 | 1 => Duration::ZERO,
        more => PAUSE.saturating_mul(1 << (more - 2).min(16)).min(PAUSE_MAX),
    }
}

/// A process, and what is known of it.
pub(super) struct IsolatedProcess {
    pub(super) process: Arc<ServerProcess>,
    fate: Arc<ProcessRecord>,
    /// What it counts.
    report: Option<ReportFile>,
    begun: Instant,
    /// Its end was reported.
    reported: AtomicBool,
}

impl IsolatedProcess {
    /// Starts a process, and waits until it serves.
    async fn start(
        target: &BackendTarget,
        fate: &Arc<ProcessRecord>,
    ) -> Result<Arc<IsolatedProcess>> {
        // The plugin's block sizes are advertised unchanged, and requests that violate them are
        // accepted: this side decides about that.
        let words = ["blockhaul", "serve", "--exit-with-parent", "--no-block-sizes"];
        let mut words: Vec<OsString> = words.map(OsString::from).to_vec();
        words.push("--limit=payload=64M".into());
        if !target.intent.write {
            words.push("--readonly".into());
        }
        if fate.process.own_words {
            words.push("--quiet-clients".into());
        }
        if log::log_enabled!(log::Level::Debug) {
            words.push("--verbose".into());
        }
        let mut device = OsString::from(&target.scheme);
        device.push(":");
        device.push(&target.rest);
        words.push(device);
        let report = fate.process.report.map(ReportFile::new).transpose();
        let report = report.map_err(|error| Error::system(fate.name.clone(), error))?;
        let mut environment = fate.process.environment.clone();
        environment.extend(report.as_ref().map(ReportFile::variable));
        let process = ServerProcess::start_apart(&words, fate.folder.as_deref(), &environment)?;
        // Its process ID is valid, as it is not reaped before.
        let id = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        let ends = id.and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok());
        let fate = fate.clone();
        let begun = blockhaul_io::now();
        let apart = Arc::new(IsolatedProcess {
            process,
            fate,
            report,
            begun,
            reported: AtomicBool::new(false),
        });
        match apart.ask().await {
            Ok(session) => session.abort().await,
            Err(error) => {
                return Err(apart.end_behind(&error).await.map_or(error, |how| {
                    Error::new(Kind::Io, format!("{}: {}", apart.fate.name, ended_with(how)))
                        .with_remedy("see its messages above")
                }));
            }
        }
        // Without pidfd, the end is detected when the process is next needed.
        if let Some(ends) = ends {
            drop(blockhaul_io::spawn(watch(ends, Arc::downgrade(&apart))));
        }
        Ok(apart)
    }

    /// The name of the storage.
    pub(super) fn name(&self) -> &str {
        &self.fate.name
    }

    /// What it counts, behind its state.
    fn counted(&self) -> String {
        let counted = self.report.as_ref().map(ReportFile::state).unwrap_or_default();
        if counted.is_empty() { counted } else { format!("; {counted}") }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.process.status().is_some()
    }

    pub(super) fn address(&self) -> ServerAddress {
        ServerAddress::Unix(self.process.socket().to_path_buf())
    }

    /// A connection for option requests.
    pub(super) async fn options(&self) -> Result<OptionSession> {
        match self.ask().await {
            Ok(session) => Ok(session),
            Err(error) => Err(self.explained(error, self.name()).await),
        }
    }

    async fn ask(&self) -> Result<OptionSession> {
        let name = self.fate.name.clone();
        let address = self.address();
        let place = ConnectTarget { name, address, export: String::new(), tls: None };
        OptionSession::connect(place, &self.how()).await
    }

    /// The error of the device `name`, or its cause: the end of the process.
    pub(super) async fn explained(&self, error: Error, name: &str) -> Error {
        match self.end_behind(&error).await {
            None if self.fate.process.own_words => in_own_words(error),
            None => error,
            Some(how) => {
                self.report(how);
                let again = match self.fate.again {
                    RestartPolicy::Never => "",
                    RestartPolicy::ForClients => "; a client that reconnects gets a new one",
                };
                Error::new(Kind::Io, format!("{name}: {}{again}", ended_with(how)))
                    .with_remedy("see its messages")
            }
        }
    }

    /// The exit status of the process, if its end caused this error.
    async fn end_behind(&self, error: &Error) -> Option<ExitStatus> {
        // Errors that it reports have other kinds; an unanswered connect is an I/O error.
        let lost = matches!(error.kind(), Kind::Disconnected | Kind::Io);
        let mut patience = if lost { END } else { Duration::ZERO };
        loop {
            let status = self.process.status();
            if status.is_some() || patience.is_zero() {
                return status;
            }
            blockhaul_io::sleep(LOOK).await;
            patience = patience.saturating_sub(LOOK);
        }
    }

    /// Connection options. A local process is there or gone: it may take its time.
    pub(super) fn how(&self) -> ConnectOptions {
        let mut options = ConnectOptions {
            connect_timeout: Duration::ZERO,
            timeout: Duration::ZERO,
            full_info: true,
            ..ConnectOptions::default()
        };
        options.contexts.extend(self.fate.process.contexts.iter().cloned());
        options
    }

    /// Reports once that it has ended.
    fn report(&self, how: ExitStatus) {
        if !self.reported.swap(true, Ordering::Relaxed) {
            self.fate.died(&ended_with(how), blockhaul_io::elapsed(self.begun));
        }
    }
}

/// Reports the end of a process when it happens.
async fn watch(ends: OwnedFd, apart: std::sync::Weak<IsolatedProcess>) {
    if blockhaul_io::ready(&ends, Interest::Readable).await.is_ok()
        && let Some(apart) = apart.upgrade()
        && let Some(how) = apart.process.status()
    {
        apart.report(how);
    }
}

/// A refusal as the process words it: the client puts its message between parentheses.
fn in_own_words(error: Error) -> Error {
    let text = error.text();
    let message = text
        .split_once("the server refused")
        .and_then(|(_, rest)| rest.split_once("(\"")?.1.rsplit_once("\")"));
    match message {
        Some((message, _)) => Error::new(error.kind(), message.to_string()),
        None => error,
    }
}

fn ended_with(how: ExitStatus) -> String {
    format!("its process has ended with {how}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_in_the_words_of_the_process() {
        let text = "cannot open an export at Unix socket /s: the server refused export \"\": no such export \
                    (\"vddk:a: cannot open (error 4)\"); list the exports";
        let error = in_own_words(Error::new(Kind::NotFound, text));
        assert_eq!(error.to_string(), "vddk:a: cannot open (error 4)");
        assert_eq!(error.kind(), Kind::NotFound);
        let other = in_own_words(Error::new(Kind::Io, "cannot connect to Unix socket /s: gone"));
        assert_eq!(other.to_string(), "cannot connect to Unix socket /s: gone");
    }

    #[test]
    fn pauses_begin_with_the_second_death_and_end_growing() {
        assert_eq!((pause(0), pause(1)), (Duration::ZERO, Duration::ZERO));
        let pauses: Vec<_> = (2..6).map(pause).collect();
        assert_eq!(pauses, [PAUSE, PAUSE * 2, PAUSE * 4, PAUSE * 8]);
        assert_eq!((pause(12), pause(u32::MAX)), (PAUSE_MAX, PAUSE_MAX));
    }
}
