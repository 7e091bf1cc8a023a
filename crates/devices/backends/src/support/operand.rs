//! Helpers of the computing backends: names for messages, and sizes after the scheme.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{BackendTarget, parse_size};

/// Maximum characters of a typed name in [`blockhaul_block::Facts::name`]: messages remain one
/// line.
const NAME_MAX: usize = 100;

/// The device as typed, shortened.
pub fn name(target: &BackendTarget) -> String {
    let rest = target.rest.to_string_lossy();
    let full = if target.scheme.is_empty() {
        rest.into_owned()
    } else {
        format!("{}:{rest}", target.scheme)
    };
    match full.char_indices().nth(NAME_MAX) {
        None => full,
        Some((cut, _)) => format!("{}...", &full[..cut]),
    }
}

/// The required size after the scheme.
///
/// # Errors
/// [`Kind::Usage`] if there is no size, or a wrong one.
pub fn size(target: &BackendTarget) -> Result<u64> {
    match optional_size(target)? {
        Some(size) => Ok(size),
        None => {
            let scheme = &target.scheme;
            let text =
                format!("{scheme}: has no size: write {scheme}:SIZE, for example {scheme}:1G");
            Err(Error::new(Kind::Usage, text))
        }
    }
}

/// The optional size after the scheme.
///
/// # Errors
/// [`Kind::Usage`] if the text is not a size.
pub fn optional_size(target: &BackendTarget) -> Result<Option<u64>> {
    let text = target.text()?;
    if text.is_empty() {
        return Ok(None);
    }
    let wrong = |error: Error| {
        Error::new(Kind::Usage, format!("{}:{text}: {}", target.scheme, error.text()))
    };
    parse_size(text).map(Some).map_err(wrong)
}

/// Refuses to be a copy target. A server may open it for writing: the facts report the device as
/// read-only, and the server serves it that way.
///
/// # Errors
/// [`Kind::ReadOnly`] if the device is to be the target of a copy.
pub fn source_only(target: &BackendTarget) -> Result<()> {
    if target.intent.target_size.is_none() {
        return Ok(());
    }
    let text = format!(
        "{}: is generated and cannot be written: copy to a file, memory: or null: instead",
        target.scheme
    );
    Err(Error::new(Kind::ReadOnly, text).complete())
}
