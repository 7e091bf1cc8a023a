//! A plugin's life: load, configuration, readiness, and the end; in nbdkit's order, on one thread.

use std::ffi::{CStr, CString, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use blockhaul_block::{Error, Kind, OpKind, Result, ThreadModel};
use blockhaul_catalog::Shutdown;
use blockhaul_io::{BlockingPool, FifoLock};

use crate::abi;
use crate::async_abi::AsyncPlugin;
use crate::context::{self, CallContext, CallResults, CallStage};
use crate::crash;
use crate::debug;
use crate::filter;
use crate::load::{self, ObjectDescription, SharedObject};
use crate::shutdown::ShutdownRegistration;
use crate::stdio;
use crate::watchdog;
use blockhaul_foreign::Budget;

/// Settings for loading a plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginSettings {
    /// The plugin's name or path.
    pub plugin: String,
    /// Its parameters, in order; no key: the plugin's magic key.
    pub config: Vec<(Option<String>, String)>,
    /// Names or paths of filters over it, the outermost first.
    pub filters: Vec<String>,
    /// Global variables of plugin and filters to set: name, flag, value.
    pub debug: Vec<(String, String, i32)>,
    /// The host's own settings.
    pub host: PluginHostSettings,
}

/// Settings of the host for a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginHostSettings {
    /// Maximum number of threads for parallel callbacks.
    pub threads: usize,
    /// Time limit of requests and other callbacks of a connection, after which they fail; none: no
    /// limit.
    pub timeout: Option<Duration>,
    /// Time after which either ends the process; none: never.
    pub watchdog: Option<Duration>,
}

/// Threads of a parallel plugin: what nbdkit gives each connection.
const THREADS: usize = 16;

impl Default for PluginHostSettings {
    fn default() -> PluginHostSettings {
        PluginHostSettings { threads: THREADS, timeout: None, watchdog: None }
    }
}

/// Number of callbacks of a plugin that were given up and have not returned.
pub(crate) type HangingCalls = Arc<AtomicUsize>;

/// A plugin that is ready. It ends when this and everything opened from it are dropped.
pub(crate) struct Plugin {
    pub(crate) abi: abi::PluginTable,
    pub(crate) asynchronous: Option<AsyncPlugin>,
    pub(crate) name: String,
    pub(crate) model: ThreadModel,
    pub(crate) host: PluginHostSettings,
    /// The thread of the plugin's life, and of all callbacks if only one may run at a time.
    pub(crate) control: Arc<BlockingPool>,
    /// Threads for parallel callbacks.
    pub(crate) pool: Arc<BlockingPool>,
    /// The limit of bytes lent to an asynchronous plugin.
    pub(crate) budget: Arc<Budget>,
    /// The lock for plugins with one connection at a time.
    pub(crate) one_by_one: Arc<FifoLock>,
    /// Taken when the plugin ends.
    library: Option<SharedObject>,
    /// There are filters over it; `abi` has their callbacks.
    pub(crate) filtered: bool,
    /// The plugin's own description.
    pub(crate) described: abi::PluginTable,
    /// Callbacks that were given up.
    pub(crate) hanging: HangingCalls,
    /// `get_ready` succeeded: cleanup is necessary.
    ready: bool,
    crash_slot: crash::CrashSlot,
    /// Stops the server that the plugin was opened for.
    pub(crate) shutdown: Shutdown,
    /// Taken when the plugin ends.
    listening: Option<ShutdownRegistration>,
}

// SAFETY: the raw pointers are strings of the plugin that never change, and callbacks, which are
// called according to its thread model.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

impl Plugin {
    /// Loads a plugin, configures it and makes it ready.
    pub(crate) async fn start(settings: PluginSettings, shutdown: Shutdown) -> Result<Arc<Plugin>> {
        if settings.host.watchdog.is_some() {
            watchdog::start();
        }
        let control = Arc::new(lane(&settings, "plugin"));
        let (completer, ticket) = blockhaul_io::ticket();
        let own = control.clone();
        control.run(move || {
            let started = begin(&settings, own, shutdown).and_then(|plugin| {
                plugin.configure(&settings)?;
                plugin.make_ready()
            });
            completer.complete(started.map(Arc::new));
        });
        ticket.await.map_err(|lost| {
            Error::new(Kind::Io, "cannot start a thread for a plugin").complete().because(lost)
        })?
    }

    /// The error of a callback that returned -1.
    pub(crate) fn error(&self, callback: &str, left: &CallResults) -> Error {
        let number = match (left.error, self.abi.errno_is_preserved != 0, left.errno) {
            (0, true, errno) if errno != 0 => errno,
            (0, _, _) => libc::EIO,
            (error, _, _) => error,
        };
        let kind = kind_of(number);
        let cause = std::io::Error::from_raw_os_error(number);
        if left.text.is_empty() {
            let text = format!("{callback} of plugin {} failed", self.name);
            Error::new(kind, text).because(cause).of_plugin()
        } else {
            // Only the plugin's own text.
            Error::new(kind, left.text.clone()).of_plugin()
        }
    }

    /// The error of a request without a reply in time. Its memory stays lent.
    pub(crate) fn no_answer(
        &self,
        kind: OpKind,
        at: u64,
        len: u64,
        stage: CallStage,
        limit: Duration,
    ) -> Error {
        let name = &self.name;
        let limit = limit.as_secs_f32();
        let place = match stage {
            CallStage::In(callback) => format!(", {} has not returned", callback.to_string_lossy()),
            CallStage::Queued => ", other callbacks have left it no thread".to_string(),
            // An asynchronous callback has returned, but no reply has arrived.
            CallStage::Begun | CallStage::Over => String::new(),
        };
        log::error!(
            "plugin {name}: {kind} of {len} bytes at offset {at} has not completed for {limit} s\
             {place}; its buffer cannot be reused"
        );
        Error::new(Kind::TimedOut, format!("plugin {name} has not answered {kind} for {limit} s"))
    }

    /// The error of another callback of a connection that has not returned in time.
    pub(crate) fn no_return(&self, stage: CallStage, limit: Duration) -> Error {
        let name = &self.name;
        let limit = limit.as_secs_f32();
        let text = match stage {
            CallStage::In(callback) => {
                let callback = callback.to_string_lossy();
                format!("plugin {name}: {callback} has not returned for {limit} s")
            }
            CallStage::Queued => {
                format!("plugin {name}: other callbacks have left it no thread for {limit} s")
            }
            CallStage::Begun | CallStage::Over => {
                format!("plugin {name} has not answered for {limit} s")
            }
        };
        log::error!("{text}");
        Error::new(Kind::TimedOut, text)
    }

    fn failed(&self, what: &str, left: &CallResults) -> Error {
        let text = if left.text.is_empty() {
            format!("plugin {}: {what} failed without a reason", self.name)
        } else {
            format!("plugin {}: {what}: {}", self.name, left.text)
        };
        Error::new(Kind::Usage, text)
    }

    /// A context for callbacks of the plugin's life.
    pub(crate) fn life(&self, stdio_safe: bool) -> Arc<CallContext> {
        Arc::new(CallContext {
            plugin: self.name.as_str().into(),
            stdio_safe,
            shutdown: Some(self.shutdown.clone()),
            ..CallContext::default()
        })
    }

    /// Calls a callback of the plugin's life that returns 0 or -1, if the plugin has it.
    fn step(
        &self,
        name: &'static CStr,
        callback: Option<unsafe extern "C-unwind" fn() -> c_int>,
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

    /// Logs the `nbdkit_error` texts of a callback that succeeds.
    pub(crate) fn log_rest(&self, left: &CallResults, result: c_int) {
        if result != -1 && !left.text.is_empty() {
            log::warn!("plugin {}: {}", self.name, left.text);
        }
    }

    fn configure(&self, settings: &PluginSettings) -> Result<()> {
        self.configure_only(settings)?;
        self.step(c"config_complete", self.abi.config_complete, true).map(drop)
    }

    pub(crate) fn configure_only(&self, settings: &PluginSettings) -> Result<()> {
        for (index, (key, value)) in settings.config.iter().enumerate() {
            let key = match key {
                Some(key) => key.clone(),
                None => self.magic_key(index, value)?,
            };
            self.config(&key, value)?;
        }
        Ok(())
    }

    /// The key of a value without a key.
    fn magic_key(&self, index: usize, value: &str) -> Result<String> {
        // SAFETY: null or a C string: the plugin's description.
        let magic = unsafe { crate::api::text(self.abi.magic_config_key) };
        match magic {
            Some(key) => Ok(key.into_owned()),
            // As nbdkit: the first value without a key is a script if the plugin has no magic key.
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
            return Err(wrong(format!("{key:?} is not a valid name of a parameter")));
        }
        let Some(config) = self.abi.config else {
            return Err(wrong(format!("it takes no parameters, but {key}= is given")));
        };
        let zero = |_| wrong(format!("the value of {key} holds a zero byte"));
        // Plugins keep the pointers: the strings are never freed.
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
        // A background server has already forked at its start.
        stdio::ready();
        self.step(c"after_fork", self.abi.after_fork, false)?;
        if let Some(asynchronous) = &self.asynchronous {
            self.budget.set_limit(asynchronous.max_bytes_now());
            if self.model == ThreadModel::Parallel {
                self.control.end_when_idle();
            }
        }
        log::debug!("plugin {} is ready, {}", self.name, self.model.name());
        Ok(self)
    }

    /// The plugin may choose a stricter model than in its description.
    pub(crate) fn settle_model(&mut self) -> Result<()> {
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

    /// Whether the callbacks with flags are the plugin's.
    pub(crate) fn is_v2(&self) -> bool {
        self.abi.api_version >= 2
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let Some(library) = self.library.take() else { return };
        let cleanup = self.abi.cleanup.filter(|_| self.ready);
        let unload = self.abi.unload;
        let context = self.life(false);
        let name = self.name.clone();
        let hanging = self.hanging.clone();
        let slot = std::mem::replace(&mut self.crash_slot, crash::CrashSlot::none());
        let listening = self.listening.take();
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
            drop((slot, listening));
            log::debug!("plugin {name} is unloaded");
            let mut live = LIVE.0.lock().expect("no panic under this lock");
            live.retain(|other| !Arc::ptr_eq(&other.1, &hanging));
            LIVE.1.notify_all();
        });
    }
}

/// Loaded plugins: their names, and how many callbacks of each hang.
static LIVE: (Mutex<Vec<(String, HangingCalls)>>, Condvar) =
    (Mutex::new(Vec::new()), Condvar::new());

/// Time for a plugin with a hanging callback to end.
const HANGING_END: Duration = Duration::from_secs(3);

/// Waits until every plugin has ended, at most this long, and less if callbacks hang; returns the
/// names of those that have not. Call it before the process ends, not on a worker.
pub fn wait_for_end(limit: Duration) -> Vec<String> {
    let begun = blockhaul_io::now();
    let mut live = LIVE.0.lock().expect("no panic under this lock");
    while !live.is_empty() {
        let hangs = live.iter().all(|(_, hanging)| hanging.load(Ordering::Relaxed) > 0);
        let limit = if hangs { limit.min(HANGING_END) } else { limit };
        let left = limit.saturating_sub(blockhaul_io::elapsed(begun));
        if left.is_zero() {
            break;
        }
        live = LIVE.1.wait_timeout(live, left).expect("no panic under this lock").0;
    }
    live.iter().map(|(name, _)| name.clone()).collect()
}

pub(crate) fn lane(settings: &PluginSettings, fallback: &str) -> BlockingPool {
    let short = settings.plugin.rsplit('/').next().unwrap_or(fallback);
    BlockingPool::single(short.trim_start_matches("nbdkit-").trim_end_matches("-plugin.so"))
}

/// Loads a plugin, and calls its `load`.
pub(crate) fn begin(
    settings: &PluginSettings,
    control: Arc<BlockingPool>,
    shutdown: Shutdown,
) -> Result<Plugin> {
    // A missing filter is the reason why a plugin of nbdkit is needed: it is named first.
    for filter in &settings.filters {
        filter::find(filter)?;
    }
    let found = load::find(&settings.plugin)?;
    let ObjectDescription { library, plugin: mut abi, asynchronous } = load::load(&found.path)?;
    // SAFETY: null or a C string: the plugin's description.
    let name = unsafe { crate::api::text(abi.name) }.unwrap_or_default().into_owned();
    let model = ThreadModel::from_number(abi.thread_model).expect("checked when it was loaded");
    let mut flags = debug::DebugFlags::new(&settings.debug);
    flags.set(&library, &name);
    let mut listening = ShutdownRegistration::by(shutdown.clone());
    library.symbol_of_init().into_iter().for_each(|address| listening.from(address));
    let filtered = !settings.filters.is_empty();
    let described = abi;
    if filtered {
        if asynchronous.is_some() {
            let text = format!("plugin {name}: filters cannot be put over an asynchronous plugin");
            return Err(Error::new(Kind::Usage, text));
        }
        let mut loaded = |library: &SharedObject, filter: &str| {
            flags.set(library, filter);
            library.symbol_of_init().into_iter().for_each(|address| listening.from(address));
        };
        abi =
            filter::face(filter::set_up(abi, &name, &found.path, &settings.filters, &mut loaded)?);
    }
    flags.warn();
    let hanging = HangingCalls::default();
    LIVE.0.lock().expect("no panic under this lock").push((name.clone(), hanging.clone()));
    let crash_slot = crash::CrashSlot::take(&name);
    let pool = Arc::new(BlockingPool::parallel(format!("{name}-pool"), settings.host.threads));
    let plugin = Plugin {
        abi,
        asynchronous,
        model,
        host: settings.host.clone(),
        control,
        pool,
        one_by_one: Arc::default(),
        budget: Budget::new(0),
        library: Some(library),
        filtered,
        described,
        hanging,
        ready: false,
        crash_slot,
        shutdown,
        listening: Some(listening),
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

/// The kind of an error number: as nbdkit maps them to NBD's, except that missing permission is
/// reported as such (EACCES).
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
