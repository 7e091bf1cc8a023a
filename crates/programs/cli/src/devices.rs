//! The registry of devices and layers for all commands, and the help generated from it.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_catalog::{AnyKind, Backend, ConnectionSettings, Param, Registry};

use blockhaul_registry::{device_registry, layer_kinds};
#[cfg(feature = "fuse")]
pub use blockhaul_transfer::{make_layers, readonly, writes_below};

use crate::{manual, signals};

/// Everything that can be opened; connections are dropped after `timeout` without a byte (zero:
/// never), and a handshake at that time at the latest.
pub fn registry(timeout: Duration) -> Registry {
    registry_asking(timeout, 0, &[])
}

/// The same; connections slower than `min_rate` bytes per second are dropped (0: none), and servers
/// are asked for these metadata contexts, too.
pub fn registry_asking(timeout: Duration, min_rate: u64, contexts: &[String]) -> Registry {
    let contexts = contexts.to_vec();
    let registry =
        device_registry().connecting(&ConnectionSettings { timeout, min_rate, contexts });
    Registry { shutdown: signals::shutdown(), ..registry }
}

/// The same; nbdkit plugins run in separate processes.
pub fn isolated(mut registry: Registry, again: blockhaul_isolated::RestartPolicy) -> Registry {
    for backend in &mut registry.backends {
        if backend.runs_foreign_code() {
            *backend = blockhaul_isolated::isolated(backend.clone(), again);
        }
    }
    registry
}

/// The names of all layers that show existing contents, for the help.
pub fn names_over_content() -> String {
    let all = layer_kinds();
    let over: Vec<_> = all.iter().filter(|kind| kind.needs_content).map(|kind| kind.name).collect();
    over.join(", ")
}

/// The devices with their options, for the help.
pub fn devices_help() -> String {
    let registry = registry(Duration::ZERO);
    let mut text = String::from("DEVICES\n");
    text +=
        &entry("PATH", "a file or block device; the path is used as it is, without options", 26);
    text += &entry("-", "standard input or output, for copy only", 26);
    text += &entry(
        "[ CMD ARG… ]",
        "an NBD server, started for this run by systemd socket activation; if CMD is blockhaul, this \
         program is used",
        26,
    );
    for backend in &registry.backends {
        if !backend.schemes().contains(&registry.command) {
            text += &device_help(&**backend);
        }
    }
    text += "  Options of a device follow a question mark: file:PATH?key=value&key=value; there, and in \
             URIs,\n  %XX is a byte. Sizes: a number and b k m g t p e (base 1024, either case), KiB \
             MiB GiB TiB,\n  kB MB GB TB (base 1000), or s for sectors of 512 bytes; 1.5G is \
             1536M.\n  Rates are bytes per second, or bits with kbit Mbit Gbit (base 1000).\n";
    text
}

/// The layers and gates with their options, for the help.
pub fn layers_help() -> String {
    let kinds = registry(Duration::ZERO).layers_and_gates();
    format!("LAYERS\n{}", kinds.iter().map(layer_help).collect::<String>())
}

/// One device or layer with its options, by its scheme or name.
pub fn topic(name: &str) -> Option<String> {
    device_topic(name).or_else(|| layer_topic(name))
}

/// One device with its options, by its scheme.
pub fn device_topic(name: &str) -> Option<String> {
    let registry = registry(Duration::ZERO);
    let is_named =
        |backend: &&Arc<dyn Backend>| backend.schemes().contains(&name) && name != registry.command;
    registry.backends.iter().find(is_named).map(|backend| device_help(&**backend))
}

/// The line to write for a device that this program has as a plugin of nbdkit, or that QEMU serves.
pub fn device_hint(name: &str) -> Option<String> {
    let registry = registry(Duration::ZERO);
    let hint = registry.backends.iter().find_map(|backend| backend.instead_of(name, ""))?;
    Some(indented(&hint, 0))
}

/// One layer with its options and its manual, by its name.
pub fn layer_topic(name: &str) -> Option<String> {
    let kind = registry(Duration::ZERO).kind(name).ok()?;
    let manual = kind.manual().split("\n\n").map(|paragraph| indented(paragraph, 2));
    Some(format!("{}\n{}", layer_help(&kind), manual.collect::<Vec<_>>().join("\n")))
}

/// The names of all topics that [`topic`] knows.
pub fn topics() -> Vec<&'static str> {
    let registry = registry(Duration::ZERO);
    let schemes = registry.backends.iter().flat_map(|backend| backend.schemes().iter().copied());
    let schemes = schemes.filter(|scheme| *scheme != registry.command);
    schemes.chain(registry.layers_and_gates().iter().map(AnyKind::name)).collect()
}

fn device_help(backend: &dyn Backend) -> String {
    let mut text = String::new();
    let schemes = backend.schemes();
    let Some(scheme) = schemes.first() else { return text };
    text += &entry(&format!("{scheme}:{}", backend.operand()), backend.summary(), 26);
    if schemes.len() > 1 {
        let others = schemes.join(" ");
        text += &indented(&format!("schemes: {others}"), 28);
    }
    example(&mut text, backend.example());
    params(&mut text, backend.params());
    text
}

fn layer_help(kind: &AnyKind) -> String {
    let mut text = entry(kind.name(), kind.summary(), 26);
    example(&mut text, kind.example());
    params(&mut text, kind.params());
    text
}

/// Lines to be pasted, at the column by which [`crate::manual`] recognizes them.
fn example(text: &mut String, lines: &str) {
    for line in lines.trim().lines() {
        let _ = writeln!(text, "{:1$}{line}", "", manual::EXAMPLE);
    }
}

fn params(text: &mut String, params: &[Param]) {
    for param in params {
        let mut values = param.kind.placeholder();
        let mut doc = param.doc.trim_end_matches('.').to_string();
        // Many words do not fit into the name of the entry.
        if values.len() > 60 {
            doc = format!("{doc}: {}", values.replace('|', ", "));
            values = "NAME".into();
        }
        let head = format!("  {}={values}", param.name);
        let default = match param.default {
            None => String::new(),
            Some("") => " [default: empty]".to_string(),
            Some(value) => format!(" [default: {value}]"),
        };
        *text += &entry(&head, &format!("{doc}{default}"), 26);
    }
}

/// An entry of a list: a name, and its description from column `column` on.
pub fn entry(name: &str, what: &str, column: usize) -> String {
    let mut text = format!("  {name}");
    let body = indented(what, column);
    if name.chars().count() + 4 > column {
        text.push('\n');
        text += &body;
    } else {
        let used = text.chars().count();
        text += body.get(used..).unwrap_or(&body);
    }
    text
}

/// Text in lines of at most 100 columns, indented.
fn indented(what: &str, column: usize) -> String {
    let mut text = String::new();
    let mut line = String::new();
    for word in what.split_whitespace() {
        if !line.is_empty() && column + line.chars().count() + 1 + word.chars().count() > 100 {
            let _ = writeln!(text, "{:column$}{line}", "");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    let _ = writeln!(text, "{:column$}{line}", "");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_every_device_and_layer_and_keeps_its_width() {
        let text = devices_help() + &layers_help();
        for name in ["memory:SIZE", "pattern:", "nbd+unix", "[ CMD ARG… ]", "readonly"] {
            assert!(text.contains(name), "{name} in {text}");
        }
        for name in topics() {
            let text = topic(name).unwrap();
            assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        }
        assert_eq!(topic("what"), None);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    }

    #[test]
    fn no_two_devices_share_a_scheme() {
        let registry = registry(Duration::ZERO);
        let mut schemes: Vec<_> =
            registry.backends.iter().flat_map(|backend| backend.schemes()).collect();
        let count = schemes.len();
        schemes.sort();
        schemes.dedup();
        assert_eq!(schemes.len(), count);
    }
}
