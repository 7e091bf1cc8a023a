//! `qcow2:DEVICE`: QEMU's image format, read natively. The format is described in QEMU's
//! docs/interop/qcow2.txt; comments name its sections.
//!
//! `header`, `entry`, `snapshot` and `bitmap` read the tables, and check them. An
//! `image` has the metadata of a file, once for all handles, with a `cache` of L2 tables.
//! `chain` opens an image with the files that it names. `device` takes requests, which
//! `read` (with `unpack` and `kept` for compressed clusters) and `extents` answer.
//! [`mod@stream`] writes an image from front to back.

mod bitmap;
mod bytes;
mod cache;
mod chain;
mod device;
mod entry;
mod error;
mod extents;
mod header;
mod image;
mod kept;
mod read;
mod refcount;
mod snapshot;
mod storage;
pub mod stream;
mod unpack;
mod write;

pub use write::data_was_lost;

use blockhaul_catalog::{Backend, Opened, Opening, Param, ParamKind, Target};

/// The backend `qcow2:DEVICE`.
pub struct Qcow2;

impl Backend for Qcow2 {
    fn schemes(&self) -> &'static [&'static str] {
        &["qcow2"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "the disk in a qcow2 image, read-only. DEVICE is the path of the image, or any device that holds \
         it, where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M disk.raw && qemu-img convert -c -O qcow2 disk.raw disk.qcow2
blockhaul copy qcow2:disk.qcow2 restored.raw && cmp disk.raw restored.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move { chain::open(&target).await })
    }
}

const PARAMS: &[Param] = &[
    Param {
        name: "snapshot",
        kind: ParamKind::Text,
        default: None,
        doc: "Show the internal snapshot of this name or number instead of the current state.",
    },
    Param {
        name: "names",
        kind: ParamKind::Choice(&["allow", "refuse"]),
        default: None,
        doc: "Whether to open the backing file and the data file that the image names. Whoever can write \
              the image chooses the names: allow it only for images that you trust. If not given, the \
              command decides.",
    },
    Param {
        name: "backing",
        kind: ParamKind::Text,
        default: None,
        doc: "The device under the image, instead of the backing file that it names; qcow2:PATH for a \
              qcow2 image.",
    },
    Param {
        name: "backing-format",
        kind: ParamKind::Choice(&["raw", "qcow2"]),
        default: None,
        doc: "Format of the backing file that the image names, if the image does not tell it.",
    },
    Param {
        name: "data-file",
        kind: ParamKind::Text,
        default: None,
        doc: "The device with the guest's data, instead of the data file that the image names.",
    },
    Param {
        name: "cache",
        kind: ParamKind::Size,
        default: Some("32M"),
        doc: "Memory for the tables of each image of the chain.",
    },
];
