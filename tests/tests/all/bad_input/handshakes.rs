//! No listener, a foreign listener, a missing export, or a failed handshake.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use super::*;

#[test]
fn where_nobody_listens_the_place_is_named() {
    let scratch = ScratchDir::new().unwrap();
    let absent = scratch.file("absent");
    let target = scratch.file("target");
    let uri = format!("nbd+unix:///?socket={}", text(&absent));
    refused(&["copy", &uri, text(&target)], OPEN, &["source", text(&absent), "; "]);
    refused(&["copy", text(&absent), text(&target)], OPEN, &["source", text(&absent), "check"]);
    refused(&["copy", "zero:1M", &uri], OPEN, &["target", text(&absent), "; "]);
    refused(&["info", &uri], 1, &[text(&absent)]);
    refused(&["info", "--list", &uri], 1, &[text(&absent)]);
    refused(&["map", text(&absent)], OPEN, &[text(&absent)]);
    refused(
        &["serve", text(&absent), "-f", "-U", text(&scratch.socket("s"))],
        OPEN,
        &[text(&absent)],
    );
    // A port reserved for this test, without a listener.
    let held = bound();
    let address: SocketAddr = rustix::net::getsockname(&held).unwrap().try_into().unwrap();
    let port = address.port();
    let uri = format!("nbd://127.0.0.1:{port}/x");
    refused(&["copy", &uri, text(&target)], OPEN, &["127.0.0.1", &port.to_string(), "refused"]);
    refused(&["info", &uri], 1, &["127.0.0.1", &port.to_string(), "refused"]);
    let name = "nbd://no-such-host.invalid/";
    refused(&["info", name], 1, &["no-such-host.invalid"]);
    assert!(!target.exists(), "nothing came, but a target was made");
}

/// A TCP socket with a port of loopback, which does not listen.
fn bound() -> OwnedFd {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    socket
}

#[test]
fn an_absent_export_and_its_server_are_named() {
    let qemu_nbd = require_peer!("qemu-nbd");
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    // Of two that might write the second is refused.
    let ours = serve(&scratch, "s", &["-r", "-e", "disk", text(&image)]);
    let args = ["-e", "4", "-x", "disk", "-f", "raw", text(&image)];
    let qemus = PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket("q"), &args).unwrap();
    let dir = format!("dir={}", text(scratch.path()));
    let nbdkits = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &["file", &dir]).unwrap();
    for server in [&ours, &qemus, &nbdkits] {
        let uri = server.uri("no such disk");
        let words = ["no such disk", text(server.socket()), "; "];
        refused(&["copy", &uri, text(&target)], OPEN, &words);
        refused(&["copy", "zero:1k", &uri], OPEN, &words);
        refused(&["info", &uri], 1, &words[..2]);
        refused(&["info", "--size", &uri], 1, &words[..2]);
        refused(&["map", &uri], OPEN, &words[..2]);
    }
}

#[test]
fn a_server_of_something_else_is_told_from_one_of_nbd() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    // A server of web pages waits for a line, and answers only then.
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = web.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in web.incoming().flatten() {
            std::thread::spawn(move || {
                let mut stream = stream;
                let mut seen = [0; 4];
                if stream.read_exact(&mut seen).is_ok() {
                    let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
                }
            });
        }
    });
    let uri = format!("nbd://127.0.0.1:{port}");
    let place = port.to_string();
    refused(&["copy", "--timeout", "1", &uri, text(&target)], LOST, &["127.0.0.1", &place, "NBD"]);
    // One that greets, as servers of mail and of shells do.
    let shell = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = shell.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in shell.incoming().flatten() {
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n");
            // Held open until the client has had enough.
            let _ = stream.read(&mut [0; 64]);
        }
    });
    let uri = format!("nbd://127.0.0.1:{port}");
    let place = port.to_string();
    refused(&["copy", &uri, text(&target)], OPEN, &["127.0.0.1", &place, "NBD"]);
    refused(&["info", &uri], 1, &["127.0.0.1", &place, "NBD"]);
    assert!(!target.exists(), "nothing came, but a target was made");
}

/// Whatever goes wrong in the handshake.
#[test]
fn a_handshake_that_goes_wrong_ends_the_copy_soon() {
    let silent = [
        HandshakeFault::Silent,
        HandshakeFault::StopAtOption(1),
        HandshakeFault::StopAtOption(2),
        HandshakeFault::StopAtOption(3),
    ];
    let wrong = [
        HandshakeFault::CloseAtOnce,
        HandshakeFault::NotNbd,
        HandshakeFault::WrongSecondMagic,
        HandshakeFault::HalfGreeting,
        HandshakeFault::CloseAtOption(1),
        HandshakeFault::CloseAtOption(3),
        HandshakeFault::WrongReplyMagic,
        HandshakeFault::AnswerToAnother,
        HandshakeFault::HugeAnswer,
        HandshakeFault::NoExportInfo,
        HandshakeFault::Size(u64::MAX),
    ];
    let faults = silent.into_iter().map(|fault| (fault, Some(LOST)));
    let faults = faults.chain(wrong.into_iter().map(|fault| (fault, None)));
    std::thread::scope(|scope| {
        for (fault, status) in faults {
            scope.spawn(move || {
                let what = format!("{fault:?}");
                let server =
                    ScriptedServer::offer(Offer::new(Model::new(1 << 20)).handshake(fault));
                let args = ["copy", "--timeout", "1", &server.uri(), "null:"];
                let output = bounded(&mut blockhaul(&args), SOON);
                let found = output.status.code().unwrap_or(-1);
                let expected = status.unwrap_or(if found == LOST { LOST } else { OPEN });
                let words = ["source", text(server.path())];
                refused_by(&output, &what, expected, &words);
            });
        }
    });
}

/// `info`, `map` and `copy` say what a server did not say, and for how long they waited for it: longer than
/// the server may be held up before what it does say.
#[test]
fn what_a_silent_server_did_not_say_is_told_with_the_time() {
    let offer = || Offer::new(Model::new(1 << 20));
    let greeting = "no greeting within 6 s: is this an NBD server?";
    let answer = "no answer in the handshake within 6 s; check that the server is alive, or wait";
    let request = "no byte from the server for 6 s with 1 request in flight";
    let mut cases = vec![(
        "map",
        offer().spoil(ReplyFault::from(
            blockhaul_wire::CommandCode::BlockStatus,
            0,
            ReplyFaultKind::Hang,
        )),
        request,
    )];
    for command in ["info", "list", "map", "copy"] {
        cases.push((command, offer().handshake(HandshakeFault::Silent), greeting));
        cases.push((command, offer().handshake(HandshakeFault::StopAtOption(1)), answer));
    }
    std::thread::scope(|scope| {
        for (command, offer, words) in cases {
            scope.spawn(move || {
                let server = ScriptedServer::offer(offer);
                let uri = server.uri();
                let (args, status): (&[&str], i32) = match command {
                    "info" => (&["info", "--timeout", "6s", &uri], 1),
                    "list" => (&["info", "--timeout", "6s", "--list", &uri], 1),
                    "copy" => (&["copy", "--timeout", "6s", &uri, "null:"], LOST),
                    _ => (&["map", "--timeout", "6s", &uri], LOST),
                };
                refused(args, status, &[text(server.path()), words]);
            });
        }
    });
}

/// Block sizes that the protocol forbids are no reason not to copy.
#[test]
fn block_sizes_that_make_no_sense_cost_no_byte() {
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    let content = WriteFill::Random(2).bytes((1 << 20) + 333);
    fs::write(&image, &content).unwrap();
    for (least, best, most) in [(3, 5, 7), (1 << 20, 1 << 20, 1 << 20), (4096, 512, 1), (0, 0, 0)] {
        let what = format!("{least} {best} {most}");
        let model = Model::new(content.len() as u64).with_content(content.clone());
        let fault = HandshakeFault::BlockSizes(least, best, most);
        let server = ScriptedServer::offer(Offer::new(model).handshake(fault));
        let output = bounded(&mut blockhaul(&["copy", &server.uri(), text(&target)]), SOON);
        if output.status.success() {
            assert_same(&image, &target, &what);
        } else {
            _ = refused_by(&output, &what, OPEN, &["source", text(server.path())]);
        }
    }
}

/// A server that its client starts, and that ends at once or never listens.
#[test]
fn what_a_server_said_that_does_not_start_is_told() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    let server = ["sh", "-c", "echo no luck >&2; exit 3"];
    for (server, word) in [(&server[..], "no luck"), (&["/no/such/program"], "/no/such/program")] {
        let args = [&["copy", "["], server, &["]", text(&target)]].concat();
        let output = bounded(&mut blockhaul(&args), SOON);
        let said = lossy(&output.stderr);
        assert!([OPEN, LOST].contains(&output.status.code().unwrap_or(-1)), "{said}");
        // What the server said, and what we say about it.
        assert!(said.contains(word) && !said.contains("panicked"), "{said}");
        let ours: Vec<_> = said.lines().filter(|line| line.starts_with("blockhaul: ")).collect();
        assert!(ours.len() == 1 && ours[0].contains(server[0]), "{said}");
    }
    let args = ["copy", "--timeout", "1", "[", "sleep", "1000", "]", text(&target)];
    let output = bounded(&mut blockhaul(&args), SOON);
    let said = lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(LOST), "{said}");
    assert!(said.contains("sleep"), "{said}");
}

#[test]
fn what_clients_do_wrong_is_in_the_log_with_who_did_and_on_lines_of_its_own() {
    use blockhaul_testkit::peer::Conversation;
    use blockhaul_wire::{CommandCode, magic};
    let scratch = ScratchDir::new().unwrap();
    let folder = scratch.file("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("disk"), [0; 4096]).unwrap();
    let server = serve(&scratch, "s", &["--quiet", "--verbose", &format!("dir:{}", text(&folder))]);
    let mut client = Conversation::connect(server.socket()).unwrap();
    client.hello(3).unwrap();
    assert!(client.option(magic::OPT_LIST, b"data").unwrap()[0].is_error());
    server.says("from a local client: refused LIST: this option has no data").unwrap();
    // Not known is not wrong.
    assert!(client.option(77, b"data").unwrap()[0].is_error());
    let long = format!("{}n", "n".repeat(4096));
    assert!(client.go(&long).is_err());
    server.says("from a local client: refused GO: malformed").unwrap();
    for name in ["..", "../folder/disk", "x\nblockhaul: error: forged\u{1b}[2J"] {
        assert!(client.go(name).is_err());
        server.says(&format!("cannot open export {name:?} for a local client: ")).unwrap();
    }
    client.go("disk").unwrap();
    let request = client.request(CommandCode::Other(99), 0, 0);
    assert_eq!(client.ask(&request, &[]).unwrap().error, 22);
    let said = server.says("from a local client: refused a request: unknown command 99").unwrap();
    assert!(!said.contains("option 77") && !said.contains('\u{1b}'), "{said}");
    let levels = [
        "blockhaul: warning: connection 1 ",
        "blockhaul: warning: cannot open",
        "blockhaul: debug: ",
    ];
    assert!(said.lines().all(|line| levels.iter().any(|level| line.starts_with(level))), "{said}");
    // No other client is affected.
    succeed(&["info", &server.uri("disk")]);
}
