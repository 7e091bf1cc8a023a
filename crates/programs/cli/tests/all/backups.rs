//! What `docs/backups.md` says about a disk in use, carried out with QEMU: its commands are taken from
//! the page.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, Scratch, text};

const LIMIT: Duration = Duration::from_secs(120);
const PAGE: &str = include_str!("../../../../../docs/backups.md");

#[track_caller]
fn blockhaul(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockhaul"));
    let output = tools::output(command.args(args), LIMIT).unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A control socket of QEMU's.
struct Qmp(BufReader<UnixStream>);

impl Qmp {
    fn connect(path: &Path) -> Qmp {
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut qmp = Qmp(BufReader::new(stream));
        qmp.0.read_line(&mut String::new()).unwrap();
        qmp.done(r#"{"execute": "qmp_capabilities"}"#);
        qmp
    }

    /// Whether a command was carried out.
    fn ask(&mut self, line: &str) -> Result<(), String> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        loop {
            let mut answer = String::new();
            assert!(self.0.read_line(&mut answer).unwrap() > 0, "it has ended");
            let found: serde_json::Value = serde_json::from_str(&answer).unwrap();
            match (found.get("return"), found.get("error")) {
                (Some(_), _) => return Ok(()),
                (_, Some(error)) => return Err(error.to_string()),
                // An event.
                _ => {}
            }
        }
    }

    #[track_caller]
    fn done(&mut self, line: &str) {
        let begun = Instant::now();
        while let Err(error) = self.ask(line) {
            // A node is in use until the job has ended.
            let later = line.contains("blockdev-del") && begun.elapsed() < LIMIT;
            assert!(later, "{line}: {error}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn the_page_backs_up_a_disk_in_use() {
    let (daemon, qemu_img) = (require_peer!("qemu-storage-daemon"), require_peer!("qemu-img"));
    let scratch = Scratch::new().unwrap();
    let file = |name: &str| scratch.file(name).display().to_string();
    let (before, backup, overlay) = (file("before"), file("backup"), file("overlay"));
    let make = |args: &[&str]| {
        let output = tools::output(qemu_img.command().args(args), LIMIT).unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    blockhaul(&["copy", "sample:64M", &before]);
    make(&["convert", "-O", "qcow2", &before, &file("vm")]);
    let (control, socket) = (scratch.socket("q"), scratch.socket("n").display().to_string());
    let mut child = daemon
        .tied_command()
        .args(["--blockdev", &format!("driver=file,filename={},node-name=file0", file("vm"))])
        .args(["--blockdev", "driver=qcow2,file=file0,node-name=disk0"])
        .args(["--chardev", &format!("socket,id=c,path={},server=on,wait=off", control.display())])
        .args(["--monitor", "chardev=c"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();

    let mut qmp = Qmp::connect(&control);
    let blocks: Vec<String> = PAGE
        .split("```json\n")
        .skip(1)
        .map(|block| block.split("```").next().unwrap())
        .map(|block| {
            block.replace("/run/vm.nbd", &socket).replace("/var/tmp/overlay.qcow2", &overlay)
        })
        .collect();
    let [begin, end, next] = &blocks[..] else { panic!("{blocks:?}") };
    let uri = |export: &str| format!("nbd+unix:///{export}?socket={socket}");
    let (then, now) = (uri("backup"), uri("now"));
    // What the machine does is done here through an export of the disk itself.
    let machine = r#"{"execute": "block-export-add", "arguments": {"type": "nbd", "id": "now",
        "node-name": "disk0", "name": "now", "writable": true}}"#
        .replace('\n', " ");

    // A machine has had its disk before a backup begins.
    let carry_out = |qmp: &mut Qmp, lines: &str| {
        make(&["create", "-q", "-f", "qcow2", &overlay, "64M"]);
        let (start, rest) = lines.split_once('\n').unwrap();
        qmp.done(start);
        qmp.done(&machine);
        rest.lines().for_each(|line| qmp.done(line));
    };
    carry_out(&mut qmp, begin);
    blockhaul(&["copy", "random:4M?seed=1", &now]);
    blockhaul(&["copy", &then, &backup]);
    blockhaul(&["compare", &before, &backup]);
    let after = file("after");
    blockhaul(&["copy", &now, &after]);
    end.lines().for_each(|line| qmp.done(line));

    carry_out(&mut qmp, next);
    blockhaul(&["copy", "random:4M?seed=2", &now]);
    blockhaul(&["copy", "--bitmap", "qemu:dirty-bitmap:monday", &then, &backup]);
    blockhaul(&["compare", &after, &backup]);

    child.kill().unwrap();
    child.wait().unwrap();
}
