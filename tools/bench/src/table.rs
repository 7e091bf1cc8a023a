//! Results as text: tables for the terminal and for Markdown, with differences between columns.

use crate::cells::{cell_text, differences, letter, ratio_text};
use crate::notes::{circumstances, facts, notes, ratio_title};
use crate::result::{Metric, ScenarioReport};

/// All tables and notes for a terminal.
pub fn text(report: &ScenarioReport) -> String {
    let mut out = format!("{}\n{}\n", report.title, circumstances(report));
    for metric in report.metrics() {
        if metric == Metric::TotalPeak {
            continue;
        }
        out.push_str(&format!("\n{}\n{}", metric.title(report), grid(report, metric).text()));
    }
    if let Some(grid) = ratios(report) {
        out.push_str(&format!("\n{}\n{}", ratio_title(report), grid.text()));
    }
    for note in notes(report) {
        out.push_str(&format!("\n{note}\n"));
    }
    out
}

/// The table of one metric for Markdown, without letters and differences; none where nothing was
/// measured of it.
pub fn markdown_grid(report: &ScenarioReport, metric: Metric) -> Option<String> {
    report.cells.iter().find(|cell| metric.of(cell).is_some())?;
    let mut grid = grid(report, metric);
    for (line, heading) in grid.lines.iter_mut().zip(&report.rows) {
        line.label.clone_from(&heading.label);
        line.differences.clear();
    }
    Some(grid.markdown())
}

/// All tables and notes, and how to repeat it, as a Markdown document.
pub fn markdown(report: &ScenarioReport) -> String {
    let mut out = format!("# {}\n\n", report.title);
    if !report.description.is_empty() {
        out.push_str(&format!("{}\n\n", report.description));
    }
    out.push_str(&format!("{}\n", circumstances(report)));
    for metric in report.metrics() {
        let title = metric.title(report);
        out.push_str(&format!("\n## {title}\n\n{}", grid(report, metric).markdown()));
    }
    if let Some(grid) = ratios(report) {
        out.push_str(&format!("\n## {}\n\n{}", ratio_title(report), grid.markdown()));
    }
    for note in notes(report) {
        out.push_str(&format!("\n{note}\n"));
    }
    out.push_str("\n## Machine and programs\n\n");
    for (name, value) in facts(report) {
        out.push_str(&format!("- {name}: {value}\n"));
    }
    out.push_str("\n## Commands\n");
    for line in &report.setup {
        out.push_str(&format!("\n    {line}\n"));
    }
    for (row, heading) in report.rows.iter().enumerate() {
        out.push_str(&format!("\n### {}\n\n", heading.label));
        for cell in report.row(row).iter().filter(|cell| cell.skipped.is_none()) {
            out.push_str(&format!("{}:\n\n", report.columns[cell.column]));
            let around = cell.prepare.iter().map(|line| ("    # before: ", line));
            let around = around.chain(cell.servers.iter().map(|line| ("    # server: ", line)));
            let around = around.chain([("    ", &cell.command)]);
            for (prefix, line) in
                around.chain(cell.check.iter().map(|line| ("    # after:  ", line)))
            {
                out.push_str(&format!("{prefix}{}\n", line.replace('\n', "\n    ")));
            }
            out.push('\n');
        }
    }
    out
}

/// One line a run: everything raw, for other programs.
pub fn csv(report: &ScenarioReport) -> String {
    let mut out = String::from(
        "round,warmup,row,column,outcome,wall_s,own_user_s,own_system_s,own_peak_bytes,\
         own_threads,own_read_bytes,own_written_bytes,own_reads,own_writes,servers_user_s,\
         servers_system_s,servers_peak_bytes,total_cpu_s,others_cpu_s\n",
    );
    for run in &report.runs {
        let outcome = match &run.failure {
            None => "ok".to_owned(),
            Some(failure) => format!("{}: {}", failure.stage, failure.why),
        };
        let sum = |value: fn(&crate::usage::Usage) -> f64| -> f64 {
            // A sum of nothing is -0.
            run.servers.iter().map(|(_, usage)| value(usage)).sum::<f64>() + 0.0
        };
        let io = match run.command.io {
            Some(io) => {
                format!("{},{},{},{}", io.read_bytes, io.written_bytes, io.reads, io.writes)
            }
            None => ",,,".to_owned(),
        };
        out.push_str(&format!(
            "{},{},{},{},{},{:.6},{:.6},{:.6},{},{},{io},{:.6},{:.6},{},{:.6},{:.2}\n",
            run.round,
            run.warmup,
            quoted(&report.rows[run.row].label),
            quoted(&report.columns[run.column]),
            quoted(&outcome),
            run.wall_s,
            run.command.user_s,
            run.command.system_s,
            run.command.peak_bytes,
            run.command.threads,
            sum(|usage| usage.user_s),
            sum(|usage| usage.system_s),
            run.total_peak_bytes() - run.command.peak_bytes,
            run.total_cpu_s(),
            run.others_cpu_s,
        ));
    }
    out
}

/// A field of a CSV line.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

fn ratios(report: &ScenarioReport) -> Option<Grid> {
    report.reference?;
    let mut grid = Grid::new(report);
    for (row, heading) in report.rows.iter().enumerate() {
        let cells = report.row(row).iter().map(ratio_text).collect();
        grid.lines.push(TableLine { label: heading.label.clone(), cells, differences: Vec::new() });
    }
    Some(grid)
}

fn grid(report: &ScenarioReport, metric: Metric) -> Grid {
    let mut grid = Grid::new(report);
    for (row, heading) in report.rows.iter().enumerate() {
        let cells = report.row(row);
        grid.lines.push(TableLine {
            label: heading.label.clone() + if heading.unchecked.is_some() { " *" } else { "" },
            cells: cells.iter().map(|cell| cell_text(cell, metric)).collect(),
            differences: (0..cells.len()).map(|at| differences(cells, at, metric)).collect(),
        });
    }
    grid
}

/// A table before it is drawn.
struct Grid {
    columns: Vec<String>,
    lines: Vec<TableLine>,
}

struct TableLine {
    label: String,
    cells: Vec<String>,
    /// As many as cells, or none.
    differences: Vec<String>,
}

impl Grid {
    fn new(report: &ScenarioReport) -> Grid {
        Grid { columns: report.columns.clone(), lines: Vec::new() }
    }

    fn text(&self) -> String {
        let letters: Vec<String> = (0..self.columns.len()).map(letter).collect();
        let width = |at: usize| {
            let cells = self
                .lines
                .iter()
                .flat_map(|line| line.cells.get(at).into_iter().chain(line.differences.get(at)));
            let heads = [&letters[at], &self.columns[at]];
            cells.chain(heads).map(|text| text.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let first = self.lines.iter().map(|line| line.label.chars().count()).max().unwrap_or(0);
        let mut out = String::new();
        let mut put = |label: &str, cells: &[String], indent: &str| {
            let mut line = format!("{label:first$}");
            for (cell, width) in cells.iter().zip(&widths) {
                line.push_str(&format!(
                    "  {:width$}",
                    format!("{indent}{cell}"),
                    width = width + 1
                ));
            }
            out.push_str(line.trim_end());
            out.push('\n');
        };
        put("", &letters, "");
        put("", &self.columns, "");
        let rules: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
        put(&"-".repeat(first), &rules, "");
        for line in &self.lines {
            put(&line.label, &line.cells, "");
            if line.differences.len() > 1 {
                put("", &line.differences, " ");
            }
        }
        out
    }

    fn markdown(&self) -> String {
        let plain = |text: &str| text.replace('|', "\\|");
        let mut out = String::from("| |");
        for (at, column) in self.columns.iter().enumerate() {
            // Letters are what differences name.
            if self.lines.iter().any(|line| !line.differences.is_empty()) {
                out.push_str(&format!(" {}: {} |", letter(at), plain(column)));
            } else {
                out.push_str(&format!(" {} |", plain(column)));
            }
        }
        out.push_str(&format!("\n|---|{}\n", "---|".repeat(self.columns.len())));
        for line in &self.lines {
            out.push_str(&format!("| {} |", plain(&line.label)));
            for (at, cell) in line.cells.iter().enumerate() {
                let differences = match line.differences.get(at) {
                    Some(text) if !text.is_empty() => format!("<br>{text}"),
                    _ => String::new(),
                };
                out.push_str(&format!(" {}{differences} |", plain(cell)));
            }
            out.push('\n');
        }
        out
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::result::{CellReport, CellRun, ReportRow, RunFailure, RunSettings};
    use crate::stats::SampleSummary;
    use crate::usage::Usage;
    use std::collections::BTreeMap;

    /// A report with one row per line; a cell is its wall times, none of them for a failed one.
    pub fn report(columns: &[&str], lines: &[(&str, &[&[f64]])]) -> ScenarioReport {
        let mut report = ScenarioReport {
            format: crate::result::FORMAT,
            name: "example".into(),
            title: "Example <title>".into(),
            description: "Text.".into(),
            full: false,
            one_size: false,
            interrupted: false,
            started: "2026-11-20T22:05:56Z".into(),
            machine: crate::machine::MachineFacts { cores: 2, ..Default::default() },
            load_after: 0.5,
            commit: None,
            programs: BTreeMap::from([("nbdcopy".to_owned(), "nbdcopy 1.22.2".to_owned())]),
            settings: RunSettings {
                runs: 2,
                warmup: 1,
                together: 1,
                timeout_s: 1.0,
                drop_caches: false,
                seed: 7,
            },
            columns: columns.iter().map(|column| (*column).to_owned()).collect(),
            reference: Some(0),
            curve: None,
            show: Vec::new(),
            rate_unit: None,
            rows: Vec::new(),
            setup: Vec::new(),
            cells: Vec::new(),
            noise_percent: None,
            runs: Vec::new(),
        };
        for (row, (label, cells)) in lines.iter().enumerate() {
            report.rows.push(ReportRow {
                label: (*label).to_owned(),
                variables: BTreeMap::new(),
                unchecked: None,
                curve_at: Some(row as f64),
                amount: None,
            });
            for (column, times) in cells.iter().enumerate() {
                let wall_s = SampleSummary::of(times);
                let base = cells[0].first().copied();
                let ratio =
                    wall_s.zip(base).and_then(|(s, base)| SampleSummary::of(&[s.median / base]));
                report.cells.push(CellReport {
                    row,
                    column,
                    command: format!("run {column} {label}"),
                    good: times.len(),
                    failed: usize::from(times.is_empty()) * 2,
                    wall_s,
                    own_cpu_s: wall_s,
                    total_cpu_s: wall_s,
                    own_peak_bytes: wall_s,
                    total_peak_bytes: wall_s,
                    ratio,
                    ..CellReport::default()
                });
                let why = RunFailure {
                    stage: "check".into(),
                    why: "not a copy".into(),
                    stderr: "a, \"b\"".into(),
                };
                for (round, time) in
                    times.iter().chain(times.is_empty().then_some(&0.0)).enumerate()
                {
                    report.runs.push(CellRun {
                        row,
                        column,
                        round: round as u32,
                        warmup: false,
                        failure: times.is_empty().then(|| why.clone()),
                        wall_s: *time,
                        command: Usage::default(),
                        servers: Vec::new(),
                        others_cpu_s: 0.0,
                    });
                }
            }
        }
        report
    }

    #[test]
    fn differences_are_printed_as_people_know_them() {
        let report = report(
            &["mirror", "backup", "new", "odd"],
            &[
                ("ssd:ssd", &[&[4.4, 4.4], &[10.6, 10.8], &[10.3], &[]]),
                ("x", &[&[], &[1.0], &[1.0], &[2.0]]),
            ],
        );
        let text = grid(&report, Metric::Wall).text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].split_whitespace().collect::<String>(), "ABCD");
        assert!(lines[3].starts_with("ssd:ssd  4.40 "), "{text}");
        assert!(lines[3].ends_with("FAILED"), "{text}");
        assert!(lines[4].contains(" A+143% "), "{text}");
        assert!(lines[4].contains(" A+134%  B-4% "), "{text}");
        assert!(lines[4].ends_with("A--  B--  C--"), "{text}");
        assert!(lines[6].contains("A--  B+0%"), "{text}");
        let widths: Vec<usize> = [1, 2].map(|at| lines[at].find("backup").unwrap_or(0)).into();
        assert_eq!(lines[3].find("10.7"), Some(widths[0]));
    }

    #[test]
    fn a_cell_whose_runs_all_failed_says_so_everywhere() {
        let report = report(&["a", "b"], &[("row", &[&[1.0], &[]])]);
        for text in [text(&report), markdown(&report)] {
            assert!(text.contains("FAILED"), "{text}");
            assert!(text.contains("Failed: row, b: 1 of 2 runs, the first at check: not a copy."));
            assert!(text.contains("It printed: a, \"b\""), "{text}");
        }
        let csv = csv(&report);
        assert!(csv.contains("0,false,row,b,check: not a copy,"), "{csv}");
        let fields = csv.lines().map(|line| line.split(',').count()).collect::<Vec<_>>();
        assert_eq!(fields, [19, 19, 19]);
    }

    #[test]
    fn markdown_has_every_cell_and_the_commands() {
        let report =
            report(&["a|b", "c"], &[("one", &[&[1.5], &[3.0]]), ("two", &[&[7.0], &[8.0]])]);
        let text = markdown(&report);
        assert!(
            text.contains("| | A: a\\|b | B: c |\n|---|---|---|\n| one | 1.50 | 3.00<br>A+100% |")
        );
        assert!(text.contains("    run 1 two\n") && text.contains("nbdcopy: nbdcopy 1.22.2"));
        assert!(text.contains("2.00 [2.00, 2.00]"), "{text}");
    }

    #[test]
    fn fields_are_quoted_where_needed() {
        assert_eq!(quoted("a, \"b\""), "\"a, \"\"b\"\"\"");
        assert_eq!(quoted("a b"), "a b");
    }
}
