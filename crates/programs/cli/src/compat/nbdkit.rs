//! `nbdkit`, by `blockhaul serve`.

use std::ffi::OsString;
use std::time::Duration;

use blockhaul_catalog::Registry;
use blockhaul_command_lines::getopt;
use blockhaul_command_lines::nbdkit::{
    HELP, IN_BACKGROUND, LogDestination, NbdkitCommand, OPTIONS, OwnPlugin, TranslationContext,
    VERSION, dump_config, filter_keys, own_plugin, serve_words,
};

use super::nbdkit_log as log;
use super::stand_in::{answer, failure, own};
use crate::args::CliCommand;
use crate::exit::{CommandFailure, CommandResult, FAILED};
use crate::{devices, plugin_host, serve};

/// Runs nbdkit with these words. Errors have nbdkit's form.
pub fn run(words: &[OsString]) -> CommandResult {
    start(words).or_else(|failure| {
        log::error(&failure.to_string());
        match failure.status() {
            // Like a shell for a program that was ended by a signal.
            status @ 128.. => Ok(status),
            _ => Ok(FAILED),
        }
    })
}

fn start(words: &[OsString]) -> CommandResult {
    let (in_background, words) = match words {
        [first, rest @ ..] if first == IN_BACKGROUND => (true, rest),
        words => (false, words),
    };
    let line = NbdkitCommand::parse(words)
        .map_err(|text| failure(format!("{text}; see nbdkit --help")))?;
    log::start(&line, in_background).map_err(|error| log_failure(&line, &error))?;
    if let Some(name) = &line.name {
        plugin_host::set_server_name(name).map_err(|_| failure("--name holds a zero byte"))?;
    }
    let registry = devices::registry(Duration::ZERO);
    let host = TranslationContext {
        known: &|layer| registry.layer_or_gate(layer).is_ok(),
        plugins: plugin_host::plugin_folder(),
        filters: plugin_host::filter_folder(),
        hosts: &plugin_host::hosts_filter,
    };
    match line.ask {
        Some("long-options") => return answer(&getopt::whole_long_list(OPTIONS)),
        Some("short-options") => return answer(&getopt::short_list(OPTIONS)),
        Some("help") => return answer(&help(&line, &host, &registry)?),
        Some("version") => return answer(&version(&line, &host)?),
        Some("dump-config") => return answer(&dump_config(&host)),
        Some(_) if is_our_python(&line, &host) => return dump_python(&line),
        Some(_) => return dump_plugin(&line),
        None => {}
    }
    if line.plugin.is_none() {
        return Err(failure("no plugins given on the command line; see nbdkit --help"));
    }
    if !line.foreground && !in_background && !serve::is_activated() {
        let mut again: Vec<OsString> = vec!["compat".into(), "nbdkit".into(), IN_BACKGROUND.into()];
        again.extend(words.iter().cloned());
        return serve::again_in_background(&again);
    }
    if line.verbose {
        log::debug(&format!("nbdkit {VERSION}"));
    }
    if line
        .debug
        .iter()
        .any(|(name, flag, value)| name == "nbdkit" && flag == "environ" && *value != 0)
    {
        log::environment();
    }
    let flags = line.debug.clone();
    let plugin = line.plugin.clone().unwrap_or_default();
    let words = serve_words(line, in_background, &host);
    check_plugin(&words, &plugin, &flags, &host)?;
    let (cli, groups) = own(words)?;
    let CliCommand::Serve(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    serve::run(*args, &groups)
}

fn log_failure(line: &NbdkitCommand, error: &std::io::Error) -> CommandFailure {
    match &line.log {
        LogDestination::File(path) => {
            failure(format!("{}: {}", path.display(), crate::exit::plain(error)))
        }
        _ => failure(crate::exit::plain(error)),
    }
}

/// Reports flags that nothing uses, and parameters for which only nbdkit's plugin would do.
fn check_plugin(
    words: &[OsString],
    plugin: &str,
    flags: &[(String, String, i32)],
    host: &TranslationContext<'_>,
) -> Result<(), CommandFailure> {
    let device = words.last().map(|word| word.to_string_lossy()).unwrap_or_default();
    if !device.starts_with("nbdkit:") {
        for (name, flag, _) in flags.iter().filter(|(name, ..)| name != "nbdkit") {
            log::warning(&format!("debug flag -D {name}.{flag} was not used"));
        }
        return Ok(());
    }
    if own_plugin(plugin).is_some() && !host.has_plugin(plugin) && !device.contains("@filter=") {
        return Err(failure(format!(
            "plugin {plugin}: nbdkit's plugin is not installed, and blockhaul's own does not take these \
             parameters, or not all of these values; see nbdkit {plugin} --help"
        )));
    }
    Ok(())
}

fn wrong(error: &blockhaul_block::Error) -> CommandFailure {
    failure(error.to_string())
}

/// Whether our own host runs plugins in Python, because nbdkit's plugin is not installed.
fn is_our_python(line: &NbdkitCommand, host: &TranslationContext<'_>) -> bool {
    line.plugin.as_deref() == Some("python") && !host.has_plugin("python")
}

/// The description of a plugin in Python by our own host.
fn dump_python(line: &NbdkitCommand) -> CommandResult {
    let mut script = None;
    let mut config = Vec::new();
    for (key, value) in &line.parameters {
        match key.as_deref() {
            None | Some("script") if script.is_none() => script = Some(value.clone()),
            Some(key) => config.push((key.to_string(), value.clone())),
            None => return Err(failure(format!("{value:?}: write it as KEY=VALUE"))),
        }
    }
    let Some(script) = script else { return answer(&blockhaul_python::dump_without_script()) };
    let settings = blockhaul_python::PythonSettings {
        config,
        ..blockhaul_python::PythonSettings::new(script)
    };
    answer(&blockhaul_python::dump(&settings).map_err(|error| wrong(&error))?)
}

/// The descriptions of plugin and filters of the line, filters first, outermost first. `ours`: those
/// of our own layers and plugins.
fn described<T>(
    line: &NbdkitCommand,
    host: &TranslationContext<'_>,
    layer: impl Fn(&str, &str) -> T,
    plugin: impl Fn(&OwnPlugin) -> T,
    theirs: impl Fn(plugin_host::PluginDescription) -> T,
) -> Result<Vec<T>, CommandFailure> {
    let mut all = Vec::new();
    for filter in &line.filters {
        all.push(match host.own_layer(filter, &line.parameters) {
            Some(name) => layer(filter, name),
            None => theirs(plugin_host::about_filter(filter).map_err(|error| wrong(&error))?),
        });
    }
    if let Some(name) = &line.plugin {
        all.push(match host.own_plugin(name) {
            Some(own) => plugin(own),
            None => theirs(plugin_host::about(name).map_err(|error| wrong(&error))?),
        });
    }
    Ok(all)
}

fn help(
    line: &NbdkitCommand,
    host: &TranslationContext<'_>,
    registry: &Registry,
) -> Result<String, CommandFailure> {
    let layer = |filter: &str, layer: &str| layer_help(filter, layer, registry);
    let plugin = |own: &OwnPlugin| {
        format!("\nplugin: {} (a device of blockhaul)\n{}", own.name, ended(own.help))
    };
    let parts = described(line, host, layer, plugin, |about| about_help(&about))?;
    Ok(HELP.to_string() + &parts.concat())
}

/// A filter that is a layer, with its parameters by their names in nbdkit.
fn layer_help(filter: &str, layer: &str, registry: &Registry) -> String {
    let mut text = format!("\nfilter: {filter} (a layer of blockhaul)\n");
    let Ok(kind) = registry.kind(layer) else { return text };
    text += &ended(kind.summary());
    for (name, option) in filter_keys(filter) {
        let option = option.split(',').next().unwrap_or(option);
        let Some(param) = kind.params().iter().find(|param| param.name == option) else { continue };
        text += &format!("{name}=<{}>\n    {}\n", param.kind.placeholder(), param.doc);
    }
    text
}

/// A plugin or filter of nbdkit.
fn about_help(about: &plugin_host::PluginDescription) -> String {
    let name = match &about.longname {
        Some(longname) => format!("{} ({longname})", about.name),
        None => about.name.clone(),
    };
    let mut text = format!("\n{}: {name}\n({})\n", about.what, about.path.display());
    for part in [&about.description, &about.config_help].into_iter().flatten() {
        text += &ended(part);
    }
    text
}

/// The text with one newline at its end; nothing for an empty one.
fn ended(text: &str) -> String {
    let text = text.trim_end();
    if text.is_empty() { String::new() } else { format!("{text}\n") }
}

fn version(line: &NbdkitCommand, host: &TranslationContext<'_>) -> Result<String, CommandFailure> {
    let ours = |name: &str| format!("{name} {VERSION}\n");
    let theirs = |about: plugin_host::PluginDescription| {
        let version = about.version.map(|version| format!(" {version}")).unwrap_or_default();
        format!("{}{version}\n", about.name)
    };
    let parts = described(line, host, |filter, _| ours(filter), |own| ours(own.name), theirs)?;
    Ok(ours("nbdkit") + &parts.concat())
}

fn dump_plugin(line: &NbdkitCommand) -> CommandResult {
    if line.single {
        return Err(failure("--dump-plugin and -s exclude each other"));
    }
    let Some(plugin) = &line.plugin else {
        return Err(failure("--dump-plugin requires a plugin; see nbdkit --help"));
    };
    let settings = plugin_host::PluginSettings {
        plugin: plugin.clone(),
        config: line.parameters.clone(),
        filters: line.filters.clone(),
        ..plugin_host::PluginSettings::default()
    };
    plugin_host::print_dump(&settings).map_err(|error| wrong(&error))?;
    Ok(0)
}
