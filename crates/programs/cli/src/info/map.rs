//! Extents of a device as text and JSON, in the formats of nbdinfo 1.22 and of qemu-img.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Contexts, Device, Error, ExtentPart, ExtentReader, HOLE, Kind, ZERO,
};
use blockhaul_io::Ticket;

use super::picture::{self, IMAGE, Picture, STRIP};
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

    /// The strips and the panels of the image, one of each for a context, as far as wanted.
    fn pictures(&self, device: &str, shown: &[Shown], range: (u64, u64)) -> [Vec<Picture>; 2] {
        let wanted = [(self.strip, STRIP), (self.svg.is_some(), IMAGE)];
        wanted.map(|(wanted, columns)| {
            let shown = shown.iter().filter(|_| wanted);
            let len = range.1 - range.0;
            shown.map(|shown| Picture::new(device, &shown.name, range.0, len, columns)).collect()
        })
    }

    /// Prints and writes the pictures.
    fn show(
        &self,
        [strips, panels]: &[Vec<Picture>; 2],
        color: bool,
        output: &mut Output,
    ) -> Result<(), Failure> {
        for picture in strips {
            output.text(&picture.strip(color))?;
        }
        if let Some(path) = &self.svg {
            std::fs::write(path, picture::svg(panels)).map_err(|error| {
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

/// Shows the extents of a range of the device, by default all of it, in these contexts: at least one.
pub async fn show(
    device: &Arc<dyn Device>,
    shown: Vec<Shown>,
    format: Format,
    view: &View,
    output: &mut Output,
) -> Result<(), Failure> {
    let facts = device.facts();
    let is_allocation = matches!(&shown[..], [only] if only.name == BASE_ALLOCATION);
    if format.style == Style::Qemu && !is_allocation {
        return Err(Failure::usage(format!("--format qemu shows {BASE_ALLOCATION} only")));
    }
    let (start, end) = view.range_of(facts.size)?;
    let pictures = view.pictures(&facts.name, &shown, (start, end));
    let contexts = all_of(&shown);
    let order = shown.iter().map(|shown| place_of(shown.context, contexts)).collect();
    let sink = Sink::new(shown, order, format);
    let mut page = Box::new(Page { sink, pictures, output: std::mem::take(output) });
    let mut extents = ExtentReader::new(device.clone(), contexts, (start, end));
    let mut next = extents.next().await;
    while !page.output.is_gone()
        && let Some(part) = next.map_err(|error| error.on(&facts.name))?
    {
        let written = page.write(part);
        // Meanwhile another thread may write the part.
        next = extents.next().await;
        page = written.page().await?;
    }
    let Page { sink, pictures, output: mut shown } = *page;
    sink.finish(end - start, &mut shown)?;
    view.show(&pictures, format.color, &mut shown)?;
    *output = shown;
    Ok(())
}

/// A list from this length on is written on a thread of its own, while the device is asked for more.
const LONG: usize = 4096;

/// What a map is written to.
struct Page {
    sink: Sink,
    pictures: [Vec<Picture>; 2],
    output: Output,
}

/// A page to which a part is written.
enum Written {
    Done(Result<Box<Page>, Failure>),
    /// Once a thread has done it.
    Soon(Ticket<Result<Box<Page>, Failure>>),
}

impl Written {
    /// The page, when the part is there.
    async fn page(self) -> Result<Box<Page>, Failure> {
        match self {
            Written::Done(page) => page,
            Written::Soon(ticket) => ticket.await.unwrap_or_else(|lost| {
                Err(Error::new(Kind::Io, "cannot write the map").because(lost).into())
            }),
        }
    }
}

impl Page {
    /// Writes a part, on another thread if it is long.
    fn write(self: Box<Self>, part: ExtentPart) -> Written {
        if part.lists.iter().any(|list| list.len() >= LONG) {
            Written::Soon(blockhaul_io::offload(move || self.with(&part)))
        } else {
            Written::Done(self.with(&part))
        }
    }

    /// The page with a part.
    fn with(mut self: Box<Self>, part: &ExtentPart) -> Result<Box<Page>, Failure> {
        let Page { sink, pictures, output } = &mut *self;
        part.for_each_run(|at, len, states| {
            for picture in &mut *pictures {
                for (picture, place) in picture.iter_mut().zip(&sink.order) {
                    picture.add(at, len, states[*place]);
                }
            }
            sink.run(at, len, states, output)
        })?;
        if sink.format.streams {
            output.now()?;
        }
        Ok(self)
    }
}

/// The contexts together.
fn all_of(shown: &[Shown]) -> Contexts {
    let indices = shown.iter().flat_map(|shown| shown.context.iter());
    indices.fold(Contexts::empty(), Contexts::with)
}

/// The place of one context's list among those of `all`, which are in ascending order.
fn place_of(one: Contexts, all: Contexts) -> usize {
    all.iter().position(|index| one.contains(index)).unwrap_or(0)
}

/// Takes runs in order, joins adjacent equal ones, and shows them.
struct Sink {
    /// The contexts, in the order in which they are shown.
    contexts: Vec<Shown>,
    /// The place of each one's state among the states of a run.
    order: Vec<usize>,
    format: Format,
    palette: Palette,
    /// The run that may still grow: offset, length. Its states.
    last: Option<(u64, u64)>,
    states: Vec<u64>,
    shown: bool,
    totals: BTreeMap<Vec<u64>, u64>,
    /// The line being made: maps have millions.
    line: String,
}

impl Sink {
    fn new(contexts: Vec<Shown>, order: Vec<usize>, format: Format) -> Sink {
        let palette = Palette::new(format.color);
        let states = Vec::new();
        let totals = BTreeMap::new();
        let line = String::new();
        Sink { contexts, order, format, palette, last: None, states, shown: false, totals, line }
    }

    fn run(
        &mut self,
        at: u64,
        len: u64,
        states: &[u64],
        output: &mut Output,
    ) -> Result<(), Failure> {
        if len == 0 || self.format.style == Style::Nothing {
            return Ok(());
        }
        if self.format.totals {
            return self.sum(len, states);
        }
        match &mut self.last {
            Some((_, grown)) if self.states == states => *grown += len,
            _ => {
                self.show(output)?;
                self.last = Some((at, len));
                self.states.clear();
                self.states.extend_from_slice(states);
            }
        }
        Ok(())
    }

    fn sum(&mut self, len: u64, states: &[u64]) -> Result<(), Failure> {
        if let Some(sum) = self.totals.get_mut(states) {
            *sum += len;
            return Ok(());
        }
        self.totals.insert(states.to_vec(), len);
        if self.totals.len() > STATES_MAX {
            let text = format!("the map has more than {STATES_MAX} states");
            return Err(Error::new(Kind::TooLarge, text).into());
        }
        Ok(())
    }

    /// Shows the last run, if there is one.
    fn show(&mut self, output: &mut Output) -> Result<(), Failure> {
        let Some((at, len)) = self.last.take() else { return Ok(()) };
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        match self.format.style {
            Style::Text | Style::Nothing => {
                let (before, after) = self.color(&self.states);
                line.push_str(before);
                number(&mut line, at, 10);
                line.push_str("  ");
                number(&mut line, len, 10);
                for (name, state) in self.in_order(&self.states) {
                    line.push_str("  ");
                    number(&mut line, state, 3);
                    if let Some(text) = describe(name, state) {
                        line.push_str("  ");
                        line.push_str(&text);
                    }
                }
                line.push_str(after);
                line.push('\n');
            }
            Style::Qemu => self.qemu(&mut line, at, len, self.states[0]),
            Style::Json | Style::JsonLines => self.json(&mut line, at, len),
        }
        self.shown = true;
        self.line = line;
        output.text(&self.line)
    }

    /// The names of the contexts and their states, in the order in which they are shown.
    fn in_order<'a>(&'a self, states: &'a [u64]) -> impl Iterator<Item = (&'a str, u64)> {
        let states = self.order.iter().map(|place| states[*place]);
        self.contexts.iter().map(|shown| shown.name.as_str()).zip(states)
    }

    /// The last run as an object of JSON: of one context as nbdinfo has it.
    fn json(&self, line: &mut String, at: u64, len: u64) {
        let style = self.format.style;
        line.push_str(match (style, self.shown) {
            (Style::JsonLines, _) => "{ ",
            (_, true) => ",\n{ ",
            (_, false) => "[\n{ ",
        });
        line.push_str("\"offset\": ");
        number(line, at, 0);
        line.push_str(", \"length\": ");
        number(line, len, 0);
        line.push_str(", ");
        self.json_states(line, &self.states);
        line.push_str(if style == Style::JsonLines { "}\n" } else { "}" });
    }

    /// The states as members of an object.
    fn json_states(&self, line: &mut String, states: &[u64]) {
        let state_of = |line: &mut String, name: &str, state: u64| {
            line.push_str("\"type\": ");
            number(line, state, 0);
            match describe(name, state) {
                Some(Cow::Borrowed(word)) => {
                    line.push_str(", \"description\": \"");
                    line.push_str(word);
                    line.push('"');
                }
                Some(Cow::Owned(text)) => {
                    line.push_str(", \"description\": ");
                    line.push_str(&quoted(&text));
                }
                None => {}
            }
        };
        let several = self.contexts.len() > 1;
        if several {
            line.push_str("\"contexts\": [");
        }
        for (index, (name, state)) in self.in_order(states).enumerate() {
            if several {
                line.push_str(if index > 0 { ", { \"context\": " } else { "{ \"context\": " });
                line.push_str(&quoted(name));
                line.push_str(", ");
            }
            state_of(line, name, state);
            if several {
                line.push_str(" }");
            }
        }
        if several {
            line.push_str("] ");
        }
    }

    /// A run as qemu-img map shows it.
    fn qemu(&self, line: &mut String, at: u64, len: u64, state: u64) {
        line.push_str(if self.shown { ",\n{ \"start\": " } else { "[{ \"start\": " });
        number(line, at, 0);
        line.push_str(", \"length\": ");
        number(line, len, 0);
        let zero = state & ZERO != 0;
        let data = state & HOLE == 0;
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
        self.show(output)?;
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
        for (states, &len) in &self.totals {
            let percent = 100.0 * len as f64 / size as f64;
            if self.format.style == Style::Json {
                let percent = general(percent);
                let mut line = format!("{{ \"size\": {len}, \"percent\": {percent}, ");
                self.json_states(&mut line, states);
                lines.push(line.trim_end().to_string() + " }");
            } else {
                let (before, after) = self.color(states);
                let mut line = format!("{before}{len:>10} {percent:>5.1}%");
                for (name, state) in self.in_order(states) {
                    line.push(' ');
                    number(&mut line, state, 3);
                    if let Some(text) = describe(name, state) {
                        line.push(' ');
                        line.push_str(&text);
                    }
                }
                output.text(&format!("{line}{after}\n"))?;
            }
        }
        match (self.format.style == Style::Json, lines.is_empty()) {
            (true, true) => output.text("[]\n"),
            (true, false) => output.text(&format!("[\n{}\n]\n", lines.join(",\n"))),
            (false, _) => Ok(()),
        }
    }

    /// The colours of a run: those of the first context that has some for its state.
    fn color(&self, states: &[u64]) -> (&'static str, &'static str) {
        let palette = &self.palette;
        let colors = self.in_order(states).map(|(context, state)| match (context, state) {
            (BASE_ALLOCATION, 0) => palette.data,
            (ALLOCATION_DEPTH, 1) => palette.local,
            (ALLOCATION_DEPTH, 2..) => palette.backing,
            (context, 0) if context.starts_with(DIRTY_BITMAP) => palette.good,
            (context, 1) if context.starts_with(DIRTY_BITMAP) => palette.bad,
            _ => "",
        });
        let found = colors.into_iter().find(|color| !color.is_empty());
        found.map_or(("", ""), |color| (color, palette.reset))
    }
}

/// QEMU's context for the depth in a chain of images.
const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
/// Prefix of QEMU's contexts for bitmaps.
const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// The meaning of a state, in known contexts; if borrowed, a word that needs no escapes in JSON.
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
    let trim = |digits: &str| {
        if digits.contains('.') {
            digits.trim_end_matches('0').trim_end_matches('.').to_string()
        } else {
            digits.to_string()
        }
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
