//! Connections, handles and the rules of the library.

use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use crate::counters::Counters;
use crate::disk::SimulatedDisk;
use crate::job::TransferJob;
use crate::settings::{BlockListFault, CallEffect, CallFault, SimulatorSettings};
use crate::types::{FAIL, FILE_ERROR, LOCKED, NO_ACCESS, NOT_FOUND, PERMISSIONS, THUMBPRINT};
use crate::types::{INVALID, NOT_SUPPORTED, VixError};

/// Functions that must not overlap one another.
const SERIAL: [&str; 5] = ["ConnectEx", "Disconnect", "Open", "Close", "Create"];

/// The library of a process.
pub(crate) struct Simulator {
    state: Mutex<Option<LibraryState>>,
    /// There is a job, or the threads are to end.
    pub(crate) work: Condvar,
    /// A request was answered.
    pub(crate) answered: Condvar,
}

pub(crate) static SIMULATOR: Simulator =
    Simulator { state: Mutex::new(None), work: Condvar::new(), answered: Condvar::new() };

/// What the library knows between `InitEx` and `Exit`.
pub(crate) struct LibraryState {
    pub(crate) settings: SimulatorSettings,
    process: u32,
    thread: ThreadId,
    pub(crate) counters: Counters,
    /// The next connection or handle; never reused, so that use after close is noticed.
    next: usize,
    connections: HashMap<usize, HostConnection>,
    pub(crate) handles: HashMap<usize, DiskHandle>,
    /// When the last query of a disk ends, by path.
    pub(crate) busy: HashMap<PathBuf, Instant>,
    pub(crate) jobs: BinaryHeap<TransferJob>,
    pub(crate) threads: Vec<JoinHandle<()>>,
    /// Memory that the program must free, by address.
    results: HashMap<usize, Box<[u64]>>,
    /// The function of [`SERIAL`] that runs.
    serial: Option<&'static str>,
    random: u64,
}

/// A connection to the simulated host.
struct HostConnection {
    read_only: bool,
}

/// An open disk.
pub(crate) struct DiskHandle {
    connection: usize,
    pub(crate) disk: Arc<SimulatedDisk>,
    pub(crate) path: PathBuf,
    pub(crate) sectors: u64,
    pub(crate) read_only: bool,
    /// When the handle has moved all bytes that were requested so far.
    pub(crate) free: Instant,
    /// Requests whose callback was not called yet.
    pub(crate) unanswered: usize,
    /// Requests whose callback has not returned yet.
    pub(crate) busy: usize,
    /// It was asked for its allocated blocks, for `scan=on`.
    pub(crate) scanned: bool,
}

/// Who connects.
#[derive(Debug, Default)]
pub(crate) struct Login {
    pub(crate) server: Option<String>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) thumbprint: Option<String>,
    pub(crate) snapshot: Option<String>,
    pub(crate) read_only: bool,
}

/// What a fault adds to a call.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct CallExtra {
    pub(crate) delay: Duration,
    pub(crate) wrong: Option<BlockListFault>,
}

impl Simulator {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<LibraryState>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the library with the settings of a folder.
    pub(crate) fn init(&'static self, folder: Option<&Path>) -> Result<(), VixError> {
        let settings = SimulatorSettings::load(folder).map_err(|error| {
            eprintln!("vddk-simulator: {error}");
            INVALID
        })?;
        let mut guard = self.lock();
        if let Some(state) = guard.as_mut() {
            state.misuse("InitEx is called twice");
            return Err(FAIL);
        }
        let mut state = LibraryState::new(settings);
        state.counters.start("InitEx");
        state.effect("InitEx", 1)?;
        for _ in 0..state.settings.threads {
            state.threads.push(std::thread::spawn(|| SIMULATOR.transfer()));
        }
        *guard = Some(state);
        Ok(())
    }

    /// Ends the library: its threads, and everything that is open.
    pub(crate) fn exit(&self) {
        let Some(mut state) = self.lock().take() else {
            eprintln!("vddk-simulator: misuse: Exit is called without InitEx");
            return;
        };
        state.counters.start("Exit");
        state.check_thread("Exit");
        if !state.handles.is_empty() || !state.connections.is_empty() {
            state.misuse("Exit is called while disks or connections are open");
        }
        if !state.results.is_empty() {
            state.misuse("Exit is called before all results are freed");
        }
        self.work.notify_all();
        for thread in std::mem::take(&mut state.threads) {
            // A thread ends by a panic only if a callback does.
            let _ = thread.join();
        }
        state.save();
    }

    /// Runs a function that takes `time`, and that changes the state at its end.
    pub(crate) fn run<T>(
        &self,
        function: &'static str,
        time: impl FnOnce(&SimulatorSettings) -> Duration,
        body: impl FnOnce(&mut LibraryState) -> Result<T, VixError>,
    ) -> Result<T, VixError> {
        let started = Instant::now();
        let pause = self.begin(function, |state, extra| time(&state.settings) + extra.delay)?;
        std::thread::sleep(pause);
        let mut guard = self.lock();
        let state = guard.as_mut().ok_or(FAIL)?;
        let result = body(state);
        state.end(function, result.is_err(), started.elapsed());
        result
    }

    /// Counts a call, and checks what is true of all functions.
    pub(crate) fn begin<T>(
        &self,
        function: &'static str,
        look: impl FnOnce(&mut LibraryState, CallExtra) -> T,
    ) -> Result<T, VixError> {
        let mut guard = self.lock();
        let Some(state) = guard.as_mut() else {
            eprintln!("vddk-simulator: misuse: {function} is called without InitEx");
            return Err(FAIL);
        };
        let number = state.counters.start(function);
        if state.process != std::process::id() {
            state.misuse(&format!("{function} is called after a fork"));
            return Err(FAIL);
        }
        if SERIAL.contains(&function) {
            state.check_thread(function);
            if let Some(other) = state.serial.replace(function) {
                state.misuse(&format!("{function} is called during {other}"));
            }
        }
        match state.effect(function, number) {
            Ok(extra) => Ok(look(state, extra)),
            Err(error) => {
                state.end(function, true, Duration::ZERO);
                Err(error)
            }
        }
    }
}

impl LibraryState {
    fn new(settings: SimulatorSettings) -> LibraryState {
        LibraryState {
            random: settings.seed.max(1),
            settings,
            process: std::process::id(),
            thread: std::thread::current().id(),
            counters: Counters::default(),
            next: 1,
            connections: HashMap::new(),
            handles: HashMap::new(),
            busy: HashMap::new(),
            jobs: BinaryHeap::new(),
            threads: Vec::new(),
            results: HashMap::new(),
            serial: None,
        }
    }

    /// Counts the end of a function.
    pub(crate) fn end(&mut self, function: &'static str, failed: bool, time: Duration) {
        if SERIAL.contains(&function) {
            self.serial = None;
        }
        self.counters.end(function, failed, 0, time);
        self.save();
    }

    /// The effect of the faults for this call.
    fn effect(&self, function: &str, number: u64) -> Result<CallExtra, VixError> {
        let mut extra = CallExtra::default();
        let concerns = |fault: &&CallFault| {
            fault.function == function && (fault.calls.0..=fault.calls.1).contains(&number)
        };
        for fault in self.settings.faults.iter().filter(concerns) {
            match fault.effect {
                CallEffect::Error(error) => return Err(error),
                CallEffect::Crash => std::process::abort(),
                CallEffect::Delay(delay) => extra.delay += delay,
                CallEffect::List(wrong) => extra.wrong = Some(wrong),
            }
        }
        Ok(extra)
    }

    /// Records misuse by the program.
    pub(crate) fn misuse(&mut self, text: &str) {
        eprintln!("vddk-simulator: misuse: {text}");
        self.counters.misuse(text);
        self.save();
        if self.settings.abort {
            std::process::abort();
        }
    }

    fn check_thread(&mut self, function: &str) {
        if self.settings.one_thread && self.thread != std::thread::current().id() {
            self.misuse(&format!("{function} is not called on the thread of InitEx"));
        }
    }

    /// Writes the counters.
    pub(crate) fn save(&mut self) {
        let Some(path) = &self.settings.counters else { return };
        self.counters.unfreed = self.results.len();
        self.counters.open_handles = self.handles.len();
        self.counters.connections = self.connections.len();
        let new = path.with_extension("new");
        let written = std::fs::write(&new, self.counters.json());
        if let Err(error) = written.and_then(|()| std::fs::rename(&new, path)) {
            eprintln!("vddk-simulator: {}: {error}", path.display());
        }
    }

    /// A number below `most`, at random.
    pub(crate) fn random(&mut self, most: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % most.max(1)
    }

    fn number(&mut self) -> usize {
        // Looks like an address, and is none.
        self.next += 1;
        self.next * 16
    }

    /// Keeps memory for the program; returns its address.
    pub(crate) fn give(&mut self, words: Vec<u64>) -> usize {
        let mut words = words.into_boxed_slice();
        // The program uses the address as a pointer.
        let address = words.as_mut_ptr().expose_provenance();
        self.results.insert(address, words);
        address
    }

    /// Frees memory of [`LibraryState::give`].
    pub(crate) fn take_back(&mut self, function: &str, address: usize) {
        if address != 0 && self.results.remove(&address).is_none() {
            self.misuse(&format!("{function} frees what is not a result"));
        }
    }

    /// Checks credentials, and makes a connection.
    pub(crate) fn connect(&mut self, login: &Login) -> Result<usize, VixError> {
        let settings = &self.settings;
        let differs =
            |wanted: &Option<String>, given: &Option<String>| wanted.is_some() && wanted != given;
        if differs(&settings.thumbprint, &login.thumbprint) {
            return Err(THUMBPRINT);
        }
        if differs(&settings.user, &login.user) || differs(&settings.password, &login.password) {
            return Err(PERMISSIONS);
        }
        if let Some(snapshot) = &login.snapshot
            && !settings.snapshots.is_empty()
            && !settings.snapshots.contains(snapshot)
        {
            return Err(NOT_FOUND);
        }
        let number = self.number();
        self.connections.insert(number, HostConnection { read_only: login.read_only });
        Ok(number)
    }

    /// Ends a connection.
    pub(crate) fn disconnect(&mut self, number: usize) -> Result<(), VixError> {
        if self.handles.values().any(|handle| handle.connection == number) {
            self.misuse("Disconnect is called while a disk of the connection is open");
        }
        match self.connections.remove(&number) {
            Some(_) => Ok(()),
            None => Err(self.stale("Disconnect")),
        }
    }

    /// A handle or connection that does not exist.
    fn stale(&mut self, function: &str) -> VixError {
        self.misuse(&format!("{function} is called after a close"));
        INVALID
    }

    /// The file of a disk.
    pub(crate) fn path_of(&self, path: &str) -> PathBuf {
        // As in `[datastore1] machine/disk.vmdk`.
        let name = path.rsplit('/').next().unwrap_or(path);
        match &self.settings.disks {
            Some(folder) => folder.join(name),
            None => path.into(),
        }
    }

    /// Opens a disk.
    pub(crate) fn open(
        &mut self,
        connection: usize,
        path: &str,
        read_only: bool,
    ) -> Result<usize, VixError> {
        let Some(&HostConnection { read_only: all }) = self.connections.get(&connection) else {
            return Err(self.stale("Open"));
        };
        if self.settings.locked.as_deref().is_some_and(|locked| path.ends_with(locked)) {
            return Err(LOCKED);
        }
        let read_only = read_only || all;
        let path = self.path_of(path);
        let disk = SimulatedDisk::open(&path, !read_only).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => NOT_FOUND,
            std::io::ErrorKind::PermissionDenied => NO_ACCESS,
            std::io::ErrorKind::InvalidData => NOT_SUPPORTED,
            _ => FILE_ERROR,
        })?;
        let sectors = disk.sectors().map_err(|_| FILE_ERROR)?;
        let disk = Arc::new(disk);
        let free = Instant::now();
        let unanswered = 0;
        let busy = 0;
        let scanned = false;
        let handle = DiskHandle {
            connection,
            disk,
            path,
            sectors,
            read_only,
            free,
            unanswered,
            busy,
            scanned,
        };
        let number = self.number();
        self.handles.insert(number, handle);
        self.counters.most_handles = self.counters.most_handles.max(self.handles.len());
        Ok(number)
    }

    /// An open handle.
    pub(crate) fn handle(
        &mut self,
        function: &str,
        number: usize,
    ) -> Result<&mut DiskHandle, VixError> {
        if !self.handles.contains_key(&number) {
            return Err(self.stale(function));
        }
        self.handles.get_mut(&number).ok_or(INVALID)
    }
}
