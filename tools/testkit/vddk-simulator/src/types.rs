//! Structures and numbers of the interface, as VMware's documentation describes them.

use std::ffi::{c_char, c_int, c_long, c_void};

/// A result: 0 is success.
pub(crate) type VixError = u64;

pub(crate) const OK: VixError = 0;
pub(crate) const FAIL: VixError = 1;
pub(crate) const OUT_OF_MEMORY: VixError = 2;
pub(crate) const INVALID: VixError = 3;
pub(crate) const NOT_FOUND: VixError = 4;
pub(crate) const NOT_SUPPORTED: VixError = 6;
pub(crate) const FILE_ERROR: VixError = 7;
pub(crate) const READ_ONLY: VixError = 11;
pub(crate) const NO_ACCESS: VixError = 13;
pub(crate) const LOCKED: VixError = 15;
pub(crate) const PERMISSIONS: VixError = 3014;
pub(crate) const THUMBPRINT: VixError = 18002;
/// An asynchronous request was accepted: its callback will be called.
pub(crate) const ASYNC: VixError = 25000;

/// Bytes of a sector.
pub(crate) const SECTOR: u64 = 512;
/// Smallest chunk of a query, in sectors.
pub(crate) const CHUNK_MIN: u64 = 128;
/// Maximum number of chunks of a query.
pub(crate) const CHUNKS_MAX: u64 = 512 * 1024;

/// The disk is opened read-only.
pub(crate) const OPEN_READ_ONLY: u32 = 4;

/// The text of an error of the simulator.
pub(crate) fn text(error: VixError) -> &'static str {
    match error {
        OK => "The operation was successful",
        OUT_OF_MEMORY => "Memory allocation failed. Out of memory",
        INVALID => "One of the parameters was invalid",
        NOT_FOUND => "A file was not found",
        NOT_SUPPORTED => "The operation is not supported",
        FILE_ERROR => "A file access error occurred on the host or guest operating system",
        READ_ONLY => "The file is write-protected",
        NO_ACCESS => "You do not have access rights to this file",
        LOCKED => "The file is already in use",
        PERMISSIONS => "Insufficient permissions in the host operating system",
        14009 => "The server refused connection",
        THUMBPRINT => "The SSL certificate thumbprint does not match",
        18000 => "Cannot connect to host",
        _ => "Unknown error",
    }
}

/// How a connection is made.
#[repr(C)]
pub(crate) struct ConnectParams {
    pub(crate) vmx_spec: *mut c_char,
    pub(crate) server: *mut c_char,
    pub(crate) thumbprint: *mut c_char,
    pub(crate) private: c_long,
    /// 1: user and password; 2: session cookie.
    pub(crate) credential_type: c_int,
    /// User and password, or cookie, user and key.
    pub(crate) credentials: [*mut c_char; 3],
    pub(crate) port: u32,
    pub(crate) nfc_port: u32,
    pub(crate) api_version: *mut c_char,
    pub(crate) reserved: [u8; 8],
    pub(crate) state: *mut c_void,
    pub(crate) spec: [*mut c_char; 3],
    pub(crate) spec_type: c_int,
}

/// How a disk is created.
#[repr(C)]
pub(crate) struct CreateParams {
    pub(crate) disk_type: c_int,
    pub(crate) adapter: c_int,
    pub(crate) hardware: u16,
    pub(crate) capacity: u64,
    pub(crate) logical_sector: u32,
    pub(crate) physical_sector: u32,
}

/// A run of allocated sectors. A list is a count (u32, then 4 bytes of padding) and its blocks.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    /// First sector.
    pub(crate) offset: u64,
    /// Number of sectors.
    pub(crate) length: u64,
}

/// The callback of an asynchronous request.
pub(crate) type Callback = extern "C" fn(*mut c_void, VixError);
/// A log function: a format and a `va_list`.
pub(crate) type LogFunction = extern "C" fn(*const c_char, *mut c_void);
