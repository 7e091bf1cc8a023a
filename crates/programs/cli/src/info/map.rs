//! Extents of a device as text and JSON, in the formats of nbdinfo 1.22 and of qemu-img.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, Contexts, Device, DeviceExt as _, Error, HOLE, Kind, ZERO};

use super::picture::{IMAGE, Picture, STRIP};
use super::report::{Palette, quoted};
use crate::exit::Failure;
use crate::out::Output;

/// How to show a map.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    /// How runs are written.
    pub style: Style,
    /// Sums by state.
    pub totals: bool,
    /// Colours, with text.
    pub color: bool,
    /// Print what is known while the rest is being asked for.
    pub streams: bool,
}

/// How runs are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// As nbdinfo does.
    Text,
    /// As nbdinfo does with `--json`.
    Json,
    /// One JSON object a line.
    JsonLines,
    /// As qemu-img map does with `--output=json`.
    Qemu,
    /// Not at all: there are pictures.
    Nothing,
}

/// A range to show, and pictures of it.
#[derive(Debug, Default)]
pub struct View {
    /// Offset and length; none: all of the device.
    pub range: Option<(u64, u64)>,
    /// Print a strip.
    pub strip: bool,
    /// Write an image to this file.
    pub svg: Option<std::path::PathBuf>,
}

impl View {
    /// The range to show of a device of `size` bytes.
    fn range_of(&self, size: u64) -> Result<(u64, u64), Failure> {
        let Some((start, len)) = self.range else { return Ok((0, size)) };
        match start.checked_add(len).filter(|end| *end <= size) {
            Some(end) => Ok((start, end)),
            None => {
                let text = format!("--range {start}:{len} ends behind the device's {size} bytes");
                Err(Failure::usage(text))
            }
        }
    }

    fn pictures(&self, device: &str, context: &str, range: (u64, u64)) -> Vec<Picture> {
        let picture = |columns| Picture::new(device, context, range.0, range.1 - range.0, columns);
        let wanted = [(self.strip, STRIP), (self.svg.is_some(), IMAGE)];
        wanted.into_iter().filter(|one| one.0).map(|one| picture(one.1)).collect()
    }

    /// Prints and writes the pictures.
    fn show(&self, pictures: &[Picture], color: bool, output: &mut Output) -> Result<(), Failure> {
        let mut pictures = pictures.iter();
        if let (true, Some(picture)) = (self.strip, pictures.next()) {
            output.text(&picture.strip(color))?;
        }
        if let (Some(path), Some(picture)) = (&self.svg, pictures.next()) {
            std::fs::write(path, picture.svg()).map_err(|error| {
                let text =
                    format!("cannot write {}: {}", path.display(), crate::exit::plain(&error));
                Failure::new(crate::exit::FAILED, text)
            })?;
        }
        Ok(())
    }
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

/// Shows the extents of a range of the device, by default all of it.
pub async fn show(
    device: &Arc<dyn Device>,
    shown: Shown,
    format: Format,
    view: &View,
    output: &mut Output,
) -> Result<(), Failure> {
    let facts = device.facts();
    if format.style == Style::Qemu && shown.name != BASE_ALLOCATION {
        return Err(Failure::usage(format!("--format qemu shows {BASE_ALLOCATION} only")));
    }
    let (start, end) = view.range_of(facts.size)?;
    let mut pictures = view.pictures(&facts.name, &shown.name, (start, end));
    let mut sink = Sink::new(shown.name, format);
    let mut at = start;
    while at < end && !output.is_gone() {
        let lists = device.extents(at, end - at, shown.context).await;
        let lists = lists.map_err(|error| error.on(&facts.name))?;
        let covered = lists.first().map_or(0, blockhaul_block::Extents::total).min(end - at);
        if covered == 0 {
            let text = format!("the device reported no extents at offset {at}");
            return Err(Error::new(Kind::Io, text).on(&facts.name).into());
        }
        for (here, run) in lists.iter().take(1).flat_map(|list| list.ranges(at)) {
            let len = run.len.min(end - here.min(end));
            pictures.iter_mut().for_each(|picture| picture.add(here, len, run.state));
            sink.run(here, len, run.state, output)?;
        }
        if format.streams {
            output.now()?;
        }
        at += covered;
    }
    sink.finish(end - start, output)?;
    view.show(&pictures, format.color, output)
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
        if len == 0 || self.format.style == Style::Nothing {
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
        match self.format.style {
            Style::Text | Style::Nothing => {
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
            Style::Qemu => self.qemu(&mut line, at, len, state),
            style => {
                line.push_str(match (style, self.shown) {
                    (Style::JsonLines, _) => "{ ",
                    (_, true) => ",\n{ ",
                    (_, false) => "[\n{ ",
                });
                line.push_str("\"offset\": ");
                number(&mut line, at, 0);
                line.push_str(", \"length\": ");
                number(&mut line, len, 0);
                line.push_str(", \"type\": ");
                number(&mut line, state, 0);
                if let Some(text) = described {
                    line.push_str(", \"description\": ");
                    line.push_str(&quoted(&text));
                }
                line.push_str(if style == Style::JsonLines { "}\n" } else { "}" });
            }
        }
        self.shown = true;
        self.line = line;
        output.text(&self.line)
    }

    /// A run as qemu-img map shows it.
    fn qemu(&self, line: &mut String, at: u64, len: u64, state: u64) {
        line.push_str(if self.shown { ",\n{ \"start\": " } else { "[{ \"start\": " });
        number(line, at, 0);
        line.push_str(", \"length\": ");
        number(line, len, 0);
        let (zero, data) = (state & ZERO != 0, state & HOLE == 0);
        line.push_str(", \"depth\": 0, \"present\": true, \"zero\": ");
        line.push_str(if zero { "true" } else { "false" });
        line.push_str(", \"data\": ");
        line.push_str(if data { "true" } else { "false" });
        line.push_str(", \"compressed\": false}");
    }

    fn finish(mut self, size: u64, output: &mut Output) -> Result<(), Failure> {
        if self.format.totals {
            return self.finish_totals(size, output);
        }
        let last = self.last.take();
        self.show(last, output)?;
        match (self.format.style, self.shown) {
            (Style::Json, true) => output.text("\n]\n"),
            (Style::Json, false) => output.text("[\n\n]\n"),
            (Style::Qemu, true) => output.text("]\n"),
            (Style::Qemu, false) => output.text("[]\n"),
            _ => Ok(()),
        }
    }

    fn finish_totals(&self, size: u64, output: &mut Output) -> Result<(), Failure> {
        let mut lines = Vec::new();
        for (&state, &len) in &self.totals {
            let percent = 100.0 * len as f64 / size as f64;
            let described = describe(&self.context, state);
            if self.format.style == Style::Json {
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
        match (self.format.style == Style::Json, lines.is_empty()) {
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
