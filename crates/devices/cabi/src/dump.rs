//! The description of a plugin (`blockhaul plugin`, nbdkit's `--dump-plugin`).

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result, ThreadModel};
use blockhaul_catalog::Shutdown;
use blockhaul_io::BlockingPool;

use crate::plugin::{Plugin, PluginSettings, begin, lane};
use crate::{context, load};

/// The description of a plugin, without starting it: lines of `key=value`.
pub fn dump(settings: &PluginSettings) -> Result<String> {
    on_control(settings, dump_here)
}

/// The same, printed to standard output. A plugin that re-executes the program, as VMware's does,
/// then prints to the same place.
///
/// # Errors
/// The plugin cannot be loaded, or rejects its parameters.
pub fn print_dump(settings: &PluginSettings) -> Result<()> {
    on_control(settings, |settings, control| {
        let (plugin, path) = configured(settings, control)?;
        // Through C's buffer: a re-exec discards it together with what the plugin has printed.
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

/// Runs a job on a thread used only by this plugin.
fn on_control<T: Send + 'static>(
    settings: &PluginSettings,
    job: fn(&PluginSettings, Arc<BlockingPool>) -> Result<T>,
) -> Result<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let control = Arc::new(lane(settings, "plugin"));
    let own = control.clone();
    let settings = settings.clone();
    control.run(move || {
        // The caller waits below.
        let _ = sender.send(job(&settings, own));
    });
    drop(control);
    receiver
        .recv()
        .map_err(|_| Error::new(Kind::Io, "cannot start a thread for a plugin").complete())?
}

fn configured(settings: &PluginSettings, control: Arc<BlockingPool>) -> Result<(Plugin, PathBuf)> {
    let path = load::find(&settings.plugin)?.path;
    let mut plugin = begin(settings, control, Shutdown::default())?;
    plugin.configure_only(settings)?;
    plugin.settle_model()?;
    Ok((plugin, path))
}

fn dump_here(settings: &PluginSettings, control: Arc<BlockingPool>) -> Result<String> {
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

/// The texts and callbacks that a plugin has, by name.
fn present(abi: &crate::abi::PluginTable) -> impl Iterator<Item = &'static str> {
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
    has.into_iter().filter(|(_, there)| *there).map(|(name, _)| name)
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
    for name in present(abi) {
        text += &format!("has_{name}=1\n");
    }
    if let Some(asynchronous) = &plugin.asynchronous {
        for name in asynchronous.callbacks() {
            text += &format!("has_async_{name}=1\n");
        }
    }
    text
}
