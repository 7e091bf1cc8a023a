//! `nbdkit`, by `blockhaul serve`.

use std::ffi::OsString;
use std::time::Duration;

use blockhaul_command_lines::getopt;
use blockhaul_command_lines::nbdkit::{
    HELP, Host, IN_BACKGROUND, Line, OPTIONS, VERSION, dump_config, serve_words,
};

use super::nbdkit_log as log;
use super::stand_in::{answer, failure, own};
use crate::args::Command;
use crate::exit::{FAILED, Failure, Outcome};
use crate::{devices, plugin_host, serve};

/// Runs nbdkit with these words. Errors have nbdkit's form.
pub fn run(words: &[OsString]) -> Outcome {
    start(words).or_else(|failure| {
        log::error(&failure.to_string());
        match failure.status() {
            // Like a shell for a program that was ended by a signal.
            status @ 128.. => Ok(status),
            _ => Ok(FAILED),
        }
    })
}

fn start(words: &[OsString]) -> Outcome {
    let (in_background, words) = match words {
        [first, rest @ ..] if first == IN_BACKGROUND => (true, rest),
        words => (false, words),
    };
    let line = Line::parse(words).map_err(|text| failure(format!("{text}; see nbdkit --help")))?;
    log::start(&line, in_background);
    let registry = devices::registry(Duration::ZERO);
    let host = Host {
        known: &|layer| registry.layer_or_gate(layer).is_ok(),
        plugins: plugin_host::plugin_folder(),
        filters: plugin_host::filter_folder(),
    };
    match line.ask {
        Some("long-options") => return answer(&getopt::long_list(OPTIONS)),
        Some("short-options") => return answer(&getopt::short_list(OPTIONS)),
        Some("help") => return answer(&help(&line, &host)?),
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
    let (cli, groups) = own(serve_words(line, in_background, &host))?;
    let Command::Serve(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    serve::run(&args, &groups)
}

fn wrong(error: &blockhaul_block::Error) -> Failure {
    failure(error.to_string())
}

/// Whether our own host runs plugins in Python, because nbdkit's plugin is not installed.
fn is_our_python(line: &Line, host: &Host<'_>) -> bool {
    line.plugin.as_deref() == Some("python") && !host.has_plugin("python")
}

/// The description of a plugin in Python by our own host.
fn dump_python(line: &Line) -> Outcome {
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
    let settings = blockhaul_python::Settings { config, ..blockhaul_python::Settings::new(script) };
    answer(&blockhaul_python::dump(&settings).map_err(|error| wrong(&error))?)
}

/// What plugin and filters of the line say about themselves, filters first, outermost first.
fn described(line: &Line, host: &Host<'_>) -> Result<Vec<plugin_host::About>, Failure> {
    let ours = is_our_python(line, host);
    let filters = line.filters.iter().map(|filter| plugin_host::about_filter(filter));
    let plugin = line.plugin.iter().filter(|_| !ours).map(|plugin| plugin_host::about(plugin));
    filters.chain(plugin).collect::<Result<_, _>>().map_err(|error| wrong(&error))
}

fn help(line: &Line, host: &Host<'_>) -> Result<String, Failure> {
    let mut text = HELP.to_string();
    for about in described(line, host)? {
        let name = match &about.longname {
            Some(longname) => format!("{} ({longname})", about.name),
            None => about.name.clone(),
        };
        text += &format!("\n{}: {name}\n({})\n", about.what, about.path.display());
        for part in [&about.description, &about.config_help].into_iter().flatten() {
            text += part.trim_end();
            text.push('\n');
        }
    }
    Ok(text)
}

fn version(line: &Line, host: &Host<'_>) -> Result<String, Failure> {
    let mut text = format!("nbdkit {VERSION}\n");
    for about in described(line, host)? {
        let version = about.version.map(|version| format!(" {version}")).unwrap_or_default();
        text += &format!("{}{version}\n", about.name);
    }
    if is_our_python(line, host) {
        text += &format!("python {}\n", env!("CARGO_PKG_VERSION"));
    }
    Ok(text)
}

fn dump_plugin(line: &Line) -> Outcome {
    if line.single {
        return Err(failure("--dump-plugin and -s exclude each other"));
    }
    let Some(plugin) = &line.plugin else {
        return Err(failure("--dump-plugin requires a plugin; see nbdkit --help"));
    };
    let settings = plugin_host::Settings {
        plugin: plugin.clone(),
        config: line.parameters.clone(),
        filters: line.filters.clone(),
        ..plugin_host::Settings::default()
    };
    plugin_host::print_dump(&settings).map_err(|error| wrong(&error))?;
    Ok(0)
}
