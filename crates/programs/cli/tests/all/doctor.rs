//! `blockhaul doctor`: the facts of this machine, as text and JSON.

use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, text};
use serde_json::Value;

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

fn doctor(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(OURS);
    command.arg("doctor").args(args).envs(variables.iter().copied());
    tools::output(&mut command, Duration::from_secs(60)).unwrap()
}

#[test]
fn the_report_is_text_and_json() {
    let output = doctor(&[], &[]);
    assert!(output.status.success(), "{}", text(&output.stdout));
    let report = text(&output.stdout);
    for name in
        ["blockhaul", "kernel", "io_uring", "FUSE", "open files", "locked memory", "nbdkit", "VDDK"]
    {
        assert!(report.contains(&format!(" {name}: ")), "{name}: {report}");
    }
    for line in report.lines() {
        assert!(["good ", "limited "].iter().any(|state| line.starts_with(state)), "{line}");
        assert_eq!(line.starts_with("limited "), line.contains("; "), "{line}");
    }
    let output = doctor(&["--json"], &[]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["success"], Value::Bool(true));
    assert!(json["version"].is_string());
    let facts = json["facts"].as_array().unwrap();
    assert_eq!(facts.len() + 1, report.lines().count());
    let is_complete = |fact: &Value| fact["state"] == "good" || fact["remedy"].is_string();
    assert!(facts.iter().all(is_complete), "{json}");
}

#[test]
fn what_is_wrong_has_a_remedy_and_a_status() {
    let output = doctor(&[], &[("TMPDIR", "/nonexistent"), ("PATH", "/nonexistent")]);
    let report = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report.contains("wrong    temporary directory: /nonexistent; "), "{report}");
    assert!(report.contains("limited  nbdkit: absent; only its plugins need it"), "{report}");
    let output = doctor(&["--json"], &[("TMPDIR", "/nonexistent")]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &json["success"]), (Some(1), &Value::Bool(false)));
}
