//! `-o help`: the options of images.

use std::fmt::Write as _;

use blockhaul_command_lines::qemu_image::QemuFormat;

use crate::create::READ_ONLY;
use crate::error::{QemuImgStatus, Result, failure};
use crate::tool::QemuImg;

/// The images that options apply to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OptionUse {
    /// New images.
    Create,
    /// Existing images.
    Amend,
}

/// An option: name, kind of the value, effect, and whether the option can change later.
type OptionRow = (&'static str, &'static str, &'static str, bool);

const SIZE: OptionRow = ("size", "size", "size of the disk", true);
const QCOW2: &[OptionRow] = &[
    ("backing_file", "str", "file that is read where the image has no data", false),
    ("backing_fmt", "str", "format of the backing file", false),
    ("cluster_size", "size", "allocation unit: 512 to 2M, default 64k", false),
    ("compat", "str", "format version: 1.1 (v3, default) or 0.10 (v2)", true),
    ("compression_type", "str", "compression of clusters: zlib (default) or zstd", false),
    ("data_file", "str", "raw file that holds the data of the disk", false),
    ("data_file_raw", "bool (on/off)", "keep data_file identical to the disk", false),
    ("extended_l2", "bool (on/off)", "divide clusters into 32 subclusters", false),
    ("lazy_refcounts", "bool (on/off)", "let QEMU write refcounts late", true),
    ("preallocation", "str", "off (default), metadata, falloc or full", false),
    ("refcount_bits", "num", "bits of a refcount: 1 to 64, default 16", false),
    SIZE,
];
const RAW: &[OptionRow] = &[("preallocation", "str", "off (default), falloc or full", false), SIZE];

impl QemuImg {
    /// Prints the options of a format.
    pub(crate) fn print_options(&self, format: &str, of: OptionUse) -> Result<QemuImgStatus> {
        let does_not = match of {
            OptionUse::Create => "does not support image creation",
            OptionUse::Amend => "does not support option amendment",
        };
        let all = match (QemuFormat::named(format), of) {
            (Some(QemuFormat::Qcow2), _) => QCOW2,
            (Some(QemuFormat::Raw), OptionUse::Create) => RAW,
            (None, _) if !READ_ONLY.contains(&format) => {
                return Err(failure(format!("Unknown file format '{format}'")));
            }
            _ => return Err(failure(format!("Format driver '{format}' {does_not}"))),
        };
        let mut text = match of {
            OptionUse::Create => format!("Supported {format} options:\n"),
            OptionUse::Amend => format!("Amend options for '{format}':\n"),
        };
        for (name, kind, what, _) in all.iter().filter(|one| of == OptionUse::Create || one.3) {
            let option = format!("{name}=<{kind}>");
            let _ = writeln!(text, "  {option:<22} - {what}");
        }
        self.print(&text)
    }
}
