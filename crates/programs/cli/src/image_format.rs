//! The device that the options of a command make of a path: `--format`, `--backing` and `--partition`.

use blockhaul_catalog::DeviceSpec;
use blockhaul_transfer::{ChosenDevice, FileUse, FormatChoice, chosen_device, format_warning};

use crate::args::{ImageFormatArgs, backing_policy};
use crate::exit::CommandFailure;

/// A device that a command reads.
#[derive(Debug, Clone)]
pub struct ReadDevice {
    pub spec: DeviceSpec,
    /// Layers over it, first innermost.
    pub layers: Vec<String>,
}

/// The device that --format chooses for a description; the description itself without the option.
///
/// # Errors
/// If the description is not a path, or the format is not one that this program reads.
pub fn chosen(spec: DeviceSpec, wanted: &ImageFormatArgs) -> Result<DeviceSpec, CommandFailure> {
    let format = match (wanted.format, wanted.backing) {
        (Some(format), _) => format.0,
        (None, None) => return Ok(spec),
        (None, Some(_)) => return Err(CommandFailure::usage("--backing: give --format, too")),
    };
    let DeviceSpec::Path(path) = &spec else {
        let text =
            format!("--format: {spec} is not a path: write qcow2:DEVICE, vmdk:DEVICE and so on");
        return Err(CommandFailure::usage(text));
    };
    let chosen = chosen_device(path, format, wanted.backing.map(backing_policy));
    let ChosenDevice { spec: device, found } =
        chosen.map_err(|error| CommandFailure::usage(format!("--format: {error}")))?;
    if let Some(found) = found.filter(|_| format == FormatChoice::Auto) {
        crate::logger::announce(&format!("{} is used as {found}", path.display()));
    }
    Ok(device)
}

/// The device that a command reads, and its layers.
///
/// # Errors
/// Those of [`chosen`].
pub fn read_device(
    spec: DeviceSpec,
    wanted: &ImageFormatArgs,
) -> Result<ReadDevice, CommandFailure> {
    let layers = wanted.partition.layer().into_iter().collect();
    Ok(ReadDevice { spec: chosen(spec, wanted)?, layers })
}

/// Warns where the command reads the bytes of an image, and not the disk in it. Call it when the logger has started.
pub fn warn_of_read(device: &ReadDevice) {
    let layered = !device.layers.is_empty();
    if let Some(text) = format_warning(&device.spec, layered, FileUse::Read) {
        log::warn!("{text}");
    }
}
