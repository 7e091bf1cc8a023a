//! Locks: files that keep other programs from removing packs and index files that a backup uses.
//!
//! A program that removes files has an exclusive lock, one that adds files a shared one. A program looks for
//! the locks of others before and after it writes its own, so that of two programs at least one sees the other.

use std::process;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use blockhaul_block::Error;
use blockhaul_wire::printable;
use jiff::Timestamp;
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
/// Age from which others may remove the lock is 30 minutes: from this age on, it counts only if it is still there.
const DOUBT: Duration = Duration::from_secs(20 * 60);
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
            if lock.is_of_dead_process(person)
                && let Err(fault) = reader.storage().remove(&format!("{FOLDER}/{name}"))
            {
                log::warn!("restic: the lock of a process that has ended stays: {fault}");
            }
        }
        let refreshed = now();
        let file = Some(write(reader, person)?);
        let state = Mutex::new(LockState { file, refreshed, is_ended: false });
        let (reader, person) = (reader.clone(), person.clone());
        let shared = Arc::new(SharedLock { reader, person, state, wake: Condvar::new() });
        let mut lock = RepositoryLock { shared: shared.clone(), thread: None };
        // The lock is removed if this fails.
        others(&shared.reader)?;
        let thread = std::thread::Builder::new().name("restic lock".to_owned());
        let started = thread.spawn(move || shared.refresh_until_end());
        let failed = |error| Error::system("cannot start a thread", error);
        lock.thread = Some(started.map_err(failed)?);
        Ok(lock)
    }

    /// Checks that others have respected the lock until now. Blocks.
    ///
    /// # Errors
    /// [`RepositoryFault::LockLost`], and those of the storage.
    pub(crate) fn confirm(&self) -> Result<()> {
        let mut state = self.shared.lock();
        if now().saturating_sub(state.refreshed) > DOUBT {
            self.shared.refresh(&mut state)
        } else {
            Ok(())
        }
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
        if moment.saturating_sub(state.refreshed) > DOUBT
            && !self.reader.names(FOLDER)?.contains(&old)
        {
            state.file = None;
            return Err(RepositoryFault::LockLost);
        }
        state.file = Some(write(&self.reader, &self.person)?);
        state.refreshed = moment;
        self.reader.storage().remove(&format!("{FOLDER}/{old}"))
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

/// The locks of others that are not exclusive.
fn others(reader: &RepositoryReader) -> Result<Vec<(Digest, LockFile)>> {
    let mut found = Vec::new();
    for name in reader.names(FOLDER)? {
        let file = format!("{FOLDER}/{name}");
        match reader.storage().whole(&file, FILE_MAX) {
            // Removed at this moment; or its program crashed before it wrote it.
            Err(RepositoryFault::MissingFile { .. }) => continue,
            Ok(bytes) if bytes.is_empty() => continue,
            read => drop(read?),
        }
        let text = match reader.file(FOLDER, &name) {
            Err(RepositoryFault::MissingFile { .. }) => continue,
            read => read?,
        };
        let wrong = |error: serde_json::Error| RepositoryFault::damaged(&file, error.to_string());
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

    /// Whether its process ran on this host, and has ended.
    fn is_of_dead_process(&self, person: &Person) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let is_dead = |pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH);
        self.hostname == person.host && pid.is_some_and(is_dead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_is_recognized_on_its_own_host_only() {
        let mut ended = process::Command::new("true").spawn().unwrap();
        let gone = ended.id();
        ended.wait().unwrap();
        let here = Person::here();
        let lock = |pid, host: &str| {
            let hostname = host.to_owned();
            LockFile {
                time: Timestamp::now(),
                exclusive: false,
                hostname,
                username: "u".into(),
                pid,
                uid: 0,
                gid: 0,
            }
        };
        assert!(lock(gone, &here.host).is_of_dead_process(&here));
        assert!(!lock(gone, "another host").is_of_dead_process(&here));
        assert!(!lock(process::id(), &here.host).is_of_dead_process(&here));
        assert!(!lock(0, &here.host).is_of_dead_process(&here));
    }
}
