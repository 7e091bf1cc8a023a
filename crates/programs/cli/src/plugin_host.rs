//! The host of nbdkit's plugins, where it is built in (feature `nbdkit-plugins`).

#[cfg(feature = "nbdkit-plugins")]
pub use blockhaul_cabi::{
    PluginDescription, PluginSettings, about, about_filter, dump, filter_folder, hosts_filter,
    plugin_folder, print_dump, set_server_name, stdio_is_a_client, wait_for_end, when_ready,
};

#[cfg(not(feature = "nbdkit-plugins"))]
pub use absent::*;

/// What a program without the host answers.
#[cfg(not(feature = "nbdkit-plugins"))]
mod absent {
    use std::path::PathBuf;
    use std::time::Duration;

    use blockhaul_block::{Error, Kind, Result};

    /// What a plugin says about itself: there is none.
    pub struct PluginDescription {
        pub what: &'static str,
        pub path: PathBuf,
        pub name: String,
        pub longname: Option<String>,
        pub version: Option<String>,
        pub description: Option<String>,
        pub config_help: Option<String>,
    }

    /// What a plugin would be loaded with.
    #[derive(Default)]
    #[expect(dead_code, reason = "those that the host reads")]
    pub struct PluginSettings {
        pub plugin: String,
        pub config: Vec<(Option<String>, String)>,
        pub filters: Vec<String>,
        pub debug: Vec<(String, String, i32)>,
    }

    impl PluginSettings {
        pub fn parse(_device: &str) -> Result<PluginSettings> {
            Err(unsupported())
        }
    }

    fn unsupported() -> Error {
        let text = "this program cannot load plugins: build it with the feature nbdkit-plugins";
        Error::new(Kind::Unsupported, text)
    }

    pub fn about(_name: &str) -> Result<PluginDescription> {
        Err(unsupported())
    }

    pub fn about_filter(_name: &str) -> Result<PluginDescription> {
        Err(unsupported())
    }

    pub fn dump(_settings: &PluginSettings) -> Result<String> {
        Err(unsupported())
    }

    pub fn print_dump(_settings: &PluginSettings) -> Result<()> {
        Err(unsupported())
    }

    pub fn hosts_filter(_name: &str) -> bool {
        false
    }

    /// Nothing can ask for the name.
    pub fn set_server_name(_name: &str) -> std::result::Result<(), std::ffi::NulError> {
        Ok(())
    }

    /// Where nbdkit's plugins are on Debian.
    pub fn plugin_folder() -> PathBuf {
        PathBuf::from("/usr/lib/nbdkit/plugins")
    }

    pub fn filter_folder() -> PathBuf {
        PathBuf::from("/usr/lib/nbdkit/filters")
    }

    pub fn stdio_is_a_client() {}

    pub fn when_ready(_ready: impl Fn() + Send + Sync + 'static) {}

    pub fn wait_for_end(_limit: Duration) -> Vec<String> {
        Vec::new()
    }
}
