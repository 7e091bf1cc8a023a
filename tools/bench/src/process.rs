//! Processes of one run: a command that is timed, and servers around it.
//!
//! Each gets a process group of its own, so that a terminal's Ctrl-C reaches only this program,
//! which then ends them, and so that a shell's children end with it.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::group::ProcessGroup;
use crate::plan::{BenchPaths, ReadyCondition, ServerPlan, base_name};
use crate::usage::{self, Usage};

/// Interval of memory samples of a command, once it has run for a while.
const LOOK: Duration = Duration::from_millis(20);
/// A server that is not ready after this time will never be.
const READY_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval of checks whether a server is ready.
const READY_LOOK: Duration = Duration::from_millis(1);
/// A server that was asked to end has this time to write what it holds.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// A program that takes longer to print its version does something else.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);
/// How much of what a failed program printed is kept, in bytes and from the end.
const TAIL_MAX: usize = 2000;

/// Where and how processes are started.
#[derive(Clone, Copy)]
pub struct ProcessContext<'a> {
    /// Where programs are.
    pub places: &'a BenchPaths,
    /// Value of PATH for them.
    pub path: &'a std::ffi::OsStr,
    /// Folder for what they print.
    pub logs: &'a Path,
    /// Set when the person pressed Ctrl-C.
    pub stop: &'a AtomicBool,
}

/// Why something failed, with the end of what it printed to stderr.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFailure {
    /// One line.
    pub why: String,
    /// The last lines of stderr.
    pub stderr: String,
}

/// How a timed command went.
#[derive(Debug)]
pub struct CommandTiming {
    /// From before it was started until it had ended.
    pub wall: Duration,
    /// What it used.
    pub usage: Usage,
    /// Why it failed, if it did.
    pub failure: Option<ProcessFailure>,
}

/// A server that runs. Dropping it ends it at once.
pub struct TimedServer {
    /// Its name in the scenario.
    pub name: String,
    pub(crate) group: ProcessGroup,
    /// What it had used when it was ready.
    before: Usage,
    /// Peaks that were seen while it was used: threads come and go with connections.
    seen: Usage,
    log: PathBuf,
}

impl ProcessContext<'_> {
    /// Runs a command and measures it. It is killed after `timeout`, or when the person wants to
    /// stop.
    pub fn run(&self, words: &[String], timeout: Duration) -> CommandTiming {
        self.run_with(words, timeout, &mut [])
    }

    /// The same, with an eye on the servers that it uses.
    pub fn run_with(
        &self,
        words: &[String],
        timeout: Duration,
        servers: &mut [TimedServer],
    ) -> CommandTiming {
        let log = self.logs.join("command");
        let start = Instant::now();
        let mut group = match self.spawn(words, &log) {
            Ok(group) => group,
            Err(why) => {
                let failure = Some(ProcessFailure { why, stderr: String::new() });
                return CommandTiming { wall: start.elapsed(), usage: Usage::default(), failure };
            }
        };
        let mut usage = Usage::default();
        let mut look = Duration::from_millis(1);
        let mut killed = None;
        loop {
            // Processes that end between two looks wake this up at once.
            let left = timeout.saturating_sub(start.elapsed());
            if group.ended_within(look.min(left.max(Duration::from_millis(1)))) {
                break;
            }
            if self.stop.load(Ordering::Relaxed) {
                killed = Some("stopped".to_owned());
            } else if start.elapsed() >= timeout {
                killed = Some(format!("took longer than {} s", timeout.as_secs_f64()));
            }
            if killed.is_some() {
                group.kill();
                group.ended_within(Duration::from_secs(5));
                break;
            }
            usage.watch(group.child.id());
            for server in &mut *servers {
                server.seen.watch(server.group.child.id());
            }
            look = (look * 2).min(LOOK);
        }
        let wall = start.elapsed();
        // Not reaped yet: the kernel still has its figures.
        usage.io = usage::io_of(group.child.id());
        let status = group.reap().map(|(status, cost)| {
            usage.user_s = cost.user.as_secs_f64();
            usage.system_s = cost.system.as_secs_f64();
            usage.peak_bytes = usage.peak_bytes.max(cost.peak);
            usage.threads = usage.threads.max(1);
            status
        });
        let program = base_name(words.first().map_or("", String::as_str));
        let why = match (killed, status) {
            (Some(why), _) => Some(format!("{program} {why}")),
            (None, Ok(status)) => ended_badly(status).map(|how| format!("{program} {how}")),
            (None, Err(error)) => Some(format!("cannot wait for {program}: {error}")),
        };
        let failure = why.map(|why| ProcessFailure { why, stderr: tail(&log) });
        CommandTiming { wall, usage, failure }
    }

    /// What the command that was run last printed to stdout, from the beginning.
    pub fn output(&self) -> String {
        let text = fs::read(self.logs.join("command.out")).unwrap_or_default();
        String::from_utf8_lossy(&text[..text.len().min(TAIL_MAX)]).into_owned()
    }

    /// First line that a program prints about its version; None if it prints none.
    pub fn version(&self, program: &str) -> Option<String> {
        let words = [program.to_owned(), "--version".to_owned()];
        if self.run(&words, VERSION_TIMEOUT).failure.is_some() {
            return None;
        }
        self.output().lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
    }

    /// Starts a server and waits until it is ready.
    pub fn serve(&self, plan: &ServerPlan) -> Result<TimedServer, ProcessFailure> {
        let log = self.logs.join(format!("server-{}", plan.name.replace('/', "_")));
        let fail = |why: String, log: Option<&Path>| ProcessFailure {
            why: format!("server {}: {why}", plan.name),
            stderr: log.map(tail).unwrap_or_default(),
        };
        if let ReadyCondition::Socket(path) | ReadyCondition::Exists(path) = &plan.ready {
            crate::files::remove(path).map_err(|error| fail(error.to_string(), None))?;
        }
        let mut group = self.spawn(&plan.command, &log).map_err(|why| fail(why, None))?;
        let start = Instant::now();
        while !is_ready(&plan.ready) {
            if group.ended_within(READY_LOOK) {
                let how = match group.reap() {
                    Ok((status, _)) => ended_badly(status).unwrap_or_else(|| "ended".to_owned()),
                    Err(error) => error.to_string(),
                };
                return Err(fail(format!("{how} before it was ready"), Some(&log)));
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(fail("stopped".to_owned(), None));
            }
            if start.elapsed() > READY_TIMEOUT {
                let seconds = READY_TIMEOUT.as_secs();
                return Err(fail(format!("was not ready after {seconds} s"), Some(&log)));
            }
        }
        let before = Usage::of(group.child.id()).unwrap_or_default();
        Ok(TimedServer { name: plan.name.clone(), group, before, seen: before, log })
    }

    fn spawn(&self, words: &[String], log: &Path) -> Result<ProcessGroup, String> {
        let (program, arguments) =
            words.split_first().ok_or("cannot start a command without words")?;
        let name = base_name(program);
        let cannot = |error: &dyn std::fmt::Display| format!("cannot start {name}: {error}");
        let program =
            self.places.find(program).ok_or_else(|| cannot(&"the program is not there"))?;
        let errors = File::create(log).map_err(|error| cannot(&error))?;
        let output = File::create(log.with_extension("out")).map_err(|error| cannot(&error))?;
        let child = Command::new(program)
            .args(arguments)
            .env("PATH", self.path)
            // Messages and numbers as in the documentation, whatever the person's language.
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .map_err(|error| cannot(&error))?;
        ProcessGroup::new(child).map_err(|error| cannot(&error))
    }
}

impl TimedServer {
    /// What it has used since it was ready. An error if it has ended by itself.
    pub fn usage(&mut self) -> Result<Usage, ProcessFailure> {
        if self.group.ended_within(Duration::ZERO) {
            let how = match self.group.reap() {
                Ok((status, _)) => ended_badly(status).unwrap_or_else(|| "ended".to_owned()),
                Err(error) => error.to_string(),
            };
            let why = format!("server {}: {how} while it was used", self.name);
            return Err(ProcessFailure { why, stderr: tail(&self.log) });
        }
        let now = Usage::of(self.group.child.id()).unwrap_or(self.before);
        let mut used = now.since(&self.before);
        used.peak_bytes = used.peak_bytes.max(self.seen.peak_bytes);
        used.threads = used.threads.max(self.seen.threads);
        Ok(used)
    }

    /// Asks it to end, and waits until it has.
    pub fn end(self) -> Result<(), ProcessFailure> {
        self.group.signal(Signal::TERM);
        if !self.group.ended_within(END_TIMEOUT) {
            let why = format!("server {}: did not end in {} s", self.name, END_TIMEOUT.as_secs());
            return Err(ProcessFailure { why, stderr: tail(&self.log) });
        }
        Ok(())
    }
}

/// How a program ended, unless well.
fn ended_badly(status: ExitStatus) -> Option<String> {
    match (status.success(), status.code(), status.signal()) {
        (true, ..) => None,
        (_, Some(code), _) => Some(format!("ended with exit status {code}")),
        (_, _, Some(signal)) => Some(format!("was ended by signal {signal}")),
        _ => Some("ended".to_owned()),
    }
}

fn is_ready(ready: &ReadyCondition) -> bool {
    match ready {
        ReadyCondition::Socket(path) => listens(path),
        ReadyCondition::Exists(path) => path.exists(),
        ReadyCondition::Port(port) => {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
            TcpStream::connect_timeout(&address, Duration::from_millis(100)).is_ok()
        }
    }
}

/// Whether a Unix socket has a listener, from the kernel's list: a server may end with its first
/// client, or count a silent connection as an error.
fn listens(path: &Path) -> bool {
    const ACCEPTS: u32 = 0x10000; // __SO_ACCEPTCON in the Flags column
    if !path.exists() {
        return false;
    }
    let Ok(list) = fs::read_to_string("/proc/net/unix") else {
        return std::os::unix::net::UnixStream::connect(path).is_ok();
    };
    let path = path.to_string_lossy();
    list.lines().any(|line| {
        let mut fields = line.split_whitespace();
        let flags = fields.nth(3).and_then(|flags| u32::from_str_radix(flags, 16).ok());
        line.ends_with(path.as_ref()) && flags.is_some_and(|flags| flags & ACCEPTS != 0)
    })
}

/// The end of what a program printed to stderr, without bytes that a terminal obeys.
fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(TAIL_MAX)..]).into_owned();
    text.trim().chars().filter(|c| !c.is_control() || *c == '\n').collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Here {
        dir: tempfile::TempDir,
        places: BenchPaths,
        path: std::ffi::OsString,
        stop: AtomicBool,
    }

    impl Here {
        fn new() -> Here {
            let dir = tempfile::tempdir().unwrap();
            let path = std::env::var_os("PATH").unwrap();
            let places = BenchPaths {
                scratch: dir.path().into(),
                disk: dir.path().into(),
                blockhaul: None,
                search: std::env::split_paths(&path).collect(),
            };
            Here { dir, places, path, stop: AtomicBool::new(false) }
        }

        fn ground(&self) -> ProcessContext<'_> {
            let places = &self.places;
            let path = &self.path;
            let stop = &self.stop;
            ProcessContext { places, path, logs: self.dir.path(), stop }
        }
    }

    fn shell(line: &str) -> Vec<String> {
        ["/bin/sh", "-c", line].map(str::to_owned).to_vec()
    }

    #[test]
    fn a_command_is_measured() {
        let here = Here::new();
        let line = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; sleep 0.05";
        let timed = here.ground().run(&shell(line), Duration::from_secs(20));
        assert_eq!(timed.failure, None);
        assert!(timed.wall >= Duration::from_millis(50));
        assert!(timed.usage.cpu_s() > 0.0, "{:?}", timed.usage);
        assert!(timed.usage.peak_bytes > 100_000 && timed.usage.io.is_some());
    }

    #[test]
    fn failures_say_how_and_keep_stderr() {
        let here = Here::new();
        let failed = |line: &str, ms| {
            here.ground().run(&shell(line), Duration::from_millis(ms)).failure.unwrap()
        };
        let failure = failed("echo oh no >&2; exit 3", 20_000);
        assert_eq!(failure.why, "sh ended with exit status 3");
        assert_eq!(failure.stderr, "oh no");
        assert_eq!(failed("kill -9 $$", 20_000).why, "sh was ended by signal 9");
        assert_eq!(failed("sleep 60 & sleep 60", 50).why, "sh took longer than 0.05 s");
        here.stop.store(true, Ordering::Relaxed);
        assert_eq!(failed("sleep 60", 20_000).why, "sh stopped");
        let absent = here.ground().run(&["no-such".to_owned()], Duration::from_secs(1));
        assert_eq!(absent.failure.unwrap().why, "cannot start no-such: the program is not there");
    }

    #[test]
    fn servers_are_awaited_and_ended() {
        let here = Here::new();
        let mark = here.dir.path().join("mark");
        let line = format!("sleep 0.02; touch {}; exec sleep 60", mark.display());
        let mut plan = ServerPlan {
            name: "s".into(),
            command: shell(&line),
            ready: ReadyCondition::Exists(mark.clone()),
        };
        let mut server = here.ground().serve(&plan).unwrap_or_else(|f| panic!("{f:?}"));
        assert!(mark.exists());
        assert!(server.usage().unwrap().peak_bytes > 0);
        server.end().unwrap();
        plan.command = shell("echo busy >&2; exit 1");
        let failure = here.ground().serve(&plan).err().unwrap();
        assert_eq!(failure.why, "server s: ended with exit status 1 before it was ready");
        assert_eq!(failure.stderr, "busy");
        // It ends once it has been seen to be ready.
        let end = here.dir.path().join("end");
        let wait = format!("until [ -e {} ]; do sleep 0.01; done", end.display());
        plan.command = shell(&format!("touch {}; {wait}; exit 1", mark.display()));
        let mut server = here.ground().serve(&plan).unwrap_or_else(|f| panic!("{f:?}"));
        fs::write(end, "").unwrap();
        while server.usage().is_ok() {}
        let failure = server.usage();
        assert!(failure.is_err_and(|f| f.why.contains("while it was used")));
    }

    #[test]
    fn system_calls_are_counted_where_that_is_permitted() {
        let here = Here::new();
        let mark = here.dir.path().join("mark");
        let line = format!("touch {}; while :; do cd /; done", mark.display());
        let plan = ServerPlan {
            name: "busy".into(),
            command: shell(&line),
            ready: ReadyCondition::Exists(mark.clone()),
        };
        let mut server = here.ground().serve(&plan).unwrap_or_else(|f| panic!("{f:?}"));
        // On a busy machine perf begins to count late: then for longer.
        let counts = (0..8).map(|attempt| {
            let calls = here.ground().count_calls(&server)?;
            // Some time of its own, of which hardly any is spent without a call.
            let begun = server.usage().unwrap().cpu_s();
            while server.usage().unwrap().cpu_s() < begun + 0.05 * f64::from(1 << attempt) {
                std::thread::sleep(Duration::from_millis(5));
            }
            calls.end()
        });
        let mut counts = counts.skip_while(|count| count.is_some_and(|count| count <= 10));
        match counts.next() {
            Some(None) => eprintln!("system calls cannot be counted here"),
            last => assert!(last.is_some(), "too few calls were counted"),
        }
    }

    #[test]
    fn a_listening_socket_is_seen_without_a_connection() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert!(!listens(&path));
        let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(listens(&path));
        socket.set_nonblocking(true).unwrap();
        assert!(socket.accept().is_err());
        drop(socket);
        // A process that another test starts at this moment has it, too, until it is itself.
        let begun = Instant::now();
        while listens(&path) {
            assert!(begun.elapsed() < Duration::from_secs(60), "nobody listens");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
