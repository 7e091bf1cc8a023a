//! Copies that take long, as processes: killed at random moments and resumed; limited; retried.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, ScratchDir, text};
use rustix::process::{Pid, Signal};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
/// Bytes before the first record of a journal.
const HEADER: u64 = 4096;

fn copy(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).arg("copy").args(args), LIMIT).unwrap()
}

/// The number before these words.
fn number(said: &str, words: &str) -> u64 {
    let before = said.split(words).next().unwrap_or_default();
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    if said.contains(words) { digits.parse().unwrap() } else { 0 }
}

struct Moment {
    /// After the first record and before the end.
    between: bool,
    resumed: u64,
}

/// Kills a copy, resumes it, and checks what came of it.
fn kill_and_resume(scratch: &ScratchDir, source: &Path, number_of: usize, rng: &mut Rng) -> Moment {
    let [target, journal] = ["target", "journal"].map(|name| {
        let path = scratch.file(&format!("{name}-{number_of}"));
        path.to_str().unwrap().to_string()
    });
    let source = source.to_str().unwrap();
    let mut args = vec!["-v", "--journal", &journal, "--journal-interval", "5ms"];
    args.extend(["--segment", "256k", "--request-size", "64k", source, &target]);
    let mut child = Command::new(OURS)
        .arg("copy")
        .args(&args)
        .args(["--rate", "40M"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let len = || std::fs::metadata(&journal).map_or(0, |data| data.len());
    if !number_of.is_multiple_of(10) {
        // One that has ended before anybody looked has removed it.
        tools::until(&format!("moment {number_of}: something is recorded"), || {
            len() > HEADER || child.try_wait().unwrap().is_some()
        });
    }
    std::thread::sleep(Duration::from_micros(rng.between(0, 150_000)));
    child.kill().unwrap();
    child.wait().unwrap();
    let between = len() > HEADER;

    let output = copy(&args);
    let said = text(&output.stderr);
    assert!(output.status.success(), "moment {number_of}: {said}");
    let resumed = number(&said, " bytes of an earlier run");
    assert!(!Path::new(&journal).exists(), "removed after success");
    let same = std::fs::read(source).unwrap() == std::fs::read(&target).unwrap();
    assert!(same, "moment {number_of}: {said}");
    std::fs::remove_file(&target).unwrap();
    Moment { between, resumed }
}

#[test]
fn a_copy_killed_at_any_moment_goes_on_where_it_was() {
    const MOMENTS: usize = 100;
    const ENOUGH: usize = 80;
    // On a busy machine a copy may have ended before it could be killed.
    const MOST: usize = 20 * MOMENTS;
    let seed = seed();
    let scratch = ScratchDir::new().unwrap();
    let source = scratch.file("source");
    let size = 12 << 20;
    let mut bytes = vec![0; size];
    Rng::new(seed).fill(&mut bytes[..9 << 20]);
    std::fs::write(&source, &bytes).unwrap();
    let next = Mutex::new(0);
    let moments = Mutex::new(Vec::<Moment>::new());
    let between = || moments.lock().unwrap().iter().filter(|moment| moment.between).count();
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let scratch = &scratch;
            let source = &source;
            let next = &next;
            let moments = &moments;
            let between = &between;
            scope.spawn(move || {
                let mut rng = Rng::new(seed ^ worker);
                loop {
                    let moment = {
                        let mut next = next.lock().unwrap();
                        *next += 1;
                        *next - 1
                    };
                    if moment >= MOMENTS && between() >= ENOUGH || moment >= MOST {
                        return;
                    }
                    let ended = kill_and_resume(scratch, source, moment, &mut rng);
                    moments.lock().unwrap().push(ended);
                }
            });
        }
    });
    let between = between();
    let moments = moments.into_inner().unwrap();
    let count = moments.len();
    assert!(between >= ENOUGH, "{between} of {count} between first record and end, seed {seed}");
    for moment in moments.iter().filter(|moment| moment.between) {
        assert!(moment.resumed > 0, "less than the whole is copied again, seed {seed}");
    }
}

/// Copies at this rate, and is killed once the journal holds more than its header. At this rate the whole
/// takes so long that it is not over before anybody looks.
fn kill_after_the_first_record(args: &[&str], rate: &str, journal: &Path) {
    let mut child = Command::new(OURS)
        .arg("copy")
        .args(args)
        .args(["--rate", rate, "--request-size", "16k"])
        .spawn()
        .unwrap();
    tools::until("something is recorded", || {
        std::fs::metadata(journal).is_ok_and(|data| data.len() > HEADER)
    });
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_changed_source_is_refused_and_restart_copies_it() {
    let scratch = ScratchDir::new().unwrap();
    let [source, target, journal] = ["source", "target", "journal"].map(|name| scratch.file(name));
    std::fs::write(&source, vec![7; 4 << 20]).unwrap();
    let [from, to, kept] = [&source, &target, &journal].map(|path| path.to_str().unwrap());
    let args = ["--journal", kept, "--journal-interval", "5ms", "--segment", "64k", from, to];
    kill_after_the_first_record(&args, "200k", &journal);
    let before = std::fs::read(&target).unwrap();

    std::fs::write(&source, vec![8; 4 << 20]).unwrap();
    let output = copy(&args);
    let said = text(&output.stderr);
    assert!(!output.status.success());
    assert!(
        said.contains("the source is not that of the journal") && said.contains("--restart"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(std::fs::read(&target).unwrap() == before, "nothing was written");

    let mut anew = vec!["--restart"];
    anew.extend(args);
    assert!(copy(&anew).status.success());
    assert!(std::fs::read(&target).unwrap() == vec![8; 4 << 20]);
    assert!(!journal.exists());
}

#[test]
fn what_a_restart_empties_no_journal_calls_done() {
    let scratch = ScratchDir::new().unwrap();
    let [target, journal] = ["target", "journal"].map(|name| scratch.file(name));
    let [to, kept] = [&target, &journal].map(|path| path.to_str().unwrap());
    let args = ["--journal", kept, "--journal-interval", "5ms", "--segment", "64k"];
    let ends = ["sample:8M?data=100%", to];
    kill_after_the_first_record(&[&args[..], &ends].concat(), "400k", &journal);
    let moved = scratch.file("moved");
    std::fs::rename(&target, &moved).unwrap();
    let output = copy(&[&args[..], &ends].concat());
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("use --restart"), "{}", text(&output.stderr));
    assert!(!target.exists(), "not made anew beside a journal that says what it holds");
    std::fs::rename(&moved, &target).unwrap();
    // Where the target cannot be opened nothing is emptied, and the journal says what it holds.
    let folder = scratch.file("folder");
    std::fs::create_dir(&folder).unwrap();
    let recorded = std::fs::read(&journal).unwrap();
    let held = std::fs::read(&target).unwrap();
    let elsewhere = ["--restart", "sample:8M?data=100%", folder.to_str().unwrap()];
    assert!(!copy(&[&args[..], &elsewhere].concat()).status.success());
    assert!(std::fs::read(&journal).unwrap() == recorded);
    // The limit on the size of files does not let it make the target larger.
    let limited = r#"ulimit -c 0; ulimit -f 1000; exec "$@""#;
    let mut killed = Command::new("sh");
    killed.args(["-c", limited, "sh", OURS, "copy", "--no-progress", "--restart"]).args(args);
    let killed = tools::output(killed.args(["sample:16M?data=100%", to]), LIMIT).unwrap();
    assert!(text(&killed.stderr).contains("File too large"), "{}", text(&killed.stderr));
    assert!(!journal.exists(), "removed before the target is touched");
    assert!(std::fs::read(&target).unwrap() == held, "a size that is refused loses nothing");
    // It is not anybody's file.
    std::fs::write(&journal, "a letter").unwrap();
    let output = copy(&[&args[..], &["--restart"], &ends].concat());
    assert!(text(&output.stderr).contains("not a journal"), "{}", text(&output.stderr));
    assert!(std::fs::metadata(&target).unwrap().len() > 0, "not emptied before that");
    assert_eq!(std::fs::read(&journal).unwrap(), b"a letter");
}

#[test]
fn another_part_of_the_target_is_another_target() {
    let scratch = ScratchDir::new().unwrap();
    let [target, journal] = ["target", "journal"].map(|name| scratch.file(name));
    let [to, kept] = [&target, &journal].map(|path| path.to_str().unwrap());
    std::fs::File::create(&target).unwrap().set_len(32 << 20).unwrap();
    let args = ["--journal", kept, "--journal-interval", "5ms", "--segment", "64k"];
    let ends = ["sample:8M?data=100%", to];
    let through = |layer| [&args[..], &["--target-layer", layer], &ends].concat();
    kill_after_the_first_record(&through("offset?offset=1M&range=8M"), "400k", &journal);
    let output = copy(&through("offset?offset=16M&range=8M"));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("the target is not that of the journal") && said.contains("through offset"),
        "{said}"
    );
    // What only slows down or counts is no other target.
    let mut again = through("offset?offset=1M&range=8M");
    again.splice(0..0, ["--source-layer", "rate?rate=1G", "--verify"]);
    let output = copy(&again);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn a_copy_that_was_stopped_while_it_was_verified_is_not_copied_again() {
    let scratch = ScratchDir::new().unwrap();
    let [source, target, journal] = ["source", "target", "journal"].map(|name| scratch.file(name));
    std::fs::write(&source, vec![7; 4 << 20]).unwrap();
    let [from, to, kept] = [&source, &target, &journal].map(|path| path.to_str().unwrap());
    let args = ["-v", "--verify", "--journal", kept, "--segment", "64k"];
    // Reading it takes four seconds, in which it is seen that it is read again.
    let ends = ["--source-layer", "rate?rate=1M", from, to];
    let mut child = Command::new(OURS)
        .arg("copy")
        .args([&args[..], &["--progress=json:1"], &ends].concat())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut lines = lines.map(|line| line.unwrap());
    assert!(lines.any(|line| line.contains("\"phase\":\"verify\"")), "it is verified");
    let pid = Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(lines.count().min(1), 1);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(journal.exists());
    let output = copy(&[&args[..], &[from, to]].concat());
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(number(&said, " bytes of an earlier run") > 3 << 20, "{said}");
    assert!(said.contains("; verified 4194304 bytes"), "{said}");
    assert!(!journal.exists());

    // What is found to be different is copied again.
    let wrong = ["--source-layer", "evil?evil=cosmic-rays&evil-probability=1e-5", from, to];
    let output = copy(&[&args[..], &wrong].concat());
    assert_eq!(output.status.code(), Some(8), "{}", text(&output.stderr));
    assert!(!journal.exists(), "a journal would call done what is wrong");
}

#[test]
fn going_on_is_no_reason_to_warn() {
    let scratch = ScratchDir::new().unwrap();
    let [target, journal] = ["target", "journal"].map(|name| scratch.file(name));
    let [to, kept] = [&target, &journal].map(|path| path.to_str().unwrap());
    let args = ["--journal", kept, "--journal-interval", "5ms", "--segment", "64k"];
    let ends = ["sample:8M?data=100%", to];
    kill_after_the_first_record(&[&args[..], &ends].concat(), "400k", &journal);
    let output = copy(&[&args[..], &["--verify"], &ends].concat());
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "", "what was recorded last was read back and was there");
}

#[test]
fn a_full_journal_is_not_the_target() {
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.file("full");
    std::fs::create_dir(&folder).unwrap();
    // A file system of its own, which has no room, for this command only.
    let script = "mount -t tmpfs -o size=4k none \"$1\" || exit 77; : > \"$1/fill\"; \
        head -c 4096 /dev/zero > \"$1/fill\"; \
        exec \"$0\" copy --journal \"$1/journal\" memory:1M \"$2\"";
    let target = scratch.file("target");
    let unshared = tools::output(
        Command::new("unshare").args(["-rm", "sh", "-c", script, OURS]).args([&folder, &target]),
        LIMIT,
    );
    let output = match unshared {
        Ok(output) if output.status.code() == Some(77) => None,
        Ok(output) if text(&output.stderr).starts_with("unshare: ") => None,
        Ok(output) => Some(output),
        Err(_) => None,
    };
    let Some(output) = output else {
        tools::skip("no file system can be mounted here");
        return;
    };
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot write the journal") && !said.contains("the target"), "{said}");
    assert!(!target.exists(), "{said}");
}

#[test]
fn a_journal_that_cannot_be_made_is_not_the_target() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    // A directory where no file can be made, not even by root.
    let output = copy(&["--journal", "/proc/journal", "pattern:1M", target.to_str().unwrap()]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.starts_with("blockhaul: copy: cannot create the journal /proc/journal: "),
        "{said}"
    );
}

#[test]
fn what_cannot_be_kept_beside_a_copy_is_refused_before_the_target_is_touched() {
    let scratch = ScratchDir::new().unwrap();
    let [target, other, fresh] = ["target", "other", "fresh"].map(|name| scratch.file(name));
    std::fs::write(&target, "precious").unwrap();
    std::fs::write(&other, "a letter").unwrap();
    let [to, letter, new] = [&target, &other, &fresh].map(|path| path.to_str().unwrap());
    let nowhere = scratch.file("no/where");
    let nowhere = nowhere.to_str().unwrap();
    let here = scratch.path().display();
    let directory = "it is a directory: give the name of a file in it";
    let make = "create its directory first";
    for (args, status, words) in [
        ([&format!("--journal={nowhere}"), "--flush"], 1, make),
        ([&format!("--journal={nowhere}"), "--restart"], 1, make),
        ([&format!("--journal={letter}"), "--flush"], 1, "journal"),
        ([&format!("--journal={here}"), "--flush"], 2, directory),
        ([&format!("--journal={here}"), "--restart"], 2, directory),
        ([&format!("--journal={letter}"), "--restart"], 1, "not a journal"),
        ([&format!("--manifest={nowhere}"), "--flush"], 1, make),
        ([&format!("--manifest={here}"), "--flush"], 2, directory),
        ([&format!("--metrics=unix:{nowhere}"), "--flush"], 1, "--metrics"),
        ([&format!("--rate-file={}", scratch.path().display()), "--flush"], 2, "--rate-file"),
        ([&format!("--since={nowhere}"), "--flush"], 3, "--since"),
        (["--range=1M:1M", "--flush"], 3, "but the range ends at"),
        ([&format!("--journal={new}"), &format!("--manifest={new}")], 2, "the same file"),
    ] {
        for target in [to, new] {
            let output = copy(&[&args[..], &["pattern:1M", target]].concat());
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
            assert!(said.contains(words), "{args:?}: {said}");
            assert!(!fresh.exists(), "{args:?}: {target}");
        }
        assert_eq!(std::fs::read(&target).unwrap(), b"precious", "{args:?}");
        assert_eq!(std::fs::read(&other).unwrap(), b"a letter", "{args:?}");
    }
    // The target itself, which is not there yet.
    let output = copy(&["--journal", new, "pattern:1M", new]);
    let said = text(&output.stderr);
    assert!(said.contains("the source or the target"), "{said}");
    assert!(!fresh.exists(), "{said}");
    let left: Vec<_> = std::fs::read_dir(scratch.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 2, "nothing was left behind: {left:?}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (args, word) in [
        (["--journal=j", "-", "null:1M"].as_slice(), "pipe"),
        (&["--restart", "null:1M", "null:1M"], "--journal"),
        (&["--rate", "x", "null:1M", "null:1M"], "--rate"),
        (&["--segment", "100k", "null:1M", "null:1M"], "power of two"),
        (&["--rate-file", "/proc/self/mem", "null:1M", "null:1M"], "--rate-file"),
    ] {
        let output = copy(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(word), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn a_rate_is_kept_and_its_file_is_read_again() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    let to = target.to_str().unwrap();
    let start = Instant::now();
    let output = copy(&["--rate", "8M", "--segment", "1M", "pattern:4M", to]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(start.elapsed() >= Duration::from_millis(300), "{:?}", start.elapsed());

    let file = scratch.file("rate");
    std::fs::write(&file, "1k").unwrap();
    let mut child = Command::new(OURS)
        .args(["copy", "--rate-file", file.to_str().unwrap(), "pattern:4M", to])
        .spawn()
        .unwrap();
    let early = tools::wait_within(&mut child, Duration::from_millis(300));
    assert_eq!(early, None, "4 MiB at 1 KiB a second");
    std::fs::write(&file, "0\n").unwrap();
    let status = tools::wait_within(&mut child, LIMIT).expect("it has no limit any more");
    assert!(status.success());
    for wrong in ["8M\niops=x", "8M\n9M", "iops=-1"] {
        std::fs::write(&file, wrong).unwrap();
        let output = copy(&["--rate-file", file.to_str().unwrap(), "pattern:4M", to]);
        assert_eq!(output.status.code(), Some(2), "{wrong}: {}", text(&output.stderr));
    }
}

#[test]
fn requests_a_second_are_kept_and_change_with_the_file() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    let file = scratch.file("rate");
    let [to, limits] = [&target, &file].map(|path| path.to_str().unwrap());
    let args = |size| ["--request-size", "64k", size, to];
    let start = Instant::now();
    // 32 requests, of which a tenth of a second's are free.
    let output = copy(&[&["--iops", "50"], &args("pattern:2M")[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(start.elapsed() >= Duration::from_millis(400), "{:?}", start.elapsed());

    std::fs::write(&file, "iops=1\n").unwrap();
    let limited = ["copy", "--rate-file", limits, "--iops", "1000"];
    let args = [&limited[..], &args("pattern:16M")].concat();
    let mut child = Command::new(OURS).args(args).spawn().unwrap();
    let early = tools::wait_within(&mut child, Duration::from_millis(300));
    assert_eq!(early, None, "256 requests at one a second");
    std::fs::write(&file, "100M\niops=0\n").unwrap();
    let status = tools::wait_within(&mut child, LIMIT).expect("it has no limit any more");
    assert!(status.success());
}

#[test]
fn errors_that_pass_are_retried_and_told() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    let to = target.to_str().unwrap();
    let layer = "error?read=10%";
    let flaky = ["--source-layer", layer, "--retry-delay", "1ms", "--retries", "50"];
    let mut args = flaky.to_vec();
    args.extend(["--request-size", "64k", "pattern:8M", to]);
    let output = copy(&args);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("warning: retried "), "{said}");
    assert!(copy(&["--verify", "pattern:8M", to]).status.success());
    let mut never = vec!["--source-layer", layer, "--retries", "0"];
    never.extend(["--request-size", "64k", "pattern:8M", to]);
    assert_eq!(copy(&never).status.code(), Some(4), "the source failed");
}
