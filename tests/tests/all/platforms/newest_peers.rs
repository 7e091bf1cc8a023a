//! The newest nbdkit, libnbd and QEMU, as servers and as clients.

use std::path::Path;

use blockhaul_testkit::image;
use blockhaul_testkit::rng::seed;
use blockhaul_testkit::tools::until;
use blockhaul_tests::{assert_same, serve, succeed, text};

use super::{Process, Root, report, scratch};

const SIZE: u64 = 64 << 20;

/// Starts a server of the root that listens on a Unix socket.
fn start(root: &Root, args: &[&str], socket: &Path, log: &Path) -> Process {
    let mut command = root.command(args[0]);
    command.args(&args[1..]);
    let server = Process::start(command, log);
    until("the server listens", || socket.exists());
    server
}

#[test]
fn programs_of_nbdkit_libnbd_and_qemu_read_and_write_our_server() {
    let Some(root) = Root::find("sid") else { return };
    let scratch = scratch();
    let [source, target, image] =
        ["source", "target", "image.qcow2"].map(|name| scratch.file(name));
    println!("BLOCKHAUL_SEED={}", seed());
    image::sparse(&source, SIZE, seed()).unwrap();
    std::fs::File::create(&target).unwrap().set_len(SIZE).unwrap();
    let from = serve(&scratch, "from", &["--readonly", text(&source)]);
    let to = serve(&scratch, "to", &[text(&target)]);
    let [from, to] = [from, to].map(|server| (server.uri(""), server));

    root.run(&["nbdcopy", &from.0, &to.0]);
    assert_same(&source, &target, "nbdcopy");
    root.run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &from.0, &to.0]);
    root.run(&["qemu-img", "convert", "-f", "raw", "-O", "qcow2", &from.0, text(&image)]);
    root.run(&["qemu-img", "compare", "-F", "raw", text(&image), text(&source)]);
    let map = root.run(&["nbdinfo", "--map", "--json", &from.0]);
    assert!(map.starts_with('['), "{map}");
    root.run(&["nbdsh", "-u", &to.0, "-c", "h.trim(1 << 20, 1 << 20); h.flush()"]);
    root.run(&["nbdcopy", "--destination-is-zero", &from.0, "null:"]);

    let version = ["nbdcopy", "qemu-img"].map(|name| root.version(&[name, "--version"]));
    let version = format!("libnbd {}, QEMU {}", version[0], version[1]);
    report(
        "newest clients",
        &version,
        "nbdcopy, nbdinfo, nbdsh, qemu-img convert and compare on our server",
    );
}

#[test]
fn servers_of_nbdkit_and_qemu_are_copied() {
    let Some(root) = Root::find("sid") else { return };
    let scratch = scratch();
    let [source, target] = ["source", "target"].map(|name| scratch.file(name));
    println!("BLOCKHAUL_SEED={}", seed());
    image::sparse(&source, SIZE, seed()).unwrap();
    let image = scratch.file("image.qcow2");
    root.run(&["qemu-img", "convert", "-f", "raw", "-O", "qcow2", text(&source), text(&image)]);
    let socket = scratch.socket("peer");
    let unix = text(&socket);
    let log = scratch.file("log");
    let servers: [&[&str]; 4] = [
        &["nbdkit", "-f", "-U", unix, "file", text(&source)],
        &["nbdkit", "-f", "-U", unix, "--filter=cow", "file", text(&source)],
        &["qemu-nbd", "-t", "-k", unix, "-f", "raw", "-r", text(&source)],
        &["qemu-nbd", "-t", "-A", "-k", unix, "-f", "qcow2", "-e", "4", text(&image)],
    ];
    let uri = format!("nbd+unix:///?socket={unix}");
    for server in servers {
        let process = start(&root, server, &socket, &log);
        succeed(&["copy", "--verify", &uri, text(&target)]);
        assert_same(&source, &target, server[0]);
        succeed(&["map", &uri]);
        process.kill();
        let _ = std::fs::remove_file(&socket);
        std::fs::remove_file(&target).unwrap();
    }
    let version = ["nbdkit", "qemu-nbd"].map(|name| root.version(&[name, "--version"]));
    let version = format!("nbdkit {}, QEMU {}", version[0], version[1]);
    report(
        "newest servers",
        &version,
        "copy, map of nbdkit's file and cow, qemu-nbd's raw and qcow2",
    );
}
