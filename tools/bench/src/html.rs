//! Results as one HTML page: charts and tables, nothing from elsewhere, no script.
//!
//! Text is HTML and only bars are SVG, so that nothing shrinks on a narrow screen. Colours follow
//! what the reader prefers, light or dark; on paper they are light.

use crate::cells::{cell_text, differences, letter, ratio_text};
use crate::markup::{COLOURS, colour, escape};
use crate::notes::{circumstances, facts, notes, ratio_title};
use crate::result::{CellReport, CellState, Metric, ScenarioReport};
use crate::stats::SampleSummary;

/// The page.
pub fn page(report: &ScenarioReport) -> String {
    let mut body = format!(
        "<h1>{}</h1>\n<p>{}</p>\n<p class=\"how\">{}</p>\n",
        escape(&report.title),
        escape(&report.description),
        escape(&circumstances(report))
    );
    body.push_str(&legend(report));
    let charts = crate::curve::charts(report);
    let metrics: Vec<Metric> =
        report.metrics().into_iter().filter(|metric| *metric != Metric::TotalPeak).collect();
    body.push_str(&contents(report, &metrics, !charts.is_empty()));
    if !charts.is_empty() {
        body.push_str(&format!("<section id=\"curves\">\n{charts}</section>\n"));
    }
    for (number, metric) in metrics.into_iter().enumerate() {
        body.push_str(&chart(report, number, metric));
    }
    body.push_str(&tables(report));
    let notes = notes(report);
    if !notes.is_empty() {
        let items: String = notes.iter().map(|n| format!("<li>{}</li>\n", escape(n))).collect();
        body.push_str(&format!(
            "<section id=\"notes\">\n<h2>Notes</h2>\n<ul>\n{items}</ul>\n</section>\n"
        ));
    }
    let rows: String = facts(report)
        .iter()
        .map(|(name, value)| {
            format!("<tr><th scope=\"row\">{}</th><td>{}</td></tr>\n", escape(name), escape(value))
        })
        .collect();
    body.push_str(&format!(
        "<section id=\"machine\">\n<h2>Machine and programs</h2>\n<div class=\"wide\"><table class=\"facts\">\n\
         {rows}</table></div>\n</section>\n"
    ));
    body.push_str(&commands(report));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n<style>\n{}\
         </style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n",
        escape(&report.title),
        style()
    )
}

/// The bars of a metric.
fn chart(report: &ScenarioReport, number: usize, metric: Metric) -> String {
    let title = escape(&metric.title(report));
    let mut out = format!("<section id=\"chart-{number}\">\n<h2>{title}</h2>\n");
    let better = if metric.more_is_better() { "longer" } else { "shorter" };
    let marks = intervals(report, metric);
    out.push_str(&format!(
        "<p class=\"how\">Bars are medians{marks}. Each row has a scale of its own; {better} is \
         better.</p>\n"
    ));
    for row in 0..report.rows.len() {
        out.push_str(&bars(report, row, metric));
    }
    out.push_str("</section>\n");
    out
}

/// Tables of all metrics.
fn tables(report: &ScenarioReport) -> String {
    let mut out = "<section id=\"tables\">\n<h2>Tables</h2>\n".to_owned();
    out.push_str(
        "<p class=\"how\">Medians; ± is the standard deviation in percent of the mean. Under a \
         figure, A+41% means: 41 % more than column A of the same row.</p>\n",
    );
    for metric in report.metrics() {
        out.push_str(&table(report, &metric.title(report), |cells, at| {
            let more = differences(cells, at, metric);
            let text = escape(&cell_text(&cells[at], metric));
            if more.is_empty() {
                text
            } else {
                format!("{text}<br><small>{}</small>", escape(&more))
            }
        }));
    }
    if report.reference.is_some() {
        let title = ratio_title(report);
        out.push_str(&table(report, &title, |cells, at| escape(&ratio_text(&cells[at]))));
    }
    out.push_str("</section>\n");
    out
}

fn style() -> String {
    let colours = |pick: fn(&(&'static str, &'static str)) -> &'static str| -> String {
        COLOURS.iter().enumerate().map(|(at, pair)| format!("--c{at}:{};", pick(pair))).collect()
    };
    let light = format!(
        "--back:#fff;--text:#1c1e21;--soft:#5b6067;--line:#d5d8dc;--bad:#b3261e;{}",
        colours(|pair| pair.0)
    );
    let dark = format!(
        "--back:#15171a;--text:#e6e8ea;--soft:#a5abb3;--line:#3a3f45;--bad:#ff8a80;{}",
        colours(|pair| pair.1)
    );
    format!(
        ":root{{{light}}}\n\
         @media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{STYLE}"
    )
}

const STYLE: &str = "\
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0}
h2{font-size:1.15rem;margin:2rem 0 .25rem}
h3{font-size:1rem;margin:1rem 0 .25rem}
p,li,td,th,code{overflow-wrap:anywhere}
.how,small{color:var(--soft);font-size:.875rem}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;padding:0}
nav a{color:inherit}
.legend svg{width:.8rem;height:.8rem;margin-right:.4rem}
.bar{display:grid;grid-template-columns:12rem 1fr 9rem;gap:.1rem .6rem;align-items:center;margin:.15rem 0}
.bar svg{width:100%;height:1.1rem;display:block;overflow:visible}
.value{font-variant-numeric:tabular-nums;font-size:.9rem}
.none{color:var(--soft)}.bad{color:var(--bad);font-weight:600}
.mark{stroke:var(--text);stroke-width:1.5}
.axis{stroke:var(--line);stroke-width:1}
.curve{display:block;width:100%;max-width:36rem;height:auto}
.curve text{fill:var(--soft);font:11px system-ui,sans-serif}
.wide{overflow-x:auto}
table{border-collapse:collapse;margin:.5rem 0 1rem;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.25rem 0}
th,td{border:1px solid var(--line);padding:.25rem .5rem;text-align:left;vertical-align:top;min-width:6.5rem}
.facts th{font-weight:400;color:var(--soft)}
pre{overflow-x:auto;border:1px solid var(--line);padding:.5rem;font-size:.8rem;white-space:pre-wrap;overflow-wrap:anywhere}
@media (max-width:40rem){.bar{grid-template-columns:1fr 7.5rem}.bar .name{grid-column:1/-1;font-size:.9rem}}
@media print{body{font-size:11px}main{max-width:none;padding:0}.bar,figure,tr{break-inside:avoid}.wide{overflow:visible}svg{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
";

fn name(report: &ScenarioReport, column: usize) -> String {
    format!("{} {}", letter(column), escape(&report.columns[column]))
}

fn legend(report: &ScenarioReport) -> String {
    let items: String = (0..report.columns.len())
        .map(|at| {
            format!(
                "<li><svg aria-hidden=\"true\"><rect width=\"100%\" height=\"100%\" \
                 style=\"fill:{}\"/></svg>{}</li>\n",
                colour(at),
                name(report, at)
            )
        })
        .collect();
    format!("<ul class=\"legend\">\n{items}</ul>\n")
}

/// Links to the sections of the page.
fn contents(report: &ScenarioReport, metrics: &[Metric], has_curves: bool) -> String {
    let mut entries: Vec<(String, String)> = Vec::new();
    if has_curves {
        entries.push(("curves".into(), "Curves".into()));
    }
    let charts = metrics.iter().enumerate();
    entries.extend(charts.map(|(at, metric)| (format!("chart-{at}"), metric.title(report))));
    entries.push(("tables".into(), "Tables".into()));
    if !notes(report).is_empty() {
        entries.push(("notes".into(), "Notes".into()));
    }
    entries.push(("machine".into(), "Machine and programs".into()));
    entries.push(("commands".into(), "Commands".into()));
    let items: String = entries
        .iter()
        .map(|(id, title)| format!("<li><a href=\"#{id}\">{}</a></li>\n", escape(title)))
        .collect();
    format!("<nav aria-label=\"Contents\">\n<ul class=\"legend\">\n{items}</ul>\n</nav>\n")
}

/// What the marks on the bars of a metric are, if there are any.
fn intervals(report: &ScenarioReport, metric: Metric) -> String {
    let levels = report.cells.iter().filter_map(|cell| metric.of(cell));
    let level = levels.filter_map(SampleSummary::interval).map(|(_, _, level)| level);
    match level.fold(f64::INFINITY, f64::min) {
        level if level.is_finite() => {
            let percent = (100.0 * level).floor();
            format!(", marks the confidence interval of the median ({percent:.0} %)")
        }
        _ => "; the runs are too few for a confidence interval".to_owned(),
    }
}

/// The bars of a row.
fn bars(report: &ScenarioReport, row: usize, metric: Metric) -> String {
    let cells = report.row(row);
    let largest = cells
        .iter()
        .filter_map(|cell| metric.of(cell))
        .map(|summary| summary.interval().map_or(0.0, |(_, high, _)| high).max(summary.median))
        .fold(0.0, f64::max);
    let mut out =
        format!("<figure style=\"margin:0\">\n<h3>{}</h3>\n", escape(&report.rows[row].label));
    for (at, cell) in cells.iter().enumerate() {
        out.push_str(&bar(&name(report, at), cell, metric, largest, &colour(at)));
    }
    out.push_str("</figure>\n");
    out
}

fn bar(name: &str, cell: &CellReport, metric: Metric, largest: f64, colour: &str) -> String {
    let name = format!("<div class=\"bar\"><span class=\"name\">{name}</span>");
    let text = escape(&cell_text(cell, metric));
    let summary = match cell.state(metric) {
        CellState::Good(summary) => summary,
        CellState::Failed(_) => {
            return format!("{name}<span></span><span class=\"value bad\">{text}</span></div>\n");
        }
        CellState::Skipped(reason) => {
            let reason = escape(reason);
            return format!(
                "{name}<span class=\"none\">{reason}</span><span class=\"value none\">{text}\
                 </span></div>\n"
            );
        }
        CellState::Missing => {
            return format!("{name}<span></span><span class=\"value none\">{text}</span></div>\n");
        }
    };
    let percent =
        |value: f64| if largest > 0.0 { (100.0 * value / largest).clamp(0.0, 100.0) } else { 0.0 };
    let mut marks = String::new();
    if let Some((low, high, _)) = summary.interval() {
        let low = percent(low);
        let high = percent(high);
        marks = format!(
            "<line x1=\"{low:.2}%\" x2=\"{high:.2}%\" y1=\"50%\" y2=\"50%\" class=\"mark\"/>"
        );
        for end in [low, high] {
            marks.push_str(&format!(
                "<line x1=\"{end:.2}%\" x2=\"{end:.2}%\" y1=\"25%\" y2=\"75%\" class=\"mark\"/>"
            ));
        }
    }
    format!(
        "{name}<svg role=\"img\" aria-label=\"{text}\"><rect width=\"{:.2}%\" height=\"100%\" \
         rx=\"2\" style=\"fill:{colour}\"/>{marks}</svg><span class=\"value\">{text}</span></div>\n",
        percent(summary.median)
    )
}

fn table(
    report: &ScenarioReport,
    title: &str,
    cell: impl Fn(&[CellReport], usize) -> String,
) -> String {
    let mut out =
        format!("<div class=\"wide\"><table>\n<caption>{}</caption>\n<tr><td></td>", escape(title));
    for at in 0..report.columns.len() {
        out.push_str(&format!("<th scope=\"col\">{}</th>", name(report, at)));
    }
    out.push_str("</tr>\n");
    for (row, heading) in report.rows.iter().enumerate() {
        out.push_str(&format!("<tr><th scope=\"row\">{}</th>", escape(&heading.label)));
        for at in 0..report.columns.len() {
            out.push_str(&format!("<td>{}</td>", cell(report.row(row), at)));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table></div>\n");
    out
}

fn commands(report: &ScenarioReport) -> String {
    let mut out = String::from("<section id=\"commands\">\n<h2>Commands</h2>\n");
    if !report.setup.is_empty() {
        let lines = escape(&report.setup.join("\n"));
        out.push_str(&format!("<h3>Before all runs</h3>\n<pre>{lines}</pre>\n"));
    }
    for (row, heading) in report.rows.iter().enumerate() {
        let mut lines = Vec::new();
        for cell in report.row(row).iter().filter(|cell| cell.skipped.is_none()) {
            lines.push(format!("# {} {}", letter(cell.column), report.columns[cell.column]));
            lines.extend(cell.prepare.iter().map(|line| format!("before: {line}")));
            lines.extend(cell.servers.iter().map(|line| format!("server: {line}")));
            lines.push(cell.command.clone());
            lines.extend(cell.check.iter().map(|line| format!("after: {line}")));
        }
        let label = escape(&heading.label);
        let lines = escape(&lines.join("\n"));
        out.push_str(&format!(
            "<details>\n<summary>{label}</summary>\n<pre>{lines}</pre>\n</details>\n"
        ));
    }
    out.push_str("</section>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::report;

    #[test]
    fn every_cell_is_there_and_nothing_is_fetched() {
        let mut report = report(
            &["ours", "theirs & co"],
            &[("one", &[&[1.25, 1.5], &[33.3]]), ("two <b>", &[&[7.77], &[]])],
        );
        report.cells[1].skipped = Some("the program x is not there".into());
        let page = page(&report);
        for text in ["1.38", "7.77", "FAILED", "skipped", "the program x is not there"] {
            assert!(page.contains(text), "{text} is missing");
        }
        for text in ["one", "two &lt;b&gt;", "A ours", "B theirs &amp; co", "Example &lt;title&gt;"]
        {
            assert!(page.contains(text), "{text} is missing");
        }
        for forbidden in ["http:", "https:", "src=", "<script", "url(", "@import", "<b>"] {
            assert!(!page.contains(forbidden), "{forbidden} is there");
        }
        let links: Vec<&str> = page.split("href=\"").skip(1).collect();
        assert!(links.len() >= 5, "a table of contents");
        for link in links {
            let id = link.strip_prefix('#').expect("a link within the page");
            let id = &id[..id.find('"').unwrap()];
            assert!(page.contains(&format!(" id=\"{id}\"")), "{id}");
        }
        assert!(page.contains("prefers-color-scheme:dark") && page.contains("@media print"));
        assert!(!page.contains("class=\"mark\""), "two runs have no interval");
        assert!(page.contains("too few for a confidence interval"));
        assert!(page.contains("41 % more than column A"));
    }

    #[test]
    fn five_runs_have_an_interval_and_its_confidence_is_given() {
        let report = report(&["ours"], &[("one", &[&[1.0, 1.1, 1.2, 1.3, 1.4]])]);
        let page = page(&report);
        assert!(page.contains("class=\"mark\""));
        assert!(page.contains("confidence interval of the median (93 %)"));
    }

    #[test]
    fn figures_of_a_load_generator_are_left_out_and_rates_come_first() {
        let mut report = report(&["a", "b"], &[("r", &[&[1.0, 2.0], &[3.0]])]);
        let titles = |report: &ScenarioReport| -> Vec<String> {
            report.metrics().iter().map(|metric| metric.title(report)).collect()
        };
        let all = titles(&report).len();
        report.rate_unit = Some("requests".into());
        for cell in &mut report.cells {
            cell.command = "blockhaul bench load".into();
            cell.servers = vec!["server".into()];
        }
        assert_eq!(titles(&report).len(), all - 2);
        report.cells[1].command = "nbdcopy".into();
        assert_eq!(titles(&report).len(), all, "the columns are clients");
    }

    #[test]
    fn tags_are_balanced() {
        let report = report(&["a", "b"], &[("r", &[&[1.0, 2.0], &[]])]);
        let page = page(&report);
        for tag in ["div", "section", "table", "tr", "td", "th", "svg", "span", "figure", "ul"] {
            let opened = page.matches(&format!("<{tag}>")).count()
                + page.matches(&format!("<{tag} ")).count();
            assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }
}
