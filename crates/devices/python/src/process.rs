//! The process of a plugin: started with sockets and memory, and ended.

use std::io::{IoSlice, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::SharedMemory;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The first thing that the interpreter runs: gets the descriptors and the rest of the source over the
/// socket that is its standard input, where the program's own takes its place.
const BOOT: &str = "\
import os, socket, sys, types
requests = socket.socket(fileno=os.dup(0))
data, fds, _, _ = socket.recv_fds(requests, 8, 250, socket.MSG_CMSG_CLOEXEC)
stdin, memory, *links = fds
os.dup2(stdin, 0)
os.close(stdin)
def source():
    global data
    while len(data) < 8: data += requests.recv(8 - len(data))
    left, text, data = int.from_bytes(data, 'little'), b'', b''
    while left:
        part = requests.recv(left)
        if not part: sys.exit(1)
        text, left = text + part, left - len(part)
    return text
for name in 'nbdkit', 'blockhaul._host':
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = '<' + name + '>'
    exec(compile(source(), module.__file__, 'exec'), module.__dict__)
module.main(requests, memory, [socket.socket(fileno=fd) for fd in links])
";
/// The module for plugins, and the host.
const SOURCES: [&str; 2] = [include_str!("../host/nbdkit.py"), include_str!("../host/host.py")];

/// Interval of checks.
const LOOK: Duration = Duration::from_millis(5);

/// All processes that have not ended.
static RUNNING: Mutex<Vec<Arc<PluginProcess>>> = Mutex::new(Vec::new());

/// The program stops: no process is started any more.
static STOPPING: AtomicBool = AtomicBool::new(false);

/// Standard input and output belong to a client.
static STDIO_TAKEN: AtomicBool = AtomicBool::new(false);

/// Declares standard input and output as a connection: the processes that are started from here on have no
/// standard input, and print to standard error.
pub fn stdio_is_a_client() {
    STDIO_TAKEN.store(true, Ordering::Relaxed);
}

/// Whether plugins may use standard input and output while they start.
pub(crate) fn stdio_is_free() -> bool {
    !STDIO_TAKEN.load(Ordering::Relaxed)
}

/// The process of a plugin.
pub(crate) struct PluginProcess {
    child: Mutex<Child>,
    id: u32,
    /// Takes requests.
    requests: UnixStream,
    /// Its plugin is loaded.
    ready: AtomicBool,
}

/// A process, and the sockets to it.
pub(crate) struct NewProcess {
    pub(crate) process: Arc<PluginProcess>,
    /// Takes requests.
    pub(crate) requests: UnixStream,
    /// Yield answers.
    pub(crate) links: Vec<UnixStream>,
}

impl PluginProcess {
    /// Starts an interpreter with the host in it, and this many sockets for answers. Blocks shortly.
    pub(crate) fn start(
        python: &str,
        folder: Option<&Path>,
        memory: &SharedMemory,
        links: usize,
    ) -> Result<NewProcess> {
        let cannot = |error| Error::system(format!("cannot start {python}"), error);
        let (requests, theirs) = UnixStream::pair().map_err(cannot)?;
        let pairs = (0..links).map(|_| UnixStream::pair());
        let pairs = pairs.collect::<std::io::Result<Vec<_>>>().map_err(cannot)?;
        let (links, their_links): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let mut command = Command::new(python);
        if let Some(folder) = folder {
            command.current_dir(folder);
        }
        if is_stopping() {
            return Err(stopping(python));
        }
        if !stdio_is_free() {
            command.stdout(std::io::stderr());
        }
        let child = command
            .args(["-c", BOOT])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // Signals of a terminal are for the program, which ends this one when it is done.
            .process_group(0)
            // Only this program may notify a service manager, and it has its descriptors.
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LISTEN_FDS")
            .env_remove("LISTEN_PID")
            .env_remove("LISTEN_FDNAMES")
            .spawn()
            .map_err(cannot)?;
        let process = Arc::new(PluginProcess {
            id: child.id(),
            child: Mutex::new(child),
            requests: requests.try_clone().map_err(cannot)?,
            ready: AtomicBool::new(false),
        });
        running().retain(|process| process.status().is_none());
        running().push(process.clone());
        // After it is in the list: one of the two sees the other.
        if is_stopping() {
            process.kill();
            return Err(stopping(python));
        }
        let passed: Vec<_> = their_links.iter().map(AsFd::as_fd).collect();
        let sent = boot(&requests, memory, &passed).and_then(|()| {
            requests.set_nonblocking(true)?;
            links.iter().try_for_each(|link| link.set_nonblocking(true))
        });
        if let Err(error) = sent {
            process.kill();
            // A missing interpreter is an error of `spawn`; here it ended at once.
            let text = format!("{python} does not run (Python 3.9 or later is needed)");
            return Err(Error::system(text, error));
        }
        Ok(NewProcess { process, requests, links })
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Its plugin is loaded.
    pub(crate) fn set_ready(&self) {
        self.ready.store(true, Ordering::SeqCst);
    }

    /// Whether its plugin is loaded.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    /// How it ended, if it has.
    pub(crate) fn status(&self) -> Option<ExitStatus> {
        self.child().try_wait().ok().flatten()
    }

    pub(crate) fn kill(&self) {
        // It may have ended.
        let _ = self.child().kill();
    }

    /// Waits for its end, and kills it when it takes longer than `patience`. Returns how it ended.
    pub(crate) async fn ended(&self, patience: Duration) -> Option<ExitStatus> {
        let deadline = blockhaul_io::now() + patience;
        loop {
            if let Some(status) = self.status() {
                return Some(status);
            }
            if blockhaul_io::now() >= deadline {
                self.kill();
                blockhaul_io::sleep(LOOK).await;
                return self.status();
            }
            blockhaul_io::sleep(LOOK).await;
        }
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().expect("no panic under this lock")
    }
}

/// Sends descriptors and sources.
fn boot(
    requests: &UnixStream,
    memory: &SharedMemory,
    links: &[BorrowedFd<'_>],
) -> std::io::Result<()> {
    let null = std::fs::File::open("/dev/null")?;
    let stdin = std::io::stdin();
    // Without a standard input of our own there is none for it, nor where that is a client.
    let own = stdio_is_free() && rustix::fs::fstat(&stdin).is_ok();
    let mut passed = vec![if own { stdin.as_fd() } else { null.as_fd() }, memory.file()];
    passed.extend_from_slice(links);
    let mut space = vec![std::mem::MaybeUninit::uninit(); ancillary_size(passed.len())];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&passed)) {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut requests = requests;
    let len = |source: &str| (source.len() as u64).to_le_bytes();
    let first = [IoSlice::new(&len(SOURCES[0]))].map(|slice| slice.to_vec());
    sendmsg(requests, &[IoSlice::new(&first[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    requests.write_all(SOURCES[0].as_bytes())?;
    requests.write_all(&len(SOURCES[1]))?;
    requests.write_all(SOURCES[1].as_bytes())
}

/// Bytes for a control message with this many descriptors.
fn ancillary_size(descriptors: usize) -> usize {
    rustix::cmsg_space!(ScmRights(1)) + descriptors * size_of::<i32>()
}

fn running() -> MutexGuard<'static, Vec<Arc<PluginProcess>>> {
    RUNNING.lock().expect("no panic under this lock")
}

/// Those that have not ended.
fn alive() -> Vec<Arc<PluginProcess>> {
    running().iter().filter(|process| process.status().is_none()).cloned().collect()
}

/// Whether the program stops.
pub(crate) fn is_stopping() -> bool {
    STOPPING.load(Ordering::SeqCst)
}

fn stopping(python: &str) -> Error {
    Error::new(Kind::ShuttingDown, format!("{python} is not started, because the program stops"))
}

/// Gives up processes whose plugin is being loaded, and starts no more. Call it when the program stops:
/// requests that wait for such a process fail then.
pub fn give_up_starts() {
    STOPPING.store(true, Ordering::SeqCst);
    kill_unready();
}

fn kill_unready() {
    alive().iter().filter(|process| !process.is_ready()).for_each(|process| process.kill());
}

/// Waits until every plugin has ended, at most this long, then kills the rest. Returns whether all
/// have ended by themselves. Call it before the process ends, not on a worker: plugins that are being
/// loaded are killed at once, and the others are not needed any more.
pub fn wait_for_end(limit: Duration) -> bool {
    kill_unready();
    for process in alive() {
        // What was asked last may hold its handle for ever, when no worker is there to end it.
        let _ = process.requests.shutdown(std::net::Shutdown::Write);
    }
    let deadline = blockhaul_io::now() + limit;
    loop {
        let alive = alive();
        if alive.is_empty() {
            return true;
        }
        if blockhaul_io::now() >= deadline {
            alive.iter().for_each(|process| process.kill());
            return false;
        }
        std::thread::sleep(LOOK);
    }
}

/// Kills every plugin.
pub fn kill_all() {
    alive().iter().for_each(|process| process.kill());
}

/// The end of a process, for messages.
pub(crate) fn ended_with(name: &str, status: Option<ExitStatus>) -> Error {
    let text = match status {
        Some(status) => format!("{name}: its Python process has ended with {status}"),
        None => format!("{name}: its Python process has closed its connection, and is killed"),
    };
    Error::new(Kind::Io, text).complete()
}
