//! What people who run a server rely on: one program writes to a file at a time, the log tells what
//! fails and who is refused, and `--run` has its way to the end.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

fn blockhaul(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), LIMIT).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn start(scratch: &ScratchDir, args: &[&str]) -> PeerServer {
    PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("own"), args).unwrap()
}

/// A disk of 1 MiB of sevens.
fn disk(scratch: &ScratchDir) -> String {
    let path = scratch.file("disk.raw");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    path.to_str().unwrap().to_string()
}

#[test]
fn what_is_served_for_writing_is_written_by_no_other_program() {
    let scratch = ScratchDir::new().unwrap();
    let disk = disk(&scratch);
    let server = start(&scratch, &[&disk]);
    let refused: [&[&str]; 3] = [
        &["serve", &disk, "--run", "true"],
        &["serve", "--per-client", &disk, "--run", "true"],
        &["copy", "memory:4096", &disk],
    ];
    for args in refused {
        let output = blockhaul(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {said}");
        assert!(said.contains("another program") && said.contains("lock=off"), "{args:?}: {said}");
    }
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 1 << 20, "it was not emptied");
    let unlocked = format!("file:{disk}?lock=off");
    let fine: [&[&str]; 5] = [
        &["serve", "-r", &disk, "--run", "true"],
        &["serve", "--layer", "cow", &disk, "--run", "true"],
        &["serve", &unlocked, "--run", "true"],
        &["compat", "nbdkit", "file", &disk, "--run", "true"],
        &["compare", &disk, &server.uri("")],
    ];
    for args in fine {
        let output = blockhaul(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    }
    assert!(server.stop().unwrap().success());
    // Not even a server with two exports of it.
    let both = format!("b={disk}");
    let output = blockhaul(&["serve", &disk, "--export", &both, "--run", "true"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains(
            "already open for writing by the default export; export \"b\" cannot open it"
        ),
        "{said}"
    );
}

#[test]
fn qemu_and_the_server_respect_each_other() {
    let (Some(qemu_nbd), Some(qemu_img), Some(qemu_io)) = (
        PeerProgram::require("qemu-nbd"),
        PeerProgram::require("qemu-img"),
        PeerProgram::require("qemu-io"),
    ) else {
        return;
    };
    let scratch = ScratchDir::new().unwrap();
    let disk = disk(&scratch);
    let server = start(&scratch, &[&disk]);
    let run = |peer: &PeerProgram, args: &[&str]| {
        tools::output(peer.command().args(args), LIMIT).unwrap()
    };
    let write = run(&qemu_io, &["-f", "raw", "-c", "write 0 512", &disk]);
    assert!(!write.status.success() && text(&write.stderr).contains("lock"), "{write:?}");
    let read = run(&qemu_img, &["compare", "-f", "raw", &disk, &server.uri("")]);
    assert!(read.status.success(), "{read:?}");
    assert!(server.stop().unwrap().success());

    let socket = scratch.socket("qemu");
    let server = PeerServer::qemu_nbd(&qemu_nbd, &socket, &["-f", "raw", &disk]).unwrap();
    let output = blockhaul(&["serve", &disk, "--run", "true"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    drop(server);
}

#[test]
fn the_log_tells_which_request_failed_and_why() {
    let scratch = ScratchDir::new().unwrap();
    let server = start(&scratch, &["--layer", "error?read=100%&at=512K,1", "pattern:1M"]);
    let output = blockhaul(&["copy", "--request-size", "64K", &server.uri(""), "null:"]);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    let said = server.says("at offset 524288: EIO").unwrap();
    assert!(said.contains("connection "), "{said}");
    assert!(server.stop().unwrap().success());
}

#[test]
fn the_log_names_who_tries_without_tls() {
    let scratch = ScratchDir::new().unwrap();
    let keys = scratch.file("keys.psk");
    let keys = keys.to_str().unwrap();
    assert!(blockhaul(&["tls", "init", "--psk", "alice", keys]).status.success());
    let server = start(&scratch, &["--quiet", "--tls-psk", keys, "memory:1M"]);
    // A client that only connects is not logged.
    drop(UnixStream::connect(server.socket()).unwrap());
    let with =
        format!("nbds+unix://alice@/?socket={}&tls-psk-file={keys}", server.socket().display());
    assert!(blockhaul(&["info", &with]).status.success());
    assert_eq!(server.said(), "");
    assert!(!blockhaul(&["info", &server.uri("")]).status.success());
    let said = server.says("TLS is required").unwrap();
    assert!(said.contains("refused connection"), "{said}");
    assert!(server.stop().unwrap().success());
}

#[test]
fn secrets_that_every_user_can_read_are_warned_of_once_on_each_side() {
    use std::os::unix::fs::PermissionsExt as _;
    let scratch = ScratchDir::new().unwrap();
    let [keys, pki] = ["keys.psk", "pki"].map(|name| scratch.file(name));
    let keys = keys.to_str().unwrap();
    let pki = pki.to_str().unwrap();
    assert!(blockhaul(&["tls", "init", "--psk", "alice", keys]).status.success());
    assert!(blockhaul(&["tls", "init", pki]).status.success());
    let expose = |path: &str, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let key = format!("{pki}/server-key.pem");
    for (option, files, path) in [("--tls-psk", keys, keys), ("--tls-certificates", pki, &key)] {
        let run = [option, files, "memory:1M", "--run", "true"];
        let serve = [&["serve", "--quiet"][..], &run].concat();
        assert_eq!(text(&blockhaul(&serve).stderr), "");
        expose(path, 0o644);
        let said = text(&blockhaul(&serve).stderr);
        let advice = format!("(mode 0644): chmod 600 {path}");
        assert!(said.contains("warning: every user can read"), "{said}");
        assert!(said.lines().count() == 1 && said.contains(&advice), "{said}");
        expose(path, 0o600);
    }
    let server = start(&scratch, &["--quiet", "--tls-psk", keys, "memory:1M"]);
    let socket = server.socket().display();
    let uri = format!("nbds+unix://alice@/?socket={socket}&tls-psk-file={keys}");
    // Over several connections.
    let copy = ["copy", "--no-progress", "-C", "4", &uri, "null:"];
    assert_eq!(text(&blockhaul(&copy).stderr), "");
    expose(keys, 0o604);
    let said = text(&blockhaul(&copy).stderr);
    assert!(said.lines().count() == 1 && said.contains("(mode 0604)"), "{said}");
    assert!(server.stop().unwrap().success());
}

#[test]
fn the_log_is_silent_about_clients_that_leave_in_their_handshake() {
    let scratch = ScratchDir::new().unwrap();
    let keys = scratch.file("keys.psk");
    let keys = keys.to_str().unwrap();
    assert!(blockhaul(&["tls", "init", "--psk", "alice", keys]).status.success());
    let option = |number: u32, payload: &[u8]| {
        let mut bytes = 3_u32.to_be_bytes().to_vec();
        bytes.extend_from_slice(b"IHAVEOPT");
        bytes.extend_from_slice(&number.to_be_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        bytes.extend_from_slice(payload);
        bytes
    };
    // NBD_OPT_GO for the default export without information requests; NBD_OPT_STARTTLS.
    let (go, start_tls) = (option(7, &[0; 6]), option(5, &[]));
    for (args, last) in
        [(&["memory:1M"][..], go), (&["--tls-psk", keys, "memory:1M"][..], start_tls)]
    {
        let server = start(&scratch, &[&["--verbose"][..], args].concat());
        for id in 1..=20 {
            let mut client = UnixStream::connect(server.socket()).unwrap();
            client.read_exact(&mut [0; 18]).unwrap();
            client.write_all(&last).unwrap();
            if args.len() > 1 {
                // The reply to NBD_OPT_STARTTLS; the server then waits for the client's TLS handshake.
                client.read_exact(&mut [0; 20]).unwrap();
            }
            drop(client);
            let said = server.says(&format!("connection {id} ended")).unwrap();
            assert!(!said.contains("warning"), "{said}");
        }
        assert!(server.stop().unwrap().success());
    }
}

#[test]
fn a_layer_that_ends_the_server_leaves_the_command_its_time() {
    let script = format!("{OURS} info --size \"$uri\"; sleep 1; echo after; exit 5");
    let output = blockhaul(&["serve", "--layer", "exitlast", "memory:1M", "--run", &script]);
    assert_eq!(text(&output.stdout), "1048576\nafter\n", "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(5));
}

#[test]
fn another_user_has_the_private_socket_and_removes_it() {
    if !rustix::process::geteuid().is_root() {
        return tools::skip("only root may become another user");
    }
    let script = format!("{OURS} info --size \"$uri\"; echo \"$unixsocket\"");
    let output = blockhaul(&["serve", "--user", "65534", "memory:1M", "--run", &script]);
    let said = text(&output.stdout);
    let mut lines = said.lines();
    // The program itself may lie where that user cannot start it.
    let first = lines.next();
    let second = lines.next();
    let socket = match (first, second) {
        (Some("1048576"), Some(socket)) => socket,
        (Some(socket), None) => socket,
        _ => panic!("{said} {}", text(&output.stderr)),
    };
    assert!(!std::path::Path::new(socket).parent().unwrap().exists(), "{said}");
}

#[test]
fn a_file_that_nobody_may_write_serves_below_cow() {
    let scratch = ScratchDir::new().unwrap();
    let disk = disk(&scratch);
    let mut permissions = std::fs::metadata(&disk).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&disk, permissions).unwrap();
    let server = start(&scratch, &["--layer", "cow", &disk]);
    let output = blockhaul(&["copy", "zero:1M", &server.uri("")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = blockhaul(&["compare", "zero:1M", &server.uri("")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(std::fs::read(&disk).unwrap(), vec![7; 1 << 20]);
    // Its own program has it open for reading alone: others may write.
    let output = blockhaul(&["compare", &disk, &server.uri("")]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(server.stop().unwrap().success());
}
