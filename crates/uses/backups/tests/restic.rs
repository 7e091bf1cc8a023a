//! The rules about what is kept, beside those of restic itself.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use blockhaul_backups::{KeepCount, RetentionPolicy};
use jiff::Zoned;

/// Days of November 2026 and before, with hours.
const TIMES: [&str; 14] = [
    "2024-12-31 23:30:00",
    "2025-01-01 00:30:00",
    "2025-12-28 12:00:00",
    "2025-12-29 12:00:00",
    "2026-06-30 12:00:00",
    "2026-10-25 00:30:00",
    "2026-10-25 23:30:00",
    "2026-11-16 01:00:00",
    "2026-11-22 23:59:00",
    "2026-11-23 00:01:00",
    "2026-11-28 10:00:00",
    "2026-11-29 09:00:00",
    "2026-11-29 10:00:00",
    "2026-11-29 22:00:00",
];

fn restic(folder: &Path, args: &[&str]) -> std::io::Result<Output> {
    let mut command = Command::new("restic");
    command.args(["--repo", "repo", "--no-cache", "--quiet"]).args(args).current_dir(folder);
    command.env("RESTIC_PASSWORD", "x").env("TZ", "Europe/Berlin").output()
}

/// The policy of options as they are given to restic.
fn policy(rules: &[(&str, &str)]) -> RetentionPolicy {
    let count = |name: &str| -> KeepCount {
        let found = rules.iter().find(|rule| rule.0 == name);
        found.map_or(KeepCount::None, |rule| rule.1.parse().unwrap())
    };
    let within = rules.iter().find(|rule| rule.0 == "--keep-within");
    RetentionPolicy {
        last: count("--keep-last"),
        daily: count("--keep-daily"),
        weekly: count("--keep-weekly"),
        monthly: count("--keep-monthly"),
        yearly: count("--keep-yearly"),
        within: within.map(|rule| rule.1.parse().unwrap()),
    }
}

#[test]
fn restic_keeps_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    if std::env::var_os("BLOCKHAUL_LONG").is_none() {
        println!("skipped: a long test: set BLOCKHAUL_LONG=1");
        return;
    }
    if restic(folder, &["version"]).is_err() {
        println!("skipped: restic is not installed (Debian: restic)");
        return;
    }
    let done = |args: &[&str]| {
        let output = restic(folder, args).unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    std::fs::write(folder.join("file"), "x").unwrap();
    done(&["init"]);
    for time in TIMES {
        done(&["backup", "--time", time, "file"]);
    }
    let times: Vec<Zoned> =
        TIMES.iter().map(|time| format!("{time}[Europe/Berlin]").parse().unwrap()).collect();
    for rules in [
        &[("--keep-last", "3")][..],
        &[("--keep-daily", "5")],
        &[("--keep-weekly", "4")],
        &[("--keep-weekly", "20")],
        &[("--keep-monthly", "4")],
        &[("--keep-yearly", "2")],
        &[("--keep-yearly", "5")],
        &[("--keep-within", "7d")],
        &[("--keep-within", "1y1m")],
        &[("--keep-daily", "2"), ("--keep-weekly", "2"), ("--keep-monthly", "unlimited")],
    ] {
        let words: Vec<_> = rules.iter().flat_map(|(name, value)| [*name, *value]).collect();
        let said = done(&[&["forget", "--dry-run", "--json"], &words[..]].concat());
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        let kept = said[0]["keep"].as_array().unwrap();
        let theirs: BTreeSet<String> =
            kept.iter().map(|one| one["time"].as_str().unwrap()[..19].replace('T', " ")).collect();
        let decided = policy(rules).decide(&times);
        let ours = TIMES.iter().zip(decided).filter(|(_, decision)| decision.is_kept());
        let ours: BTreeSet<String> = ours.map(|(time, _)| time.to_string()).collect();
        assert_eq!(ours, theirs, "{rules:?}");
    }
}
