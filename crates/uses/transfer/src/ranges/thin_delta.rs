//! The XML that `thin_delta` prints: `<superblock>` around `<diff>` around ranges in blocks.

use quick_xml::events::{BytesStart, Event};

use super::coverage::range;

/// Start and end of the ranges that differ, and the bytes of a block: the last block of a volume may reach
/// beyond its end.
///
/// # Errors
/// With the line. The output of a program that has not ended lacks the end of an element.
pub(super) fn parse(text: &str) -> Result<(Vec<(u64, u64)>, u64), String> {
    let mut reader = quick_xml::Reader::from_str(text);
    let mut found = Vec::new();
    let mut block = None;
    let mut has_diff = false;
    // Elements that are open, and whether the outermost one was.
    let mut depth = 0_u32;
    let mut began = false;
    loop {
        let position = reader.buffer_position();
        let line = || 1 + text[..position as usize].matches('\n').count();
        let failed = |why: String| format!("line {}: {why}", line());
        let event = reader.read_event().map_err(|error| failed(error.to_string()))?;
        let is_open = matches!(event, Event::Start(_));
        let tag = match event {
            Event::Start(tag) | Event::Empty(tag) => tag,
            Event::End(_) => {
                depth = depth.saturating_sub(1);
                continue;
            }
            Event::Eof if depth == 0 && has_diff => return Ok((found, block.unwrap_or(1))),
            Event::Eof if depth > 0 || !began => {
                return Err(
                    "the output of thin_delta is cut off: the end of an element is missing: run \
                            it again, and check that it succeeds"
                        .to_string(),
                );
            }
            Event::Eof => return Err("no <diff>, which thin_delta prints".to_string()),
            Event::Text(text) if !text.as_ref().trim_ascii().is_empty() => {
                return Err(failed("text that thin_delta does not print".to_string()));
            }
            Event::CData(_) | Event::GeneralRef(_) => {
                return Err(failed("text that thin_delta does not print".to_string()));
            }
            _ => continue,
        };
        if depth == 0 && began {
            return Err(failed("more after the end of the output of thin_delta".to_string()));
        }
        match &*name_of(&tag) {
            "superblock" if depth == 0 => {
                // In sectors.
                let sectors = attribute(&tag, "data_block_size").map_err(failed)?;
                let bytes = sectors.checked_mul(512).filter(|&bytes| bytes > 0);
                block = Some(bytes.ok_or_else(|| failed("invalid data_block_size".to_string()))?);
            }
            "diff" if depth == 1 => has_diff = true,
            "different" | "left_only" | "right_only" if depth > 1 => {
                let block = block.ok_or_else(|| failed("no superblock before".to_string()))?;
                let (begin, length) = attribute(&tag, "begin")
                    .and_then(|begin| Ok((begin, attribute(&tag, "length")?)))
                    .map_err(failed)?;
                let place = begin.checked_mul(block).zip(length.checked_mul(block));
                let (at, len) =
                    place.ok_or_else(|| failed("the range ends beyond 2^63 - 1".to_string()))?;
                found.push(range(at, len).map_err(failed)?);
            }
            "same" | "range" if depth > 1 => {}
            name @ ("superblock" | "diff" | "different" | "left_only" | "right_only" | "same"
            | "range") => {
                let place = if depth == 0 { "no superblock before" } else { "in another element:" };
                return Err(failed(format!("{place} <{name}>")));
            }
            other => {
                return Err(failed(format!(
                    "unknown element <{other}> in the output of thin_delta"
                )));
            }
        }
        began = true;
        depth += u32::from(is_open);
    }
}

/// The name of an element.
fn name_of(tag: &BytesStart<'_>) -> String {
    String::from_utf8_lossy(tag.name().as_ref()).into_owned()
}

/// The number in an attribute. An element with an attribute twice is refused.
fn attribute(tag: &BytesStart<'_>, name: &str) -> Result<u64, String> {
    let mut value = None;
    for found in tag.attributes() {
        let found = found.map_err(|error| error.to_string())?;
        if found.key.as_ref() == name.as_bytes() {
            value = std::str::from_utf8(&found.value).ok().and_then(|value| value.parse().ok());
        }
    }
    value.ok_or_else(|| format!("no number {name} in <{}>", name_of(tag)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "<superblock uuid=\"\" time=\"1\" transaction=\"2\" data_block_size=\"8\" \
                         nr_data_blocks=\"0\">\n  <diff left=\"1\" right=\"2\">\n    <different \
                         begin=\"0\" length=\"1\"/>\n    <same begin=\"1\" length=\"3\"/>\n    \
                         <left_only begin=\"4\" length=\"2\"/>\n    <right_only begin=\"9\" \
                         length=\"1\"/>\n  </diff>\n</superblock>\n";

    #[test]
    fn ranges_are_in_bytes() {
        let ranges = vec![(0, 4096), (16384, 24576), (36864, 40960)];
        assert_eq!(parse(WHOLE).unwrap(), (ranges, 4096));
        let with_header = format!("<?xml version=\"1.0\"?>\n{WHOLE}\n<!-- end -->");
        assert_eq!(parse(&with_header).unwrap().0.len(), 3);
        let empty = "<superblock data_block_size=\"8\"><diff left=\"1\" right=\"2\"/></superblock>";
        assert_eq!(parse(empty).unwrap().0, []);
    }

    #[test]
    fn a_list_that_is_cut_anywhere_is_refused() {
        for end in 0..WHOLE.trim_end().len() {
            assert!(parse(&WHOLE[..end]).is_err(), "{}", &WHOLE[..end]);
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
            let error = parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
