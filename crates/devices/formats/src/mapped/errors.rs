//! What is wrong with images, and how errors say so.

use blockhaul_block::{Error, Kind, Result};

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
