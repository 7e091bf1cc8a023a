//! Errors about images: what is wrong, where, and what to do.

use blockhaul_block::{Error, Kind};

/// A header or table that no program writes. `what` names the field and its value.
pub(super) fn damaged(what: impl std::fmt::Display) -> Error {
    let text = format!(
        "qcow2: {what}: the image is damaged or truncated: check it with \"qemu-img check\", or restore it"
    );
    Error::new(Kind::Io, text).complete()
}

/// An image that is in order, but that this program cannot open; `way` says what to do instead.
pub(super) fn unsupported(what: impl std::fmt::Display, way: &str) -> Error {
    Error::new(Kind::Unsupported, format!("qcow2: {what}: {way}"))
}

/// A wrong option.
pub(super) fn usage(what: impl std::fmt::Display) -> Error {
    Error::new(Kind::Usage, format!("qcow2: {what}"))
}
