//! `--log-format json`: each line on standard error is one object, from the first on, whatever is printed.

use std::process::Command;
use std::time::Duration;

use blockhaul_testkit::tools::{self, ScratchDir, text};
use serde_json::Value;

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// The messages of a command, with its levels.
fn messages(scratch: &ScratchDir, line: &[&str]) -> Vec<(String, String)> {
    let mut command = Command::new(OURS);
    command
        .arg(line[0])
        .args(["--log-format", "json"])
        .args(&line[1..])
        .current_dir(scratch.path());
    let output = tools::output(&mut command, Duration::from_secs(60)).unwrap();
    let said = text(&output.stderr);
    let member = |object: &Value, name: &str| object[name].as_str().unwrap_or_default().to_owned();
    let lines = said.lines().map(|one| {
        let object: Value =
            serde_json::from_str(one).unwrap_or_else(|_| panic!("{line:?}: {said}"));
        // Progress has a phase, records have a time.
        assert!(object["phase"].is_string() || object["time"].is_string(), "{line:?}: {said}");
        (member(&object, "level"), member(&object, "message"))
    });
    lines.collect()
}

#[test]
fn each_line_of_a_log_in_json_is_an_object() {
    let scratch = ScratchDir::new().unwrap();
    assert_eq!(messages(&scratch, &["copy", "sample:2M", "disk.raw"]), []);
    let found = |level: &str, part: &str, line: &[&str]| {
        let all = messages(&scratch, line);
        let found = all.iter().any(|(found, text)| found == level && text.contains(part));
        assert!(found, "{line:?}: {all:?}");
    };
    let page = ["serve", "disk.raw", "--metrics", "127.0.0.1:0", "--page", "--run", "true"];
    found("info", "page on http://127.0.0.1:", &page);
    found("debug", "", &["serve", "-v", "-r", "disk.raw", "--run", "true"]);
    found("error", "nowhere.raw", &["serve", "nowhere.raw", "--run", "true"]);
    found("error", "unexpected argument '--nosuch' found", &["serve", "--nosuch", "disk.raw"]);
    found("error", "use a number from 1 to 65536", &["serve", "--threads", "0", "disk.raw"]);
    found("error", "[ without ]", &["copy", "disk.raw", "["]);
    found("info", "verified 2097152 bytes", &["copy", "-v", "--verify", "disk.raw", "other.raw"]);
    found("", "", &["copy", "--progress", "disk.raw", "other.raw"]);
    found("info", "used as a raw disk", &["copy", "--format", "auto", "disk.raw", "other.raw"]);
    found("warn", "disk.qcow2", &["copy", "disk.raw", "disk.qcow2"]);
    found("error", "nowhere.raw", &["copy", "nowhere.raw", "other.raw"]);
    found("error", "nowhere.toml", &["copy", "--job", "nowhere.toml"]);
    found("error", "nowhere.toml", &["pull", "nowhere.toml"]);
    found("error", "nowhere", &["restore", "nowhere", "other.raw"]);
    found("error", "nowhere", &["verify", "disk.raw", "nowhere"]);
    found("error", "nowhere.raw", &["compare", "nowhere.raw", "disk.raw"]);
    found("error", "nowhere.raw", &["mount", "nowhere.raw", "disk.raw"]);
}
