//! The figures in the README, in `docs/performance.md` and in the page of each scenario, written from the
//! newest results, so that each can be traced to a file.

mod summary;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::cells::{cell_text, median};
use crate::notes::circumstances;
use crate::result::{CellReport, Metric, ScenarioReport, is_ours};
use crate::scenario::BUILT_IN;
use crate::{save, table};
use blockhaul_measure::number;
use blockhaul_measure::{MeasureError, Result};

/// Where results are, from the root of the tree.
const RESULTS: &str = "bench/results";
/// Why our columns are not the best where they are not.
const REASONS: &str = "bench/reasons.toml";
/// What to set, above all tables; its links lead to scenarios by their names.
const SETTINGS: &str = "bench/settings.md";
/// The document that is written as a whole.
const DOCUMENT: &str = "docs/performance.md";
/// The folder with a page for each scenario.
const PAGES: &str = "docs/performance";
/// The document of which the part between the marks is written.
const README: &str = "README.md";
/// Before and after what is written in the README.
const MARKS: (&str, &str) = ("<!-- figures: begin -->\n", "<!-- figures: end -->\n");
/// The scenario that the README shows.
const SHOWN: &str = "copy";

/// Files and what they should hold.
pub fn documents(root: &Path) -> Result<Vec<(PathBuf, String)>> {
    let reports = newest(&root.join(RESULTS))?;
    let reasons = Reasons::load(&root.join(REASONS))?;
    let settings = root.join(SETTINGS);
    let settings = fs::read_to_string(&settings)
        .map_err(|error| MeasureError::file("read", &settings, error))?;
    let readme = root.join(README);
    let old =
        fs::read_to_string(&readme).map_err(|error| MeasureError::file("read", &readme, error))?;
    let misses = || MeasureError::file("write figures into", &readme, "it has no marks for them");
    let (before, rest) = old.split_once(MARKS.0).ok_or_else(misses)?;
    let (_, after) = rest.split_once(MARKS.1).ok_or_else(misses)?;
    let figures = match reports.iter().find(|(_, report)| report.name == SHOWN) {
        Some((dir, report)) => short(dir, report),
        None => String::new(),
    };
    let new = format!("{before}{}{figures}{}{after}", MARKS.0, MARKS.1);
    let mut all = vec![(readme, new), (root.join(DOCUMENT), document(&reports, &settings))];
    all.extend(reports.iter().map(|(dir, report)| {
        let path = root.join(PAGES).join(format!("{}.md", report.name));
        (path, page(dir, report, &reasons))
    }));
    Ok(all)
}

/// Writes what is not up to date; returns the files.
pub fn write(root: &Path) -> Result<Vec<PathBuf>> {
    let mut written = Vec::new();
    for (path, text) in documents(root)? {
        if fs::read_to_string(&path).ok().as_ref() != Some(&text) {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)
                    .map_err(|error| MeasureError::file("make", folder, error))?;
            }
            fs::write(&path, &text).map_err(|error| MeasureError::file("write", &path, error))?;
            written.push(path);
        }
    }
    Ok(written)
}

/// The newest result of each scenario in the order of the scenarios, with its folder from the root.
fn newest(dir: &Path) -> Result<Vec<(String, ScenarioReport)>> {
    let mut found: BTreeMap<String, (String, ScenarioReport)> = BTreeMap::new();
    for day in folders(dir)? {
        for folder in folders(&day)?.into_iter().filter(|folder| save::is_result(folder)) {
            let report = save::load(&folder)?;
            let name = |path: &Path| path.file_name().unwrap_or_default().display().to_string();
            let place = format!("{RESULTS}/{}/{}", name(&day), name(&folder));
            let newer = found.get(&report.name).is_none_or(|(_, old)| old.started < report.started);
            if newer && !report.interrupted {
                found.insert(report.name.clone(), (place, report));
            }
        }
    }
    let place = |name: &str| BUILT_IN.iter().position(|(known, _)| *known == name);
    let mut all: Vec<_> = found.into_values().collect();
    all.sort_by_key(|(_, report)| (place(&report.name).unwrap_or(usize::MAX), report.name.clone()));
    Ok(all)
}

fn folders(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).map_err(|error| MeasureError::file("read", dir, error))?;
    let mut all: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    all.sort();
    Ok(all)
}

/// The reasons, by scenario and by part of a row's label.
#[derive(Debug, Default, Deserialize)]
struct Reasons {
    #[serde(flatten)]
    scenarios: BTreeMap<String, BTreeMap<String, String>>,
}

impl Reasons {
    fn load(path: &Path) -> Result<Reasons> {
        let text =
            fs::read_to_string(path).map_err(|error| MeasureError::file("read", path, error))?;
        toml::from_str(&text).map_err(|error| MeasureError::file("understand", path, error))
    }

    /// The reason with the longest part that the label has.
    fn of(&self, scenario: &str, row: &str) -> Option<&str> {
        let known = self.scenarios.get(scenario)?;
        let fits = known.iter().filter(|(part, _)| row.contains(part.as_str()));
        fits.max_by_key(|(part, _)| part.len()).map(|(_, reason)| reason.as_str())
    }
}

/// The median wall time of a cell, if it has one.
fn wall(cell: &CellReport) -> Option<f64> {
    cell.wall_s.as_ref().map(|summary| summary.median)
}

fn best<'a>(cells: impl Iterator<Item = &'a CellReport>) -> Option<&'a CellReport> {
    cells
        .filter(|cell| wall(cell).is_some())
        .min_by(|a, b| wall(a).unwrap_or(f64::MAX).total_cmp(&wall(b).unwrap_or(f64::MAX)))
}

/// Wall time and processor time of every cell; in bold the fastest of a row and those that tie with
/// it.
fn times(report: &ScenarioReport) -> String {
    let plain = |text: &str| text.replace('|', "\\|");
    let mut out = String::from("| |");
    for column in &report.columns {
        out.push_str(&format!(" {} |", plain(column)));
    }
    out.push_str(&format!("\n|---|{}\n", "---|".repeat(report.columns.len())));
    for (row, heading) in report.rows.iter().enumerate() {
        let fastest = best(report.row(row).iter()).and_then(|cell| cell.wall_s);
        out.push_str(&format!("| {} |", plain(&heading.label)));
        for cell in report.row(row) {
            let text = match (&cell.wall_s, &cell.total_cpu_s) {
                (Some(wall), Some(cpu)) => {
                    let text = format!("{} / {}", median(wall, 1.0), number(cpu.median));
                    let failed = match cell.failed {
                        0 => String::new(),
                        failed => format!(" ({failed} failed)"),
                    };
                    if fastest.is_some_and(|first| wall.low <= first.high) {
                        format!("**{text}**{failed}")
                    } else {
                        text + &failed
                    }
                }
                _ => cell_text(cell, Metric::Wall),
            };
            out.push_str(&format!(" {text} |"));
        }
        out.push('\n');
    }
    out
}

/// Kernel and versions of what was measured, without ours, which the commit tells.
fn versions(report: &ScenarioReport) -> String {
    let of = |(name, text): (&String, &String)| {
        let version = text.split([' ', '(']).find(|word| {
            word.contains('.')
                && word.trim_start_matches('v').starts_with(|c: char| c.is_ascii_digit())
        })?;
        (!is_ours(name)).then(|| format!("{name} {}", version.trim_end_matches([',', ')'])))
    };
    let programs = report.programs.iter().filter_map(of);
    [report.machine.kernel.clone()].into_iter().chain(programs).collect::<Vec<_>>().join(", ")
}

fn commit(report: &ScenarioReport) -> String {
    match &report.commit {
        Some(commit) => format!(", commit {}", &commit[..commit.len().min(12)]),
        None => String::new(),
    }
}

/// What the README shows.
fn short(dir: &str, report: &ScenarioReport) -> String {
    let first = report.description.replace('\n', " ");
    let first = first.split_inclusive(". ").take(2).collect::<String>();
    format!(
        "{} Median wall seconds ± standard deviation / median processor seconds of the command and its \
         servers; in bold the fastest of a row and those that tie with it (confidence intervals overlap). \
         {} {}. Each copy was compared byte for byte, except in the last row.\n\n{}\n\
         From [{dir}]({dir}/README.md), {}{}; `cargo xtask pages` draws charts of it. More scenarios, and \
         those in which other programs are faster: [docs/performance.md](docs/performance.md).\n",
        first.trim_end(),
        circumstances(report),
        versions(report),
        times(report),
        report.started,
        commit(report),
    )
}

fn document(reports: &[(String, ScenarioReport)], settings: &str) -> String {
    format!(
        "# Performance\n\n\
         Generated by `cargo xtask bench docs` from `bench/settings.md`, `bench/reasons.toml` and the newest \
         results in `bench/results`; do not edit. [bench/README.md](../bench/README.md) describes the \
         method.\n\n\
         ## Settings\n\n{settings}\n\
         ## Results\n\n\
         The last column is the time of the other programs divided by that of blockhaul's fastest column \
         in the same row: 2 means twice the time. In a tie, the confidence intervals of the medians \
         overlap; with fewer than six runs these intervals span all runs. Each scenario has a page, with \
         all figures and the reason if another program is faster.\n\n{}\n\
         To repeat a scenario: `cargo xtask bench NAME`, with `--full` for the full size.\n",
        summary::table(reports)
    )
}

/// The page of a scenario.
fn page(dir: &str, report: &ScenarioReport, reasons: &Reasons) -> String {
    let more: String = report.show.iter().filter_map(|metric| folded(report, *metric)).collect();
    format!(
        "# {}: {}\n\n\
         Generated by `cargo xtask bench docs`; do not edit. [All scenarios](../performance.md).\n\n\
         {}\n\n{}\n\
         Table cells are the median wall seconds ± standard deviation / the median processor seconds of \
         the command and its servers. Deviations below 1.5 % are not shown. In bold: the fastest of a \
         row and those that tie with it.\n\
         {}{more}\n{} {}. From [{dir}](../../{dir}/README.md), {}{}.\n",
        report.name,
        report.title,
        report.description,
        times(report),
        behind(report, reasons),
        circumstances(report),
        versions(report),
        report.started,
        commit(report),
    )
}

/// A further table, which a reader unfolds.
fn folded(report: &ScenarioReport, metric: Metric) -> Option<String> {
    let title = metric.title(report);
    let table = table::markdown_grid(report, metric)?;
    Some(format!("\n<details><summary>{title}</summary>\n\n{table}\n</details>\n"))
}

/// Rows in which another column is faster than all of ours.
fn behind(report: &ScenarioReport, reasons: &Reasons) -> String {
    let ours = |cell: &&CellReport| is_ours(&report.columns[cell.column]);
    let mut lines = String::new();
    for (row, heading) in report.rows.iter().enumerate() {
        let cells = report.row(row);
        let Some(theirs) = best(cells.iter().filter(|cell| !ours(cell))) else { continue };
        let Some(mine) = best(cells.iter().filter(ours)) else {
            if cells.iter().any(|cell| ours(&cell) && cell.failed > 0) {
                lines.push_str(&format!("- {}: blockhaul failed\n", heading.label));
            }
            continue;
        };
        let (Some(a), Some(b)) = (mine.wall_s, theirs.wall_s) else { continue };
        if a.median <= b.median {
            continue;
        }
        let tie = a.low <= b.high;
        let near = if tie { "; the confidence intervals overlap" } else { "" };
        let unknown =
            if tie { "These runs do not show which is faster." } else { "The reason is unknown." };
        let reason = reasons.of(&report.name, &heading.label);
        lines.push_str(&format!(
            "- {}: {} takes {} s, {} {} s ({:+.0} %){near}. {}\n",
            heading.label,
            report.columns[theirs.column],
            number(b.median),
            report.columns[mine.column],
            number(a.median),
            100.0 * (a.median / b.median - 1.0),
            reason.unwrap_or(unknown)
        ));
    }
    if lines.is_empty() {
        String::new()
    } else {
        format!("\nRows in which another program is faster:\n\n{lines}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::report;

    fn tree(columns: &[&str], lines: &[(&str, &[&[f64]])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let mut report = report(columns, lines);
        report.name = SHOWN.into();
        fs::create_dir_all(root.path().join(RESULTS)).unwrap();
        fs::create_dir_all(root.path().join("docs")).unwrap();
        save::save(&report, &root.path().join(RESULTS)).unwrap();
        let text = format!("before\n{}old\n{}after\n", MARKS.0, MARKS.1);
        fs::write(root.path().join(README), text).unwrap();
        let reasons = "[copy]\n'fresh' = 'It has a reason.'\n'fresh t' = 'A better one.'\n";
        fs::write(root.path().join(REASONS), reasons).unwrap();
        fs::write(root.path().join(SETTINGS), "Set [nothing](performance/copy.md).\n").unwrap();
        root
    }

    #[test]
    fn figures_come_from_the_newest_result_and_say_where_we_are_behind() {
        let root = tree(
            &["blockhaul copy", "peer"],
            &[
                ("fast", &[&[1.0], &[2.0]]),
                ("fresh target", &[&[3.0], &[2.0]]),
                ("odd", &[&[3.0], &[2.5]]),
                ("near", &[&[3.0, 1.9, 3.1], &[2.0, 1.0, 2.6]]),
                ("broken", &[&[], &[2.5]]),
            ],
        );
        let mut newer =
            save::load(&root.path().join(RESULTS).join("2026-11-20-").join(SHOWN)).unwrap();
        newer.started = "2026-11-21T00:00:00Z".into();
        newer.description = "Newer. Text. More.".into();
        save::save(&newer, &root.path().join(RESULTS)).unwrap();
        assert_eq!(write(root.path()).unwrap().len(), 3);
        assert_eq!(write(root.path()).unwrap().len(), 0, "it is up to date");
        let readme = fs::read_to_string(root.path().join(README)).unwrap();
        assert!(readme.starts_with("before\n") && readme.ends_with("after\n"), "{readme}");
        assert!(readme.contains("| fast | **1.00 / 1.00** | 2.00 / 2.00 |"), "{readme}");
        assert!(readme.contains("bench/results/2026-11-21-/copy"), "{readme}");
        assert!(readme.contains("Newer. Text. Median") && !readme.contains("old\n"), "{readme}");
        let text = fs::read_to_string(root.path().join(DOCUMENT)).unwrap();
        assert!(text.contains("Set [nothing](performance/copy.md).\n\n## Results"), "{text}");
        let text = fs::read_to_string(root.path().join(PAGES).join("copy.md")).unwrap();
        assert!(text.contains(
            "- fresh target: peer takes 2.00 s, blockhaul copy 3.00 s (+50 %). A better"
        ));
        assert!(
            text.contains("- odd: peer takes 2.50 s, blockhaul copy 3.00 s (+20 %). The reason is")
        );
        assert!(text.starts_with("# copy: "), "{text}");
        assert!(text.contains("overlap. These runs do not show which is faster."), "{text}");
        assert!(text.contains("- broken: blockhaul failed") && !text.contains("- fast:"), "{text}");
    }

    #[test]
    fn a_readme_without_marks_is_refused() {
        let root = tree(&["a"], &[("r", &[&[1.0]])]);
        fs::write(root.path().join(README), "nothing").unwrap();
        assert!(documents(root.path()).unwrap_err().to_string().contains("no marks"));
    }
}
