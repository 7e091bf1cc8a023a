//! Errors of an inspection as data.

use std::{fmt, io};

use blockhaul_block::{BASE_ALLOCATION, Error};
use blockhaul_transfer::{one_line, opening_text};

/// Result of an inspection.
pub(crate) type Result<T> = std::result::Result<T, InspectionError>;

/// Why an inspection is refused, or has failed.
#[derive(Debug)]
pub enum InspectionError {
    /// The device or the server cannot be opened.
    Open {
        /// Its description.
        device: String,
        /// The cause.
        error: Error,
    },
    /// The server does not report the facts of an export that it lists.
    Export {
        /// Name of the export.
        name: String,
        /// The cause.
        error: Error,
    },
    /// The device has no metadata context of this name.
    Context {
        /// Name of the context.
        name: String,
        /// Whether an NBD server has the device.
        is_remote: bool,
        /// Names of the contexts that there are.
        known: Vec<String>,
    },
    /// [`MapFormat::Qemu`](crate::MapFormat::Qemu) was chosen for another context than `base:allocation`, or for
    /// several.
    QemuContexts,
    /// A range reaches beyond the end of the device.
    Range {
        /// First byte of the range.
        offset: u64,
        /// Bytes of the range.
        length: u64,
        /// Bytes of the device.
        size: u64,
    },
    /// A request to the device failed, or its description is invalid.
    Device(Error),
    /// The output cannot be written.
    Output(io::Error),
}

impl InspectionError {
    pub(crate) fn opening(device: &str, error: &Error) -> InspectionError {
        InspectionError::Open { device: device.to_string(), error: error.clone() }
    }
}

impl From<Error> for InspectionError {
    fn from(error: Error) -> InspectionError {
        InspectionError::Device(error)
    }
}

impl From<io::Error> for InspectionError {
    fn from(error: io::Error) -> InspectionError {
        InspectionError::Output(error)
    }
}

impl fmt::Display for InspectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InspectionError::Open { device, error } => {
                f.write_str(&opening_text("device", device, error))
            }
            InspectionError::Export { name, error } => write!(f, "export {name:?}: {error}"),
            InspectionError::Context { name, is_remote, known } => {
                let owner = if *is_remote { "server" } else { "device" };
                write!(f, "{owner} does not support metadata context \"{name}\"")?;
                match &known[..] {
                    [] => Ok(()),
                    known => write!(f, "; it has {}", one_line(&known.join(", "))),
                }
            }
            InspectionError::QemuContexts => {
                write!(f, "the format of qemu-img shows {BASE_ALLOCATION} only")
            }
            InspectionError::Range { offset, length, size } => {
                write!(f, "range {offset}:{length} ends behind the device's {size} bytes")
            }
            InspectionError::Device(error) => error.fmt(f),
            InspectionError::Output(error) => {
                write!(f, "cannot write the output: {}", blockhaul_io::plain(error))
            }
        }
    }
}

impl std::error::Error for InspectionError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            InspectionError::Open { error, .. }
            | InspectionError::Export { error, .. }
            | InspectionError::Device(error) => Some(error),
            InspectionError::Output(error) => Some(error),
            _ => None,
        }
    }
}
