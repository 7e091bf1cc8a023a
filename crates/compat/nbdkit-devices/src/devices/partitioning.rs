//! `partitioning:DEVICE,DEVICE…`: a disk with a partition for each file or other device, like
//! nbdkit's plugin of that name: the same layout and the same partition tables, except for random
//! GUIDs.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, CompositeStorage, OpenFuture, OpenedDevice, Param, ParamKind,
    ParamValues, parse_number, parse_size,
};

use crate::devices::fixed;
use crate::devices::table::{self, Guid, SECTOR};
use blockhaul_backends::support::split;

/// Maximum number of files: each needs a descriptor.
const FILES_MAX: usize = 1000;
/// Default and maximum alignment of partitions, in bytes.
const ALIGNMENT: u64 = 1 << 20;
/// Total size of files from which on a disk needs a GPT: the limit of an MBR, minus gaps.
const MBR_MAX: u64 = u32::MAX as u64 * SECTOR - 5 * ALIGNMENT;
/// Maximum number of partitions of an MBR without logical ones.
const PRIMARY: usize = 4;

/// The name of the default type of a partition.
const DEFAULT: &str = "default";
/// Names of types, with the type in an MBR and the one in a GPT. `linux`, `swap`, `home`, `uefi`, `raid` and `lvm` are
/// names of sfdisk, too.
const TYPES: [(&str, Option<u8>, &str); 10] = [
    (DEFAULT, Some(0x83), "0fc63daf-8483-4772-8e79-3d69d8477de4"),
    ("linux", Some(0x83), "0fc63daf-8483-4772-8e79-3d69d8477de4"),
    ("efi", Some(0xef), "c12a7328-f81f-11d2-ba4b-00a0c93ec93b"),
    ("uefi", Some(0xef), "c12a7328-f81f-11d2-ba4b-00a0c93ec93b"),
    ("bios", None, "21686148-6449-6e6f-744e-656564454649"),
    ("swap", Some(0x82), "0657fd6d-a4ab-43c4-84e5-0933c84b4f4f"),
    ("lvm", Some(0x8e), "e6d6d379-f507-44c2-a23c-238f2a3df928"),
    ("raid", Some(0xfd), "a19d880f-05fc-4d3b-a006-743f0f84911e"),
    ("home", None, "933ac7e1-2eb4-4f13-b844-0e14e2aef915"),
    ("windows", Some(0x07), "ebd0a0a2-b9e5-4433-87c0-68b6b72699c7"),
];

/// The backend `partitioning:DEVICE,DEVICE…`.
pub struct PartitioningBackend;

impl Backend for PartitioningBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["partitioning"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE,DEVICE…"
    }

    fn summary(&self) -> &'static str {
        "a disk with a partition for each file or other device: paths, or devices in the notation of the \
         command line, where %3f is a question mark. Use file=DEVICE, which can be repeated, for a device \
         with a comma, where %26 is &; %25 is a percent sign. Options can be lists with a value for each \
         partition, for example mbr-id=0x83,0x82; the last value applies to all further partitions. The \
         partition tables cannot be changed"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M boot.raw && blockhaul copy sample:64M root.raw
blockhaul copy 'partitioning:boot.raw,root.raw?partition-type=gpt' disk.raw
blockhaul copy 'partitioning:boot.raw,root.raw?mbr-id=efi,linux' mbr.raw
blockhaul copy 'partitioning:boot.raw,zero:1M?file=split:boot.raw%2croot.raw' three.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[
                Param {
                    name: "partition-type",
                    kind: ParamKind::Choice(&["mbr", "dos", "gpt"]),
                    default: None,
                    doc: "Type of partition table [default: GPT for more than four files or 2 TiB, else \
                          MBR].",
                },
                Param {
                    name: "alignment",
                    kind: ParamKind::Text,
                    default: Some("1M"),
                    doc: "Alignment of partitions, 512 to 1M.",
                },
                Param {
                    name: "mbr-id",
                    kind: ParamKind::Text,
                    default: Some("default"),
                    doc: "Type of a partition in an MBR: 0x00 to 0xff, or a name as for type-guid. \"default\" is \
                          0x83, Linux.",
                },
                Param {
                    name: "type-guid",
                    kind: ParamKind::Text,
                    default: Some("default"),
                    doc: "Type of a partition in a GPT: a GUID, or linux, efi, bios, swap, lvm, raid, home or \
                          windows. \"default\" is linux.",
                },
            ]
        }
    }

    fn takes_others(&self) -> bool {
        true
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move { open(&target).await })
    }
}

/// A file and the settings of its partition.
struct PartitionSource {
    name: String,
    device: Arc<dyn Device>,
    size: u64,
    alignment: u64,
    id: u8,
    kind: Guid,
}

fn wrong(text: impl Into<String>) -> Error {
    Error::new(Kind::Usage, format!("partitioning: {}", text.into()))
}

async fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    if target.intent.target_size.is_some() {
        return Err(wrong("cannot be resized for a copy: copy to a file, or serve it"));
    }
    let mut names: Vec<&str> = target.text()?.split(',').filter(|name| !name.is_empty()).collect();
    for (key, value) in target.args.others() {
        match key.as_str() {
            "file" => names.push(value),
            key => {
                return Err(wrong(format!(
                    "unknown option {key:?}; known are file, partition-type, alignment, mbr-id, \
                     type-guid"
                )));
            }
        }
    }
    if names.is_empty() {
        return Err(wrong("requires files: partitioning:FILE,FILE"));
    }
    if names.len() > FILES_MAX {
        return Err(wrong(format!("more than {FILES_MAX} files")));
    }
    let alignments = PartitionValues::of(&target.args, "alignment", names.len(), alignment)?;
    let ids = PartitionValues::of(&target.args, "mbr-id", names.len(), id)?;
    let kinds = PartitionValues::of(&target.args, "type-guid", names.len(), kind)?;
    let whole = CompositeStorage::default();
    let mut files = Vec::with_capacity(names.len());
    for (index, name) in names.into_iter().enumerate() {
        let device = split::part("partitioning", (index + 1, &whole), name, target).await?;
        let size = device.facts().size;
        if size == 0 {
            return Err(wrong(format!("{name} is empty, but a partition cannot be empty")));
        }
        files.push(PartitionSource {
            name: name.to_string(),
            device,
            size,
            alignment: alignments.at(index),
            id: ids.at(index),
            kind: kinds.at(index),
        });
    }
    let total = files.iter().try_fold(0_u64, |sum, file| sum.checked_add(file.size));
    let small = total.is_some_and(|total| total <= MBR_MAX);
    let gpt = match target.args.text("partition-type") {
        Some("gpt") => true,
        Some(_) if small => false,
        Some(_) => return Err(wrong("an MBR is limited to 2 TiB: use partition-type=gpt")),
        None => !small || files.len() > PRIMARY,
    };
    let (used, unused) = if gpt { ("type-guid", "mbr-id") } else { ("mbr-id", "type-guid") };
    let is_set = |name| {
        target.args.text(name).is_some_and(|text| text.split(',').any(|one| one != "default"))
    };
    // nbdkit's users may set both, for either table.
    if is_set(unused) && !is_set(used) {
        let table = if gpt { "a GUID partition table" } else { "an MBR" };
        let remedy = if gpt { "use type-guid" } else { "use mbr-id, or partition-type=gpt" };
        return Err(wrong(format!("{unused} has no effect in {table}: {remedy}")));
    }
    let what =
        if files.iter().all(|file| split::is_path(&file.name)) { "files" } else { "devices" };
    let name = format!("partitioning of {} {what}", files.len());
    split::join("partitioning", name, if gpt { with_gpt(files)? } else { with_mbr(files)? })
}

/// Values for partitions, the last one for all that follow.
struct PartitionValues<T>(Vec<T>);

impl<T: Copy> PartitionValues<T> {
    fn of(
        args: &ParamValues,
        name: &str,
        files: usize,
        value: fn(&str) -> Result<T>,
    ) -> Result<PartitionValues<T>> {
        let text = args.text(name).unwrap_or_default();
        let values: Vec<T> = text.split(',').map(value).collect::<Result<_>>()?;
        if values.len() > files {
            let text = format!("{name} has {} values for {files} files", values.len());
            return Err(wrong(text));
        }
        Ok(PartitionValues(values))
    }

    fn at(&self, index: usize) -> T {
        self.0[index.min(self.0.len() - 1)]
    }
}

fn alignment(text: &str) -> Result<u64> {
    let bytes = parse_size(text).map_err(|error| wrong(format!("alignment: {}", error.text())))?;
    if (SECTOR..=ALIGNMENT).contains(&bytes) && bytes % SECTOR == 0 {
        Ok(bytes)
    } else {
        Err(wrong(format!("alignment {text} is not a multiple of 512 from 512 to 1M")))
    }
}

fn id(text: &str) -> Result<u8> {
    let named = named(text).and_then(|known| known.1);
    let number = || parse_number(text).ok();
    named.or_else(number).ok_or_else(|| {
        let names = names(|known| known.1.is_some());
        wrong(format!("mbr-id {text:?} is not a type: write 0x00 to 0xff, or {names}"))
    })
}

fn kind(text: &str) -> Result<Guid> {
    let guid = named(text).map_or(text, |known| known.2);
    Guid::parse(guid).ok_or_else(|| {
        let names = names(|_| true);
        wrong(format!("type-guid {text:?} is not a type: write a GUID, or {names}"))
    })
}

/// The type of this name.
fn named(name: &str) -> Option<&'static (&'static str, Option<u8>, &'static str)> {
    TYPES.iter().find(|known| known.0.eq_ignore_ascii_case(name))
}

/// The names of types, for users.
fn names(is_listed: fn(&(&str, Option<u8>, &str)) -> bool) -> String {
    let listed = TYPES.iter().filter(|known| known.0 != DEFAULT && is_listed(known));
    listed.map(|known| known.0).collect::<Vec<_>>().join(", ")
}

/// A disk being assembled, and its current length.
#[derive(Default)]
struct DiskAssembly {
    parts: Vec<Arc<dyn Device>>,
    size: u64,
}

impl DiskAssembly {
    fn push(&mut self, device: Arc<dyn Device>) -> Result<()> {
        let end = self.size.checked_add(device.facts().size);
        // Leave space for a table after it, and for rounding.
        let end = end.filter(|&end| end < i64::MAX as u64 - (1 << 30));
        self.size = end.ok_or_else(|| wrong("the disk is larger than 2^63 - 1 bytes"))?;
        self.parts.push(device);
        Ok(())
    }

    /// Zeroes up to the next multiple.
    fn align(&mut self, to: u64) -> Result<()> {
        match self.size.next_multiple_of(to) - self.size {
            0 => Ok(()),
            len => self.push(fixed::zeroes("the space between partitions", len)),
        }
    }

    /// Adds a partition; returns its first byte, and its end.
    fn partition(&mut self, file: &PartitionSource) -> Result<(u64, u64)> {
        self.align(file.alignment)?;
        let start = self.size;
        self.push(file.device.clone())?;
        let end = self.size;
        self.align(SECTOR)?;
        Ok((start, end))
    }
}

/// A placeholder for a table that is made when the disk is complete.
fn later() -> Arc<dyn Device> {
    table_device(vec![0; SECTOR as usize])
}

fn table_device(bytes: Vec<u8>) -> Arc<dyn Device> {
    fixed::bytes("the partition table", bytes)
}

fn with_gpt(files: Vec<PartitionSource>) -> Result<Vec<Arc<dyn Device>>> {
    let (before, behind) = table::gpt_len(files.len());
    let mut disk = DiskAssembly::default();
    disk.push(fixed::zeroes("the partition table", before))?;
    let mut entries = Vec::with_capacity(files.len());
    for (index, file) in files.into_iter().enumerate() {
        let (start, end) = disk.partition(&file)?;
        entries.push(table::GptEntry {
            kind: file.kind,
            unique: Guid::random()?,
            sectors: (start / SECTOR, (end - 1) / SECTOR),
            bootable: index == 0,
            name: file.name,
        });
    }
    let (first, second) = table::gpt(&entries, disk.size + behind)?;
    disk.push(table_device(second))?;
    disk.parts[0] = table_device(first);
    Ok(disk.parts)
}

fn with_mbr(files: Vec<PartitionSource>) -> Result<Vec<Arc<dyn Device>>> {
    let mut disk = DiskAssembly::default();
    let mut mbr = table::boot_sector();
    disk.push(later())?;
    let logical = if files.len() > PRIMARY { PRIMARY - 1 } else { files.len() };
    // For each logical partition: the position of its record, among the parts and on the disk, and
    // its own.
    let mut records: Vec<(usize, u64, (u64, u64))> = Vec::new();
    for (index, file) in files.iter().enumerate() {
        let record = (disk.parts.len(), disk.size);
        if index >= logical {
            disk.push(later())?;
        }
        let place = disk.partition(file)?;
        if index < logical {
            table::mbr_entry(&mut mbr, index, file.id, index == 0, sectors(place))?;
        } else {
            records.push((record.0, record.1, place));
        }
    }
    if let Some(&(_, extended, _)) = records.first() {
        table::mbr_extended(&mut mbr, logical, sectors((extended, disk.size)))?;
        for (index, &(part, at, (start, end))) in records.iter().enumerate() {
            let mut record = table::boot_sector();
            let id = files[logical + index].id;
            table::mbr_entry(&mut record, 0, id, false, sectors((start - at, end - at)))?;
            if let Some(&(_, next, (_, end))) = records.get(index + 1) {
                let place = (next - extended, end - extended);
                table::mbr_extended(&mut record, 1, sectors(place))?;
            }
            disk.parts[part] = table_device(record);
        }
    }
    disk.parts[0] = table_device(mbr);
    Ok(disk.parts)
}

/// First sector and number of sectors of a range of bytes that starts at a sector.
fn sectors((start, end): (u64, u64)) -> (u64, u64) {
    (start / SECTOR, (end - start).div_ceil(SECTOR))
}
