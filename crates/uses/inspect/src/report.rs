//! Facts of exports as text and JSON, in the formats of nbdinfo 1.22 and of qemu-nbd.

use std::fmt::Write as _;
use std::sync::Arc;

use blockhaul_block::{Can, Facts};
use blockhaul_catalog::{ArchivedDisk, format_size};
use blockhaul_layers::PartitionTable;
use blockhaul_transfer::one_line;
use blockhaul_wire::{ExportFlags, ReplyForm};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use crate::archive;
use crate::file_facts::FileFacts;
use crate::json::json;
use crate::palette::Palette;
use crate::partitions;
use crate::sizes::with_unit;

/// The facts of a server or device.
#[derive(Debug)]
pub struct InspectionReport {
    /// The server or the device.
    pub owner: ExportOwner,
    /// One export, or all that the server lists.
    pub exports: Vec<ExportFacts>,
}

/// The owner of exports.
#[derive(Debug)]
pub enum ExportOwner {
    /// An NBD server.
    Server {
        /// `oldstyle`, `newstyle` or `newstyle-fixed`.
        protocol: &'static str,
        /// Whether the connection is encrypted.
        tls: bool,
        /// The form of replies.
        replies: ReplyForm,
    },
    /// A device of this program.
    Device {
        /// Its name.
        name: String,
        /// The file that holds the disk, if it is one of this machine.
        file: Option<FileFacts>,
        /// The disks of an OVA, if they were looked for.
        disks: Vec<ArchivedDisk>,
    },
}

/// The facts of an export.
#[derive(Debug, Default)]
pub struct ExportFacts {
    /// The name.
    pub name: String,
    /// A text of the server for users.
    pub description: Option<String>,
    /// Size in bytes.
    pub size: u64,
    /// The kind of its contents, as `file` prints it.
    pub content: Option<String>,
    /// The canonical URI.
    pub uri: Option<String>,
    /// The names of the metadata contexts.
    pub contexts: Vec<String>,
    /// The transmission flags.
    pub flags: ExportFlags,
    /// Block sizes in bytes, if reported: minimum, preferred, maximum.
    pub block: Option<[u32; 3]>,
    /// The partition table, if it was looked for and found.
    pub partitions: Option<PartitionTable>,
}

/// Flags to show, in order, and whether they are coloured.
const FLAGS: [(&str, ExportFlags, bool); 11] = [
    ("is_rotational", ExportFlags::ROTATIONAL, false),
    ("is_read_only", ExportFlags::READ_ONLY, false),
    ("can_block_status_payload", ExportFlags::BLOCK_STATUS_PAYLOAD, true),
    ("can_cache", ExportFlags::SEND_CACHE, true),
    ("can_df", ExportFlags::SEND_DF, true),
    ("can_fast_zero", ExportFlags::SEND_FAST_ZERO, true),
    ("can_flush", ExportFlags::SEND_FLUSH, true),
    ("can_fua", ExportFlags::SEND_FUA, true),
    ("can_multi_conn", ExportFlags::CAN_MULTI_CONN, true),
    ("can_trim", ExportFlags::SEND_TRIM, true),
    ("can_zero", ExportFlags::SEND_WRITE_ZEROES, true),
];

/// Abilities of devices, and the flags that report them.
const DEVICE_FLAGS: [(Can, ExportFlags); 7] = [
    (Can::FLUSH, ExportFlags::SEND_FLUSH),
    (Can::FUA, ExportFlags::SEND_FUA),
    (Can::TRIM, ExportFlags::SEND_TRIM),
    (Can::ZERO, ExportFlags::SEND_WRITE_ZEROES),
    (Can::FAST_ZERO, ExportFlags::SEND_FAST_ZERO),
    (Can::CACHE, ExportFlags::SEND_CACHE),
    (Can::MULTI_CONN, ExportFlags::CAN_MULTI_CONN),
];

const BLOCK_SIZES: [&str; 3] = ["block_size_minimum", "block_size_preferred", "block_size_maximum"];

/// The names of flags that `qemu-nbd --list` prints, in the order of their bits.
const QEMU_FLAGS: [(&str, ExportFlags); 11] = [
    ("readonly", ExportFlags::READ_ONLY),
    ("flush", ExportFlags::SEND_FLUSH),
    ("fua", ExportFlags::SEND_FUA),
    ("rotational", ExportFlags::ROTATIONAL),
    ("trim", ExportFlags::SEND_TRIM),
    ("zeroes", ExportFlags::SEND_WRITE_ZEROES),
    ("df", ExportFlags::SEND_DF),
    ("multi", ExportFlags::CAN_MULTI_CONN),
    ("cache", ExportFlags::SEND_CACHE),
    ("fast-zero", ExportFlags::SEND_FAST_ZERO),
    ("block-status-payload", ExportFlags::BLOCK_STATUS_PAYLOAD),
];

impl InspectionReport {
    /// The exports, as `qemu-nbd --list` prints them.
    pub fn qemu_list(&self) -> String {
        let mut text = format!("exports available: {}\n", self.exports.len());
        let is_long =
            matches!(self.owner, ExportOwner::Server { replies: ReplyForm::Extended, .. });
        for export in &self.exports {
            export.add_qemu_entry(is_long, &mut text);
        }
        text
    }
}

impl ExportFacts {
    /// The facts of a device in the form of an export without a name. Emulated abilities are not reported.
    pub(crate) fn of_device(facts: &Facts) -> ExportFacts {
        let can = facts.can.difference(facts.emulated);
        let mut flags = ExportFlags::HAS_FLAGS
            .with(ExportFlags::READ_ONLY, !facts.can.contains(Can::WRITE))
            .with(ExportFlags::ROTATIONAL, facts.rotational);
        for (ability, flag) in DEVICE_FLAGS {
            flags = flags.with(flag, can.contains(ability));
        }
        let block = facts.advertised.unwrap_or(facts.block);
        // Where a server advertises no limit, that of the device remains.
        let most = block.maximum.min(facts.block.maximum);
        ExportFacts {
            description: Some(facts.description.clone()).filter(|text| !text.is_empty()),
            size: facts.size,
            contexts: facts.contexts.clone(),
            flags,
            block: Some([block.minimum, block.preferred, most]),
            ..ExportFacts::default()
        }
    }

    fn add_qemu_entry(&self, is_long: bool, text: &mut String) {
        let _ = writeln!(text, " export: '{}'", one_line(&self.name));
        if let Some(what) = self.description.as_deref().filter(|what| !what.is_empty()) {
            let _ = writeln!(text, "  description: {}", one_line(what));
        }
        let _ = writeln!(text, "  size:  {}", self.size);
        let _ = write!(text, "  flags: {:#x} (", self.flags.bits());
        for (name, _) in QEMU_FLAGS.iter().filter(|(_, flag)| self.flags.contains(*flag)) {
            let _ = write!(text, " {name}");
        }
        *text += " )\n";
        if let Some([least, preferred, most]) = self.block {
            let _ = writeln!(text, "  min block: {least}");
            let _ = writeln!(text, "  opt block: {preferred}");
            let _ = writeln!(text, "  max block: {most}");
        }
        let bits = if is_long { 64 } else { 32 };
        let _ = writeln!(text, "  transaction size: {bits}-bit");
        if !self.contexts.is_empty() {
            let _ = writeln!(text, "  available meta contexts: {}", self.contexts.len());
            for name in &self.contexts {
                let _ = writeln!(text, "   {}", one_line(name));
            }
        }
    }
}

impl InspectionReport {
    /// The facts of devices as exports of these names.
    pub fn of_devices(devices: &[(&str, Arc<Facts>)]) -> InspectionReport {
        let all: Vec<_> = devices.iter().map(|(_, facts)| facts.name.to_string()).collect();
        let export = |(name, facts): &(&str, Arc<Facts>)| ExportFacts {
            name: (*name).to_string(),
            ..ExportFacts::of_device(facts)
        };
        let exports = devices.iter().map(export).collect();
        InspectionReport {
            owner: ExportOwner::Device { name: all.join(", "), file: None, disks: Vec::new() },
            exports,
        }
    }

    /// The size of the first export in bytes; 0 without one.
    pub fn size(&self) -> u64 {
        self.exports.first().map_or(0, |export| export.size)
    }

    /// The report as nbdinfo prints it, with escape sequences for colours if `color` is true.
    pub fn text(&self, color: bool) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.add_text(&mut text, color);
        text
    }

    /// The report as `nbdinfo --json` prints it.
    pub fn json(&self) -> String {
        json(self)
    }

    fn add_text(&self, out: &mut String, color: bool) -> std::fmt::Result {
        let palette = Palette::new(color);
        match &self.owner {
            ExportOwner::Server { protocol, tls, replies } => {
                let with = if *tls { "with" } else { "without" };
                let packets = match replies {
                    ReplyForm::Simple => "simple",
                    ReplyForm::Structured => "structured",
                    ReplyForm::Extended => "extended",
                };
                writeln!(out, "protocol: {protocol} {with} TLS, using {packets} packets")?;
            }
            ExportOwner::Device { name, file, disks } => {
                writeln!(out, "device: {}", one_line(name))?;
                out.push_str(&file.as_ref().map_or_else(String::new, FileFacts::text));
                out.push_str(&archive::text(disks));
                if self.exports.is_empty() && !disks.is_empty() {
                    writeln!(
                        out,
                        "\thint: for one disk: {}",
                        one_line(&archive::first_disk(name))
                    )?;
                }
            }
        }
        for export in &self.exports {
            write!(out, "{}", palette.head)?;
            if matches!(self.owner, ExportOwner::Server { .. }) {
                writeln!(out, "export={}:", one_line(&json(&export.name)))?;
            }
            if let Some(text) = &export.description {
                writeln!(out, "\tdescription: {}", one_line(text))?;
            }
            writeln!(out, "\texport-size: {}", with_unit(export.size))?;
            if let Some(text) = &export.content {
                writeln!(out, "\tcontent: {}", one_line(text))?;
            }
            write!(out, "{}", palette.reset)?;
            if let Some(uri) = &export.uri {
                writeln!(out, "\turi: {}", one_line(uri))?;
            }
            if !export.contexts.is_empty() {
                writeln!(out, "\tcontexts:")?;
            }
            for context in &export.contexts {
                writeln!(out, "\t\t{}", one_line(context))?;
            }
            for (name, flag, colored) in FLAGS {
                let set = export.flags.contains(flag);
                let (before, after) = match (colored, set) {
                    (true, true) => (palette.good, palette.reset),
                    (true, false) => (palette.bad, palette.reset),
                    (false, _) => ("", ""),
                };
                write!(out, "{before}\t{name}: {set}\n{after}")?;
            }
            for (name, size) in BLOCK_SIZES.iter().zip(export.block.into_iter().flatten()) {
                writeln!(out, "\t{name}: {}", with_unit(size.into()))?;
            }
            if let Some(table) = &export.partitions {
                out.push_str(&partitions::text(table, export.size));
            }
        }
        Ok(())
    }
}

/// The members of nbdinfo's JSON.
impl Serialize for InspectionReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut members = serializer.serialize_map(None)?;
        match &self.owner {
            ExportOwner::Server { protocol, tls, replies } => {
                members.serialize_entry("protocol", protocol)?;
                members.serialize_entry("TLS", tls)?;
                members.serialize_entry("structured", &(*replies != ReplyForm::Simple))?;
                members.serialize_entry("extended", &(*replies == ReplyForm::Extended))?;
            }
            ExportOwner::Device { name, file, disks } => {
                members.serialize_entry("device", name)?;
                if !disks.is_empty() {
                    members.serialize_entry("disks", &archive::entries(disks))?;
                }
                if let Some(file) = file {
                    members.serialize_entry("format", &file.format)?;
                    members.serialize_entry("disk-size", &file.disk_size)?;
                    members.serialize_entry("file-size", &file.file_size)?;
                    members.serialize_entry("hint", &file.hint)?;
                }
            }
        }
        members.serialize_entry("exports", &self.exports)?;
        members.end()
    }
}

/// The members of nbdinfo's JSON.
impl Serialize for ExportFacts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut members = serializer.serialize_map(None)?;
        members.serialize_entry("export-name", &self.name)?;
        let texts =
            [("description", &self.description), ("content", &self.content), ("uri", &self.uri)];
        for (name, text) in texts {
            if let Some(text) = text {
                members.serialize_entry(name, text)?;
            }
        }
        if !self.contexts.is_empty() {
            members.serialize_entry("contexts", &self.contexts)?;
        }
        for (name, flag, _) in FLAGS {
            members.serialize_entry(name, &self.flags.contains(flag))?;
        }
        for (name, size) in BLOCK_SIZES.iter().zip(self.block.into_iter().flatten()) {
            members.serialize_entry(name, &size)?;
        }
        members.serialize_entry("export-size", &self.size)?;
        members.serialize_entry("export-size-str", &format_size(self.size))?;
        if let Some(table) = &self.partitions {
            members.serialize_entry("partition-table", partitions::format_name(table))?;
            members.serialize_entry("sector-size", &table.sector)?;
            members.serialize_entry("partitions", &partitions::entries(table, self.size))?;
        }
        members.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str) -> ExportOwner {
        ExportOwner::Device { name: name.into(), file: None, disks: Vec::new() }
    }

    #[test]
    fn odd_names_stay_valid_json() {
        let name = "a\"b\\c\u{1}\n\tü";
        let owner = device(name);
        let export = ExportFacts {
            name: name.into(),
            contexts: vec![name.into()],
            ..ExportFacts::default()
        };
        let report = InspectionReport { owner, exports: vec![export] };
        let parsed: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(parsed["exports"][0]["export-name"], name);
        assert_eq!(parsed["device"], name);
        let empty = InspectionReport { owner: device(""), exports: Vec::new() };
        let parsed: serde_json::Value = serde_json::from_str(&empty.json()).unwrap();
        assert_eq!(parsed["exports"].as_array().unwrap().len(), 0);
    }

    #[test]
    fn json_has_the_layout_of_nbdinfo() {
        let owner = ExportOwner::Server {
            protocol: "newstyle-fixed",
            tls: false,
            replies: ReplyForm::Structured,
        };
        let name = "a\n\"\u{8}/".to_string();
        let contexts = vec!["x".to_string(), "y".to_string()];
        let first = ExportFacts { name, contexts, ..ExportFacts::default() };
        let exports = vec![first, ExportFacts::default()];
        let text = InspectionReport { owner, exports }.json();
        let head = "{\n\"protocol\": \"newstyle-fixed\",\n\"TLS\": false,\n\"structured\": true,\n\
                    \"extended\": false,\n\"exports\": [\n\t{\n\t\"export-name\": \"a\\u000a\\\"\\u0008/\",\n\
                    \t\"contexts\": [\n\t\t\"x\",\n\t\t\"y\"\n\t],\n\t\"is_rotational\": false,\n";
        assert!(text.starts_with(head), "{text}");
        assert!(text.contains("\t\"export-size-str\": \"0\"\n\t},\n\t{\n"), "{text}");
        assert!(text.ends_with("\t\"export-size-str\": \"0\"\n\t} ]\n}\n"), "{text}");
        let report = InspectionReport { owner: device("d"), exports: vec![] };
        assert_eq!(report.json(), "{\n\"device\": \"d\",\n\"exports\": [\n]\n}\n");
    }

    #[test]
    fn text_of_servers_does_not_act_on_a_terminal() {
        let name = "a\u{1b}[31m\u{9b}\u{202e}\nb";
        let export = ExportFacts {
            name: name.into(),
            description: Some(name.into()),
            content: Some(name.into()),
            uri: Some(name.into()),
            contexts: vec![name.into()],
            ..ExportFacts::default()
        };
        let server =
            ExportOwner::Server { protocol: "newstyle", tls: false, replies: ReplyForm::Simple };
        let mut report = InspectionReport { owner: server, exports: vec![export] };
        let text = report.text(false);
        report.owner = device(name);
        let text = text + &report.text(false);
        assert!(
            !text.chars().any(|c| blockhaul_wire::unprintable(c) && !"\t\n".contains(c)),
            "{text:?}"
        );
        assert!(!text.lines().any(|line| line.starts_with('b')), "{text}");
    }
}
