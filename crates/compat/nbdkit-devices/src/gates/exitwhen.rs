//! `exitwhen`: stops the server when an external event has happened and all clients have
//! disconnected.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{
    ExportClient, Gate, GateKind, ParamKind, ParamValues, Shutdown, parse_number,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::rule::{GateClient, GateRule, gate};
use blockhaul_layers::support::{param, param_or, usage};

/// Exit status of a script that reports the event (nbdkit's exitwhen filter).
const SCRIPT_SAYS_SO: i32 = 88;

/// The gate `exitwhen`.
pub static EXITWHEN: GateKind = GateKind {
    name: "exitwhen",
    summary: "ends the server after an event, when the clients have left",
    manual: "After one of the events, new clients are refused, and the server stops, as on SIGTERM, when no \
client is connected. It checks for events every `exit-when-poll` and whenever a client \
connects. Each event may be a list separated by commas: a file exists, a file no longer \
exists, the other end of an inherited pipe (a descriptor number) is closed, a process (its ID) \
has ended. A script, run by /bin/sh, reports the event by exit status 88.",
    example: r#"
blockhaul serve --background -U until.sock zero:1G \
  --layer 'exitwhen?exit-when-file-created=stop&exit-when-poll=1s'
touch stop
while test -e until.sock; do sleep 0.1; done
"#,
    params: &[
        param("exit-when-file-created", ParamKind::Text, "Paths of files: exit once one exists."),
        param(
            "exit-when-file-deleted",
            ParamKind::Text,
            "Paths of files: exit once one no longer exists.",
        ),
        param(
            "exit-when-pipe-closed",
            ParamKind::Text,
            "Descriptors of inherited pipes: exit once the \
                                                         other end of one is closed.",
        ),
        param(
            "exit-when-process-exits",
            ParamKind::Text,
            "Process IDs: exit once one of the processes has \
                                                           ended.",
        ),
        param(
            "exit-when-script",
            ParamKind::Text,
            "Shell command: exit once its exit status is 88.",
        ),
        param_or("exit-when-poll", ParamKind::Duration, "60s", "Interval of the checks."),
    ],
    configure,
};

fn configure(args: &ParamValues, shutdown: &Shutdown) -> Result<Arc<dyn Gate>> {
    let list = |name: &str| -> Vec<String> {
        let text = args.text(name).unwrap_or("");
        text.split(',').filter(|word| !word.is_empty()).map(String::from).collect()
    };
    let mut events = Vec::new();
    let path = |text: &String| std::path::absolute(text).unwrap_or_else(|_| PathBuf::from(text));
    events.extend(list("exit-when-file-created").iter().map(|text| ExitEvent::Created(path(text))));
    events.extend(list("exit-when-file-deleted").iter().map(|text| ExitEvent::Deleted(path(text))));
    for text in list("exit-when-pipe-closed") {
        let pipe = parse_number(&text).ok().and_then(blockhaul_os::inherited);
        events.push(ExitEvent::Closed(pipe.ok_or_else(|| {
            usage(format!("exitwhen: {text:?} is not the number of an inherited descriptor"))
        })?));
    }
    for text in list("exit-when-process-exits") {
        let wrong = || usage(format!("exitwhen: {text:?} is not a process ID"));
        let pid: i32 = parse_number(&text).map_err(|_| wrong())?;
        let pid = rustix::process::Pid::from_raw(pid).ok_or_else(wrong)?;
        // A pidfd refers to the same process, even if its number is reused.
        let gone = |error: rustix::io::Errno| {
            Error::system(format!("exitwhen: there is no process {text}"), error.into())
        };
        let fd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
        events.push(ExitEvent::Exited(fd.map_err(gone)?));
    }
    events.extend(args.text("exit-when-script").map(|text| ExitEvent::Script(text.to_string())));
    if events.is_empty() {
        return Err(usage("exitwhen: requires an event, for example exit-when-file-created=PATH"));
    }
    let every = args.duration("exit-when-poll").unwrap_or(Duration::from_secs(60));
    gate(Arc::new(ExitWhenRule {
        events,
        every: every.max(Duration::from_millis(10)),
        watched: AtomicBool::new(false),
        happened: AtomicBool::new(false),
        inside: AtomicU64::new(0),
        shutdown: shutdown.clone(),
    }))
}

fn watch(rule: &Weak<ExitWhenRule>) {
    // Events before the first client count, too.
    while let Some(rule) = rule.upgrade() {
        if rule.look() {
            if rule.inside.load(Ordering::SeqCst) == 0 {
                rule.end();
            }
            return;
        }
        let every = rule.every;
        drop(rule);
        std::thread::sleep(every);
    }
}

enum ExitEvent {
    Created(PathBuf),
    Deleted(PathBuf),
    Closed(std::os::fd::OwnedFd),
    Exited(std::os::fd::OwnedFd),
    Script(String),
}

impl ExitEvent {
    fn happened(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = |fd, wanted, seen: PollFlags| {
            let mut fds = [PollFd::new(fd, wanted)];
            poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(seen)
        };
        match self {
            ExitEvent::Created(path) => exists(path),
            ExitEvent::Deleted(path) => !exists(path),
            ExitEvent::Closed(fd) => ready(fd, PollFlags::empty(), PollFlags::HUP | PollFlags::ERR),
            ExitEvent::Exited(fd) => ready(fd, PollFlags::IN, PollFlags::IN | PollFlags::HUP),
            ExitEvent::Script(script) => {
                let mut command = Command::new("/bin/sh");
                let status = command.arg("-c").arg(script).stdin(Stdio::null()).status();
                status.is_ok_and(|status| status.code() == Some(SCRIPT_SAYS_SO))
            }
        }
    }

    /// Whether the check may take long.
    fn is_slow(&self) -> bool {
        matches!(self, ExitEvent::Script(_))
    }
}

fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

struct ExitWhenRule {
    events: Vec<ExitEvent>,
    /// Interval of checks.
    every: Duration,
    /// A thread makes the checks.
    watched: AtomicBool,
    happened: AtomicBool,
    /// Number of connected clients.
    inside: AtomicU64,
    shutdown: Shutdown,
}

impl ExitWhenRule {
    fn end(&self) {
        self.shutdown.request("exitwhen: the event has occurred, and no client is connected");
    }

    fn look(&self) -> bool {
        self.look_at(|_| true)
    }

    fn look_at(&self, which: impl Fn(&ExitEvent) -> bool) -> bool {
        if self.happened.load(Ordering::SeqCst) {
            return true;
        }
        let now = self.events.iter().filter(|event| which(event)).any(ExitEvent::happened);
        self.happened.fetch_or(now, Ordering::SeqCst) || now
    }
}

impl GateRule for ExitWhenRule {
    fn start(self: &Arc<Self>) -> Result<()> {
        if self.watched.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let rule = Arc::downgrade(self);
        let started = std::thread::Builder::new().name("exitwhen".into());
        let started = started.spawn(move || watch(&rule));
        started.map(drop).map_err(|error| Error::system("exitwhen: cannot start a thread", error))
    }

    fn admit(self: Arc<Self>, _client: &ExportClient) -> Result<Arc<dyn GateClient>> {
        self.inside.fetch_add(1, Ordering::SeqCst);
        let inside = Arc::new(ExitWhenClient(self));
        // Scripts take long: their thread checks them.
        if inside.0.look_at(|event| !event.is_slow()) {
            return Err(Error::new(Kind::Refused, "exitwhen: the server is about to end"));
        }
        Ok(inside)
    }
}

struct ExitWhenClient(Arc<ExitWhenRule>);

impl GateClient for ExitWhenClient {}

impl Drop for ExitWhenClient {
    fn drop(&mut self) {
        let last = self.0.inside.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && self.0.look_at(|event| !event.is_slow()) {
            self.0.end();
        }
    }
}
