//! `qcow2:DEVICE`: QEMU's image format, read natively. The format is described in QEMU's
//! docs/interop/qcow2.txt; comments name its sections.
//!
//! `header`, `entry`, `snapshot` and `bitmap` read the tables, and check them. An
//! `image` has the metadata of a file, once for all handles, with a `cache` of L2 tables.
//! `chain` opens an image with the files that it names, and `create` makes one. `device` takes
//! requests, which `read` (with `unpack` and `block_cache` for compressed clusters) and `extents` answer with
//! the `parts` of a handle.
//! `write` changes images in place; [`mod@check`] checks their tables. [`mod@stream`] writes an
//! image from front to back. `edit` changes the tables of an image that nothing else uses, for
//! [`mod@resize`], [`mod@reserve`], [`mod@bitmap_change`] and [`mod@snapshot_change`]; [`mod@amend`] changes
//! the version of the format; [`mod@backing_change`] gives an image another backing file. [`mod@describe`] describes images for users.
//! [`mod@places`] says where their space is, and [`mod@measure`] how long one would be.

pub mod amend;
pub mod backing_change;
mod bitmap;
pub mod bitmap_change;
mod bitmap_store;
mod cache;
mod chain;
pub mod check;
mod create;
pub mod describe;
mod device;
mod edit;
mod entry;
mod error;
mod extents;
mod header;
mod image;
pub mod measure;
mod parts;
pub mod places;
mod read;
mod refcount;
pub mod reserve;
pub mod resize;
mod snapshot;
pub mod snapshot_change;
pub mod stream;
mod unpack;
mod words;
mod write;

pub use write::data_was_lost;

use blockhaul_catalog::{
    Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind, Preparation,
};

/// The backend `qcow2:DEVICE`.
pub struct Qcow2Backend;

impl Backend for Qcow2Backend {
    fn schemes(&self) -> &'static [&'static str] {
        &["qcow2"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "the disk in a qcow2 image; as a copy target, a new image. DEVICE is the path of the image, or any \
         device that holds it, where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M disk.raw && qemu-img convert -c -O qcow2 disk.raw disk.qcow2
blockhaul copy qcow2:disk.qcow2 restored.raw && cmp disk.raw restored.raw
blockhaul copy disk.raw 'qcow2:new.qcow2?cluster=128k' && qemu-img check new.qcow2
"#
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            if target.intent.target_size.is_none() {
                return bitmap_store::open(&target).await;
            }
            let (opened, preparation) = Qcow2Backend.open_target(target).await?;
            preparation.run().await?;
            Ok(opened)
        })
    }

    fn open_target(&self, target: BackendTarget) -> OpenFuture<(OpenedDevice, Preparation)> {
        Box::pin(async move {
            match target.intent.target_size {
                Some(size) => create::open(&target, size).await,
                None => Ok((bitmap_store::open(&target).await?, Preparation::default())),
            }
        })
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
              qcow2 image. A new image names it.",
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
        doc: "The device with the guest's data, instead of the data file that the image names. A new image \
              names it, and a new file is created.",
    },
    Param {
        name: "backing-bitmaps",
        kind: ParamKind::Switch,
        default: Some("off"),
        doc: "Show the bitmaps of the images below it as contexts, too, where it has none of this name.",
    },
    Param {
        name: "cache",
        kind: ParamKind::Size,
        default: Some("32M"),
        doc: "Memory for the tables of each image of the chain.",
    },
    Param {
        name: "compress",
        kind: ParamKind::Switch,
        default: Some("off"),
        doc: "Store what is written compressed, as far as it is whole clusters that become smaller. Not with \
              an external data file.",
    },
    Param {
        name: "cluster",
        kind: ParamKind::Size,
        default: Some("64k"),
        doc: "For a new image: cluster size, a power of two, 512 to 2M.",
    },
    Param {
        name: "version",
        kind: ParamKind::Choice(&["2", "3"]),
        default: Some("3"),
        doc: "For a new image: version of the format. Version 2 is for programs older than QEMU 1.1.",
    },
    Param {
        name: "refcount-bits",
        kind: ParamKind::Number,
        default: Some("16"),
        doc: "For a new image: bits of a refcount, a power of two, 1 to 64.",
    },
    Param {
        name: "compression",
        kind: ParamKind::Choice(&["zlib", "zstd"]),
        default: Some("zlib"),
        doc: "For a new image: how clusters are compressed, with compress=on and by other programs.",
    },
    Param {
        name: "lazy-refcounts",
        kind: ParamKind::Switch,
        default: Some("off"),
        doc: "For a new image: allow QEMU to write refcounts late. After a crash it has to be repaired first.",
    },
    Param {
        name: "data-file-raw",
        kind: ParamKind::Switch,
        default: Some("off"),
        doc: "For a new image with data-file: keep that file a raw image of the disk.",
    },
    Param {
        name: "subclusters",
        kind: ParamKind::Switch,
        default: Some("off"),
        doc: "For a new image: divide clusters of 16k or more into 32 parts (extended L2 entries), so that \
              short writes over a backing file copy less.",
    },
];
