//! The top of `docs/performance.md`: for each scenario, how long the other programs take where
//! blockhaul takes 1, and in how many rows it is the first.

use super::{best, wall};
use crate::result::{CellReport, ScenarioReport, is_ours};
use blockhaul_measure::number;

/// How one row ended for us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowRank {
    First,
    /// The intervals of our best column and of the best other one overlap.
    Tie,
    Behind,
}

/// A line for each scenario that has other columns beside ours.
pub(super) fn table(reports: &[(String, ScenarioReport)]) -> String {
    let mut out = String::from(
        "| scenario | rows in which blockhaul is faster, ties, is slower | time of the others, blockhaul = \
         1: median row (minimum to maximum) |\n|---|---|---|\n",
    );
    for (_, report) in reports {
        let places: Vec<RowRank> =
            (0..report.rows.len()).filter_map(|row| place(report, row)).collect();
        if places.is_empty() {
            continue;
        }
        let count = |wanted| places.iter().filter(|place| **place == wanted).count();
        let ratios: Vec<String> =
            (0..report.columns.len()).filter_map(|column| against(report, column)).collect();
        out.push_str(&format!(
            "| [{}](performance/{}.md) | {}, {}, {} | {} |\n",
            report.title,
            report.name,
            count(RowRank::First),
            count(RowRank::Tie),
            count(RowRank::Behind),
            ratios.join("; ").replace('|', "\\|")
        ));
    }
    out
}

fn ours(report: &ScenarioReport, cell: &CellReport) -> bool {
    is_ours(&report.columns[cell.column])
}

fn place(report: &ScenarioReport, row: usize) -> Option<RowRank> {
    let cells = report.row(row);
    let mine = best(cells.iter().filter(|cell| ours(report, cell)))?.wall_s?;
    let theirs = best(cells.iter().filter(|cell| !ours(report, cell)))?.wall_s?;
    Some(match (mine.low <= theirs.high && theirs.low <= mine.high, mine.median < theirs.median) {
        (true, _) => RowRank::Tie,
        (false, true) => RowRank::First,
        (false, false) => RowRank::Behind,
    })
}

/// The ratios of one column that is not ours, over all rows: `nbdcopy 1.25 (0.955 to 3.86)`.
fn against(report: &ScenarioReport, column: usize) -> Option<String> {
    let label = &report.columns[column];
    if is_ours(label) {
        return None;
    }
    let ratio = |row| {
        let cells = report.row(row);
        let mine = wall(best(cells.iter().filter(|cell| ours(report, cell)))?)?;
        Some(wall(&cells[column])? / mine)
    };
    let mut ratios: Vec<f64> = (0..report.rows.len()).filter_map(ratio).collect();
    ratios.sort_by(f64::total_cmp);
    let least = ratios.first()?;
    let most = ratios.last()?;
    let middle = (ratios[(ratios.len() - 1) / 2] + ratios[ratios.len() / 2]) / 2.0;
    let span = match ratios.len() {
        1 => String::new(),
        _ => format!(" ({} to {})", number(*least), number(*most)),
    };
    Some(format!("{label} {}{span}", number(middle)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::report;

    #[test]
    fn a_scenario_has_a_line_with_places_and_ratios() {
        let report = report(
            &["blockhaul copy", "peer", "other"],
            &[
                ("first", &[&[1.0], &[2.0], &[4.0]]),
                ("behind", &[&[3.0], &[1.5], &[]]),
                ("tie", &[&[1.0, 2.0, 3.0], &[2.5, 2.6, 2.7], &[16.0]]),
            ],
        );
        let text = table(&[(String::new(), report)]);
        let line = text.lines().nth(2).unwrap();
        assert!(line.contains("| 1, 1, 1 |"), "{line}");
        assert!(line.contains("peer 1.30 (0.500 to 2.00); other 6.00 (4.00 to 8.00) |"), "{line}");
    }

    #[test]
    fn a_scenario_without_others_has_none() {
        let report = report(&["blockhaul copy"], &[("row", &[&[1.0]])]);
        assert_eq!(table(&[(String::new(), report)]).lines().count(), 2);
    }
}
