//! The format of a file that is given by its path.

use std::sync::LazyLock;

use blockhaul_catalog::{IMAGE_FORMATS, NamePolicy};
use blockhaul_transfer::FormatChoice;
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use super::value::count;

/// The value of `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FormatArg(pub FormatChoice);

impl ValueEnum for FormatArg {
    fn value_variants<'a>() -> &'a [FormatArg] {
        static VALUES: LazyLock<Vec<FormatArg>> = LazyLock::new(|| {
            let images = IMAGE_FORMATS.iter().map(FormatChoice::Image);
            let all = [FormatChoice::Auto, FormatChoice::Raw].into_iter().chain(images);
            all.map(FormatArg).collect()
        });
        &VALUES
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let auto = "What its first bytes say: an image, or else a raw disk";
        Some(match self.0 {
            FormatChoice::Auto => PossibleValue::new("auto").help(auto),
            FormatChoice::Raw => PossibleValue::new("raw").help("The disk, byte for byte"),
            FormatChoice::Image(format) => {
                let value = PossibleValue::new(format.scheme);
                let aliases = (format.qemu_name != format.scheme).then_some(format.qemu_name);
                value.help(format!("{} format", format.origin)).aliases(aliases)
            }
        })
    }
}

impl FormatArg {
    fn help() -> String {
        let formats = blockhaul_catalog::ImageFormat::list(|format| format.scheme);
        format!("Format of a file that is given by its path: auto, raw, {formats} [default: raw]")
    }

    fn long_help() -> String {
        let rest = "auto uses the first bytes of the file, which a guest can write: name the format of its disks.";
        format!("{}\n\n{rest}", FormatArg::help())
    }
}

/// Whether files that an image names are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackingPolicy {
    /// Open them, with the permissions of this program
    Allow,
    /// Refuse images that need them
    Refuse,
}

/// The policy for files that an image names.
pub fn backing_policy(policy: BackingPolicy) -> NamePolicy {
    match policy {
        BackingPolicy::Allow => NamePolicy::Allow,
        BackingPolicy::Refuse => NamePolicy::Refuse,
    }
}

/// The partition to use.
#[derive(Debug, Clone, Default, Args)]
pub struct PartitionArgs {
    /// Use only this partition of the disk, or of the first one, as numbered by blockhaul info
    #[arg(long, value_name = "N", value_parser = count::<u32>(1, u32::MAX.into()))]
    pub partition: Option<u32>,
}

impl PartitionArgs {
    /// The layer that shows the partition.
    pub fn layer(&self) -> Option<String> {
        self.partition.map(|number| format!("partition?partition={number}"))
    }
}

/// The format of a device that is given by a path, and its partition.
#[derive(Debug, Clone, Default, Args)]
pub struct ImageFormatArgs {
    /// Format of a file that is given by its path.
    #[arg(long, alias = "image-format", value_name = "FORMAT", hide_possible_values = true,
          help = FormatArg::help(), long_help = FormatArg::long_help())]
    pub format: Option<FormatArg>,

    /// Open the files that an image names, with --format: allow or refuse [default: refuse]
    #[arg(long, value_name = "WHETHER", hide_possible_values = true)]
    pub backing: Option<BackingPolicy>,

    #[command(flatten)]
    pub partition: PartitionArgs,
}
