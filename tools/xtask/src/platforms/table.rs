//! The table of platforms: its rows come from the tests, and go to standard output and to a page.

use std::fs;
use std::process::Command;

use crate::{TaskResult, run};

/// Begins the line of a test that reports a row; the fields follow, with a tab before each.
const MARK: &str = "PLATFORM";
/// The page, and the lines around its table.
const PAGE: &str = "docs/platforms.md";
const BEGIN: &str = "<!-- cargo xtask platforms --write -->\n";
const END: &str = "<!-- end -->\n";

/// One line of the table.
pub struct Row {
    platform: String,
    version: String,
    /// The steps, in words.
    steps: String,
    result: String,
}

impl Row {
    /// The row of a platform whose tests failed.
    pub fn failed(platform: &str) -> Row {
        let [version, steps] = ["", ""].map(String::from);
        Row { platform: platform.into(), version, steps, result: "**failed**".into() }
    }
}

/// The rows that the tests have printed.
pub fn rows(printed: &str) -> Vec<Row> {
    let row = |line: &str| {
        let (_, fields) = line.split_once(MARK)?;
        let mut fields = fields.strip_prefix('\t')?.split('\t').map(String::from);
        let [platform, version, steps] = [fields.next()?, fields.next()?, fields.next()?];
        Some(Row { platform, version, steps, result: "equal".into() })
    };
    printed.lines().filter_map(row).collect()
}

/// The table in Markdown.
pub fn text(rows: &[Row]) -> String {
    let head = "| platform | version | steps | result |\n|---|---|---|---|\n";
    let line = |row: &Row| {
        format!("| {} | {} | {} | {} |\n", row.platform, row.version, row.steps, row.result)
    };
    rows.iter().fold(String::from(head), |text, row| text + &line(row))
}

/// Replaces the table of the page.
pub fn write(rows: &[Row]) -> TaskResult {
    let page = run::workspace().join(PAGE);
    let old = fs::read_to_string(&page).map_err(|error| format!("cannot read {PAGE}: {error}"))?;
    let around =
        old.split_once(BEGIN).and_then(|(head, rest)| Some((head, rest.split_once(END)?.1)));
    let (head, tail) = around.ok_or_else(|| format!("{PAGE} has no place for the table"))?;
    let date = run::quiet(Command::new("date").args(["-u", "+%Y-%m-%d"]))?;
    let commit = run::quiet(Command::new("git").current_dir(run::workspace()).args([
        "rev-parse",
        "--short",
        "HEAD",
    ]))?;
    let caption = format!("Run on {}, commit {}.\n\n", date.trim(), commit.trim());
    let new = format!("{head}{BEGIN}{caption}{}{END}{tail}", text(rows));
    fs::write(&page, new).map_err(|error| format!("cannot write {PAGE}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_among_other_lines() {
        let printed =
            "running 1 test\ntest a ... PLATFORM\tlibvirt\t12.9\tfull backup\nok\nPLATFORM\tx\n";
        let rows = rows(printed);
        assert_eq!(rows.len(), 1);
        assert!(text(&rows).ends_with("| libvirt | 12.9 | full backup | equal |\n"));
    }
}
