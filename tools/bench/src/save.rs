//! Results as files: `DATE-LABEL/SCENARIO/{README.md,raw.csv,result.json,index.html}`.
//!
//! They are made to be published: folders of this machine are replaced by words in braces.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::result::{FORMAT, ScenarioReport};
use crate::{html, table};
use blockhaul_measure::{MeasureError, Result};

/// The file that holds everything.
const RESULT: &str = "result.json";
/// Larger files were not written by this program.
const RESULT_MAX: u64 = 256 << 20;

/// Directories that must not be printed, with their replacements.
#[derive(Clone, Debug, Default)]
pub struct PathReplacements {
    pairs: Vec<(String, String)>,
}

impl PathReplacements {
    /// Adds a directory or file. Common ones, like `/`, are not replaced.
    pub fn add(&mut self, path: &Path, word: &str) {
        let text = path.display().to_string();
        let text = text.trim_end_matches('/');
        if text.len() > 3 && path.is_absolute() {
            self.pairs.push((text.to_owned(), word.to_owned()));
            // The deepest directory comes first, or a parent would replace it.
            self.pairs.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        }
    }

    /// A text without them.
    pub fn hide(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (path, word) in &self.pairs {
            let mut out = String::with_capacity(text.len());
            let mut rest = text.as_str();
            while let Some(at) = rest.find(path.as_str()) {
                let (before, found) = rest.split_at(at);
                let after = &found[path.len()..];
                let part_of_name =
                    after.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-');
                out.push_str(before);
                out.push_str(if part_of_name { path } else { word });
                rest = after;
            }
            out.push_str(rest);
            text = out;
        }
        text
    }

    /// A report without them.
    pub fn hide_in(&self, report: &ScenarioReport) -> Result<ScenarioReport> {
        let broken =
            |error: serde_json::Error| MeasureError::new(format!("cannot write results: {error}"));
        let mut value = serde_json::to_value(report).map_err(broken)?;
        self.walk(&mut value);
        serde_json::from_value(value).map_err(broken)
    }

    fn walk(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.hide(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.walk(item)),
            Value::Object(fields) => fields.values_mut().for_each(|field| self.walk(field)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// Makes a directory for a report and writes it there; returns the directory.
pub fn save(report: &ScenarioReport, out: &Path) -> Result<PathBuf> {
    let date = report.started.split('T').next().unwrap_or_default();
    let day = out.join(format!("{date}-{}", report.machine.label));
    fs::create_dir_all(&day).map_err(|error| MeasureError::file("make", &day, error))?;
    // Nothing that was measured is ever overwritten.
    for number in 1..1000 {
        let dir = match number {
            1 => day.join(&report.name),
            _ => day.join(format!("{}-{number}", report.name)),
        };
        match fs::create_dir(&dir) {
            Ok(()) => {
                write(report, &dir)?;
                return Ok(dir);
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(MeasureError::file("make", &dir, error)),
        }
    }
    Err(MeasureError::new(format!("{} is full of results of {}", day.display(), report.name)))
}

/// Writes a new report's files.
fn write(report: &ScenarioReport, dir: &Path) -> Result<()> {
    let mut compact = report.clone();
    compact.runs.retain(|run| run.failure.is_some());
    write_files(dir, [(RESULT, json(&compact)?), ("raw.csv", table::csv(report))])?;
    render(report, dir)
}

/// Writes the files that are made for readers. What was measured stays as it is.
pub fn render(report: &ScenarioReport, dir: &Path) -> Result<()> {
    let files = [("README.md", table::markdown(report)), ("index.html", html::page(report))];
    write_files(dir, files)
}

fn write_files(dir: &Path, files: [(&str, String); 2]) -> Result<()> {
    for (name, text) in files {
        let path = dir.join(name);
        fs::write(&path, text).map_err(|error| MeasureError::file("write", &path, error))?;
    }
    Ok(())
}

/// A report as JSON, in one line.
pub fn json(report: &ScenarioReport) -> Result<String> {
    match serde_json::to_string(report) {
        Ok(text) => Ok(text + "\n"),
        Err(error) => Err(MeasureError::new(format!("cannot write results: {error}"))),
    }
}

/// Whether a directory has a result.
pub fn is_result(dir: &Path) -> bool {
    dir.join(RESULT).is_file()
}

/// Reads a report from its directory.
pub fn load(dir: &Path) -> Result<ScenarioReport> {
    let path = dir.join(RESULT);
    let size = path.metadata().map_err(|error| MeasureError::file("read", &path, error))?.len();
    if size > RESULT_MAX {
        return Err(MeasureError::file("read", &path, "it is too large for a result"));
    }
    let text =
        fs::read_to_string(&path).map_err(|error| MeasureError::file("read", &path, error))?;
    let wrong = |why: String| MeasureError::file("understand", &path, why);
    #[derive(serde::Deserialize)]
    struct ReportVersion {
        format: u32,
    }
    let head: ReportVersion =
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    if head.format != FORMAT {
        let format = head.format;
        return Err(wrong(format!("it has format {format}, this program knows {FORMAT}")));
    }
    let mut report: ScenarioReport =
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    report.name = crate::scenario::today(&report.name).to_owned();
    if report.is_whole() {
        Ok(report)
    } else {
        Err(wrong("its cells do not fit its rows and columns".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::report;

    #[test]
    fn folders_are_hidden_the_deepest_first() {
        let mut secrets = PathReplacements::default();
        secrets.add(Path::new("/home/me"), "~");
        secrets.add(Path::new("/home/me/tree/"), "{root}");
        secrets.add(Path::new("/"), "nothing");
        let text = "/home/me/tree/target/x /home/me/y /home/melanie /home/me-too /bin/sh /home/me";
        let hidden = "{root}/target/x ~/y /home/melanie /home/me-too /bin/sh ~";
        assert_eq!(secrets.hide(text), hidden);
    }

    #[test]
    fn results_survive_the_way_through_files() {
        let dir = tempfile::tempdir().unwrap();
        let mut report = report(&["a", "b"], &[("row", &[&[1.0], &[]])]);
        report.setup.push("cp /secret/dir/x y".to_owned());
        let mut secrets = PathReplacements::default();
        secrets.add(Path::new("/secret/dir"), "{scratch}");
        let report = secrets.hide_in(&report).unwrap();
        let first = save(&report, dir.path()).unwrap();
        let second = save(&report, dir.path()).unwrap();
        assert!(first.ends_with("2026-11-20-/example"), "{}", first.display());
        assert!(second.ends_with("2026-11-20-/example-2"), "{}", second.display());
        for name in ["README.md", "raw.csv", "result.json", "index.html"] {
            let text = fs::read_to_string(first.join(name)).unwrap();
            assert!(!text.is_empty() && !text.contains("/secret"), "{name}");
        }
        // Rendering again replaces what is made for readers, and nothing that was measured.
        for name in ["README.md", "raw.csv", RESULT, "index.html"] {
            fs::write(second.join(name), "kept").unwrap();
        }
        render(&report, &second).unwrap();
        for (name, kept) in
            [("README.md", false), ("index.html", false), ("raw.csv", true), (RESULT, true)]
        {
            let text = fs::read_to_string(second.join(name)).unwrap();
            assert_eq!(text == "kept", kept, "{name}");
        }
        let read = load(&first).unwrap();
        assert!(read.runs.len() < report.runs.len());
        let only_failed = report.runs.into_iter().filter(|run| run.failure.is_some()).collect();
        let report = ScenarioReport { runs: only_failed, ..report };
        assert_eq!(json(&read).unwrap(), json(&report).unwrap());
    }

    #[test]
    fn broken_results_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let good = json(&report(&["a"], &[("row", &[&[1.0]])])).unwrap();
        let cases = [
            (good.replace("\"format\":2", "\"format\":99"), "format 99"),
            (good.replace("\"reference\":0", "\"reference\":5"), "do not fit"),
            (good.replace("\"row\":0", "\"row\":7"), "do not fit"),
            ("{".to_owned(), "understand"),
        ];
        for (text, expected) in cases {
            fs::write(dir.path().join(RESULT), text).unwrap();
            let error = load(dir.path()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
