//! `--ranges`: lists of ranges as programs that know what has changed print them.
//!
//! - `json`: ranges of nbdinfo, rbd diff, VMware, CSI, and our own.
//! - `thin_delta`: its XML. `bitmap`: the changed blocks of XCP-ng in base64.
//! - `command`: a command that prints a list.
//!
//! Some kinds of lists say for which part of a disk they are complete, see `coverage`. Such a list must be one
//! of all of the source: the rest has changes that nobody has listed.

mod bitmap;
mod command;
mod coverage;
mod json;
mod thin_delta;
mod unique;

use std::io::Read;
use std::path::Path;

use blockhaul_block::{gaps, join_ranges};
use blockhaul_io::plain;

use self::coverage::{Contents, ListCoverage, ListKind};
use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};

/// Maximum length of a list in bytes.
const LIST_MAX: u64 = 512 << 20;

/// A list of ranges.
#[derive(Debug)]
pub(crate) struct RangeList {
    /// The option and the file or command, for messages.
    name: String,
    /// Start and end of ranges, joined.
    ranges: Vec<(u64, u64)>,
    /// None for lists that do not say it.
    coverage: Option<ListCoverage>,
    /// Bytes of a block, if ranges are in blocks, of which the last may reach beyond the end of the source.
    block: u64,
}

impl RangeList {
    /// Reads a file, or standard input for `-`.
    ///
    /// # Errors
    /// [`TransferErrorKind::Open`] if it cannot be read, or is not a whole list of a known kind.
    /// [`TransferErrorKind::Request`] if it is a directory.
    pub fn read(path: &Path) -> Result<RangeList> {
        let name = format!("--ranges: {}", path.display());
        if path.is_dir() {
            let text = format!("{name}: it is a directory: give the name of a file in it");
            return Err(TransferError::new(
                TransferErrorKind::Request,
                TransferStep::Selection,
                text,
            ));
        }
        let mut bytes = Vec::new();
        let read = if path == Path::new("-") {
            std::io::stdin().lock().take(LIST_MAX + 1).read_to_end(&mut bytes)
        } else {
            std::fs::File::open(path)
                .and_then(|file| file.take(LIST_MAX + 1).read_to_end(&mut bytes))
        };
        let read = read.map_err(|error| plain(&error)).map(|_| bytes);
        RangeList::of(name, read)
    }

    /// Runs a command of the shell, and reads its output. Waits for its end.
    ///
    /// # Errors
    /// As [`RangeList::read`]; and if the command fails, whatever it has printed.
    pub fn of_command(script: &str) -> Result<RangeList> {
        let name = format!("--ranges-command: {}", command::shown(script));
        RangeList::of(name, command::output(script, LIST_MAX))
    }

    fn of(name: String, read: Result<Vec<u8>, String>) -> Result<RangeList> {
        let parsed = read.and_then(|bytes| {
            if bytes.len() as u64 > LIST_MAX {
                return Err(format!("the list is longer than {LIST_MAX} bytes"));
            }
            let text = String::from_utf8(bytes);
            parse(&text.map_err(|error| format!("the list is not text: {}", error.utf8_error()))?)
        });
        match parsed {
            Ok(((ranges, coverage), block)) => {
                Ok(RangeList { name, ranges: join_ranges(ranges), coverage, block })
            }
            Err(why) => {
                let text = format!("{name}: {why}");
                Err(TransferError::new(TransferErrorKind::Open, TransferStep::Selection, text))
            }
        }
    }

    /// The ranges for a source of `size` bytes: offsets and lengths, ascending, apart from each other and
    /// not empty. A list that is complete for a part of it only is refused unless `partial`: then it is
    /// reported as a warning what is left out.
    ///
    /// # Errors
    /// Why it is not the list of such a source, with a remedy.
    pub fn fit(&self, size: u64, partial: bool) -> Result<Vec<(u64, u64)>, String> {
        let RangeList { name, ranges, coverage, block } = self;
        let mut ranges = ranges.clone();
        if let Some((_, end)) = ranges.last_mut()
            && (1..*block).contains(&end.saturating_sub(size))
        {
            *end = size;
        }
        if let Some(ListCoverage { kind, ranges: covered }) = coverage {
            let is_silent = covered.is_empty();
            let covered = join_ranges(covered.clone());
            let end = covered.last().map_or(0, |range| range.1);
            match kind {
                ListKind::XapiBitmap if bitmap::fits(end, size) => {
                    bitmap::clip(&mut ranges, size).map_err(|why| format!("{name}: {why}"))?;
                }
                _ if end > size => {
                    return Err(format!("{name}: {}", kind.beyond(end, size)));
                }
                _ => {}
            }
            let missing = gaps(&covered, size);
            if let Some(first) = missing.first() {
                let total: u64 = missing.iter().map(|(start, end)| end - start).sum();
                let more = if missing.len() > 1 { "and others are" } else { "are" };
                let missing = format!("bytes {} to {} {more} missing", first.0, first.1 - 1);
                if !partial {
                    let why = match first.0 {
                        0 if is_silent => kind.silent(),
                        at => kind.incomplete(size, &missing, at),
                    };
                    let partial = "or copy only what it covers with --ranges-partial";
                    return Err(format!("{name}: {why}, {partial}"));
                }
                log::warn!(
                    "{name}: {missing} in the list: {total} of the source's {size} bytes are not copied"
                );
            }
        }
        Ok(ranges.into_iter().map(|(start, end)| (start, end - start)).collect())
    }
}

/// The contents of a list, and the bytes of a block.
fn parse(text: &str) -> Result<(Contents, u64), String> {
    // PowerShell writes a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match text.trim_start().as_bytes().first() {
        None => {
            Err("the list is empty: did the program fail? If nothing has changed, write []"
                .to_string())
        }
        Some(b'<') => thin_delta::parse(text).map(|(ranges, block)| ((ranges, None), block)),
        Some(b'{' | b'[') => Ok((json::parse(text)?, 1)),
        Some(_) => match bitmap::parse(text) {
            Ok(contents) => Ok((contents, 1)),
            Err(why) => {
                Err(format!("neither JSON nor XML of thin_delta, nor a bitmap in base64: {why}"))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranges of a list for a disk of this size, or why it is refused.
    fn fit(text: &str, size: u64, partial: bool) -> Result<Vec<(u64, u64)>, String> {
        let list = RangeList::of("--ranges: list".into(), Ok(text.as_bytes().to_vec()));
        list.map_err(|failure| failure.to_string())?.fit(size, partial)
    }

    #[test]
    fn lists_of_other_programs_are_read() {
        let lists = [
            // JSON lines.
            "{\"offset\": 0, \"length\": 4096}\n{\"offset\": 8192, \"length\": 512}\n",
            // nbdinfo --map --json, of a bitmap.
            r#"[{ "offset": 0, "length": 4096, "type": 1, "description": "dirty" },
                { "offset": 4096, "length": 4096, "type": 0, "description": "clean" },
                { "offset": 8192, "length": 512, "type": 1, "description": "dirty" },
                { "offset": 8704, "length": 296, "type": 0, "description": "clean" }]"#,
            // Only what is dirty of it.
            r#"[{ "offset": 0, "length": 4096, "type": 1, "description": "dirty" },
                { "offset": 8192, "length": 512, "type": 1, "description": "dirty" }]"#,
            // rbd diff --format json
            r#"[{"offset":0,"length":4096,"exists":"true"},{"offset":8192,"length":512,"exists":"false"}]"#,
            // VMware
            r#"{"startOffset": 0, "length": 9000, "changedArea":
                [{"start": 8192, "length": 512}, {"start": 0, "length": 4096}]}"#,
            // Several answers, which overlap, out of order; one without changes.
            r#"[{"startOffset": 8000, "length": 1000, "changedArea": [{"start": 8192, "length": 512}]},
                {"startOffset": 5000, "length": 3000},
                {"startOffset": 0, "length": 6000, "changedArea": [{"start": 0, "length": 4096}]}]
               {"startOffset": 100, "length": 200, "changedArea": null}"#,
            // CSI
            r#"{"block_metadata_type": 1, "volume_capacity_bytes": 9000,
                "block_metadata": [{"byte_offset": 0, "size_bytes": 4096}]}
               {"volumeCapacityBytes": "9000", "blockMetadata": [{"byteOffset": "8192", "sizeBytes": "512"}]}"#,
            // Without zeroes and empty lists, as protocol buffers are printed.
            r#"{"volumeCapacityBytes": "9000", "blockMetadataType": "VARIABLE_LENGTH"}
               {"volumeCapacityBytes": "9000",
                "blockMetadata": [{"sizeBytes": "4096"}, {"byteOffset": "8192", "sizeBytes": "512"}]}"#,
            // As pyVmomi and PowerShell write.
            "\u{feff}{\"_vimtype\": \"vim.VirtualMachine.DiskChangeInfo\", \"dynamicType\": null,
              \"dynamicProperty\": [], \"startOffset\": 0, \"length\": 8000,
              \"changedArea\": [{\"start\": 0, \"length\": 4096}, {\"start\": 8192, \"length\": 512}]}
             {\"_vimtype\": \"x\", \"dynamicProperty\": [], \"startOffset\": 8000, \"length\": 1000}",
        ];
        for text in lists {
            assert_eq!(fit(text, 9000, false).unwrap(), [(0, 4096), (8192, 512)], "{text}");
        }
        let joined = r#"[{"offset":10,"length":5},{"offset":0,"length":10},{"offset":3,"length":1},
                         {"offset":20,"length":0}]"#;
        assert_eq!(fit(joined, 99, false).unwrap(), [(0, 15)]);
        assert_eq!(fit("[]", 99, false).unwrap(), []);
    }

    #[test]
    fn lists_of_a_part_of_the_disk_are_refused() {
        let answer = |at: u64, len: u64| {
            format!(
                r#"{{"startOffset":{at},"length":{len},"changedArea":[{{"start":{at},"length":10}}]}}"#
            )
        };
        let csi = r#"{"volume_capacity_bytes": 5000, "block_metadata": [{"byte_offset": 0, "size_bytes": 10}]}"#;
        let csi_without = r#"{"block_metadata": [{"byte_offset": 0, "size_bytes": 10}]}"#;
        let map = r#"[{"offset":0,"length":10,"type":1,"description":"dirty"},
                      {"offset":10,"length":4990,"type":0,"description":"clean"}]"#;
        let without = r#"{"changedArea":[{"start":0,"length":10}]}"#;
        for (text, said, left) in [
            (
                answer(0, 5000),
                "bytes 5000 to 8999 are missing: query again with startOffset=5000",
                1,
            ),
            (answer(5000, 4000), "bytes 0 to 4999 are missing: query again with startOffset=0 ", 1),
            (
                answer(0, 2000) + &answer(3000, 2000) + &answer(7000, 2000),
                "bytes 2000 to 2999 and others are missing: query again with startOffset=2000",
                3,
            ),
            (without.into(), "no answer of QueryChangedDiskAreas has startOffset and length", 1),
            (
                csi.into(),
                "a volume of 5000 bytes (volume_capacity_bytes), but the source has 9000",
                1,
            ),
            (csi_without.into(), "do not say the size of their volume", 1),
            (
                map.into(),
                "the map does not cover all of the source's 9000 bytes: bytes 5000 to 8999",
                1,
            ),
        ] {
            let error = fit(&text, 9000, false).unwrap_err();
            assert!(error.starts_with("--ranges: list: ") && error.contains(said), "{error}");
            assert!(error.contains("--ranges-partial"), "{error}");
            assert_eq!(fit(&text, 9000, true).unwrap().len(), left, "{text}");
        }
        // Of a larger disk: it is another one.
        for (text, said) in [
            (answer(0, 9001), "end at 9001, but the source has 9000 bytes"),
            (
                csi.replace("5000", "9001"),
                "a volume of 9001 bytes (volume_capacity_bytes), but the",
            ),
            (map.replace("4990", "8991"), "the ranges of the map end at 9001"),
        ] {
            for partial in [false, true] {
                let error = fit(&text, 9000, partial).unwrap_err();
                assert!(error.contains(said), "{error}");
            }
        }
    }

    #[test]
    fn wrong_lists_are_refused_with_the_line() {
        for (text, said) in [
            ("", "the list is empty"),
            (" \n", "the list is empty"),
            ("disk.raw", "neither JSON nor XML"),
            ("null", "neither JSON nor XML"),
            ("true", "neither JSON nor XML"),
            ("{\"offset\": 1, \"length\": 1}\n{\"offset\": 1}", "line 2: not a range"),
            ("{\"offset\": 1, \"length\": 1}\nAAAA", "not JSON"),
            ("[1, 2]", "not a range"),
            ("{}", "not a range"),
            (r#"{"error": "no such snapshot"}"#, "not a range"),
            (r#"{"offset": -1, "length": 1}"#, "not a range"),
            (r#"{"offset": 9223372036854775807, "length": 1}"#, "beyond 2^63"),
            (r#"{"block_metadata": 5}"#, "not a list"),
            (r#"{"block_metadata": [[]]}"#, "not a range"),
            (r#"{"startOffset": 0, "length": -1, "changedArea": []}"#, "line 1: not a range"),
            (r#"{"startOffset": 9223372036854775807, "length": 1}"#, "beyond 2^63"),
            (
                r#"{"volume_capacity_bytes": 5, "block_metadata": []}
                   {"volume_capacity_bytes": 6, "block_metadata": []}"#,
                "line 2: volume_capacity_bytes is 6, and was 5 before",
            ),
            (r#"{"volume_capacity_bytes": "x", "block_metadata": []}"#, "not a number of bytes"),
            (
                r#"{"startOffset": 0, "length": 1, "changedArea": []}
                   {"volume_capacity_bytes": 1, "block_metadata": []}"#,
                "more than one kind",
            ),
            ("<html></html>", "unknown element <html>"),
            (
                r#"{"startOffset": 0, "length": 9, "ChangedArea": [{"start": 0, "length": 9}]}"#,
                "line 1: no changedArea, but the unknown member \"ChangedArea\"",
            ),
            (r#"{"startOffset": 0, "length": 9, "changedAreas": []}"#, "member \"changedAreas\""),
            (r#"{"startOffset": 0, "length": 9, "error": "fault"}"#, "unknown member \"error\""),
            (
                r#"{"startOffset": 0, "length": 9, "changedArea": null, "error": "fault"}"#,
                "line 1: no changedArea, but the unknown member \"error\"",
            ),
            (
                r#"{"volumeCapacityBytes": "9", "blockMetadata": null, "error": "fault"}"#,
                "no block_metadata, but the unknown member \"error\"",
            ),
            (
                r#"{"volume_capacity_bytes": "9", "block_metadata": null, "ranges": [1]}"#,
                "no block_metadata, but the unknown member \"ranges\"",
            ),
            (
                r#"{"volumeCapacityBytes": "9", "error": "fault"}"#,
                "no block_metadata, but the unknown member \"error\"",
            ),
            (
                r#"{"block_metadata": [], "blockMetadata": [], "volume_capacity_bytes": 9}"#,
                "has \"block_metadata\" and \"blockMetadata\"",
            ),
            (
                r#"{"volumeCapacityBytes": 9, "volume_capacity_bytes": 9}"#,
                "has \"volume_capacity_bytes\" and",
            ),
            (
                r#"{"volumeCapacityBytes": 9, "blockMetadata": [{"Offset": 5, "sizeBytes": 1}]}"#,
                "no byte_offset, but the unknown member \"Offset\"",
            ),
            (r#"{"volumeCapacityBytes": 9, "blockMetadata": [{}]}"#, "not a range"),
            (r#"{"sizeBytes": 9}"#, "not a range"),
            // qemu-img map --output=json: on the disk, and in the file.
            (
                r#"[{"start": 0, "length": 4, "depth": 0, "present": true, "zero": true, "data": false},
                    {"start": 4, "length": 5, "depth": 0, "present": true, "zero": false, "data": true,
                     "offset": 327680}]"#,
                "has \"offset\" and \"start\"",
            ),
            (r#"{"offset": 0, "length": 1, "size_bytes": 2}"#, "has \"length\" and \"size_bytes\""),
        ] {
            let error = fit(text, 9, false).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn lists_with_a_name_twice_are_refused() {
        for (text, name) in [
            (r#"{"offset": 0, "length": 1, "offset": 2}"#, "offset"),
            (
                r#"[{"offset": 0, "length": 1}, {"offset": 2, "length": 1, "len\u0067th": 3}]"#,
                "length",
            ),
            (
                r#"[{"offset": 0, "length": 9, "type": 1, "description": "dirty", "description": "clean"}]"#,
                "description",
            ),
            (
                r#"{"startOffset": 0, "length": 9, "changedArea": [{"start": 0, "length": 9}],
                    "changedArea": []}"#,
                "changedArea",
            ),
            (
                r#"{"startOffset": 0, "length": 9, "changedArea": [{"start": 0, "start": 1, "length": 1}]}"#,
                "start",
            ),
            (
                r#"{"volume_capacity_bytes": 9, "block_metadata": [{"size_bytes": 9}], "block_metadata": null}"#,
                "block_metadata",
            ),
            (
                r#"{"volumeCapacityBytes": 9, "blockMetadata": [{"sizeBytes": "9", "sizeBytes": "1"}]}"#,
                "sizeBytes",
            ),
        ] {
            let error = fit(text, 9, false).unwrap_err();
            let said = format!("ambiguous: the same object has {name:?} twice");
            assert!(error.contains(&said) && error.contains(" at line "), "{text}: {error}");
        }
        for (once, twice) in [
            ("begin=\"0\"", "begin=\"0\" begin=\"1\""),
            ("length=\"1\"", "length=\"1\" length=\"2\""),
            ("data_block_size=\"8\"", "data_block_size=\"8\" data_block_size=\"16\""),
        ] {
            let list = "<superblock data_block_size=\"8\"><diff left=\"1\" right=\"2\"><different begin=\"0\" \
                        length=\"1\"/></diff></superblock>";
            assert!(fit(list, 1 << 20, false).is_ok());
            let error = fit(&list.replace(once, twice), 1 << 20, false).unwrap_err();
            assert!(error.contains("line 1: ") && error.contains("duplicate"), "{twice}: {error}");
        }
    }

    #[test]
    fn the_last_block_of_thin_delta_ends_with_the_volume() {
        let list = |begin: u64, length: u64| {
            format!(
                "<superblock data_block_size=\"8\"><diff left=\"1\" right=\"2\"><different begin=\"{begin}\" \
                 length=\"{length}\"/></diff></superblock>"
            )
        };
        let size = 3 * 4096 + 512;
        assert_eq!(fit(&list(2, 2), size, false).unwrap(), [(8192, 4096 + 512)]);
        assert_eq!(fit(&list(3, 1), size, false).unwrap(), [(3 * 4096, 512)]);
        // What is of another disk stays so, and is refused where it is used.
        for (begin, length) in [(3, 2), (4, 1)] {
            let expected = [(begin * 4096, length * 4096)];
            assert_eq!(fit(&list(begin, length), size, false).unwrap(), expected);
        }
        assert_eq!(fit(&list(3, 1), 3 * 4096, false).unwrap(), [(3 * 4096, 4096)]);
        let json = r#"{"offset": 0, "length": 10}"#;
        assert_eq!(fit(json, 9, false).unwrap(), [(0, 10)]);
    }

    #[test]
    fn json_that_is_cut_off_is_refused() {
        let list = r#"{"startOffset": 0, "length": 9, "changedArea": [{"start": 1, "length": 2}]}"#;
        for end in 0..list.len() {
            assert!(fit(&list[..end], 9, false).is_err(), "{}", &list[..end]);
        }
        let list = r#"[{"offset":0,"length":3},{"offset":5,"length":1}]"#;
        for end in 0..list.len() {
            assert!(fit(&list[..end], 9, false).is_err(), "{}", &list[..end]);
        }
    }

    const BLOCK: u64 = 64 << 10;

    #[test]
    fn the_first_block_of_a_bitmap_is_the_highest_bit() {
        // 1000 0001, 1100 0000, 0000 0000
        let size = 20 * BLOCK;
        let ranges = [(0, BLOCK), (7 * BLOCK, 3 * BLOCK)];
        assert_eq!(fit("gcAA", size, false).unwrap(), ranges);
        assert_eq!(fit("gc\nAA\r\n", 24 * BLOCK, false).unwrap(), ranges);
        assert_eq!(fit("gcAA", 17 * BLOCK - 5, false).unwrap(), ranges);
        assert_eq!(fit("AAAA", size, false).unwrap(), []);
        // The last block is not a whole one: 1111 0000.
        assert_eq!(fit("8A==", 3 * BLOCK + 5, false).unwrap(), [(0, 3 * BLOCK + 5)]);
    }

    #[test]
    fn a_bitmap_of_another_length_is_refused() {
        for (text, size, said) in [
            (
                "gcAA",
                24 * BLOCK + 1,
                "for a disk of about 1572864 bytes (one bit per 64 KiB), but the source has 1572865 bytes: save",
            ),
            (
                "gcAA",
                16 * BLOCK,
                "is for a disk of about 1572864 bytes (one bit per 64 KiB), but the source has 1048576",
            ),
            ("8A==", 3 * BLOCK, "block 3 has changed, and the source of 196608 bytes has 3 blocks"),
            ("gcA", 20 * BLOCK, "is cut off (its length is not a multiple of 4)"),
            ("gc AA", 20 * BLOCK, "white space"),
            ("gcAA\n\"", 20 * BLOCK, "not a base64 symbol"),
        ] {
            let error = fit(text, size, false).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
        // A part is a part, and another disk is another disk.
        assert_eq!(fit("gcAA", 99 * BLOCK, true).unwrap().len(), 2);
        assert!(fit("gcAA", 16 * BLOCK, true).is_err());
        assert!(fit("8A==", 3 * BLOCK, true).is_err());
    }
}
