//! What a target holds after a copy that was refused: what it held before.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use blockhaul_testkit::image::pattern;
use blockhaul_testkit::tools::{self, ScratchDir, text};

const LIMIT: Duration = Duration::from_secs(60);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
/// What the target holds: longer than the source.
const OLD: usize = 700_000;

/// A folder with a source `src` of 300,000 bytes and a target `keep`.
fn scratch() -> ScratchDir {
    let scratch = ScratchDir::on_disk().unwrap();
    fs::write(scratch.file("src"), pattern(300_000)).unwrap();
    fs::write(scratch.file("keep"), pattern(OLD)).unwrap();
    scratch
}

fn copy(scratch: &ScratchDir) -> Command {
    let mut command = Command::new(OURS);
    command.current_dir(scratch.path()).args(["copy", "--no-progress"]);
    command
}

/// The copy ends with this status, says these words, and the target is as it was.
#[track_caller]
fn refused(scratch: &ScratchDir, command: &mut Command, status: i32, words: &str) {
    let output = tools::output(command, LIMIT).unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.contains(words), "{said}");
    assert!(fs::read(scratch.file("keep")).unwrap() == pattern(OLD), "the target: {said}");
}

/// A copy that is larger than files can be is refused.
#[track_caller]
fn too_large(scratch: &ScratchDir, target: &str) {
    let probe = scratch.file("probe");
    let takes = File::create(&probe).unwrap().set_len(8191 << 50).is_ok();
    fs::remove_file(&probe).unwrap();
    if takes {
        return tools::skip("files can have 8191 PiB here");
    }
    refused(scratch, copy(scratch).args(["zero:8191P", target]), 6, "cannot resize it");
}

#[test]
fn a_refused_copy_leaves_the_target_as_it_was() {
    let scratch = scratch();
    let layer = |layer: &str| ["--target-layer".to_string(), layer.to_string()];
    for (layer, words) in [
        (layer("readonly"), "the target is read-only"),
        (layer("truncate?truncate=100k"), "is smaller"),
        (layer("cache?dir=/nowhere/at/all"), "/nowhere/at/all"),
    ] {
        refused(&scratch, copy(&scratch).args(layer).args(["src", "keep"]), 3, words);
    }
    too_large(&scratch, "keep");
    // With --restart the journal of another copy stays, too.
    let begun = copy(&scratch).args(["--journal=j", "--rate=5M", "random:64M", "other"]).spawn();
    let mut begun = begun.unwrap();
    tools::until("it has a journal", || {
        assert!(begun.try_wait().unwrap().is_none(), "it ended before it had a journal");
        scratch.file("j").exists()
    });
    begun.kill().unwrap();
    begun.wait().unwrap();
    let journal = fs::read(scratch.file("j")).unwrap();
    let restart = ["--journal=j", "--restart", "--target-layer=readonly", "src", "keep"];
    refused(&scratch, copy(&scratch).args(restart), 3, "read-only");
    assert_eq!(fs::read(scratch.file("j")).unwrap(), journal);
}

#[test]
fn outputs_that_take_nothing_are_refused_before_the_target_is_touched() {
    let scratch = scratch();
    let args = ["--manifest", "/dev/full", "src", "keep"];
    refused(&scratch, copy(&scratch).args(args), 1, "No space left");
    let mut digest = copy(&scratch);
    digest.args(["--digest=sha256", "src", "keep"]);
    let full = File::options().write(true).open("/dev/full").unwrap();
    digest.stderr(Stdio::piped()).stdout(full);
    let output = digest.spawn().unwrap().wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(fs::read(scratch.file("keep")).unwrap() == pattern(OLD));
}

#[test]
fn a_job_touches_no_target_before_all_are_open() {
    let scratch = scratch();
    let job = "[[disk]]\nsource='src'\ntarget='keep'\n[[disk]]\nsource='src'\ntarget='fresh'\n\
               [[disk]]\nsource='src'\ntarget='nbd+unix:///?socket=/nowhere'\n";
    fs::write(scratch.file("job.toml"), job).unwrap();
    refused(&scratch, copy(&scratch).args(["--job", "job.toml"]), 3, "nothing was copied");
    assert!(!scratch.file("fresh").exists(), "it was not there before");
}

#[test]
fn a_file_that_was_created_for_a_refused_copy_is_removed() {
    let scratch = scratch();
    std::os::unix::fs::symlink("behind", scratch.file("link")).unwrap();
    for target in ["fresh", "link"] {
        let args = ["--target-layer=readonly", "src", target];
        refused(&scratch, copy(&scratch).args(args), 3, "read-only");
        too_large(&scratch, target);
    }
    let mut left: Vec<_> =
        fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["keep", "link", "src"]);
    // What was there stays, also if it is empty.
    File::create(scratch.file("empty")).unwrap();
    too_large(&scratch, "empty");
    assert!(scratch.file("empty").exists());
}

#[test]
fn devices_that_are_made_of_the_target_are_no_source_of_it() {
    let scratch = scratch();
    fs::create_dir(scratch.file("folder")).unwrap();
    fs::hard_link(scratch.file("keep"), scratch.file("folder/keep")).unwrap();
    for source in [
        "split:src,keep",
        "split:src,folder/keep",
        "partitioning:src,keep",
        "partitioning:src?file=keep",
        "split:src,file:keep",
        "split:zero:1M,split:src%2ckeep",
        "partitioning:src?file=split:zero:1M%2ckeep",
        "file:folder/keep",
    ] {
        refused(&scratch, copy(&scratch).args([source, "keep"]), 2, "are the same");
    }
    refused(&scratch, copy(&scratch).args(["keep", "split:src,keep"]), 2, "");
    let job = "[[disk]]\nsource='src'\ntarget='other'\n[[disk]]\nsource='split:src,keep'\ntarget='x'\n\
               [[disk]]\nsource='src'\ntarget='keep'\n";
    fs::write(scratch.file("job.toml"), job).unwrap();
    refused(&scratch, copy(&scratch).args(["--job", "job.toml"]), 2, "disk 2: its source");
    assert!(!scratch.file("other").exists() && !scratch.file("x").exists());
}

#[test]
fn a_pipe_that_is_the_other_side_is_refused() {
    let scratch = scratch();
    let keep = scratch.file("keep");
    let open = |options: &mut fs::OpenOptions| -> OwnedFd { options.open(&keep).unwrap().into() };
    let from = open(File::options().read(true));
    let output = with_pipes(copy(&scratch).args(["-", "keep"]).stdin(from), Stdio::null());
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(fs::read(&keep).unwrap() == pattern(OLD));
    for append in [false, true] {
        let into = open(File::options().read(true).write(true).append(append));
        let output = with_pipes(copy(&scratch).args(["keep", "-"]), into.into());
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        assert!(fs::read(&keep).unwrap() == pattern(OLD));
    }
    // Another file is none.
    let from = File::open(scratch.file("src")).unwrap();
    let copied = with_pipes(copy(&scratch).args(["-", "keep"]).stdin(from), Stdio::null());
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    assert!(same(&keep, &scratch.file("src")));
}

#[test]
fn an_empty_pipe_does_not_empty_a_file() {
    let scratch = scratch();
    let keep = scratch.file("keep");
    fs::write(scratch.file("none"), "").unwrap();
    let (read, write) = std::io::pipe().unwrap();
    drop(write);
    let nothing: [OwnedFd; 3] = [
        read.into(),
        File::open("/dev/null").unwrap().into(),
        File::open(scratch.file("none")).unwrap().into(),
    ];
    for from in nothing {
        let output = with_pipes(copy(&scratch).args(["-", "keep"]).stdin(from), Stdio::null());
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        let said = text(&output.stderr);
        assert!(said.contains(&format!("is empty: {OLD} bytes of keep would be lost")), "{said}");
        assert!(fs::read(&keep).unwrap() == pattern(OLD));
    }
    // One whose first byte comes late is not empty. Nothing shows that the copy waits for it.
    let (read, mut write) = std::io::pipe().unwrap();
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        std::io::Write::write_all(&mut write, b"late").unwrap();
    });
    let output = with_pipes(copy(&scratch).args(["-", "keep"]).stdin(read), Stdio::null());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read(&keep).unwrap(), b"late");
    late.join().unwrap();
}

/// Runs a copy with the standard input that it has, and this standard output.
fn with_pipes(command: &mut Command, stdout: Stdio) -> Output {
    command.stdout(stdout).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap()
}

fn same(one: &Path, two: &Path) -> bool {
    fs::read(one).unwrap() == fs::read(two).unwrap()
}
