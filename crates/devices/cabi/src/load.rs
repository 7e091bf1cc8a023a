//! Finds a plugin's shared object, and reads the plugin's description from it.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use blockhaul_block::{Error, Kind, Result, ThreadModel};

use crate::abi;
use crate::async_abi::{self, AsyncPlugin};
use crate::hint;

/// Plugin directories of Linux distributions, searched after those of [`PATH_VARIABLE`].
const FOLDERS: &[&str] = &[
    concat!("/usr/lib/", env!("CABI_TRIPLET"), "/nbdkit/plugins"),
    "/usr/lib64/nbdkit/plugins",
    "/usr/lib/nbdkit/plugins",
    "/usr/local/lib64/nbdkit/plugins",
    "/usr/local/lib/nbdkit/plugins",
];
/// Further plugin directories, separated by colons.
pub const PATH_VARIABLE: &str = "BLOCKHAUL_PLUGIN_PATH";
/// Maximum depth of scripts that name each other as interpreter.
const SCRIPTS_MAX: usize = 4;
/// Maximum length of a script's first line.
const SHEBANG_MAX: usize = 4096;

/// The path of a plugin, and the script that is its first parameter.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PluginPath {
    pub(crate) path: PathBuf,
    /// The script that names the plugin as its interpreter.
    pub(crate) script: Option<PathBuf>,
}

/// Finds a plugin by path, or by its short name in the plugin directories. A script whose
/// interpreter is nbdkit with a plugin stands for that plugin.
pub(crate) fn find(name: &str) -> Result<PluginPath> {
    let mut name = name.to_string();
    let mut script = None;
    for _ in 0..SCRIPTS_MAX {
        let path = locate(&name)?;
        match interpreter(&path)? {
            None => return Ok(PluginPath { path, script }),
            Some(plugin) => {
                script.get_or_insert(path);
                name = plugin;
            }
        }
    }
    Err(Error::new(Kind::Usage, format!("plugin {name}: scripts name scripts as interpreters")))
}

/// The first existing plugin directory, else the first to be searched.
pub fn plugin_folder() -> PathBuf {
    let folders = folders();
    let found = folders.iter().find(|folder| folder.is_dir()).or(folders.first());
    found.cloned().unwrap_or_default()
}

/// The directory of nbdkit's filters next to that.
pub fn filter_folder() -> PathBuf {
    plugin_folder().with_file_name("filters")
}

fn folders() -> Vec<PathBuf> {
    let variable = std::env::var_os(PATH_VARIABLE).unwrap_or_default();
    std::env::split_paths(&variable)
        .filter(|folder| !folder.as_os_str().is_empty())
        .chain(FOLDERS.iter().map(PathBuf::from))
        .collect()
}

fn locate(name: &str) -> Result<PathBuf> {
    if name.is_empty() {
        return Err(Error::new(
            Kind::Usage,
            "no plugin is named: write nbdkit:NAME or nbdkit:PATH",
        ));
    }
    if name.contains('/') {
        // dlopen searches for names without a slash; the typed path has one.
        return Ok(PathBuf::from(name));
    }
    if name.contains('.') {
        return Ok(Path::new(".").join(name));
    }
    if !is_name(name) {
        let text = format!("{name:?} is not the name of a plugin; a path must contain a / or a .");
        return Err(Error::new(Kind::Usage, text));
    }
    let folders = folders();
    for folder in &folders {
        for file in [format!("nbdkit-{name}-plugin.so"), format!("nbdkit-{name}-plugin")] {
            let path = folder.join(file);
            if path.exists() {
                return Ok(path);
            }
        }
    }
    let package = hint::package(name);
    let there: Vec<_> = folders.iter().filter(|folder| folder.is_dir()).collect();
    let text = match (there.first(), package) {
        (Some(folder), Some(package)) => format!(
            "there is no plugin {name}: no nbdkit-{name}-plugin.so in {}; install Debian's package {package}",
            folder.display()
        ),
        (Some(folder), None) => format!(
            "there is no plugin {name}: no nbdkit-{name}-plugin.so in {}; it may be in a package \
             called nbdkit-plugin-{name}; or give its path; see nbdkit(1)",
            folder.display()
        ),
        (None, _) => format!(
            "there is no plugin {name}: no directory of nbdkit's plugins exists; install {}, give a path, or \
             set {PATH_VARIABLE} to a directory",
            package
                .map_or("nbdkit's plugins".into(), |package| format!("Debian's package {package}"))
        ),
    };
    Err(Error::new(Kind::NotFound, text).complete())
}

/// Whether this is a valid name of a plugin or filter.
pub(crate) fn is_name(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
}

/// The plugin that a script names: `#!/usr/sbin/nbdkit python`. `None`: not a script.
fn interpreter(path: &Path) -> Result<Option<String>> {
    use std::io::{BufRead as _, Read as _};
    let cannot = |error| Error::system(format!("cannot read plugin {}", path.display()), error);
    let file = std::fs::File::open(path).map_err(cannot)?;
    let mut line = Vec::new();
    let mut reader = std::io::BufReader::new(file.take(SHEBANG_MAX as u64));
    reader.read_until(b'\n', &mut line).map_err(cannot)?;
    let Some(line) = line.strip_prefix(b"#!") else { return Ok(None) };
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_whitespace().skip_while(|word| word.ends_with("/env"));
    let ours = words
        .next()
        .is_some_and(|program| Path::new(program).file_name().is_some_and(|name| name == "nbdkit"));
    match words.next() {
        Some(plugin) if ours => Ok(Some(plugin.to_string())),
        _ => {
            let text = format!(
                "plugin {}: a script whose interpreter is not nbdkit with a plugin",
                path.display()
            );
            Err(Error::new(Kind::Usage, text))
        }
    }
}

/// A loaded shared object. Not closed on drop: see [`SharedObject::close`].
pub(crate) struct SharedObject {
    handle: *mut c_void,
    identity: (u64, u64),
}

// SAFETY: the loader's functions may be called on any thread; the handle is a token for them.
unsafe impl Send for SharedObject {}
// SAFETY: as above; the handle is used only by those functions.
unsafe impl Sync for SharedObject {}

/// Loaded shared objects, by device and inode: a second plugin from the same object would share its
/// variables.
static LOADED: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

/// The description in a shared object.
pub(crate) struct ObjectDescription {
    pub(crate) library: SharedObject,
    pub(crate) plugin: abi::PluginTable,
    pub(crate) asynchronous: Option<AsyncPlugin>,
}

/// Loads a plugin, and copies and checks its description.
pub(crate) fn load(path: &Path) -> Result<ObjectDescription> {
    use std::os::unix::fs::MetadataExt as _;
    let shown = path.display();
    let data = std::fs::metadata(path)
        .map_err(|error| Error::system(format!("cannot load plugin {shown}"), error))?;
    let identity = (data.dev(), data.ino());
    {
        let mut loaded = LOADED.lock().expect("no panic under this lock");
        if loaded.contains(&identity) {
            let text = format!(
                "plugin {shown} was loaded before, and a process can load a plugin only once: use serve \
                 --isolate, or another process for one of them ([ blockhaul serve nbdkit:… ])"
            );
            return Err(Error::new(Kind::Usage, text));
        }
        loaded.push(identity);
    }
    let forget = |error| {
        LOADED.lock().expect("no panic under this lock").retain(|other| *other != identity);
        error
    };
    let library = open(path, identity).map_err(forget)?;
    match describe(&library, &shown.to_string()) {
        Ok((plugin, asynchronous)) => Ok(ObjectDescription { library, plugin, asynchronous }),
        Err(error) => {
            library.close();
            Err(error)
        }
    }
}

fn open(path: &Path, identity: (u64, u64)) -> Result<SharedObject> {
    let text = format!("plugin {}: the path holds a zero byte", path.display());
    let c_path =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| Error::new(Kind::Usage, text))?;
    // SAFETY: a C string. Loading runs the object's initialisers: the user who names a plugin
    // trusts it. Global: interpreters' own modules look for the interpreter's symbols.
    let handle = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        let text = format!("cannot load plugin {}: {}", path.display(), loader_error());
        let error = Error::new(Kind::Usage, text);
        let extension = path.extension().and_then(std::ffi::OsStr::to_str);
        return Err(match extension.filter(|extension| ["py", "sh"].contains(extension)) {
            Some("py") => error.with_remedy("a script in Python is python:FILE"),
            Some(_) => error.with_remedy("a script is sh:FILE"),
            None => error,
        });
    }
    Ok(SharedObject { handle, identity })
}

fn loader_error() -> String {
    // SAFETY: returns null or a C string that is valid until the next call on this thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader reported no reason".into();
    }
    // SAFETY: not null, and copied at once.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl SharedObject {
    /// Loads a shared object that is not a plugin and is never closed.
    pub(crate) fn open_at(path: &Path) -> Result<SharedObject> {
        open(path, (0, 0))
    }

    pub(crate) fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: an open handle and a C string.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }

    /// The function that returns the description of the plugin or filter: an address in the object
    /// itself.
    pub(crate) fn symbol_of_init(&self) -> Option<*const c_void> {
        let names = [c"plugin_init", c"blockhaul_plugin_init", c"filter_init"];
        let mut symbols = names.into_iter().map(|name| self.symbol(name).cast_const());
        symbols.find(|symbol| !symbol.is_null())
    }

    /// Keeps the object loaded until the process ends. Its variables keep their values, so it
    /// cannot be loaded a second time.
    pub(crate) fn keep(self) {}

    /// Unloads the object. None of its code may run or be called afterwards.
    pub(crate) fn close(self) {
        // SAFETY: an open handle, used for the last time.
        unsafe { libc::dlclose(self.handle) };
        let mut loaded = LOADED.lock().expect("no panic under this lock");
        loaded.retain(|other| *other != self.identity);
    }
}

fn describe(
    library: &SharedObject,
    shown: &str,
) -> Result<(abi::PluginTable, Option<AsyncPlugin>)> {
    let wrong = |why: String| Error::new(Kind::Usage, format!("plugin {shown}: {why}"));
    let asynchronous = library.symbol(c"blockhaul_plugin_init");
    let (pointer, asynchronous) = if asynchronous.is_null() {
        let init = library.symbol(c"plugin_init");
        if init.is_null() {
            return Err(wrong(
                "not a plugin: it has neither plugin_init nor \
                              blockhaul_plugin_init"
                    .into(),
            ));
        }
        // SAFETY: the symbol of this name is such a function (nbdkit's interface).
        let init: extern "C" fn() -> *const abi::PluginTable = unsafe { std::mem::transmute(init) };
        (init(), None)
    } else {
        // SAFETY: the symbol of this name is such a function (blockhaul-plugin.h).
        let init: extern "C" fn() -> *const c_void = unsafe { std::mem::transmute(asynchronous) };
        // SAFETY: it returns a description of that header, or null.
        let described = unsafe { async_abi::read(init()) }.map_err(wrong)?;
        (described.plugin, Some(described))
    };
    if pointer.is_null() {
        return Err(wrong("it refuses to be used: its init answers NULL".into()));
    }
    // SAFETY: not null; every version of the struct begins with its size and version.
    let size = unsafe { pointer.cast::<u64>().read_unaligned() };
    if !(abi::OLDEST_SIZE..=1 << 16).contains(&size) {
        return Err(wrong(format!("its description of {size} bytes has an unknown version")));
    }
    let len = size_of::<abi::PluginTable>().min(usize::try_from(size).unwrap_or(usize::MAX));
    let mut plugin = std::mem::MaybeUninit::<abi::PluginTable>::zeroed();
    // SAFETY: the plugin declares `size` bytes, of which at most our struct's size is copied.
    unsafe {
        std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), plugin.as_mut_ptr().cast(), len);
    }
    // SAFETY: numbers, pointers and nullable function pointers: any bytes are valid, and missing
    // fields of an older plugin are zero.
    let plugin = unsafe { plugin.assume_init() };
    check(&plugin, asynchronous.as_ref()).map_err(wrong)?;
    Ok((plugin, asynchronous))
}

fn check(plugin: &abi::PluginTable, asynchronous: Option<&AsyncPlugin>) -> Result<(), String> {
    let version: c_int = plugin.api_version;
    if !(0..=abi::API_VERSION).contains(&version) {
        return Err(format!(
            "it is written for version {version} of nbdkit's interface; known are 0 \
                            to {}",
            abi::API_VERSION
        ));
    }
    // SAFETY: null or a C string: the plugin's description.
    let name = unsafe { crate::api::text(plugin.name) }.unwrap_or_default();
    let letters = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if name.is_empty() || name.starts_with('-') || !letters {
        return Err(format!("{name:?} is not a valid name of a plugin"));
    }
    let reads = match version {
        2 => plugin.pread.is_some(),
        _ => plugin.pread_v1.is_some(),
    } || asynchronous.is_some_and(|plugin| plugin.pread.is_some());
    for (there, callback) in
        [(plugin.open.is_some(), "open"), (plugin.get_size.is_some(), "get_size"), (reads, "pread")]
    {
        if !there {
            return Err(format!("it has no {callback} callback"));
        }
    }
    match ThreadModel::from_number(plugin.thread_model) {
        Some(_) => Ok(()),
        None => Err(format!("it asks for thread model {}, which is unknown", plugin.thread_model)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn scripts_stand_for_the_plugin_they_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("so"), b"\x7fELF").unwrap();
        for (line, wanted) in [
            ("#!/usr/sbin/nbdkit python\nx", Some("python")),
            ("#!/usr/bin/env nbdkit sh -v\n", Some("sh")),
        ] {
            std::fs::write(path("script"), line).unwrap();
            assert_eq!(interpreter(&path("script")).unwrap().as_deref(), wanted, "{line}");
        }
        assert_eq!(interpreter(&path("so")).unwrap(), None);
        for line in ["#!/bin/sh\n", "#!nbdkit\n", "#!\n"] {
            std::fs::write(path("script"), line).unwrap();
            assert!(interpreter(&path("script")).is_err(), "{line}");
        }
        let text = format!("#!/usr/sbin/nbdkit {}\n", path("so").display());
        std::fs::write(path("script"), text).unwrap();
        let found = find(path("script").to_str().unwrap()).unwrap();
        assert_eq!(found, PluginPath { path: path("so"), script: Some(path("script")) });
        let text = format!("#!/usr/sbin/nbdkit {}\n", path("script").display());
        std::fs::write(path("script"), text).unwrap();
        assert!(find(path("script").to_str().unwrap()).is_err());
    }

    #[test]
    fn what_is_no_plugin_is_refused_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text.so");
        std::fs::write(&path, "no shared object").unwrap();
        let text = load(&path).err().unwrap().to_string();
        assert!(text.contains("cannot load plugin") && text.contains("text.so"), "{text}");
        // Not marked as loaded after a failure.
        let again = load(&path).err().unwrap().to_string();
        assert_eq!(again, text);
        let script = dir.path().join("disk.py");
        std::fs::write(&script, "import nbdkit\n").unwrap();
        assert_eq!(
            load(&script).err().unwrap().remedy(),
            Some("a script in Python is python:FILE")
        );
        assert_eq!(load(&dir.path().join("none")).err().unwrap().kind(), Kind::NotFound);
    }
}
