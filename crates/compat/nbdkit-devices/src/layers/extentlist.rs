//! `extentlist`: extents from a file, for sources that report none.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Extents, Facts, FileRange, HOLE, Kind, LeaseAccess, Op,
    PendingRequest, Reply, Request, RequestFlags, Result, ZERO,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues, parse_size};

use blockhaul_layers::support::{layer, param, usage};

/// The layer `extentlist`.
pub static EXTENTLIST: LayerKind = LayerKind {
    name: "extentlist",
    summary: "takes extents from a list in a file",
    manual: "Each line of the file is OFFSET LENGTH TYPE, where TYPE is `hole`, `zero`, `hole,zero` or a \
number (1 hole, 2 zero, 3 both); without TYPE it is data. Offsets and lengths may have units. \
Empty lines and lines that start with # are ignored. Ranges that no line covers are holes that \
read as zeroes; overlapping lines are refused. The list is not compared with the device: \
clients skip, without reading, what the list calls zero, and everything after the end of a truncated \
list. Writes do not change the list.",
    example: r#"
printf '0 1M\n32M 1M\n' > extents
blockhaul serve --layer 'extentlist?extentlist=extents' sample:64M \
  --run 'blockhaul map "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: false,
    params: &[param("extentlist", ParamKind::Text, "Path of the list.")],
    changeable: &[],
    configure: |args| configure(args),
};

/// Maximum length of the list: each line needs 24 bytes of memory.
const LINES_MAX: usize = 10_000_000;
/// Maximum length of a line in bytes.
const LINE_MAX: usize = 200;
/// Maximum number of runs in one reply.
const RUNS_MAX: usize = 64 << 10;

/// Start, end and state of ranges, in order.
type RangeStates = Vec<(u64, u64, u64)>;

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let Some(path) = args.text("extentlist") else {
        return Err(usage("extentlist: requires a file, extentlist=FILE"));
    };
    let text = std::fs::read_to_string(path).map_err(|error| {
        blockhaul_block::Error::system(format!("extentlist: cannot read {path}"), error)
    })?;
    let list = Arc::new(parse(&text)?);
    layer(move |inner| {
        // All requests but extents pass unchanged.
        let mut facts = Facts::same(&inner.facts());
        facts.can |= Can::EXTENTS;
        facts.emulated -= Can::EXTENTS;
        facts.contexts = vec![BASE_ALLOCATION.to_string()];
        Ok(Arc::new(ListDevice { inner, facts: Arc::new(facts), list: list.clone() }))
    })
}

fn parse(text: &str) -> Result<RangeStates> {
    let mut list = RangeStates::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |why: String| {
            usage(format!("extentlist: line {number}: {why}; give OFFSET LENGTH [hole,zero]"))
        };
        // The user may name another file, with lines of any length.
        if line.len() > LINE_MAX {
            return Err(wrong("the line is too long".into()));
        }
        let words: Vec<_> = line.split_whitespace().collect();
        let (at, len, kind) = match words[..] {
            [at, len] => (at, len, ""),
            [at, len, kind] => (at, len, kind),
            _ => return Err(wrong(format!("cannot parse {line:?}"))),
        };
        let size = |text: &str| parse_size(text).map_err(|error| wrong(error.text()));
        let at = size(at)?;
        let len = size(len)?;
        let end = at.checked_add(len).ok_or_else(|| wrong("the range is too long".into()))?;
        let mut state = 0;
        for word in kind.split(',').filter(|word| !word.is_empty()) {
            state |= match word {
                "hole" => HOLE,
                "zero" => ZERO,
                "data" | "allocated" | "0" => 0,
                "1" => HOLE,
                "2" => ZERO,
                "3" => HOLE | ZERO,
                _ => return Err(wrong(format!("{word:?} is not hole or zero"))),
            };
        }
        if len > 0 {
            list.push((at, end, state));
        }
        if list.len() > LINES_MAX {
            return Err(blockhaul_block::Error::new(
                Kind::Usage,
                "extentlist: more than 10 million lines",
            ));
        }
    }
    list.sort_unstable();
    match list.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => {
            Err(usage(format!("extentlist: the ranges at {} and {} overlap", pair[0].0, pair[1].0)))
        }
        None => Ok(list),
    }
}

struct ListDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    list: Arc<RangeStates>,
}

impl Device for ListDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Op::Extents(contexts) = request.op else { return self.inner.submit(request) };
        let end = request.end().unwrap_or(u64::MAX);
        let most = if request.flags.contains(RequestFlags::ONE_EXTENT) { 1 } else { RUNS_MAX };
        let extents = extents(&self.list, request.at, end, most);
        let lists = contexts.iter().map(|_| extents.clone()).collect();
        PendingRequest::ready(Ok(Reply::Extents(lists)))
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}

/// The extents of `at..end` in the list, in at most `most` runs.
fn extents(list: &RangeStates, at: u64, end: u64, most: usize) -> Extents {
    let mut extents = Extents::new();
    let first = list.partition_point(|range| range.1 <= at);
    let mut next = at;
    for &(start, stop, state) in &list[first..] {
        if start >= end || extents.len() > most {
            break;
        }
        extents.push(start.saturating_sub(next), HOLE | ZERO);
        next = next.max(start);
        extents.push(stop.min(end) - next, state);
        next = stop.min(end);
    }
    if extents.len() <= most {
        extents.push(end - next, HOLE | ZERO);
    }
    if most == 1 {
        extents.first_only();
    }
    extents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sorted_and_gaps_are_holes() {
        let list =
            parse("# a list\n4096 1k hole,zero\n\n0 512\n0x400 0x200 zero\n8k 1k 1\n").unwrap();
        let runs = |at, end| -> Vec<_> {
            let extents = extents(&list, at, end, 100);
            assert_eq!(extents.total(), end - at);
            extents.runs().iter().map(|run| (run.len, run.state)).collect()
        };
        assert_eq!(runs(0, 1536), [(512, 0), (512, 3), (512, 2)]);
        assert_eq!(runs(1535, 4097), [(1, 2), (2561, 3)]);
        assert_eq!(runs(9000, 10_000), [(216, 1), (784, 3)]);
        assert_eq!(runs(1 << 40, (1 << 40) + 1), [(1, 3)]);
        assert_eq!(extents(&list, 100, 9000, 1).runs()[0].len, 412);
        for wrong in ["5", "0 5 data,x", "a b", "0 10\n5 10", "1 2 3 4", "0 16e"] {
            assert_eq!(parse(wrong).unwrap_err().kind(), Kind::Usage, "{wrong}");
        }
        let error = parse(&"\0".repeat(1 << 20)).unwrap_err();
        assert!(error.to_string().len() < 1000 && error.kind() == Kind::Usage);
    }
}
