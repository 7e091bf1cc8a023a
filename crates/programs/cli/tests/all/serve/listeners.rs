//! Sockets of the service manager, standard input, vsock, and what is handed over open.

use std::io::{Read as _, Write as _};

use blockhaul_testkit::peer::ScriptedServer;
use blockhaul_testkit::tools::PeerProgram;

use super::*;
use crate::tls_relay::{self, Clients};

/// A shell's script in a folder; `$0` is the program.
fn script(scratch: &ScratchDir, text: &str) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", text, OURS]).current_dir(scratch.path()).stdin(Stdio::null());
    tools::output(&mut command, LIMIT).unwrap()
}

#[test]
fn what_is_handed_over_open_is_served() {
    let scratch = ScratchDir::new().unwrap();
    let done = |text: &str| {
        let output = script(&scratch, text);
        assert!(output.status.success(), "{text}: {output:?}");
        output
    };
    // The file is gone: its descriptor is all there is. It comes along to the background as well.
    done(
        "printf 01234567 >disk; exec 5<>disk 6<disk; rm disk
        \"$0\" serve --background -U own --pidfile pid 'file:?fd=5'
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
    let scratch = ScratchDir::new().unwrap();
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
    let mut to = server.stdin.take().unwrap();
    let mut from = server.stdout.take().unwrap();
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
    let scratch = ScratchDir::new().unwrap();
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
    let scratch = ScratchDir::new().unwrap();
    let one = scratch.socket("one");
    let own = scratch.socket("own");
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

/// What a server answers to bytes, up to its end.
fn answer(server: &PeerServer, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(server.socket()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    // A server that has refused may reset the connection.
    let _ = stream.read_to_end(&mut answer);
    text(&answer)
}

/// A name for the server's socket in the given scheme.
fn over_http(scheme: &str, server: &PeerServer, path: &str, more: &str) -> String {
    format!("{scheme}://localhost/{path}?socket={}{more}", server.socket().display())
}

#[test]
fn nbd_begins_after_an_http_request() {
    let scratch = ScratchDir::new().unwrap();
    let args = ["--http-upgrade", "--export", "a=pattern:4M", "--export", "b=memory:4M"];
    let server = start(&scratch, &args);
    let [a, b] = ["&export=a", "&export=b&method=GET"].map(|more| {
        over_http("nbd+http", &server, "1.0/volumes/x?project=p", more)
            .replacen("?socket", "&socket", 1)
    });
    assert_eq!(size(&a), (4 << 20).to_string());
    assert_eq!(text(&blockhaul(&["info", "--uri", &a]).stdout).trim(), a);
    let listed = text(&blockhaul(&["info", "--list", &b]).stdout);
    assert!(listed.contains("export=\"a\":") && listed.contains("export=\"b\":"), "{listed}");
    let output = blockhaul(&["copy", "--verify", &a, &b]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_fails(&["copy", &a, &a], 2, &["are the same"]);
    assert_fails(&["info", &a.replace("export=a", "export=c")], 1, &["c"]);
    // A client without HTTP does not speak first, and one that speaks something else is told.
    let plain = server.uri("a");
    assert_fails(
        &["info", "--timeout", "1s", &plain],
        1,
        &["no greeting", "is this an NBD server?"],
    );
    for (bytes, status) in [
        (&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], "426"),
        (b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "426"),
        (b"DELETE / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: nbd\r\n\r\n", "426"),
        (b"GET / HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: nbd\r\n\r\n", "400"),
        (b"\0\0\0\x01IHAVEOPT", "400"),
        (&[&b"GET / HTTP/1.1\r\n"[..], &b"a: b\r\n".repeat(10_000)].concat(), "400"),
    ] {
        let answer = answer(&server, bytes);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(!answer.contains("NBDMAGIC"), "{answer}");
    }
    assert!(server.stop().unwrap().success());

    let plain = start(&scratch, &["memory:1M"]);
    let uri = over_http("nbd+http", &plain, "", "");
    assert_fails(&["info", &uri], 1, &["without HTTP", "nbd+unix://"]);
    let uri = "nbd+http://localhost:1/x?tls-hostname=y&method=PUT";
    assert_fails(&["copy", uri, "null:1M"], 2, &["GET or POST"]);
    assert_fails(&["info", "nbd+http://localhost:1/x"], 1, &["localhost port 1"]);
    for (more, why) in [("--oldstyle", "cannot be used with"), ("--tls=on", "--tls require or off")]
    {
        let keys = scratch.file("keys").display().to_string();
        let _ = blockhaul(&["tls", "init", "--psk", "me", &keys]);
        let args =
            ["serve", "-f", "-U", "-", "--http-upgrade", "--tls-psk", &keys, more, "null:1M"];
        let output = blockhaul(&args);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(why), "{said}");
    }
}

#[test]
fn the_uri_of_a_server_behind_http_can_be_used() {
    let scratch = ScratchDir::new().unwrap();
    for place in ["-U -", "-p 0"] {
        let run = format!(
            "\"$0\" serve {place} --http-upgrade --export 'a b=memory:1M' --run '\"'\"$0\"'\" info --size \"$uri\"'"
        );
        let output = script(&scratch, &run);
        let said = text(&output.stdout);
        assert!(said.ends_with("1048576\n"), "{said} {}", text(&output.stderr));
    }
}

#[test]
fn nbd_begins_after_https() {
    let scratch = ScratchDir::new().unwrap();
    let pki = scratch.file("pki").display().to_string();
    assert!(blockhaul(&["tls", "init", "--host", "localhost", &pki]).status.success());
    let args = ["--http-upgrade", "--tls-certificates", &pki, "--tls-verify-peer", "memory:4M"];
    let server = start(&scratch, &args);
    let uri = over_http("nbd+https", &server, "v", &format!("&tls-certificates={pki}"));
    let output = blockhaul(&["info", &uri]);
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success() && said.contains("with TLS"), "{said}");
    let output = blockhaul(&["copy", "--verify", "pattern:4M", &uri]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    // Neither without a certificate, nor for another name, nor without TLS.
    let bare = scratch.file("bare");
    std::fs::create_dir(&bare).unwrap();
    std::fs::copy(format!("{pki}/ca-cert.pem"), bare.join("ca-cert.pem")).unwrap();
    let nobody = uri.replace(&pki, bare.to_str().unwrap());
    assert_fails(&["info", &nobody], 1, &["certificate"]);
    assert_fails(&["info", &uri.replace("localhost", "other")], 1, &["other"]);
    let open = over_http("nbd+http", &server, "v", "");
    assert_fails(&["info", &open], 1, &["cannot connect to Unix socket"]);
    // An NBD client that wants STARTTLS.
    let nbds = format!("nbds+unix://?socket={}&tls-certificates={pki}", server.socket().display());
    assert_fails(&["info", "--timeout", "1s", &nbds], 1, &["no greeting"]);
}

#[test]
fn a_foreign_server_of_https_goes_on_with_nbd() {
    let (Some(python), Some(nbdkit)) =
        (PeerProgram::require("python3"), PeerProgram::require("nbdkit"))
    else {
        return;
    };
    let scratch = ScratchDir::new().unwrap();
    let pki = scratch.file("pki").display().to_string();
    assert!(blockhaul(&["tls", "init", "--host", "lxd.example", &pki]).status.success());
    let nbd = PeerServer::nbdkit(&nbdkit, &scratch.socket("kit"), &["memory", "8M"]).unwrap();
    let listen = scratch.socket("http");
    let log = scratch.file("log");
    let to = nbd.socket().to_str().unwrap();
    let relay = tls_relay::start(&python, &listen, to, &pki, Clients::WithCertificates, Some(&log));
    let uri = format!(
        "nbd+https://lxd.example/1.0/volumes/disk%201/nbd?project=a&tls-certificates={pki}&socket={}",
        relay.socket().display()
    );
    let output = blockhaul(&["copy", "--verify", "pattern:8M", &uri]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let seen = std::fs::read_to_string(&log).unwrap();
    let head = "POST /1.0/volumes/disk%201/nbd?project=a HTTP/1.1\r\nHost: lxd.example\r\n";
    assert!(seen.starts_with(head), "{seen}");
    for field in ["Connection: Upgrade\r\n", "Upgrade: nbd\r\n", "Content-Length: 0\r\n"] {
        assert!(seen.contains(field), "{seen}");
    }
    assert!(seen.contains("\r\n\r\nhttp/1.1 lxd.example\n"), "{seen}");
}

#[test]
fn servers_that_do_not_go_on_with_nbd_are_told_apart() {
    let upgrade = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: nbd\r\n\r\n";
    let cases: [(Vec<u8>, &[&str]); 11] = [
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 17\r\n\r\nno volume \x1b[31m\n\nmore"
                .to_vec(),
            &["\"HTTP/1.1 404 Not Found\"", "no volume \\u{1b}[31m\\n"],
        ),
        (b"HTTP/1.1 403 Forbidden\r\n\r\nnot you".to_vec(), &["403 Forbidden", "not you"]),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 99\r\n\r\ncut".to_vec(), &["500 Oh", "\"cut\""]),
        (b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), &["does not go on with NBD", "200 OK"]),
        (b"HTTP/1.1 101 x\r\nUpgrade: sftp\r\n\r\n".to_vec(), &["does not go on with NBD"]),
        ([b"HTTP/1.1 101 x\r\n".to_vec(), b"a: b\r\n".repeat(100_000)].concat(), &["16384 bytes"]),
        (b"HTTP/1.1 100 x\r\n\r\n".repeat(100_000), &["100 x"]),
        (b"\x16\x03\x01garbage".to_vec(), &["not HTTP/1.1", "\\u{16}"]),
        (b"HTTP/1.1 101 Swi".to_vec(), &["closed the connection before it answered"]),
        (Vec::new(), &["closed the connection before it answered"]),
        (format!("{upgrade}garbage instead of NBD").into_bytes(), &["NBD"]),
    ];
    for (answer, words) in cases {
        let shown = text(&answer[..answer.len().min(100)]);
        let server = ScriptedServer::start(move |talk, _| {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.extend(talk.receive(1)?);
            }
            // The client may have heard enough.
            let _ = talk.send(&answer);
            talk.shut();
            Ok(())
        });
        let uri = format!("nbd+http:///v?socket={}", server.path().display());
        let output = blockhaul(&["info", &uri]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{shown}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{shown}: {words:?} in {said}");
        assert!(
            said.lines().count() == 1 && said.len() < 4000 && !said.contains("panic"),
            "{said}"
        );
    }
    // Silence, and a text that never ends.
    for answer in ["", "HTTP/1.1 503 Busy\r\nContent-Length: 500\r\n\r\nlater"] {
        let server = ScriptedServer::start(move |talk, _| {
            talk.send(answer.as_bytes())?;
            talk.hang()
        });
        let uri = format!("nbd+http:///v?socket={}", server.path().display());
        let output = blockhaul(&["info", "--timeout", "2s", &uri]);
        let said = text(&output.stderr);
        let word = if answer.is_empty() {
            "no answer to the HTTP request within 2 s"
        } else {
            "\"later\""
        };
        assert!(!output.status.success() && said.contains(word), "{said}");
    }
}
