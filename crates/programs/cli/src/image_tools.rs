//! `blockhaul create`, `measure`, `snapshot` and `info --chain`: commands about images.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, Error};
use blockhaul_catalog::{DeviceSpec, Intent, NamePolicy, OpenContext, Registry};
use blockhaul_formats::qcow2::describe::{Qcow2Description, describe, describe_chain};
use blockhaul_formats::qcow2::measure::measure;
use blockhaul_inspect::{image_link_json, image_link_text, snapshots_json, snapshots_text};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_transfer::{FileFormat, file_of, make_layers};
use serde_json::{Value, json};

use crate::args::{self, InfoChain, ListArgs};
use crate::brackets::Groups;
use crate::exit::{self, CommandFailure, CommandResult, plain};
use crate::image_format::{self, ReadDevice};
use crate::{devices, logger, out};

/// Maximum time to connect to a server that has the image.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs `work` on a worker.
pub(crate) fn run<T, F>(
    work: impl FnOnce(Registry) -> F + Send + 'static,
) -> Result<T, CommandFailure>
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    logger::start_unless_started();
    let registry = devices::registry(TIMEOUT).for_command();
    let runtime = Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() })
        .map_err(|error| {
            CommandFailure::new(exit::FAILED, format!("cannot start workers: {}", plain(&error)))
        })?;
    Ok(runtime.block_on(move || work(registry)))
}

/// Opens a device, and runs `work` with it on a worker. `role`: how messages call the device.
pub(crate) fn with_device<T, F>(
    role: &str,
    spec: DeviceSpec,
    intent: Intent,
    work: F,
) -> Result<T, CommandFailure>
where
    T: Send + 'static,
    F: AsyncFnOnce(Arc<dyn Device>) -> Result<T, Error> + Send + 'static,
{
    with_layers(role, ReadDevice { spec, layers: Vec::new() }, intent, work)
}

/// As [`with_device`], with layers.
fn with_layers<T, F>(
    role: &str,
    ReadDevice { spec, layers }: ReadDevice,
    intent: Intent,
    work: F,
) -> Result<T, CommandFailure>
where
    T: Send + 'static,
    F: AsyncFnOnce(Arc<dyn Device>) -> Result<T, Error> + Send + 'static,
{
    let name = spec.to_string();
    let (result, open) = run(move |registry| async move {
        let opened = match make_layers(&registry, &layers) {
            Ok(layers) => registry.open(&spec, layers, intent).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok(stack) => (work(stack.device().clone()).await, Some(stack)),
            Err(error) => (Err(error), None),
        }
    })?;
    // Not on a worker: this waits for the servers of `[ CMD ]`.
    drop(open);
    result.map_err(|error| CommandFailure::opening(role, &name, &error))
}

/// The device that holds an image: `qcow2:PATH` means the image, not the disk in it.
pub(crate) fn holder(spec: DeviceSpec) -> Result<DeviceSpec, CommandFailure> {
    let spec = match spec {
        DeviceSpec::Scheme { scheme, rest } if scheme == "qcow2" => {
            if rest.contains('?') {
                return Err(CommandFailure::usage("give the path of the image alone"));
            }
            DeviceSpec::parse(rest.as_ref())?
        }
        spec => spec,
    };
    match blockhaul_transfer::path_of(&spec).and_then(|path| FileFormat::other_than(&path, "qcow2"))
    {
        Some(found) => Err(CommandFailure::usage(format!("{spec} is {found}, not a qcow2 image"))),
        None => Ok(spec),
    }
}

/// Runs `blockhaul create`.
pub fn create(args: &args::CreateArgs, groups: &Groups) -> CommandResult {
    let spec = groups.spec(&args.image)?;
    let existing = file_of(&spec).and_then(|path| std::fs::metadata(path).ok());
    if existing.is_some_and(|data| data.len() > 0) && !args.overwrite {
        let text =
            format!("{spec} exists and is not empty: choose another name, or add --overwrite");
        return Err(CommandFailure::new(exit::TARGET, text));
    }
    if let Some(text) = blockhaul_transfer::name_warning(None, &spec) {
        logger::warn(&text);
    }
    let name = spec.to_string();
    let size = args.size;
    let result = run(move |registry| async move { registry.create(&spec, size).await })?;
    result.map_err(|error| CommandFailure::opening("target", &name, &error))?;
    out::result(args.json, &json!({ "image": name, "size": size }), "")?;
    Ok(0)
}

/// Runs `blockhaul measure`.
pub fn run_measure(args: &args::MeasureArgs, groups: &Groups) -> CommandResult {
    let (required, full) = measured(args, groups)?;
    let text = if args.json {
        format!("{:#}\n", json!({ "required": required, "fully-allocated": full }))
    } else {
        format!("required size: {required}\nfully allocated size: {full}\n")
    };
    out::print(text.as_bytes())?;
    Ok(0)
}

/// The length of an image: with the data of now, and with data in all clusters.
fn measured(args: &args::MeasureArgs, groups: &Groups) -> Result<(u64, u64), CommandFailure> {
    let cluster = args.cluster;
    let is_raw = args.target == "raw";
    logger::start(false);
    let device = image_format::read_device(groups.spec(&args.source)?, &args.format)?;
    image_format::warn_of_read(&device);
    with_layers("source", device, Intent::READ, async move |device| {
        if is_raw {
            let size = device.facts().size;
            return Ok((size, size));
        }
        measure(&device, cluster).await.map(|found| (found.required, found.full))
    })
}

/// Describes the image that a word names.
pub(crate) fn description(
    args: &ListArgs,
    groups: &Groups,
) -> Result<Qcow2Description, CommandFailure> {
    let spec = holder(groups.spec(&args.image)?)?;
    with_device("image", spec, Intent::READ, async |device| describe(&device).await)
}

/// Runs `blockhaul snapshot`.
pub fn snapshot(args: &args::SnapshotArgs, groups: &Groups) -> CommandResult {
    let args::SnapshotCommand::List(args) = &args.command;
    let found = description(args, groups)?;
    let value = json!({ "snapshots": snapshots_json(&found) });
    out::result(args.json, &value, &snapshots_text(&found))?;
    Ok(0)
}

/// Runs `blockhaul info --chain`.
pub fn info_chain(args: &InfoChain<'_>, groups: &Groups) -> CommandResult {
    let spec = holder(groups.spec(args.image)?)?;
    let name = spec.to_string();
    let names = args.backing;
    let described = name.clone();
    let result = run(move |registry| async move {
        let policy = names.map_or(NamePolicy::Refuse, args::backing_policy);
        describe_chain(&OpenContext::new(&registry).with_names(policy), &described).await
    })?;
    let links = result.map_err(|error| CommandFailure::opening("image", &name, &error))?;
    let text = if args.json {
        format!("{:#}\n", Value::Array(links.iter().map(image_link_json).collect()))
    } else {
        links.iter().map(image_link_text).collect::<Vec<_>>().join("\n")
    };
    out::print(text.as_bytes())?;
    Ok(0)
}
