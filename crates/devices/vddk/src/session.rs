//! The library while it is in use: one thread of the process opens and closes everything, as the
//! library demands, and disks of one machine share a connection.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::BlockingPool;

use crate::library::{
    DiskInfo, NOT_FOUND, NOT_SUPPORTED, OUT_OF_MEMORY, RawConnection, RawHandle, ResultCode,
    VixLibrary,
};
use crate::options::{READ_ONLY, ServerAccess, VddkOptions};
use crate::statistics;

/// How long the last user of the library waits for it to close everything.
const END: Duration = Duration::from_secs(10);
/// Pause before the library is started again, while it ends.
const PAUSE: Duration = Duration::from_millis(2);
/// The thread of a library; the threads of handles have names that begin with this.
const THREAD: &str = "vddk";

/// The libraries of this process, by folder. They stay: their threads do, too.
static HOMES: LazyLock<Mutex<HashMap<PathBuf, Arc<LibraryFolder>>>> = LazyLock::new(Mutex::default);

/// A folder with a library.
struct LibraryFolder {
    /// The one thread.
    thread: BlockingPool,
    /// The loaded library.
    library: Mutex<Option<Arc<VixLibrary>>>,
    session: Mutex<Weak<LibrarySession>>,
    /// The library is started: set and cleared on the thread.
    started: AtomicBool,
}

/// The started library. Ends when the last one is dropped.
pub(crate) struct LibrarySession {
    home: Arc<LibraryFolder>,
    pub(crate) library: Arc<VixLibrary>,
    connections: Mutex<HashMap<(ServerAccess, bool), Weak<LibraryConnection>>>,
}

/// A connection. Ends when the last one is dropped.
pub(crate) struct LibraryConnection {
    session: Arc<LibrarySession>,
    raw: RawConnection,
}

/// An open disk. It is closed when this is dropped.
pub(crate) struct OpenDisk {
    connection: Arc<LibraryConnection>,
    pub(crate) raw: RawHandle,
    pub(crate) info: DiskInfo,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What failed, in which function, and the library's reason.
pub(crate) fn failed(library: &VixLibrary, doing: &str, function: &str, code: ResultCode) -> Error {
    let kind = match code {
        OUT_OF_MEMORY => Kind::NoMemory,
        NOT_FOUND => Kind::NotFound,
        NOT_SUPPORTED => Kind::Unsupported,
        8 => Kind::NoSpace,
        11 | 13 | 3014 => Kind::Refused,
        _ => Kind::Io,
    };
    let text = library.text(code);
    let text = if text.is_empty() { "no text" } else { text.as_str() };
    Error::new(kind, format!("{doing}: VixDiskLib_{function}: {text} (error {code})"))
}

impl LibraryFolder {
    fn of(folder: &Path) -> Arc<LibraryFolder> {
        let mut homes = lock(&HOMES);
        let new = || {
            let library = Mutex::default();
            let session = Mutex::default();
            let thread = BlockingPool::single(THREAD);
            let started = AtomicBool::new(false);
            Arc::new(LibraryFolder { thread, library, session, started })
        };
        homes.entry(folder.to_path_buf()).or_insert_with(new).clone()
    }

    /// Runs `job` on the thread.
    async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let (completer, ticket) = blockhaul_io::ticket();
        self.thread.run(move || completer.complete(job()));
        ticket.await.map_err(|lost| Error::new(Kind::Io, "vddk: the thread is lost").because(lost))
    }

    /// The session, started if there is none. On the thread. `None`: the last session is ending, and
    /// its jobs are about to be queued.
    fn session(
        self: &Arc<LibraryFolder>,
        folder: &Path,
        config: Option<&CStr>,
    ) -> Result<Option<Arc<LibrarySession>>> {
        if let Some(session) = lock(&self.session).upgrade() {
            return Ok(Some(session));
        }
        if self.started.load(Ordering::Acquire) {
            return Ok(None);
        }
        let mut loaded = lock(&self.library);
        let library = match &*loaded {
            Some(library) => library.clone(),
            None => {
                let library = VixLibrary::load(folder);
                let library =
                    library.map_err(|why| Error::new(Kind::Usage, format!("vddk: {why}")))?;
                loaded.insert(Arc::new(library)).clone()
            }
        };
        drop(loaded);
        let folder = CString::new(folder.as_os_str().as_bytes()).unwrap_or_default();
        library.init(&folder, config).map_err(|code| {
            // Before it has started, the library has no text.
            let text = format!(
                "vddk: cannot start {}: VixDiskLib_InitEx failed (error {code})",
                library.path.display()
            );
            Error::new(Kind::Io, text)
        })?;
        self.started.store(true, Ordering::Release);
        log::debug!("vddk: {} is started", library.path.display());
        let connections = Mutex::default();
        let session = Arc::new(LibrarySession { home: self.clone(), library, connections });
        *lock(&self.session) = Arc::downgrade(&session);
        Ok(Some(session))
    }
}

impl LibrarySession {
    /// Starts the library of these options, or returns the one that is in use.
    ///
    /// # Errors
    /// If it cannot be loaded or started.
    pub(crate) async fn start(options: &VddkOptions) -> Result<Arc<LibrarySession>> {
        let home = LibraryFolder::of(&options.folder);
        loop {
            let inner = home.clone();
            let folder = options.folder.clone();
            let config = options.config.clone();
            match home.run(move || inner.session(&folder, config.as_deref())).await?? {
                Some(session) => return Ok(session),
                None => blockhaul_io::sleep(PAUSE).await,
            }
        }
    }

    /// Opens a disk.
    ///
    /// # Errors
    /// If the library refuses to connect, or to open the disk.
    pub(crate) async fn open(
        self: &Arc<LibrarySession>,
        options: &Arc<VddkOptions>,
        write: bool,
    ) -> Result<OpenDisk> {
        let session = self.clone();
        let options = options.clone();
        self.home.run(move || session.open_here(&options, write)).await?
    }

    /// Runs `job` on the thread that opens and closes, without waiting for it.
    pub(crate) fn open_then(
        self: &Arc<LibrarySession>,
        job: impl FnOnce(&Arc<LibrarySession>) + Send + 'static,
    ) {
        let session = self.clone();
        self.home.thread.run(move || job(&session));
    }

    /// Opens a disk; on that thread.
    ///
    /// # Errors
    /// As [`LibrarySession::open`].
    pub(crate) fn open_here(
        self: &Arc<LibrarySession>,
        options: &VddkOptions,
        write: bool,
    ) -> Result<OpenDisk> {
        let key = (options.access.clone(), !write);
        let shared = lock(&self.connections).get(&key).and_then(Weak::upgrade);
        if let Some(connection) = shared {
            match connection.open(options, write) {
                Ok(disk) => return Ok(disk),
                // The connection may be what is broken.
                Err(error) => log::debug!("{error}; connecting again"),
            }
        }
        let connection = Arc::new(self.connect(options, !write)?);
        let mut connections = lock(&self.connections);
        connections.retain(|_, connection| connection.strong_count() > 0);
        connections.insert(key, Arc::downgrade(&connection));
        drop(connections);
        connection.open(options, write)
    }

    fn connect(
        self: &Arc<LibrarySession>,
        options: &VddkOptions,
        read_only: bool,
    ) -> Result<LibraryConnection> {
        let login = options.access.login(read_only);
        let raw = self.library.connect(&login).map_err(|code| {
            let doing = format!("cannot connect to {}", options.access.place());
            failed(&self.library, &doing, "ConnectEx", code)
        })?;
        Ok(LibraryConnection { session: self.clone(), raw })
    }
}

impl LibraryConnection {
    fn open(self: &Arc<LibraryConnection>, options: &VddkOptions, write: bool) -> Result<OpenDisk> {
        let library = &self.session.library;
        if let Some(new) = options.create.filter(|_| write) {
            match library.create(self.raw, &options.c_file, new) {
                Ok(()) => {}
                // It was created for an earlier handle.
                Err(_) if Path::new(&options.file).exists() => {}
                Err(code) => return Err(failed(library, "cannot create the disk", "Create", code)),
            }
        }
        let flags = options.flags | if write { 0 } else { READ_ONLY };
        let raw = library
            .open(self.raw, &options.c_file, flags)
            .map_err(|code| failed(library, "cannot open the disk", "Open", code))?;
        match library.info(raw) {
            Ok(info) => {
                let transport = library.transport(raw);
                log::debug!("vddk:{}: open; transport {transport}", options.file);
                Ok(OpenDisk { connection: self.clone(), raw, info })
            }
            Err(code) => {
                // The first error is reported.
                let _ = library.close(raw);
                Err(failed(library, "cannot read the size of the disk", "GetInfo", code))
            }
        }
    }
}

impl OpenDisk {
    pub(crate) fn library(&self) -> &Arc<VixLibrary> {
        &self.connection.session.library
    }
}

impl Drop for OpenDisk {
    fn drop(&mut self) {
        let library = self.library().clone();
        let raw = self.raw;
        self.connection.session.home.thread.run(move || {
            if let Err(code) = library.close(raw) {
                log::warn!("vddk: cannot close a disk: {} (error {code})", library.text(code));
            }
        });
    }
}

impl Drop for LibraryConnection {
    fn drop(&mut self) {
        let library = self.session.library.clone();
        let raw = self.raw;
        self.session.home.thread.run(move || {
            if let Err(code) = library.disconnect(raw) {
                log::warn!("vddk: cannot disconnect: {} (error {code})", library.text(code));
            }
        });
    }
}

impl Drop for LibrarySession {
    /// Waits until everything is closed: the process may end afterwards.
    fn drop(&mut self) {
        let library = self.library.clone();
        let home = self.home.clone();
        let (sender, receiver) = mpsc::channel::<()>();
        self.home.thread.run(move || {
            library.exit();
            home.started.store(false, Ordering::Release);
            log::debug!("vddk: calls: {}", statistics::state(&library.statistics.report()));
            drop(sender);
        });
        // Threads of the library, which have no name here, and those that call it must go on.
        let ours = std::thread::current().name().is_some_and(|name| !name.starts_with(THREAD));
        if ours {
            // Ends when the job has dropped its side.
            let _ = receiver.recv_timeout(END);
        }
    }
}
