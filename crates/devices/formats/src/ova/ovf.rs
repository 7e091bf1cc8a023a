//! The description of a virtual machine in an OVA: its disks. Sources: DMTF's DSP0243 ("Open Virtualization Format
//! Specification" 2.1.1), 7 (envelope), 9.1 (DiskSection).

use std::collections::HashMap;

use blockhaul_catalog::percent_decode;
use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};

/// Maximum number of disks of a virtual machine.
const DISKS_MAX: usize = 1000;

/// A disk of a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OvfDisk {
    /// Name of its file in the archive.
    pub(crate) file: String,
    /// Size of the disk in bytes, if it is given in a form that is known here.
    pub(crate) capacity: Option<u64>,
    /// Whether the file is packed with gzip.
    pub(crate) gzip: bool,
}

/// A file that the description lists.
struct OvfFile {
    href: String,
    compression: String,
    is_chunked: bool,
}

/// The disks that have a file, in order.
///
/// # Errors
/// Why this is no description, or one of disks that cannot be read here.
pub(crate) fn disks(text: &str) -> Result<Vec<OvfDisk>, String> {
    let mut reader = Reader::from_str(text.trim_start_matches('\u{feff}'));
    let mut files = HashMap::new();
    let mut listed = Vec::new();
    let mut has_envelope = false;
    loop {
        let event = reader.read_event().map_err(|error| format!("no XML: {error}"))?;
        let tag = match event {
            Event::Start(tag) | Event::Empty(tag) => tag,
            Event::Eof => break,
            _ => continue,
        };
        let attributes = attributes(&tag)?;
        match tag.local_name().as_ref() {
            "Envelope" => has_envelope = true,
            "File" => add_file(&mut files, attributes),
            "Disk" => listed.push(attributes),
            _ => {}
        }
        if listed.len() > DISKS_MAX {
            return Err(format!("more than {DISKS_MAX} disks"));
        }
    }
    if !has_envelope {
        return Err("no <Envelope>".into());
    }
    let disks = listed.iter().filter_map(|disk| resolved(disk, &files).transpose());
    disks.collect()
}

type Attributes = HashMap<String, String>;

/// The attributes of an element, by their names without a prefix.
fn attributes(tag: &BytesStart<'_>) -> Result<Attributes, String> {
    let mut all = Attributes::new();
    for found in tag.attributes() {
        let found = found.map_err(|error| format!("no XML: {error}"))?;
        let value = found
            .normalized_value(XmlVersion::Implicit1_0)
            .map_err(|error| format!("no XML: {error}"))?;
        all.insert(found.key.local_name().as_ref().to_string(), value.into_owned());
    }
    Ok(all)
}

fn add_file(files: &mut HashMap<String, OvfFile>, mut attributes: Attributes) {
    let mut take = |name: &str| attributes.remove(name).unwrap_or_default();
    let id = take("id");
    let file = OvfFile {
        href: take("href"),
        compression: take("compression"),
        is_chunked: !take("chunkSize").is_empty(),
    };
    files.insert(id, file);
}

/// A disk with its file; `None` for one without data.
fn resolved(
    disk: &Attributes,
    files: &HashMap<String, OvfFile>,
) -> Result<Option<OvfDisk>, String> {
    let text = |name: &str| disk.get(name).map_or("", String::as_str);
    let id = text("diskId");
    if text("fileRef").is_empty() {
        return Ok(None);
    }
    if !text("parentRef").is_empty() {
        return Err(format!(
            "disk {id:?} consists of changes to another disk, which is not supported"
        ));
    }
    let reference = text("fileRef");
    let file = files.get(reference);
    let file =
        file.ok_or_else(|| format!("disk {id:?} has the file {reference:?}, which is not listed"))?;
    if file.is_chunked {
        return Err(format!(
            "the file {:?} of disk {id:?} is in chunks, which is not supported",
            file.href
        ));
    }
    let gzip = match file.compression.as_str() {
        "" | "identity" => false,
        "gzip" => true,
        other => {
            return Err(format!(
                "the file {:?} of disk {id:?} has the compression {other:?}",
                file.href
            ));
        }
    };
    let name = percent_decode(&file.href).unwrap_or_else(|_| file.href.clone());
    let capacity = capacity(text("capacity"), text("capacityAllocationUnits"));
    Ok(Some(OvfDisk { file: name, capacity, gzip }))
}

/// A number of units, such as `byte * 2^30` (DSP0004, annex C).
fn capacity(number: &str, units: &str) -> Option<u64> {
    let number: u64 = number.trim().parse().ok()?;
    let mut factor = 1_u64;
    for part in units.split('*').map(str::trim).filter(|part| !part.is_empty() && *part != "byte") {
        let value = match part.split_once('^') {
            Some((base, power)) => {
                base.trim().parse::<u64>().ok()?.checked_pow(power.trim().parse().ok()?)?
            }
            None => part.parse().ok()?,
        };
        factor = factor.checked_mul(value)?;
    }
    number.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A description with these attributes of the file and of the disk.
    fn envelope(file: &str, disk: &str) -> String {
        format!(
            "<?xml version=\"1.0\"?><Envelope xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\"><References>\
             <File ovf:id=\"f1\" ovf:href=\"vm%20disk.vmdk\" {file}/></References><DiskSection>\
             <Disk ovf:diskId=\"d1\" ovf:fileRef=\"f1\" {disk}/><Disk ovf:diskId=\"empty\" \
             ovf:capacity=\"1\"/></DiskSection></Envelope>"
        )
    }

    #[test]
    fn disks_have_the_file_that_they_refer_to() {
        let found =
            disks(&envelope("", "ovf:capacity=\"8\" ovf:capacityAllocationUnits=\"byte * 2^30\""));
        let disk = OvfDisk { file: "vm disk.vmdk".into(), capacity: Some(8 << 30), gzip: false };
        assert_eq!(found, Ok(vec![disk.clone()]));
        let found = disks(&envelope("ovf:compression=\"gzip\"", "ovf:capacity=\"512\""));
        assert_eq!(found, Ok(vec![OvfDisk { capacity: Some(512), gzip: true, ..disk }]));
    }

    #[test]
    fn disks_that_cannot_be_read_are_refused() {
        for (file, disk, said) in [
            ("ovf:chunkSize=\"1000\"", "", "in chunks"),
            ("ovf:compression=\"bzip2\"", "", "compression \"bzip2\""),
            ("", "ovf:parentRef=\"d0\"", "changes to another disk"),
        ] {
            let error = disks(&envelope(file, disk)).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
        let lost = envelope("", "").replace("ovf:id=\"f1\"", "ovf:id=\"f2\"");
        assert!(disks(&lost).unwrap_err().contains("not listed"));
        for text in ["", "no", "<a></b>", "<Envelope a=\"1\" a=\"2\">", "<Other/>"] {
            assert!(disks(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_description_that_is_cut_or_damaged_anywhere_is_survived() {
        let whole = envelope("ovf:compression=\"gzip\"", "ovf:capacity=\"512\"");
        for end in 0..whole.len() {
            let _ = disks(&whole[..end]);
            for byte in ["\0", "<", "\"", "&", "é"] {
                let _ = disks(&format!("{}{byte}{}", &whole[..end], &whole[end + 1..]));
            }
        }
    }

    #[test]
    fn units_multiply() {
        assert_eq!(capacity("10", "byte * 2^30"), Some(10 << 30));
        assert_eq!(capacity("10", "byte * 1024"), Some(10 << 10));
        assert_eq!(capacity("10", ""), Some(10));
        for (number, units) in [("x", ""), ("1", "byte * x"), ("1", "2^64"), ("2", "byte * 2^63")] {
            assert_eq!(capacity(number, units), None, "{number} {units}");
        }
    }
}
