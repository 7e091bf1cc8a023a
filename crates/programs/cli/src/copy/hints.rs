//! Hints after a copy that has failed: to use a journal, and to leave out what cannot be read.

use std::time::Duration;

use blockhaul_block::Kind;
use blockhaul_catalog::DeviceSpec;
use blockhaul_transfer::{
    TransferError, TransferErrorKind, TransferStep, journal_name, shell_word, without_passwords,
};

/// Minimum duration of a failed copy for a hint about journals.
pub const WORTH_A_JOURNAL: Duration = Duration::from_secs(60);

/// The hint after a failed copy to `target` without a journal: the same command with one.
pub fn journal_hint(target: &DeviceSpec) -> Option<String> {
    let mut words = std::env::args_os();
    words.next()?;
    let ours = words.next()? == "copy";
    let words: Vec<_> =
        words.map(|word| shell_word(&without_passwords(&word.to_string_lossy()))).collect();
    ours.then(|| {
        let journal = shell_word(&journal_name(target));
        let words = words.join(" ");
        format!("; to be able to resume next time: blockhaul copy --journal {journal} {words}")
    })
}

/// The hint to leave out what cannot be read; empty after other errors, and where that is not possible. `can_skip`: the
/// options of the copy allow it.
pub fn skip_hint(error: &TransferError, can_skip: bool) -> &'static str {
    let is_copy = std::env::args_os().nth(1).is_some_and(|word| word == "copy");
    let failed = (error.kind(), error.step(), error.cause());
    let is_read = failed == (TransferErrorKind::Source, TransferStep::Copy, Some(Kind::Io));
    // An error without a remedy says all that is known.
    let has_more = !error.remedy().is_empty();
    let hint = "; what can be read is copied with --on-error skip --error-map FILE";
    if is_copy && is_read && has_more && can_skip { hint } else { "" }
}
