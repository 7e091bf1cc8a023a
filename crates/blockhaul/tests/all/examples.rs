//! Each example does what it says.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// Maximum time for an example to begin to listen.
const PATIENCE: Duration = Duration::from_secs(30);
/// Size of the disk of the example `device`, in bytes.
const SIZE: usize = 16 << 20;
/// Maximum number of lines of an example.
const LINES: usize = 60;

/// An example that Cargo has built beside this test.
fn example(name: &str) -> Command {
    let this = std::env::current_exe().unwrap();
    let path = this.parent().unwrap().with_file_name("examples").join(name);
    assert!(path.exists(), "{} is missing: cargo build -p blockhaul --examples", path.display());
    Command::new(path)
}

fn run(name: &str, args: &[&str]) -> Output {
    let output = example(name).args(args).output().unwrap();
    println!("{name} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// What an example prints that succeeds.
fn printed(name: &str, args: &[&str]) -> String {
    let output = run(name, args);
    assert!(output.status.success(), "{name}: {}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// An example that serves until it has read its standard input. Killed if the test fails.
struct ExampleServer {
    child: Child,
    input: Option<ChildStdin>,
}

impl ExampleServer {
    fn start(command: &mut Command, socket: &Path) -> ExampleServer {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take();
        let serving = ExampleServer { child, input };
        let begun = Instant::now();
        while UnixStream::connect(socket).is_err() {
            assert!(begun.elapsed() < PATIENCE, "nobody listens on {}", socket.display());
            std::thread::sleep(Duration::from_millis(5));
        }
        serving
    }

    /// Writes a line to its standard input.
    fn type_line(&mut self) {
        self.input.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Ends its standard input, and waits for its end.
    fn end(mut self) -> ExitStatus {
        drop(self.input.take());
        self.child.wait().unwrap()
    }
}

impl Drop for ExampleServer {
    fn drop(&mut self) {
        // It has ended, unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder with a disk of random data and holes.
struct Lab(tempfile::TempDir);

impl Lab {
    fn new() -> Lab {
        let lab = Lab(tempfile::tempdir().unwrap());
        let mut bytes = vec![0; SIZE];
        for at in (0..SIZE).filter(|at| at / 65536 % 3 == 0) {
            bytes[at] = (at * 7 + at / 4096) as u8;
        }
        fs::write(lab.path("disk"), bytes).unwrap();
        lab
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.text("socket"))
    }
}

#[test]
fn a_device_is_served_copied_and_compared() {
    let lab = Lab::new();
    let (disk, socket) = (lab.text("disk"), lab.path("socket"));
    let serving = ExampleServer::start(example("device").arg(&socket), &socket);
    let report = printed("copy", &[&disk, &lab.uri()]);
    assert!(report.contains(&format!("verified {SIZE} bytes")), "{report}");
    let compared = printed("compare", &[&disk, &lab.uri()]);
    assert_eq!(compared, format!("identical: {SIZE} and {SIZE} bytes\n"));
    fs::File::options().write(true).open(&disk).unwrap().write_all_at(b"changed", 4096).unwrap();
    assert_eq!(printed("compare", &[&disk, &lab.uri()]), "different from offset 4096 on\n");
    assert!(serving.end().success());
    assert!(!socket.exists());
}

#[test]
fn a_copy_shows_its_progress_and_is_cancelled() {
    let lab = Lab::new();
    let output = run("copy", &["sample:64G", "null:", "0"]);
    let progress = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(progress.lines().next().unwrap().ends_with("of 68719476736 bytes"), "{progress}");
    assert!(progress.contains("stopped before the end"), "{progress}");
    printed("copy", &[&lab.text("disk"), &lab.text("copy")]);
    assert!(fs::read(lab.path("disk")).unwrap() == fs::read(lab.path("copy")).unwrap());
}

#[test]
fn a_served_disk_is_backed_up_in_full_and_as_an_increment() {
    let lab = Lab::new();
    let (disk, target, socket) = (lab.text("disk"), lab.text("target"), lab.path("socket"));
    let arguments = [disk.as_str(), &lab.text("socket"), &target];
    let mut serving = ExampleServer::start(example("backup").args(arguments), &socket);
    let mut reports = BufReader::new(serving.child.stdout.take().unwrap()).lines();
    let full = reports.next().unwrap().unwrap();
    assert!(full.starts_with(&format!("{SIZE} bytes: ")), "{full}");
    let before = fs::read(&target).unwrap();
    assert!(before == fs::read(&disk).unwrap());
    fs::write(lab.path("part"), vec![7; 100_000]).unwrap();
    printed("copy", &[&lab.text("part"), &lab.uri()]);
    assert!(before == fs::read(&target).unwrap(), "nobody has asked for a backup yet");
    serving.type_line();
    let increment = reports.next().unwrap().unwrap();
    assert!(increment.starts_with("131072 bytes: "), "two blocks of the bitmap: {increment}");
    let after = fs::read(&target).unwrap();
    assert!(after[..100_000] == [7; 100_000] && after[100_000..] == before[100_000..]);
    assert!(serving.end().success());
    assert!(after == fs::read(&disk).unwrap());
}

#[test]
fn the_readme_has_the_example_of_the_crate() {
    let crate_text = include_str!("../../src/lib.rs");
    let lines = crate_text.lines().map(|line| line.trim_start_matches("//! "));
    let shown = lines.skip_while(|line| *line != "```").skip(1).take_while(|line| *line != "```");
    let shown: Vec<_> = shown.filter(|line| !line.starts_with("# ")).collect();
    let shown = shown.join("\n").replace("//!", "");
    assert!(include_str!("../../../../README.md").contains(&format!("```rust\n{shown}\n```")));
}

#[test]
fn examples_are_short() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 4);
    for file in files {
        let lines = fs::read_to_string(&file).unwrap().lines().count();
        assert!(lines < LINES, "{} has {lines} lines", file.display());
    }
}
