//! The command line of nbdkit as that of `blockhaul serve`.
//!
//! - `line`: the command line; `parameter_file`: files of parameters. `plugins`, `filters`: which
//!   become a device or a layer, and which are hosted; `natives`: parameters of plugins as options of
//!   devices; `own`: what `--help` says about plugins that are devices.

mod filters;
mod line;
mod natives;
mod own;
mod parameter_file;
mod plugins;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub use filters::{keys as filter_keys, layer_name};
pub use line::{IN_BACKGROUND, LogDestination, NbdkitCommand, OPTIONS, PluginParameter};
pub use own::{OwnPlugin, VERSION, own_plugin};

use crate::words;

/// The output of `--help`, without the parts of plugin and filters.
pub const HELP: &str = "\
Serves a block device made by a plugin to NBD clients.

    nbdkit [OPTIONS] PLUGIN [[KEY=]VALUE | @FILE]…
    nbdkit --dump-config
    nbdkit PLUGIN --dump-plugin

This is blockhaul, with the command line of nbdkit.

    -4, --ipv4-only; -6, --ipv6-only
                            listen on addresses of one family
    -D, --debug=NAME.FLAG=N set a global variable of a plugin or filter
    -e, --exportname=NAME   export name for $uri and --print-uri
    --exit-with-parent      exit when the parent process exits
    --filter=FILTER         put a filter over the plugin; the first is outermost
    -f, --foreground        stay in the foreground
    -g, --group=GROUP; -u, --user=USER
                            change to this group and user once listening
    -i, --ipaddr=ADDR; -p, --port=PORT
                            listen on TCP
    --log=default|stderr|syslog|null|/FILE
                            where to write errors
    --mask-handshake=MASK, --no-mc, --no-sr
                            offer fewer features, for tests of clients
    --name=NAME             name of this server in its messages
    -n, --newstyle          use the newstyle handshake (default)
    -o, --oldstyle          use the oldstyle handshake
    -P, --pidfile=FILE      write the process ID when ready
    --print-uri             print the URI for clients
    -r, --readonly          serve read-only
    --run=COMMAND           run a command while serving; it gets $uri, $unixsocket, $port, $exportname
    --selinux-label=LABEL   SELinux label of the sockets
    -s, --single            serve one client on standard input and output
    --swap                  lock all memory
    -t, --threads=N         parallel calls of a plugin
    --timeout=TIME          time limit for the handshake
    --tls=off|on|require, --tls-certificates=DIR, --tls-psk=FILE, --tls-verify-peer
    --tls-priority=PRIORITY GnuTLS's string; only ones that forbid nothing are accepted
    -U, --unix=SOCKET       listen on a Unix socket; -: a private one
    -v, --verbose           print more detail
    -V, --version           print the version of nbdkit that this implements
    --vsock                 listen for virtual machines, on --port

See `blockhaul serve --help` for further options.
";

/// What the translation needs to know about the program that runs the words.
pub struct TranslationContext<'a> {
    /// Whether a layer or gate with these parameters is valid.
    pub known: &'a dyn Fn(&str) -> bool,
    /// The folder of nbdkit's plugins.
    pub plugins: PathBuf,
    /// The folder of nbdkit's filters.
    pub filters: PathBuf,
    /// Whether nbdkit's filter of this name is installed, and can be hosted.
    pub hosts: &'a dyn Fn(&str) -> bool,
}

impl TranslationContext<'_> {
    /// Whether nbdkit's plugin of this name is installed, or the name is a path.
    pub fn has_plugin(&self, name: &str) -> bool {
        let is_path = name.contains(['/', '.']);
        let file = |suffix: &str| self.plugins.join(format!("nbdkit-{name}-plugin{suffix}"));
        is_path || file(".so").exists() || file("").exists()
    }

    /// Our device for a plugin, unless the plugin itself is preferred.
    pub fn own_plugin(&self, name: &str) -> Option<&'static OwnPlugin> {
        own_plugin(name).filter(|own| !own.is_substitute || !self.has_plugin(name))
    }

    /// Our layer for a filter with these parameters. `None`: there is none, or scripts can distinguish
    /// it from the filter, and that is installed and can be hosted.
    pub fn own_layer(&self, filter: &str, parameters: &[PluginParameter]) -> Option<&'static str> {
        let is_preferred = |_: &&str| filters::differs(filter, parameters) && (self.hosts)(filter);
        layer_name(filter).filter(|layer| !is_preferred(layer))
    }
}

/// The equivalent command line of `blockhaul serve`.
pub fn serve_words(
    mut line: NbdkitCommand,
    in_background: bool,
    host: &TranslationContext<'_>,
) -> Vec<OsString> {
    let mut words = words(&["blockhaul", "serve"]);
    words.extend(std::mem::take(&mut line.serve));
    // Scripts compare flags and error texts of clients with nbdkit's.
    let like_nbdkit = [
        "--any-name",
        "--no-extended",
        "--no-block-sizes",
        "--hangup-stops",
        "--no-locks",
        "--quiet",
        "--as-nbdkit",
    ];
    words.extend(like_nbdkit.map(OsString::from));
    // nbdkit's limit for reads and writes.
    words.push("--limit=payload=64M".into());
    if line.verbose {
        // In nbdkit's format.
        words.push("--trace".into());
    }
    words.push(if in_background { "--in-background" } else { "--foreground" }.into());
    let mut filters = std::mem::take(&mut line.filters);
    filters::drop_idle(&mut filters, &mut line.parameters);
    let flags: Vec<String> = line.debug.iter().map(|(name, _, _)| name.clone()).collect();
    let (layers, hosted) = layers_and_hosted(&filters, &mut line.parameters, &flags, host);
    words.extend(layers.iter().rev().map(|layer| format!("--layer={layer}").into()));
    // Only the plugin checks later, per client, whether another user may write to a file; not if it
    // is already open.
    let is_user = |word: &OsString| word.as_encoded_bytes().starts_with(b"--user=");
    let is_fd = |(key, _): &line::PluginParameter| key.as_deref() == Some("fd");
    let as_other = matches!(line.plugin.as_deref(), Some("file" | "split"))
        && words.iter().any(is_user)
        && !line.parameters.iter().any(is_fd);
    // Only the plugin itself has variables for debugging.
    let is_debugged = |name: &str| flags.iter().any(|flag| flag == name) && host.has_plugin(name);
    let is_debugged = line.plugin.as_deref().is_some_and(is_debugged);
    let native =
        if hosted.is_empty() && !is_debugged && !as_other { plugins::native(&line) } else { None };
    // A thread of nbdkit has one request in progress in all filters and the plugin, so that the
    // number limits the requests of a connection, whatever serves them.
    if let Some(threads) = line.threads {
        words.push(format!("--threads={}", threads.min(65_536)).into());
    }
    if let (Some(plugin), Some(_)) = (line.plugin.as_deref(), &native) {
        if ["file", "split"].contains(&plugin) {
            // The plugins open their files for each client.
            words.push("--per-client".into());
        }
        if let Some(preferred) = plugins::preferred_block(plugin) {
            words.push(format!("--preferred-block={preferred}").into());
        }
    }
    words.push("--".into());
    let is_missing = line.plugin.as_deref().is_some_and(|name| !host.has_plugin(name));
    let native = native.or_else(|| {
        if hosted.is_empty() && is_missing { plugins::substitute(&line) } else { None }
    });
    words.push(native.unwrap_or_else(|| plugins::hosted(&line, hosted)));
    words
}

/// The layers in the place of filters, outermost first, and the filters that are hosted. `flags`: the
/// plugins and filters with debug flags, which only nbdkit's own know.
fn layers_and_hosted<'a>(
    filters: &'a [String],
    parameters: &mut Vec<line::PluginParameter>,
    flags: &[String],
    host: &TranslationContext<'_>,
) -> (Vec<String>, &'a [String]) {
    // The first filter is outermost and the first to be offered parameters. From the first hosted
    // one on all are hosted, as a hosted one calls the next.
    let mut layers = Vec::new();
    for (index, filter) in filters.iter().enumerate() {
        let is_preferred = host.own_layer(filter, parameters).is_none()
            || flags.contains(filter) && (host.hosts)(filter);
        let layer =
            if is_preferred { None } else { filters::layer(filter, parameters, host.known) };
        let Some(layer) = layer else {
            return (layers, &filters[index..]);
        };
        layers.push(layer);
    }
    (layers, &[])
}

/// The output of `--dump-config`.
pub fn dump_config(host: &TranslationContext<'_>) -> String {
    let program = std::env::current_exe().unwrap_or_else(|_| "/usr/bin/blockhaul".into());
    let folder = |path: &Path| path.parent().map(Path::to_path_buf).unwrap_or_default();
    let bin = folder(&program).display().to_string();
    let TranslationContext { plugins, filters, .. } = host;
    let lib = folder(&folder(plugins)).display().to_string();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(words: &[OsString]) -> Vec<OsString> {
        let known = |layer: &str| ["offset", "readonly"].iter().any(|name| layer.starts_with(name));
        let folder = PathBuf::from("/no/such/folder");
        let host = TranslationContext {
            known: &known,
            plugins: folder.clone(),
            filters: folder,
            hosts: &|_| false,
        };
        serve_words(NbdkitCommand::parse(words).unwrap(), false, &host)
    }

    fn device(text: &str) -> (String, Vec<String>) {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        let words = translated(&words);
        let words: Vec<String> =
            words.into_iter().map(|word| word.into_string().unwrap()).collect();
        let layers = words.iter().filter_map(|word| word.strip_prefix("--layer="));
        (words.last().unwrap().clone(), layers.map(str::to_string).collect())
    }

    #[test]
    fn what_is_understood_is_native_and_the_rest_is_hosted() {
        assert_eq!(device("memory 1G").0, "memory:1G");
        assert_eq!(
            device("memory size=1G allocator=malloc").0,
            "nbdkit:memory?size=1G&allocator=malloc"
        );
        assert_eq!(device("null").0, "null:0");
        assert_eq!(device("pattern 1M").0, "nbdkit:pattern?1M");
        assert_eq!(device("-r pattern 1M").0, "pattern:1M");
        assert_eq!(device("-t 4 perl script").0, "nbdkit:perl?@threads=4&script");
        // Where nbdkit's plugins are not installed.
        assert_eq!(device("sh script a=b&c").0, "sh:script?a=b%26c");
        assert_eq!(device("python x.py").0, "python:x.py");
        assert_eq!(device("-t 4 python script=x.py a=b&c").0, "python:x.py?@threads=4&a=b%26c");
        assert_eq!(device("python x.py bare").0, "nbdkit:python?x.py&bare");
        assert_eq!(device("file /no/such").0, "file:/no/such");
        assert_eq!(device("eval get_size=echo%1M").0, "eval:get_size=echo%251M");
        assert_eq!(device("random 1M seed=7").0, "random:1M?seed=7");
        assert_eq!(device("random size=1M").0, "random:1M");
        assert_eq!(device("zero").0, "zero:0");
        assert_eq!(device("zero 1M").0, "nbdkit:zero?1M");
        assert_eq!(device("file dir=/no/such cache=none").0, "dir:/no/such?links=on");
        assert_eq!(device("file fd=77 fadvise=random").0, "file:?fd=77");
        assert_eq!(device("file /a rdelay=1").0, "nbdkit:file?/a&rdelay=1");
        assert_eq!(device("-D nbdkit.backend.datapath=0 -D null.x=1 null").0, "null:0");
        assert_eq!(device("nbd nbd://h/e").0, "nbd://h/e");
        assert_eq!(device("nbd hostname=::1 export=a%").0, "nbd://[::1]:10809/a%25");
        assert_eq!(device("nbd socket=/s k export=a").0, "nbdkit:nbd?socket=/s&k&export=a");
        assert_eq!(device("nbd socket=/s export=a").0, "nbd+unix:///a?socket=/s");
        assert_eq!(device("nbd uri=nbd://h/ retry=5").0, "nbdkit:nbd?uri=nbd://h/&retry=5");
        assert_eq!(device("./x.so a=b%").0, "nbdkit:./x.so?a=b%25");
    }

    #[test]
    fn threads_limit_the_requests_of_a_connection_whatever_serves_them() {
        for plugin in ["memory 1M", "sh script", "perl script", "--filter=delay null"] {
            let words: Vec<OsString> =
                format!("-t 3 {plugin}").split_whitespace().map(OsString::from).collect();
            let words = translated(&words);
            assert!(words.contains(&"--threads=3".into()), "{plugin}: {words:?}");
        }
    }

    #[test]
    fn filters_are_layers_from_the_outside_as_far_as_they_can_be() {
        let (device, layers) =
            device("--filter=offset --filter=readonly memory 1M offset=1k range=2k");
        assert_eq!(
            (device.as_str(), layers),
            ("memory:1M", vec!["readonly".to_string(), "offset?offset=1k&range=2k".to_string()])
        );
        let (device, layers) = super::tests::device(
            "--filter=readonly --filter=what --filter=offset memory 1M offset=1",
        );
        assert_eq!(layers, ["readonly"]);
        assert_eq!(device, "nbdkit:memory?@filter=what&@filter=offset&1M&offset=1");
    }
}
