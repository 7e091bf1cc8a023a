//! Locks: files that keep other programs from removing packs and index files that a backup uses.
//!
//! A program that removes files has an exclusive lock, one that adds files a shared one. A program looks for
//! the locks of others before and after it writes its own, so that of two programs at least one sees the other.

use std::process;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use blockhaul_block::{Error, Kind};
use blockhaul_wire::printable;
use jiff::Timestamp;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};
use crate::repository::RepositoryReader;
use crate::writer::person::Person;

/// The folder of locks.
const FOLDER: &str = "locks";
/// Longest file of a lock.
const FILE_MAX: u64 = 64 << 10;
/// Time between two refreshes.
const REFRESH: Duration = Duration::from_secs(5 * 60);
/// Time between two looks at the clock, which goes on while the machine is suspended.
const LOOK: Duration = Duration::from_secs(20);
/// Age from which any program may remove a lock.
const STALE: Duration = Duration::from_secs(30 * 60);
/// Bytes of a name in a message.
const SHOWN: usize = 100;

/// The contents of a lock.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct LockFile {
    time: Timestamp,
    #[serde(default)]
    exclusive: bool,
    #[serde(default)]
    hostname: String,
    #[serde(default)]
    username: String,
    #[serde(default)]
    pid: u32,
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    gid: u32,
}

/// A lock that is not exclusive: it is refreshed until it is dropped.
pub(crate) struct RepositoryLock {
    shared: Arc<SharedLock>,
    thread: Option<JoinHandle<()>>,
    is_alone: bool,
}

struct SharedLock {
    reader: RepositoryReader,
    person: Person,
    state: Mutex<LockState>,
    wake: Condvar,
}

struct LockState {
    /// The name of the file. None: it is gone.
    file: Option<Digest>,
    /// When it was written.
    refreshed: Duration,
    is_ended: bool,
}

impl RepositoryLock {
    /// Refuses a repository that another program has for itself. Blocks.
    ///
    /// # Errors
    /// [`RepositoryFault::Locked`], and those of reading the locks.
    pub(crate) fn check(reader: &RepositoryReader) -> Result<()> {
        others(reader).map(drop)
    }

    /// Locks the repository. Blocks.
    ///
    /// # Errors
    /// [`RepositoryFault::Locked`], and those of the storage.
    pub(crate) fn acquire(reader: &RepositoryReader, person: &Person) -> Result<RepositoryLock> {
        for (name, lock) in others(reader)? {
            if lock.is_stale(Timestamp::now())
                && let Err(fault) = reader.storage().remove(&format!("{FOLDER}/{name}"))
            {
                log::warn!("restic: a lock that was not refreshed for 30 minutes stays: {fault}");
            }
        }
        let refreshed = now();
        let file = Some(write(reader, person)?);
        let state = Mutex::new(LockState { file, refreshed, is_ended: false });
        let (reader, person) = (reader.clone(), person.clone());
        let shared = Arc::new(SharedLock { reader, person, state, wake: Condvar::new() });
        let mut lock = RepositoryLock { shared: shared.clone(), thread: None, is_alone: false };
        // The lock is removed if this fails.
        let found = others(&shared.reader)?;
        let (now, host) = (Timestamp::now(), &shared.person.host);
        lock.is_alone =
            !found.iter().any(|(name, other)| Some(*name) != file && other.may_live(now, host));
        let thread = std::thread::Builder::new().name("restic lock".to_owned());
        let started = thread.spawn(move || shared.refresh_until_end());
        let failed = |error| Error::system("cannot start a thread", error);
        lock.thread = Some(started.map_err(failed)?);
        Ok(lock)
    }

    /// Whether no other program seemed to add files when the repository was locked.
    pub(crate) fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Checks that no other program has removed the lock until now. Blocks.
    ///
    /// # Errors
    /// [`RepositoryFault::LockLost`], and those of the storage.
    pub(crate) fn confirm(&self) -> Result<()> {
        let mut state = self.shared.lock();
        let Some(file) = state.file else { return Err(RepositoryFault::LockLost) };
        self.shared.check(&mut state, &[file])
    }
}

impl Drop for RepositoryLock {
    fn drop(&mut self) {
        self.shared.lock().is_ended = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(file) = self.shared.lock().file.take()
            && let Err(fault) = self.shared.reader.storage().remove(&format!("{FOLDER}/{file}"))
        {
            log::warn!("restic: the lock stays: {fault}");
        }
    }
}

impl SharedLock {
    fn lock(&self) -> MutexGuard<'_, LockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refresh_until_end(&self) {
        let mut state = self.lock();
        while !state.is_ended {
            let waited = self.wake.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            let is_due = now().saturating_sub(state.refreshed) > REFRESH;
            if !state.is_ended
                && is_due
                && let Err(fault) = self.refresh(&mut state)
            {
                log::warn!("restic: the lock cannot be refreshed: {fault}");
            }
        }
    }

    /// Writes a new file, and removes the old one.
    fn refresh(&self, state: &mut LockState) -> Result<()> {
        let Some(old) = state.file else { return Err(RepositoryFault::LockLost) };
        let moment = now();
        let fresh = write(&self.reader, &self.person)?;
        // Afterwards: of the old and the new lock, one was there at any time.
        if let Err(fault) = self.check(state, &[old, fresh]) {
            let _ = self.reader.storage().remove(&format!("{FOLDER}/{fresh}"));
            return Err(fault);
        }
        state.file = Some(fresh);
        state.refreshed = moment;
        self.reader.storage().remove(&format!("{FOLDER}/{old}"))
    }

    /// Checks that these own locks are there. A lock that was removed is lost for good: packs may have been removed then.
    fn check(&self, state: &mut LockState, files: &[Digest]) -> Result<()> {
        let found = self.reader.names(FOLDER)?;
        if files.iter().all(|file| found.contains(file)) {
            return Ok(());
        }
        state.file = None;
        Err(RepositoryFault::LockLost)
    }
}

/// The time since the machine was started. It passes while the machine is suspended.
fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default()
}

fn write(reader: &RepositoryReader, person: &Person) -> Result<Digest> {
    let Person { host, user, uid, gid } = person.clone();
    let lock = LockFile {
        time: Timestamp::now(),
        exclusive: false,
        hostname: host,
        username: user,
        pid: process::id(),
        uid,
        gid,
    };
    let text = serde_json::to_vec(&lock).map_err(crate::writer::unserialized)?;
    reader.put(FOLDER, &text)
}

/// The fault of a lock that may be an exclusive one.
fn unreadable(fault: RepositoryFault) -> RepositoryFault {
    if let RepositoryFault::Other(error) = fault {
        return error.into();
    }
    let remedy = "run restic unlock --remove-all when no other program uses the repository";
    let error = Error::new(Kind::Io, "cannot read a lock of the repository");
    error.because(fault).with_remedy(remedy).into()
}

/// The locks of others that are not exclusive.
fn others(reader: &RepositoryReader) -> Result<Vec<(Digest, LockFile)>> {
    let mut found = Vec::new();
    for name in reader.names(FOLDER)? {
        let file = format!("{FOLDER}/{name}");
        match reader.storage().whole(&file, FILE_MAX) {
            // Removed at this moment; or its program crashed before it wrote it.
            Err(RepositoryFault::MissingFile { .. }) => continue,
            Ok(bytes) if bytes.is_empty() => continue,
            read => drop(read.map_err(unreadable)?),
        }
        let text = match reader.file(FOLDER, &name) {
            Err(RepositoryFault::MissingFile { .. }) => continue,
            read => read.map_err(unreadable)?,
        };
        let wrong = |error: serde_json::Error| {
            unreadable(RepositoryFault::damaged(&file, error.to_string()))
        };
        let lock: LockFile = serde_json::from_slice(&text).map_err(wrong)?;
        if lock.exclusive {
            return Err(RepositoryFault::Locked { holder: lock.holder() });
        }
        found.push((name, lock));
    }
    Ok(found)
}

impl LockFile {
    fn holder(&self) -> String {
        let shown = |text: &str| printable(text.as_bytes(), SHOWN);
        let (host, user) = (shown(&self.hostname), shown(&self.username));
        let time = self.time.strftime("%Y-%m-%dT%H:%M:%SZ");
        format!("process {} of {user} on {host}, since {time}", self.pid)
    }

    /// Whether its program has ended: programs refresh their locks. A process identifier says nothing, because the same
    /// name of a host may be that of several containers.
    fn is_stale(&self, now: Timestamp) -> bool {
        Duration::try_from(now.duration_since(self.time)).is_ok_and(|age| age > STALE)
    }
}

impl LockFile {
    /// Whether its program seems to run. Of one on this host, a process that does not exist has ended, or is in another
    /// container: so this is no reason to remove the lock.
    fn may_live(&self, now: Timestamp, host: &str) -> bool {
        let process = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let has_ended =
            process.is_none_or(|process| test_kill_process(process) == Err(Errno::SRCH));
        !(self.is_stale(now) || self.hostname == host && has_ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_stale_by_their_age_alone() {
        let now = Timestamp::now();
        let lock = |seconds: i64| LockFile {
            time: Timestamp::from_second(now.as_second() + seconds).unwrap(),
            exclusive: false,
            hostname: Person::here().host,
            username: "u".into(),
            pid: 0,
            uid: 0,
            gid: 0,
        };
        assert!(lock(-1802).is_stale(now));
        assert!(!lock(-1790).is_stale(now));
        assert!(!lock(7200).is_stale(now));
        // A process that runs, and one that has ended.
        let with = |pid: u32, host: &str| LockFile { pid, hostname: host.into(), ..lock(-10) };
        let mut ended = process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        assert!(with(process::id(), "here").may_live(now, "here"));
        assert!(!with(ended.id(), "here").may_live(now, "here"));
        assert!(with(ended.id(), "there").may_live(now, "here"));
        assert!(!LockFile { pid: process::id(), ..lock(-1802) }.may_live(now, "here"));
    }
}
