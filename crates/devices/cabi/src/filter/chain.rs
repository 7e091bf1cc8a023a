//! The backends of a chain, from the plugin to the outermost filter: loading, configuration, start
//! and end.

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use blockhaul_block::{Error, Kind, Result};

use super::abi::{self, Backends, Filter, Release};
use crate::about::PluginDescription;
use crate::api::text;
use crate::context::{self, said};
use crate::load::{self, SharedObject};

/// A chain; the plugin is the first backend, the outermost filter the last.
pub(crate) struct FilterChain {
    pub(super) plugin: crate::abi::PluginTable,
    pub(super) backends: Vec<ChainBackend>,
    /// The strictest thread model of all.
    model: AtomicI32,
}

// SAFETY: the raw pointers are strings of shared objects that stay loaded, and functions, which are
// called according to the chain's thread model.
unsafe impl Send for FilterChain {}
// SAFETY: as above.
unsafe impl Sync for FilterChain {}

/// A plugin or filter in a chain. Filters identify it by its address.
pub struct ChainBackend {
    pub(super) index: usize,
    pub(super) name: CString,
    path: PathBuf,
    /// None: the plugin.
    pub(super) filter: Option<Filter>,
    /// The release that the filter is of.
    pub(super) release: Release,
}

/// The process's chain.
static CHAIN: OnceLock<FilterChain> = OnceLock::new();

/// Loads filters (outermost first) over a plugin, and stores them as the process's chain. `loaded`
/// is called with each and its name.
pub(crate) fn set_up(
    plugin: crate::abi::PluginTable,
    name: &str,
    path: &Path,
    filters: &[String],
    loaded: &mut dyn FnMut(&SharedObject, &str),
) -> Result<&'static FilterChain> {
    let c_name = CString::new(name).map_err(|_| wrong(name, "its name holds a zero byte"))?;
    let path = path.to_path_buf();
    let plugin_backend =
        ChainBackend { index: 0, name: c_name, path, filter: None, release: Release::New };
    let mut backends = vec![plugin_backend];
    for filter in filters.iter().rev() {
        let (backend, library) = open(filter)?;
        loaded(&library, &backend.name());
        library.keep();
        let index = backends.len();
        backends.push(ChainBackend { index, ..backend });
    }
    let chain = FilterChain { plugin, backends, model: AtomicI32::new(0) };
    CHAIN.set(chain).map_err(|_| {
        let text = "a process hosts one chain of filters: serve the other one by a process of its own, \
                    [ blockhaul serve … ]";
        Error::new(Kind::Usage, text)
    })?;
    let chain = CHAIN.get().expect("set just above");
    for backend in &chain.backends {
        let load = match &backend.filter {
            Some(filter) => filter.load,
            None => chain.plugin.load,
        };
        if let Some(load) = load {
            // SAFETY: the first callback of the plugin or filter.
            unsafe { load() };
        }
    }
    Ok(chain)
}

fn wrong(name: &str, why: &str) -> Error {
    Error::new(Kind::Usage, format!("filter {name}: {why}"))
}

/// The file of a filter, by name or path.
pub(crate) fn find(name: &str) -> Result<PathBuf> {
    let path = if name.contains(['/', '.']) {
        PathBuf::from(name)
    } else {
        load::filter_folder().join(format!("nbdkit-{name}-filter.so"))
    };
    if !name.contains(['/', '.']) && !load::is_name(name) {
        let why = format!("{name:?} is not the name of a filter; a path must contain a / or a .");
        return Err(Error::new(Kind::Usage, why));
    }
    if !path.exists() {
        let text = format!(
            "cannot open filter \"{}\": there is no such file; it may be in a package called \
             nbdkit-filter-{name}, see nbdkit(1); for blockhaul's own layers see `blockhaul help layers`",
            path.display()
        );
        return Err(Error::new(Kind::NotFound, text).complete());
    }
    Ok(path)
}

/// Finds and loads a filter by name or path.
fn open(name: &str) -> Result<(ChainBackend, SharedObject)> {
    let path = find(name)?;
    let library = SharedObject::open_at(&path)?;
    let init = library.symbol(c"filter_init");
    if init.is_null() {
        return Err(wrong(name, "not a filter: it has no filter_init"));
    }
    // SAFETY: the symbol of this name is such a function (nbdkit's interface).
    let init: extern "C" fn() -> *const Filter = unsafe { std::mem::transmute(init) };
    let described = init();
    if described.is_null() {
        return Err(wrong(name, "it refuses to be used: its filter_init answers NULL"));
    }
    // SAFETY: not null; every release's struct begins with these two, which identify its layout.
    let (api, version) =
        unsafe { ((*described).api_version, text((*described).version).unwrap_or_default()) };
    let release = Release::of(&version).filter(|_| api == abi::API_VERSION);
    let Some(release) = release else {
        let why = format!(
            "it is of nbdkit {version} (interface {api}); filters are hosted of nbdkit {} only, interface {}",
            abi::RELEASES,
            abi::API_VERSION
        );
        return Err(wrong(name, &why).with_remedy(format!(
            "use a layer of blockhaul (`blockhaul help layers`), or install nbdkit's filters of {}",
            abi::RELEASES
        )));
    };
    // SAFETY: not null, and of the release with this layout.
    let filter = unsafe { described.read() };
    if filter.name.is_null() {
        return Err(wrong(name, "it has no name"));
    }
    // SAFETY: not null: a C string, the filter's description.
    let c_name = unsafe { CStr::from_ptr(filter.name) }.to_owned();
    Ok((ChainBackend { index: 0, name: c_name, path, filter: Some(filter), release }, library))
}

/// Loads a filter for its description.
///
/// # Errors
/// There is no such filter, or it cannot be hosted.
pub fn about(name: &str) -> Result<PluginDescription> {
    let (backend, library) = open(name)?;
    library.keep();
    let filter = backend.filter.expect("a filter was opened");
    let owned = |pointer| {
        // SAFETY: null or a C string: the filter's description, which stays loaded.
        unsafe { text(pointer) }.map(std::borrow::Cow::into_owned)
    };
    Ok(PluginDescription {
        what: "filter",
        path: backend.path,
        name: owned(filter.name).unwrap_or_default(),
        longname: owned(filter.longname),
        version: owned(filter.version),
        description: owned(filter.description),
        config_help: owned(filter.config_help),
    })
}

/// Whether nbdkit's filter of this name is installed, and is of a release that can be hosted. Loads
/// it, and it stays loaded.
pub fn hosts(name: &str) -> bool {
    find(name).and_then(|_| open(name)).map(|(_, library)| library.keep()).is_ok()
}

/// The chain; it exists whenever a backend does.
pub(super) fn chain() -> &'static FilterChain {
    CHAIN.get().expect("the chain was set up before anything of it is called")
}

impl FilterChain {
    pub(super) fn top(&self) -> &'static ChainBackend {
        chain().backends.last().expect("the plugin is always there")
    }

    /// Unloads everything; no function of the chain is called afterwards.
    pub(super) fn unload(&self) {
        for backend in &self.backends {
            let unload = match &backend.filter {
                Some(filter) => filter.unload,
                None => self.plugin.unload,
            };
            if let Some(unload) = unload {
                // SAFETY: the last callback of the plugin or filter.
                unsafe { unload() };
            }
        }
    }

    /// The strictest of all models.
    pub(super) fn thread_model(&self) -> c_int {
        let mut model = self.plugin.thread_model;
        if let Some(callback) = self.plugin.thread_model_now {
            // SAFETY: a callback without arguments, on the thread of the chain's life.
            model = model.min(unsafe { callback() });
        }
        for backend in &self.backends {
            if let Some(filter) = backend.filter.filter(|_| model != -1) {
                // SAFETY: the release was found when it was loaded; the thread as above.
                model = unsafe { filter.stricter_model(backend.release, model) };
            }
        }
        if model == -1 {
            return -1;
        }
        self.model.store(model, Ordering::Relaxed);
        model
    }

    /// From the plugin outwards.
    pub(super) fn get_ready(&self) -> c_int {
        let model = self.model.load(Ordering::Relaxed);
        for backend in &self.backends {
            // SAFETY: callbacks of the chain's life, on its thread.
            let result = unsafe {
                match &backend.filter {
                    Some(filter) => filter.get_ready.map_or(0, |get_ready| get_ready(model)),
                    None => self.plugin.get_ready.map_or(0, |get_ready| get_ready()),
                }
            };
            if result == -1 {
                return -1;
            }
        }
        0
    }

    /// From the plugin outwards.
    pub(super) fn after_fork(&self) -> c_int {
        for backend in &self.backends {
            // SAFETY: as in `get_ready`; the backend below a filter stays in the chain for ever.
            let result = unsafe {
                match &backend.filter {
                    Some(filter) => filter.after_fork.map_or(0, |call| call(backend.next())),
                    None => self.plugin.after_fork.map_or(0, |after_fork| after_fork()),
                }
            };
            if result == -1 {
                return -1;
            }
        }
        0
    }

    /// From the outside inwards.
    pub(super) fn cleanup(&self) {
        for backend in self.backends.iter().rev() {
            // SAFETY: as in `after_fork`.
            unsafe {
                match &backend.filter {
                    Some(filter) => {
                        if let Some(cleanup) = filter.cleanup {
                            cleanup(backend.next());
                        }
                    }
                    None => {
                        if let Some(cleanup) = self.plugin.cleanup {
                            cleanup();
                        }
                    }
                }
            }
        }
    }

    /// The filters' additions to `--dump-plugin`, printed to standard output.
    pub(super) fn dump(&self) {
        for backend in &self.backends {
            let dump = match &backend.filter {
                None => self.plugin.dump_plugin,
                Some(filter) => {
                    let path = backend.path.canonicalize().unwrap_or(backend.path.clone());
                    let name = backend.name();
                    // Through C's buffer, which the callbacks also use.
                    let text = format!("{name}_path={}\n{name}_name={name}\n", path.display());
                    crate::api::print(&text);
                    filter.dump_plugin
                }
            };
            if let Some(dump) = dump {
                // SAFETY: a callback without arguments, on the thread of the chain's life.
                unsafe { dump() };
            }
        }
    }
}

impl ChainBackend {
    /// The backend below; null below the plugin.
    pub(super) fn next(&self) -> Backends {
        match self.index.checked_sub(1) {
            Some(index) => chain().backends[index].address(),
            None => ptr::null(),
        }
    }

    /// The release of the filter above it, which calls it.
    pub(super) fn caller(&self) -> Release {
        chain().backends.get(self.index + 1).map_or(Release::New, |above| above.release)
    }

    /// The address by which filters identify it.
    pub(super) fn address(&self) -> Backends {
        ptr::from_ref(self).cast()
    }

    pub(super) fn name(&self) -> std::borrow::Cow<'_, str> {
        self.name.to_string_lossy()
    }
}

/// A backend that was passed to a filter.
///
/// # Safety
/// `backend` was passed to a filter.
pub(super) unsafe fn known(backend: Backends) -> &'static ChainBackend {
    // SAFETY: backends stay where they are for ever.
    unsafe { &*backend.cast() }
}

/// Calls the plugin at the end of the chain, and returns the error number of a failure. The caller
/// reports the plugin's errors.
pub(super) fn call_plugin<R>(
    context: &std::sync::Arc<context::CallContext>,
    name: &'static CStr,
    call: impl FnOnce() -> R,
    failed: impl FnOnce(&R) -> bool,
) -> (R, c_int) {
    let (result, left) = context::call(context, name, call);
    if !left.text.is_empty() {
        said(&left.text);
    }
    if !failed(&result) {
        return (result, 0);
    }
    let preserved = chain().plugin.errno_is_preserved != 0;
    let number = match (left.error, left.errno) {
        (0, errno) if preserved && errno != 0 => errno,
        (0, _) => libc::EIO,
        (error, _) => error,
    };
    (result, number)
}

/// The handle of filters that need none.
pub(super) fn no_handle() -> *mut c_void {
    static NOTHING: u8 = 0;
    (&raw const NOTHING).cast_mut().cast()
}
