//! `partition`: one partition of a disk, by its number in an MBR or GPT partition table.

use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt, Error, Kind, Result};
use blockhaul_catalog::{Layer, LayerBase, LayerKind, OpenFuture, ParamKind};

use crate::declared::{param, param_or, usage};
use crate::offset::OffsetWindow;

/// The layer `partition`.
pub static PARTITION: LayerKind = LayerKind {
    name: "partition",
    summary: "serves one partition of the disk, by its number",
    manual: "The disk's partition table is read when it is opened: GPT if there is one, else MBR with \
primary partitions 1 to 4 and logical ones from 5 on. The numbers are those of Linux. A \
partition that exceeds the disk is refused, and so is an extended one, which only contains \
others. `partition-sectorsize` is for disks with sectors of 4096 bytes.",
    example: r#"
blockhaul copy sample:16M a.raw && blockhaul copy sample:8M b.raw
blockhaul copy partitioning:a.raw,b.raw disk.raw
blockhaul copy --verify --source-layer 'partition?partition=2' disk.raw second.raw
"#,
    needs_content: true,
    writes_below: true,
    transparent: false,
    params: &[
        param("partition", ParamKind::Number, "Number of the partition, from 1 on."),
        param_or(
            "partition-sectorsize",
            ParamKind::Choice(&["512", "4k", "4096"]),
            "512",
            "Sector size.",
        ),
    ],
    changeable: &[],
    configure: |args| {
        let Some(number) = args.number("partition").filter(|&number| number > 0) else {
            return Err(usage("partition: requires a number from 1 on, for example partition=1"));
        };
        let sector = if args.text("partition-sectorsize") == Some("512") { 512 } else { 4096 };
        Ok(Arc::new(Partition { number, sector }))
    },
};

/// Maximum number of logical partitions followed: more than Linux shows.
const LOGICAL_MAX: u64 = 256;
/// Maximum number of GPT entries checked; tables have 128.
const GPT_ENTRIES_MAX: u64 = 4096;

/// MBR partition type of the range described by a GPT.
const GPT: u8 = 0xee;

struct Partition {
    number: u64,
    sector: u64,
}

impl Layer for Partition {
    fn wrap(&self, _inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Err(Error::new(Kind::Unsupported, "partition: the disk must be opened with the layer"))
    }

    fn open(self: Arc<Self>, below: LayerBase) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(async move {
            let (offset, range) = self.find(&below.device).await?;
            OffsetWindow { offset, range: Some(range) }.wrap(below.device)
        })
    }
}

impl Partition {
    /// Offset and length of the partition, both inside the disk.
    async fn find(&self, disk: &Arc<dyn Device>) -> Result<(u64, u64)> {
        let facts = disk.facts();
        let wrong =
            |why: String| Error::new(Kind::NotFound, format!("partition: {}: {why}", facts.name));
        let first = self.read(disk, 0).await?.ok_or_else(|| wrong("no partition table".into()))?;
        let gpt = self.read(disk, 1).await?.filter(|sector| sector.starts_with(b"EFI PART"));
        let found = match gpt {
            Some(header) => self.find_gpt(disk, &header).await?,
            None if first[510..512] != [0x55, 0xaa] => {
                return Err(wrong(
                    "no partition table, neither GPT nor MBR: leave the layer out".into(),
                )
                .complete());
            }
            None => self.find_mbr(disk, &first).await?,
        };
        let Some((start, sectors)) = found else {
            return Err(wrong(format!(
                "there is no partition {}: choose one of the partition table",
                self.number
            ))
            .complete());
        };
        let offset = start.checked_mul(self.sector);
        let len = sectors.checked_mul(self.sector);
        let end = offset.zip(len).and_then(|(offset, len)| offset.checked_add(len));
        match (offset, len, end) {
            (Some(offset), Some(len), Some(end)) if start > 0 && len > 0 && end <= facts.size => {
                Ok((offset, len))
            }
            _ => Err(wrong(format!(
                "partition {}, {sectors} sectors from sector {start} on, exceeds the disk",
                self.number
            ))),
        }
    }

    /// A sector; `None` beyond the disk's end.
    async fn read(&self, disk: &Arc<dyn Device>, sector: u64) -> Result<Option<Vec<u8>>> {
        let at = sector.checked_mul(self.sector);
        let end = at.and_then(|at| at.checked_add(self.sector));
        match (at, end) {
            (Some(at), Some(end)) if end <= disk.facts().size => {
                let found = disk.read(at, self.sector as usize).await?;
                Ok(Some(found.bytes().to_vec()))
            }
            _ => Ok(None),
        }
    }

    /// First sector and number of sectors, in a GPT with this header.
    async fn find_gpt(&self, disk: &Arc<dyn Device>, header: &[u8]) -> Result<Option<(u64, u64)>> {
        let table = le64(header, 72);
        let entries = u64::from(le32(header, 80));
        let size = u64::from(le32(header, 84));
        // Entries have 128 bytes, or a power of two times that: none crosses a sector boundary.
        let fits = size >= 128 && size.is_power_of_two() && size <= self.sector;
        if !fits || entries == 0 || entries > GPT_ENTRIES_MAX {
            let text =
                format!("partition: a GPT of {entries} entries of {size} bytes is not valid");
            return Err(Error::new(Kind::NotFound, text));
        }
        if self.number > entries {
            return Ok(None);
        }
        let place = (self.number - 1) * size;
        let Some(sector) = table.checked_add(place / self.sector) else { return Ok(None) };
        let Some(found) = self.read(disk, sector).await? else { return Ok(None) };
        let entry = &found[(place % self.sector) as usize..][..128];
        if entry[..16].iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        let first = le64(entry, 32);
        let last = le64(entry, 40);
        // The last sector is included; the caller refuses what exceeds the disk.
        Ok(Some((first, last.checked_sub(first).map_or(0, |sectors| sectors.saturating_add(1)))))
    }

    /// First sector and number of sectors, in an MBR.
    async fn find_mbr(&self, disk: &Arc<dyn Device>, mbr: &[u8]) -> Result<Option<(u64, u64)>> {
        let entries = [0, 1, 2, 3].map(|index| MbrEntry::read(mbr, index));
        if self.number <= 4 {
            let entry = &entries[self.number as usize - 1];
            let why = match entry.kind {
                _ if entry.is_extended() => {
                    "it is extended, and contains partitions 5 and up: choose one of them"
                        .to_string()
                }
                // Covers the whole disk, or what fits in its number of sectors.
                GPT if entry.is_used() => {
                    let other = if self.sector == 512 { "4k" } else { "512" };
                    format!(
                        "it is the protective entry of a GPT, and there is no GPT for sectors of {} bytes: \
                         choose partition-sectorsize={other}",
                        self.sector
                    )
                }
                _ => return Ok(entry.is_used().then_some((entry.start, entry.sectors))),
            };
            let name = &disk.facts().name;
            let text = format!("partition: {name}: partition {}: {why}", self.number);
            return Err(Error::new(Kind::NotFound, text).complete());
        }
        let Some(extended) = entries.iter().find(|entry| entry.is_extended()) else {
            return Ok(None);
        };
        // A chain of tables, each with one partition and a link to the next.
        let mut table = extended.start;
        let mut seen = Vec::new();
        for number in 5..5 + LOGICAL_MAX {
            if seen.contains(&table) {
                return Ok(None);
            }
            seen.push(table);
            let Some(found) = self.read(disk, table).await? else { return Ok(None) };
            if found[510..512] != [0x55, 0xaa] {
                return Ok(None);
            }
            let [entry, next] = [0, 1].map(|index| MbrEntry::read(&found, index));
            if number == self.number {
                return Ok(entry.is_used().then_some((table + entry.start, entry.sectors)));
            }
            if !next.is_extended() {
                return Ok(None);
            }
            table = extended.start + next.start;
        }
        Ok(None)
    }
}

struct MbrEntry {
    kind: u8,
    start: u64,
    sectors: u64,
}

impl MbrEntry {
    fn read(sector: &[u8], index: usize) -> MbrEntry {
        let entry = &sector[446 + 16 * index..][..16];
        MbrEntry {
            kind: entry[4],
            start: u64::from(le32(entry, 8)),
            sectors: u64::from(le32(entry, 12)),
        }
    }

    fn is_used(&self) -> bool {
        self.kind != 0 && self.sectors > 0
    }

    fn is_extended(&self) -> bool {
        matches!(self.kind, 0x05 | 0x0f | 0x85) && self.is_used()
    }
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
