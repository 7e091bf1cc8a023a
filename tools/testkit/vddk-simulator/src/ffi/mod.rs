//! The exported functions. All pointers of the program are read here.

#![expect(unsafe_code, reason = "C functions with pointers of the program")]

pub(crate) mod lent;

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::time::Duration;

use self::lent::ProgramMemory;
use crate::job::{Transfer, TransferCallback};
use crate::query::Query;
use crate::state::{LibraryState, Login, SIMULATOR};
use crate::types::{
    Callback, ConnectParams, CreateParams, FAIL, FILE_ERROR, INVALID, LogFunction, NOT_FOUND, OK,
    OPEN_READ_ONLY, SECTOR, VixError, text,
};

unsafe extern "C" {
    fn vddk_simulator_log(function: LogFunction, format: *const c_char, ...);
}

/// The text behind a pointer.
///
/// # Safety
/// Null, or a C string.
unsafe fn string(pointer: *const c_char) -> Option<String> {
    // SAFETY: the promise of the caller.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

fn code(result: Result<(), VixError>) -> VixError {
    result.err().unwrap_or(OK)
}

/// Words that hold a C string.
fn words(text: &str) -> Vec<u64> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize((bytes.len() / 8 + 1) * 8, 0);
    bytes
        .chunks(8)
        .map(|word| word.iter().rev().fold(0, |all, b| all << 8 | u64::from(*b)))
        .collect()
}

fn pointer<T>(address: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address)
}

/// # Safety
/// The interface of `VixDiskLib_InitEx`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_InitEx(
    major: u32,
    _minor: u32,
    log: Option<LogFunction>,
    warn: Option<LogFunction>,
    _panic: Option<LogFunction>,
    folder: *const c_char,
    _config: *const c_char,
) -> VixError {
    // SAFETY: the interface of the function.
    let folder = unsafe { string(folder) }.map(PathBuf::from);
    if let Some(log) = log {
        // SAFETY: a format, and arguments that fit it.
        unsafe {
            vddk_simulator_log(log, c"simulator: %s %u\n".as_ptr(), c"version".as_ptr(), major);
        }
    }
    if let Some(warn) = warn {
        // SAFETY: a format without arguments.
        unsafe { vddk_simulator_log(warn, c"simulator: phone home is disabled\n".as_ptr()) };
    }
    code(SIMULATOR.init(folder.as_deref()))
}

/// # Safety
/// The interface of `VixDiskLib_Exit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_Exit() {
    SIMULATOR.exit();
}

/// # Safety
/// The interface of `VixDiskLib_ListTransportModes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_ListTransportModes() -> *const c_char {
    c"file:nbdssl:nbd".as_ptr()
}

/// # Safety
/// The interface of `VixDiskLib_GetErrorText`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_GetErrorText(
    error: VixError,
    _locale: *const c_char,
) -> *mut c_char {
    // Before InitEx nobody could free it.
    let mut guard = SIMULATOR.lock();
    let Some(state) = guard.as_mut() else { return std::ptr::null_mut() };
    pointer(state.give(words(text(error))))
}

/// # Safety
/// The interface of `VixDiskLib_FreeErrorText`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_FreeErrorText(text: *mut c_char) {
    free("FreeErrorText", text.cast());
}

fn free(function: &'static str, pointer: *mut c_void) {
    if let Some(state) = SIMULATOR.lock().as_mut() {
        state.take_back(function, pointer.addr());
    }
}

/// # Safety
/// The interface of `VixDiskLib_AllocateConnectParams`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_AllocateConnectParams() -> *mut ConnectParams {
    let mut guard = SIMULATOR.lock();
    let Some(state) = guard.as_mut() else { return std::ptr::null_mut() };
    pointer(state.give(vec![0; size_of::<ConnectParams>().div_ceil(8)]))
}

/// # Safety
/// The interface of `VixDiskLib_FreeConnectParams`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_FreeConnectParams(params: *mut ConnectParams) {
    free("FreeConnectParams", params.cast());
}

/// # Safety
/// The interface of `VixDiskLib_ConnectEx`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_ConnectEx(
    params: *const ConnectParams,
    read_only: c_char,
    snapshot: *const c_char,
    _transports: *const c_char,
    connection: *mut *mut c_void,
) -> VixError {
    if params.is_null() || connection.is_null() {
        return INVALID;
    }
    // SAFETY: the interface of the function: a structure with C strings or null pointers.
    let login = unsafe {
        let params = &*params;
        Login {
            server: string(params.server),
            user: string(params.credentials[0]).filter(|_| params.credential_type == 1),
            password: string(params.credentials[1]).filter(|_| params.credential_type == 1),
            thumbprint: string(params.thumbprint),
            snapshot: string(snapshot),
            read_only: read_only != 0,
        }
    };
    let result = SIMULATOR.run(
        "ConnectEx",
        |settings| settings.connect,
        |state| {
            // A local connection has no credentials.
            let login = if login.server.is_some() {
                login
            } else {
                Login { read_only: login.read_only, ..Login::default() }
            };
            state.connect(&login)
        },
    );
    match result {
        Ok(number) => {
            // SAFETY: not null, and the program's.
            unsafe { *connection = std::ptr::without_provenance_mut(number) };
            OK
        }
        Err(error) => error,
    }
}

/// # Safety
/// The interface of `VixDiskLib_Disconnect`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_Disconnect(connection: *mut c_void) -> VixError {
    let number = connection.addr();
    code(SIMULATOR.run("Disconnect", |_| Duration::ZERO, |state| state.disconnect(number)))
}

/// # Safety
/// The interface of `VixDiskLib_Open`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_Open(
    connection: *mut c_void,
    path: *const c_char,
    flags: u32,
    handle: *mut *mut c_void,
) -> VixError {
    // SAFETY: the interface of the function.
    let Some(path) = (unsafe { string(path) }) else { return INVALID };
    let number = connection.addr();
    let read_only = flags & OPEN_READ_ONLY != 0;
    let open = |state: &mut LibraryState| state.open(number, &path, read_only);
    match SIMULATOR.run("Open", |settings| settings.open, open) {
        Ok(number) if !handle.is_null() => {
            // SAFETY: not null, and the program's.
            unsafe { *handle = std::ptr::without_provenance_mut(number) };
            OK
        }
        Ok(_) => INVALID,
        Err(error) => error,
    }
}

/// # Safety
/// The interface of `VixDiskLib_Close`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_Close(handle: *mut c_void) -> VixError {
    let closed = SIMULATOR.close(handle.addr());
    let ended = SIMULATOR.run("Close", |settings| settings.close, |_| closed);
    code(ended)
}

/// # Safety
/// The interface of `VixDiskLib_GetTransportMode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_GetTransportMode(_handle: *mut c_void) -> *const c_char {
    c"nbdssl".as_ptr()
}

/// # Safety
/// The interface of `VixDiskLib_GetInfo`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_GetInfo(
    handle: *mut c_void,
    info: *mut *mut c_void,
) -> VixError {
    if info.is_null() {
        return INVALID;
    }
    let result = SIMULATOR.run(
        "GetInfo",
        |_| Duration::ZERO,
        |state| {
            let sectors = state.handle("GetInfo", handle.addr())?.sectors;
            // Two geometries, then capacity, adapter and links, two texts, and sector sizes.
            let mut words =
                vec![1 | 255 << 32, 63 | 1 << 32, 255 | 63 << 32, sectors, 3 | 1 << 32, 0, 0];
            if state.settings.version >= 7 {
                words.push(512 | 4096 << 32);
            }
            Ok(state.give(words))
        },
    );
    match result {
        Ok(address) => {
            // SAFETY: not null, and the program's.
            unsafe { *info = pointer(address) };
            OK
        }
        Err(error) => error,
    }
}

/// # Safety
/// The interface of `VixDiskLib_FreeInfo`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_FreeInfo(info: *mut c_void) {
    free("FreeInfo", info);
}

/// # Safety
/// As [`ProgramMemory::new`].
unsafe fn transfer(
    function: &'static str,
    handle: *mut c_void,
    sector: u64,
    count: u64,
    pointer: *mut u8,
) -> Option<Transfer> {
    let len = count.checked_mul(SECTOR).and_then(|len| usize::try_from(len).ok())?;
    // SAFETY: the promise of the caller.
    let memory = unsafe { ProgramMemory::new(pointer, len) }?;
    let write = function.starts_with("Write");
    Some(Transfer { function, handle: handle.addr(), write, sector, count, memory })
}

/// # Safety
/// The interface of `VixDiskLib_Read`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_Read(
    handle: *mut c_void,
    sector: u64,
    count: u64,
    memory: *mut u8,
) -> VixError {
    // SAFETY: the interface of the function.
    let transfer = unsafe { transfer("Read", handle, sector, count, memory) };
    transfer.map_or(INVALID, |transfer| SIMULATOR.now(transfer))
}

/// # Safety
/// The interface of `VixDiskLib_Write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_Write(
    handle: *mut c_void,
    sector: u64,
    count: u64,
    memory: *const u8,
) -> VixError {
    // SAFETY: the interface of the function; a write only reads the memory.
    let transfer = unsafe { transfer("Write", handle, sector, count, memory.cast_mut()) };
    transfer.map_or(INVALID, |transfer| SIMULATOR.now(transfer))
}

/// # Safety
/// The interface of `VixDiskLib_ReadAsync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_ReadAsync(
    handle: *mut c_void,
    sector: u64,
    count: u64,
    memory: *mut u8,
    callback: Option<Callback>,
    data: *mut c_void,
) -> VixError {
    // SAFETY: the interface of the function.
    let transfer = unsafe { transfer("ReadAsync", handle, sector, count, memory) };
    let (Some(transfer), Some(callback)) = (transfer, callback) else { return INVALID };
    SIMULATOR.start(transfer, TransferCallback { callback, data: data.addr() })
}

/// # Safety
/// The interface of `VixDiskLib_WriteAsync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_WriteAsync(
    handle: *mut c_void,
    sector: u64,
    count: u64,
    memory: *const u8,
    callback: Option<Callback>,
    data: *mut c_void,
) -> VixError {
    // SAFETY: the interface of the function; a write only reads the memory.
    let transfer = unsafe { transfer("WriteAsync", handle, sector, count, memory.cast_mut()) };
    let (Some(transfer), Some(callback)) = (transfer, callback) else { return INVALID };
    SIMULATOR.start(transfer, TransferCallback { callback, data: data.addr() })
}

/// # Safety
/// The interface of `VixDiskLib_Wait`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_Wait(handle: *mut c_void) -> VixError {
    let waited = SIMULATOR.wait("Wait", handle.addr());
    code(SIMULATOR.run("Wait", |_| Duration::ZERO, |_| waited))
}

/// # Safety
/// The interface of `VixDiskLib_Flush`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_Flush(handle: *mut c_void) -> VixError {
    code(SIMULATOR.run(
        "Flush",
        |_| Duration::ZERO,
        |state| {
            let open = state.handle("Flush", handle.addr())?;
            if open.unanswered > 0 {
                state.misuse("Flush is called while requests are in flight, without Wait");
                return Ok(());
            }
            open.disk.flush().map_err(|_| FILE_ERROR)
        },
    ))
}

/// # Safety
/// The interface of `VixDiskLib_Create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_Create(
    _connection: *mut c_void,
    path: *const c_char,
    params: *const CreateParams,
    _progress: *mut c_void,
    _data: *mut c_void,
) -> VixError {
    // SAFETY: the interface of the function.
    let (path, capacity) = match (unsafe { string(path) }, params.is_null()) {
        // SAFETY: as above, and not null.
        (Some(path), false) => (path, unsafe { (*params).capacity }),
        _ => return INVALID,
    };
    code(SIMULATOR.run(
        "Create",
        |settings| settings.open,
        |state| {
            let path = state.path_of(&path);
            let len = capacity.checked_mul(SECTOR).ok_or(INVALID)?;
            let made = std::fs::File::create_new(path).and_then(|file| file.set_len(len));
            made.map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => NOT_FOUND,
                _ => FILE_ERROR,
            })
        },
    ))
}

/// # Safety
/// The interface of `VixDiskLib_QueryAllocatedBlocks`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_QueryAllocatedBlocks(
    handle: *mut c_void,
    start: u64,
    count: u64,
    chunk: u64,
    list: *mut *mut c_void,
) -> VixError {
    if list.is_null() {
        return FAIL;
    }
    match SIMULATOR.query(handle.addr(), Query { start, count, chunk }) {
        Ok(address) => {
            // SAFETY: not null, and the program's.
            unsafe { *list = pointer(address) };
            OK
        }
        Err(error) => error,
    }
}

/// # Safety
/// The interface of `VixDiskLib_FreeBlockList`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn VixDiskLib_FreeBlockList(list: *mut c_void) -> VixError {
    free("FreeBlockList", list);
    OK
}

/// The structure of a list begins with a count of 32 bits, and padding.
const _: () = assert!(cfg!(target_endian = "little"), "lists are made of words");

/// Makes sure that a C string in words ends with a zero byte.
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_become_c_strings() {
        for sample in ["", "1234567", "12345678", "The operation was successful"] {
            let words = words(sample);
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let found = CStr::from_bytes_until_nul(&bytes).unwrap();
            assert_eq!(found, std::ffi::CString::new(sample).unwrap().as_c_str());
        }
    }
}
