//! Extents of a whole device as text and JSON, in the formats of nbdinfo 1.22.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, Contexts, Device, DeviceExt as _, Error, Kind};

use super::report::{Palette, quoted};
use crate::exit::Failure;
use crate::out::Output;

/// How to show a map.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    /// JSON.
    pub json: bool,
    /// Sums by state.
    pub totals: bool,
    /// Colours, with text.
    pub color: bool,
}

/// A context to show: which one of the device's, and its name.
#[derive(Debug)]
pub struct Shown {
    /// Set of the one context.
    pub context: Contexts,
    /// Its name, which says what states mean.
    pub name: String,
}

/// Maximum number of states in sums: common contexts have a handful; a backing chain may be longer.
const STATES_MAX: usize = 1 << 20;

/// Shows the extents of all of the device.
pub async fn show(
    device: &Arc<dyn Device>,
    shown: Shown,
    format: Format,
    output: &mut Output,
) -> Result<(), Failure> {
    let mut sink = Sink::new(shown.name, format);
    let size = device.facts().size;
    let mut at = 0;
    while at < size && !output.is_gone() {
        let lists = device.extents(at, size - at, shown.context).await;
        let lists = lists.map_err(|error| error.on(&device.facts().name))?;
        let covered = lists.first().map_or(0, blockhaul_block::Extents::total).min(size - at);
        if covered == 0 {
            let text = format!("the device reported no extents at offset {at}");
            return Err(Error::new(Kind::Io, text).on(&device.facts().name).into());
        }
        for (here, run) in lists.iter().take(1).flat_map(|list| list.ranges(at)) {
            sink.run(here, run.len.min(size - here.min(size)), run.state, output)?;
        }
        at += covered;
    }
    sink.finish(size, output)
}

/// Takes runs in order, joins adjacent equal ones, and shows them.
struct Sink {
    context: String,
    format: Format,
    palette: Palette,
    /// The run that may still grow: offset, length, state.
    last: Option<(u64, u64, u64)>,
    shown: bool,
    totals: BTreeMap<u64, u64>,
    /// The line being made: maps have millions.
    line: String,
}

impl Sink {
    fn new(context: String, format: Format) -> Sink {
        let palette = Palette::new(format.color);
        let (totals, line) = (BTreeMap::new(), String::new());
        Sink { context, format, palette, last: None, shown: false, totals, line }
    }

    fn run(&mut self, at: u64, len: u64, state: u64, output: &mut Output) -> Result<(), Failure> {
        if len == 0 {
            return Ok(());
        }
        if self.format.totals {
            *self.totals.entry(state).or_default() += len;
            if self.totals.len() > STATES_MAX {
                let text = format!("{} has more than {STATES_MAX} states", self.context);
                return Err(Error::new(Kind::TooLarge, text).into());
            }
            return Ok(());
        }
        match &mut self.last {
            Some((_, grown, same)) if *same == state => *grown += len,
            _ => {
                let before = self.last.replace((at, len, state));
                self.show(before, output)?;
            }
        }
        Ok(())
    }

    fn show(&mut self, run: Option<(u64, u64, u64)>, output: &mut Output) -> Result<(), Failure> {
        let Some((at, len, state)) = run else { return Ok(()) };
        let described = describe(&self.context, state);
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        if self.format.json {
            line.push_str(if self.shown { ",\n{ \"offset\": " } else { "[\n{ \"offset\": " });
            self.shown = true;
            number(&mut line, at, 0);
            line.push_str(", \"length\": ");
            number(&mut line, len, 0);
            line.push_str(", \"type\": ");
            number(&mut line, state, 0);
            if let Some(text) = described {
                line.push_str(", \"description\": ");
                line.push_str(&quoted(&text));
            }
            line.push('}');
        } else {
            let (before, after) = self.color(state);
            line.push_str(before);
            number(&mut line, at, 10);
            line.push_str("  ");
            number(&mut line, len, 10);
            line.push_str("  ");
            number(&mut line, state, 3);
            if let Some(text) = described {
                line.push_str("  ");
                line.push_str(&text);
            }
            line.push_str(after);
            line.push('\n');
        }
        self.line = line;
        output.text(&self.line)
    }

    fn finish(mut self, size: u64, output: &mut Output) -> Result<(), Failure> {
        if self.format.totals {
            return self.finish_totals(size, output);
        }
        let last = self.last.take();
        self.show(last, output)?;
        match self.format.json {
            true if self.shown => output.text("\n]\n"),
            true => output.text("[\n\n]\n"),
            false => Ok(()),
        }
    }

    fn finish_totals(&self, size: u64, output: &mut Output) -> Result<(), Failure> {
        let mut lines = Vec::new();
        for (&state, &len) in &self.totals {
            let percent = 100.0 * len as f64 / size as f64;
            let described = describe(&self.context, state);
            if self.format.json {
                let description = described
                    .map(|text| format!(", \"description\": {}", quoted(&text)))
                    .unwrap_or_default();
                let percent = general(percent);
                lines.push(format!(
                    "{{ \"size\": {len}, \"percent\": {percent}, \"type\": {state}{description} }}"
                ));
            } else {
                let (before, after) = self.color(state);
                let description = described.map(|text| format!(" {text}")).unwrap_or_default();
                output.text(&format!(
                    "{before}{len:>10} {percent:>5.1}% {state:>3}{description}{after}\n"
                ))?;
            }
        }
        match (self.format.json, lines.is_empty()) {
            (true, true) => output.text("[]\n"),
            (true, false) => output.text(&format!("[\n{}\n]\n", lines.join(",\n"))),
            (false, _) => Ok(()),
        }
    }

    fn color(&self, state: u64) -> (&'static str, &'static str) {
        let palette = &self.palette;
        let color = match (self.context.as_str(), state) {
            (BASE_ALLOCATION, 0) => palette.data,
            (ALLOCATION_DEPTH, 1) => palette.local,
            (ALLOCATION_DEPTH, 2..) => palette.backing,
            (context, 0) if context.starts_with(DIRTY_BITMAP) => palette.good,
            (context, 1) if context.starts_with(DIRTY_BITMAP) => palette.bad,
            _ => return ("", ""),
        };
        (color, palette.reset)
    }
}

/// QEMU's context for the depth in a chain of images.
const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
/// Prefix of QEMU's contexts for bitmaps.
const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// The meaning of a state, in known contexts.
fn describe(context: &str, state: u64) -> Option<Cow<'static, str>> {
    let word = match (context, state) {
        (BASE_ALLOCATION, 0) => "data",
        (BASE_ALLOCATION, 1) => "hole",
        (BASE_ALLOCATION, 2) => "zero",
        (BASE_ALLOCATION, 3) => "hole,zero",
        (ALLOCATION_DEPTH, 0) => "absent",
        (ALLOCATION_DEPTH, 1) => "local",
        (ALLOCATION_DEPTH, depth) => return Some(format!("backing depth {depth}").into()),
        (context, 0) if context.starts_with(DIRTY_BITMAP) => "clean",
        (context, 1) if context.starts_with(DIRTY_BITMAP) => "dirty",
        _ => return None,
    };
    Some(word.into())
}

const BLANKS: &str = "          ";

/// Appends a number, right-aligned in `columns` columns (at most ten).
fn number(line: &mut String, number: u64, columns: usize) {
    let mut digits = itoa::Buffer::new();
    let digits = digits.format(number);
    line.push_str(&BLANKS[..columns.saturating_sub(digits.len())]);
    line.push_str(digits);
}

/// A number in the format of C's `%g`: six significant digits, no trailing zeroes.
fn general(number: f64) -> String {
    if number == 0.0 || !number.is_finite() {
        return "0".to_string();
    }
    let trim = |digits: &str| match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => digits.to_string(),
    };
    let scientific = format!("{number:.5e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        exponent @ -4..=5 => {
            let decimals = usize::try_from(5 - exponent).unwrap_or(0);
            trim(&format!("{number:.decimals$}"))
        }
        exponent => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{}e{sign}{:02}", trim(digits), exponent.unsigned_abs())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_printed_as_c_does() {
        let cases = [
            (0.0, "0"),
            (100.0, "100"),
            (6.25, "6.25"),
            (97.65625, "97.6562"),
            (25.000_572_2, "25.0006"),
            (0.000_123_456_78, "0.000123457"),
            (0.000_012_345_6, "1.23456e-05"),
            (1.0 / 3.0, "0.333333"),
            (99.999_999, "100"),
            (4.656_612_873_077_393e-8, "4.65661e-08"),
        ];
        for (number, text) in cases {
            assert_eq!(general(number), text);
        }
    }
}
