//! Hints after a copy that has failed: to use a journal, and to leave out what cannot be read.

use std::time::Duration;

use blockhaul_block::Kind;
use blockhaul_catalog::DeviceSpec;
use blockhaul_transfer::{TransferError, TransferErrorKind, TransferStep, without_passwords};

/// Minimum duration of a failed copy for a hint about journals.
pub const WORTH_A_JOURNAL: Duration = Duration::from_secs(60);

/// The hint after a failed copy without a journal: the same command with one. `None` if a journal
/// is not possible.
pub fn hint([source, target]: [&DeviceSpec; 2]) -> Option<String> {
    let mut words = std::env::args_os();
    words.next()?;
    let ours = words.next()? == "copy";
    let pipe = [source, target].contains(&&DeviceSpec::Pipe);
    let words: Vec<_> =
        words.map(|word| quoted(&without_passwords(&word.to_string_lossy()))).collect();
    (ours && !pipe).then(|| {
        let journal = quoted(&default_name(target));
        let words = words.join(" ");
        format!("; to be able to resume next time: blockhaul copy --journal {journal} {words}")
    })
}

/// The hint to leave out what cannot be read; empty after other errors, and where that is not possible.
pub fn skip_hint(error: &TransferError, ends: [&DeviceSpec; 2]) -> &'static str {
    let is_copy = std::env::args_os().nth(1).is_some_and(|word| word == "copy");
    let failed = (error.kind(), error.step(), error.cause());
    let is_read = failed == (TransferErrorKind::Source, TransferStep::Copy, Some(Kind::Io));
    // An error without a remedy says all that is known.
    let has_more = !error.remedy().is_empty() && !ends.contains(&&DeviceSpec::Pipe);
    let hint = "; what can be read is copied with --on-error skip";
    if is_copy && is_read && has_more { hint } else { "" }
}

/// The default journal for a copy to this target, in the current directory: its name and .journal.
fn default_name(target: &DeviceSpec) -> String {
    let text = match target {
        DeviceSpec::Path(path) => path.to_string_lossy().into_owned(),
        DeviceSpec::Command(words) => {
            words.last().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default()
        }
        other => other.to_string(),
    };
    let text = text.split('?').next().unwrap_or_default();
    let last = text.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or_default();
    let plain: String =
        last.chars().filter(|c| c.is_alphanumeric() || "._-".contains(*c)).take(100).collect();
    let plain = plain.trim_start_matches(['-', '.']);
    format!("{}.journal", if plain.is_empty() { "copy" } else { plain })
}

/// A word quoted for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,%@+".contains(c);
    if !word.is_empty() && word.chars().all(plain) || word == "[" || word == "]" {
        word.to_string()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journals_are_named_after_the_target_and_words_quoted() {
        for (target, name) in [
            ("/dev/vg/root", "root.journal"),
            ("nbd://host/vm1", "vm1.journal"),
            ("nbd://host:10810/", "10810.journal"),
            ("nbd+unix:///disk?socket=/run/x", "disk.journal"),
            ("file:/a/d%20x.raw?direct=on", "d20x.raw.journal"),
            ("null:", "copy.journal"),
            ("/", "copy.journal"),
        ] {
            let spec = DeviceSpec::parse(std::ffi::OsStr::new(target)).unwrap();
            assert_eq!(default_name(&spec), name, "{target}");
        }
        assert_eq!(quoted("nbd://h/x"), "nbd://h/x");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted("a?b&c"), "'a?b&c'");
    }
}
