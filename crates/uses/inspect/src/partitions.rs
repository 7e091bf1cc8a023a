//! Partitions of a disk, as text and JSON.

use std::sync::Arc;

use blockhaul_block::Device;
use blockhaul_catalog::{Stack, format_size};
use blockhaul_layers::{PartitionEntry, PartitionTable, TableFormat};
use blockhaul_transfer::one_line;
use serde_json::{Value, json};

/// The partition table of a device; `None` if it has none, or it cannot be read.
pub(crate) async fn find(device: &Arc<dyn Device>) -> Option<PartitionTable> {
    // Fenced, so that parts of blocks can be read.
    let device = Stack::over(device.clone()).device().clone();
    let table = PartitionTable::find(&device).await.ok()??;
    (!table.partitions.is_empty()).then_some(table)
}

/// The name of a format of tables.
pub(crate) fn format_name(table: &PartitionTable) -> &'static str {
    match table.format {
        TableFormat::Gpt => "gpt",
        TableFormat::Mbr => "mbr",
    }
}

/// The partitions of a disk with this size in bytes, as lines.
pub(crate) fn text(table: &PartitionTable, size: u64) -> String {
    let mut text =
        format!("\tpartitions: {}, sectors of {} bytes\n", format_name(table), table.sector);
    for entry in &table.partitions {
        let place = match entry.range(table.sector, size) {
            Some((offset, len)) => {
                format!("offset {offset}, size {len} ({})", format_size(len))
            }
            None => "exceeds the disk".to_string(),
        };
        let name = match &entry.name {
            name if name.is_empty() => String::new(),
            name => format!(", name {:?}", one_line(name)),
        };
        text += &format!("\t\t{}: {place}, type {}{name}\n", entry.number, kind(entry));
    }
    text
}

/// The type of a partition, for users.
fn kind(entry: &PartitionEntry) -> String {
    entry.kind.name().map_or_else(|| entry.kind.code(), str::to_string)
}

/// The partitions of a disk with this size in bytes, as JSON.
pub(crate) fn entries(table: &PartitionTable, size: u64) -> Vec<Value> {
    let entry = |entry: &PartitionEntry| {
        let range = entry.range(table.sector, size);
        json!({
            "number": entry.number,
            "type": entry.kind.code(),
            "type-name": entry.kind.name(),
            "name": entry.name,
            "offset": range.map(|range| range.0),
            "size": range.map(|range| range.1),
        })
    };
    table.partitions.iter().map(entry).collect()
}
