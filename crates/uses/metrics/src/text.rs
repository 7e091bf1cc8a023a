//! Prometheus' text format.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::SystemTime;

/// A function that appends the metrics of a command, and returns the text for Prometheus.
pub type TextSource = Arc<dyn Fn(MetricsWriter) -> String + Send + Sync>;

/// A writer of metrics in Prometheus' text format.
#[derive(Debug, Default)]
pub struct MetricsWriter {
    text: String,
    last: String,
    /// The value of the label `run`, which all metrics have then.
    run: Option<String>,
}

impl MetricsWriter {
    /// Metrics with the label `run`, which tells those of several files apart.
    pub fn for_run(run: String) -> MetricsWriter {
        MetricsWriter { run: Some(run), ..MetricsWriter::default() }
    }

    /// Adds a metric. `kind` is counter or gauge; metrics of one name must be consecutive.
    pub fn add(&mut self, name: &str, kind: &str, help: &str, labels: &[(&str, &str)], value: f64) {
        self.head(name, kind, help);
        self.line(name, labels, value);
    }

    /// Adds a histogram: counts per upper bound in `bounds`, and above; and the sum.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        labels: &[(&str, &str)],
        (bounds, classes, sum): (&[f64], &[u64], f64),
    ) {
        self.head(name, "histogram", help);
        let mut count = 0;
        for (index, class) in classes.iter().enumerate() {
            count += class;
            let bound = bounds.get(index).map_or("+Inf".to_string(), f64::to_string);
            let mut labels = labels.to_vec();
            labels.push(("le", &bound));
            self.line(&format!("{name}_bucket"), &labels, count as f64);
        }
        self.line(&format!("{name}_sum"), labels, sum);
        self.line(&format!("{name}_count"), labels, count as f64);
    }

    /// The text.
    pub fn finish(self) -> String {
        self.text
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        if self.last != name {
            let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            self.last = name.to_string();
        }
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.text += name;
        let run = self.run.as_deref().map(|run| ("run", run));
        let labels: Vec<_> = run
            .iter()
            .chain(labels)
            .map(|(key, value)| format!("{key}=\"{}\"", escaped(value)))
            .collect();
        if !labels.is_empty() {
            let _ = write!(self.text, "{{{}}}", labels.join(","));
        }
        let _ = writeln!(self.text, " {value}");
    }
}

/// The time of now, in milliseconds, which every reader of JSON understands alike.
pub(crate) fn seconds_since_1970() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |time| time.as_millis() as f64 / 1000.0)
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_in_the_text_format() {
        let mut figures = MetricsWriter::default();
        figures.add("a_total", "counter", "What.", &[("disk", "x\"y\\z\n")], 5.0);
        figures.add("a_total", "counter", "What.", &[], 1.5);
        figures.histogram("t_seconds", "Time.", &[], (&[0.1, 1.0], &[1, 2, 3], 9.5));
        let text = "# HELP a_total What.\n# TYPE a_total counter\n\
                    a_total{disk=\"x\\\"y\\\\z\\n\"} 5\na_total 1.5\n\
                    # HELP t_seconds Time.\n# TYPE t_seconds histogram\n\
                    t_seconds_bucket{le=\"0.1\"} 1\nt_seconds_bucket{le=\"1\"} 3\n\
                    t_seconds_bucket{le=\"+Inf\"} 6\nt_seconds_sum 9.5\nt_seconds_count 6\n";
        assert_eq!(figures.finish(), text);
    }

    #[test]
    fn metrics_of_a_file_have_its_label() {
        let mut figures = MetricsWriter::for_run("vm1".to_string());
        figures.add("a", "gauge", "What.", &[], 5.0);
        figures.add("a", "gauge", "What.", &[("side", "source")], 6.0);
        let text = figures.finish();
        assert!(text.ends_with("a{run=\"vm1\"} 5\na{run=\"vm1\",side=\"source\"} 6\n"), "{text}");
    }
}
