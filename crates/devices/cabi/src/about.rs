//! The descriptions of plugins and filters, without configuring them.

use std::path::PathBuf;

use blockhaul_block::Result;

use crate::api::text;
use crate::load;

/// The description of a plugin or filter.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PluginDescription {
    /// `plugin` or `filter`.
    pub what: &'static str,
    /// Its path.
    pub path: PathBuf,
    /// Its short name.
    pub name: String,
    /// A longer one.
    pub longname: Option<String>,
    /// Its version.
    pub version: Option<String>,
    /// Its purpose.
    pub description: Option<String>,
    /// Its parameters.
    pub config_help: Option<String>,
}

/// Loads a plugin for its description. The shared object stays loaded.
///
/// # Errors
/// There is no such plugin, or it cannot be loaded.
pub fn about(name: &str) -> Result<PluginDescription> {
    let path = load::find(name)?.path;
    let load::ObjectDescription { library, plugin, .. } = load::load(&path)?;
    if let Some(load) = plugin.load {
        // SAFETY: the first callback of the plugin; it takes no arguments.
        unsafe { load() };
    }
    let owned = |pointer| {
        // SAFETY: null or a C string: the plugin's description, which stays loaded.
        unsafe { text(pointer) }.map(std::borrow::Cow::into_owned)
    };
    let about = PluginDescription {
        what: "plugin",
        path,
        name: owned(plugin.name).unwrap_or_default(),
        longname: owned(plugin.longname),
        version: owned(plugin.version),
        description: owned(plugin.description),
        config_help: owned(plugin.config_help),
    };
    if let Some(unload) = plugin.unload {
        // SAFETY: the last callback of the plugin; it takes no arguments.
        unsafe { unload() };
    }
    library.keep();
    Ok(about)
}
