//! Lists of all kinds: pages in one array, one after another, out of order, overlapping, of another disk, cut off.

use super::*;

/// The ranges of a list for a disk of this size, or why it is refused.
fn fit(text: &str, size: u64, partial: bool) -> Result<Vec<(u64, u64)>, String> {
    let list = ChangeList::read(text.as_bytes()).map_err(|error| error.to_string())?;
    let fitted = list.fit(size).map_err(|error| error.to_string())?;
    match fitted.incomplete {
        Some(incomplete) if !partial => Err(incomplete.error.to_string()),
        _ => Ok(fitted.ranges),
    }
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
        r#"{"block_metadata_type": 2, "volume_capacity_bytes": 9000,
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
        (answer(0, 5000), "bytes 5000 to 8999 are missing: query again with startOffset=5000", 1),
        (answer(5000, 4000), "bytes 0 to 4999 are missing: query again with startOffset=0 ", 1),
        (
            answer(0, 2000) + &answer(3000, 2000) + &answer(7000, 2000),
            "bytes 2000 to 2999 and others are missing: query again with startOffset=2000",
            3,
        ),
        (without.into(), "no answer of QueryChangedDiskAreas has startOffset and length", 1),
        (csi.into(), "a volume of 5000 bytes (volume_capacity_bytes), but the source has 9000", 1),
        (csi_without.into(), "do not say the size of their volume", 1),
        (
            map.into(),
            "the map does not cover all of the source's 9000 bytes: bytes 5000 to 8999",
            1,
        ),
    ] {
        let error = fit(&text, 9000, false).unwrap_err();
        assert!(error.contains(said), "{error}");
        assert_eq!(fit(&text, 9000, true).unwrap().len(), left, "{text}");
    }
    // Of a larger disk: it is another one.
    for (text, said) in [
        (answer(0, 9001), "end at 9001, but the source has 9000 bytes"),
        (csi.replace("5000", "9001"), "a volume of 9001 bytes (volume_capacity_bytes), but the"),
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
        (r#"[{"offset": 0, "length": 1}, {"offset": 2, "length": 1, "len\u0067th": 3}]"#, "length"),
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
        assert!(error.starts_with("line ") && error.contains(&said), "{text}: {error}");
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
    // What is of another disk is refused.
    for (begin, length) in [(3, 2), (4, 1)] {
        let error = fit(&list(begin, length), size, true).unwrap_err();
        assert!(
            error.contains("but the range ends at 20480: use the list of this disk"),
            "{error}"
        );
    }
    assert!(fit(&list(3, 1), 3 * 4096, false).is_err());
    let json = r#"{"offset": 0, "length": 10}"#;
    assert!(fit(json, 9, false).is_err());
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

const WHOLE: &str = "<superblock uuid=\"\" time=\"1\" transaction=\"2\" data_block_size=\"8\" \
                     nr_data_blocks=\"0\">\n  <diff left=\"1\" right=\"2\">\n    <different \
                     begin=\"0\" length=\"1\"/>\n    <same begin=\"1\" length=\"3\"/>\n    \
                     <left_only begin=\"4\" length=\"2\"/>\n    <right_only begin=\"9\" \
                     length=\"1\"/>\n  </diff>\n</superblock>\n";

#[test]
fn ranges_are_in_bytes() {
    let ranges = [(0, 4096), (16384, 8192), (36864, 4096)];
    assert_eq!(fit(WHOLE, 40960, false).unwrap(), ranges);
    let with_header = format!("<?xml version=\"1.0\"?>\n{WHOLE}\n<!-- end -->");
    assert_eq!(fit(&with_header, 40960, false).unwrap().len(), 3);
    let empty = "<superblock data_block_size=\"8\"><diff left=\"1\" right=\"2\"/></superblock>";
    assert_eq!(fit(empty, 9, false).unwrap(), []);
}

#[test]
fn a_list_that_is_cut_anywhere_is_refused() {
    for end in 0..WHOLE.trim_end().len() {
        assert!(fit(&WHOLE[..end], 40960, true).is_err(), "{}", &WHOLE[..end]);
    }
}

#[test]
fn other_xml_is_refused() {
    let block = "<superblock data_block_size=\"8\">";
    for (text, said) in [
        ("<superblock data_block_size=\"8\"/>", "no <diff>"),
        ("<superblock data_block_size=\"x\"/>", "no number data_block_size"),
        ("<diff><different begin=\"1\" length=\"1\"/></diff>", "no superblock"),
        ("<diff/>", "no superblock"),
        (&format!("{WHOLE}{WHOLE}"), "line 9: more after the end"),
        (&format!("{WHOLE}error"), "line 8: text that"),
        (&WHOLE.replace("<same", "x<same"), "text that"),
        (&WHOLE.replace("</diff>", "</superblock>"), "line 7"),
        (&format!("{block}<diff><diff/></diff></superblock>"), "in another element: <diff>"),
        (&format!("{block}<same begin=\"1\" length=\"1\"/></superblock>"), "in another"),
        (&format!("{block}<diff></diff>"), "is cut off"),
    ] {
        let error = fit(text, 1 << 20, true).unwrap_err();
        assert!(error.contains(said), "{text}: {error}");
    }
}

const DUMP: &str = "<superblock uuid=\"\" time=\"2\" transaction=\"4\" version=\"2\" data_block_size=\"8\" \
                    nr_data_blocks=\"99\">\n  <device dev_id=\"1\" mapped_blocks=\"4\" transaction=\"0\" \
                    creation_time=\"0\" snap_time=\"1\">\n    <single_mapping origin_block=\"0\" \
                    data_block=\"7\" time=\"0\"/>\n    <range_mapping origin_begin=\"4\" data_begin=\"9\" \
                    length=\"3\" time=\"0\"/>\n  </device>\n</superblock>\n";

#[test]
fn the_blocks_of_one_device_are_those_that_thin_dump_counts() {
    assert_eq!(fit(DUMP, 28672, false).unwrap(), [(0, 4096), (16384, 12288)]);
    // The last block is not a whole one.
    assert_eq!(fit(DUMP, 28672 - 512, false).unwrap(), [(0, 4096), (16384, 12288 - 512)]);
    assert!(fit(DUMP, 16384, false).is_err());
    for end in 0..DUMP.trim_end().len() {
        assert!(fit(&DUMP[..end], 28672, true).is_err(), "{}", &DUMP[..end]);
    }
    let device = &DUMP[DUMP.find("  <device").unwrap()..DUMP.find("</superblock>").unwrap()];
    for (text, said) in [
        (
            DUMP.replace("mapped_blocks=\"4\"", "mapped_blocks=\"5\""),
            "has 5 blocks (mapped_blocks), but 4 are",
        ),
        (DUMP.replace("mapped_blocks=\"4\"", ""), "line 2: no number mapped_blocks"),
        (DUMP.replace(device, &device.repeat(2)), "line 6: a list of more than one device"),
        (DUMP.replace(device, &format!("<diff/>{device}")), "more than one device"),
        (DUMP.replace("single_mapping", "different"), "in another element: <different>"),
        (WHOLE.replace("<same", "<single_mapping"), "in another element: <single_mapping>"),
        (DUMP.replace("<single_mapping", "<def"), "unknown element <def>"),
        (DUMP.replace("length=\"3\"", "length=\"18446744073709551615\""), "beyond 2^63"),
    ] {
        let error = fit(&text, 1 << 20, true).unwrap_err();
        assert!(error.contains(said), "{text}: {error}");
    }
}

/// A page of ListChangedBlocks.
fn page(blocks: &[u64], token: &str) -> String {
    let list: Vec<_> = blocks
        .iter()
        .map(|block| {
            format!(
                r#"{{"BlockIndex":{block},"FirstBlockToken":"AAAB+/=","SecondBlockToken":"AAAC"}}"#
            )
        })
        .collect();
    format!(
        r#"{{"ChangedBlocks":[{}],"ExpiryTime":"2026-01-01T00:00:00+00:00","VolumeSize":1,"BlockSize":524288{token}}}"#,
        list.join(",")
    )
}

const GIB: u64 = 1 << 30;
const EBS_BLOCK: u64 = 512 << 10;
const MORE: &str = r#","NextToken":"AAIA""#;

#[test]
fn the_last_page_of_ebs_has_no_token() {
    let ranges = [(0, 2 * EBS_BLOCK), (2047 * EBS_BLOCK, EBS_BLOCK)];
    let pages = [page(&[0], MORE), page(&[1], MORE), page(&[2047], "")];
    for text in [
        pages.join("\n"),
        format!("[{}]", pages.join(", ")),
        // Overlapping: a page that was asked for twice.
        [&pages[0], &pages[0], &pages[1], &pages[2]].map(String::as_str).join(" "),
        // The blocks of pages are in any order.
        [page(&[1, 2047], MORE), page(&[0], "")].join(""),
        page(&[0, 1, 2047], r#","NextToken":null,"ResponseMetadata":{"HTTPStatusCode":200}"#),
        page(&[0, 1, 2047], r#","NextToken":"""#),
        // ListSnapshotBlocks, its size behind the blocks.
        r#"{"Blocks":[{"BlockIndex":0,"BlockToken":"x"},{"BlockIndex":1,"BlockToken":"x"},
            {"BlockIndex":2047,"BlockToken":"x"}],"BlockSize":524288,"VolumeSize":1}"#
            .to_string(),
    ] {
        assert_eq!(fit(&text, GIB, false).unwrap(), ranges, "{text}");
    }
    // A page may be empty although more follow.
    assert_eq!(fit(&(page(&[], MORE) + &page(&[], "")), GIB, false).unwrap(), []);
}

#[test]
fn pages_of_ebs_that_are_not_all_are_refused() {
    let more = page(&[0], MORE);
    let last = page(&[5], "");
    for (text, said) in [
        (more.clone(), "the last page has a NextToken: more pages follow"),
        (format!("[{more}, {}]", page(&[1], MORE)), "list again with this token"),
    ] {
        let error = fit(&text, GIB, false).unwrap_err();
        assert!(error.contains(said), "{error}");
        assert!(!fit(&text, GIB, true).unwrap().is_empty());
    }
    for (text, size, said) in [
        // Out of order, twice, of two listings.
        (format!("{last}\n{more}"), GIB, "line 2: a page follows the one without NextToken"),
        (format!("{last}{last}"), GIB, "a page follows the one without"),
        (
            format!("{more}{}", last.replace("524288", "1048576")),
            GIB,
            "BlockSize is 1048576, and was 524288",
        ),
        (
            format!("{more}{}", last.replace("Size\":1,", "Size\":2,")),
            GIB,
            "VolumeSize is 2, and was 1",
        ),
        // Of another disk.
        (
            last.clone(),
            2 * GIB,
            "of a volume of 1073741824 bytes (VolumeSize), but the source has 2147483648",
        ),
        (
            last.clone(),
            GIB / 2,
            "of a volume of 1073741824 bytes (VolumeSize), but the source has 536870912",
        ),
        (page(&[2048], ""), GIB, "the range ends at 1074266112"),
        (page(&[u64::MAX], ""), GIB, "beyond 2^63"),
        (page(&[1 << 50], ""), GIB, "block 1125899906842624 of 524288 bytes ends beyond"),
        // Parts of pages.
        (
            last.replace("\"VolumeSize\":1,", ""),
            GIB,
            "do not say the size of their volume (VolumeSize)",
        ),
        (
            last.replace("\"BlockSize\":524288", "\"x\":1"),
            GIB,
            "line 1: a page of EBS without BlockSize",
        ),
        (last.replace("524288", "0"), GIB, "BlockSize is not a positive number: 0"),
        (last.replace("ChangedBlocks", "changedblocks"), GIB, "without ChangedBlocks or Blocks"),
        (
            last.replace("\"ChangedBlocks\":[", "\"ChangedBlocks\":null,\"x\":["),
            GIB,
            "not a list of blocks: null",
        ),
        (
            last.replace("\"ExpiryTime\"", "\"Blocks\":[],\"ExpiryTime\""),
            GIB,
            "has \"ChangedBlocks\" and \"Blocks\"",
        ),
        (r#"{"BlockIndex":0,"BlockToken":"x"}"#.into(), GIB, "a block of EBS without its page"),
        (last.replace("BlockIndex", "Index"), GIB, "not a block with BlockIndex"),
        (last.clone() + r#"{"offset":0,"length":1}"#, GIB, "more than one kind"),
    ] {
        let error = fit(&text, size, false).unwrap_err();
        assert!(error.contains(said), "{text}: {error}");
    }
    let text = format!("{more}\n{last}");
    for end in 0..text.len() {
        assert!(fit(&text[..end], GIB, false).is_err(), "{}", &text[..end]);
    }
}

#[test]
fn messages_of_csi_are_of_one_call() {
    let message = |kind: &str, blocks: &[(u64, u64)]| {
        let list: Vec<_> = blocks
            .iter()
            .map(|(at, len)| format!(r#"{{"byteOffset":"{at}","sizeBytes":"{len}"}}"#))
            .collect();
        format!(
            r#"{{"blockMetadataType":{kind},"volumeCapacityBytes":"10000","blockMetadata":[{}]}}"#,
            list.join(",")
        )
    };
    let fixed = message("\"FIXED_LENGTH\"", &[(4096, 4096), (0, 4096)]);
    // The last block of the volume is shorter.
    let last = message("1", &[(8192, 1808)]);
    for text in [
        format!("{fixed}\n{last}"),
        // Out of order, in an array.
        format!("[{last}, {fixed}]"),
        // Overlapping.
        format!("{fixed}{fixed}{last}"),
        message("\"VARIABLE_LENGTH\"", &[(0, 1), (1, 9999)]),
        message("2", &[(0, 9000), (1, 9999)]),
    ] {
        assert_eq!(fit(&text, 10000, false).unwrap(), [(0, 10000)], "{text}");
    }
    for (text, said) in [
        (message("1", &[(0, 4096), (4096, 8)]), "FIXED_LENGTH, but blocks have 8 and 4096 bytes"),
        (message("1", &[(0, 4096), (4096, 8), (9992, 8)]), "FIXED_LENGTH, but"),
        (message("1", &[(0, 4096), (0, 5904), (4096, 5904)]), "FIXED_LENGTH, but"),
        (message("0", &[]), "block_metadata_type is 0, not FIXED_LENGTH or VARIABLE_LENGTH"),
        (message("\"UNKNOWN\"", &[]), "block_metadata_type is \"UNKNOWN\""),
        (fixed.clone() + &message("2", &[]), "block_metadata_type is another one than before"),
        (message("2", &[(9999, 2)]), "but the range ends at 10001"),
    ] {
        let error = fit(&text, 10000, true).unwrap_err();
        assert!(error.contains(said), "{text}: {error}");
    }
}

#[test]
fn the_table_of_rbd_diff_and_lines_of_numbers() {
    let ranges = [(0, 4194304), (8388608, 4194304)];
    for text in [
        "Offset   Length   Type \n0        4194304  data \n8388608  4194304  zero \n",
        "Offset Length Type\r\n8388608 4194304 data\r\n0 4194304 data\r\n",
        "0 4194304\n8388608 4194304\n",
        "# offsets and lengths\n\n8388608\t4194304\n0\t4194304\n0 512\n",
        "\n\noffset,length\n0,4194304\n8388608,4194304\n",
        "0x0 0x400000\n0x800000 0x400000\n",
    ] {
        assert_eq!(fit(text, 12582912, false).unwrap(), ranges, "{text}");
        assert!(fit(text, 12582911, true).unwrap_err().contains("but the range ends at 12582912"));
    }
    assert_eq!(fit("Offset Length Type\n", 9, false).unwrap(), []);
    for (text, said) in [
        ("Offset Length Type\n0 4194304 data\n8388608 419", "line 3: the list is cut off"),
        (
            "Offset Length Type\n0 4194304 data\n8388608 4194304 dat\n",
            "line 3: not offset, length, and data or",
        ),
        ("Offset Length Type\n0 4194304\n", "line 2: not offset, length, and data"),
        ("Offset Length\n0 4194304 data\n", "line 2: not a line with offset and length alone"),
        ("Offset Length Data Type\n0 4194304 data\n", "line 1: not the columns offset and length"),
        ("0 4194304 data\n", "of rbd diff, keep its first line"),
        ("0 4194304\n", ""),
        ("0 4194304\nOffset Length Type\n", "line 2: not a line with"),
        ("0 4194304\nerror: no such image\n", "line 2: not a line"),
        ("0 -1\n", "line 1: not an offset and a length in bytes: \"0 -1\""),
        ("0 0x+1\n", "not an offset and a length"),
        ("0 4k\n", "not an offset and a length"),
        ("0 9223372036854775808\n", "beyond 2^63"),
        ("0 1\n\u{0}\n", "line 2: not a line with offset and length alone"),
        ("# nothing\n", "the list is empty"),
    ] {
        if said.is_empty() {
            assert!(fit(text, 4194304, false).is_ok());
            continue;
        }
        let error = fit(text, 1 << 30, true).unwrap_err();
        assert!(error.contains(said), "{text}: {error}");
    }
    let bytes = b"0 1\n\xff 2\n";
    assert!(ChangeList::read(&bytes[..]).unwrap_err().to_string().contains("line 2: not text"));
}

/// A list of many entries, which is made while it is read.
struct ManyEntries {
    head: &'static str,
    tail: &'static str,
    entry: fn(u64) -> String,
    made: u64,
    count: u64,
    text: Vec<u8>,
    has_ended: bool,
}

impl Read for ManyEntries {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        while self.text.is_empty() && !self.has_ended {
            if self.made == 0 {
                self.text.extend_from_slice(self.head.as_bytes());
            }
            for index in self.made..(self.made + 1000).min(self.count) {
                self.text.extend_from_slice((self.entry)(index).as_bytes());
            }
            self.made += 1000;
            if self.made >= self.count {
                self.text.extend_from_slice(self.tail.as_bytes());
                self.has_ended = true;
            }
        }
        let len = into.len().min(self.text.len());
        into[..len].copy_from_slice(&self.text[..len]);
        self.text.drain(..len);
        Ok(len)
    }
}

/// Kilobytes of memory of this process at most.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn ten_million_entries_take_bounded_memory() {
    let json: fn(u64) -> String =
        |i| format!("{}{{\"start\":{},\"length\":512}}", if i > 0 { "," } else { "" }, i * 1024);
    let lines: fn(u64) -> String = |i| format!("{} 512\n", i * 1024);
    let before = peak();
    for (head, tail, entry, count) in [
        ("{\"startOffset\":0,\"length\":10240000000,\"changedArea\":[", "]}", json, 10_000_000),
        ("Offset Length\n", "", lines, 1_000_000),
    ] {
        let from =
            ManyEntries { head, tail, entry, made: 0, count, text: Vec::new(), has_ended: false };
        let fitted = ChangeList::read(from).unwrap().fit(count * 1024).unwrap();
        assert!(fitted.incomplete.is_none() && fitted.ranges.len() as u64 == count);
        assert_eq!(fitted.ranges.last(), Some(&((count - 1) * 1024, 512)));
    }
    let used = peak() - before;
    assert!(used < 600 << 10, "{used} KiB");
}

#[test]
fn pieces_without_end_are_refused() {
    for (head, piece) in [
        ("[{\"offset\": 0, \"length\": 1, \"x\": \"", "y"),
        ("[{\"offset\": 0, \"length\": 1, \"x\": \"", "\\\""),
        ("[", "0,"),
        ("<superblock data_block_size=\"8\" x=\"", "y"),
        ("<!--", "y"),
        ("0 1\n", "1"),
        ("", "A"),
        ("", "\n"),
    ] {
        let endless =
            head.as_bytes().chain(Endless { piece: piece.as_bytes(), at: 0, left: 65 << 20 });
        assert!(ChangeList::read(endless).is_err(), "{head}{piece}");
    }
}

/// A piece again and again.
struct Endless {
    piece: &'static [u8],
    at: usize,
    left: usize,
}

impl Read for Endless {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let len = into.len().min(self.left);
        for byte in &mut into[..len] {
            *byte = self.piece[self.at % self.piece.len()];
            self.at += 1;
        }
        self.left -= len;
        Ok(len)
    }
}

#[test]
fn lists_that_cannot_be_read_are_errors() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("lost"))
        }
    }
    for head in ["", "[", "[{\"offset\": 1,", "<superblock", "0 1\n0", "AAAA"] {
        // More than what is read to recognize the kind.
        let spaces = " ".repeat(if head.is_empty() || head == "AAAA" { 0 } else { 70_000 });
        let text =
            if head == "0 1\n0" { "0 1\n".repeat(30_000) } else { format!("{head}{spaces}") };
        let error = ChangeList::read(text.as_bytes().chain(Broken)).unwrap_err();
        assert_eq!(error.kind(), ChangeListErrorKind::Unreadable, "{head}: {error}");
    }
}
