//! Scaling curves: what happens over threads, requests, connections or latency, as SVG.

use crate::markup::{colour, escape};
use crate::result::{Metric, ScenarioReport};
use crate::stats::SampleSummary;

/// Charts are this wide and high in units of their own.
const SIZE: (f64, f64) = (360.0, 220.0);
/// From this ratio of the largest to the smallest place on, the axis is logarithmic.
const LOG_FROM: f64 = 30.0;

/// A chart for each series of rows, all columns in it; nothing if the scenario has no curves.
pub fn charts(report: &ScenarioReport) -> String {
    let Some(axis) = &report.curve else { return String::new() };
    let mut metrics = vec![if report.rate_unit.is_some() { Metric::Rate } else { Metric::Wall }];
    metrics.extend(report.show.iter().filter(|metric| **metric == Metric::ServersRate));
    let mut series: Vec<(String, Vec<usize>)> = Vec::new();
    for (row, heading) in report.rows.iter().enumerate() {
        let Some(place) = heading.curve_at else { continue };
        // Rows that differ only in their place belong together.
        let key = heading.label.replacen(&place.to_string(), "", 1);
        let key = key.trim_matches([' ', ',']).to_owned();
        match series.iter_mut().find(|(known, _)| *known == key) {
            Some((_, rows)) => rows.push(row),
            None => series.push((key, vec![row])),
        }
    }
    let mut out = String::new();
    for (name, rows) in series {
        for metric in &metrics {
            let mut title = format!("{} over {axis}", metric.title(report));
            if !name.is_empty() {
                title.push_str(&format!(": {name}"));
            }
            out.push_str(&chart(report, *metric, &title, &rows));
        }
    }
    out
}

/// Where places are on the axis, from 0 to 1.
struct Axis {
    first: f64,
    last: f64,
    logarithmic: bool,
}

impl Axis {
    fn over(places: &[f64]) -> Option<Axis> {
        let (first, last) = places
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(*x), b.max(*x)));
        let logarithmic = first > 0.0 && last / first >= LOG_FROM;
        (first < last).then_some(Axis { first, last, logarithmic })
    }

    fn at(&self, place: f64) -> f64 {
        if self.logarithmic {
            (place / self.first).ln() / (self.last / self.first).ln()
        } else {
            (place - self.first) / (self.last - self.first)
        }
    }
}

/// The step of an axis from 0 to `largest` or a little more, which is 1, 2 or 5 times a power of
/// ten, and the number of steps: 3 to 6.
fn round_steps(largest: f64) -> (f64, u32) {
    let power = 10_f64.powf((largest / 6.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|times| times * power);
    // Rounding errors must not add a step.
    let count = |step: f64| (largest / step - 1e-9).ceil().max(1.0);
    let step = step.into_iter().find(|step| count(*step) <= 6.0).unwrap_or(10.0 * power);
    (step, count(step) as u32)
}

/// A value at an axis: as many digits as the steps need, and no more.
fn tick(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let mut out = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if rest.is_empty() { out } else { format!("{out}.{rest}") }
}

/// Where the area of the curves ends, in units of the chart.
const LEFT: f64 = 52.0;
const RIGHT: f64 = SIZE.0 - 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = SIZE.1 - 42.0;

/// The area of the curves: its axis of places, and the largest value.
struct Frame {
    axis: Axis,
    largest: f64,
}

impl Frame {
    fn x(&self, place: f64) -> f64 {
        LEFT + self.axis.at(place) * (RIGHT - LEFT)
    }

    fn y(&self, value: f64) -> f64 {
        BOTTOM - value / self.largest * (BOTTOM - TOP)
    }

    /// Lines at values, with their numbers.
    fn steps(&self, step: f64, steps: u32) -> String {
        let mut out = String::new();
        for part in 0..=steps {
            let value = step * f64::from(part);
            let y = self.y(value);
            out.push_str(&format!(
                "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                LEFT - 5.0,
                y + 4.0,
                tick(value)
            ));
        }
        out
    }

    /// The name of the axis, and places on it.
    fn places(&self, places: &[f64], name: &str) -> String {
        let mut out = String::new();
        out.push_str(&format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n",
            f64::midpoint(LEFT, RIGHT),
            BOTTOM + 32.0,
            escape(name)
        ));
        for place in places {
            out.push_str(&format!(
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{place}</text>\n",
                self.x(*place),
                BOTTOM + 15.0
            ));
        }
        out
    }

    /// The curve of a column, with intervals.
    fn curve(&self, points: &[(f64, &SampleSummary)], unit: f64, colour: &str) -> String {
        let mut out = String::new();
        let line: Vec<String> = points
            .iter()
            .map(|(place, s)| format!("{:.1},{:.1}", self.x(*place), self.y(s.median / unit)))
            .collect();
        out.push_str(&format!(
            "<polyline points=\"{}\" style=\"fill:none;stroke:{colour};stroke-width:2\"/>\n",
            line.join(" ")
        ));
        for (place, summary) in points {
            let x = self.x(*place);
            if let Some((low, high, _)) = summary.interval() {
                let low = self.y(low / unit);
                let high = self.y(high / unit);
                out.push_str(&format!(
                    "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\" \
                     style=\"stroke:{colour}\"/>"
                ));
            }
            out.push_str(&format!(
                "<circle cx=\"{x:.1}\" cy=\"{:.1}\" r=\"3\" \
                 style=\"fill:{colour}\"/>\n",
                self.y(summary.median / unit)
            ));
        }
        out
    }
}

fn chart(report: &ScenarioReport, metric: Metric, title: &str, rows: &[usize]) -> String {
    let place = |row: usize| report.rows[row].curve_at.unwrap_or(0.0);
    let mut ticks: Vec<f64> = rows.iter().map(|row| place(*row)).collect();
    ticks.sort_by(f64::total_cmp);
    ticks.dedup();
    let largest = rows
        .iter()
        .flat_map(|row| report.row(*row))
        .filter_map(|cell| metric.of(cell))
        .map(|summary| summary.interval().map_or(summary.median, |(_, high, _)| high))
        .map(|value| value / metric.unit())
        .fold(0.0, f64::max);
    let Some(axis) = Axis::over(&ticks).filter(|_| largest > 0.0) else { return String::new() };
    let (step, steps) = round_steps(largest);
    let largest = step * f64::from(steps);
    let frame = Frame { axis, largest };
    let mut out = format!(
        "<figure style=\"margin:0\">\n<h2>{}</h2>\n<svg class=\"curve\" role=\"img\" \
         aria-label=\"curves; the tables hold the same figures\" viewBox=\"0 0 {} {}\">\n",
        escape(title),
        SIZE.0,
        SIZE.1
    );
    out.push_str(&frame.steps(step, steps));
    out.push_str(&frame.places(&ticks, report.curve.as_deref().unwrap_or_default()));
    for column in 0..report.columns.len() {
        let mut points: Vec<(f64, &SampleSummary)> = rows
            .iter()
            .filter_map(|row| Some((place(*row), metric.of(report.cell(*row, column))?)))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        out.push_str(&frame.curve(&points, metric.unit(), &colour(column)));
    }
    out.push_str("</svg>\n</figure>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::report;

    #[test]
    fn rows_that_differ_in_their_place_only_are_one_chart() {
        let cells: &[&[f64]] = &[&[1.0], &[2.0]];
        let rows = ["0 ms, few", "0 ms, many", "10 ms, few", "10 ms, many"].map(|l| (l, cells));
        let mut report = report(&["a", "b"], &rows);
        assert_eq!(charts(&report), "");
        report.curve = Some("delay".into());
        for (row, place) in report.rows.iter_mut().zip([0.0, 0.0, 10.0, 10.0]) {
            row.curve_at = Some(place);
        }
        let text = charts(&report);
        assert_eq!(text.matches("<svg").count(), 2, "{text}");
        assert_eq!(text.matches("<polyline").count(), 4, "{text}");
        assert!(text.contains("over delay: ms, few") && text.contains("over delay: ms, many"));
    }

    #[test]
    fn values_at_the_axis_are_round() {
        for (largest, step, steps) in
            [(986.0, 200.0, 5), (1.0, 0.2, 5), (0.31, 0.1, 4), (12_000.0, 2000.0, 6), (6.0, 1.0, 6)]
        {
            let (found, count) = round_steps(largest);
            assert!((found - step).abs() < 1e-9 * step, "{largest}: {found}");
            assert_eq!(count, steps, "{largest}");
        }
        assert_eq!([0.0, 0.05, 200.0, 12_000.0].map(tick), ["0", "0.05", "200", "12,000"]);
    }

    #[test]
    fn wide_axes_are_logarithmic() {
        let wide = Axis::over(&[1.0, 32.0, 1024.0]).unwrap();
        assert!((wide.at(32.0) - 0.5).abs() < 1e-9 && wide.at(1.0) == 0.0);
        let narrow = Axis::over(&[0.0, 10.0, 50.0]).unwrap();
        assert!((narrow.at(10.0) - 0.2).abs() < 1e-9);
        assert!(Axis::over(&[3.0]).is_none() && Axis::over(&[]).is_none());
    }
}
