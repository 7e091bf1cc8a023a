//! Information options: `--help`, `--version`, `--dump-config`, `--dump-plugin`.

use std::path::Path;

use super::line::Line;
use crate::compat::stand_in::{self, failure};
use crate::exit::{Failure, Outcome};

/// The emulated version of nbdkit, which scripts compare.
pub(super) const VERSION: &str = "1.42.3";

const HELP: &str = "\
Serves a block device made by a plugin to NBD clients.

    nbdkit [OPTIONS] PLUGIN [[KEY=]VALUE…]
    nbdkit --dump-config
    nbdkit PLUGIN --dump-plugin

This is blockhaul in the place of nbdkit.

    -4, --ipv4-only; -6, --ipv6-only
                            listen on addresses of one family
    -D, --debug=NAME.FLAG=N set a global variable of a plugin or filter
    -e, --exportname=NAME   the name in $uri and --print-uri
    --exit-with-parent      end when the process that started this one ends
    --filter=FILTER         put a filter over the plugin; the first is outermost
    -f, --foreground        stay in the foreground
    -g, --group=GROUP; -u, --user=USER
                            change to this group and user when listening
    -i, --ipaddr=ADDR; -p, --port=PORT
                            listen on TCP
    --log=stderr|syslog|null
                            where errors go
    --mask-handshake=MASK, --no-mc, --no-sr
                            offer less, for tests of clients
    -n, --newstyle          greet clients as is usual (default)
    -o, --oldstyle          greet clients that know no negotiation
    -P, --pidfile=FILE      write the process id when ready
    --print-uri             print the URI for clients
    -r, --readonly          let nobody change anything
    --run=COMMAND           run a command while serving; it sees $uri, $unixsocket, $port, $exportname
    --selinux-label=LABEL   label of the sockets that are listened on
    -s, --single            serve the client at standard input and output
    --swap                  keep all memory
    -t, --threads=N         calls of a plugin at the same time
    --timeout=TIME          what a client has for the handshake
    --tls=off|on|require, --tls-certificates=DIR, --tls-psk=FILE, --tls-verify-peer
    -U, --unix=SOCKET       listen on a Unix socket; - for a private one
    -v, --verbose           say what is going on
    -V, --version           the version of nbdkit that this one follows
    --vsock                 listen for virtual machines, on --port

`blockhaul serve --help` tells of what else can be done.
";

/// Answers one of those options.
pub fn answer(ask: &str, line: &Line) -> Outcome {
    let text = match ask {
        "help" => help(line)?,
        "version" => version(line)?,
        "dump-config" => dump_config(),
        _ => return dump_plugin(line),
    };
    stand_in::answer(&text)
}

fn wrong(error: &blockhaul_block::Error) -> Failure {
    failure(error.to_string())
}

/// What plugin and filters of the line say about themselves, filters first, outermost first.
fn described(line: &Line) -> Result<Vec<crate::plugin_host::About>, Failure> {
    let filters = line.filters.iter().map(|filter| crate::plugin_host::about_filter(filter));
    let plugin = line.plugin.iter().map(|plugin| crate::plugin_host::about(plugin));
    filters.chain(plugin).collect::<Result<_, _>>().map_err(|error| wrong(&error))
}

fn help(line: &Line) -> Result<String, Failure> {
    let mut text = HELP.to_string();
    for about in described(line)? {
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

fn version(line: &Line) -> Result<String, Failure> {
    let mut text = format!("nbdkit {VERSION}\n");
    for about in described(line)? {
        let version = about.version.map(|version| format!(" {version}")).unwrap_or_default();
        text += &format!("{}{version}\n", about.name);
    }
    Ok(text)
}

fn dump_plugin(line: &Line) -> Outcome {
    if line.single {
        return Err(failure("--dump-plugin and -s exclude each other"));
    }
    let Some(plugin) = &line.plugin else {
        return Err(failure("--dump-plugin needs a plugin; see nbdkit --help"));
    };
    let settings = crate::plugin_host::Settings {
        plugin: plugin.clone(),
        config: line.parameters.clone(),
        filters: line.filters.clone(),
        ..crate::plugin_host::Settings::default()
    };
    crate::plugin_host::print_dump(&settings).map_err(|error| wrong(&error))?;
    Ok(0)
}

fn dump_config() -> String {
    let program = std::env::current_exe().unwrap_or_else(|_| "/usr/bin/blockhaul".into());
    let folder = |path: &Path| path.parent().map(Path::to_path_buf).unwrap_or_default();
    let bin = folder(&program).display().to_string();
    let plugins = crate::plugin_host::plugin_folder();
    let filters = crate::plugin_host::filter_folder();
    let lib = folder(&folder(&plugins)).display().to_string();
    let (major, minor) = VERSION.split_once('.').unwrap_or((VERSION, "0"));
    let minor = minor.split('.').next().unwrap_or("0");
    let rows: &[(&str, &str)] = &[
        ("binary", &program.display().to_string()),
        ("bindir", &bin),
        ("exit_with_parent", "yes"),
        ("filterdir", &filters.display().to_string()),
        ("host_cpu", std::env::consts::ARCH),
        ("host_os", "linux-gnu"),
        ("libdir", &lib),
        ("mandir", "/usr/share/man"),
        ("max_api_version", "2"),
        ("name", "nbdkit"),
        ("plugindir", &plugins.display().to_string()),
        ("root_tls_certificates_dir", "/etc/pki/nbdkit"),
        ("run_default_socket", "Unix"),
        ("sbindir", &bin),
        ("selinux", "no"),
        ("soext", "so"),
        ("sysconfdir", "/etc"),
        ("timeout_option", "yes"),
        ("tls", "yes"),
        ("version", VERSION),
        ("version_major", major),
        ("version_minor", minor),
        ("vsock_option", "yes"),
        ("zstd", "yes"),
    ];
    rows.iter().map(|(key, value)| format!("{key}={value}\n")).collect()
}
