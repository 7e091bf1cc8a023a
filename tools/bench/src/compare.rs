//! What changed between two results. Only ratios to the reference column of the same run are
//! compared, never times: machines and days differ.

use std::path::{Path, PathBuf};

use crate::result::{CellReport, ScenarioReport, is_ours};
use crate::save;
use crate::stats::SampleSummary;
use blockhaul_measure::{MeasureError, Result};

/// What came of a comparison.
#[derive(Debug)]
pub struct ResultComparison {
    /// For people.
    pub text: String,
    /// Cells that became worse by more than the threshold, or fail now.
    pub worse: usize,
}

/// Compares two results, or two folders of results by the scenarios that both have.
pub fn compare(old: &Path, new: &Path, threshold_percent: f64) -> Result<ResultComparison> {
    let mut all = ResultComparison { text: String::new(), worse: 0 };
    let pairs = pairs(old, new)?;
    let mut compared = 0;
    let mut last = None;
    for (old, new) in &pairs {
        match reports(&load(old)?, &load(new)?, threshold_percent) {
            Ok(one) => {
                compared += 1;
                all.text.push_str(&one.text);
                all.worse += one.worse;
            }
            // Of several scenarios, those that cannot be compared do not hide the others.
            Err(error) => {
                all.text.push_str(&format!("{error}\n"));
                last = Some(error);
            }
        }
    }
    match last {
        Some(error) if compared == 0 => Err(error),
        _ => Ok(all),
    }
}

/// What cannot be read is no sign that something became slower: another exit status.
fn load(dir: &Path) -> Result<ScenarioReport> {
    save::load(dir).map_err(MeasureError::of_usage)
}

/// Compares two results of the same scenario.
pub fn reports(
    old: &ScenarioReport,
    new: &ScenarioReport,
    threshold_percent: f64,
) -> Result<ResultComparison> {
    let reference = |report: &ScenarioReport| report.reference.map(|at| report.columns[at].clone());
    let before = reference(old);
    let after = reference(new);
    let Some(reference) = before.clone().filter(|_| before == after) else {
        return Err(MeasureError::usage(format!(
            "cannot compare results of {}: they must have the same reference column; there are {} \
             and {}",
            new.name,
            before.as_deref().unwrap_or("none"),
            after.as_deref().unwrap_or("none")
        )));
    };
    let same_size = old.full == new.full || old.one_size || new.one_size;
    if old.name != new.name || !same_size {
        return Err(MeasureError::usage(format!(
            "cannot compare {} with {}: results of the same scenario in the same size are needed",
            whole_name(old),
            whole_name(new)
        )));
    }
    let mut text = format!(
        "{}: ratio of wall time to {reference}, {} and {}\n",
        new.title, old.started, new.started
    );
    let mut worse = 0;
    let mut seen = 0;
    // Where some columns are of this program, the others are peers, who may become slower.
    let some_are_ours = new.columns.iter().any(|column| is_ours(column));
    for cell in &new.cells {
        let row = &new.rows[cell.row].label;
        let column = &new.columns[cell.column];
        if *column == reference {
            continue;
        }
        let Some(other) = find(old, row, column) else { continue };
        let counts = !some_are_ours || is_ours(column);
        let line = match (&other.ratio, &cell.ratio) {
            (Some(before), Some(after)) if before.median > 0.0 => {
                seen += 1;
                let (line, is_slower) = changed(before, after, threshold_percent, counts);
                worse += usize::from(is_slower);
                line
            }
            (Some(_), None) if cell.failed > 0 && cell.good == 0 => {
                worse += usize::from(counts);
                "FAILS NOW".to_owned()
            }
            _ => continue,
        };
        text.push_str(&format!("  {row}, {column}: {line}\n"));
    }
    if seen + worse == 0 {
        return Err(MeasureError::usage(format!(
            "cannot compare results of {}: no column but {reference} was measured in \
             both",
            new.name
        )));
    }
    text.push_str(&match worse {
        0 => format!("nothing became worse by more than {threshold_percent} %\n"),
        n => format!("{n} of {seen} became worse by more than {threshold_percent} %, or fail\n"),
    });
    Ok(ResultComparison { text, worse })
}

/// The ratios before and after in a line, and whether that is slower. `counts`: it is no peer.
fn changed(
    before: &SampleSummary,
    after: &SampleSummary,
    threshold_percent: f64,
    counts: bool,
) -> (String, bool) {
    let percent = 100.0 * (after.median / before.median - 1.0);
    let mut is_slower = false;
    let mut line = format!("{:.2} -> {:.2}  {percent:+.0}%", before.median, after.median);
    if percent > threshold_percent && counts {
        is_slower = true;
        line.push_str("  SLOWER");
    } else if percent > threshold_percent {
        line.push_str("  a slower peer");
    } else if percent < -threshold_percent {
        line.push_str("  faster");
    }
    if before.low <= after.high && after.low <= before.high {
        line.push_str("  (intervals overlap)");
    }
    (line, is_slower)
}

fn whole_name(report: &ScenarioReport) -> String {
    let size = match (report.one_size, report.full) {
        (true, _) => "",
        (false, true) => " (full)",
        (false, false) => " (reduced)",
    };
    format!("{}{size}", report.name)
}

fn find<'a>(report: &'a ScenarioReport, row: &str, column: &str) -> Option<&'a CellReport> {
    let row = report.rows.iter().position(|known| known.label == row)?;
    let column = report.columns.iter().position(|known| known == column)?;
    Some(report.cell(row, column))
}

/// Results that belong together.
fn pairs(old: &Path, new: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
    if save::is_result(old) && save::is_result(new) {
        return Ok(vec![(old.to_owned(), new.to_owned())]);
    }
    let list = |dir: &Path| -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(dir)
            .map_err(|error| MeasureError::file("read", dir, error).of_usage())?;
        let mut found: Vec<PathBuf> =
            entries.flatten().map(|entry| entry.path()).filter(|p| save::is_result(p)).collect();
        found.sort();
        Ok(found)
    };
    let news = list(new)?;
    let pairs: Vec<(PathBuf, PathBuf)> = list(old)?
        .into_iter()
        .filter_map(|old| {
            let new = news.iter().find(|new| new.file_name() == old.file_name())?;
            Some((old, new.clone()))
        })
        .collect();
    if pairs.is_empty() {
        Err(MeasureError::usage(format!(
            "{} and {} have no result in common; name two folders with a result.json",
            old.display(),
            new.display()
        )))
    } else {
        Ok(pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::report;

    fn made(ours: &[f64]) -> ScenarioReport {
        report(&["peer", "ours"], &[("row", &[&[2.0], ours])])
    }

    #[test]
    fn the_threshold_decides() {
        let old = made(&[1.0]);
        let same = made(&[1.09]);
        let slow = made(&[1.2]);
        assert_eq!(reports(&old, &same, 10.0).unwrap().worse, 0);
        let found = reports(&old, &slow, 10.0).unwrap();
        assert_eq!(found.worse, 1);
        assert!(found.text.contains("row, ours: 0.50 -> 0.60  +20%  SLOWER"), "{}", found.text);
        assert_eq!(reports(&old, &slow, 25.0).unwrap().worse, 0);
        assert!(reports(&slow, &old, 10.0).unwrap().text.contains("-17%  faster"));
    }

    #[test]
    fn absolute_times_do_not_matter() {
        let old = report(&["peer", "ours"], &[("row", &[&[2.0], &[1.0]])]);
        let new = report(&["peer", "ours"], &[("row", &[&[20.0], &[10.0]])]);
        assert_eq!(reports(&old, &new, 1.0).unwrap().worse, 0);
    }

    #[test]
    fn a_cell_that_fails_now_is_worse() {
        let found = reports(&made(&[1.0]), &made(&[]), 10.0).unwrap();
        assert_eq!(found.worse, 1);
        assert!(found.text.contains("FAILS NOW"), "{}", found.text);
    }

    #[test]
    fn a_peer_may_become_slower() {
        let made = |ours: f64, theirs: f64| {
            let columns = ["peer", "blockhaul copy", "other peer"];
            report(&columns, &[("row", &[&[2.0], &[ours], &[theirs]])])
        };
        let found = reports(&made(1.0, 1.0), &made(1.0, 2.0), 10.0).unwrap();
        assert_eq!(found.worse, 0);
        assert!(found.text.contains("+100%  a slower peer"), "{}", found.text);
        assert_eq!(reports(&made(1.0, 1.0), &made(2.0, 1.0), 10.0).unwrap().worse, 1);
    }

    #[test]
    fn folders_are_compared_by_scenario() {
        let old = tempfile::tempdir().unwrap();
        let new = tempfile::tempdir().unwrap();
        assert!(compare(old.path(), new.path(), 10.0).is_err());
        for (name, time) in [("one", 1.3), ("two", 1.0), ("odd", 1.0)] {
            let mut report = made(&[1.0]);
            report.name = name.to_owned();
            save::save(&report, old.path()).unwrap();
            report.cells[1].ratio = made(&[time]).cells[1].ratio;
            report.full = name == "odd";
            save::save(&report, new.path()).unwrap();
        }
        let folder = "2026-11-20-";
        let found = compare(&old.path().join(folder), &new.path().join(folder), 10.0).unwrap();
        assert_eq!(found.worse, 1, "{}", found.text);
        assert!(found.text.contains("cannot compare odd (reduced)"), "{}", found.text);
        let odd = |dir: &tempfile::TempDir| dir.path().join(folder).join("odd");
        assert!(compare(&odd(&old), &odd(&new), 10.0).is_err());
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        let old = made(&[1.0]);
        let mut new = made(&[1.0]);
        new.full = true;
        let text = reports(&old, &new, 10.0).unwrap_err().to_string();
        assert!(text.contains("example (reduced)") && text.contains("example (full)"), "{text}");
        new = made(&[1.0]);
        new.reference = Some(1);
        let text = reports(&old, &new, 10.0).unwrap_err().to_string();
        assert!(text.contains("there are peer and ours"), "{text}");
        new = report(&["peer", "new"], &[("row", &[&[2.0], &[1.0]])]);
        assert!(reports(&old, &new, 10.0).is_err());
    }
}
