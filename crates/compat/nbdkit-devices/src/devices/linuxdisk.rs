//! `linuxdisk:FOLDER`: a disk with a Linux file system with the contents of a directory, made by
//! mke2fs.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Backend, Intent, Opened, Opening, Param, ParamKind, Target, parse_size};

use crate::devices::made::{self, Folder, LABEL};
use crate::devices::partitioning;
use crate::devices::table::SECTOR;
use blockhaul_backends::support::{operand, split};

/// Minimum file system made without a size, and the extra for a journal, in bytes.
const LEAST: u64 = 1 << 20;
const JOURNAL: u64 = 32 << 20;

/// Minimum space for a file: mke2fs makes one inode per this many bytes. Some file systems store
/// small files without blocks.
const PER_FILE: u64 = 4096;

/// The backend `linuxdisk:FOLDER`.
pub struct Linuxdisk;

impl Backend for Linuxdisk {
    fn schemes(&self) -> &'static [&'static str] {
        &["linuxdisk"]
    }

    fn operand(&self) -> &'static str {
        "DIR"
    }

    fn summary(&self) -> &'static str {
        "a disk with a GPT and a file system that contains the files of a directory, created by mke2fs in \
         $TMPDIR or /var/tmp; read-only, writable for one client with the layer cow"
    }

    fn example(&self) -> &'static str {
        r#"
mkdir files && echo hello > files/hello.txt
blockhaul copy 'linuxdisk:files?type=ext4&size=%2b16M' disk.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[
                Param {
                    name: "type",
                    kind: ParamKind::Choice(&["ext2", "ext3", "ext4"]),
                    default: Some("ext2"),
                    doc: "Type of the file system.",
                },
                LABEL,
                Param {
                    name: "size",
                    kind: ParamKind::Text,
                    default: None,
                    doc: "Size of the file system; +SIZE adds this to the space that its files need.",
                },
            ]
        }
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move {
            operand::source_only(&target)?;
            let name = operand::name(&target);
            let made = blockhaul_io::offload(move || make(&target)).await;
            let folder = made.map_err(|_| Error::new(Kind::Io, "linuxdisk: was not made"))??;
            let disk = folder.disk();
            let file =
                disk.to_str().ok_or_else(|| wrong("the temporary directory is not UTF-8"))?;
            // The file stays while it is open; the directory is removed.
            let file = split::file(file, Intent::READ).await?;
            split::join("linuxdisk", name, partitioning::alone(file)?)
        })
    }
}

fn wrong(text: impl std::fmt::Display) -> Error {
    Error::new(Kind::Usage, format!("linuxdisk: {text}"))
}

fn make(target: &Target) -> Result<Folder> {
    let path = target.path();
    if path.as_os_str().is_empty() {
        return Err(wrong("has no directory: write linuxdisk:DIR"));
    }
    let args = &target.args;
    let kind = args.text("type").unwrap_or("ext2");
    let parsed = |text: &str| parse_size(text).map_err(|error| wrong(error.text()));
    let more = match args.text("size").map(|size| size.strip_prefix('+').ok_or(size)) {
        Some(Err(size)) => Err(parsed(size)?),
        Some(Ok(more)) => Ok(parsed(more)?),
        None => Ok(0),
    };
    let size = match more {
        Err(size) => Some(size),
        Ok(more) => more.checked_add(estimate(&path, kind)?),
    };
    let size = size.and_then(|size| size.checked_next_multiple_of(SECTOR));
    let size = size.filter(|&size| size < i64::MAX as u64);
    let size = size.ok_or_else(|| wrong("is larger than 2^63 - 1 bytes"))?;
    let folder = Folder::new()?;
    let file = File::create_new(folder.disk()).and_then(|file| file.set_len(size));
    file.map_err(|error| Error::system(format!("cannot create a disk of {size} bytes"), error))?;
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-F", "-t", kind]);
    if let Some(label) = args.text("label").filter(|label| !label.is_empty()) {
        command.arg("-L").arg(label);
    }
    command.arg("-d").arg(&path).arg(folder.disk()).stdout(Stdio::null());
    made::run(&mut command, "mke2fs")?;
    Ok(folder)
}

/// Size in bytes of a file system for a directory: its current usage and a fifth more.
fn estimate(folder: &Path, kind: &str) -> Result<u64> {
    let cannot = |path: &Path, error| {
        Error::system(format!("linuxdisk: cannot get the status of {}", path.display()), error)
    };
    let mut bytes = 0_u64;
    let mut seen = HashSet::new();
    let mut left: Vec<PathBuf> = vec![folder.into()];
    while let Some(path) = left.pop() {
        // The directory itself may be a link.
        let metadata = if path == folder { path.metadata() } else { path.symlink_metadata() };
        let metadata = metadata.map_err(|error| cannot(&path, error))?;
        if metadata.nlink() < 2
            || metadata.is_dir()
            || seen.insert((metadata.dev(), metadata.ino()))
        {
            let taken = metadata.blocks().saturating_mul(512).max(PER_FILE);
            bytes = bytes.saturating_add(taken);
        }
        if metadata.is_dir() {
            for entry in path.read_dir().map_err(|error| cannot(&path, error))? {
                left.push(entry.map_err(|error| cannot(&path, error))?.path());
            }
        }
    }
    let journal = if kind == "ext2" { 0 } else { JOURNAL };
    Ok((bytes.saturating_add(bytes / 5)).max(LEAST).saturating_add(journal))
}
