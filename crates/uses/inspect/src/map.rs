//! Extents of a device as text and JSON, in the formats of nbdinfo 1.22 and of qemu-img.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, BITMAP_CONTEXT, ContextSet, Device, Error, ExtentPart, ExtentReader, HOLE,
    Kind, ZERO,
};
use blockhaul_io::Ticket;

use crate::error::{InspectionError, Result};
use crate::json::json;
use crate::palette::Palette;
use crate::picture::{self, IMAGE, Picture, STRIP};

/// Options of a map; the default is a list of all runs as text.
#[derive(Debug, Clone, Copy, Default)]
pub struct MapOptions {
    /// The format of runs.
    pub format: MapFormat,
    /// Offset and length of the range to show, in bytes; `None`: all of the device.
    pub range: Option<(u64, u64)>,
    /// Sums by state, in place of runs.
    pub totals: bool,
    /// Colours, with text.
    pub color: bool,
    /// Flush the output while the rest is being asked for.
    pub streams: bool,
    /// Make strips for a terminal.
    pub strip: bool,
    /// Make an image.
    pub image: bool,
}

/// The format of runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MapFormat {
    /// The text of nbdinfo.
    #[default]
    Text,
    /// The JSON of `nbdinfo --json`.
    Json,
    /// One JSON object a line.
    JsonLines,
    /// The JSON of `qemu-img map`, of the context `base:allocation` alone.
    Qemu,
    /// No runs: the map consists of pictures.
    Nothing,
}

impl MapOptions {
    /// First and last offset of the range to show of a device of `size` bytes.
    fn range_of(&self, size: u64) -> Result<(u64, u64)> {
        let Some((offset, length)) = self.range else { return Ok((0, size)) };
        match offset.checked_add(length).filter(|end| *end <= size) {
            Some(end) => Ok((offset, end)),
            None => Err(InspectionError::Range { offset, length, size }),
        }
    }

    /// Empty pictures of a range: a strip and a panel for each context, as far as wanted.
    fn pictures(&self, device: &str, contexts: &[MapContext], range: (u64, u64)) -> MapPictures {
        let make = |wanted: bool, columns| {
            let contexts = contexts.iter().filter(|_| wanted);
            let len = range.1 - range.0;
            contexts
                .map(|context| Picture::new(device, &context.name, range.0, len, columns))
                .collect()
        };
        MapPictures { strips: make(self.strip, STRIP), panels: make(self.image, IMAGE) }
    }
}

/// Pictures of a map: the share of each part of the range that holds data, or is dirty.
#[derive(Debug)]
pub struct MapPictures {
    strips: Vec<Picture>,
    panels: Vec<Picture>,
}

impl MapPictures {
    /// Two lines of text for each context; empty without [`MapOptions::strip`].
    pub fn strips(&self, color: bool) -> String {
        self.strips.iter().map(|picture| picture.strip(color)).collect()
    }

    /// An image as SVG, with a panel for each context; without panels unless [`MapOptions::image`] is set.
    pub fn svg(&self) -> String {
        picture::svg(&self.panels)
    }

    /// Adds a run. `order`: the place of each context's state among the states.
    fn add(&mut self, at: u64, len: u64, states: &[u64], order: &[usize]) {
        for pictures in [&mut self.strips, &mut self.panels] {
            for (picture, place) in pictures.iter_mut().zip(order) {
                picture.add(at, len, states[*place]);
            }
        }
    }
}

/// A metadata context of a device.
#[derive(Debug)]
pub struct MapContext {
    /// The set of this context alone.
    pub context: ContextSet,
    /// The name, which gives states their meaning.
    pub name: String,
}

/// Maximum number of states in sums: common contexts have a handful; a backing chain may be longer.
const STATES_MAX: usize = 1 << 20;

/// Writes the extents of a range of a device in these contexts, of which there is at least one. Returns the output and
/// pictures. Long lists are written on another thread, while the device is asked for more. An output that fails with
/// [`ErrorKind::BrokenPipe`] ends the map, which is not an error.
///
/// # Errors
/// The options do not fit the device or the contexts, the device fails, the map has too many states for sums, or the
/// output cannot be written.
pub async fn write_map<W: Write + Send + 'static>(
    device: &Arc<dyn Device>,
    contexts: Vec<MapContext>,
    options: &MapOptions,
    output: W,
) -> Result<(W, MapPictures)> {
    let facts = device.facts();
    let is_allocation = matches!(&contexts[..], [only] if only.name == BASE_ALLOCATION);
    if options.format == MapFormat::Qemu && !is_allocation {
        return Err(InspectionError::QemuContexts);
    }
    let (start, end) = options.range_of(facts.size)?;
    let pictures = options.pictures(&facts.name, &contexts, (start, end));
    let all = all_of(&contexts);
    let order = contexts.iter().map(|context| place_of(context.context, all)).collect();
    let runs = RunWriter::new(contexts, order, *options);
    let mut page = Box::new(MapOutput { runs, pictures, output, is_closed: false });
    let mut extents = ExtentReader::new(device.clone(), all, (start, end));
    let mut next = extents.next().await;
    while !page.is_closed
        && let Some(part) = next.map_err(|error| error.on(&facts.name))?
    {
        let written = page.write(part);
        // Meanwhile another thread may write the part.
        next = extents.next().await;
        page = written.page().await?;
    }
    page.finish(end - start)
}

/// A list from this length on is written on a thread of its own, while the device is asked for more.
const LONG: usize = 4096;

/// The state of a map that is being written.
struct MapOutput<W> {
    runs: RunWriter,
    pictures: MapPictures,
    output: W,
    /// The reader of the output has closed it.
    is_closed: bool,
}

/// A page to which a part is written.
enum PagePart<W> {
    Done(Result<Box<MapOutput<W>>>),
    /// Once a thread has done it.
    Soon(Ticket<Result<Box<MapOutput<W>>>>),
}

impl<W> PagePart<W> {
    /// The page, when the part is there.
    async fn page(self) -> Result<Box<MapOutput<W>>> {
        match self {
            PagePart::Done(page) => page,
            PagePart::Soon(ticket) => ticket.await.unwrap_or_else(|lost| {
                Err(Error::new(Kind::Io, "cannot write the map").because(lost).into())
            }),
        }
    }
}

impl<W: Write + Send + 'static> MapOutput<W> {
    /// Writes a part, on another thread if it is long.
    fn write(self: Box<Self>, part: ExtentPart) -> PagePart<W> {
        if part.lists.iter().any(|list| list.len() >= LONG) {
            PagePart::Soon(blockhaul_io::offload(move || self.with(&part)))
        } else {
            PagePart::Done(self.with(&part))
        }
    }

    /// The page with a part.
    fn with(mut self: Box<Self>, part: &ExtentPart) -> Result<Box<MapOutput<W>>> {
        let written = self.add(part);
        self.is_closed = is_closed(written)?;
        Ok(self)
    }

    fn add(&mut self, part: &ExtentPart) -> Result<()> {
        let MapOutput { runs, pictures, output, .. } = self;
        part.for_each_run(|at, len, states| {
            pictures.add(at, len, states, &runs.order);
            runs.add(at, len, states, output)
        })?;
        if runs.options.streams {
            output.flush()?;
        }
        Ok(())
    }

    /// Writes the end of the map of `size` bytes, unless the output is closed.
    fn finish(self, size: u64) -> Result<(W, MapPictures)> {
        let MapOutput { runs, pictures, mut output, is_closed: closed } = self;
        if !closed {
            is_closed(runs.finish(size, &mut output).map_err(InspectionError::from))?;
        }
        Ok((output, pictures))
    }
}

/// Whether the reader of the output has closed it.
fn is_closed(written: Result<()>) -> Result<bool> {
    match written {
        Ok(()) => Ok(false),
        Err(InspectionError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(true),
        Err(error) => Err(error),
    }
}

/// The contexts together.
fn all_of(contexts: &[MapContext]) -> ContextSet {
    let indices = contexts.iter().flat_map(|context| context.context.iter());
    indices.fold(ContextSet::empty(), ContextSet::with)
}

/// The place of one context's list among those of `all`, which are in ascending order.
fn place_of(one: ContextSet, all: ContextSet) -> usize {
    all.iter().position(|index| one.contains(index)).unwrap_or(0)
}

/// Takes runs in order, joins adjacent equal ones, and shows them.
struct RunWriter {
    /// The contexts, in the order in which they are shown.
    contexts: Vec<MapContext>,
    /// The place of each one's state among the states of a run.
    order: Vec<usize>,
    options: MapOptions,
    palette: Palette,
    /// The run that may still grow: offset, length. Its states.
    last: Option<(u64, u64)>,
    states: Vec<u64>,
    /// A run was written.
    has_runs: bool,
    totals: BTreeMap<Vec<u64>, u64>,
    /// The line being made: maps have millions.
    line: String,
}

impl RunWriter {
    fn new(contexts: Vec<MapContext>, order: Vec<usize>, options: MapOptions) -> RunWriter {
        let palette = Palette::new(options.color);
        let states = Vec::new();
        let totals = BTreeMap::new();
        let line = String::new();
        let (last, has_runs) = (None, false);
        RunWriter { contexts, order, options, palette, last, states, has_runs, totals, line }
    }

    /// Adds a run.
    fn add(&mut self, at: u64, len: u64, states: &[u64], output: &mut impl Write) -> Result<()> {
        if len == 0 || self.options.format == MapFormat::Nothing {
            return Ok(());
        }
        if self.options.totals {
            return self.sum(len, states);
        }
        match &mut self.last {
            Some((_, grown)) if self.states == states => *grown += len,
            _ => {
                self.write_last(output)?;
                self.last = Some((at, len));
                self.states.clear();
                self.states.extend_from_slice(states);
            }
        }
        Ok(())
    }

    fn sum(&mut self, len: u64, states: &[u64]) -> Result<()> {
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

    /// Writes the last run, if there is one.
    fn write_last(&mut self, output: &mut impl Write) -> io::Result<()> {
        let Some((at, len)) = self.last.take() else { return Ok(()) };
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        match self.options.format {
            MapFormat::Text | MapFormat::Nothing => {
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
            MapFormat::Qemu => self.qemu(&mut line, at, len, self.states[0]),
            MapFormat::Json | MapFormat::JsonLines => self.json(&mut line, at, len),
        }
        self.has_runs = true;
        self.line = line;
        output.write_all(self.line.as_bytes())
    }

    /// The names of the contexts and their states, in the order in which they are shown.
    fn in_order<'a>(&'a self, states: &'a [u64]) -> impl Iterator<Item = (&'a str, u64)> {
        let states = self.order.iter().map(|place| states[*place]);
        self.contexts.iter().map(|context| context.name.as_str()).zip(states)
    }

    /// The last run as an object of JSON: of one context as nbdinfo has it.
    fn json(&self, line: &mut String, at: u64, len: u64) {
        let format = self.options.format;
        line.push_str(match (format, self.has_runs) {
            (MapFormat::JsonLines, _) => "{ ",
            (_, true) => ",\n{ ",
            (_, false) => "[\n{ ",
        });
        line.push_str("\"offset\": ");
        number(line, at, 0);
        line.push_str(", \"length\": ");
        number(line, len, 0);
        line.push_str(", ");
        self.json_states(line, &self.states);
        line.push_str(if format == MapFormat::JsonLines { "}\n" } else { "}" });
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
                    line.push_str(&json(&text));
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
                line.push_str(&json(name));
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
        line.push_str(if self.has_runs { ",\n{ \"start\": " } else { "[{ \"start\": " });
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

    fn finish(mut self, size: u64, output: &mut impl Write) -> io::Result<()> {
        if self.options.totals {
            return self.finish_totals(size, output);
        }
        self.write_last(output)?;
        output.write_all(match (self.options.format, self.has_runs) {
            (MapFormat::Json, true) => b"\n]\n",
            (MapFormat::Json, false) => b"[\n\n]\n",
            (MapFormat::Qemu, true) => b"]\n",
            (MapFormat::Qemu, false) => b"[]\n",
            _ => b"",
        })
    }

    fn finish_totals(&self, size: u64, output: &mut impl Write) -> io::Result<()> {
        let mut lines = Vec::new();
        for (states, &len) in &self.totals {
            let percent = 100.0 * len as f64 / size as f64;
            if self.options.format == MapFormat::Json {
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
                writeln!(output, "{line}{after}")?;
            }
        }
        match (self.options.format == MapFormat::Json, lines.is_empty()) {
            (true, true) => output.write_all(b"[]\n"),
            (true, false) => write!(output, "[\n{}\n]\n", lines.join(",\n")),
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
            (context, 0) if context.starts_with(BITMAP_CONTEXT) => palette.good,
            (context, 1) if context.starts_with(BITMAP_CONTEXT) => palette.bad,
            _ => "",
        });
        let found = colors.into_iter().find(|color| !color.is_empty());
        found.map_or(("", ""), |color| (color, palette.reset))
    }
}

/// QEMU's context for the depth in a chain of images.
const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";

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
        (context, 0) if context.starts_with(BITMAP_CONTEXT) => "clean",
        (context, 1) if context.starts_with(BITMAP_CONTEXT) => "dirty",
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
