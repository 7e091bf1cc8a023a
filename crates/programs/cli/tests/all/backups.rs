//! What `docs/backups.md` says about a disk in use, carried out with QEMU: its commands are taken from
//! the page.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, text};

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
pub struct Qmp(BufReader<UnixStream>);

impl Qmp {
    pub fn connect(path: &Path) -> Qmp {
        let stream = tools::until_ok("QEMU listens", || UnixStream::connect(path));
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut qmp = Qmp(BufReader::new(stream));
        qmp.0.read_line(&mut String::new()).unwrap();
        qmp.done(r#"{"execute": "qmp_capabilities"}"#);
        qmp
    }

    /// Whether a command was carried out.
    fn ask(&mut self, line: &str) -> Result<(), String> {
        self.answer(line).map(drop)
    }

    /// The reply to a command.
    pub fn answer(&mut self, line: &str) -> Result<serde_json::Value, String> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        loop {
            let mut answer = String::new();
            assert!(self.0.read_line(&mut answer).unwrap() > 0, "it has ended");
            let found: serde_json::Value = serde_json::from_str(&answer).unwrap();
            match (found.get("return"), found.get("error")) {
                (Some(reply), _) => return Ok(reply.clone()),
                (_, Some(error)) => return Err(error.to_string()),
                // An event.
                _ => {}
            }
        }
    }

    #[track_caller]
    pub fn done(&mut self, line: &str) {
        if line.contains("blockdev-del") {
            // A node is in use until the job has ended.
            tools::until_ok(line, || self.ask(line));
        } else if let Err(error) = self.ask(line) {
            panic!("{line}: {error}");
        }
    }
}

#[test]
fn the_page_backs_up_a_disk_in_use() {
    let daemon = require_peer!("qemu-storage-daemon");
    let qemu_img = require_peer!("qemu-img");
    let scratch = ScratchDir::new().unwrap();
    let file = |name: &str| scratch.file(name).display().to_string();
    let before = file("before");
    let backup = file("backup");
    let overlay = file("overlay");
    let make = |args: &[&str]| {
        let output = tools::output(qemu_img.command().args(args), LIMIT).unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    blockhaul(&["copy", "sample:64M", &before]);
    make(&["convert", "-O", "qcow2", &before, &file("vm")]);
    let control = scratch.socket("q");
    let socket = scratch.socket("n").display().to_string();
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
    let then = uri("backup");
    let now = uri("now");
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

/// A daemon with a disk of 64 MiB of which a bitmap says what was written, and with an export `then`
/// that shows the disk at a point in time, and nothing where the bitmap is clean.
pub struct PointInTime {
    daemon: Child,
    _qmp: Qmp,
    pub socket: PathBuf,
    /// The disk when the bitmap began, and at the point in time.
    pub before: Vec<u8>,
    pub then: Vec<u8>,
    /// What was written in between: offsets and lengths.
    pub dirty: Vec<(usize, usize)>,
}

impl PointInTime {
    /// `None` where there is no QEMU.
    pub fn begin(scratch: &ScratchDir) -> Option<PointInTime> {
        let daemon = PeerProgram::require("qemu-storage-daemon")?;
        let img = PeerProgram::require("qemu-img")?;
        let file = |name: &str| scratch.file(name).display().to_string();
        let disk = scratch.file("disk");
        let control = scratch.socket("q");
        let socket = scratch.socket("n");
        blockhaul(&["copy", "random:64M?seed=1", disk.to_str().unwrap()]);
        let before = std::fs::read(&disk).unwrap();
        let made =
            img.command().args(["create", "-q", "-f", "qcow2", &file("fleece"), "64M"]).status();
        assert!(made.unwrap().success());
        let node = |name: &str, driver: &str| {
            format!("driver={driver},discard=unmap,file.driver=file,file.discard=unmap,{name}")
        };
        let mut daemon = daemon.tied_command();
        daemon
            .args([
                "--blockdev",
                &node(&format!("node-name=disk0,file.filename={}", file("disk")), "raw"),
            ])
            .args([
                "--blockdev",
                &node(&format!("node-name=fleece,file.filename={}", file("fleece")), "qcow2"),
            ])
            .args([
                "--chardev",
                &format!("socket,id=c,path={},server=on,wait=off", control.display()),
            ])
            .args(["--monitor", "chardev=c"])
            .stdin(Stdio::null());
        let daemon = daemon.spawn().unwrap();
        let mut qmp = Qmp::connect(&control);
        let place = socket.display();
        qmp.done(&format!(
            r#"{{"execute": "nbd-server-start", "arguments": {{"max-connections": 0, "addr": {{"type": "unix", "data": {{"path": "{place}"}}}}}}}}"#
        ));
        qmp.done(r#"{"execute": "block-dirty-bitmap-add", "arguments": {"node": "disk0", "name": "monday"}}"#);
        let export = |node: &str, name: &str, more: &str| {
            format!(
                r#"{{"execute": "block-export-add", "arguments": {{"type": "nbd", "id": "{name}", "node-name": "{node}", "name": "{name}", "writable": true{more}}}}}"#
            )
        };
        qmp.done(&export("disk0", "early", ""));
        let uri = |name: &str| format!("nbd+unix:///{name}?socket={place}");
        // Data, with a hole behind it that a request of its own would find.
        let mut then = before.clone();
        let written = scratch.file("written");
        let dirty = vec![(2 << 20, 65536), (8 << 20, 10 << 20), (40 << 20, 3 << 20)];
        std::fs::File::create(&written).unwrap().set_len(64 << 20).unwrap();
        let data = std::fs::File::options().write(true).open(&written).unwrap();
        for &(at, len) in &dirty {
            let hole = if len == 10 << 20 { 4 << 20 } else { 0 };
            then[at..at + len].fill(0);
            then[at + hole..at + len].fill(0x5a);
            data.write_all_at(&then[at + hole..at + len], (at + hole) as u64).unwrap();
            let range = format!("{at}:{len}");
            let begun = Instant::now();
            loop {
                blockhaul(&["copy", "--range", &range, written.to_str().unwrap(), &uri("early")]);
                // QEMU 10 remembers for ever that a range was data if it is asked about it while it is zeroed.
                let map = blockhaul(&["map", "--range", &range, &uri("early")]);
                if (hole > 0) == map.contains("zero") {
                    break;
                }
                assert!(begun.elapsed() < LIMIT, "{map}");
            }
        }
        for line in [
            r#"{"execute": "block-export-del", "arguments": {"id": "early"}}"#,
            r#"{"execute": "block-dirty-bitmap-disable", "arguments": {"node": "disk0", "name": "monday"}}"#,
            r#"{"execute": "blockdev-add", "arguments": {"driver": "copy-before-write", "node-name": "cbw", "file": "disk0", "target": "fleece", "discard": "unmap", "bitmap": {"node": "disk0", "name": "monday"}}}"#,
            r#"{"execute": "blockdev-add", "arguments": {"driver": "snapshot-access", "node-name": "then", "file": "cbw", "discard": "unmap"}}"#,
        ] {
            qmp.done(line);
        }
        qmp.done(&export("then", "then", r#", "bitmaps": [{"node": "disk0", "name": "monday"}]"#));
        qmp.done(&export("cbw", "now", ""));
        // The machine goes on writing.
        blockhaul(&["copy", "--range", "0:16M", "random:64M?seed=2", &uri("now")]);
        Some(PointInTime { daemon, _qmp: qmp, socket, before, then, dirty })
    }

    /// A copy of the export over this socket onto a copy of the disk as it was; what was said.
    #[track_caller]
    fn copy(&self, socket: &Path, target: &Path, more: &[&str]) -> String {
        std::fs::write(target, &self.before).unwrap();
        let said = self.copies(socket, target, more);
        let total: usize = self.dirty.iter().map(|range| range.1).sum();
        assert!(said.contains(&format!(" {total} bytes: ")), "{said}");
        said
    }

    /// The same onto what is there.
    #[track_caller]
    fn copies(&self, socket: &Path, target: &Path, more: &[&str]) -> String {
        let uri = format!("nbd+unix:///then?socket={}", socket.display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockhaul"));
        command.args(["copy", "-v", "--bitmap", "qemu:dirty-bitmap:monday"]).args(more);
        let output = tools::output(command.arg(uri).arg(target), LIMIT).unwrap();
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(!said.contains("warning") && !said.contains("WARN"), "{said}");
        assert!(std::fs::read(target).unwrap() == self.then, "{said}");
        said
    }
}

impl Drop for PointInTime {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// Passes connections on to a server that knows no extended headers for these clients: an option of
/// theirs gets a number that no server knows.
fn without_extended_headers(listen: &Path, server: PathBuf) {
    const OTHER: [u8; 4] = 0x7fff_0011_u32.to_be_bytes();
    const EXTENDED: [u8; 4] = 11_u32.to_be_bytes();
    let listener = UnixListener::bind(listen).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let mut server = UnixStream::connect(&server).unwrap();
            let mut to_client = client.try_clone().unwrap();
            let mut from_server = server.try_clone().unwrap();
            // The end of a connection ends its threads.
            std::thread::spawn(move || -> std::io::Result<()> {
                let mut head = [0; 4];
                client.read_exact(&mut head)?;
                server.write_all(&head)?;
                loop {
                    let mut head = [0; 16];
                    client.read_exact(&mut head)?;
                    let go = head[8..12] == 7_u32.to_be_bytes();
                    if head[8..12] == EXTENDED {
                        head[8..12].copy_from_slice(&OTHER);
                    }
                    let mut rest =
                        vec![0; u32::from_be_bytes(head[12..].try_into().unwrap()) as usize];
                    client.read_exact(&mut rest)?;
                    server.write_all(&[&head[..], &rest].concat())?;
                    if go {
                        std::io::copy(&mut client, &mut server)?;
                        return server.shutdown(std::net::Shutdown::Write);
                    }
                }
            });
            std::thread::spawn(move || -> std::io::Result<()> {
                let mut greeting = [0; 18];
                from_server.read_exact(&mut greeting)?;
                to_client.write_all(&greeting)?;
                loop {
                    let mut head = [0; 20];
                    from_server.read_exact(&mut head)?;
                    let last =
                        head[8..12] == 7_u32.to_be_bytes() && head[12..16] == 1_u32.to_be_bytes();
                    if head[8..12] == OTHER {
                        head[8..12].copy_from_slice(&EXTENDED);
                    }
                    let mut rest =
                        vec![0; u32::from_be_bytes(head[16..].try_into().unwrap()) as usize];
                    from_server.read_exact(&mut rest)?;
                    to_client.write_all(&[&head[..], &rest].concat())?;
                    if last {
                        std::io::copy(&mut from_server, &mut to_client)?;
                        return to_client.shutdown(std::net::Shutdown::Write);
                    }
                }
            });
        }
    });
}

#[test]
fn what_a_bitmap_of_qemu_calls_clean_is_not_asked_about() {
    let scratch = ScratchDir::new().unwrap();
    let Some(point) = PointInTime::begin(&scratch) else { return };
    let target = scratch.file("target");
    // The hole is found without reading it.
    let said = point.copy(&point.socket, &target, &[]);
    assert!(said.contains(&format!("{} zeroed", 4 << 20)), "{said}");
    let journal = scratch.file("journal").display().to_string();
    point.copy(&point.socket, &target, &["--journal", &journal]);
    point.copy(&point.socket, &target, &["--verify"]);
    // Where requests cannot name a context, a reply in two of them may break the protocol.
    let relay = scratch.socket("r");
    without_extended_headers(&relay, point.socket.clone());
    point.copy(&relay, &target, &[]);
    point.copy(&relay, &target, &["--journal", &journal, "--verify"]);
}

#[test]
fn the_overlay_of_qemu_shrinks_while_it_is_copied() {
    use std::os::unix::fs::MetadataExt as _;
    let scratch = ScratchDir::new().unwrap();
    let Some(point) = PointInTime::begin(&scratch) else { return };
    let [target, journal] = ["target", "journal"].map(|name| scratch.file(name));
    let used = || std::fs::metadata(scratch.file("fleece")).unwrap().blocks() * 512;
    let before = used();
    let journal = journal.display().to_string();
    let args = ["--discard-source", "--journal", &journal];
    let said = point.copy(&point.socket, &target, &args);
    let total: usize = point.dirty.iter().map(|range| range.1).sum();
    assert!(said.contains(&format!("{total} bytes discarded at the source")), "{said}");
    // The machine has overwritten 4 MiB of data, and a hole, that the bitmap calls dirty.
    assert!(before > 4 << 20 && used() < 1 << 20, "{before} bytes before, {} now", used());
    // The bitmap is still there, and what it selects is not.
    let said = point.copies(&point.socket, &target, &args);
    assert!(said.contains("nothing is copied: the journal"), "{said}");
}
