//! Facts of exports as text and JSON, in the formats of nbdinfo 1.22.

use std::fmt::Write as _;

use blockhaul_catalog::format_size;
use blockhaul_wire::{ExportFlags, Replies};

use crate::out::one_line;

/// The facts of a server or device.
#[derive(Debug)]
pub struct Report {
    /// The owner of the exports.
    pub of: Of,
    /// One export, or all that the server lists.
    pub exports: Vec<Export>,
}

/// The owner of exports.
#[derive(Debug)]
pub enum Of {
    /// An NBD server's.
    Server {
        /// `oldstyle`, `newstyle` or `newstyle-fixed`.
        protocol: &'static str,
        /// Whether the connection is encrypted.
        tls: bool,
        /// The form of replies.
        replies: Replies,
    },
    /// A device of this program, by its name.
    Device(String),
}

/// The facts of an export.
#[derive(Debug, Default)]
pub struct Export {
    /// Name.
    pub name: String,
    /// A text for users.
    pub description: Option<String>,
    /// Size in bytes.
    pub size: u64,
    /// A guess at its contents.
    pub content: Option<String>,
    /// Its URI.
    pub uri: Option<String>,
    /// Its contexts.
    pub contexts: Vec<String>,
    /// Its flags.
    pub flags: ExportFlags,
    /// Block sizes in bytes, if reported: minimum, preferred, maximum.
    pub block: Option<[u32; 3]>,
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

const BLOCK_SIZES: [&str; 3] = ["block_size_minimum", "block_size_preferred", "block_size_maximum"];

/// The names of flags that `qemu-nbd --list` prints, in the order of their bits.
#[cfg(feature = "formats")]
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

#[cfg(feature = "formats")]
impl Report {
    /// The exports, as `qemu-nbd --list` prints them.
    pub fn as_qemu(&self) -> String {
        let mut text = format!("exports available: {}\n", self.exports.len());
        let is_long = matches!(self.of, Of::Server { replies: Replies::Extended, .. });
        for export in &self.exports {
            export.add_as_qemu(is_long, &mut text);
        }
        text
    }
}

#[cfg(feature = "formats")]
impl Export {
    fn add_as_qemu(&self, is_long: bool, text: &mut String) {
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

/// nbdinfo's colours; empty without.
pub struct Palette {
    /// The head of an export.
    pub head: &'static str,
    /// True, clean.
    pub good: &'static str,
    /// False, dirty.
    pub bad: &'static str,
    /// Ranges of data.
    pub data: &'static str,
    /// Ranges of the top image.
    pub local: &'static str,
    /// Ranges of the images below.
    pub backing: &'static str,
    /// Back to normal.
    pub reset: &'static str,
}

impl Palette {
    /// Colours, or none.
    pub fn new(color: bool) -> Palette {
        if color {
            Palette {
                head: "\x1b[1;35m",
                good: "\x1b[22;32m",
                bad: "\x1b[22;31m",
                data: "\x1b[1;30m",
                local: "\x1b[1;37m\x1b[40m",
                backing: "\x1b[47m",
                reset: "\x1b[0m",
            }
        } else {
            Palette { head: "", good: "", bad: "", data: "", local: "", backing: "", reset: "" }
        }
    }
}

impl Report {
    /// The size of the only export.
    pub fn size(&self) -> u64 {
        self.exports.first().map_or(0, |export| export.size)
    }

    /// As text or JSON.
    pub fn show(&self, json: bool, color: bool) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = if json { self.json(&mut text) } else { self.text(&mut text, color) };
        text
    }

    fn text(&self, out: &mut String, color: bool) -> std::fmt::Result {
        let palette = Palette::new(color);
        match &self.of {
            Of::Server { protocol, tls, replies } => {
                let with = if *tls { "with" } else { "without" };
                let packets = match replies {
                    Replies::Simple => "simple",
                    Replies::Structured => "structured",
                    Replies::Extended => "extended",
                };
                writeln!(out, "protocol: {protocol} {with} TLS, using {packets} packets")?;
            }
            Of::Device(name) => writeln!(out, "device: {}", one_line(name))?,
        }
        for export in &self.exports {
            write!(out, "{}", palette.head)?;
            if matches!(self.of, Of::Server { .. }) {
                writeln!(out, "export={}:", one_line(&quoted(&export.name)))?;
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
        }
        Ok(())
    }

    fn json(&self, out: &mut String) -> std::fmt::Result {
        out.push_str("{\n");
        match &self.of {
            Of::Server { protocol, tls, replies } => {
                writeln!(out, "\"protocol\": {},", quoted(protocol))?;
                writeln!(out, "\"TLS\": {tls},")?;
                writeln!(out, "\"structured\": {},", *replies != Replies::Simple)?;
                writeln!(out, "\"extended\": {},", *replies == Replies::Extended)?;
            }
            Of::Device(name) => writeln!(out, "\"device\": {},", quoted(name))?,
        }
        out.push_str("\"exports\": [\n");
        for (index, export) in self.exports.iter().enumerate() {
            if index > 0 {
                out.push_str(",\n");
            }
            out.push_str("\t{\n");
            let texts = [
                ("export-name", Some(&export.name)),
                ("description", export.description.as_ref()),
                ("content", export.content.as_ref()),
                ("uri", export.uri.as_ref()),
            ];
            for (name, text) in texts {
                if let Some(text) = text {
                    writeln!(out, "\t\"{name}\": {},", quoted(text))?;
                }
            }
            if !export.contexts.is_empty() {
                let contexts: Vec<_> =
                    export.contexts.iter().map(|name| format!("\t\t{}", quoted(name))).collect();
                writeln!(out, "\t\"contexts\": [\n{}\n\t],", contexts.join(",\n"))?;
            }
            for (name, flag, _) in FLAGS {
                writeln!(out, "\t\"{name}\": {},", export.flags.contains(flag))?;
            }
            for (name, size) in BLOCK_SIZES.iter().zip(export.block.into_iter().flatten()) {
                writeln!(out, "\t\"{name}\": {size},")?;
            }
            writeln!(out, "\t\"export-size\": {},", export.size)?;
            write!(out, "\t\"export-size-str\": {}\n\t}}", quoted(&format_size(export.size)))?;
        }
        let last = if self.exports.is_empty() { "" } else { " " };
        writeln!(out, "{last}]\n}}")
    }
}

/// A size, with a shorter form in parentheses if there is one.
fn with_unit(size: u64) -> String {
    let short = format_size(size);
    if short == size.to_string() { short } else { format!("{size} ({short})") }
}

/// A JSON string.
pub fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => {
                // Writing to a string does not fail.
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_stay_valid_json() {
        let name = "a\"b\\c\u{1}\n\tü";
        let of = Of::Device(name.into());
        let export = Export { name: name.into(), contexts: vec![name.into()], ..Export::default() };
        let report = Report { of, exports: vec![export] };
        let parsed: serde_json::Value = serde_json::from_str(&report.show(true, true)).unwrap();
        assert_eq!(parsed["exports"][0]["export-name"], name);
        assert_eq!(parsed["device"], name);
        let empty = Report { of: Of::Device(String::new()), exports: Vec::new() };
        let parsed: serde_json::Value = serde_json::from_str(&empty.show(true, false)).unwrap();
        assert_eq!(parsed["exports"].as_array().unwrap().len(), 0);
    }

    #[test]
    fn text_of_servers_does_not_act_on_a_terminal() {
        let name = "a\u{1b}[31m\u{9b}\u{202e}\nb";
        let export = Export {
            name: name.into(),
            description: Some(name.into()),
            content: Some(name.into()),
            uri: Some(name.into()),
            contexts: vec![name.into()],
            ..Export::default()
        };
        let server = Of::Server { protocol: "newstyle", tls: false, replies: Replies::Simple };
        let mut report = Report { of: server, exports: vec![export] };
        let text = report.show(false, false);
        report.of = Of::Device(name.into());
        let text = text + &report.show(false, false);
        assert!(
            !text.chars().any(|c| blockhaul_wire::unprintable(c) && !"\t\n".contains(c)),
            "{text:?}"
        );
        assert!(!text.lines().any(|line| line.starts_with('b')), "{text}");
    }

    #[test]
    fn sizes_have_a_unit_where_it_is_exact() {
        assert_eq!(with_unit(8 << 20), "8388608 (8M)");
        assert_eq!(with_unit(1000), "1000");
        assert_eq!(with_unit(0), "0");
    }
}
