//! Images that are only read: a format maps offsets of the disk to places in files ([`Map`]), and
//! this module answers requests for all such formats.
//!
//! `pages` keeps tables in bounded memory, `walk` turns entries into runs, `read` and `extents`
//! answer requests, `device` is a handle, and `open` opens an image with its files.

mod device;
mod extents;
mod open;
mod pages;
mod read;
mod walk;

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Param, ParamKind};

pub(crate) use open::{Files, Opener, open};
pub(crate) use pages::Look;

use crate::kept::Kept;
use pages::Pages;

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

/// Where a part of the disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Plain bytes of a file of the image, at this offset.
    Data { file: usize, at: u64 },
    /// A compressed block of the disk, at this offset of a file; it has at most `most` bytes there,
    /// if it is in order.
    Packed { file: usize, at: u64, most: u32 },
    /// Nowhere: it reads as zeroes. `stored` tells whether space of the file is reserved for it.
    Zero { stored: bool },
    /// In the backing device, or nowhere if there is none.
    Below,
}

/// A part of the disk that is in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Offset on the disk, and length, in bytes.
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) place: Place,
}

impl Run {
    fn end(&self) -> u64 {
        self.at + self.len
    }
}

/// Where the bytes of a disk are.
pub(crate) trait Map: Send + Sync {
    /// The place of the byte at `at`, which is within the disk, and the number of bytes from there
    /// on that follow it in the same place, at least 1. `None` if a page of a table must be read
    /// first, which `look` has noted.
    ///
    /// # Errors
    /// If an entry of a table is impossible.
    fn find(&self, at: u64, look: &mut Look<'_>) -> Result<Option<(u64, Place)>>;

    /// Whether plain bytes of a file may be holes of that file, so that its extents are asked for.
    fn is_flat(&self, _file: usize) -> bool {
        false
    }
}

/// How compressed blocks are found and unpacked.
pub(crate) trait Unpack: Send + Sync {
    /// Length in bytes of the header before the compressed bytes.
    fn header(&self) -> usize;

    /// The number of compressed bytes behind a header.
    ///
    /// # Errors
    /// What is wrong with the header of the block at this offset of the disk.
    fn len(&self, header: &[u8], at: u64) -> Result<usize, String>;

    /// Unpacks into a block.
    ///
    /// # Errors
    /// What is wrong with the compressed bytes.
    fn unpack(&self, packed: &[u8], out: &mut [u8]) -> Result<(), String>;
}

/// An open image, which all handles share.
pub(crate) struct Image {
    /// The scheme.
    pub(crate) format: &'static str,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
    /// Granularity of the map in bytes, a power of two.
    pub(crate) unit: u64,
    /// Length in bytes of each file.
    pub(crate) lens: Vec<u64>,
    pub(crate) map: Box<dyn Map>,
    /// Present if there are compressed blocks.
    pub(crate) unpack: Option<Arc<dyn Unpack>>,
    kept: Kept,
    pages: Pages,
}

/// What a format says about an image.
pub(crate) struct Found {
    pub(crate) size: u64,
    pub(crate) unit: u64,
    pub(crate) map: Box<dyn Map>,
    pub(crate) unpack: Option<Arc<dyn Unpack>>,
}

impl Image {
    fn new(format: &'static str, found: Found, lens: Vec<u64>, memory: u64) -> Image {
        let Found { size, unit, map, unpack } = found;
        let pages = Pages::new(format, lens.clone(), memory);
        Image { format, size, unit, lens, map, unpack, kept: Kept::new(unit), pages }
    }
}

/// A header or table that no program writes. `what` names the field and its value.
pub(crate) fn damaged(format: &str, what: impl std::fmt::Display) -> Error {
    let text = format!("{format}: {what}: the image is damaged or truncated: restore it");
    Error::new(Kind::Io, text)
}

/// An image that is in order, but that this program cannot open; `way` says what to do instead.
pub(crate) fn unsupported(format: &str, what: impl std::fmt::Display, way: &str) -> Error {
    Error::new(Kind::Unsupported, format!("{format}: {what}: {way}"))
}

/// A wrong option, or another file than an image.
pub(crate) fn usage(format: &str, what: impl std::fmt::Display) -> Error {
    Error::new(Kind::Usage, format!("{format}: {what}"))
}

/// A file that does not begin as an image of the format.
pub(crate) fn other_file(format: &str, name: &str) -> Error {
    usage(format, format!("the file is no {name} image: use file:PATH for a raw one"))
}

/// The size of a disk, at most 2^63 - 1.
pub(crate) fn checked_size(format: &str, size: u64) -> Result<u64> {
    match i64::try_from(size) {
        Ok(_) => Ok(size),
        Err(_) => Err(damaged(format, format!("a disk of {size} bytes"))),
    }
}

/// Refuses a part of a file that is not all within it.
pub(crate) fn check_within(
    format: &str,
    what: impl std::fmt::Display,
    at: u64,
    len: u64,
    file_len: u64,
) -> Result<()> {
    match at.checked_add(len) {
        Some(end) if end <= file_len => Ok(()),
        _ => {
            let text = format!(
                "{what}, {len} bytes at offset {at}, exceeds the {file_len} bytes of the file"
            );
            Err(damaged(format, text))
        }
    }
}
