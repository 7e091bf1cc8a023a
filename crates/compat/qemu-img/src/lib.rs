//! Emulates qemu-img: understands its command lines, prints what it prints, and has its exit statuses.
//!
//! A caller makes a [`QemuImg`] from a [`QemuImgHost`], which has the devices, the streams and an observer of
//! copies. [`QemuImg::run`] runs the command that the words after the program's name ask for. Its result is a
//! [`QemuImgStatus`], or a [`QemuImgError`] whose message the caller prints. [`QemuImg::image_format`] and
//! [`QemuImg::warn_of_guess`] are for programs with the same rules for images, as qemu-nbd.
//!
//! Each command starts workers of its own, and waits for them: commands are called outside of workers.
//!
//! The command lines are parsed by crate `blockhaul_command_lines`, images are read and changed by
//! `blockhaul_formats`, and disks are copied by `blockhaul_transfer`. Nothing here ends the process, handles
//! signals, or prints elsewhere. `docs/qemu-img.md` lists what differs from the original.
//!
//! - `tool`: the emulation and its host. `error`: results.
//! - `probe`: formats of images. `image`: what several commands do with images. `copy`: copies of disks.
//! - One module for each command, with `bitmap_copy` for `convert --bitmaps` and `help` for `-o help`.
//!   `new_image`: options of new images. `preallocation`: the space of their files.
//! - `progress`: the lines of `-p`. `json`: values as text and JSON. `limits`: block limits.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod amend;
mod bitmap;
mod bitmap_copy;
mod check;
mod commit;
mod compare;
mod convert;
mod copy;
mod create;
mod dd;
mod error;
mod help;
mod image;
mod info;
mod json;
mod limits;
mod map;
mod measure;
mod new_image;
mod preallocation;
mod probe;
mod progress;
mod rebase;
mod resize;
mod snapshot;
mod tool;

use std::ffi::OsString;

use blockhaul_command_lines::ToolInvocation;
use blockhaul_command_lines::qemu_img::{QemuImgCommand, parse};

pub use error::{QemuImgError, QemuImgErrorKind, QemuImgStatus};
pub use tool::{CopyObserver, QemuImg, QemuImgHost, RegistrySource};

use error::Result;

impl QemuImg {
    /// Runs the command of these words, which follow the name of the program.
    ///
    /// # Errors
    /// If the words are wrong or ask for something that is not supported, or the command fails. Images may have
    /// changed then.
    pub fn run(&self, words: &[OsString]) -> Result<QemuImgStatus> {
        match parse(words)? {
            ToolInvocation::Text(text) => self.print(&text),
            ToolInvocation::Run(line) => self.run_line(&line),
        }
    }

    fn run_line(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        match line.command {
            "amend" => self.amend(line),
            "bitmap" => self.change_bitmaps(line),
            "check" => self.check(line),
            "commit" => self.commit(line),
            "compare" => self.compare(line),
            "convert" => self.convert(line),
            "create" => self.create(line),
            "dd" => self.dd(line),
            "info" => self.info(line),
            "map" => self.map(line),
            "measure" => self.measure(line),
            "rebase" => self.rebase(line),
            "resize" => self.resize(line),
            _ => self.snapshot(line),
        }
    }
}
