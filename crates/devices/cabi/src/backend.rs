//! The scheme `nbdkit:`: `nbdkit:NAME?key=value&…`, `nbdkit:/path/to/plugin.so?…`.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result, ThreadModel};
use blockhaul_catalog::{
    Backend, BackendTarget, Exports, HandleOpener, OpenFuture, OpenedDevice, parse_duration,
    percent_decode,
};

use crate::hint;
use crate::plugin::{Plugin, PluginSettings};
use crate::visit::{PluginExports, PluginVisit};

/// Maximum number of threads.
const THREADS_MAX: usize = 1024;

/// The backend `nbdkit:PLUGIN`.
pub struct NbdkitBackend;

impl Backend for NbdkitBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["nbdkit"]
    }

    fn operand(&self) -> &'static str {
        "PLUGIN[?KEY=VALUE&…]"
    }

    fn summary(&self) -> &'static str {
        "an nbdkit plugin (C interface 1 and 2, or blockhaul-plugin.h), by name or path, with its own \
         parameters; parameters of the host: @threads=N: threads for parallel callbacks [default: 16]; \
         @timeout=TIME: a callback of a connection that does not return in this time fails; @watchdog=TIME: \
         a callback that does not return in this time ends the process [default: never]; @filter=NAME: put \
         a filter of nbdkit over the plugin (1.42 to 1.48; may be repeated, the first is the outermost)"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul serve 'nbdkit:memory?size=64M' --run 'blockhaul copy --verify sample:64M "$uri"'
"#
    }

    fn raw(&self) -> bool {
        true
    }

    fn runs_foreign_code(&self) -> bool {
        true
    }

    fn instead_of(&self, scheme: &str, rest: &str) -> Option<String> {
        hint::instead_of(scheme, rest)
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            let settings = PluginSettings::parse(target.text()?)?;
            let readonly = !target.intent.write;
            let plugin =
                Plugin::start(settings, target.context.registry().shutdown.clone()).await?;
            let more = PluginHandles { plugin, readonly };
            let device = more.open().await?;
            // If there may be only one connection at a time, a second would wait for ever.
            let several = more.plugin.model != ThreadModel::SerializeConnections;
            let more = several.then(|| Arc::new(more) as Arc<dyn HandleOpener>);
            Ok(OpenedDevice { device, more })
        })
    }

    fn exports(&self, target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        let target = target.clone();
        Some(Box::pin(async move {
            let readonly = !target.intent.write;
            let plugin = Plugin::start(
                PluginSettings::parse(target.text()?)?,
                target.context.registry().shutdown.clone(),
            )
            .await?;
            Ok(Arc::new(PluginExports { plugin, readonly }) as Arc<dyn Exports>)
        }))
    }
}

/// Handles for this program's own use: each is a connection to the plugin.
struct PluginHandles {
    plugin: Arc<Plugin>,
    readonly: bool,
}

impl PluginHandles {
    fn open(&self) -> OpenFuture<Arc<dyn Device>> {
        let plugin = self.plugin.clone();
        let readonly = self.readonly;
        Box::pin(async move {
            let visit = PluginVisit::enter(plugin, readonly, None).await?;
            visit.open_handle("", false).await
        })
    }
}

impl HandleOpener for PluginHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        self.open()
    }
}

impl PluginSettings {
    /// Parses the text after the scheme: `NAME?key=value&…`. Parameters keep their order, may be
    /// repeated, and those without a key use the plugin's magic key.
    ///
    /// # Errors
    /// An incomplete `%XX`, or an unknown or invalid parameter of the host.
    pub fn parse(text: &str) -> Result<PluginSettings> {
        let (plugin, options) = text.split_once('?').unwrap_or((text, ""));
        let mut settings =
            PluginSettings { plugin: percent_decode(plugin)?, ..PluginSettings::default() };
        for part in options.split('&').filter(|part| !part.is_empty()) {
            let (key, value) = match part.split_once('=') {
                // An empty value without a key: without `=` it would not exist.
                Some(("", value)) => (None, percent_decode(value)?),
                Some((key, value)) => (Some(percent_decode(key)?), percent_decode(value)?),
                None => (None, percent_decode(part)?),
            };
            match key {
                Some(key) if key.starts_with('@') => host(&mut settings, &key, &value)?,
                key => settings.config.push((key, value)),
            }
        }
        Ok(settings)
    }
}

fn host(settings: &mut PluginSettings, key: &str, value: &str) -> Result<()> {
    let wrong = |why: String| Err(Error::new(Kind::Usage, format!("nbdkit: {key}: {why}")));
    match key {
        "@threads" => match value.parse() {
            Ok(threads) if (1..=THREADS_MAX).contains(&threads) => settings.host.threads = threads,
            _ => return wrong(format!("{value:?} is not a number from 1 to {THREADS_MAX}")),
        },
        "@timeout" | "@watchdog" => {
            let time = match parse_duration(value) {
                Ok(time) => Some(time).filter(|time| !time.is_zero()),
                Err(error) => return wrong(error.text()),
            };
            match key {
                "@timeout" => settings.host.timeout = time,
                _ => settings.host.watchdog = time,
            }
        }
        "@filter" => settings.filters.push(value.to_string()),
        "@debug" => match debug_flag(value) {
            Some(flag) => settings.debug.push(flag),
            None => return wrong(format!("{value:?} is not NAME.FLAG=N")),
        },
        _ => {
            let known = "unknown; parameters of the host are @threads, @timeout, @watchdog, @filter and @debug";
            return wrong(known.into());
        }
    }
    Ok(())
}

fn debug_flag(text: &str) -> Option<(String, String, i32)> {
    let (path, value) = text.split_once('=')?;
    let (name, flag) = path.split_once('.')?;
    Some((name.to_string(), flag.to_string(), value.parse().ok()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn parameters_keep_their_order_and_may_have_no_key() {
        let parsed = PluginSettings::parse(
            "eval?a%26b&get_size=echo%201%25&x=1&x=2&@threads=3&@timeout=2s&@watchdog=1m",
        )
        .unwrap();
        let config: Vec<_> =
            parsed.config.iter().map(|(key, value)| (key.as_deref(), value.as_str())).collect();
        assert_eq!(
            config,
            [(None, "a&b"), (Some("get_size"), "echo 1%"), (Some("x"), "1"), (Some("x"), "2")]
        );
        assert_eq!(parsed.plugin, "eval");
        assert_eq!(parsed.host.threads, 3);
        assert_eq!(parsed.host.timeout, Some(Duration::from_secs(2)));
        assert_eq!(parsed.host.watchdog, Some(Duration::from_secs(60)));
        assert_eq!(PluginSettings::parse("/a/b.so").unwrap().plugin, "/a/b.so");
    }

    #[test]
    fn wrong_settings_of_the_host_are_errors() {
        for bad in [
            "x?@threads=0",
            "x?@threads=a",
            "x?@timeout=soon",
            "x?@watchdog=a",
            "x?@other=1",
            "x?a=%zz",
        ] {
            assert_eq!(PluginSettings::parse(bad).unwrap_err().kind(), Kind::Usage, "{bad}");
        }
    }
}
