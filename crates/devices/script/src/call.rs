//! One run of a script: arguments and standard input in; standard output, standard error and the
//! exit status out. It blocks, and is for threads of lanes.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Maximum bytes of standard error that are stored.
const SAID_MAX: usize = 64 << 10;
/// Maximum bytes of a textual reply: enough for a million extents.
const TEXT_MAX: usize = 64 << 20;
/// Bytes of textual replies read at a time.
const STEP: usize = 16 << 10;
/// Interval of checks for the end of a process without a pidfd (kernels before 5.3).
const LOOK: Duration = Duration::from_millis(1);
/// How often a start is tried again while another process still has the file open for writing.
const BUSY_ATTEMPTS: u32 = 50;

/// A shell for scripts that name no interpreter, as execvp(3) has it.
const SHELL: &str = "/bin/sh";

/// State shared by the runs of a script.
pub(crate) struct Runner {
    /// `$tmpdir`.
    pub(crate) folder: PathBuf,
    pub(crate) timeout: Option<Duration>,
    /// A script turned out to need the shell: use it at once from then on.
    shell_first: AtomicBool,
}

/// The destination of standard output.
pub(crate) enum OutputTarget<'a> {
    /// To be read as words.
    Text(&'a mut Vec<u8>),
    /// As many bytes as this, and no others.
    Bytes(&'a mut [u8]),
}

/// A completed run.
#[derive(Debug)]
pub(crate) struct RunOutput {
    pub(crate) status: ExitStatus,
    /// Standard error.
    pub(crate) said: Vec<u8>,
    /// Bytes of standard output, also those beyond the maximum.
    pub(crate) printed: u64,
}

/// Why there is no result.
#[derive(Debug)]
pub(crate) enum RunError {
    /// It did not start, or its pipes failed.
    System(io::Error),
    /// It exceeded its time limit and was killed.
    TimedOut(Duration),
    /// It printed more than the maximum, and was killed.
    TooMuch,
}

impl From<io::Error> for RunError {
    fn from(error: io::Error) -> RunError {
        RunError::System(error)
    }
}

impl From<rustix::io::Errno> for RunError {
    fn from(error: rustix::io::Errno) -> RunError {
        RunError::System(error.into())
    }
}

impl Runner {
    pub(crate) fn new(folder: &Path, timeout: Option<Duration>) -> Runner {
        Runner { folder: folder.to_path_buf(), timeout, shell_first: AtomicBool::new(false) }
    }

    /// Runs a script to its end. Input that it does not read is not an error.
    pub(crate) fn run(
        &self,
        script: &Path,
        args: &[OsString],
        input: &[u8],
        output: OutputTarget<'_>,
    ) -> Result<RunOutput, RunError> {
        let words = args.join(OsStr::new(" "));
        log::debug!("calling {} {}", script.display(), words.display());
        let deadline = self.timeout.map(|limit| (blockhaul_io::now() + limit, limit));
        let mut running = ScriptProcess::start(self.spawn(script, args)?);
        let run = running.finish(input, output, deadline);
        if let Ok(run) = &run {
            log::debug!("completed {} {}: {}", script.display(), words.display(), run.status);
        }
        run
    }

    fn spawn(&self, script: &Path, args: &[OsString]) -> io::Result<Child> {
        const NO_EXEC: i32 = rustix::io::Errno::NOEXEC.raw_os_error();
        const BUSY: i32 = rustix::io::Errno::TXTBSY.raw_os_error();
        let mut attempts = 0;
        loop {
            let shell = self.shell_first.load(Ordering::Relaxed);
            let started = if shell {
                self.start(OsStr::new(SHELL), Some(script), args)
            } else {
                self.start(script.as_os_str(), None, args)
            };
            match started.as_ref().map_err(io::Error::raw_os_error) {
                Err(Some(NO_EXEC)) if !shell => self.shell_first.store(true, Ordering::Relaxed),
                // A thread that starts another process at this moment shares our files.
                Err(Some(BUSY)) if attempts < BUSY_ATTEMPTS => {
                    attempts += 1;
                    std::thread::sleep(LOOK);
                }
                _ => return started,
            }
        }
    }

    fn start(
        &self,
        program: &OsStr,
        script: Option<&Path>,
        args: &[OsString],
    ) -> io::Result<Child> {
        let mut command = Command::new(program);
        // A group of its own, so that what it started ends with it. Nothing runs between fork and
        // exec, so that the standard library may use posix_spawn.
        command
            .args(script)
            .args(args)
            .env("tmpdir", &self.folder)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    }
}

/// Process groups of running scripts.
static RUNNING: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Kills all running scripts, at the end of the program.
pub fn kill_all() {
    let running = RUNNING.lock().expect("no panic under this lock");
    for &group in running.iter() {
        // Fails only if it has just ended.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// A running script. Killed, with its child processes, if dropped before its end.
struct ScriptProcess {
    child: Child,
    group: Option<Pid>,
}

impl ScriptProcess {
    fn start(child: Child) -> ScriptProcess {
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        RUNNING.lock().expect("no panic under this lock").extend(group);
        ScriptProcess { child, group }
    }

    fn finish(
        &mut self,
        mut input: &[u8],
        mut output: OutputTarget<'_>,
        deadline: Option<(Instant, Duration)>,
    ) -> Result<RunOutput, RunError> {
        let mut to = self.child.stdin.take().filter(|_| !input.is_empty());
        let mut from = self.child.stdout.take();
        let mut errors = self.child.stderr.take();
        for fd in [to.as_ref().map(AsFd::as_fd), from.as_ref().map(AsFd::as_fd)]
            .into_iter()
            .chain([errors.as_ref().map(AsFd::as_fd)])
            .flatten()
        {
            ioctl_fionbio(fd, true)?;
        }
        let mut said = Vec::new();
        let mut printed = 0;
        while from.is_some() || errors.is_some() {
            let ready = wait([as_fd(&to), as_fd(&from), as_fd(&errors)], deadline)?;
            if let (true, Some(pipe)) = (ready[0], &mut to) {
                match pipe.write(input) {
                    Ok(count) => input = &input[count..],
                    Err(error) if is_later(&error) => {}
                    // Scripts need not read all of their input.
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => input = &[],
                    Err(error) => return Err(error.into()),
                }
                if input.is_empty() {
                    to = None;
                }
            }
            if ready[1]
                && let Some(pipe) = &from
            {
                match output.take(pipe.as_fd(), &mut printed)? {
                    OutputRead::End => from = None,
                    OutputRead::Some => {}
                    OutputRead::TooMuch => return Err(RunError::TooMuch),
                }
            }
            if ready[2]
                && let Some(pipe) = &errors
                && take_said(pipe.as_fd(), &mut said)?
            {
                errors = None;
            }
        }
        drop(to);
        let status = self.wait(deadline)?;
        Ok(RunOutput { status, said, printed })
    }

    /// Waits for the end of the process, whose pipes are already closed.
    fn wait(&mut self, deadline: Option<(Instant, Duration)>) -> Result<ExitStatus, RunError> {
        if let Some(status) = self.look()? {
            return Ok(status);
        }
        let descriptor = self.group.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        loop {
            match &descriptor {
                Some(fd) => {
                    wait([None, Some(fd.as_fd()), None], deadline)?;
                }
                None => {
                    if let Some((end, limit)) = deadline
                        && blockhaul_io::now() >= end
                    {
                        return Err(RunError::TimedOut(limit));
                    }
                    std::thread::sleep(LOOK);
                }
            }
            if let Some(status) = self.look()? {
                return Ok(status);
            }
        }
    }

    /// Reaps the process if it has ended. From then on its number may be reused.
    fn look(&mut self) -> io::Result<Option<ExitStatus>> {
        let mut running = RUNNING.lock().expect("no panic under this lock");
        let status = self.child.try_wait()?;
        if status.is_some()
            && let Some(group) = self.group.take()
        {
            running.retain(|other| *other != group);
        }
        Ok(status)
    }
}

impl Drop for ScriptProcess {
    fn drop(&mut self) {
        let Some(group) = self.group.take() else { return };
        // Fails only if it has just ended.
        let _ = kill_process_group(group, Signal::KILL);
        // Reaped here first, so that its number is not reused while it is in the list.
        let mut running = RUNNING.lock().expect("no panic under this lock");
        if let Err(error) = self.child.wait() {
            log::debug!("cannot wait for a script that was killed: {error}");
        }
        running.retain(|other| *other != group);
    }
}

/// What reading yielded.
enum OutputRead {
    Some,
    End,
    TooMuch,
}

impl OutputTarget<'_> {
    fn take(&mut self, pipe: BorrowedFd<'_>, printed: &mut u64) -> Result<OutputRead, RunError> {
        let mut spare = [0; 64];
        let got = match self {
            OutputTarget::Text(text) => {
                if text.len() > TEXT_MAX {
                    return Ok(OutputRead::TooMuch);
                }
                let old = text.len();
                text.resize(old + STEP, 0);
                let got = read(pipe, &mut text[old..]);
                text.truncate(old + got.as_ref().map_or(0, |got| got.unwrap_or(0)));
                got?
            }
            OutputTarget::Bytes(bytes) => {
                let at = usize::try_from(*printed).unwrap_or(usize::MAX);
                match bytes.get_mut(at..).filter(|rest| !rest.is_empty()) {
                    Some(rest) => read(pipe, rest)?,
                    // Too much already: the length is only for the message.
                    None => read(pipe, &mut spare)?,
                }
            }
        };
        match got {
            None => Ok(OutputRead::Some),
            Some(0) => Ok(OutputRead::End),
            Some(count) => {
                *printed += count as u64;
                match self {
                    // It would continue for ever.
                    OutputTarget::Bytes(bytes)
                        if *printed > bytes.len() as u64 + TEXT_MAX as u64 =>
                    {
                        Ok(OutputRead::TooMuch)
                    }
                    _ => Ok(OutputRead::Some),
                }
            }
        }
    }
}

/// Reads standard error; returns whether it has ended. Text beyond the maximum is dropped.
fn take_said(pipe: BorrowedFd<'_>, said: &mut Vec<u8>) -> Result<bool, RunError> {
    let mut part = [0; 4096];
    let Some(count) = read(pipe, &mut part)? else { return Ok(false) };
    let room = SAID_MAX.saturating_sub(said.len());
    said.extend_from_slice(&part[..count.min(room)]);
    Ok(count == 0)
}

/// Reads; `None` if there is no data now.
fn read(pipe: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<Option<usize>> {
    match rustix::io::read(pipe, into) {
        Ok(count) => Ok(Some(count)),
        Err(error) if is_later(&error.into()) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn as_fd<T: AsFd>(pipe: &Option<T>) -> Option<BorrowedFd<'_>> {
    pipe.as_ref().map(AsFd::as_fd)
}

/// Waits until the first is writable or one of the others is readable, and returns which.
fn wait(
    fds: [Option<BorrowedFd<'_>>; 3],
    deadline: Option<(Instant, Duration)>,
) -> Result<[bool; 3], RunError> {
    let mut polled = Vec::with_capacity(fds.len());
    for (index, fd) in fds.iter().enumerate() {
        if let Some(fd) = fd {
            let what = if index == 0 { PollFlags::OUT } else { PollFlags::IN };
            polled.push((index, PollFd::new(fd, what)));
        }
    }
    let (indexes, mut polled): (Vec<_>, Vec<_>) = polled.into_iter().unzip();
    loop {
        let time = match deadline {
            None => None,
            Some((end, limit)) => {
                let left = end.saturating_duration_since(blockhaul_io::now());
                if left.is_zero() {
                    return Err(RunError::TimedOut(limit));
                }
                Some(Timespec {
                    tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                    tv_nsec: left.subsec_nanos().into(),
                })
            }
        };
        match poll(&mut polled, time.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => break,
            Err(error) => return Err(error.into()),
        }
    }
    let mut ready = [false; 3];
    for (index, polled) in indexes.into_iter().zip(polled) {
        ready[index] = !polled.revents().is_empty();
    }
    Ok(ready)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A script of these lines, its runner, and their directory.
    fn script(lines: &str, timeout: Option<Duration>) -> (tempfile::TempDir, PathBuf, Runner) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("script");
        fs::write(&path, lines).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        let runner = Runner::new(dir.path(), timeout);
        (dir, path, runner)
    }

    #[test]
    fn everything_arrives_also_without_an_interpreter_and_more_than_pipes_hold() {
        let (dir, path, runner) = script("echo \"$*\" >&2\necho $tmpdir >&2\ncat; exit 3\n", None);
        let input = vec![7; 1 << 20];
        let mut output = vec![0; 1 << 20];
        let args = ["pwrite".into(), "a b".into()];
        let run = runner.run(&path, &args, &input, OutputTarget::Bytes(&mut output)).unwrap();
        assert_eq!((run.status.code(), run.printed), (Some(3), 1 << 20));
        assert_eq!(output, input);
        assert_eq!(run.said, format!("pwrite a b\n{}\n", dir.path().display()).as_bytes());
    }

    #[test]
    fn input_that_nobody_reads_is_no_error_and_too_much_output_is_counted() {
        let (_dir, path, runner) = script("#!/bin/sh\nprintf 1234567\n", None);
        let mut output = [0; 4];
        let run =
            runner.run(&path, &[], &vec![1; 1 << 20], OutputTarget::Bytes(&mut output)).unwrap();
        assert_eq!((run.status.code(), run.printed, &output), (Some(0), 7, b"1234"));
    }

    #[test]
    fn what_takes_too_long_is_killed_with_all_it_started() {
        let lines = "#!/bin/sh\nsleep 1000 & echo $! > $tmpdir/child\nexec >&- 2>&-\nwait\n";
        // On a busy machine it may be killed before it has started anything.
        let child = [1, 10, 100].into_iter().find_map(|times| {
            let (dir, path, runner) = script(lines, Some(Duration::from_millis(300 * times)));
            let mut text = Vec::new();
            let broken = runner.run(&path, &[], &[], OutputTarget::Text(&mut text)).unwrap_err();
            assert!(matches!(broken, RunError::TimedOut(_)), "{broken:?}");
            let child = fs::read_to_string(dir.path().join("child")).unwrap_or_default();
            child.ends_with('\n').then_some(child)
        });
        let status = format!("/proc/{}/stat", child.unwrap().trim());
        let deadline = Instant::now() + Duration::from_secs(60);
        // A zombie until the system's first process gets to it.
        while fs::read_to_string(&status).is_ok_and(|stat| !stat.contains(" Z ")) {
            assert!(Instant::now() < deadline, "what a script started goes on");
            std::thread::sleep(LOOK);
        }
    }

    #[test]
    fn what_does_not_start_is_an_error() {
        let (dir, _, runner) = script("", None);
        let none = dir.path().join("none");
        let broken = runner.run(&none, &[], &[], OutputTarget::Text(&mut Vec::new())).unwrap_err();
        assert!(matches!(broken, RunError::System(_)), "{broken:?}");
    }
}
