//! `partition`: one partition of a disk, by its number in an MBR or GPT partition table.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{Layer, LayerBase, LayerKind, OpenFuture, ParamKind};

use crate::declared::{param, param_or, usage};
use crate::offset::OffsetWindow;
use crate::partition_table::{PartitionEntry, PartitionTable};

/// What to do about a disk without partitions: often a partition of the target was meant.
const WHOLE: &str = "use it as a whole, without --partition; in copy, --partition is one of the source, and \
                     --target-layer 'partition?partition=N' one of the target";

/// The layer `partition`.
pub static PARTITION: LayerKind = LayerKind {
    name: "partition",
    summary: "serves one partition of the disk, by its number",
    manual: "The disk's partition table is read when it is opened: GPT if there is one, else MBR with \
primary partitions 1 to 4 and logical ones from 5 on. The numbers are those of Linux. A \
partition that exceeds the disk is refused, and so is an extended one, which only contains \
others. `blockhaul info` lists the partitions. A GPT of a disk with sectors of 4096 bytes is found by \
itself; an MBR of such a disk needs `partition-sectorsize=4k`.",
    example: r#"
blockhaul copy sample:16M a.raw && blockhaul copy sample:8M b.raw
blockhaul copy partitioning:a.raw,b.raw disk.raw
blockhaul copy --verify --partition 2 disk.raw second.raw
blockhaul copy --verify second.raw --target-layer 'partition?partition=2' disk.raw
"#,
    needs_content: true,
    writes_below: true,
    transparent: false,
    params: &[
        param("partition", ParamKind::Number, "Number of the partition, from 1 on."),
        param_or(
            "partition-sectorsize",
            ParamKind::Choice(&["auto", "512", "4k", "4096"]),
            "auto",
            "Sector size; auto: 512, or 4k if there is a GPT for it.",
        ),
    ],
    changeable: &[],
    configure: |args| {
        let Some(number) = args.number("partition").filter(|&number| number > 0) else {
            return Err(usage("partition: requires a number from 1 on, for example partition=1"));
        };
        let sector = match args.text("partition-sectorsize") {
            Some("512") => Some(512),
            Some("4k" | "4096") => Some(4096),
            _ => None,
        };
        Ok(Arc::new(Partition { number, sector }))
    },
};

struct Partition {
    number: u64,
    /// Bytes of a sector; `None`: those of the table that is there.
    sector: Option<u64>,
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
    /// Offset and length of the partition in bytes, both inside the disk.
    async fn find(&self, disk: &Arc<dyn Device>) -> Result<(u64, u64)> {
        let facts = disk.facts();
        let number = self.number;
        let wrong =
            |why: String| Error::new(Kind::NotFound, format!("partition: {}: {why}", facts.name));
        let Some(table) = PartitionTable::read(disk, self.sector).await? else {
            let why = "no partition table, neither GPT nor MBR";
            return Err(wrong(why.into()).with_remedy(WHOLE));
        };
        let Some(entry) = table.partition(number) else {
            let why = format!("there is no partition {number}: the disk has {}", table.numbers());
            return Err(wrong(why).complete());
        };
        if let Some(why) = refusal(entry, self.sector) {
            return Err(wrong(format!("partition {number}: {why}")).complete());
        }
        entry.range(table.sector, facts.size).ok_or_else(|| {
            let PartitionEntry { start, sectors, .. } = entry;
            wrong(format!(
                "partition {number}, {sectors} sectors from sector {start} on, exceeds the disk"
            ))
        })
    }
}

/// Why a partition of a table has no data of its own.
fn refusal(entry: &PartitionEntry, sector: Option<u64>) -> Option<String> {
    if entry.is_extended() {
        let text = "it is extended, and contains partitions 5 and up: choose one of them";
        return Some(text.to_string());
    }
    // Covers the whole disk, or what fits in its number of sectors.
    let text = || {
        let (sectors, next) = match sector {
            None => ("512 or 4096", "repair the GPT from its copy at the end of the disk"),
            Some(512) => ("512", "choose partition-sectorsize=4k"),
            Some(_) => ("4096", "choose partition-sectorsize=512"),
        };
        format!(
            "it is the protective entry of a GPT, and there is no GPT for sectors of {sectors} bytes: {next}"
        )
    };
    entry.is_protective().then(text)
}
