//! The functions of libvixDiskLib, loaded at run time.
//!
//! Numbers and structures are those of VMware's documentation. A [`RawHandle`] and a
//! [`RawConnection`] are tokens that only the library dereferences.

#![expect(unsafe_code, reason = "functions of a C library, and memory that is lent to it")]

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use blockhaul_foreign::{RequestTable, RequestTables};
use blockhaul_io::{Buf, Data};

use crate::statistics::{Function, Statistics};

/// Bytes of a sector, in which the library counts.
pub(crate) const SECTOR: u64 = 512;

/// A result of the library: 0 is success.
pub(crate) type ResultCode = u64;

/// The request was accepted, and is completed by its callback.
const ASYNC: ResultCode = 25000;
/// Out of memory.
pub(crate) const OUT_OF_MEMORY: ResultCode = 2;
/// A parameter, or a result, is invalid.
const INVALID: ResultCode = 3;
/// A file, a snapshot or a machine does not exist.
pub(crate) const NOT_FOUND: ResultCode = 4;
/// The function is not supported for this disk.
pub(crate) const NOT_SUPPORTED: ResultCode = 6;

/// The version of the interface that is asked for: 6.5, which all later ones have.
const INTERFACE: (u32, u32) = (6, 5);
/// The versions of the library, the newest first.
const VERSIONS: [u32; 4] = [9, 8, 7, 6];
/// Blocks in a list: the most for chunks of 64 KiB in the longest range of a query.
const BLOCKS_MAX: u32 = 512 * 1024;
/// Bytes of memory for connection parameters if the library does not provide it: more than any
/// version needs.
const PARAMS_ROOM: usize = 1024;

type Log = extern "C" fn(*const c_char, *mut c_void);
type Callback = extern "C" fn(*mut c_void, ResultCode);

/// Connection parameters.
#[repr(C)]
struct ConnectParams {
    vmx_spec: *const c_char,
    server: *const c_char,
    thumbprint: *const c_char,
    private: c_long,
    credential_type: c_int,
    credentials: [*const c_char; 3],
    port: u32,
    nfc_port: u32,
    api_version: *const c_char,
    reserved: [u8; 8],
    state: *mut c_void,
    spec: [*const c_char; 3],
    spec_type: c_int,
}

/// Facts of a disk. The last two fields exist since version 7.
#[repr(C)]
struct RawDiskInfo {
    bios: [u32; 3],
    physical: [u32; 3],
    capacity: u64,
    adapter: c_int,
    links: c_int,
    parent: *const c_char,
    uuid: *const c_char,
    logical_sector: u32,
    physical_sector: u32,
}

#[repr(C)]
struct CreateParams {
    disk_type: c_int,
    adapter: c_int,
    hardware: u16,
    capacity: u64,
    logical_sector: u32,
    physical_sector: u32,
}

/// A list of allocated blocks: a count, and as many blocks.
#[repr(C)]
struct BlockList {
    count: u32,
    blocks: [AllocatedBlock; 0],
}

/// A run of allocated sectors.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocatedBlock {
    /// First sector.
    pub(crate) offset: u64,
    /// Number of sectors.
    pub(crate) length: u64,
}

/// Declares the functions as one structure of pointers, and loads them by name.
macro_rules! functions {
    ($($name:ident: $symbol:literal $kind:ty;)*) => {
        #[derive(Clone, Copy)]
        struct Functions { $($name: $kind),* }

        impl Functions {
            /// # Safety
            /// The symbols of the library have the types of VMware's documentation.
            unsafe fn load(handle: *mut c_void) -> Result<Functions, &'static str> {
                Ok(Functions {
                    // SAFETY: an open library, and the promise of the caller.
                    $($name: unsafe { <$kind as Symbol>::load(handle, $symbol) }
                        .ok_or($symbol)?),*
                })
            }
        }
    };
}

/// A function pointer that is loaded by name; an `Option` may be absent.
trait Symbol: Sized {
    /// # Safety
    /// `handle` is an open library, and its symbol has this type.
    unsafe fn load(handle: *mut c_void, name: &str) -> Option<Self>;
}

/// The address of `VixDiskLib_` and `name`.
fn address(handle: *mut c_void, name: &str) -> *mut c_void {
    let name = CString::new(format!("VixDiskLib_{name}")).unwrap_or_default();
    // SAFETY: an open library and a C string.
    unsafe { libc::dlsym(handle, name.as_ptr()) }
}

/// Both kinds of function pointers.
macro_rules! symbol {
    ($kind:ty) => {
        impl Symbol for $kind {
            unsafe fn load(handle: *mut c_void, name: &str) -> Option<Self> {
                let found = address(handle, name);
                // SAFETY: not null, and of this type by the promise of the caller.
                (!found.is_null()).then(|| unsafe { std::mem::transmute(found) })
            }
        }

        impl Symbol for Option<$kind> {
            unsafe fn load(handle: *mut c_void, name: &str) -> Option<Self> {
                // SAFETY: the promise of the caller.
                Some(unsafe { <$kind>::load(handle, name) })
            }
        }
    };
}

type InitEx = unsafe extern "C" fn(
    u32,
    u32,
    Option<Log>,
    Option<Log>,
    Option<Log>,
    *const c_char,
    *const c_char,
) -> ResultCode;
type Exit = unsafe extern "C" fn();
type GetErrorText = unsafe extern "C" fn(ResultCode, *const c_char) -> *mut c_char;
type FreeText = unsafe extern "C" fn(*mut c_char);
type AllocateParams = unsafe extern "C" fn() -> *mut ConnectParams;
type FreeParams = unsafe extern "C" fn(*mut ConnectParams);
type ConnectEx = unsafe extern "C" fn(
    *const ConnectParams,
    c_char,
    *const c_char,
    *const c_char,
    *mut *mut c_void,
) -> ResultCode;
type OfToken = unsafe extern "C" fn(*mut c_void) -> ResultCode;
type Open = unsafe extern "C" fn(*mut c_void, *const c_char, u32, *mut *mut c_void) -> ResultCode;
type TextOfToken = unsafe extern "C" fn(*mut c_void) -> *const c_char;
type GetInfo = unsafe extern "C" fn(*mut c_void, *mut *mut RawDiskInfo) -> ResultCode;
type FreeInfo = unsafe extern "C" fn(*mut RawDiskInfo);
type Transfer =
    unsafe extern "C" fn(*mut c_void, u64, u64, *mut u8, Callback, *mut c_void) -> ResultCode;
type Query = unsafe extern "C" fn(*mut c_void, u64, u64, u64, *mut *mut BlockList) -> ResultCode;
type FreeList = unsafe extern "C" fn(*mut BlockList) -> ResultCode;
type Create = unsafe extern "C" fn(
    *mut c_void,
    *const c_char,
    *const CreateParams,
    *mut c_void,
    *mut c_void,
) -> ResultCode;

symbol!(InitEx);
symbol!(Exit);
symbol!(GetErrorText);
symbol!(FreeText);
symbol!(AllocateParams);
symbol!(FreeParams);
symbol!(ConnectEx);
symbol!(OfToken);
symbol!(Open);
symbol!(TextOfToken);
symbol!(GetInfo);
symbol!(FreeInfo);
symbol!(Transfer);
symbol!(Query);
symbol!(FreeList);
symbol!(Create);

functions! {
    init: "InitEx" InitEx;
    exit: "Exit" Exit;
    error_text: "GetErrorText" GetErrorText;
    free_text: "FreeErrorText" FreeText;
    allocate_params: "AllocateConnectParams" Option<AllocateParams>;
    free_params: "FreeConnectParams" FreeParams;
    connect: "ConnectEx" ConnectEx;
    disconnect: "Disconnect" OfToken;
    open: "Open" Open;
    close: "Close" OfToken;
    transport: "GetTransportMode" TextOfToken;
    info: "GetInfo" GetInfo;
    free_info: "FreeInfo" FreeInfo;
    read: "ReadAsync" Transfer;
    write: "WriteAsync" Transfer;
    wait: "Wait" OfToken;
    flush: "Flush" OfToken;
    create: "Create" Create;
    query: "QueryAllocatedBlocks" Option<Query>;
    free_list: "FreeBlockList" Option<FreeList>;
}

/// A connection of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawConnection(usize);

/// An open disk of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawHandle(usize);

/// Where to connect, and as whom. All absent for local disks.
#[derive(Debug, Default)]
pub(crate) struct DiskLogin<'text> {
    pub(crate) machine: Option<&'text CStr>,
    pub(crate) server: Option<&'text CStr>,
    pub(crate) thumbprint: Option<&'text CStr>,
    pub(crate) user: Option<&'text CStr>,
    pub(crate) password: Option<&'text CStr>,
    /// A session of the server, instead of a password.
    pub(crate) cookie: Option<&'text CStr>,
    pub(crate) port: u32,
    pub(crate) nfc_port: u32,
    pub(crate) snapshot: Option<&'text CStr>,
    pub(crate) transports: Option<&'text CStr>,
    pub(crate) read_only: bool,
}

/// How a disk is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewDisk {
    pub(crate) disk_type: c_int,
    pub(crate) adapter: c_int,
    pub(crate) hardware: u16,
    pub(crate) sectors: u64,
}

/// Size and sector sizes of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DiskInfo {
    pub(crate) sectors: u64,
    /// Bytes; 0 if the library does not know.
    pub(crate) logical_sector: u32,
    pub(crate) physical_sector: u32,
}

/// Memory of a transfer.
pub(crate) enum TransferMemory {
    /// Is filled by a read.
    Read(Buf),
    /// Is written.
    Write(Data),
}

/// Called once with the memory and the result, on any thread; must not block.
pub(crate) type TransferDone = Box<dyn FnOnce(TransferMemory, Result<(), ResultCode>) + Send>;

/// A transfer that the library carries out.
struct PendingTransfer {
    memory: TransferMemory,
    done: TransferDone,
}

/// All transfers of this process, by the number that is the callback's data.
static LENT: LazyLock<Arc<RequestTable<PendingTransfer, ()>>> = LazyLock::new(|| {
    static TABLES: RequestTables<PendingTransfer, ()> = RequestTables::new();
    TABLES.open(())
});

/// Completes a transfer, on a thread of the library.
extern "C" fn answer(data: *mut c_void, code: ResultCode) {
    let Some(PendingTransfer { memory, done }) = LENT.take(data.addr() as u64) else {
        log::warn!("vddk: the library answered a request twice");
        return;
    };
    done(memory, if code == 0 { Ok(()) } else { Err(code) });
}

/// Longest message of the library that is logged, in bytes.
const MESSAGE_MAX: usize = 1024;

/// Formats a message of the library.
fn message(format: *const c_char, arguments: *mut c_void) -> String {
    unsafe extern "C" {
        // A `va_list` is a pointer as an argument, on all architectures of Linux that Rust knows.
        fn vsnprintf(
            text: *mut c_char,
            size: usize,
            format: *const c_char,
            list: *mut c_void,
        ) -> c_int;
    }
    let mut text = vec![0_u8; MESSAGE_MAX];
    if format.is_null() {
        return String::new();
    }
    // SAFETY: room for the size that is passed, and a format with its arguments from the library.
    unsafe { vsnprintf(text.as_mut_ptr().cast(), text.len(), format, arguments) };
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    text.to_string_lossy().trim_end().to_string()
}

extern "C" fn log_debug(format: *const c_char, arguments: *mut c_void) {
    if log::log_enabled!(log::Level::Debug) {
        log::debug!("vddk: {}", message(format, arguments));
    }
}

extern "C" fn log_warning(format: *const c_char, arguments: *mut c_void) {
    // The library warns of much that is normal.
    log::info!("vddk: {}", message(format, arguments));
}

extern "C" fn log_error(format: *const c_char, arguments: *mut c_void) {
    log::error!("vddk: {}", message(format, arguments));
}

/// The loaded library. It is never unloaded: its threads may run until the process ends.
pub(crate) struct VixLibrary {
    functions: Functions,
    /// The version in the name of the file.
    pub(crate) version: u32,
    pub(crate) path: PathBuf,
    pub(crate) statistics: Statistics,
}

/// Finds the library in a folder.
pub(crate) fn find(folder: &Path) -> Result<(PathBuf, u32), String> {
    let folders = [folder.join("lib64"), folder.to_path_buf()];
    for folder in &folders {
        for version in VERSIONS {
            let path = folder.join(format!("libvixDiskLib.so.{version}"));
            if path.exists() {
                return Ok((path, version));
            }
        }
    }
    for folder in &folders {
        if let Some(other) = other_version(folder) {
            return Err(format!("{}: versions 6.5 to 9 are supported", other.display()));
        }
    }
    Err(format!(
        "no libvixDiskLib.so.9, .8, .7 or .6 in {} or {}: unpack VMware's VDDK, and name its directory with \
         libdir=",
        folders[0].display(),
        folders[1].display()
    ))
}

/// A library of another version.
fn other_version(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let named = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libvixDiskLib.so."))
    };
    paths.find(named)
}

fn text_of(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: not null, and a C string of the loader or the library, copied at once.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

fn or_null(text: Option<&CStr>) -> *const c_char {
    text.map_or(std::ptr::null(), CStr::as_ptr)
}

fn token(number: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(number)
}

fn checked(code: ResultCode) -> Result<(), ResultCode> {
    if code == 0 { Ok(()) } else { Err(code) }
}

impl VixLibrary {
    /// Loads the library of a folder, without starting it.
    pub(crate) fn load(folder: &Path) -> Result<VixLibrary, String> {
        let (path, version) = find(folder)?;
        let shown = path.display();
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| format!("{shown}: the path holds a zero byte"))?;
        // SAFETY: a C string. Loading runs the library's initialisers: the user who names a library
        // trusts it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: returns null or a C string that is valid until the next call.
            let why = text_of(unsafe { libc::dlerror() });
            return Err(format!(
                "cannot load {shown}: {why}; with isolate=off, LD_LIBRARY_PATH must name the folder of the \
                 library's own libraries"
            ));
        }
        // SAFETY: a library of this name has the interface of VMware's documentation.
        let functions = unsafe { Functions::load(handle) }
            .map_err(|name| format!("{shown}: it has no function VixDiskLib_{name}"))?;
        Ok(VixLibrary { functions, version, path, statistics: Statistics::new(version) })
    }

    /// Whether it can report allocated blocks.
    pub(crate) fn has_query(&self) -> bool {
        self.functions.query.is_some() && self.functions.free_list.is_some()
    }

    /// Starts the library.
    pub(crate) fn init(&self, folder: &CStr, config: Option<&CStr>) -> Result<(), ResultCode> {
        let (major, minor) = INTERFACE;
        let folder = folder.as_ptr();
        let config = or_null(config);
        // SAFETY: functions of the types that the library expects, and C strings.
        self.statistics.of(Function::Init, || unsafe {
            checked((self.functions.init)(
                major,
                minor,
                Some(log_debug),
                Some(log_warning),
                Some(log_error),
                folder,
                config,
            ))
        })
    }

    /// Ends the library. Nothing of it may be open.
    pub(crate) fn exit(&self) {
        // SAFETY: no arguments.
        unsafe { (self.functions.exit)() };
    }

    /// The library's text for an error.
    pub(crate) fn text(&self, code: ResultCode) -> String {
        // SAFETY: returns null or a C string, which is freed by the function for that.
        unsafe {
            let pointer = (self.functions.error_text)(code, std::ptr::null());
            let text = text_of(pointer);
            if !pointer.is_null() {
                (self.functions.free_text)(pointer);
            }
            text
        }
    }

    /// Connects to a server, or prepares for local disks.
    pub(crate) fn connect(&self, login: &DiskLogin<'_>) -> Result<RawConnection, ResultCode> {
        let mut room = vec![0_u64; PARAMS_ROOM / 8];
        // SAFETY: no arguments.
        let allocated = self.functions.allocate_params.map(|allocate| unsafe { allocate() });
        let params = match allocated {
            Some(params) if !params.is_null() => params,
            _ => room.as_mut_ptr().cast::<ConnectParams>(),
        };
        // SAFETY: the library's own structure, or zeroed memory that is large enough for it.
        unsafe { fill(&mut *params, login) };
        let mut connection = std::ptr::null_mut();
        let result = self.statistics.of(Function::Connect, || {
            // SAFETY: a filled structure whose texts live until the call returns.
            checked(unsafe {
                (self.functions.connect)(
                    params,
                    c_char::from(login.read_only),
                    or_null(login.snapshot),
                    or_null(login.transports),
                    &raw mut connection,
                )
            })
        });
        if let Some(allocated) = allocated.filter(|params| !params.is_null()) {
            // SAFETY: allocated by the library above. The texts are not the library's.
            unsafe {
                forget(&mut *allocated);
                (self.functions.free_params)(allocated);
            }
        }
        result.map(|()| RawConnection(connection.expose_provenance()))
    }

    /// Ends a connection.
    pub(crate) fn disconnect(&self, connection: RawConnection) -> Result<(), ResultCode> {
        self.statistics.of(Function::Disconnect, || {
            // SAFETY: a connection that is used for the last time.
            checked(unsafe { (self.functions.disconnect)(token(connection.0)) })
        })
    }

    /// Creates a local disk.
    pub(crate) fn create(
        &self,
        connection: RawConnection,
        path: &CStr,
        disk: NewDisk,
    ) -> Result<(), ResultCode> {
        let params = CreateParams {
            disk_type: disk.disk_type,
            adapter: disk.adapter,
            hardware: disk.hardware,
            capacity: disk.sectors,
            logical_sector: 0,
            physical_sector: 0,
        };
        let null = std::ptr::null_mut();
        self.statistics.of(Function::Create, || {
            // SAFETY: a connection, a C string and a filled structure; no progress function.
            checked(unsafe {
                let params = &raw const params;
                (self.functions.create)(token(connection.0), path.as_ptr(), params, null, null)
            })
        })
    }

    /// Opens a disk.
    pub(crate) fn open(
        &self,
        connection: RawConnection,
        path: &CStr,
        flags: u32,
    ) -> Result<RawHandle, ResultCode> {
        let mut handle = std::ptr::null_mut();
        self.statistics.of(Function::Open, || {
            // SAFETY: an open connection and a C string.
            checked(unsafe {
                let handle = &raw mut handle;
                (self.functions.open)(token(connection.0), path.as_ptr(), flags, handle)
            })
        })?;
        Ok(RawHandle(handle.expose_provenance()))
    }

    /// Closes a disk. No transfer of it may be under way.
    pub(crate) fn close(&self, handle: RawHandle) -> Result<(), ResultCode> {
        self.statistics.of(Function::Close, || {
            // SAFETY: a handle that is used for the last time.
            checked(unsafe { (self.functions.close)(token(handle.0)) })
        })
    }

    /// How the library reaches the disk: `nbdssl`, `hotadd`, `file` and others.
    pub(crate) fn transport(&self, handle: RawHandle) -> String {
        // SAFETY: an open handle; returns null or a text of the library.
        text_of(unsafe { (self.functions.transport)(token(handle.0)) })
    }

    /// The size of a disk.
    pub(crate) fn info(&self, handle: RawHandle) -> Result<DiskInfo, ResultCode> {
        let mut info: *mut RawDiskInfo = std::ptr::null_mut();
        self.statistics.of(Function::GetInfo, || {
            // SAFETY: an open handle.
            checked(unsafe { (self.functions.info)(token(handle.0), &raw mut info) })
        })?;
        if info.is_null() {
            return Err(1);
        }
        // SAFETY: not null, and filled by the library. Versions before 7 have no sector sizes: only
        // the fields that exist are read.
        unsafe {
            let sectors = (&raw const (*info).capacity).read();
            let sizes = self.version >= 7;
            let field = |field: *const u32| if sizes { field.read() } else { 0 };
            let logical_sector = field(&raw const (*info).logical_sector);
            let physical_sector = field(&raw const (*info).physical_sector);
            (self.functions.free_info)(info);
            Ok(DiskInfo { sectors, logical_sector, physical_sector })
        }
    }

    /// Starts a transfer of whole sectors from `sector` on; `done` is called when it has ended, or
    /// could not be started.
    pub(crate) fn transfer(
        &self,
        handle: RawHandle,
        sector: u64,
        memory: TransferMemory,
        done: TransferDone,
    ) {
        let mut memory = memory;
        // The memory does not move with its owner.
        let (pointer, len, function, call) = match &mut memory {
            TransferMemory::Read(buf) => {
                (buf.as_mut_ptr(), buf.len(), Function::Read, self.functions.read)
            }
            TransferMemory::Write(data) => {
                let bytes = data.bytes();
                let pointer = bytes.as_ptr().cast_mut();
                (pointer, bytes.len(), Function::Write, self.functions.write)
            }
        };
        let count = len as u64 / SECTOR;
        self.statistics.bytes(function, len as u64);
        let number = LENT.enter(PendingTransfer { memory, done });
        let data = std::ptr::without_provenance_mut(number as usize);
        // SAFETY: an open handle; the memory stays in the table until the answer, and has whole
        // sectors.
        let code = self.statistics.of(function, || unsafe {
            call(token(handle.0), sector, count, pointer, answer, data)
        });
        if code == ASYNC {
            return;
        }
        // It was refused, or is complete already.
        if let Some(PendingTransfer { memory, done }) = LENT.take(number) {
            done(memory, checked(code));
        }
    }

    /// Waits for all transfers of a handle.
    pub(crate) fn wait(&self, handle: RawHandle) -> Result<(), ResultCode> {
        self.statistics.of(Function::Wait, || {
            // SAFETY: an open handle.
            checked(unsafe { (self.functions.wait)(token(handle.0)) })
        })
    }

    /// Makes completed writes durable.
    pub(crate) fn flush(&self, handle: RawHandle) -> Result<(), ResultCode> {
        self.statistics.of(Function::Flush, || {
            // SAFETY: an open handle.
            checked(unsafe { (self.functions.flush)(token(handle.0)) })
        })
    }

    /// The allocated blocks of a range, in sectors; the range has whole chunks of `chunk` sectors.
    pub(crate) fn query(
        &self,
        handle: RawHandle,
        start: u64,
        count: u64,
        chunk: u64,
    ) -> Result<Vec<AllocatedBlock>, ResultCode> {
        let (Some(query), Some(free)) = (self.functions.query, self.functions.free_list) else {
            return Err(NOT_SUPPORTED);
        };
        let mut list: *mut BlockList = std::ptr::null_mut();
        self.statistics.of(Function::Query, || {
            // SAFETY: an open handle.
            checked(unsafe { query(token(handle.0), start, count, chunk, &raw mut list) })
        })?;
        if list.is_null() {
            return Err(1);
        }
        // SAFETY: not null: a count and as many blocks. A count that no valid list has is not
        // believed.
        unsafe {
            let known = (&raw const (*list).count).read();
            let first = (&raw const (*list).blocks).cast::<AllocatedBlock>();
            let blocks = if known <= BLOCKS_MAX {
                Ok(std::slice::from_raw_parts(first, known as usize).to_vec())
            } else {
                Err(INVALID)
            };
            free(list);
            blocks
        }
    }
}

/// Fills connection parameters.
fn fill(params: &mut ConnectParams, login: &DiskLogin<'_>) {
    params.vmx_spec = or_null(login.machine);
    params.server = or_null(login.server);
    params.thumbprint = or_null(login.thumbprint);
    if login.server.is_some() {
        match login.cookie {
            None => {
                params.credential_type = 1;
                params.credentials[0] = or_null(login.user);
                params.credentials[1] = or_null(login.password);
            }
            Some(cookie) => {
                params.credential_type = 2;
                params.credentials =
                    [cookie.as_ptr(), or_null(login.user), or_null(login.password)];
            }
        }
    }
    params.port = login.port;
    params.nfc_port = login.nfc_port;
    params.spec_type = 0;
}

/// Removes our texts from parameters that the library frees.
fn forget(params: &mut ConnectParams) {
    params.vmx_spec = std::ptr::null();
    params.server = std::ptr::null();
    params.thumbprint = std::ptr::null();
    params.credentials = [std::ptr::null(); 3];
}
