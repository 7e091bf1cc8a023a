//! Maps to look at: a strip for terminals, and SVG. Both show in each column which share of a part
//! of the disk is marked: data, or dirty. The height says so, too, for readers without colours.

use std::fmt::Write as _;

use blockhaul_block::{BASE_ALLOCATION, BITMAP_CONTEXT};
use blockhaul_catalog::rounded_size;
use blockhaul_transfer::one_word;

use crate::palette::Palette;

/// Columns of a strip: fits a terminal of 80.
pub(crate) const STRIP: u64 = 72;
/// Columns of an image.
pub(crate) const IMAGE: u64 = 512;
/// Heights of a column in a terminal.
const HEIGHTS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Pixels of an image: bars, and the room around them.
const WIDTH: u64 = 1024;
const HEIGHT: u64 = 120;
const EDGE: u64 = 20;
/// Pixels above and below the bars of a panel.
const PANEL: u64 = 80;

/// Sums for the columns of a picture.
#[derive(Debug)]
pub(crate) struct Picture {
    name: String,
    context: String,
    /// The range that is shown.
    start: u64,
    len: u64,
    /// Bytes of a column; the last one may be shorter.
    column: u64,
    marked: Vec<u64>,
}

impl Picture {
    /// An empty picture of a range of a device in at most `columns` columns.
    pub(crate) fn new(name: &str, context: &str, start: u64, len: u64, columns: u64) -> Picture {
        let column = len.div_ceil(columns.max(1)).max(1);
        let count = usize::try_from(len.div_ceil(column)).unwrap_or(0);
        let name = name.to_string();
        let context = context.to_string();
        Picture { name, context, start, len, column, marked: vec![0; count] }
    }

    /// Adds a run.
    pub(crate) fn add(&mut self, at: u64, len: u64, state: u64) {
        let marked = if self.context == BASE_ALLOCATION { state == 0 } else { state != 0 };
        if !marked {
            return;
        }
        let end = at.saturating_add(len).min(self.start.saturating_add(self.len));
        let mut at = at.max(self.start);
        while at < end {
            let index = (at - self.start) / self.column;
            let stop = (self.start + (index + 1).saturating_mul(self.column)).min(end);
            if let Some(sum) = usize::try_from(index).ok().and_then(|i| self.marked.get_mut(i)) {
                *sum += stop - at;
            }
            at = stop;
        }
    }

    /// The share of each column that is marked, from 0 to 1.
    fn shares(&self) -> impl Iterator<Item = f64> + '_ {
        self.marked.iter().zip(0_u64..).map(|(sum, index)| {
            let len = self.len.saturating_sub(index * self.column).min(self.column).max(1);
            *sum as f64 / len as f64
        })
    }

    /// The marked bytes and the bytes of a column, in one line.
    fn legend(&self) -> String {
        let marked: u64 = self.marked.iter().sum();
        let percent = 100.0 * marked as f64 / self.len.max(1) as f64;
        let marks = match self.context.as_str() {
            BASE_ALLOCATION => "data",
            context if context.starts_with(BITMAP_CONTEXT) => "dirty",
            context => context,
        };
        format!(
            "{marks}: {} of {} ({percent:.1} %); a column is {}",
            rounded_size(marked),
            rounded_size(self.len),
            rounded_size(self.column)
        )
    }

    /// Two lines for a terminal.
    pub(crate) fn strip(&self, color: bool) -> String {
        let bars: String = self.shares().map(height).collect();
        let palette = Palette::new(color);
        format!("|{}{bars}{}|\n{}\n", palette.data, palette.reset, self.legend())
    }

    /// A panel of an image, from row `top` on.
    fn panel(&self, top: u64, svg: &mut String) {
        let title = escaped(&self.name);
        let legend = escaped(&self.legend());
        let _ = write!(
            svg,
            "<text x=\"{EDGE}\" y=\"{}\" font-weight=\"bold\">{title}</text>\n\
             <rect x=\"{EDGE}\" y=\"{}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#eaeef2\"/>\n",
            top + 22,
            top + 32
        );
        let step = WIDTH as f64 / self.marked.len().max(1) as f64;
        let bottom = (top + 32 + HEIGHT) as f64;
        let fill = if self.context == BASE_ALLOCATION { "#0969da" } else { "#bc4c00" };
        for (index, share) in self.shares().enumerate().filter(|(_, share)| *share > 0.0) {
            // At least one pixel: a little data is not nothing.
            let height = (share * HEIGHT as f64).max(1.0);
            let x = EDGE as f64 + index as f64 * step;
            let y = bottom - height;
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{step:.2}\" height=\"{height:.2}\" \
                 fill=\"{fill}\"/>"
            );
        }
        let below = top + HEIGHT + 50;
        for quarter in 0..=4 {
            let at = self.start.saturating_add(self.len / 4 * quarter);
            let x = EDGE + WIDTH / 4 * quarter;
            let anchor = ["start", "middle", "middle", "middle", "end"][quarter as usize % 5];
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"{below}\" text-anchor=\"{anchor}\">{}</text>",
                rounded_size(at)
            );
        }
        let _ = writeln!(svg, "<text x=\"{EDGE}\" y=\"{}\">{legend}</text>", below + 22);
    }
}

/// An image with a panel for each picture.
pub(crate) fn svg(pictures: &[Picture]) -> String {
    let label: Vec<_> = pictures
        .iter()
        .map(|picture| escaped(&format!("{}: {}", picture.name, picture.legend())))
        .collect();
    let width = WIDTH + 2 * EDGE;
    let total = (HEIGHT + PANEL) * pictures.len() as u64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {total}\" role=\"img\" \
         aria-label=\"{}\" font-family=\"sans-serif\" font-size=\"14\">\n\
         <rect width=\"{width}\" height=\"{total}\" fill=\"#ffffff\"/>\n",
        label.join("; ")
    );
    for (picture, index) in pictures.iter().zip(0..) {
        picture.panel(index * (HEIGHT + PANEL), &mut svg);
    }
    svg + "</svg>\n"
}

/// The character of a share.
fn height(share: f64) -> char {
    // A little is not nothing, and almost everything is not all.
    let level = match share {
        share if share <= 0.0 => 0,
        share if share >= 1.0 => 8,
        share => 1 + (share * 7.0) as usize,
    };
    HEIGHTS[level.min(8)]
}

/// Text for XML.
fn escaped(text: &str) -> String {
    let printable = one_word(text);
    let escaped = printable.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    escaped.replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heights_show_shares() {
        let mut picture = Picture::new("disk", BASE_ALLOCATION, 100, 1000, 10);
        picture.add(100, 100, 0);
        picture.add(200, 100, 3);
        picture.add(300, 50, 0);
        picture.add(1099, 5, 0);
        let strip = picture.strip(false);
        assert_eq!(strip, "|█ ▄      ▁|\ndata: 151 B of 1000 B (15.1 %); a column is 100 B\n");
        assert_eq!(height(0.999), '▇');
    }

    #[test]
    fn dirty_is_what_is_not_0() {
        let mut picture = Picture::new("disk", "qemu:dirty-bitmap:b", 0, 10, 5);
        picture.add(0, 4, 1);
        picture.add(4, 6, 0);
        assert!(picture.strip(false).starts_with("|██   |\ndirty: 4 B of 10 B"));
    }

    #[test]
    fn images_are_xml_and_small_runs_are_seen() {
        let mut picture = Picture::new("<a&\"b\n>", BASE_ALLOCATION, 0, u64::MAX, IMAGE);
        picture.add(5, 1, 0);
        let svg = svg(&[picture]);
        assert!(svg.contains("&lt;a&amp;&quot;b\\n&gt;") && !svg.contains("<a&"), "{svg}");
        assert!(svg.contains("height=\"1.00\" fill=\"#0969da\""), "{svg}");
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
        assert!(Picture::new("", BASE_ALLOCATION, 0, 0, 9).strip(false).contains("0 B of 0 B"));
    }
}
