//! Images that are only read: a format maps offsets of the disk to places in files ([`BlockMap`]), and
//! this module answers requests for all such formats.
//!
//! `map` is what a format says, and `image` an open image. `pages` keeps tables in bounded memory,
//! `walk` turns entries into runs, `read` and `extents` answer requests with the `parts` of a handle,
//! `device` is a handle, and `open` opens an image with its files. `errors`: what is wrong with images.

mod device;
mod errors;
mod extents;
mod image;
mod map;
mod open;
mod pages;
mod parts;
mod read;
mod walk;

use blockhaul_catalog::{Param, ParamKind};

pub(crate) use errors::{check_within, checked_size, damaged, other_file, unsupported, usage};
pub(crate) use image::MappedFormat;
pub(crate) use map::{BlockMap, BlockUnpacker, DiskPlace};
pub(crate) use open::{ImageFileOpener, ImageFiles, open};
pub(crate) use pages::TableLookup;

/// The option `backing` of formats with parents, and the policy for names.
pub(crate) const NAMES: Param = Param {
    name: "names",
    kind: ParamKind::Choice(&["allow", "refuse"]),
    default: None,
    doc: "Whether to open the files that the image names. Whoever can write the image chooses the names: allow \
          it only for images that you trust. If not given, the command decides.",
};
pub(crate) const BACKING: Param = Param {
    name: "backing",
    kind: ParamKind::Text,
    default: None,
    doc: "The device under a differencing image, instead of the parent that it names.",
};
pub(crate) const CACHE: Param = Param {
    name: "cache",
    kind: ParamKind::Size,
    default: Some("32M"),
    doc: "Memory for the tables of the image.",
};
