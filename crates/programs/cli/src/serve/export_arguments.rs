//! The exports of the command line of `serve`.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use blockhaul_catalog::{DeviceSpec, Registry, percent_decode};
use blockhaul_jobs::{BitmapFiles, ExportConfig, ExportTableConfig, JobFiles, intent};
use blockhaul_server_config::ServerConfigFile;
use blockhaul_transfer::{FileUse, format_warning};

use crate::args::{self, ServeExport};
use crate::brackets::{self, Groups, NamedDevice};
use crate::copy::copy_options;
use crate::exit::CommandFailure;
use crate::image_format;

/// The exports of a command line, or of a configuration file; nothing is opened yet.
pub fn export_config(
    args: &args::ServeArgs,
    groups: &Groups,
    registry: Registry,
    file: Option<&ServerConfigFile>,
) -> Result<ExportTableConfig, CommandFailure> {
    let mut exports = Vec::new();
    let mut name = None;
    for word in &args.export {
        match brackets::named(word) {
            Some((name, device)) => {
                exports.push(parse_one(name, device, groups, args)?);
            }
            None if name.is_some() => {
                let text =
                    "two names for one device: use --export NAME=DEVICE for a further export";
                return Err(CommandFailure::usage(text));
            }
            None => name = Some(text(word)?),
        }
    }
    match (&args.device, name) {
        (Some(device), name) => exports.insert(
            0,
            ExportConfig {
                name: name.unwrap_or_default().to_string(),
                description: args.description.clone(),
                spec: groups.spec(device)?,
                intent: intent(args.readonly),
                layers: args.image.partition.layer().into_iter().collect(),
            },
        ),
        (None, Some(name)) => {
            let text = format!("no device given: write --export {name}=DEVICE");
            return Err(CommandFailure::usage(text));
        }
        (None, None) if !args.description.is_empty() => {
            let text = "--description applies to DEVICE; in brackets, each export has its own";
            return Err(CommandFailure::usage(text));
        }
        (None, None) => {}
    }
    for one in &mut exports {
        one.spec = image_format::chosen(one.spec.clone(), &args.image)?;
    }
    if args.any_name && exports.len() > 1 {
        return Err(CommandFailure::usage("--any-name requires a single export"));
    }
    if args.per_client && exports.iter().any(|one| matches!(one.spec, DeviceSpec::Command(_))) {
        let text = "--per-client cannot be used with a server in brackets, which is started once";
        return Err(CommandFailure::usage(text));
    }
    let layers = args.layer.clone();
    let any_name = args.any_name;
    let per_client = args.per_client;
    let trace = args.trace;
    let bitmap_files = args.bitmaps.as_deref().map(BitmapFiles::new).transpose()?;
    let job_files = args.job_state.as_deref().map(JobFiles::new).transpose()?.map(Arc::new);
    let mut wanted = ExportTableConfig {
        registry,
        exports,
        layers,
        any_name,
        full_names: file.is_some(),
        per_client,
        trace,
        bitmap_files,
        job_files,
        on_copy: copy_options::warn_of_formats,
    };
    if let Some(file) = file {
        file.describe_exports(&mut wanted)?;
    }
    wanted.check()?;
    for one in &wanted.exports {
        let layered = !one.layers.is_empty() || !wanted.layers.is_empty();
        if let Some(text) = format_warning(&one.spec, layered, FileUse::Served) {
            log::warn!("{text}");
        }
    }
    Ok(wanted)
}

/// `NAME=DEVICE`, or `NAME=[ DEVICE OPTION… ]`.
fn parse_one(
    name: &str,
    device: &OsStr,
    groups: &Groups,
    args: &args::ServeArgs,
) -> Result<ExportConfig, CommandFailure> {
    let (name, options, inner) = parse_named::<ServeExport>(name, device, groups)?;
    let partition = options.partition.layer().or(args.image.partition.layer());
    Ok(ExportConfig {
        spec: inner.spec(&options.device)?,
        description: options.description,
        intent: intent(args.readonly || options.readonly),
        layers: partition.into_iter().chain(options.layer).collect(),
        name,
    })
}

/// The decoded name of `NAME=DEVICE` or `NAME=[ DEVICE OPTION… ]`, the command line of its own, and the
/// groups in it.
pub fn parse_named<T: clap::Parser>(
    name: &str,
    device: &OsStr,
    groups: &Groups,
) -> Result<(String, T, Groups), CommandFailure> {
    let name = percent_decode(name)?;
    let place = |text: &str| {
        let shown = blockhaul_wire::printable(name.as_bytes(), 256);
        CommandFailure::usage(format!("--export {shown}: {text}"))
    };
    let NamedDevice { words, groups } = groups.named_device(device).map_err(|why| place(&why))?;
    let options = T::try_parse_from(words).map_err(|error| {
        let text = brackets::readable(&error.render().to_string());
        let what = text.lines().map(str::trim).take_while(|line| !line.is_empty());
        place(what.collect::<Vec<_>>().join(" ").trim_start_matches("error: "))
    })?;
    Ok((name, options, groups))
}

fn text(word: &OsString) -> Result<&str, CommandFailure> {
    word.to_str().ok_or_else(|| CommandFailure::usage("the name of an export is not UTF-8"))
}
