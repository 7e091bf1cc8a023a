//! Options of the commands about images: `create`, `resize`, `rebase`, `commit`, `measure`, `snapshot` and
//! `bitmap`.

use std::ffi::OsString;

use blockhaul_catalog::IMAGE_FORMATS;
use blockhaul_formats::qcow2::resize::NewSize;
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};

use super::backup::ProgressOptions;
use super::format::{BackingPolicy, ImageFormatArgs};
use super::value::size;

/// The formats of backing files, by QEMU's names.
fn backing_formats() -> PossibleValuesParser {
    let images = IMAGE_FORMATS.iter().map(|format| format.qemu_name);
    PossibleValuesParser::new(std::iter::once("raw").chain(images))
}

/// Options of `blockhaul create`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct CreateArgs {
    /// Image to create: qcow2:PATH, with options as qcow2:PATH?cluster=128k, or the path of a raw disk
    #[arg(value_name = "IMAGE")]
    pub image: OsString,

    /// Size of the disk, for example 10G
    #[arg(value_name = "SIZE", value_parser = size)]
    pub size: u64,

    /// Replace a file that is not empty
    #[arg(long)]
    pub overwrite: bool,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `blockhaul resize`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct ResizeArgs {
    /// Image to resize: qcow2:PATH, or the path of a raw disk; nothing else may use it
    #[arg(value_name = "IMAGE")]
    pub image: OsString,

    /// New size of the disk, for example 20G; +SIZE and -SIZE are relative to its size now
    #[arg(value_name = "SIZE", value_parser = new_size, allow_hyphen_values = true)]
    pub size: NewSize,

    /// Allow a smaller size: what is beyond the new end is lost
    #[arg(long)]
    pub shrink: bool,

    /// Whether to open the backing file that the image names: allow or refuse [default: refuse]
    ///
    /// To grow an image, its backing file must be opened.
    #[arg(long, value_name = "WHETHER", hide_possible_values = true)]
    pub backing: Option<BackingPolicy>,

    #[command(flatten)]
    pub output: ChangeOutput,
}

/// What a command that changes an image prints.
#[derive(Debug, Args)]
pub struct ChangeOutput {
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub reporting: ProgressOptions,
}

/// Options of `blockhaul rebase`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct RebaseArgs {
    /// Path of a qcow2 image, or the device that holds it; nothing else may use it
    #[arg(value_name = "IMAGE")]
    pub image: OsString,

    /// The new backing file: a path, relative to the directory of IMAGE, or a URI
    #[arg(value_name = "BACKING", required_unless_present = "flatten", conflicts_with = "flatten")]
    pub to: Option<String>,

    /// Format of BACKING
    #[arg(long = "backing-format", alias = "format", value_name = "FORMAT", value_parser = backing_formats(),
          required_unless_present = "flatten", conflicts_with = "flatten", hide_possible_values = false)]
    pub format: Option<String>,

    /// Leave the image without a backing file
    #[arg(long)]
    pub flatten: bool,

    /// Change only the name and format of the backing file, for one that was moved
    ///
    /// Nothing is read or compared: if the new file has other contents, the disk changes.
    #[arg(long = "unsafe", conflicts_with = "backing")]
    pub names_only: bool,

    /// Store what is written to the image compressed, with its compression type
    #[arg(long, conflicts_with = "names_only")]
    pub compress: bool,

    /// Accept an image with internal snapshots, whose contents may change
    ///
    /// A snapshot shows the backing file where it has no data of its own.
    #[arg(long)]
    pub change_snapshots: bool,

    /// Whether to open the backing files that the image names: allow or refuse [default: refuse]
    #[arg(long, value_name = "WHETHER", hide_possible_values = true)]
    pub backing: Option<BackingPolicy>,

    #[command(flatten)]
    pub output: ChangeOutput,
}

/// Options of `blockhaul commit`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct CommitArgs {
    /// Path of a qcow2 image, or the device that holds it; nothing else may use it or its backing file
    #[arg(value_name = "IMAGE")]
    pub image: OsString,

    /// Leave the image as it is, instead of emptying it
    #[arg(long)]
    pub keep: bool,

    /// Accept an image with internal snapshots, whose contents may change
    ///
    /// A snapshot shows the backing file where it has no data of its own.
    #[arg(long)]
    pub change_snapshots: bool,

    /// Whether to open the backing file that the image names: allow or refuse [default: refuse]
    ///
    /// It is changed, so this must be allow. Other images that use this backing file become invalid.
    #[arg(long, value_name = "WHETHER", hide_possible_values = true)]
    pub backing: Option<BackingPolicy>,

    #[command(flatten)]
    pub output: ChangeOutput,
}

/// Options of `blockhaul measure`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct MeasureArgs {
    /// Device to measure (see blockhaul help devices)
    #[arg(value_name = "SOURCE")]
    pub source: OsString,

    /// Format of the image
    #[arg(long, value_name = "FORMAT", default_value = "qcow2", value_parser = ["qcow2", "raw"],
          hide_possible_values = false)]
    pub target: String,

    #[command(flatten)]
    pub format: ImageFormatArgs,

    /// Cluster size of the image
    #[arg(long, value_name = "SIZE", default_value = "64k", value_parser = size)]
    pub cluster: u64,

    /// Print JSON, as qemu-img measure does
    #[arg(long)]
    pub json: bool,
}

/// Options of `blockhaul snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// What to do
    #[command(subcommand)]
    pub command: SnapshotCommand,
}

/// Commands about the internal snapshots of an image.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// List the internal snapshots of a qcow2 image
    ///
    /// Read one with qcow2:PATH?snapshot=NAME.
    List(ListArgs),
}

/// Options of `blockhaul bitmap`.
#[derive(Debug, Args)]
pub struct BitmapArgs {
    /// What to do
    #[command(subcommand)]
    pub command: BitmapCommand,
}

/// Commands about the persistent bitmaps of an image.
#[derive(Debug, Subcommand)]
pub enum BitmapCommand {
    /// List the persistent bitmaps of a qcow2 image
    ///
    /// Copy what one marks with copy --bitmap qemu:dirty-bitmap:NAME qcow2:PATH.
    List(ListArgs),

    /// Add a bitmap without a dirty bit
    ///
    /// Programs that write to the disk must keep an enabled bitmap right. blockhaul refuses to write to
    /// such an image; QEMU sets its bits.
    Add(BitmapAdd),

    /// Remove a bitmap, also one that is in use
    Remove(ImageBitmap),

    /// Clear all bits of a bitmap
    Clear(ImageBitmap),

    /// Let writes to the disk set bits of a bitmap from now on
    Enable(ImageBitmap),

    /// Let the bits of a bitmap stay as they are from now on
    Disable(ImageBitmap),

    /// Set the bits that are set in other bitmaps
    Merge(BitmapMerge),
}

/// A bitmap of an image.
#[derive(Debug, Args)]
pub struct ImageBitmap {
    /// Path of a qcow2 image, or the device that holds it; nothing else may use it
    #[arg(value_name = "IMAGE")]
    pub image: OsString,

    /// Name of the bitmap
    #[arg(value_name = "NAME")]
    pub name: String,
}

/// Options of `blockhaul bitmap add`.
#[derive(Debug, Args)]
pub struct BitmapAdd {
    /// The new bitmap
    #[command(flatten)]
    pub bitmap: ImageBitmap,

    /// Bytes of the disk for each bit, a power of two, 512 to 2G [default: the cluster size, but 4k to 64k]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub granularity: Option<u64>,

    /// Add it disabled: writes to the disk do not set its bits
    #[arg(long)]
    pub disabled: bool,
}

/// Options of `blockhaul bitmap merge`.
#[derive(Debug, Args)]
pub struct BitmapMerge {
    /// The bitmap whose bits are set
    #[command(flatten)]
    pub bitmap: ImageBitmap,

    /// Names of the other bitmaps
    #[arg(value_name = "SOURCE", required = true)]
    pub sources: Vec<String>,

    /// The qcow2 image with the other bitmaps, whose disk has the same size [default: IMAGE]
    #[arg(long, value_name = "IMAGE")]
    pub from: Option<OsString>,
}

/// An image that is described.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Path of a qcow2 image, or the device that holds it (see blockhaul help devices)
    #[arg(value_name = "IMAGE")]
    pub image: OsString,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `blockhaul info --chain`.
#[derive(Debug)]
pub struct InfoChain<'a> {
    /// The image.
    pub image: &'a std::ffi::OsStr,
    /// Whether files that images name are opened.
    pub backing: Option<BackingPolicy>,
    /// Whether to print JSON.
    pub json: bool,
}

fn new_size(text: &str) -> Result<NewSize, String> {
    NewSize::parse(text).map_err(|error| error.text())
}
