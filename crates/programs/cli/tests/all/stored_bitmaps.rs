//! Persistent bitmaps of qcow2 images under the name qemu-storage-daemon, next to QEMU's daemon.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, text};
use serde_json::{Value, json};

use crate::qmp::Qmp;
use crate::served_disk::{LIMIT, OURS};

struct Tools {
    daemon: PeerProgram,
    img: PeerProgram,
    io: PeerProgram,
    scratch: ScratchDir,
}

/// Whose daemon.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    Ours,
    Theirs,
}
use Who::{Ours, Theirs};

/// A daemon with a writable export `d` of the qcow2 image of this name.
struct Daemon {
    child: Child,
    qmp: Qmp,
    nbd: PathBuf,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Tools {
    fn find() -> Option<Tools> {
        Some(Tools {
            daemon: PeerProgram::require("qemu-storage-daemon")?,
            img: PeerProgram::require("qemu-img")?,
            io: PeerProgram::require("qemu-io")?,
            scratch: ScratchDir::new().unwrap(),
        })
    }

    #[track_caller]
    fn img(&self, line: &str) -> String {
        let mut command = self.img.command();
        command.args(line.split_whitespace()).current_dir(self.scratch.path());
        let done = tools::output(&mut command, LIMIT).unwrap();
        assert!(done.status.success(), "{line}: {}{}", text(&done.stdout), text(&done.stderr));
        text(&done.stdout)
    }

    /// The bitmaps of an image by name, as qemu-img describes them.
    fn bitmaps(&self, image: &str) -> Value {
        let info = self.img(&format!("info --output=json {image}"));
        let mut info: Value = serde_json::from_str(&info).unwrap();
        let mut all = info["format-specific"]["data"]["bitmaps"].take();
        if let Some(all) = all.as_array_mut() {
            all.sort_by_key(|one| one["name"].to_string());
        }
        all
    }

    fn start(&self, who: Who, image: &str) -> Daemon {
        let [socket, nbd] =
            ["qmp", "nbd"].map(|name| self.scratch.socket(&format!("{name}{who:?}")));
        for path in [&socket, &nbd] {
            let _ = std::fs::remove_file(path);
        }
        let mut command = match who {
            Ours => {
                let mut command = Command::new(OURS);
                command.args(["compat", "qemu-storage-daemon"]);
                command
            }
            Theirs => self.daemon.tied_command(),
        };
        let chardev = format!("socket,id=c,path={},server=on,wait=off", socket.display());
        let server = format!("addr.type=unix,addr.path={}", nbd.display());
        command.args(["--chardev", &chardev, "--monitor", "c", "--nbd-server", &server]);
        command.current_dir(self.scratch.path()).stdin(Stdio::null());
        let child = command.spawn().unwrap();
        let mut qmp = Qmp::connect(&socket);
        qmp.succeeds("blockdev-add", node("d", image));
        Daemon { child, qmp, nbd }
    }

    /// Writes through the export of a daemon.
    #[track_caller]
    fn write(&self, daemon: &mut Daemon, commands: &[&str]) {
        let export =
            json!({ "type": "nbd", "id": "e", "node-name": "d", "name": "d", "writable": true });
        daemon.qmp.succeeds("block-export-add", export);
        let mut command = self.io.command();
        commands.iter().for_each(|one| {
            command.args(["-c", one]);
        });
        command.args(["-f", "raw"]).arg(format!("nbd+unix:///d?socket={}", daemon.nbd.display()));
        let done = tools::output(&mut command, LIMIT).unwrap();
        let said = text(&done.stdout) + &text(&done.stderr);
        assert!(done.status.success() && !said.contains("failed"), "{said}");
        daemon.qmp.succeeds("block-export-del", json!({ "id": "e", "mode": "hard" }));
        tools::until("the export has gone", || {
            daemon.qmp.succeeds("query-block-exports", json!({})) == json!([])
        });
    }
}

fn node(name: &str, image: &str) -> Value {
    json!({ "driver": "qcow2", "node-name": name, "file": { "driver": "file", "filename": image } })
}

impl Daemon {
    fn bitmap(&mut self, command: &str, arguments: Value) {
        self.qmp.succeeds(&format!("block-dirty-bitmap-{command}"), arguments);
    }

    /// Name, dirty bytes and marks of the bitmaps of the disk, by name.
    fn bitmaps(&mut self) -> Vec<String> {
        let nodes = self.qmp.succeeds("query-named-block-nodes", json!({}));
        let nodes = nodes.as_array().unwrap();
        let found = nodes.iter().find(|one| one["node-name"] == "d").unwrap();
        let none = Vec::new();
        let all = found["dirty-bitmaps"].as_array().unwrap_or(&none);
        let mut all: Vec<String> = all
            .iter()
            .map(|one| {
                let broken = one.get("inconsistent") == Some(&json!(true));
                let count = if broken { json!("inconsistent") } else { one["count"].clone() };
                format!("{} {count} {} {}", one["name"], one["persistent"], one["recording"])
            })
            .collect();
        all.sort();
        all
    }

    fn quit(mut self) {
        self.qmp.succeeds("quit", json!({}));
        assert!(tools::wait_within(&mut self.child, LIMIT).unwrap().success());
    }
}

#[test]
fn persistent_bitmaps_are_in_the_image_after_the_daemon_has_ended() {
    let Some(tools) = Tools::find() else { return };
    let mut seen = Vec::new();
    for (first, second) in [(Ours, Ours), (Theirs, Theirs), (Ours, Theirs), (Theirs, Ours)] {
        tools.img("create -q -f qcow2 d.qcow2 64M");
        let mut told = Vec::new();
        let mut daemon = tools.start(first, "d.qcow2");
        for (name, persistent, disabled) in [
            ("kept", true, false),
            ("lost", false, false),
            ("off", true, true),
            ("gone", true, false),
        ] {
            let new = json!({ "node": "d", "name": name, "persistent": persistent, "disabled": disabled });
            daemon.bitmap("add", new);
        }
        let coarse =
            json!({ "node": "d", "name": "coarse", "granularity": 1 << 20, "persistent": true });
        daemon.bitmap("add", coarse);
        tools.write(&mut daemon, &["write -P 1 1M 64k", "write -P 2 10M 3M", "flush"]);
        daemon.bitmap("remove", json!({ "node": "d", "name": "gone" }));
        told.push(format!("{:?}", daemon.bitmaps()));
        daemon.quit();
        told.push(tools.bitmaps("d.qcow2").to_string());
        tools.img("check -q d.qcow2");
        let mut daemon = tools.start(second, "d.qcow2");
        told.push(format!("{:?}", daemon.bitmaps()));
        tools.write(&mut daemon, &["write -P 3 60M 64k", "flush"]);
        daemon.bitmap("enable", json!({ "node": "d", "name": "off" }));
        tools.write(&mut daemon, &["write -P 4 0 64k", "flush"]);
        daemon.bitmap("clear", json!({ "node": "d", "name": "coarse" }));
        told.push(format!("{:?}", daemon.bitmaps()));
        daemon.qmp.succeeds("blockdev-del", json!({ "node-name": "d" }));
        told.push(tools.bitmaps("d.qcow2").to_string());
        // A node that is opened again has them again, too.
        daemon.qmp.succeeds("blockdev-add", node("d", "d.qcow2"));
        told.push(format!("{:?}", daemon.bitmaps()));
        daemon.quit();
        tools.img("check -q d.qcow2");
        seen.push(((first, second), told));
    }
    let (_, expected) = &seen[1];
    for (who, told) in &seen {
        for (ours, theirs) in told.iter().zip(expected) {
            assert_eq!(ours, theirs, "{who:?}");
        }
    }
    assert!(expected[2].contains(r#"\"kept\" 3211264 true true"#), "{expected:?}");
}

#[test]
fn bitmaps_of_a_daemon_that_was_killed_are_inconsistent() {
    let Some(tools) = Tools::find() else { return };
    let mut seen = Vec::new();
    for who in [Ours, Theirs] {
        tools.img("create -q -f qcow2 d.qcow2 8M");
        tools.img("bitmap --add d.qcow2 before");
        let mut daemon = tools.start(who, "d.qcow2");
        daemon.bitmap("add", json!({ "node": "d", "name": "new", "persistent": true }));
        tools.write(&mut daemon, &["write -P 1 1M 64k", "flush"]);
        drop(daemon);
        let mut told = vec![tools.bitmaps("d.qcow2").to_string()];
        let mut daemon = tools.start(who, "d.qcow2");
        told.push(format!("{:?}", daemon.bitmaps()));
        daemon.bitmap("remove", json!({ "node": "d", "name": "before" }));
        daemon.quit();
        told.push(tools.bitmaps("d.qcow2").to_string());
        tools.img("check -q d.qcow2");
        seen.push(told);
    }
    assert_eq!(seen[0], seen[1]);
    assert!(seen[0][0].contains("in-use"), "{seen:?}");
}

#[test]
fn images_that_cannot_store_bitmaps_refuse_them_as_qemus_daemon_does() {
    let Some(tools) = Tools::find() else { return };
    tools.img("create -q -f qcow2 d.qcow2 8M");
    tools.img("create -q -f qcow2 -o compat=0.10 old.qcow2 8M");
    tools.img("create -q -f raw a.raw 8M");
    for who in [Ours, Theirs] {
        let mut daemon = tools.start(who, "d.qcow2");
        daemon.qmp.succeeds("blockdev-add", node("old", "old.qcow2"));
        let file = json!({ "driver": "file", "node-name": "raw", "filename": "a.raw" });
        daemon.qmp.succeeds("blockdev-add", file);
        let long = "n".repeat(1024);
        for (node, name, granularity) in [
            ("old", "b", 65536),
            ("raw", "b", 65536),
            ("d", long.as_str(), 65536),
            ("d", "b", 1000),
        ] {
            let new = json!({ "node": node, "name": name, "granularity": granularity, "persistent": true });
            let answer = daemon.qmp.ask("block-dirty-bitmap-add", new);
            assert!(answer["error"]["desc"].is_string(), "{who:?} {node}: {answer}");
        }
        daemon.bitmap("add", json!({ "node": "old", "name": "b" }));
        daemon.quit();
        assert_eq!(tools.bitmaps("d.qcow2"), Value::Null, "{who:?}");
    }
}
