//! `serve --vhost-user`: what libblkio's driver sees through the socket is what NBD clients see. Its client
//! is nbdkit's plugin blkio, a server itself, so that our commands can read and write through it.

use std::path::Path;
use std::process::Command;

use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir, SkipReason, until};

use super::served_disk::{OURS, blockhaul, succeed};

const SIZE: usize = 24 << 20;

/// A file with a served disk; a socket for virtual machines beside that for NBD.
struct Disk {
    scratch: ScratchDir,
    server: PeerServer,
}

impl Disk {
    fn serve(more: &[&str]) -> Disk {
        let scratch = ScratchDir::new().unwrap();
        let bytes = Rng::new(seed()).disk(SIZE, 1 << 20, 50);
        std::fs::write(scratch.file("disk.raw"), bytes).unwrap();
        let vhost = scratch.socket("vhost");
        let control = scratch.file("ctl");
        let disk = scratch.file("disk.raw");
        let mut args = vec!["--vhost-user", word(&vhost), "--control", word(&control)];
        args.extend(more);
        args.push(word(&disk));
        let server = PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("nbd"), &args).unwrap();
        Disk { scratch, server }
    }

    /// Another server, whose disk is ours through libblkio; none without that.
    fn through_libblkio(&self, name: &str, options: &[&str]) -> Option<PeerServer> {
        let nbdkit = PeerProgram::require("nbdkit")?;
        let path = format!("path={}", word(&self.scratch.socket("vhost")));
        let args = [options, &["blkio", "virtio-blk-vhost-user", &path]].concat();
        match PeerServer::nbdkit(&nbdkit, &self.scratch.socket(name), &args) {
            Ok(server) => Some(server),
            Err(why) if why.contains("plugin") && why.contains("cannot open") => {
                tools::skip_or_fail(&SkipReason::new("nbdkit's plugin blkio is missing"));
                None
            }
            Err(why) => panic!("{why}"),
        }
    }

    fn ctl(&self, words: &[&str]) -> String {
        let control = self.scratch.file("ctl");
        succeed(&[&["ctl", word(&control)], words].concat())
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.scratch.file("disk.raw")).unwrap()
    }
}

fn word(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_virtual_machine_and_an_nbd_client_see_the_same_disk() {
    let disk = Disk::serve(&[]);
    let Some(blkio) = disk.through_libblkio("blkio", &[]) else { return };
    let nbd = disk.server.uri("");
    let machine = blkio.uri("");
    succeed(&["compare", &nbd, &machine]);
    // What one writes, the other reads.
    let other = disk.scratch.file("other.raw");
    std::fs::write(&other, Rng::new(seed() + 1).disk(SIZE, 1 << 20, 50)).unwrap();
    succeed(&["copy", "--flush", word(&other), &machine]);
    succeed(&["compare", word(&other), &nbd]);
    assert_eq!(disk.bytes(), std::fs::read(&other).unwrap());
    succeed(&["copy", "zero:24M", &machine]);
    until("the disk is empty", || disk.bytes().iter().all(|&byte| byte == 0));
    // It is a client like others. The plugin connects while it has a client.
    let keeper = disk.scratch.socket("keeper");
    let keeper = PeerServer::blockhaul(OURS.as_ref(), &keeper, &[&machine]).unwrap();
    let clients = disk.ctl(&["clients"]);
    let line = clients.lines().find(|line| line.contains("a local client"));
    let number = line.and_then(|line| line.split_whitespace().next()).unwrap();
    disk.ctl(&["disconnect", number]);
    until("it is gone", || !disk.ctl(&["clients"]).contains("a local client"));
    drop(keeper);
    drop(blkio);
    assert!(disk.server.stop().unwrap().success());
}

#[test]
fn a_read_only_disk_with_a_layer_is_read_only_for_virtual_machines() {
    let disk = Disk::serve(&["--readonly", "--layer", "offset?offset=1M"]);
    let Some(blkio) = disk.through_libblkio("reader", &["--readonly"]) else { return };
    let nbd = disk.server.uri("");
    let machine = blkio.uri("");
    succeed(&["compare", &nbd, &machine]);
    // The driver refuses to start for writing.
    let Some(blkio) = disk.through_libblkio("writer", &[]) else { return };
    let refused = blockhaul(&["info", &blkio.uri("")]);
    let text = tools::text(&refused.stderr);
    assert!(!refused.status.success() && text.contains("read-only"), "{text}");
}

#[test]
fn a_server_for_virtual_machines_alone_says_where_it_listens_and_ends_in_order() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("vhost");
    let mut command = Command::new(OURS);
    command.args(["serve", "--vhost-user", word(&socket), "memory:1M"]);
    let server = PeerServer::start(command, &socket).unwrap();
    let said = server.says("vhost-user socket").unwrap();
    assert!(said.contains(word(&socket)), "{said}");
    assert!(!said.contains("10809") && !said.contains("nbd"), "{said}");
    assert!(server.stop().unwrap().success());
    assert!(!socket.exists(), "it is removed");
    let absent = scratch.file("absent/s");
    let refused = blockhaul(&["serve", "--vhost-user", word(&absent), "memory:1M"]);
    let text = tools::text(&refused.stderr);
    assert!(!refused.status.success() && text.contains("create its directory first"), "{text}");
    assert!(!blockhaul(&["serve", "--vhost-user", "a=", "memory:1M"]).status.success());
}
