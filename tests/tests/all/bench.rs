//! `blockhaul bench` and the program that it starts, blockhaul-bench.

use std::path::Path;
use std::process::{Command, Stdio};

use blockhaul_testkit::tools::until;
use blockhaul_tests::{blockhaul, done, lossy, program};

#[test]
fn ctrl_c_keeps_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let scenario = dir.path().join("touch.toml");
    let text = "title = 'Touch'\nruns = 10000\nwarmup = 0\n\
        [[environment]]\nlabel = 'touch'\ncommand = ['sh', '-c', 'echo >>$0', '{scratch}/../mark']\n\
        [[case]]\nlabel = 'row'\nunchecked = 'a mark'\n";
    std::fs::write(&scenario, text).unwrap();
    let out = dir.path().join("results");
    let mut child = blockhaul(&[])
        .args(["bench", "--quiet", "--label", "here", "--scratch"])
        .arg(dir.path())
        .arg("--disk")
        .arg(dir.path())
        .arg("--out")
        .arg(&out)
        .arg(&scenario)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("some runs have ended", || {
        std::fs::read(dir.path().join("mark")).is_ok_and(|lines| lines.len() >= 5)
    });
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let result = find(&out, "result.json").expect("a result");
    let result: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(result).unwrap()).unwrap();
    assert_eq!(result["interrupted"], true);
    assert!(result["runs"].is_null(), "no run has failed: {result}");
    let runs = std::fs::read_to_string(find(&out, "raw.csv").unwrap()).unwrap();
    let runs = runs.lines().skip(1).count();
    assert!((1..10_000).contains(&runs), "{runs} runs");
    let left = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name());
    let left: Vec<_> = left.filter(|name| name.display().to_string().contains("bench")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_program_is_itself_whatever_it_is_called() {
    let dir = tempfile::tempdir().unwrap();
    let renamed = dir.path().join("bh");
    // Copied by another process: a test that starts a program at this moment would inherit the open
    // file, which then could not be run.
    done(Command::new("cp").arg(program()).arg(&renamed));
    // Alone it says what is missing.
    let alone = |words: &[&str]| {
        let mut command = Command::new(&renamed);
        command.arg("bench").args(words).env("PATH", "/usr/bin:/bin").output().unwrap()
    };
    let output = alone(&["list"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(lossy(&output.stderr).contains("blockhaul-bench is not installed"), "{output:?}");
    assert!(alone(&["device", "--time", "1s", "memory:1M"]).status.success());
    std::fs::copy(program().with_file_name("blockhaul-bench"), dir.path().join("blockhaul-bench"))
        .unwrap();
    let scenario = dir.path().join("version.toml");
    let text = "title = 'Version'\nruns = 1\nwarmup = 0\n\
        [[environment]]\nlabel = 'ours'\ncommand = ['{blockhaul}', '--version']\n\
        [[case]]\nlabel = 'row'\nunchecked = 'it writes nothing'\n";
    std::fs::write(&scenario, text).unwrap();
    let output = Command::new(&renamed)
        .args(["bench", "--quiet", "--no-save", "--format", "csv"])
        .arg(&scenario)
        .env("PATH", "/usr/bin:/bin")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("row,ours,ok,"), "{said}");
    assert!(!said.contains("-0.0"), "{said}");
}

#[test]
fn results_that_cannot_be_read_are_not_slower() {
    let output = blockhaul(&["bench", "compare", "/no/such", "/no/such"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn each_program_helps_with_its_own_commands() {
    let other = program().with_file_name("blockhaul-bench");
    let ours = blockhaul(&["bench", "run", "--help"]).output().unwrap();
    let theirs = Command::new(&other).args(["run", "--help"]).output().unwrap();
    assert!(theirs.status.success() && lossy(&theirs.stdout).contains("--scratch"), "{theirs:?}");
    assert_eq!(lossy(&ours.stdout), lossy(&theirs.stdout));
    let help = lossy(&blockhaul(&["bench", "--help"]).output().unwrap().stdout);
    for text in ["device", "load", "blockhaul-bench --help", "blockhaul bench run copy"] {
        assert!(help.contains(text), "{help}");
    }
    let output = blockhaul(&["bench", "load", "--count", "100", "--json"])
        .args(["[", "blockhaul", "serve", "sample:8M", "]"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", lossy(&output.stderr));
}

fn find(dir: &Path, name: &str) -> Option<std::path::PathBuf> {
    std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).find_map(|path| {
        if path.is_dir() { find(&path, name) } else { (path.file_name()? == name).then_some(path) }
    })
}
