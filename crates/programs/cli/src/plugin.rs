//! `blockhaul plugin`: the description of a plugin.

use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Result};

use crate::args;
use crate::exit::{CommandFailure, CommandResult};
use crate::{logger, out};

/// Runs `blockhaul plugin`.
pub fn run(args: &args::PluginArgs) -> CommandResult {
    logger::start(false);
    let config = args.config.iter().map(|word| match word.split_once('=') {
        Some((key, value)) => (Some(key.to_string()), value.to_string()),
        None => (None, word.clone()),
    });
    let failed = |error| CommandFailure::opening("plugin", &args.plugin, &error);
    if let Some(device) = args.plugin.strip_prefix("python:") {
        let text = python(device, config).map_err(failed)?;
        out::print(out::lines(&text).as_bytes())?;
        return Ok(0);
    }
    if ["sh:", "eval:"].iter().any(|scheme| args.plugin.starts_with(scheme)) {
        let text = "scripts report nothing: this is for plugins in C and Python; blockhaul info shows \
                    the device";
        return Err(CommandFailure::usage(text));
    }
    let mut settings = match args.plugin.strip_prefix("nbdkit:") {
        Some(device) => crate::plugin_host::PluginSettings::parse(device).map_err(failed)?,
        None => crate::plugin_host::PluginSettings {
            plugin: args.plugin.clone(),
            ..crate::plugin_host::PluginSettings::default()
        },
    };
    settings.config.extend(config);
    let text = crate::plugin_host::dump(&settings).map_err(failed)?;
    out::print(out::lines(&text).as_bytes())?;
    Ok(0)
}

/// The description of a plugin in Python.
fn python(device: &str, config: impl Iterator<Item = (Option<String>, String)>) -> Result<String> {
    let mut settings = blockhaul_python::PythonSettings::parse(device)?;
    for (key, value) in config {
        let usage = || Error::new(Kind::Usage, format!("{value:?}: write it as KEY=VALUE"));
        settings.config.push((key.ok_or_else(usage)?, value.clone()));
    }
    blockhaul_python::dump(&settings)
}

/// Waits until plugins and scripts have ended, at most this long, and warns of those that have not.
/// Scripts are killed then. Returns whether all have ended. Call it at the end of the program, not
/// on a worker.
pub fn wait_for_end(limit: Duration) -> bool {
    let begun = Instant::now();
    let plugins = crate::plugin_host::wait_for_end(limit);
    for name in &plugins {
        logger::warn(&format!("plugin {name} has not ended in time"));
    }
    let scripts = blockhaul_script::wait_for_end(limit.saturating_sub(begun.elapsed()));
    if !scripts {
        logger::warn("a script has not ended in time, and is killed");
    }
    let python = blockhaul_python::wait_for_end(limit.saturating_sub(begun.elapsed()));
    if !python {
        logger::warn("a Python plugin has not ended in time, and is killed");
    }
    plugins.is_empty() && scripts && python
}
