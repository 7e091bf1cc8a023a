//! A plugin's life: load, configuration, readiness, and the end; in nbdkit's order, on one thread.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use block::{Error, Kind, OpKind, Result};
use io::{Lane, Turns};

use crate::abi::{self, ThreadModel};
use crate::async_abi::AsyncPlugin;
use crate::budget::Budget;
use crate::context::{self, Context, Left};
use crate::crash;
use crate::debug;
use crate::filter;
use crate::load::{self, Described, Library};

/// What a plugin is loaded with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// The plugin's name or path.
    pub plugin: String,
    /// Its parameters, in order; no key: the plugin's magic one.
    pub config: Vec<(Option<String>, String)>,
    /// Names or paths of filters over it, the outermost first.
    pub filters: Vec<String>,
    /// Global variables of plugin and filters to set: name, flag, value.
    pub debug: Vec<(String, String, i32)>,
    /// The host's own settings.
    pub host: HostSettings,
}

/// What the host does around a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// Most threads for callbacks of a plugin that takes them in parallel.
    pub threads: usize,
    /// Time after which a request is answered with an error; none: never.
    pub timeout: Option<Duration>,
}

/// Threads of a parallel plugin: what nbdkit gives each connection.
const THREADS: usize = 16;

impl Default for HostSettings {
    fn default() -> HostSettings {
        HostSettings { threads: THREADS, timeout: None }
    }
}

/// A plugin that is ready. It ends when this and everything opened from it are dropped.
pub(crate) struct Plugin {
    pub(crate) abi: abi::Plugin,
    pub(crate) asynchronous: Option<AsyncPlugin>,
    pub(crate) name: String,
    pub(crate) model: ThreadModel,
    pub(crate) host: HostSettings,
    /// The thread of the plugin's life, and of all callbacks where there may be one at a time.
    pub(crate) control: Arc<Lane>,
    /// Threads for plugins that take callbacks in parallel.
    pub(crate) pool: Arc<Lane>,
    /// The bound on what is lent to an asynchronous plugin.
    pub(crate) budget: Arc<Budget>,
    /// Whose turn it is, where there may be one connection at a time.
    pub(crate) turns: Arc<Turns>,
    /// Taken when the plugin ends.
    library: Option<Library>,
    /// There are filters over it, whose callbacks `abi` has.
    pub(crate) filtered: bool,
    /// The plugin's own description.
    described: abi::Plugin,
    /// `get_ready` went well: there is something to clean up.
    ready: bool,
    crash_slot: crash::Slot,
}

// SAFETY: the raw pointers are strings of the plugin's that it never changes, and callbacks, which are
// called by the rules of its thread model.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

impl Plugin {
    /// Loads a plugin, configures it and makes it ready.
    pub(crate) async fn start(settings: Settings) -> Result<Arc<Plugin>> {
        let control = Arc::new(lane(&settings, "plugin"));
        let (completer, ticket) = io::ticket();
        let own = control.clone();
        control.run(move || {
            let started = begin(&settings, own).and_then(|plugin| {
                plugin.configure(&settings)?;
                plugin.make_ready()
            });
            completer.complete(started.map(Arc::new));
        });
        ticket.await.map_err(|lost| {
            Error::new(Kind::Io, "cannot start a thread for a plugin").because(lost)
        })?
    }

    /// The error of a callback that answered -1.
    pub(crate) fn error(&self, callback: &str, left: &Left) -> Error {
        let number = match (left.error, self.abi.errno_is_preserved != 0, left.errno) {
            (0, true, errno) if errno != 0 => errno,
            (0, _, _) => libc::EIO,
            (error, _, _) => error,
        };
        let kind = kind_of(number);
        let cause = std::io::Error::from_raw_os_error(number);
        match left.text.is_empty() {
            // The plugin's own words, and nothing else.
            false => Error::new(kind, left.text.clone()),
            true => Error::new(kind, format!("{callback} of plugin {} failed", self.name))
                .because(cause),
        }
    }

    /// The error of a request that was not answered in time. What it lends stays lent.
    pub(crate) fn no_answer(&self, kind: OpKind, at: u64, len: u64, limit: Duration) -> Error {
        let (name, limit) = (&self.name, limit.as_secs_f32());
        log::error!(
            "plugin {name}: {kind} of {len} bytes at offset {at} has not been answered for {limit} s; \
             its buffer stays lent"
        );
        Error::new(Kind::TimedOut, format!("plugin {name} has not answered {kind} for {limit} s"))
    }

    fn failed(&self, what: &str, left: &Left) -> Error {
        let text = match left.text.is_empty() {
            true => format!("plugin {}: {what} failed without a reason", self.name),
            false => format!("plugin {}: {what}: {}", self.name, left.text),
        };
        Error::new(Kind::Usage, text)
    }

    /// A context for callbacks of the plugin's life.
    fn life(&self, stdio_safe: bool) -> Arc<Context> {
        Arc::new(Context { plugin: self.name.clone(), stdio_safe, ..Context::default() })
    }

    /// Calls a callback of the plugin's life that answers 0 or -1, if the plugin has it.
    fn step(
        &self,
        name: &'static CStr,
        callback: Option<unsafe extern "C" fn() -> c_int>,
        stdio_safe: bool,
    ) -> Result<c_int> {
        let Some(callback) = callback else { return Ok(0) };
        // SAFETY: a callback of the plugin without arguments, on the thread of its life.
        let (result, left) = context::call(&self.life(stdio_safe), name, || unsafe { callback() });
        self.log_rest(&left, result);
        if result == -1 {
            return Err(self.failed(&name.to_string_lossy(), &left));
        }
        Ok(result)
    }

    /// What a plugin says by `nbdkit_error` in a callback that succeeds.
    pub(crate) fn log_rest(&self, left: &Left, result: c_int) {
        if result != -1 && !left.text.is_empty() {
            log::warn!("plugin {}: {}", self.name, left.text);
        }
    }

    fn configure(&self, settings: &Settings) -> Result<()> {
        self.configure_only(settings)?;
        self.step(c"config_complete", self.abi.config_complete, true).map(drop)
    }

    fn configure_only(&self, settings: &Settings) -> Result<()> {
        for (index, (key, value)) in settings.config.iter().enumerate() {
            let key = match key {
                Some(key) => key.clone(),
                None => self.magic_key(index, value)?,
            };
            self.config(&key, value)?;
        }
        Ok(())
    }

    /// The key of a bare value.
    fn magic_key(&self, index: usize, value: &str) -> Result<String> {
        // SAFETY: null or a C string: the plugin's description.
        let magic = unsafe { crate::api::text(self.abi.magic_config_key) };
        match magic {
            Some(key) => Ok(key.into_owned()),
            // As nbdkit: the first bare value of a plugin without a magic key is a script.
            None if index == 0 && self.abi.config.is_some() => Ok("script".into()),
            None => {
                let text = format!("plugin {}: {value:?}: write it as KEY=VALUE", self.name);
                Err(Error::new(Kind::Usage, text))
            }
        }
    }

    fn config(&self, key: &str, value: &str) -> Result<()> {
        let wrong = |why: String| Error::new(Kind::Usage, format!("plugin {}: {why}", self.name));
        let mut letters = key.bytes();
        let fine = letters.next().is_some_and(|byte| byte.is_ascii_alphabetic())
            && letters.all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        if !fine {
            return Err(wrong(format!("{key:?} is no name for a parameter")));
        }
        let Some(config) = self.abi.config else {
            return Err(wrong(format!("it takes no parameters, but {key}= is given")));
        };
        let zero = |_| wrong(format!("the value of {key} holds a zero byte"));
        // Plugins keep the pointers: the strings stay for ever.
        let key_pointer = CString::new(key).map_err(zero)?.into_raw();
        let value_pointer = CString::new(value).map_err(zero)?.into_raw();
        // SAFETY: the callback's two arguments are C strings that are never freed.
        let (result, left) = context::call(&self.life(true), c"config", || unsafe {
            config(key_pointer, value_pointer)
        });
        self.log_rest(&left, result);
        if result == -1 { Err(self.failed(&format!("{key}="), &left)) } else { Ok(()) }
    }

    fn make_ready(mut self) -> Result<Plugin> {
        self.settle_model()?;
        self.step(c"get_ready", self.abi.get_ready, true)?;
        self.ready = true;
        // A server in the background is a process of its own from the start: the fork is over.
        self.step(c"after_fork", self.abi.after_fork, false)?;
        if let Some(asynchronous) = &self.asynchronous {
            self.budget.set_limit(asynchronous.max_bytes_now());
            if self.model == ThreadModel::Parallel {
                self.control.let_go();
            }
        }
        log::debug!("plugin {} is ready, {}", self.name, self.model.name());
        Ok(self)
    }

    /// The plugin may be stricter than its description says, never laxer.
    fn settle_model(&mut self) -> Result<()> {
        if self.abi.thread_model_now.is_some() {
            let number = self.step(c"thread_model", self.abi.thread_model_now, true)?;
            let Some(model) = ThreadModel::from_number(number) else {
                let text = format!("plugin {}: thread model {number} is unknown", self.name);
                return Err(Error::new(Kind::Usage, text));
            };
            self.model = self.model.min(model);
        }
        Ok(())
    }

    /// Whether the flags-taking callbacks are the plugin's.
    pub(crate) fn is_v2(&self) -> bool {
        self.abi.api_version >= 2
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let Some(library) = self.library.take() else { return };
        let cleanup = self.abi.cleanup.filter(|_| self.ready);
        let unload = self.abi.unload;
        let (context, name) = (self.life(false), self.name.clone());
        let slot = std::mem::replace(&mut self.crash_slot, crash::Slot::none());
        self.control.run(move || {
            for (name, callback) in [(c"cleanup", cleanup), (c"unload", unload)] {
                if let Some(callback) = callback {
                    // SAFETY: the last callbacks of the plugin: every handle has been closed, since
                    // each held the plugin.
                    let ((), left) = context::call(&context, name, || unsafe { callback() });
                    if !left.text.is_empty() {
                        log::warn!("plugin {}: {}", context.plugin, left.text);
                    }
                }
            }
            // Interpreters leave destructors of threads behind: the code stays mapped.
            library.keep();
            drop(slot);
            log::debug!("plugin {name} is unloaded");
            LIVE.0.lock().expect("no panic under this lock").retain(|other| *other != name);
            LIVE.1.notify_all();
        });
    }
}

/// Names of plugins that are loaded.
static LIVE: (Mutex<Vec<String>>, Condvar) = (Mutex::new(Vec::new()), Condvar::new());

/// Waits until every plugin has ended, at most this long; gives the names of those that have not. To be
/// called before the process ends, on no worker.
pub fn wait_for_end(limit: Duration) -> Vec<String> {
    let deadline = Instant::now() + limit;
    let mut live = LIVE.0.lock().expect("no panic under this lock");
    while !live.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        live = LIVE.1.wait_timeout(live, left).expect("no panic under this lock").0;
    }
    live.clone()
}

fn lane(settings: &Settings, fallback: &str) -> Lane {
    let short = settings.plugin.rsplit('/').next().unwrap_or(fallback);
    Lane::single(short.trim_start_matches("nbdkit-").trim_end_matches("-plugin.so"))
}

/// Loads a plugin, and calls its `load`.
fn begin(settings: &Settings, control: Arc<Lane>) -> Result<Plugin> {
    let found = load::find(&settings.plugin)?;
    let Described { library, plugin: mut abi, asynchronous } = load::load(&found.path)?;
    // SAFETY: null or a C string: the plugin's description.
    let name = unsafe { crate::api::text(abi.name) }.unwrap_or_default().into_owned();
    let model = ThreadModel::from_number(abi.thread_model).expect("checked when it was loaded");
    let mut flags = debug::Flags::new(&settings.debug);
    flags.set(&library, &name);
    let (filtered, described) = (!settings.filters.is_empty(), abi);
    if filtered {
        if asynchronous.is_some() {
            let text = format!("plugin {name}: filters cannot be put over an asynchronous plugin");
            return Err(Error::new(Kind::Usage, text));
        }
        abi = filter::face(filter::set_up(abi, &name, &found.path, &settings.filters, &mut flags)?);
    }
    flags.warn();
    LIVE.0.lock().expect("no panic under this lock").push(name.clone());
    let crash_slot = crash::Slot::take(&name);
    let pool = Arc::new(Lane::parallel(format!("{name}-pool"), settings.host.threads));
    let plugin = Plugin {
        abi,
        asynchronous,
        model,
        host: settings.host.clone(),
        control,
        pool,
        turns: Arc::default(),
        budget: Budget::new(0),
        library: Some(library),
        filtered,
        described,
        ready: false,
        crash_slot,
        name,
    };
    if let Some(load) = plugin.abi.load {
        // SAFETY: the first callback of the plugin, on the thread of its life.
        let ((), left) = context::call(&plugin.life(true), c"load", || unsafe { load() });
        plugin.log_rest(&left, 0);
    }
    if let Some(script) = found.script {
        plugin.config("script", &script.to_string_lossy())?;
    }
    Ok(plugin)
}

/// What clients hear of an error number: the kinds that NBD has, as nbdkit sorts them.
pub(crate) fn kind_of(number: c_int) -> Kind {
    match number {
        libc::EPERM | libc::EROFS | libc::EACCES => Kind::ReadOnly,
        libc::EIO => Kind::Io,
        libc::ENOMEM => Kind::NoMemory,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Kind::NoSpace,
        libc::EOPNOTSUPP => Kind::Unsupported,
        libc::EOVERFLOW => Kind::TooLarge,
        libc::ESHUTDOWN => Kind::ShuttingDown,
        _ => Kind::Invalid,
    }
}

/// What a plugin says about itself, without being made ready: lines of `key=value`.
pub fn dump(settings: &Settings) -> Result<String> {
    on_control(settings, dump_here)
}

/// The same, printed to standard output. A plugin that starts the program anew, as VMware's does, prints
/// into the same place then.
///
/// # Errors
/// The plugin cannot be loaded, or does not like its parameters.
pub fn print_dump(settings: &Settings) -> Result<()> {
    on_control(settings, |settings, control| {
        let (plugin, path) = configured(settings, control)?;
        // Through C's buffer: it goes when the program is started anew, as does what is printed behind it.
        crate::api::print(&describe(&plugin, path));
        if let Some(dump) = plugin.abi.dump_plugin {
            // SAFETY: a callback without arguments, on the thread of the plugin's life.
            context::call(&plugin.life(true), c"dump_plugin", || unsafe { dump() });
        }
        // SAFETY: all streams of the C library, which locks them.
        unsafe { libc::fflush(std::ptr::null_mut()) };
        Ok(())
    })
}

/// Runs a job on a thread that is a plugin's from its beginning.
fn on_control<T: Send + 'static>(
    settings: &Settings,
    job: fn(&Settings, Arc<Lane>) -> Result<T>,
) -> Result<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let control = Arc::new(lane(settings, "plugin"));
    let (own, settings) = (control.clone(), settings.clone());
    control.run(move || {
        // Whoever asked waits below.
        let _ = sender.send(job(&settings, own));
    });
    drop(control);
    receiver.recv().map_err(|_| Error::new(Kind::Io, "cannot start a thread for a plugin"))?
}

fn configured(settings: &Settings, control: Arc<Lane>) -> Result<(Plugin, PathBuf)> {
    let path = load::find(&settings.plugin)?.path;
    let mut plugin = begin(settings, control)?;
    plugin.configure_only(settings)?;
    plugin.settle_model()?;
    Ok((plugin, path))
}

fn dump_here(settings: &Settings, control: Arc<Lane>) -> Result<String> {
    let (plugin, path) = configured(settings, control)?;
    let described = describe(&plugin, path);
    let printed = match plugin.abi.dump_plugin {
        None => String::new(),
        Some(dump) => {
            let context = plugin.life(true);
            // SAFETY: a callback without arguments, on the thread of the plugin's life.
            crate::capture::stdout(|| context::call(&context, c"dump_plugin", || unsafe { dump() }))
                .map_err(|error| Error::system("cannot catch what the plugin prints", error))?
        }
    };
    Ok(described + &printed)
}

fn describe(plugin: &Plugin, path: PathBuf) -> String {
    let abi = &plugin.described;
    let mut text = String::new();
    let mut line = |key: &str, value: &str| text += &format!("{key}={value}\n");
    line("path", &path.canonicalize().unwrap_or(path).display().to_string());
    line("name", &plugin.name);
    let c_text = |pointer: *const c_char| {
        // SAFETY: null or a C string: the plugin's description.
        unsafe { crate::api::text(pointer) }.map(std::borrow::Cow::into_owned)
    };
    if let Some(version) = c_text(abi.version) {
        line("version", &version);
    }
    line("api_version", &abi.api_version.to_string());
    line("struct_size", &abi.struct_size.to_string());
    let most = ThreadModel::from_number(abi.thread_model).expect("checked when it was loaded");
    line("max_thread_model", most.name());
    line("thread_model", plugin.model.name());
    line("errno_is_preserved", if abi.errno_is_preserved != 0 { "1" } else { "0" });
    if let Some(key) = c_text(abi.magic_config_key) {
        line("magic_config_key", &key);
    }
    let v1 = abi.api_version < 2;
    let has = [
        ("longname", !abi.longname.is_null()),
        ("description", !abi.description.is_null()),
        ("load", abi.load.is_some()),
        ("unload", abi.unload.is_some()),
        ("dump_plugin", abi.dump_plugin.is_some()),
        ("config", abi.config.is_some()),
        ("config_complete", abi.config_complete.is_some()),
        ("config_help", !abi.config_help.is_null()),
        ("get_ready", abi.get_ready.is_some()),
        ("after_fork", abi.after_fork.is_some()),
        ("preconnect", abi.preconnect.is_some()),
        ("list_exports", abi.list_exports.is_some()),
        ("default_export", abi.default_export.is_some()),
        ("open", abi.open.is_some()),
        ("close", abi.close.is_some()),
        ("get_size", abi.get_size.is_some()),
        ("export_description", abi.export_description.is_some()),
        ("block_size", abi.block_size.is_some()),
        ("can_write", abi.can_write.is_some()),
        ("can_flush", abi.can_flush.is_some()),
        ("is_rotational", abi.is_rotational.is_some()),
        ("can_trim", abi.can_trim.is_some()),
        ("can_zero", abi.can_zero.is_some()),
        ("can_fast_zero", abi.can_fast_zero.is_some()),
        ("can_extents", abi.can_extents.is_some()),
        ("can_fua", abi.can_fua.is_some()),
        ("can_multi_conn", abi.can_multi_conn.is_some()),
        ("can_cache", abi.can_cache.is_some()),
        ("pread", abi.pread.is_some() || v1 && abi.pread_v1.is_some()),
        ("pwrite", abi.pwrite.is_some() || v1 && abi.pwrite_v1.is_some()),
        ("flush", abi.flush.is_some() || v1 && abi.flush_v1.is_some()),
        ("trim", abi.trim.is_some() || v1 && abi.trim_v1.is_some()),
        ("zero", abi.zero.is_some() || v1 && abi.zero_v1.is_some()),
        ("extents", abi.extents.is_some()),
        ("cache", abi.cache.is_some()),
        ("thread_model", abi.thread_model_now.is_some()),
        ("cleanup", abi.cleanup.is_some()),
    ];
    for (name, there) in has {
        if there {
            text += &format!("has_{name}=1\n");
        }
    }
    if let Some(asynchronous) = &plugin.asynchronous {
        for name in asynchronous.callbacks() {
            text += &format!("has_async_{name}=1\n");
        }
    }
    text
}
