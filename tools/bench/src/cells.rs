//! What a cell of a table shows, as text.

use crate::result::{CellReport, CellState, Metric};
use crate::stats::SampleSummary;
use blockhaul_measure::number;

/// Deviations below this many percent are not shown, so that important ones are visible.
const DEVIATION_SHOWN: f64 = 1.5;

/// Letter of a column: A to Z, then AA and so on.
pub fn letter(mut column: usize) -> String {
    let mut letters = Vec::new();
    loop {
        letters.push(char::from(b'A' + (column % 26) as u8));
        if column < 26 {
            return letters.iter().rev().collect();
        }
        column = column / 26 - 1;
    }
}

/// A median with its deviation: `0.594 ± 3%`.
pub fn median(summary: &SampleSummary, unit: f64) -> String {
    let mut text = number(summary.median / unit);
    if summary.deviation_percent() >= DEVIATION_SHOWN {
        text.push_str(&format!(" ± {:.0}%", summary.deviation_percent().ceil()));
    }
    text
}

/// What a cell shows: `0.594 ± 3% (1 failed)`, FAILED, or why there is nothing.
pub fn cell_text(cell: &CellReport, metric: Metric) -> String {
    let summary = match cell.state(metric) {
        CellState::Skipped(_) => return "skipped".to_owned(),
        // Nothing of the kind, for instance threads of servers where there are none.
        CellState::Missing if cell.good > 0 => return "–".to_owned(),
        CellState::Missing => return "not run".to_owned(),
        CellState::Failed(_) => return "FAILED".to_owned(),
        CellState::Good(summary) => summary,
    };
    let mut text = median(summary, metric.unit());
    if cell.failed > 0 {
        text.push_str(&format!(" ({} failed)", cell.failed));
    }
    text
}

/// Differences of a cell's median to those of every earlier column: `A+143%  B-4%`, and `A--` where
/// one of the two has none.
pub fn differences(cells: &[CellReport], column: usize, metric: Metric) -> String {
    let mine = metric.of(&cells[column]).map(|summary| summary.median);
    let of = |(at, other): (usize, &CellReport)| {
        let other = metric.of(other).map(|summary| summary.median);
        match (mine, other) {
            (Some(mine), Some(other)) if other != 0.0 => {
                // Rounding to -0 would print a minus.
                let percent = (100.0 * (mine / other - 1.0)).round() + 0.0;
                format!("{}{percent:+.0}%", letter(at))
            }
            _ => format!("{}--", letter(at)),
        }
    };
    cells[..column].iter().enumerate().map(of).collect::<Vec<_>>().join("  ")
}

/// The ratio of a cell: `1.25 [1.20, 1.31]`.
pub fn ratio_text(cell: &CellReport) -> String {
    match &cell.ratio {
        Some(r) => format!("{:.2} [{:.2}, {:.2}]", r.median, r.low, r.high),
        None => "--".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_do_not_end() {
        assert_eq!(
            [0, 25, 26, 51, 52, 701, 702].map(letter),
            ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]
        );
    }
}
