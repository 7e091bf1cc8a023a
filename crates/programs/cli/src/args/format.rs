//! The format of a file that is given by its path.

use clap::{Args, ValueEnum};

/// What a file contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// What its first bytes say: an image, or else a raw disk
    Auto,
    /// The disk, byte for byte
    Raw,
    /// QEMU's format
    Qcow2,
    /// VMware's format
    Vmdk,
    /// Hyper-V's format
    Vhdx,
    /// Virtual PC's format
    #[value(alias = "vpc")]
    Vhd,
    /// VirtualBox's format
    Vdi,
}

/// Whether files that an image names are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backing {
    /// Open them, with the permissions of this program
    Allow,
    /// Refuse images that need them
    Refuse,
}

/// The format of a device that is given by a path.
#[derive(Debug, Clone, Default, Args)]
pub struct ImageFormat {
    /// Format of a file that is given by its path: auto, raw, qcow2, vmdk, vhdx, vhd or vdi [default: raw]
    ///
    /// auto uses the first bytes of the file, which a guest can write: name the format of its disks.
    #[arg(long, alias = "image-format", value_name = "FORMAT", hide_possible_values = true)]
    pub format: Option<FormatArg>,

    /// Open the files that an image names, with --format: allow or refuse [default: refuse]
    #[arg(long, value_name = "WHETHER", hide_possible_values = true)]
    pub backing: Option<Backing>,
}

/// The same for commands whose --format is that of their output.
#[derive(Debug, Clone, Default, Args)]
pub struct OnlyImageFormat {
    /// Format of a file that is given by its path: auto, raw, qcow2, vmdk, vhdx, vhd or vdi [default: raw]
    ///
    /// auto uses the first bytes of the file, which a guest can write: name the format of its disks.
    #[arg(long, value_name = "FORMAT", hide_possible_values = true)]
    pub image_format: Option<FormatArg>,

    /// Open the files that an image names, with --image-format: allow or refuse [default: refuse]
    #[arg(long, value_name = "WHETHER", requires = "image_format", hide_possible_values = true)]
    pub backing: Option<Backing>,
}

impl From<&OnlyImageFormat> for ImageFormat {
    fn from(options: &OnlyImageFormat) -> ImageFormat {
        ImageFormat { format: options.image_format, backing: options.backing }
    }
}
