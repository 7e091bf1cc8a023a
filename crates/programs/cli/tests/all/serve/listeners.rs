//! Sockets of the service manager, standard input, vsock, and what is handed over open.

use super::*;

/// A shell's script in a folder; `$0` is the program.
fn script(scratch: &Scratch, text: &str) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", text, OURS]).current_dir(scratch.path()).stdin(Stdio::null());
    tools::output(&mut command, LIMIT).unwrap()
}

#[test]
fn what_is_handed_over_open_is_served() {
    let scratch = Scratch::new().unwrap();
    let done = |text: &str| {
        let output = script(&scratch, text);
        assert!(output.status.success(), "{text}: {output:?}");
        output
    };
    // The file is gone: its descriptor is all there is. It comes along to the background as well.
    done(
        "printf 01234567 >disk; exec 5<>disk 6<disk; rm disk
        \"$0\" serve -U own --pidfile pid 'file:?fd=5'
        printf abcdefgh | \"$0\" copy - 'nbd+unix:///?socket=own'
        kill $(cat pid)
        test \"$(cat <&6)\" = abcdefgh
        \"$0\" serve --run '\"$0\" info \"$uri\" || exit 1' -U - -r 'file:?fd=5' >/dev/null
        \"$0\" copy 'file:?fd=5' new && test \"$(cat new)\" = abcdefgh",
    );
    // Called as nbdkit, for each client and without nbdkit's plugin.
    std::os::unix::fs::symlink(OURS, scratch.file("nbdkit")).unwrap();
    let output = done(
        "printf 01234567 >disk; exec 5<disk
        ./nbdkit -U - file fd=5 --run '\"'\"$0\"'\" info --json \"$uri\"'",
    );
    let said = text(&output.stdout);
    assert!(said.contains("\"export-size\": 8,"), "{said}");
    assert!(said.contains("\"is_read_only\": true"), "{said}");
    let output = done(
        "mkdir images; printf 012 >images/a; exec 5<images
        \"$0\" serve -U - 'dir:?dirfd=5' --run '\"'\"$0\"'\" info --list \"$uri\"'",
    );
    assert!(text(&output.stdout).contains("export=\"a\":"), "{output:?}");
    // As nbdkit, with links as its plugin has them; by its path as well.
    let output = done(
        "printf 01234 >elsewhere; ln -s ../elsewhere images/link; mkdir images/sub; exec 5<images
        for what in dirfd=5 dir=images; do ./nbdkit -U - -e link file $what --run '
            \"'\"$0\"'\" info --list \"nbd+unix:///?socket=$unixsocket\"
            \"'\"$0\"'\" info --size \"nbd+unix:///link?socket=$unixsocket\"
            ! \"'\"$0\"'\" info --size \"nbd+unix:///sub?socket=$unixsocket\"'; done",
    );
    let said = text(&output.stdout);
    for export in ["export=\"a\":", "export=\"link\":", "\n5\n"] {
        assert_eq!(said.matches(export).count(), 2, "{export}: {said}");
    }
    assert!(!said.contains("sub"), "{said}");
    let output = done(
        "\"$0\" serve -U - dir:images --run '\"'\"$0\"'\" info --list \"$uri\"'; rm images/link",
    );
    assert!(!text(&output.stdout).contains("link"), "not without links=on: {output:?}");

    let wrong = [
        ("\"$0\" serve -f -U - 'file:?fd=9'", 3, "no such inherited descriptor"),
        ("\"$0\" serve -f -U - 'file:?fd=1'", 2, "3 or more"),
        ("\"$0\" serve -f -U - 'file:?fd=x'", 2, "fd"),
        ("exec 4>&1; true | \"$0\" serve -f -U - 'file:?fd=5' 5<&0", 2, "is a pipe"),
        ("exec 5<images/a; \"$0\" copy memory:1M 'file:?fd=5'", 3, "only open for reading"),
        ("exec 5<>images/a; \"$0\" copy images/a 'file:?fd=5'", 2, "are the same"),
        ("exec 5<images/a; \"$0\" serve -f -U - 'dir:?dirfd=5'", 2, "is not a directory"),
    ];
    for (line, status, part) in wrong {
        let output = script(&scratch, line);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{line}: {said}");
        assert!(said.contains(part), "{line}: {said}");
    }
    assert_eq!(std::fs::read(scratch.file("images/a")).unwrap(), b"012");
}

#[test]
fn sockets_of_the_service_manager_are_taken_over() {
    let scratch = Scratch::new().unwrap();
    let socket = scratch.socket("s");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let activate = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1; export LISTEN_PID LISTEN_FDS; \
                    exec \"$@\"";
    let mut server: Child = Command::new("/bin/sh")
        .args(["-c", activate, "sh", OURS, "serve", "--exit-with-parent", "pattern:1M"])
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(listener)))
        .spawn()
        .unwrap();
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    assert_eq!(text(&blockhaul(&["info", "--size", &uri]).stdout), "1048576\n");
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    // Not ours to remove.
    assert!(socket.exists());
    let wrong = "LISTEN_PID=$$ LISTEN_FDS=2; export LISTEN_PID LISTEN_FDS; exec \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", wrong, "sh", OURS, "serve", "pattern:1M"]);
    let output = tools::output(&mut command, LIMIT).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn the_client_at_standard_input_is_served_through_sockets_and_pipes() {
    use std::io::{Read as _, Write as _};
    // As ssh has it: two pipes.
    let mut server = Command::new(OURS)
        .args(["serve", "--single", "memory:1M"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut to, mut from) = (server.stdin.take().unwrap(), server.stdout.take().unwrap());
    let mut greeting = [0; 18];
    from.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    to.write_all(&[0, 0, 0, 3]).unwrap();
    // ABORT, which is acknowledged before the server ends.
    to.write_all(b"IHAVEOPT\0\0\0\x02\0\0\0\0").unwrap();
    let mut rest = Vec::new();
    from.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), 20, "{rest:?}");
    assert!(server.wait().unwrap().success());
    // As inetd has it: a socket. It ends with the client, whatever else it listens on.
    let scratch = Scratch::new().unwrap();
    let (mut client, socket) = UnixStream::pair().unwrap();
    let mut server = Command::new(OURS)
        .args(["serve", "-s", "-U", scratch.socket("s").to_str().unwrap(), "memory:1M"])
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(socket)))
        .spawn()
        .unwrap();
    client.read_exact(&mut greeting).unwrap();
    assert_eq!(size(&format!("nbd+unix:///?socket={}", scratch.socket("s").display())), "1048576");
    drop(client);
    assert!(server.wait().unwrap().success());
}

#[test]
fn several_sockets_of_the_service_manager_and_our_own_are_served_together() {
    use std::os::fd::OwnedFd;
    let scratch = Scratch::new().unwrap();
    let (one, own) = (scratch.socket("one"), scratch.socket("own"));
    let unix = std::os::unix::net::UnixListener::bind(&one).unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    // Standard input and error are free to carry them to where they belong.
    let activate = "exec 3<&0 4<&1 </dev/null >/dev/null; \
                    LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=a:b; \
                    export LISTEN_PID LISTEN_FDS LISTEN_FDNAMES; exec \"$@\"";
    let mut server = Command::new("/bin/sh")
        .args(["-c", activate, "sh", OURS, "serve", "--exit-with-parent", "-U"])
        .args([own.to_str().unwrap(), "pattern:1M"])
        .stdin(Stdio::from(OwnedFd::from(unix)))
        .stdout(Stdio::from(OwnedFd::from(tcp)))
        .spawn()
        .unwrap();
    assert_eq!(size(&format!("nbd+unix:///?socket={}", one.display())), "1048576");
    assert_eq!(size(&format!("nbd://127.0.0.1:{port}")), "1048576");
    assert_eq!(size(&format!("nbd+unix:///?socket={}", own.display())), "1048576");
    kill_process(pid(server.id()), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    assert!(one.exists() && !own.exists(), "only what it made is removed");
}

#[test]
fn vsock_is_served_where_there_is_any_and_its_absence_is_said() {
    // A number that no other program on this machine should use.
    let port = (1_000_000 + std::process::id()).to_string();
    let output = blockhaul(&["serve", "--vsock", &port, "memory:1M", "--run", "echo \"$uri\""]);
    let said = text(&output.stderr);
    match output.status.code() {
        Some(0) => assert!(text(&output.stdout).contains("socket="), "{said}"),
        code => {
            assert_eq!(code, Some(3), "{said}");
            assert!(said.contains(&format!("vsock port {port}")), "{said}");
            assert!(said.contains("kernel module"), "{said}");
        }
    }
    // A context id that is certainly not this machine's: the hypervisor's.
    assert_fails(&["serve", "-f", "--vsock", "0:1", "memory:1M"], 3, &["vsock context 0, port 1"]);
}
