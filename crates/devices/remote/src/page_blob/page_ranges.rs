//! Lists of the pages of a blob that have contents (Get Page Ranges).

use blockhaul_block::{Error, Extents, HOLE, Kind, Result, ZERO};
use quick_xml::Reader;
use quick_xml::events::Event;

/// The pages of a part of a blob that have contents, in order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PageRanges {
    /// First and last byte of each range.
    ranges: Vec<(u64, u64)>,
    /// Whether the service has more.
    has_more: bool,
}

fn no_list() -> Error {
    let error = Error::new(Kind::Io, "the response of the service is no list of pages");
    error.with_remedy("check the endpoint: endpoint=URL")
}

impl PageRanges {
    /// # Errors
    /// The text is no list.
    pub(super) fn parse(text: &str) -> Result<PageRanges> {
        let mut reader = Reader::from_str(text);
        let (mut found, mut value) = (PageRanges::default(), String::new());
        // A response that was cut off has no end of the list.
        let (mut first, mut depth, mut is_list, mut is_complete) = (None, 0_u32, false, false);
        loop {
            match reader.read_event().map_err(|_| no_list())? {
                Event::Start(start) => {
                    is_list |= depth == 0 && start.local_name().as_ref() == b"PageList";
                    depth = depth.saturating_add(1);
                    value.clear();
                }
                Event::Empty(empty) => {
                    is_complete |= depth == 0 && empty.local_name().as_ref() == b"PageList";
                }
                Event::Text(part) => value += &part.decode().map_err(|_| no_list())?,
                Event::End(end) => match end.local_name().as_ref() {
                    _ if depth <= 1 => {
                        depth = 0;
                        is_complete |= is_list;
                    }
                    name => {
                        depth -= 1;
                        match name {
                            b"Start" => first = value.trim().parse().ok(),
                            b"End" => {
                                let last = value.trim().parse().ok();
                                let range =
                                    first.take().zip(last).filter(|(first, last)| first <= last);
                                found.add(range.ok_or_else(no_list)?)?;
                            }
                            b"NextMarker" => found.has_more = !value.trim().is_empty(),
                            _ => {}
                        }
                    }
                },
                Event::Eof if is_complete => return Ok(found),
                Event::Eof => return Err(no_list()),
                _ => {}
            }
        }
    }

    fn add(&mut self, range: (u64, u64)) -> Result<()> {
        if self.ranges.last().is_some_and(|last| last.1 >= range.0) {
            return Err(no_list());
        }
        self.ranges.push(range);
        Ok(())
    }

    /// The extents from `at` on, `len` bytes or fewer.
    pub(super) fn extents(&self, at: u64, len: u64) -> Extents {
        let mut extents = Extents::new();
        let end = at + len;
        let mut done = at;
        for &(first, last) in &self.ranges {
            let (first, last) = (first.clamp(done, end), last.saturating_add(1).clamp(done, end));
            extents.push(first - done, HOLE | ZERO);
            extents.push(last - first, 0);
            done = last;
        }
        if !self.has_more {
            extents.push(end - done, HOLE | ZERO);
        } else if extents.is_empty() {
            extents.push(len, 0);
        }
        extents
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    fn runs(text: &str, at: u64, len: u64) -> Vec<(u64, u64)> {
        let extents = PageRanges::parse(text).unwrap().extents(at, len);
        extents.runs().iter().map(|run| (run.len, run.state)).collect()
    }

    fn list(ranges: &str, marker: &str) -> String {
        format!(
            "<?xml version=\"1.0\"?><PageList>{ranges}<NextMarker>{marker}</NextMarker></PageList>"
        )
    }

    #[test]
    fn extents_are_data_and_holes() {
        let two = "<PageRange><Start>512</Start><End>1023</End></PageRange>\
                   <PageRange><Start>4096</Start><End>8191</End></PageRange>";
        let hole = HOLE | ZERO;
        let whole = [(512, hole), (512, 0), (3072, hole), (4096, 0), (2048, hole)];
        assert_eq!(runs(&list(two, ""), 0, 10240), whole);
        assert_eq!(runs(&list(two, ""), 512, 512), [(512, 0)]);
        assert_eq!(runs(&list(two, ""), 4608, 512), [(512, 0)]);
        assert_eq!(runs(&list("", ""), 512, 1024), [(1024, hole)]);
        assert_eq!(runs("<PageList/>", 0, 512), [(512, hole)]);
        // The rest is asked for again; without any range it may be data.
        assert_eq!(runs(&list(two, "m"), 0, 10240), whole[..4]);
        assert_eq!(runs(&list("", "m"), 512, 1024), [(1024, 0)]);
    }

    #[test]
    fn other_text_is_no_list() {
        let range = |first: &str, last: &str| {
            list(&format!("<PageRange><Start>{first}</Start><End>{last}</End></PageRange>"), "")
        };
        let twice = "<PageRange><Start>0</Start><End>511</End></PageRange>".repeat(2);
        for text in [
            "",
            "x",
            "<html/>",
            "<PageList><",
            "<?xml version=\"1.0\"?><PageList>",
            "<PageList><PageRange><Start>0</Start><End>511</End></PageRange>",
            "<html><PageList/></html>",
            &range("9", "8"),
            &range("x", "8"),
            &range("0", ""),
            &list(&twice, ""),
        ] {
            assert_eq!(PageRanges::parse(text).map(drop).unwrap_err().kind(), Kind::Io, "{text}");
        }
    }
}
