//! The format of a file that is given by its path.

use clap::{Args, ValueEnum};

/// What a file contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
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
    /// Format of a file that is given by its path [default: raw]
    ///
    /// auto: what the first bytes of the file say, which is printed. A guest can write any bytes to
    /// a raw disk: use auto only for files that nobody but you writes, or name the format. Same as
    /// qcow2:PATH, vmdk:PATH and so on.
    #[arg(long, visible_alias = "image-format", value_name = "FORMAT")]
    pub format: Option<Format>,

    /// With --format or --chain: whether to open the files that an image names [default: refuse]
    ///
    /// An image can name a backing file, and files with its data. Whoever can write the image
    /// chooses the names. Same as names=allow in the description of the device.
    #[arg(long, value_name = "WHETHER")]
    pub backing: Option<Backing>,
}

/// The same for commands whose --format is that of their output.
#[derive(Debug, Clone, Default, Args)]
pub struct OnlyImageFormat {
    /// Format of a file that is given by its path [default: raw]
    ///
    /// auto: what the first bytes of the file say, which is printed. See blockhaul copy --format.
    #[arg(long, value_name = "FORMAT")]
    pub image_format: Option<Format>,

    /// With --image-format: whether to open the files that an image names [default: refuse]
    #[arg(long, value_name = "WHETHER", requires = "image_format")]
    pub backing: Option<Backing>,
}

impl From<&OnlyImageFormat> for ImageFormat {
    fn from(options: &OnlyImageFormat) -> ImageFormat {
        ImageFormat { format: options.image_format, backing: options.backing }
    }
}
