//! `blockhaul bench` as people start it: stopped by Ctrl-C, and asked about one device.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn blockhaul() -> Command {
    Command::new(env!("CARGO_BIN_EXE_blockhaul"))
}

#[test]
fn ctrl_c_keeps_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let scenario = dir.path().join("touch.toml");
    let text = "title = 'Touch'\nruns = 10000\nwarmup = 0\n\
        [[environment]]\nlabel = 'touch'\ncommand = ['sh', '-c', 'echo >>$0', '{scratch}/../mark']\n\
        [[case]]\nlabel = 'row'\nunchecked = 'a mark'\n";
    std::fs::write(&scenario, text).unwrap();
    let out = dir.path().join("results");
    let mut child = blockhaul()
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
    let deadline = Instant::now() + Duration::from_secs(60);
    // Some runs have ended.
    while std::fs::read(dir.path().join("mark")).map_or(0, |lines| lines.len()) < 5 {
        assert!(Instant::now() < deadline, "nothing was run");
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let result = find(&out, "result.json").expect("a result");
    let result: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(result).unwrap()).unwrap();
    assert_eq!(result["interrupted"], true);
    let runs = result["runs"].as_array().unwrap();
    assert!(!runs.is_empty() && runs.len() < 10_000, "{} runs", runs.len());
    assert!(runs.iter().all(|run| run["failure"].is_null()), "{runs:?}");
    let left = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name());
    let left: Vec<_> = left.filter(|name| name.display().to_string().contains("bench")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_device_behind_a_command_is_measured() {
    let output = blockhaul()
        .args(["bench", "device", "--time", "1s", "--json", "--max-connections", "2"])
        .args(["--max-requests", "4", "[", "blockhaul", "serve", "sample:8M", "]"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["size"], &found["own_connections"]), (&(8 << 20).into(), &true.into()));
    let command = found["reading_advice"]["command"].as_str().unwrap();
    assert!(command.ends_with("[ blockhaul serve sample:8M ] TARGET"), "{command}");
    assert!(command.contains(" --connections="), "a server has them: {command}");
    let refused = blockhaul().args(["bench", "device", "/no/such/device"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(3), "as of every command that cannot open a device");
    let refused = blockhaul().args(["bench", "device", "odd:x"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}

/// A device that does one request after the other, each in 200 ms, would need many minutes for all
/// measurements; one that does not answer is not waited for for ever.
#[test]
fn slow_devices_are_measured_as_far_as_the_time_does_and_dead_ones_given_up() {
    let bench = |time: &str, pread: &str| {
        let device = format!("eval:get_size=echo 64M&pread={pread}");
        let begun = Instant::now();
        let output = blockhaul().args(["bench", "device", "--time", time, &device]).output();
        assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
        output.unwrap()
    };
    let output = bench("5s", "sleep 0.2; head -c $3 /dev/zero");
    let (said, heard) = (output.stdout, output.stderr);
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&heard));
    assert!(said.contains("measurements were left out") && said.contains("To read it:"), "{said}");
    let output = bench("1s", "sleep 60; head -c $3 /dev/zero");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("a small read: no answer for"), "{said}");
}

#[test]
fn the_program_is_itself_whatever_it_is_called() {
    let dir = tempfile::tempdir().unwrap();
    let renamed = dir.path().join("bh");
    std::fs::copy(env!("CARGO_BIN_EXE_blockhaul"), &renamed).unwrap();
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
    let output = blockhaul().args(["bench", "compare", "/no/such", "/no/such"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

fn find(dir: &Path, name: &str) -> Option<std::path::PathBuf> {
    std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).find_map(|path| {
        match path.is_dir() {
            true => find(&path, name),
            false => (path.file_name()? == name).then_some(path),
        }
    })
}
