//! Each pair of doors of one process to one storage: refused, shared, or warned about. The rules are
//! in `blockhaul_catalog::Claims`.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};
use blockhaul_wire::{ReplyForm, magic};
use serde_json::{Value, json};

use crate::qmp::Qmp;
use crate::served_disk::{ChildGuard, LIMIT, OURS, blockhaul, succeed};

const SIZE: u64 = 4 << 20;
const OPEN: Option<i32> = Some(3);

/// Storage in a directory of its own: `x.raw`, and `x.qcow2` with an overlay `over.qcow2`.
struct Storage(ScratchDir);

impl Storage {
    fn new() -> Storage {
        let scratch = ScratchDir::on_disk().unwrap();
        let storage = Storage(scratch);
        fs::write(storage.path("x.raw"), vec![0x11; usize::try_from(SIZE).unwrap()]).unwrap();
        succeed(&["copy", "--no-progress", &storage.path("x.raw"), &storage.image("x")]);
        storage
    }

    fn path(&self, name: &str) -> String {
        self.0.file(name).to_str().unwrap().to_string()
    }

    fn image(&self, name: &str) -> String {
        format!("qcow2:{}", self.path(&format!("{name}.qcow2")))
    }

    /// An image over a raw file.
    fn overlay(&self, name: &str, base: &str) -> String {
        let image = self.image(name);
        let described = format!("{image}?backing={base}");
        let described = described.replace("qcow2:", "");
        let target = format!("qcow2:{described}");
        succeed(&["create", &target, &SIZE.to_string()]);
        target
    }

    /// A server with these exports and a control socket.
    fn serve(&self, args: &[&str]) -> Result<PeerServer, String> {
        let control = self.path("ctl");
        let args = [&["--control", control.as_str()], args].concat();
        PeerServer::blockhaul(OURS.as_ref(), &self.0.socket("nbd"), &args)
    }

    /// A server of one device.
    fn serve_other(&self, device: &str) -> PeerServer {
        PeerServer::blockhaul(OURS.as_ref(), &self.0.socket("other"), &[device]).unwrap()
    }

    /// Runs a server until its first command has ended; status and messages.
    fn outcome(&self, args: &[&str]) -> (Option<i32>, String) {
        let socket = self.0.socket("once");
        let socket = socket.to_str().unwrap();
        let args = [&["serve", "-U", socket], args, &["--run", "true"]].concat();
        let output = blockhaul(&args);
        (output.status.code(), text(&output.stderr))
    }

    fn ctl(&self, args: &[&str]) -> (Option<i32>, String) {
        let output = blockhaul(&[&["ctl", &self.path("ctl")], args].concat());
        (output.status.code(), text(&output.stderr))
    }
}

#[track_caller]
fn assert_refused((status, said): (Option<i32>, String), owners: &[&str]) {
    assert_eq!(status, OPEN, "{said}");
    assert!(owners.iter().all(|owner| said.contains(owner)), "{owners:?}: {said}");
}

#[track_caller]
fn assert_refused_by_ctl((status, said): (Option<i32>, String), owners: &[&str]) {
    assert_eq!(status, Some(1), "{said}");
    assert!(owners.iter().all(|owner| said.contains(owner)), "{owners:?}: {said}");
}

#[track_caller]
fn assert_allowed((status, said): (Option<i32>, String)) {
    assert_eq!((status, said.as_str()), (Some(0), ""));
}

#[track_caller]
fn assert_allowed_quietly((status, said): (Option<i32>, String)) {
    assert_eq!(status, Some(0), "{said}");
}

#[track_caller]
fn assert_warned((status, said): (Option<i32>, String)) {
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("half-finished writes"), "{said}");
}

fn export(name: &str, device: &str) -> String {
    format!("{name}={device}")
}

/// Both orders of two exports, each with its options: status and messages.
fn exports(
    storage: &Storage,
    one: (&str, &[&str]),
    other: (&str, &[&str]),
) -> [(Option<i32>, String); 2] {
    [(one, other), (other, one)].map(|(first, second)| {
        let first = [&["--export", "a=[", first.0], first.1, &["]"]].concat();
        let second = [&["--export", "b=[", second.0], second.1, &["]"]].concat();
        storage.outcome(&[first, second].concat())
    })
}

/// `NBD_FLAG_READ_ONLY`.
const READ_ONLY: u16 = 2;

const WRITE: &[&str] = &[];
const READ: &[&str] = &["-r"];

#[test]
fn two_exports_do_not_write_one_storage() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    fs::hard_link(&raw, storage.path("link.raw")).unwrap();
    std::os::unix::fs::symlink(&raw, storage.path("symbolic.raw")).unwrap();
    let image = storage.image("x");
    let overlay = storage.overlay("over", &raw);
    let [link, symbolic] = ["link.raw", "symbolic.raw"].map(|name| storage.path(name));
    let held = format!("file:{}", storage.path("x.qcow2"));
    for (one, other) in [
        (&raw, &raw),
        (&raw, &link),
        (&raw, &symbolic),
        (&raw, &overlay),
        (&image, &image),
        (&image, &held),
    ] {
        for outcome in exports(&storage, (one, WRITE), (other, WRITE)) {
            assert_refused(outcome, &["export \"a\"", "export \"b\""]);
        }
    }
}

#[test]
fn readers_beside_a_writer_are_refused_for_images_and_warned_about_for_raw_files() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    let image = storage.image("x");
    let overlay = storage.overlay("over", &raw);
    let held = format!("file:{}", storage.path("x.qcow2"));
    for reader in [READ, &["--layer", "cow"]] {
        for outcome in exports(&storage, (&raw, WRITE), (&raw, reader)) {
            assert_warned(outcome);
        }
    }
    for (writer, reader) in
        [(&image, &image), (&image, &held), (&raw, &overlay), (&overlay, &overlay)]
    {
        for outcome in exports(&storage, (writer, WRITE), (reader, READ)) {
            assert_refused(outcome, &["export \"a\"", "export \"b\""]);
        }
    }
}

#[test]
fn contents_in_a_format_are_not_read_beside_a_writer() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    for (program, args) in [("gzip", &["-k", "x.raw"][..]), ("xz", &["-k", "-0", "x.raw"])] {
        let mut command = Command::new(program);
        let done = tools::output(command.args(args).current_dir(storage.0.path()), LIMIT).unwrap();
        assert!(done.status.success(), "{program}: {}", text(&done.stderr));
    }
    let [gz, xz] = ["x.raw.gz", "x.raw.xz"].map(|name| storage.path(name));
    let descriptor = storage.path("x.vmdk");
    let lines = format!(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
         createType=\"monolithicFlat\"\nRW {} FLAT \"x.raw\" 0\n",
        SIZE / 512
    );
    fs::write(&descriptor, lines).unwrap();
    let flat = format!("vmdk:{descriptor}?names=allow");
    let as_qcow2 = format!("as-qcow2:{raw}");
    let as_vmdk = format!("as-vmdk:{raw}");
    for (file, reader, options) in [
        (&raw, &as_qcow2, READ),
        (&raw, &as_vmdk, READ),
        (&raw, &flat, READ),
        (&descriptor, &flat, READ),
        (&gz, &gz, &["--layer", "gz"]),
        (&xz, &xz, &["--layer", "xz"]),
    ] {
        let file = format!("file:{file}");
        for outcome in exports(&storage, (&file, WRITE), (reader, options)) {
            assert_refused(outcome, &["export \"a\"", "export \"b\"", "as a disk image"]);
        }
        let [outcome, _] = exports(&storage, (&file, READ), (reader, options));
        assert_allowed(outcome);
    }
}

#[test]
fn a_device_of_several_parts_does_not_write_one_storage_twice() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    let [link, symbolic, other] =
        ["link.raw", "symbolic.raw", "other.raw"].map(|name| storage.path(name));
    fs::copy(&raw, &other).unwrap();
    fs::hard_link(&raw, &link).unwrap();
    std::os::unix::fs::symlink(&raw, &symbolic).unwrap();
    let image = storage.image("x");
    for parts in [
        format!("split:{raw},{raw}"),
        format!("split:{raw},{other},{link}"),
        format!("split:{symbolic},{raw}"),
        format!("split:{image},{image}"),
        format!("split:{raw},split:{other}%2c{link}"),
        format!("partitioning:{raw},{link}"),
    ] {
        assert_refused(storage.outcome(&[&parts]), &["by part 1 of the default export; part "]);
        assert_allowed(storage.outcome(&["-r", &parts]));
    }
    let [one, two] = ["one", "two"].map(|name| storage.overlay(name, &other).replace('?', "%3f"));
    let [unlocked, unlocked_link] = [&raw, &link].map(|path| format!("file:{path}%3flock=off"));
    for parts in [
        format!("split:{raw},{other}"),
        // They share what neither writes.
        format!("split:{one},{two}"),
        format!("split:{unlocked},{unlocked_link}"),
    ] {
        assert_allowed(storage.outcome(&[&parts]));
    }
    // The clients of one device share it.
    assert_allowed(storage.outcome(&["--per-client", &format!("split:{raw},{other}")]));
}

#[test]
fn two_exports_of_parts_of_a_disk_write_it_without_locks() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    let unlocked = format!("file:{raw}?lock=off");
    let [front, back]: [&[&str]; 2] =
        [&["--layer", "offset?range=1M"], &["--layer", "offset?offset=1M"]];
    let [outcome, _] = exports(&storage, (&raw, front), (&raw, back));
    assert_refused(outcome, &["lock=off", "do not overlap"]);
    let [outcome, _] = exports(&storage, (&unlocked, front), (&unlocked, back));
    assert_allowed(outcome);
}

#[test]
fn readers_share_any_storage() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    let overlay = storage.overlay("over", &raw);
    let other = storage.overlay("other", &raw);
    let image = storage.image("x");
    for (one, second) in [(&raw, &raw), (&image, &image), (&overlay, &raw), (&raw, &image)] {
        let [outcome, _] = exports(&storage, (one, READ), (second, READ));
        assert_allowed(outcome);
    }
    // Two images over one backing file, which neither changes.
    let [outcome, _] = exports(&storage, (&overlay, WRITE), (&other, WRITE));
    assert_allowed(outcome);
}

#[test]
fn a_directory_and_a_path_in_it_meet() {
    let storage = Storage::new();
    let folder = format!("dir:{}", storage.0.path().display());
    let raw = export("a", &storage.path("x.raw"));
    let server = storage.serve(&["--export", &raw, "--export", &export("d", &folder)]).unwrap();
    // A file that cannot be written is served for reading.
    let said = succeed(&["info", "--json", &server.uri("d/x.raw")]);
    assert!(said.contains("\"is_read_only\": true"), "{said}");
    assert!(server.said().contains("half-finished writes"), "{}", server.said());
}

#[test]
fn two_names_of_a_file_in_a_directory_do_not_write_it() {
    let storage = Storage::new();
    fs::hard_link(storage.path("x.raw"), storage.path("y.raw")).unwrap();
    let folder = format!("dir:{}", storage.0.path().display());
    let server = storage.serve(&[&folder]).unwrap();
    let open = |name: &str| {
        let mut client = Conversation::connect(server.socket()).unwrap();
        let flags = client.open(name, ReplyForm::Structured).unwrap().flags;
        (client, flags & READ_ONLY == 0)
    };
    let (one, writes) = open("x.raw");
    assert!(writes);
    let (same, writes) = open("x.raw");
    assert!(writes, "the clients of a name share the file");
    let (other, writes) = open("y.raw");
    assert!(!writes);
    let said = server.says("half-finished writes").unwrap();
    assert!(said.contains("by \"x.raw\" of") && said.contains("\"y.raw\" of"), "{said}");
    drop((one, same, other));
    // The server sees later that clients have left.
    tools::until("the other name can be written", || open("y.raw").1);
}

#[test]
fn writers_that_both_leave_out_locks_share_a_raw_file_but_no_image() {
    let storage = Storage::new();
    let unlocked = format!("file:{}?lock=off", storage.path("x.raw"));
    let [outcome, _] = exports(&storage, (&unlocked, WRITE), (&unlocked, WRITE));
    assert_allowed(outcome);
    for outcome in exports(&storage, (&unlocked, WRITE), (&storage.path("x.raw"), WRITE)) {
        assert_refused(outcome, &["lock=off"]);
    }
    let image = format!("qcow2:file:{}%3flock=off", storage.path("x.qcow2"));
    let [outcome, _] = exports(&storage, (&image, WRITE), (&image, WRITE));
    assert_refused(outcome, &["disk image"]);
}

#[test]
fn an_added_export_obeys_and_a_removed_one_lets_go() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    let image = storage.image("x");
    let named = [export("a", &raw), export("i", &image)];
    let server = storage.serve(&["--export", &named[0], "--export", &named[1]]).unwrap();
    // A client of another export has seen all of them.
    let mut client = Conversation::connect(server.socket()).unwrap();
    client.hello(3).unwrap();
    assert_eq!(client.option(magic::OPT_LIST, &[]).unwrap().len(), 3);
    client.go("a").unwrap();
    for device in [&raw, &image] {
        let outcome = storage.ctl(&["export-add", &export("b", device)]);
        assert_refused_by_ctl(outcome, &["export \"b\""]);
    }
    let reader = storage.ctl(&["export-add", "-r", &export("b", &image)]);
    assert_refused_by_ctl(reader, &["export \"i\""]);
    // The warning is in the reply, too.
    assert_warned(storage.ctl(&["export-add", "-r", &export("b", &raw)]));
    let added = |device: &str| {
        let args = ["--json", &storage.path("ctl"), "export-add", "-r", &export("c", device)];
        let reply = succeed(&[&["ctl"], &args[..]].concat());
        assert_allowed(storage.ctl(&["export-remove", "c"]));
        serde_json::from_str::<Value>(&reply).unwrap()["warnings"].clone()
    };
    let warnings = added(&raw);
    let words = ["half-finished writes", "export \"a\"", "export \"c\""];
    assert!(words.iter().all(|word| warnings[0].as_str().unwrap().contains(word)), "{warnings}");
    assert_eq!(added("zero:1M"), json!([]));
    assert_allowed(storage.ctl(&["export-remove", "i"]));
    assert_allowed(storage.ctl(&["export-add", &export("j", &image)]));
    assert_eq!(client.read(0, 4).unwrap(), [0x11; 4]);
}

#[test]
fn each_client_has_a_handle_of_a_raw_file_but_none_of_an_image_that_is_written() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    let server = storage.serve(&["--per-client", &raw]).unwrap();
    let uri = server.uri("");
    let both = format!("copy --no-progress --connections 2 sample:4M {uri}");
    succeed(&both.split(' ').collect::<Vec<_>>());
    assert!(server.stop().unwrap().success());
    let (status, said) = storage.outcome(&["--per-client", &storage.image("x")]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("--per-client") && said.contains("disk image"), "{said}");
    assert_allowed(storage.outcome(&["-r", "--per-client", &storage.image("x")]));
}

#[test]
fn no_job_writes_to_storage_that_is_open() {
    let storage = Storage::new();
    let source = storage.path("source.raw");
    fs::write(&source, vec![0x22; usize::try_from(SIZE).unwrap()]).unwrap();
    let raw = storage.path("x.raw");
    let base = storage.path("base.raw");
    fs::write(&base, vec![0x33; usize::try_from(SIZE).unwrap()]).unwrap();
    let overlay = storage.overlay("over", &base);
    let image = storage.image("x");
    let devices = [("s", &source), ("a", &raw), ("i", &image), ("o", &overlay)];
    let named = devices.map(|(name, device)| export(name, device));
    let args: Vec<_> = named.iter().flat_map(|named| ["--export", named.as_str()]).collect();
    let files = ["x.raw", "x.qcow2", "base.raw", "over.qcow2"].map(|name| storage.path(name));
    let before = files.each_ref().map(|path| fs::read(path).unwrap());
    let _server = storage.serve(&args).unwrap();
    let held = format!("file:{}", storage.path("x.qcow2"));
    for command in ["backup", "mirror"] {
        for target in [&raw, &image, &base, &held, &source] {
            let (status, said) = storage.ctl(&[command, "s", target, "--wait"]);
            assert!(status == OPEN || status == Some(2), "{command} {target}: {status:?} {said}");
        }
    }
    for (path, before) in files.iter().zip(&before) {
        assert!(*before == fs::read(path).unwrap(), "{path} is as it was");
    }
}

#[test]
fn no_job_copies_onto_an_export_of_its_own_server_through_a_connection() {
    let storage = Storage::new();
    let other = storage.path("other.raw");
    fs::copy(storage.path("x.raw"), &other).unwrap();
    let named = [export("a", &storage.path("x.raw")), export("b", &other)];
    let server = storage.serve(&["--export", &named[0], "--export", &named[1]]).unwrap();
    // By any name of the socket.
    let socket = server.socket();
    let link = storage.path("link");
    std::os::unix::fs::symlink(socket, &link).unwrap();
    let folder = storage.path("folder");
    fs::create_dir(&folder).unwrap();
    let around = format!("{folder}/../link");
    let of = |socket: &str, name: &str| format!("nbd+unix:///{name}?socket={socket}");
    let targets =
        [server.uri("a"), server.uri("b"), server.uri(""), of(&link, "b"), of(&around, "a")];
    for target in &targets {
        for command in ["backup", "mirror"] {
            let outcome = storage.ctl(&[command, "a", target, "--wait"]);
            assert_refused(outcome, &["is an export of this server"]);
        }
    }
    assert!(fs::read(&other).unwrap() == fs::read(storage.path("x.raw")).unwrap());
    // A second name through a connection is no target.
    assert_allowed(storage.ctl(&["export-add", &export("c", &server.uri("b"))]));
    // An image is written by one device, also through an NBD server.
    let disk = storage.serve_other(&format!("file:{}", storage.path("x.qcow2")));
    let uri = disk.uri("").replace('?', "%3f");
    let image = format!("qcow2:{uri}");
    let [outcome, _] = exports(&storage, (&image, WRITE), (&image, WRITE));
    assert_refused(outcome, &["export \"a\"", "export \"b\""]);
}

#[test]
fn a_job_that_has_ended_keeps_nothing_open() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    let image = storage.image("x");
    let [copy, moved, left] = ["copy.raw", "moved.raw", "left.raw"].map(|name| storage.path(name));
    let named = [export("a", &raw), export("i", &image)];
    let _server = storage.serve(&["--export", &named[0], "--export", &named[1]]).unwrap();
    let ctl = |args: &[&str]| {
        let (status, said) = storage.ctl(args);
        assert_eq!(status, Some(0), "{args:?}: {said}");
    };
    for (name, device, job) in [("a", &raw, "2"), ("i", &image, "5")] {
        ctl(&["backup", name, &copy, "--wait"]);
        // Clients stay; the target is free.
        ctl(&["mirror", name, &left, "--wait"]);
        ctl(&["job-complete", job, "--stay", "--wait"]);
        assert_allowed(storage.ctl(&["export-add", &export("t", &left)]));
        assert_allowed(storage.ctl(&["export-remove", "t"]));
        // Clients move; the old device is free, then the target.
        ctl(&["mirror", name, &moved, "--wait"]);
        let move_job = (job.parse::<u32>().unwrap() + 1).to_string();
        ctl(&["job-complete", &move_job, "--wait"]);
        assert_allowed(storage.ctl(&["export-add", &export(&format!("old {name}"), device)]));
        assert_allowed(storage.ctl(&["export-remove", name]));
        assert_allowed(storage.ctl(&["export-add", &export("new", &moved)]));
        assert_allowed(storage.ctl(&["export-remove", "new"]));
    }
}

#[test]
fn the_disk_that_a_mirror_has_moved_to_is_that_of_the_export() {
    let storage = Storage::new();
    let moved = storage.path("moved.raw");
    let named = export("a", &storage.path("x.raw"));
    let _server = storage.serve(&["--export", &named]).unwrap();
    assert_allowed_quietly(storage.ctl(&["mirror", "a", &moved, "--wait"]));
    assert_refused_by_ctl(storage.ctl(&["export-add", "-r", &export("r", &moved)]), &["mirror"]);
    assert_allowed_quietly(storage.ctl(&["job-complete", "1", "--wait"]));
    assert_warned(storage.ctl(&["export-add", "-r", &export("r", &moved)]));
    let writer = storage.ctl(&["export-add", &export("w", &moved)]);
    assert_refused_by_ctl(writer, &["export \"a\"", "export \"w\""]);
}

#[test]
fn two_mounted_names_do_not_write_one_storage() {
    let storage = Storage::new();
    let folder = storage.path("folder");
    fs::create_dir(&folder).unwrap();
    let mount = |args: &[&str]| {
        let output = tools::output(
            Command::new(OURS).args([&["mount"], args, &[&folder, "--run", "true"]].concat()),
            LIMIT,
        );
        let output = output.unwrap();
        (output.status.code(), text(&output.stderr))
    };
    for device in [storage.path("x.raw"), storage.image("x")] {
        let named = [export("one", &device), export("two", &device)];
        let both = ["--export", named[0].as_str(), "--export", named[1].as_str()];
        assert_refused(mount(&[&["-w"][..], &both].concat()), &["\"one\"", "\"two\""]);
        assert_allowed(mount(&both));
    }
}

#[test]
fn a_node_and_an_export_or_two_nodes_do_not_write_one_storage() {
    let storage = Storage::new();
    let raw = storage.path("x.raw");
    let image = storage.path("x.qcow2");
    let socket = storage.0.socket("qmp");
    let named = export("a", &raw);
    let qmp = socket.to_str().unwrap();
    let server = storage.serve(&["--qmp", qmp, "--export", &named]).unwrap();
    let mut qmp = Qmp::connect(Path::new(qmp));
    let file = |name: &str, path: &str| serde_json::json!({ "driver": "file", "node-name": name, "filename": path });
    let qcow2 = |name: &str, path: &str| {
        let below = serde_json::json!({ "driver": "file", "filename": path });
        serde_json::json!({ "driver": "qcow2", "node-name": name, "file": below })
    };
    let refused = |answer: serde_json::Value, owners: &[&str]| {
        let said = answer["error"]["desc"].as_str().unwrap_or_default().to_string();
        assert!(owners.iter().all(|owner| said.contains(owner)), "{owners:?}: {answer}");
    };
    refused(qmp.ask("blockdev-add", file("n", &raw)), &["export \"a\"", "node \"n\""]);
    qmp.succeeds("blockdev-add", qcow2("q", &image));
    refused(qmp.ask("blockdev-add", qcow2("r", &image)), &["node \"q\"", "node \"r\""]);
    refused(qmp.ask("blockdev-add", file("f", &image)), &["node \"q\"", "node \"f\""]);
    qmp.succeeds("blockdev-del", serde_json::json!({ "node-name": "q" }));
    qmp.succeeds("blockdev-add", qcow2("r", &image));
    // A node that is an export of this server is no target, and the target of a job has no readers.
    let socket = server.socket().to_str().unwrap();
    let server = serde_json::json!({ "type": "unix", "path": socket });
    let nbd =
        serde_json::json!({ "driver": "nbd", "node-name": "t", "server": server, "export": "a" });
    qmp.succeeds("blockdev-add", nbd);
    let job = |target: &str| serde_json::json!({ "job-id": "m", "device": "a", "target": target, "sync": "full", "speed": 65536 });
    refused(qmp.ask("blockdev-mirror", job("t")), &["export of this server"]);
    let target = storage.path("target.raw");
    fs::copy(&raw, &target).unwrap();
    qmp.succeeds("blockdev-add", file("u", &target));
    qmp.succeeds("blockdev-mirror", job("u"));
    let reader = storage.ctl(&["export-add", "-r", &export("reader", &target)]);
    assert_refused_by_ctl(reader, &["node \"u\"", "target of a copy"]);
}

/// A server that does not answer, and a command that opens an export of it.
struct Hanging {
    listener: TcpListener,
    connection: TcpStream,
    command: ChildGuard,
}

impl Hanging {
    /// Adds the export `name` of a server that does not answer.
    fn export(storage: &Storage, name: &str) -> Hanging {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let device = format!("nbd://{}", listener.local_addr().unwrap());
        let args = ["ctl", &storage.path("ctl"), "export-add", &export(name, &device)];
        let command = Command::new(OURS).args(args).stderr(Stdio::piped()).spawn();
        let command = ChildGuard(command.unwrap());
        let (connection, _) = listener.accept().unwrap();
        Hanging { listener, connection, command }
    }

    fn has_ended(&mut self) -> bool {
        self.command.0.try_wait().unwrap().is_some()
    }

    fn status(child: &mut Child) -> Option<i32> {
        tools::wait_within(child, LIMIT).unwrap().code()
    }

    /// The server is gone.
    fn fail(mut self) -> Option<i32> {
        drop((self.connection, self.listener));
        Hanging::status(&mut self.command.0)
    }
}

#[test]
fn an_export_of_a_server_that_does_not_answer_delays_no_other_change() {
    let storage = Storage::new();
    let qmp = storage.0.socket("qmp");
    let qmp = qmp.to_str().unwrap();
    let raw = storage.path("x.raw");
    let server = storage.serve(&["--qmp", qmp, "--export", &export("a", &raw)]).unwrap();
    let mut hanging = Hanging::export(&storage, "x");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let place = json!({ "type": "inet", "host": "127.0.0.1", "port": address.port().to_string() });
    let node = json!({ "driver": "nbd", "node-name": "n", "server": place });
    let mut qmp = Qmp::connect(Path::new(qmp));
    thread::scope(|scope| {
        let adding = scope.spawn(|| qmp.ask("blockdev-add", node));
        let connection = listener.accept().unwrap();
        for change in [
            &["export-add", "b=memory:1M"][..],
            &["layer-add", "a", "rate?rate=1G"],
            &["bitmap-add", "a", "m"],
            &["snapshot-add", "a", "s"],
            &["export-remove", "s"],
            &["bitmap-remove", "a", "m"],
            &["export-remove", "b"],
        ] {
            assert_allowed(storage.ctl(change));
        }
        // Their names are theirs.
        for change in [
            &["export-add", "x=memory:1M"][..],
            &["export-add", "n=memory:1M"],
            &["snapshot-add", "a", "x"],
        ] {
            let (status, said) = storage.ctl(change);
            assert!(
                status == Some(2) && said.contains("is opening an export"),
                "{change:?}: {said}"
            );
        }
        assert!(!hanging.has_ended() && !adding.is_finished());
        drop((connection, listener));
        assert!(adding.join().unwrap()["error"].is_object());
    });
    assert_eq!(hanging.fail(), Some(1));
    assert_allowed(storage.ctl(&["export-add", "x=memory:1M"]));
    assert_allowed(storage.ctl(&["export-add", "n=memory:1M"]));
    // A server that stops does not wait for it.
    let mut hanging = Hanging::export(&storage, "y");
    assert!(server.stop().unwrap().success());
    assert_ne!(Hanging::status(&mut hanging.command.0), Some(0));
}

#[test]
fn of_two_exports_with_one_name_at_once_one_is_added() {
    let storage = Storage::new();
    let devices = [storage.image("x"), storage.path("x.raw")];
    let _server = storage.serve(&["--export", "a=memory:1M"]).unwrap();
    let mut sockets =
        [(); 2].map(|()| BufReader::new(UnixStream::connect(storage.path("ctl")).unwrap()));
    let ask = |sockets: &mut [BufReader<UnixStream>; 2], requests: [Value; 2]| {
        for (socket, request) in sockets.iter_mut().zip(requests) {
            socket.get_mut().write_all(format!("{request}\n").as_bytes()).unwrap();
        }
        sockets.each_mut().map(|socket| {
            let mut line = String::new();
            socket.read_line(&mut line).unwrap();
            serde_json::from_str::<Value>(&line).unwrap()
        })
    };
    let add = |name: &str, device: &str| json!({ "command": "export-add", "name": name, "device": device });
    let remove = |name: &str| json!({ "command": "export-remove", "name": name });
    for _ in 0..20 {
        let added = ask(&mut sockets, devices.each_ref().map(|device| add("n", device)));
        let refused: Vec<_> = added.iter().filter(|answer| answer["ok"] == false).collect();
        assert!(refused.len() == 1 && refused[0]["kind"] == "usage", "{added:?}");
        ask(&mut sockets, [remove("n"), json!({ "command": "exports" })]);
        // Nothing is open any more.
        let [one, other] = &devices;
        let added = ask(&mut sockets, [add("one", one), add("other", other)]);
        assert!(added.iter().all(|answer| answer["ok"] == true), "{added:?}");
        ask(&mut sockets, [remove("one"), remove("other")]);
    }
}
