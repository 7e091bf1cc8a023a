//! blockhaul as a replacement of libnbd's programs, of nbdkit, qemu-img, qemu-nbd and
//! qemu-storage-daemon: called as `nbdcopy`, `nbddump`, `nbdinfo`, `nbdkit`, `qemu-img`, `qemu-nbd`
//! or `qemu-storage-daemon` (a link or a copy), or as `blockhaul compat NAME`, it accepts their
//! command lines and keeps what scripts depend on: formats, descriptors, exit statuses. The
//! differences are listed in docs/coming-from-libnbd.md, docs/coming-from-nbdkit.md,
//! docs/qemu-img.md and docs/qmp.md.
//!
//! Crate `blockhaul_command_lines` translates their command lines to ours; here they are run. Crate
//! `blockhaul_qemu_img` is qemu-img as a whole.

mod nbdcopy;
mod nbddiscard;
mod nbddump;
mod nbdinfo;
mod nbdkit;
mod nbdkit_log;
#[cfg(feature = "formats")]
mod qemu_img;
#[cfg(feature = "formats")]
mod qemu_nbd;
mod qemu_storage_daemon;
mod stand_in;

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::exit::{CommandResult, USAGE};
use crate::out;

/// The usage of `blockhaul compat`; the names follow.
const USE: &str = "\
Accept the command line of another program, and behave as it does

Usage: blockhaul compat PROGRAM [ARGUMENT]...

Programs: ";

/// An emulated program.
struct EmulatedProgram {
    name: &'static str,
    /// Runs it with the words after its name.
    run: fn(&[OsString]) -> CommandResult,
}

const PROGRAMS: &[EmulatedProgram] = &[
    EmulatedProgram { name: "nbdcopy", run: nbdcopy::run },
    EmulatedProgram { name: "nbddiscard", run: nbddiscard::run_discard },
    EmulatedProgram { name: "nbddump", run: nbddump::run },
    EmulatedProgram { name: "nbdinfo", run: nbdinfo::run },
    EmulatedProgram { name: "nbdkit", run: nbdkit::run },
    EmulatedProgram { name: "nbdzero", run: nbddiscard::run_zero },
    #[cfg(feature = "formats")]
    EmulatedProgram { name: "qemu-img", run: qemu_img::run },
    #[cfg(feature = "formats")]
    EmulatedProgram { name: "qemu-nbd", run: qemu_nbd::run },
    EmulatedProgram { name: "qemu-storage-daemon", run: qemu_storage_daemon::run },
];

/// Runs the program that the command line names and returns the exit status; none if it names no
/// emulated program.
pub fn run(words: &[OsString]) -> Option<u8> {
    let Some((program, rest)) = called(words) else { return unnamed(words) };
    Some((program.run)(rest).unwrap_or_else(|failure| {
        let text = failure.to_string();
        // Some messages of qemu-img have several lines.
        let shown = match program.name {
            "qemu-img" => text.lines().map(out::one_line).collect::<Vec<_>>().join("\n"),
            _ => out::one_line(&text),
        };
        out::error(&format!("{}: {shown}\n", program.name));
        failure.status()
    }))
}

/// The output of `blockhaul compat` without a known program.
fn unnamed(words: &[OsString]) -> Option<u8> {
    let [_, compat, rest @ ..] = words else { return None };
    if compat != "compat" {
        return None;
    }
    let names = PROGRAMS.iter().map(|program| program.name).collect::<Vec<_>>().join(", ");
    let wrong = match rest.first().map(|word| word.to_string_lossy()) {
        Some(word) if ["-h", "--help", "help"].contains(&&*word) => {
            let text = format!("{USE}{names}\n");
            let printed = out::print(text.as_bytes());
            return Some(printed.map_or_else(|failure| failure.status(), |_| 0));
        }
        Some(word) => format!("unknown program {word:?}"),
        None => "the name of a program is missing".to_string(),
    };
    let example = "blockhaul compat nbdinfo nbd://server/disk";
    out::error(&format!("blockhaul: compat: {wrong}; known are {names}, as in {example}\n"));
    Some(USAGE)
}

fn called(words: &[OsString]) -> Option<(&'static EmulatedProgram, &[OsString])> {
    let named = |name: &OsStr| PROGRAMS.iter().find(|program| name == program.name);
    let (first, rest) = words.split_first()?;
    if let Some(program) = Path::new(first).file_name().and_then(named) {
        return Some((program, rest));
    }
    match rest {
        [compat, name, rest @ ..] if compat == "compat" => Some((named(name)?, rest)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(text: &str) -> Option<(&'static str, usize)> {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        called(&words).map(|(program, rest)| (program.name, rest.len()))
    }

    #[test]
    fn the_name_or_the_first_words_choose_the_program() {
        assert_eq!(name_of("/usr/bin/nbdcopy a b"), Some(("nbdcopy", 2)));
        assert_eq!(name_of("nbdinfo"), Some(("nbdinfo", 0)));
        assert_eq!(name_of("blockhaul compat nbdinfo x"), Some(("nbdinfo", 1)));
        let none =
            ["blockhaul", "blockhaul copy nbdcopy x", "blockhaul compat x", "nbdcopy2 a", ""];
        assert!(none.into_iter().all(|text| name_of(text).is_none()));
    }
}
