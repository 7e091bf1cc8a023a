//! `nbdkit`: its command line, carried out by `blockhaul serve`.
//!
//! - `line`: the command line. `plugins`, `filters`: which become a device or a layer, and which
//!   are hosted; `natives`: parameters of plugins as options of devices.
//! - `about`: information about the program, plugins and filters. `log`: the destination of errors.

mod about;
mod filters;
mod line;
mod log;
mod natives;
mod plugins;

use std::ffi::OsString;

use super::options;
use super::stand_in::{answer, failure, own};
use crate::args::Command;
use crate::exit::{FAILED, Failure, Outcome};
use crate::{devices, serve};
use line::{IN_BACKGROUND, Line, OPTIONS};

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
    match line.ask {
        Some("long-options") => return answer(&options::long_list(OPTIONS)),
        Some("short-options") => return answer(&options::short_list(OPTIONS)),
        Some(ask) => return about::answer(ask, &line),
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
        log::debug(&format!("nbdkit {}", about::VERSION));
    }
    if line
        .debug
        .iter()
        .any(|(name, flag, value)| name == "nbdkit" && flag == "environ" && *value != 0)
    {
        log::environment();
    }
    let (cli, groups) = own(serve_words(line, in_background)?)?;
    let Command::Serve(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    serve::run(&args, &groups)
}

/// The equivalent command line of `blockhaul serve`.
fn serve_words(mut line: Line, in_background: bool) -> Result<Vec<OsString>, Failure> {
    let registry = devices::registry(std::time::Duration::ZERO);
    let known = |layer: &str| registry.layer_or_gate(layer).is_ok();
    let mut words: Vec<OsString> = vec!["blockhaul".into(), "serve".into()];
    words.extend(std::mem::take(&mut line.serve));
    // Scripts compare flags and error texts of clients with nbdkit's.
    let like_nbdkit =
        ["--any-name", "--no-extended", "--no-block-sizes", "--hangup-stops", "--no-locks"];
    words.extend(like_nbdkit.map(OsString::from));
    // nbdkit's limit for reads and writes.
    words.push("--limit=payload=64M".into());
    if line.verbose {
        // In nbdkit's format.
        words.push("--trace".into());
    }
    words.push(if in_background { "--in-background" } else { "--foreground" }.into());
    // The first filter is outermost and the first to be offered parameters. From the first hosted
    // one on all are hosted, as a hosted one calls the next.
    let mut filters = std::mem::take(&mut line.filters);
    filters::drop_idle(&mut filters, &mut line.parameters);
    let mut layers = Vec::new();
    let mut hosted: &[String] = &[];
    let flags = line.debug.iter().any(|(name, _, _)| name != "nbdkit");
    for (index, filter) in filters.iter().enumerate() {
        let layer = match flags {
            true => None,
            // If scripts can see a difference, use nbdkit's own filter, if it is installed.
            false if filters::differs(filter) && installed(filter) => None,
            false => filters::layer(filter, &mut line.parameters, &known),
        };
        let Some(layer) = layer else {
            hosted = &filters[index..];
            break;
        };
        layers.push(layer);
    }
    words.extend(layers.iter().rev().map(|layer| format!("--layer={layer}").into()));
    // Only the plugin checks later, per client, whether another user may write to a file; not if it
    // is already open.
    let is_user = |word: &OsString| word.as_encoded_bytes().starts_with(b"--user=");
    let is_fd = |(key, _): &line::Parameter| key.as_deref() == Some("fd");
    let as_other = matches!(line.plugin.as_deref(), Some("file" | "split"))
        && words.iter().any(is_user)
        && !line.parameters.iter().any(is_fd);
    let native = match hosted.is_empty() && !flags && !as_other {
        true => plugins::native(&line),
        false => None,
    };
    if let (Some(threads), Some(_)) = (line.threads, &native) {
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
    words.push(native.unwrap_or_else(|| plugins::hosted(&line, hosted)));
    Ok(words)
}

fn installed(filter: &str) -> bool {
    crate::plugin_host::filter_folder().join(format!("nbdkit-{filter}-filter.so")).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(text: &str) -> (String, Vec<String>) {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        let words = serve_words(Line::parse(&words).unwrap(), false).unwrap();
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
        assert_eq!(device("-t 4 sh script").0, "nbdkit:sh?@threads=4&script");
        assert_eq!(device("./x.so a=b%").0, "nbdkit:./x.so?a=b%25");
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
