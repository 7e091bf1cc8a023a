//! The command lines of nbdkit, nbdcopy, nbddiscard, nbddump, nbdinfo, nbdzero, qemu-img, qemu-nbd and qemu-storage-daemon, translated to those of
//! `blockhaul serve`, `blockhaul copy` and `blockhaul info`. What scripts depend on is kept: options and their
//! abbreviations, formats of output, versions.
//!
//! Nothing is run here: the program runs the translated words, so that there is only one
//! implementation of each command. The words of qemu-img are parsed only; crate `blockhaul_qemu_img` runs its
//! commands. Errors are texts without the name of the program.

pub mod earlier;
pub mod getopt;
pub mod nbdcopy;
pub mod nbddiscard;
pub mod nbddump;
pub mod nbdinfo;
pub mod nbdkit;
pub mod qemu_image;
pub mod qemu_img;
pub mod qemu_nbd;
pub mod qemu_storage_daemon;
pub mod qemu_tls;

use std::ffi::OsString;

/// The version of libnbd whose programs are emulated, and that is printed: scripts compare it to
/// know which options exist.
const LIBNBD: &str = "1.24.4";

/// The output of `--version`: the program, and the library that it belongs to.
fn version(name: &str) -> String {
    format!("{name} {LIBNBD}\nlibnbd {LIBNBD}\n")
}

/// What a command line asks for.
#[derive(Debug)]
pub enum ToolInvocation<T> {
    /// To print this text on standard output.
    Text(String),
    /// To run this.
    Run(T),
}

/// The output that an option of every program asks for.
fn common(means: &str, name: &str, help: &str, options: &'static str) -> Option<String> {
    match means {
        "help" => Some(help.to_string()),
        "version" => Some(version(name)),
        "long-options" => Some(getopt::long_list(options)),
        "short-options" => Some(getopt::short_list(options)),
        _ => None,
    }
}

/// Words in the form of a command line.
fn words(texts: &[&str]) -> Vec<OsString> {
    texts.iter().map(OsString::from).collect()
}
