//! The layout of `struct blockhaul_plugin` (include/blockhaul-plugin.h).

use std::ffi::{c_int, c_void};

use crate::abi::{self, RawHandle};

/// `BLOCKHAUL_PLUGIN_MAGIC`: "BHPLUGIN".
const MAGIC: u64 = 0x4248_504c_5547_494e;
/// `BLOCKHAUL_PLUGIN_VERSION`.
const VERSION: u32 = 1;

/// `conn` and `reqid` of the interface.
pub(crate) type ConnectionToken = *mut c_void;
type Transfer<P> =
    unsafe extern "C-unwind" fn(ConnectionToken, u64, bool, RawHandle, P, u32, u64) -> c_int;

/// The description of an asynchronous plugin.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AsyncPlugin {
    magic: u64,
    size: u32,
    version: u32,
    pub(crate) plugin: *const abi::PluginTable,
    pub(crate) pread: Option<Transfer<*mut c_void>>,
    pub(crate) pwrite: Option<Transfer<*const c_void>>,
    pub(crate) flush: Option<unsafe extern "C-unwind" fn(ConnectionToken, u64, RawHandle) -> c_int>,
    pub(crate) trim: Option<
        unsafe extern "C-unwind" fn(ConnectionToken, u64, bool, RawHandle, u32, u64) -> c_int,
    >,
    pub(crate) zero: Option<
        unsafe extern "C-unwind" fn(ConnectionToken, u64, bool, RawHandle, u32, u64, u32) -> c_int,
    >,
    pub(crate) extents: Option<
        unsafe extern "C-unwind" fn(
            ConnectionToken,
            u64,
            RawHandle,
            u32,
            u64,
            u32,
            *mut c_void,
        ) -> c_int,
    >,
    pub(crate) cache:
        Option<unsafe extern "C-unwind" fn(ConnectionToken, u64, RawHandle, u32, u64) -> c_int>,
    pub(crate) cancel: Option<unsafe extern "C-unwind" fn(ConnectionToken, RawHandle)>,
    /// Maximum bytes of requests lent to the plugin at a time; 0: the host's default.
    pub(crate) max_bytes: u64,
    /// The plugin's own copy of this; not part of the layout.
    source: *const c_void,
}

/// The layout's size: all but `source`.
const SIZE: usize = std::mem::offset_of!(AsyncPlugin, source);

const _: () = assert!(SIZE == 96);

impl AsyncPlugin {
    /// The current limit in bytes: the plugin's parameters may have changed it.
    pub(crate) fn max_bytes_now(&self) -> u64 {
        let at = std::mem::offset_of!(AsyncPlugin, max_bytes);
        // SAFETY: begins with magic and size, as when it was read.
        let size = unsafe { self.source.cast::<u32>().add(2).read_unaligned() } as usize;
        if size < at + size_of::<u64>() {
            return 0;
        }
        // SAFETY: within the size that the plugin declares; valid as long as the plugin is loaded.
        unsafe { self.source.byte_add(at).cast::<u64>().read_unaligned() }
    }

    /// Names of the plugin's callbacks.
    pub(crate) fn callbacks(&self) -> Vec<&'static str> {
        let all = [
            ("pread", self.pread.is_some()),
            ("pwrite", self.pwrite.is_some()),
            ("flush", self.flush.is_some()),
            ("trim", self.trim.is_some()),
            ("zero", self.zero.is_some()),
            ("extents", self.extents.is_some()),
            ("cache", self.cache.is_some()),
            ("cancel", self.cancel.is_some()),
        ];
        all.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect()
    }
}

/// Copies a description.
///
/// # Safety
/// `pointer` is null, or points to a `struct blockhaul_plugin` of any version.
pub(crate) unsafe fn read(pointer: *const c_void) -> Result<AsyncPlugin, String> {
    if pointer.is_null() {
        return Err("it refuses to be used: blockhaul_plugin_init answers NULL".into());
    }
    // SAFETY: every version begins with magic and size.
    let (magic, size) = unsafe {
        (pointer.cast::<u64>().read_unaligned(), pointer.cast::<u32>().add(2).read_unaligned())
    };
    if magic != MAGIC {
        return Err("what blockhaul_plugin_init answers is no struct blockhaul_plugin".into());
    }
    // Magic, size, version and the ordinary plugin are in all versions.
    if size < 24 {
        return Err(format!("its struct blockhaul_plugin of {size} bytes is too short"));
    }
    let len = SIZE.min(size as usize);
    let mut plugin = std::mem::MaybeUninit::<AsyncPlugin>::zeroed();
    // SAFETY: the plugin declares `size` bytes, of which at most our struct's size is copied.
    unsafe {
        std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), plugin.as_mut_ptr().cast(), len);
    }
    // SAFETY: numbers, pointers and nullable function pointers, zero beyond the end of an older
    // header.
    let mut plugin = unsafe { plugin.assume_init() };
    plugin.source = pointer;
    if plugin.version == 0 || plugin.version > VERSION {
        return Err(format!(
            "it is written for version {} of blockhaul-plugin.h; this program knows {VERSION}",
            plugin.version
        ));
    }
    Ok(plugin)
}
