//! The backup provider for Proxmox VE in `examples/proxmox`, called as Proxmox VE calls it, on disks that QEMU
//! exports as it does there.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, text};
use serde_json::{Value, json};

use crate::backups::Qmp;
use crate::served_disk::{LIMIT, OURS, succeed};

const EXAMPLE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../../examples/proxmox/Blockhaul.pm");
const DEVICES: [&str; 2] = ["drive-scsi0", "drive-virtio1"];
const SIZE: u64 = 16 << 20;
/// The name that Proxmox VE gives to the bitmap.
const BITMAP: &str = "provider-store";

/// What the class of a provider inherits: nothing of use.
const BASE: &str = "package PVE::BackupProvider::Plugin::Base;
for my $name (qw(new provider_name job_init job_cleanup backup_init backup_cleanup backup_get_mechanism
    backup_handle_log_file backup_vm_query_incremental backup_vm backup_container_prepare backup_container
    restore_get_mechanism archive_get_guest_config archive_get_firewall_config restore_vm_init
    restore_vm_cleanup restore_vm_volume_init restore_vm_volume_cleanup restore_container_init
    restore_container_cleanup)) {
    *{$name} = sub { die qq($name is not implemented\\n) };
}
1;
";

/// Carries out a line of Perl at a time, and answers with a line of JSON.
const CALLER: &str = r"use JSON::PP;
our (@log, $p);
$| = 1;
my $json = JSON::PP->new->allow_nonref;
while (my $line = <STDIN>) {
    my $value = eval $line;
    print $json->encode({ value => $value, error => $@, log => [splice @log] }), qq(\n);
}
";

/// A node with a machine of two disks, and a task with the provider.
struct Node {
    daemon: Child,
    qmp: Qmp,
    task: Child,
    calls: ChildStdin,
    replies: BufReader<ChildStdout>,
    qemu_img: PeerProgram,
    scratch: ScratchDir,
}

impl Node {
    /// `None` where QEMU or Perl is missing.
    fn start() -> Option<Node> {
        let daemon = PeerProgram::require("qemu-storage-daemon")?;
        let qemu_img = PeerProgram::require("qemu-img")?;
        let perl = Command::new("perl").args(["-MJSON::PP", "-e", "1"]).output();
        if !perl.is_ok_and(|output| output.status.success()) {
            tools::skip("Perl with JSON::PP is not installed");
            return None;
        }
        let scratch = ScratchDir::new().unwrap();
        let socket = scratch.socket("q");
        let mut command = daemon.tied_command();
        for (seed, device) in DEVICES.iter().enumerate() {
            let disk = scratch.file(device).display().to_string();
            succeed(&["copy", &format!("random:{SIZE}?seed={seed}"), &disk]);
            let node = format!("driver=file,filename={disk},node-name={device},discard=unmap");
            command.args(["--blockdev", &node]);
        }
        let monitor = format!("socket,id=c,path={},server=on,wait=off", socket.display());
        command.args(["--chardev", &monitor, "--monitor", "chardev=c"]).stdin(Stdio::null());
        let daemon = command.spawn().unwrap();
        let mut qmp = Qmp::connect(&socket);
        let address = json!({ "type": "unix", "data": { "path": scratch.socket("n") } });
        order(&mut qmp, "nbd-server-start", &json!({ "addr": address, "max-connections": 100 }));

        let lib = scratch.file("lib/PVE/BackupProvider/Plugin");
        fs::create_dir_all(&lib).unwrap();
        fs::write(lib.join("Base.pm"), BASE).unwrap();
        symlink(fs::canonicalize(EXAMPLE).unwrap(), lib.join("Blockhaul.pm")).unwrap();
        for dir in ["bin", "path", "tmp"] {
            fs::create_dir(scratch.file(dir)).unwrap();
        }
        symlink(OURS, scratch.file("bin/blockhaul")).unwrap();
        fs::write(scratch.file("caller.pl"), CALLER).unwrap();
        let mut path = scratch.file("bin").into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let mut task = Command::new("perl")
            .arg("-w")
            .arg("-I")
            .arg(scratch.file("lib"))
            .arg(scratch.file("caller.pl"))
            .env("PATH", path)
            .env("TMPDIR", scratch.file("tmp"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let calls = task.stdin.take().unwrap();
        let replies = BufReader::new(task.stdout.take().unwrap());
        let mut node = Node { daemon, qmp, task, calls, replies, qemu_img, scratch };
        let storage = node.scratch.file("path").display().to_string();
        node.call(&format!(
            "require PVE::BackupProvider::Plugin::Blockhaul; $p = PVE::BackupProvider::Plugin::Blockhaul\
             ->new('X', {{ path => '{storage}' }}, 'store', sub {{ push @log, qq($_[0]: $_[1]) }}); 1"
        ));
        Some(node)
    }

    fn send(&mut self, line: &str) {
        writeln!(self.calls, "{line}").unwrap();
    }

    /// The value, or the error, and the lines of the log.
    fn reply(&mut self) -> (Result<Value, String>, String) {
        let mut line = String::new();
        assert!(self.replies.read_line(&mut line).unwrap() > 0, "the task has ended");
        let reply: Value = serde_json::from_str(&line).unwrap();
        let log = reply["log"].as_array().unwrap().iter().filter_map(Value::as_str);
        let log = log.map(|line| format!("{line}\n")).collect();
        match reply["error"].as_str().unwrap() {
            "" => (Ok(reply["value"].clone()), log),
            error => (Err(error.to_owned()), log),
        }
    }

    /// Calls the provider, which must succeed: the value and the log.
    #[track_caller]
    fn call(&mut self, line: &str) -> (Value, String) {
        self.send(line);
        let (value, log) = self.reply();
        (value.unwrap_or_else(|error| panic!("{line}: {error}{log}")), log)
    }

    #[track_caller]
    fn order(&mut self, command: &str, arguments: &Value) {
        order(&mut self.qmp, command, arguments);
    }

    fn bitmap(&mut self, what: &str, node: &str, more: &Value) {
        let mut arguments = json!({ "node": node, "name": BITMAP });
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.order(&format!("block-dirty-bitmap-{what}"), &arguments);
    }

    /// Makes the access to each disk at this moment: all of it, and a bitmap that begins now (`new`); or what
    /// the bitmap of the backup before marks (`reuse`). What the disks hold is kept as `name`.
    fn begin(&mut self, mode: &str, name: &str) {
        for device in DEVICES {
            fs::copy(self.scratch.file(device), self.scratch.file(&format!("{device}-{name}")))
                .unwrap();
            let fleece = format!("fleece-{device}");
            let file = self.scratch.file(&fleece);
            let mut made = self.qemu_img.command();
            made.args(["create", "-q", "-f", "qcow2"]).arg(&file).arg(SIZE.to_string());
            assert!(made.status().unwrap().success());
            let file = json!({ "driver": "file", "filename": file, "discard": "unmap" });
            let node =
                json!({ "driver": "qcow2", "node-name": fleece, "discard": "unmap", "file": file });
            self.order("blockdev-add", &node);
            let (access, point) = (format!("access-{device}"), format!("point-{device}"));
            let mut cbw = json!({
                "driver": "copy-before-write", "node-name": access, "file": device, "target": fleece,
                "discard": "unmap", "on-cbw-error": "break-snapshot",
            });
            let mut export = json!({ "type": "nbd", "id": device, "node-name": point, "name": device, "writable": true });
            if mode == "reuse" {
                self.bitmap("add", &fleece, &json!({ "disabled": true }));
                let from = json!([{ "node": device, "name": BITMAP }]);
                let merge = json!({ "node": fleece, "target": BITMAP, "bitmaps": from });
                self.order("block-dirty-bitmap-merge", &merge);
                self.bitmap("clear", device, &json!({}));
                cbw["bitmap"] = json!({ "node": fleece, "name": BITMAP });
                export["bitmaps"] = json!([{ "node": fleece, "name": BITMAP }]);
            } else {
                self.bitmap("add", device, &json!({}));
            }
            self.order("blockdev-add", &cbw);
            let snapshot = json!({ "driver": "snapshot-access", "node-name": point, "file": access, "discard": "unmap" });
            self.order("blockdev-add", &snapshot);
            self.order("block-export-add", &export);
        }
    }

    /// Removes the access. What a backup that failed was to copy is still marked.
    fn end(&mut self, mode: &str, success: bool) {
        for device in DEVICES {
            let fleece = format!("fleece-{device}");
            self.remove_export(device);
            if !success && mode == "reuse" {
                let from = json!([{ "node": fleece, "name": BITMAP }]);
                let merge = json!({ "node": device, "target": BITMAP, "bitmaps": from });
                self.order("block-dirty-bitmap-merge", &merge);
            }
            for node in [format!("point-{device}"), format!("access-{device}"), fleece] {
                self.order("blockdev-del", &json!({ "node-name": node }));
            }
        }
    }

    fn remove_export(&mut self, id: &str) {
        self.order("block-export-del", &json!({ "id": id, "mode": "hard" }));
        tools::until(id, || {
            let left = self.qmp.answer(r#"{"execute": "query-block-exports"}"#).unwrap();
            !left.as_array().unwrap().iter().any(|export| export["id"] == id)
        });
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.scratch.socket("n").display())
    }

    /// The machine writes to a disk, while there is access to it by way of that.
    fn write(&mut self, node: &str, range: &str, seed: u64) {
        let export = json!({ "type": "nbd", "id": "now", "node-name": node, "name": "now", "writable": true });
        self.order("block-export-add", &export);
        succeed(&[
            "copy",
            "--range",
            range,
            &format!("random:{SIZE}?seed={seed}"),
            &self.uri("now"),
        ]);
        self.remove_export("now");
    }

    /// Bytes of the scratch space of a disk.
    fn fleece(&self, device: &str) -> u64 {
        fs::metadata(self.scratch.file(&format!("fleece-{device}"))).unwrap().blocks() * 512
    }

    /// What the provider wants of the bitmaps.
    fn wanted(&mut self, size: u64) -> Value {
        let volumes =
            DEVICES.map(|device| format!("'{device}' => {{ size => {size} }}")).join(", ");
        self.call(&format!("$p->backup_vm_query_incremental(100, {{ {volumes} }})")).0
    }

    /// Starts the backup of the machine; its reply is yet to be read.
    fn begin_backup(&mut self, mode: &str, time: u64, info: &str) -> String {
        assert_eq!(self.call("$p->backup_get_mechanism(100, 'qemu')").0, "nbd");
        let archive =
            self.call(&format!("$p->backup_init(100, 'qemu', {time})->{{'archive-name'}}")).0;
        let socket = self.scratch.socket("n").display().to_string();
        let volumes = DEVICES.map(|device| {
            format!(
                "'{device}' => {{ size => {SIZE}, 'nbd-path' => '{socket}', 'bitmap-mode' => '{mode}', \
                 'bitmap-name' => '{BITMAP}' }}"
            )
        });
        self.send(&format!(
            "$p->backup_vm(100, qq(cores: {time}\\n), {{ {} }}, {{ {info} }}); 1",
            volumes.join(", ")
        ));
        archive.as_str().unwrap().to_owned()
    }

    /// A backup that succeeds: its archive and its log.
    #[track_caller]
    fn back_up(&mut self, mode: &str, time: u64) -> (String, String) {
        let archive =
            self.begin_backup(mode, time, "'bandwidth-limit' => 0, 'firewall-config' => 'fw'");
        let (done, log) = self.reply();
        assert_eq!(done, Ok(json!(1)), "{log}");
        let (stats, _) =
            self.call("$p->backup_cleanup(100, 'qemu', 1, {})->{stats}->{'archive-size'}");
        assert!(stats.as_u64().is_some(), "{stats}");
        (archive, log)
    }

    fn store(&self, device: &str) -> String {
        self.scratch.file("path/vm/100").join(device).display().to_string()
    }

    /// The newest point of a disk.
    fn newest(&self, device: &str) -> Value {
        let list = succeed(&["chain", "list", "--json", &self.store(device)]);
        let mut list: Value = serde_json::from_str(&list).unwrap();
        list["points"].as_array_mut().unwrap().pop().unwrap()
    }

    /// Restores an archive as Proxmox VE does, and compares the disks with what was kept as `name`.
    fn assert_restores(&mut self, archive: &str, name: &str) {
        let volname = format!("backup/{archive}");
        let mechanism = self.call(&format!("[$p->restore_get_mechanism('{volname}')]")).0;
        assert_eq!(mechanism, json!(["qemu-img", "qemu"]));
        let volumes = self.call(&format!("$p->restore_vm_init('{volname}')")).0;
        assert_eq!(volumes.as_object().unwrap().len(), DEVICES.len());
        for device in DEVICES {
            assert_eq!(volumes[device]["size"], SIZE, "{volumes}");
            let init = format!(
                "$p->restore_vm_volume_init('{volname}', '{device}', {{}})->{{'qemu-img-path'}}"
            );
            let path = self.call(&init).0;
            let target = self.scratch.file("target");
            let mut convert = self.qemu_img.command();
            convert
                .args(["convert", "-p", "-f", "raw", "-O", "raw", path.as_str().unwrap()])
                .arg(&target);
            let output = tools::output(&mut convert, LIMIT).unwrap();
            assert!(output.status.success(), "{}", text(&output.stderr));
            let kept = fs::read(self.scratch.file(&format!("{device}-{name}"))).unwrap();
            assert!(fs::read(&target).unwrap() == kept, "{archive} {device}");
            self.call(&format!("$p->restore_vm_volume_cleanup('{volname}', '{device}', {{}}); 1"));
        }
        self.call(&format!("$p->restore_vm_cleanup('{volname}'); 1"));
        assert_eq!(fs::read_dir(self.scratch.file("tmp")).unwrap().count(), 0, "nothing is left");
    }
}

#[track_caller]
fn order(qmp: &mut Qmp, command: &str, arguments: &Value) {
    qmp.done(&json!({ "execute": command, "arguments": arguments }).to_string());
}

impl Drop for Node {
    fn drop(&mut self) {
        for child in [&mut self.task, &mut self.daemon] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn a_machine_is_backed_up_and_restored_as_proxmox_ve_asks_for() {
    let Some(mut node) = Node::start() else { return };
    let [first, second] = DEVICES;
    let access = format!("access-{first}");
    assert_eq!(node.wanted(SIZE), json!({ first: "new", second: "new" }));

    // In full, while the machine overwrites a half of a disk.
    node.begin("new", "full");
    node.write(&access, "0:8M", 10);
    assert!(node.fleece(first) > 8 << 20, "{}", node.fleece(first));
    let (full, log) = node.back_up("new", 1_700_000_000);
    assert!(log.contains("info: drive-scsi0: copying all of it (bitmap: new)\n"), "{log}");
    assert!(node.fleece(first) < 1 << 20, "{}", node.fleece(first));
    // What is copied is not kept again.
    node.write(&access, "4M:8M", 11);
    assert!(node.fleece(first) < 1 << 20, "{}", node.fleece(first));
    node.end("new", true);

    // What has changed: on one disk, on the other one nothing.
    assert_eq!(node.wanted(SIZE), json!({ first: "use", second: "use" }));
    assert_eq!(node.wanted(SIZE + 512), json!({ first: "new", second: "new" }), "resized");
    node.begin("reuse", "increment");
    node.write(&access, "2M:4M", 12);
    let outside =
        Command::new(OURS).args(["copy", &node.uri(second)]).arg(node.scratch.file("x")).output();
    assert!(!outside.unwrap().status.success(), "the export can be read outside of the bitmap");
    let (increment, log) = node.back_up("reuse", 1_700_086_400);
    assert!(log.contains("an increment of 2023-11-14T22:13:20Z: 12582912 of 16777216"), "{log}");
    assert_eq!(node.newest(second)["changed"], 0);
    assert!(node.fleece(first) < 1 << 20, "{}", node.fleece(first));
    node.end("reuse", true);

    // A backup that is killed after something was discarded: the next one has its changes, too.
    node.write(second, "1M:8M", 13);
    node.begin("reuse", "failed");
    let _ = node.begin_backup("reuse", 1_700_172_800, "'bandwidth-limit' => 1 << 20");
    let journal = Path::new(&node.store(second)).join("000003.journal");
    tools::until("something is copied", || fs::metadata(&journal).is_ok_and(|data| data.len() > 0));
    let pid = node.task.id();
    let child = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    assert!(Command::new("kill").args(["-KILL", child.trim()]).status().unwrap().success());
    let (failed, log) = node.reply();
    assert!(failed.is_err_and(|error| error.contains("blockhaul pull failed")), "{log}");
    node.call("$p->backup_cleanup(100, 'qemu', 0, { error => 'x' }); 1");
    node.end("reuse", false);
    node.write(second, "9M:1M", 14);
    node.begin("reuse", "next");
    let (next, log) = node.back_up("reuse", 1_700_259_200);
    assert!(log.contains("unfinished point \"2023-11-16T22:13:20Z\" is removed"), "{log}");
    assert_eq!(node.newest(second)["changed"], 9 << 20);
    node.end("reuse", true);

    // The machine was stopped, and its bitmaps are gone.
    for device in DEVICES {
        node.bitmap("remove", device, &json!({}));
    }
    node.write(second, "3M:1M", 15);
    assert_eq!(node.wanted(SIZE), json!({ first: "use", second: "use" }));
    node.begin("new", "lost");
    let (lost, log) = node.back_up("new", 1_700_345_600);
    for device in DEVICES {
        assert!(
            log.contains(&format!("disk {device}: 2023-11-18T22:13:20Z is a full backup")),
            "{log}"
        );
        assert_eq!(node.newest(device)["kind"], "full");
    }
    node.end("new", true);

    for (archive, name) in
        [(full, "full"), (increment, "increment"), (next, "next"), (lost, "lost")]
    {
        node.assert_restores(&archive, name);
        let config = node.call(&format!("$p->archive_get_guest_config('backup/{archive}')")).0;
        assert!(config.as_str().unwrap().starts_with("cores: 17"), "{config}");
        assert_eq!(
            node.call(&format!("$p->archive_get_firewall_config('backup/{archive}')")).0,
            "fw"
        );
    }
    node.send("$p->archive_get_guest_config('backup/vm/100/2023-11-16T22:13:20Z')");
    assert!(node.reply().0.is_err(), "a backup that failed is none");
}
