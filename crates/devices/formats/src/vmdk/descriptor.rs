//! The descriptor: a text with the extents of the disk and its parent ("The Descriptor File").

use blockhaul_block::Result;

use crate::mapped::{damaged, unsupported};

/// The scheme, in errors.
pub(super) const FORMAT: &str = "vmdk";
/// Most extents of a disk: each is an open file.
const EXTENTS_MAX: usize = 2000;
/// The parent's content identifier of a disk without a parent.
const NO_PARENT: u32 = 0xffff_ffff;
const SECTOR: u64 = 512;

/// What a descriptor says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// Changes when the disk is written.
    pub(super) content_id: Option<u32>,
    /// The parent's content identifier and name, if there is a parent.
    pub(super) parent: Option<(u32, String)>,
    pub(super) extents: Vec<ExtentLine>,
}

/// A line about an extent ("The Extent Descriptions").
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExtentLine {
    /// Length in bytes.
    pub(super) len: u64,
    pub(super) kind: ExtentKind,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum ExtentKind {
    Zero,
    /// Plain bytes of a file, from this offset on.
    Flat {
        name: String,
        at: u64,
    },
    Sparse {
        name: String,
    },
}

/// Whether bytes are the beginning of a descriptor.
pub(super) fn is_one(head: &[u8]) -> bool {
    let line = head.get(..512.min(head.len())).unwrap_or_default();
    let text = String::from_utf8_lossy(line).to_ascii_lowercase();
    text.trim_start().starts_with("# disk descriptorfile")
}

impl Descriptor {
    /// Reads a descriptor; what follows a zero byte is padding. One that is cut off within its extents would be
    /// of a smaller disk: it is refused where that can be seen.
    pub(super) fn parse(bytes: &[u8]) -> Result<Descriptor> {
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        let text = String::from_utf8_lossy(bytes.get(..end).unwrap_or_default());
        let mut found = Descriptor::default();
        let mut parent_id = NO_PARENT;
        let mut parent_name = None;
        let [mut is_split, mut has_database] = [false; 2];
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
            if let Some(extent) = ExtentLine::parse(line)? {
                found.extents.push(extent);
                if found.extents.len() > EXTENTS_MAX {
                    let text = format!("a disk of more than {EXTENTS_MAX} extents");
                    return Err(unsupported(FORMAT, text, "convert it to a single file"));
                }
                continue;
            }
            let Some((key, value)) = line.split_once('=') else { continue };
            let value = value.trim().trim_matches('"');
            match key.trim().to_ascii_lowercase().as_str() {
                "cid" => found.content_id = Some(identifier(key, value)?),
                "parentcid" => parent_id = identifier(key, value)?,
                "parentfilenamehint" => parent_name = Some(value.to_string()),
                // Many extents, and the disk data base, which all programs write after them.
                "createtype" => is_split = value.starts_with("twoGbMaxExtent"),
                key => has_database |= key.starts_with("ddb."),
            }
        }
        let is_cut =
            |line: &str| !text.ends_with('\n') && matches!(ExtentLine::parse(line), Ok(Some(_)));
        if text.lines().last().is_some_and(is_cut) || (is_split && !has_database) {
            return Err(damaged(
                FORMAT,
                "the descriptor is cut off: there is nothing after its extents",
            ));
        }
        if parent_id != NO_PARENT {
            found.parent = Some((parent_id, parent_name.unwrap_or_default()));
        }
        Ok(found)
    }
}

fn identifier(key: &str, value: &str) -> Result<u32> {
    let bad = |_| damaged(FORMAT, format!("{key}={value:?} in the descriptor"));
    u32::from_str_radix(value, 16).map_err(bad)
}

impl ExtentLine {
    /// Reads a line; none if it is about something else.
    fn parse(line: &str) -> Result<Option<ExtentLine>> {
        let mut words = line.splitn(4, char::is_whitespace).map(str::trim);
        let access = words.next().unwrap_or_default();
        if !["RW", "RDONLY", "NOACCESS"].contains(&access) {
            return Ok(None);
        }
        let bad = || damaged(FORMAT, format!("the line {line:?} of the descriptor"));
        let (Some(sectors), Some(kind)) = (words.next(), words.next()) else { return Err(bad()) };
        let len = sectors.parse::<u64>().ok().and_then(|sectors| sectors.checked_mul(SECTOR));
        let len = len.filter(|len| *len > 0).ok_or_else(bad)?;
        let rest = words.next().unwrap_or_default();
        // A name in quotation marks, and an offset.
        let name = rest.split('"').nth(1).filter(|name| !name.is_empty());
        let name = || name.map(str::to_string).ok_or_else(bad);
        let kind = match kind {
            "ZERO" => ExtentKind::Zero,
            "FLAT" | "VMFS" => {
                let at = rest.rsplit('"').next().unwrap_or_default().trim();
                let sectors = if at.is_empty() { Some(0) } else { at.parse::<u64>().ok() };
                let at = sectors.and_then(|sectors| sectors.checked_mul(SECTOR)).ok_or_else(bad)?;
                ExtentKind::Flat { name: name()?, at }
            }
            "SPARSE" | "VMFSSPARSE" | "SESPARSE" => ExtentKind::Sparse { name: name()? },
            other => {
                let text = format!("extents of type {other:?} are not known");
                return Err(unsupported(
                    FORMAT,
                    text,
                    "copy the disk with vddk: or VMware's tools",
                ));
            }
        };
        if access == "NOACCESS" {
            let text = format!("an extent without access: {line:?}");
            return Err(unsupported(FORMAT, text, "copy the disk with VMware's tools"));
        }
        Ok(Some(ExtentLine { len, kind }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_has_extents_and_a_parent() {
        let text = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=0a0b0c0d\n\
                    parentFileNameHint=\"base disk.vmdk\"\ncreateType=\"twoGbMaxExtentFlat\"\n\n\
                    # Extent description\nRW 4192256 FLAT \"d f001.vmdk\" 128\r\n\
                    RDONLY 100 SPARSE \"d-s002.vmdk\"\nRW 63 ZERO\nRW 9 VMFS \"x\"\n\nddb.a = \"b\"\0junk";
        let found = Descriptor::parse(text.as_bytes()).unwrap();
        let flat = |name: &str, at| ExtentKind::Flat { name: name.into(), at };
        let kinds = [
            (4192256, flat("d f001.vmdk", 65536)),
            (100, ExtentKind::Sparse { name: "d-s002.vmdk".into() }),
            (63, ExtentKind::Zero),
            (9, flat("x", 0)),
        ];
        let extents = kinds.map(|(sectors, kind)| ExtentLine { len: sectors * 512, kind });
        assert_eq!(found.extents, extents);
        assert_eq!(found.content_id, Some(0xffff_fffe));
        assert_eq!(found.parent, Some((0x0a0b_0c0d, "base disk.vmdk".into())));
        assert!(is_one(text.as_bytes()) && !is_one(b"KDMV"));
    }

    #[test]
    fn bad_lines_are_refused() {
        for line in [
            "RW 99999999999999999999 FLAT \"a\" 0",
            "RW 18446744073709551615 ZERO",
            "RW 0 ZERO",
            "RW x ZERO",
            "RW 1 FLAT",
            "RW 1 FLAT \"\" 0",
            "RW 1 FLAT \"a\" -1",
            "RW 1 VMFSRDM \"a\"",
            "NOACCESS 1 FLAT \"a\" 0",
            "CID=xyz",
            "RW",
            "RW 1",
        ] {
            assert!(Descriptor::parse(line.as_bytes()).is_err(), "{line}");
        }
        let many = "RW 1 ZERO\n".repeat(EXTENTS_MAX + 1);
        assert!(Descriptor::parse(many.as_bytes()).is_err());
        assert_eq!(Descriptor::parse(b"\xff\xfe RW\n").unwrap(), Descriptor::default());
    }

    #[test]
    fn a_descriptor_that_is_cut_within_its_extents_is_refused() {
        let text = "# Disk DescriptorFile\ncreateType=\"twoGbMaxExtentFlat\"\nRW 9 FLAT \"a\" 128\n\
                    RW 8 FLAT \"b\" 128\nRW 7 ZERO\n# The Disk Data Base\nddb.a = \"b\"\n";
        let all = Descriptor::parse(text.as_bytes()).unwrap().extents;
        assert_eq!(all.len(), 3);
        let first = text.find("RW").unwrap();
        for end in first..text.len() {
            if let Ok(cut) = Descriptor::parse(&text.as_bytes()[..end]) {
                assert_eq!(cut.extents, all, "{}", &text[..end]);
            }
        }
        // Another type of disk need not have what follows; each line needs its end.
        let text = text.replace("twoGbMaxExtentFlat", "custom");
        let end = text.find("# The").unwrap();
        assert_eq!(Descriptor::parse(&text.as_bytes()[..end]).unwrap().extents, all);
        assert!(Descriptor::parse(&text.as_bytes()[..end - 1]).is_err());
    }
}
