//! `blockhaul copy --job`: several disks in one run.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::image::pattern;
use blockhaul_testkit::tools::{self, ScratchDir, text};
use rustix::process::{Pid, Signal, kill_process};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// `blockhaul copy --job` of this file, in the folder of the test.
fn job(scratch: &ScratchDir, text: &str, args: &[&str]) -> Output {
    tools::output(&mut command(scratch, text, args), LIMIT).unwrap()
}

fn command(scratch: &ScratchDir, text: &str, args: &[&str]) -> Command {
    std::fs::write(scratch.file("job.toml"), text).unwrap();
    let mut command = Command::new(OURS);
    command.current_dir(scratch.path()).args(["copy", "--job", "job.toml"]).args(args);
    command
}

#[test]
fn several_disks_are_copied_and_reported_in_order() {
    let scratch = ScratchDir::new().unwrap();
    let file = "\
parallel = 2
total-connections = 3
total-memory = '64M'
[defaults]
verify = true
[[disk]]
name = 'root'
source = ['blockhaul', 'serve', 'pattern:5M']
target = 'root.raw'
[[disk]]
source = 'pattern:3000001'
target = 'second.raw'
digest = 'sha256'
[[disk]]
name = 'last'
source = 'sample:20M'
target = 'last.raw'
verify = false
connections = 8
";
    let output = job(&scratch, file, &["-v", "--progress=json"]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(std::fs::read(scratch.file("root.raw")).unwrap(), pattern(5 << 20));
    assert_eq!(std::fs::read(scratch.file("second.raw")).unwrap(), pattern(3_000_001));
    let report: Vec<_> =
        said.lines().filter_map(|line| line.strip_prefix("blockhaul: copy: disk ")).collect();
    let names: Vec<_> = report.iter().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(names, ["root", "2", "last"], "{said}");
    let verified = report.iter().map(|line| line.contains("verified")).collect::<Vec<_>>();
    assert_eq!(verified, [true, true, false], "{said}");
    assert!(text(&output.stdout).ends_with("  pattern:3000001\n"), "{}", text(&output.stdout));
    let json: Vec<serde_json::Value> =
        said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let last = json.last().unwrap();
    let total = (5 << 20) + 3_000_001 + (20 << 20);
    assert_eq!((&last["total"], &last["done"]), (&total.into(), &total.into()), "{last}");
    assert_eq!(last["disks"].as_array().unwrap().len(), 3, "{last}");
    assert_eq!((&last["disks"][2]["name"], &last["success"]), (&"last".into(), &true.into()));
}

#[test]
fn one_that_fails_fails_the_run_and_the_others_are_completed() {
    let scratch = ScratchDir::new().unwrap();
    let file = "\
[defaults]
retries = 0
segment = '64k'
[[disk]]
name = 'good'
source = 'pattern:4M'
target = 'good.raw'
journal = 'good.journal'
[[disk]]
name = 'bad'
source = 'data:1000000'
target = 'bad.raw'
journal = 'bad.journal'
source-layer = 'error?read=100%'
[[disk]]
name = 'other'
source = 'pattern:2M'
target = 'other.raw'
";
    let file = file.replace("data:1000000", "pattern:1M");
    let output = job(&scratch, &file, &["--parallel", "1"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{said}");
    let last = said.lines().last().unwrap();
    assert!(last.starts_with("blockhaul: copy: disk bad: the source failed: "), "{said}");
    assert!(last.ends_with("2 of 3 disks are complete"), "{said}");
    assert_eq!(std::fs::read(scratch.file("good.raw")).unwrap(), pattern(4 << 20));
    assert_eq!(std::fs::read(scratch.file("other.raw")).unwrap(), pattern(2 << 20));
    // The journal of the complete one stays, so that it is not copied again.
    assert!(scratch.file("good.journal").exists());
    let mended = file.replace("source-layer = 'error?read=100%'\n", "");
    let output = job(&scratch, &mended, &["-v"]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("disk good: 4194304 bytes: 0 data"), "{said}");
    assert!(said.contains("4194304 bytes of an earlier run"), "{said}");
    assert!(!scratch.file("good.journal").exists() && !scratch.file("bad.journal").exists());
}

#[test]
fn nothing_is_written_when_one_cannot_be_opened() {
    let scratch = ScratchDir::new().unwrap();
    std::fs::write(scratch.file("kept.raw"), vec![7; 1 << 20]).unwrap();
    let file = "\
[[disk]]
source = 'pattern:1M'
target = 'kept.raw'
[[disk]]
name = 'gone'
source = 'nowhere.raw'
target = 'new.raw'
";
    let output = job(&scratch, file, &[]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("disk gone: cannot open the source: nowhere.raw"), "{said}");
    assert!(said.contains("nothing was copied"), "{said}");
    assert_eq!(std::fs::read(scratch.file("kept.raw")).unwrap(), vec![7; 1 << 20]);

    // As with what is to be kept beside a copy.
    for key in ["journal", "manifest"] {
        let source = "source = 'nowhere.raw'";
        let file = file.replace(source, &format!("source = 'pattern:1M'\n{key} = 'no/where'"));
        let output = job(&scratch, &file, &[]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("disk gone: cannot ") && said.contains(key), "{said}");
        assert_eq!(std::fs::read(scratch.file("kept.raw")).unwrap(), vec![7; 1 << 20], "{key}");
        assert!(!scratch.file("new.raw").exists());
    }
}

#[test]
fn one_limit_is_for_all_and_a_signal_stops_all() {
    let scratch = ScratchDir::new().unwrap();
    let disks = |size: &str| {
        let disk = |n| format!("[[disk]]\nsource='pattern:{size}'\ntarget='{n}.raw'\n");
        (0..3).map(disk).collect::<String>()
    };
    let file = format!("rate = '8M'\n{}", disks("1M"));
    let start = Instant::now();
    let output = job(&scratch, &file, &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    // Less a tenth of a second's worth, which may be used at once.
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());

    (0..3).for_each(|n| std::fs::remove_file(scratch.file(&format!("{n}.raw"))).unwrap());
    let file = format!("rate = '1M'\nparallel = 2\n{}", disks("64M"));
    let mut child = command(&scratch, &file, &[]).stderr(Stdio::piped()).spawn().unwrap();
    let written = |path: &Path| {
        std::fs::metadata(path).is_ok_and(|data| std::os::unix::fs::MetadataExt::blocks(&data) > 8)
    };
    tools::until("two disks are begun", || {
        written(&scratch.file("0.raw")) && written(&scratch.file("1.raw"))
    });
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert!(tools::wait_within(&mut child, LIMIT).is_some(), "it goes on");
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("stopped by a signal: 0 of 3 disks are complete"), "{said}");
}

#[test]
fn copies_that_a_signal_has_stopped_say_how_they_resume() {
    let scratch = ScratchDir::new().unwrap();
    let disk =
        |n| format!("[[disk]]\nsource='random:1M?seed=1'\ntarget='{n}.raw'\njournal='{n}.j'\n");
    let disks = (0..2).map(disk).collect::<String>();
    let slow = format!("rate = '1k'\n{disks}");
    let mut child = command(&scratch, &slow, &[]).stderr(Stdio::piped()).spawn().unwrap();
    tools::until("two disks are begun", || {
        (0..2).all(|n| scratch.file(&format!("{n}.j")).exists())
    });
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(tools::wait_within(&mut child, LIMIT).is_some(), "it goes on");
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(143), "{said}");
    for words in [
        "disk 1: stopped by a signal: run it again to resume\n",
        "disk 2: stopped by a signal: run it again to resume\n",
        "stopped by a signal: 0 of 2 disks are complete: run it again to resume\n",
    ] {
        assert!(said.contains(words), "{said}");
    }
    assert!(!said.contains("connect to") && !said.contains("failed"), "{said}");
    let output = job(&scratch, &disks, &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn files_that_cannot_be_meant_are_refused_with_line_and_key() {
    let scratch = ScratchDir::new().unwrap();
    let one = "[[disk]]\nsource='pattern:1M'\ntarget='a.raw'\n";
    for (file, words) in [
        (String::new(), "job.toml:1: it lists no disk"),
        ("[[disk]\n".to_string(), "job.toml:1: "),
        (format!("{one}retries = 'x'\n"), "job.toml:4: disk 1: key retries: "),
        (format!("{one}{one}"), "job.toml:5: disk 2: disk 1 has the same target"),
        (format!("{one}[[disk]]\nsource='a.raw'\ntarget='b.raw'\n"), "is the target of disk 1"),
        (format!("{one}source-layer='what'\n"), "job.toml:2: disk 1: "),
        (
            format!("{one}journal='j'\n{}journal='j'\n", one.replace("a.raw", "b.raw")),
            "disk 1 also writes j",
        ),
        (
            format!("{one}journal='j'\n{}journal='./j'\n", one.replace("a.raw", "b.raw")),
            "disk 1 also writes ./j",
        ),
        (
            format!(
                "{one}on-error='skip'\nerror-map='m'\n{}on-error='skip'\nerror-map='m'\n",
                one.replace("a.raw", "b.raw")
            ),
            "disk 1 also writes m",
        ),
        (format!("{one}{}", one.replace("a.raw", "./a.raw")), "disk 1 has the same target"),
        (
            format!("{one}{}manifest='a.raw'\n", one.replace("a.raw", "b.raw")),
            "disk 2: a.raw is the source or target of disk 1",
        ),
    ] {
        let output = job(&scratch, &file, &[]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{file}: {said}");
        assert!(said.contains(words) && said.lines().count() == 1, "{file}: {said}, not {words}");
        assert!(!scratch.file("b.raw").exists(), "{file}");
    }
    for args in [["--job", "x", "null:1M", "null:"].as_slice(), &["--parallel", "2", "a", "b"], &[]]
    {
        let mut command = Command::new(OURS);
        let output = tools::output(command.arg("copy").args(args), LIMIT).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stderr));
    }
    let mut command = Command::new(OURS);
    let output = tools::output(command.args(["copy", "--job", "/nowhere"]), LIMIT).unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
}

#[test]
fn an_increment_that_is_complete_does_not_stand_in_the_way_of_the_others() {
    let scratch = ScratchDir::new().unwrap();
    for name in ["one", "two"] {
        std::fs::write(scratch.file(name), vec![1; 3 << 20]).unwrap();
    }
    let disk = |name: &str, more: &str| {
        format!(
            "[[disk]]\nsource = '{name}'\ntarget = '{name}.raw'\nmanifest = '{name}.manifest'\n\
             journal = '{name}.journal'\n{more}\n"
        )
    };
    let full = disk("one", "") + &disk("two", "");
    assert!(job(&scratch, &full, &[]).status.success());
    for name in ["one", "two"] {
        std::fs::write(scratch.file(name), vec![2; 3 << 20]).unwrap();
    }
    // The manifest takes the place of the one before.
    let [one, two] = ["one", "two"].map(|name| format!("since = '{name}.manifest'"));
    let failing = two.clone() + "\nsource-layer = ['error?read=100%']\nretries = 0";
    let increment = |more: &str| disk("one", &one) + &disk("two", more);
    let output = job(&scratch, &increment(&failing), &[]);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    let output = job(&scratch, &increment(&two), &["--verify"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for name in ["one", "two"] {
        let copied = std::fs::read(scratch.file(&format!("{name}.raw"))).unwrap();
        assert!(copied == vec![2; 3 << 20]);
        assert!(!scratch.file(&format!("{name}.journal")).exists());
    }
}
