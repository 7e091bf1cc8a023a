//! The scripted peers work with each other and with common programs, and their faults are those
//! described.

use std::time::Duration;

use blockhaul_testkit::arbitrary::WriteFill;
use blockhaul_testkit::model::Model;
use blockhaul_testkit::peer::{
    Conversation, HandshakeFault, HandshakeStyle, Offer, ReplyFault, ReplyFaultKind, ScriptedServer,
};
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, until};
use blockhaul_wire::{CommandCode, ReplyForm, magic};

const SIZE: u64 = 1 << 20;

fn noise() -> Vec<u8> {
    WriteFill::Random(1).bytes(SIZE as usize)
}

fn offer() -> Offer {
    Offer::new(Model::new(SIZE).with_content(noise()))
}

const FORMS: [ReplyForm; 3] = [ReplyForm::Simple, ReplyForm::Structured, ReplyForm::Extended];

#[test]
fn client_and_server_speak_every_form() {
    for replies in FORMS {
        let server = ScriptedServer::offer(offer());
        let mut client = Conversation::connect(server.path()).unwrap();
        assert_eq!(client.hello(3).unwrap(), 3);
        client.negotiate(replies).unwrap();
        let chunks = replies != ReplyForm::Simple;
        if chunks {
            assert_eq!(client.select("", &["base:allocation", "x:y"]).unwrap(), [0]);
        }
        let exported = client.go("").unwrap();
        assert_eq!(exported.size, SIZE);
        assert_eq!(exported.block_sizes, Some((1, 4096, 64 << 20)));
        assert_eq!(client.read(1000, 5000).unwrap(), noise()[1000..6000]);
        assert_eq!(client.write(1000, b"hello").unwrap(), 0);
        assert_eq!(client.read(999, 7).unwrap()[1..6], *b"hello");
        let zero = client.request(CommandCode::WriteZeroes, 4096, 4096);
        assert_eq!(client.ask(&zero, &[]).unwrap().error, 0);
        let flush = client.request(CommandCode::Flush, 0, 0);
        assert_eq!(client.ask(&flush, &[]).unwrap().error, 0);
        let outside = client.request(CommandCode::Read, SIZE, 1);
        assert_eq!(client.ask(&outside, &[]).unwrap().error, 22);
        let status = client.request(CommandCode::BlockStatus, 0, SIZE);
        let status = client.ask(&status, &[]).unwrap();
        if chunks {
            assert_eq!(status.status, [(0, vec![(4096, 0), (4096, 3), (SIZE - 8192, 0)])]);
        } else {
            assert_eq!(status.error, 22);
        }
        let bye = client.request(CommandCode::Disconnect, 0, 0);
        client.send_request(&bye, &[]).unwrap();
        assert_eq!(client.expect_close().unwrap(), 0);
        assert_eq!(server.connections(), 1);
        server.finish().unwrap();
    }
}

#[test]
fn old_servers_greet_in_their_way() {
    let server = ScriptedServer::offer(offer().style(HandshakeStyle::Oldstyle));
    let mut client = Conversation::connect(server.path()).unwrap();
    client.expect(&magic::INIT_PASSWD.to_be_bytes()).unwrap();
    client.expect(&magic::CLISERV.to_be_bytes()).unwrap();
    assert_eq!(client.receive_u64().unwrap(), SIZE);
    client.receive(4 + 124).unwrap();
    assert_eq!(client.read(5, 5).unwrap(), noise()[5..10]);

    let server = ScriptedServer::offer(offer().style(HandshakeStyle::FixedWithoutGo));
    let mut client = Conversation::connect(server.path()).unwrap();
    client.hello(1).unwrap();
    assert!(client.go("").unwrap_err().contains("refused"));
    client.send_option(magic::OPT_EXPORT_NAME, b"").unwrap();
    assert_eq!(client.receive_u64().unwrap(), SIZE);
    let zeroes = client.receive(2 + 124).unwrap();
    assert!(zeroes[2..].iter().all(|&byte| byte == 0));
    assert_eq!(client.read(5, 5).unwrap(), noise()[5..10]);
}

/// The result of a read of 4096 bytes at 8192 with a fault.
fn spoiled(replies: ReplyForm, how: ReplyFaultKind) -> Result<Vec<u8>, String> {
    let silent =
        matches!(how, ReplyFaultKind::Silence | ReplyFaultKind::Hang | ReplyFaultKind::NeverDone);
    let server = ScriptedServer::offer(offer().spoil(ReplyFault::nth(CommandCode::Read, 2, how)));
    let mut client = Conversation::connect(server.path())?;
    client.open("", replies)?;
    assert_eq!(client.read(0, 512)?, noise()[..512], "the first one is right");
    if silent {
        client.patience(Duration::from_millis(300))?;
    }
    let bytes = client.read(8192, 4096)?;
    assert_eq!(client.read(0, 512)?, noise()[..512], "and so is the third");
    Ok(bytes)
}

#[test]
fn answers_are_spoiled_as_told() {
    let right = noise()[8192..12288].to_vec();
    let any: &[(ReplyFaultKind, &str)] = &[
        (ReplyFaultKind::Silence, "Resource temporarily unavailable"),
        (ReplyFaultKind::Hang, "Resource temporarily unavailable"),
        (ReplyFaultKind::Close, "the connection ended after 0"),
        (ReplyFaultKind::CloseInHead, "the connection ended after 2 of 8"),
        (ReplyFaultKind::CloseInPayload, "the connection ended after"),
        (ReplyFaultKind::WrongCookie, "a reply to request"),
        (ReplyFaultKind::Garbage, "a reply starts with"),
        (ReplyFaultKind::Error(28), "error 28"),
    ];
    for replies in FORMS {
        for (how, text) in any {
            let error = spoiled(replies, how.clone()).unwrap_err();
            assert!(error.contains(text), "{replies:?} {how:?}: {error}");
        }
        let slow = Duration::from_millis(2);
        assert_eq!(
            spoiled(replies, ReplyFaultKind::Slow { first: slow, piece: slow }).unwrap(),
            right
        );
        let twice = spoiled(replies, ReplyFaultKind::Twice).unwrap_err();
        assert!(twice.contains("a reply to request 2 instead of 3"), "{twice}");
    }
    let chunks: &[(ReplyFaultKind, &str)] = &[
        (ReplyFaultKind::ErrorAt(5, 8200, "no luck".to_string()), "error 5: no luck"),
        (ReplyFaultKind::ErrorZero, "makes no sense"),
        (ReplyFaultKind::UnknownError, "error 5: ??"),
        (ReplyFaultKind::UnknownChunk, "a chunk of kind 0x4d"),
        (ReplyFaultKind::Oversized, "a chunk of 2147483647 bytes"),
        (ReplyFaultKind::OutsideRange, "byte 4096 was not asked for"),
        (ReplyFaultKind::Missing, "some bytes did not come"),
        (ReplyFaultKind::Overlap, "came twice"),
        (ReplyFaultKind::NeverDone, "Resource temporarily unavailable"),
        (ReplyFaultKind::ErrorHalfway(28), "error 28"),
    ];
    for replies in [ReplyForm::Structured, ReplyForm::Extended] {
        for (how, text) in chunks {
            let error = spoiled(replies, how.clone()).unwrap_err();
            assert!(error.contains(text), "{replies:?} {how:?}: {error}");
        }
        assert_eq!(spoiled(replies, ReplyFaultKind::Backwards).unwrap(), right);
        assert_eq!(spoiled(replies, ReplyFaultKind::Hole).unwrap(), [0; 4096]);
    }
    let simple = spoiled(ReplyForm::Structured, ReplyFaultKind::SimpleInstead).unwrap_err();
    assert!(simple.contains("a simple reply to a read"), "{simple}");
    let simple = spoiled(ReplyForm::Extended, ReplyFaultKind::SimpleInstead).unwrap_err();
    assert!(simple.contains("a reply starts with 0x67446698"), "{simple}");
    let offset = spoiled(ReplyForm::Extended, ReplyFaultKind::WrongOffset).unwrap_err();
    assert!(offset.contains("offset 12288 instead of 8192"), "{offset}");
}

#[test]
fn block_status_is_spoiled_as_told() {
    let cases: &[(ReplyFaultKind, &str)] = &[
        (ReplyFaultKind::WrongContext, "[(4711, [(4096, 0)])]"),
        (ReplyFaultKind::EmptyExtent, "[(0, [(0, 0)])]"),
        (ReplyFaultKind::NoExtents, "makes no sense"),
        (ReplyFaultKind::NoStatus, "[]"),
        (ReplyFaultKind::LongExtent, "[(0, [(2147483648, 0)])]"),
    ];
    for replies in [ReplyForm::Structured, ReplyForm::Extended] {
        for (how, text) in cases {
            let spoil = ReplyFault::from(CommandCode::BlockStatus, 1, how.clone());
            let server = ScriptedServer::offer(offer().spoil(spoil));
            let mut client = Conversation::connect(server.path()).unwrap();
            client.hello(3).unwrap();
            client.negotiate(replies).unwrap();
            client.select("", &["base:allocation"]).unwrap();
            client.go("").unwrap();
            let request = client.request(CommandCode::BlockStatus, 0, 4096);
            let said = match client.ask(&request, &[]) {
                Ok(answer) => format!("{:?}", answer.status),
                Err(error) => error,
            };
            assert!(said.contains(text), "{replies:?} {how:?}: {said}");
        }
    }
}

#[test]
fn handshakes_are_spoiled_as_told() {
    let cases: &[(HandshakeFault, &str)] = &[
        (HandshakeFault::Silent, "Resource temporarily unavailable"),
        (HandshakeFault::CloseAtOnce, "the connection ended after 0"),
        (HandshakeFault::NotNbd, "instead of"),
        (HandshakeFault::WrongSecondMagic, "instead of"),
        (HandshakeFault::HalfGreeting, "the connection ended after 4 of 8"),
        (HandshakeFault::StopAtOption(2), "Resource temporarily unavailable"),
        (HandshakeFault::CloseAtOption(2), "the connection ended after 0"),
        (HandshakeFault::WrongReplyMagic, "instead of"),
        (HandshakeFault::AnswerToAnother, "a reply to option"),
        (HandshakeFault::HugeAnswer, "a reply of 4294967295 bytes"),
        (HandshakeFault::Refuse(magic::REP_ERR_UNKNOWN, "gone".to_string()), "0x80000006 gone"),
        (HandshakeFault::NoExportInfo, "did not tell size and flags"),
        (HandshakeFault::BlockSizes(3, 5, 7), "Some((3, 5, 7))"),
        (HandshakeFault::Size(u64::MAX), "size: 18446744073709551615"),
        (HandshakeFault::UnknownInfo, "size: 1048576"),
        (HandshakeFault::Slow(Duration::from_millis(3)), "size: 1048576"),
    ];
    for (fault, text) in cases {
        let server = ScriptedServer::offer(offer().handshake(fault.clone()));
        let mut client = Conversation::connect(server.path()).unwrap();
        if matches!(fault, HandshakeFault::Silent | HandshakeFault::StopAtOption(_)) {
            client.patience(Duration::from_millis(300)).unwrap();
        }
        let said = format!("{:?}", client.open("", ReplyForm::Structured));
        assert!(said.contains(text), "{fault:?}: {said}");
    }
}

#[test]
fn a_server_for_one_client_lets_others_wait() {
    let server = ScriptedServer::offer(Offer { connections_max: 1, ..offer() });
    let mut first = Conversation::connect(server.path()).unwrap();
    first.open("", ReplyForm::Simple).unwrap();
    let mut second = Conversation::connect(server.path()).unwrap();
    second.patience(Duration::from_millis(50)).unwrap();
    second.hello(3).unwrap_err();
    assert_eq!(first.read(0, 1).unwrap().len(), 1);
    until("it waits in the server, not in the accept queue", || server.connections() >= 2);
    assert_eq!(server.connections(), 2);
}

#[test]
fn scripts_see_what_clients_do_wrong_and_never_outlive_the_test() {
    let server = ScriptedServer::start(|peer, _| {
        peer.greet(3)?;
        peer.receive_option().map(drop)
    });
    let mut client = Conversation::connect(server.path()).unwrap();
    client.hello(3).unwrap();
    client.send_garbage(1, 64).unwrap();
    client.expect_close().unwrap();
    let said = server.finish().unwrap_err();
    assert!(said.contains("connection 0") && said.contains("instead of"), "{said}");

    let server = ScriptedServer::start(|peer, _| peer.hang());
    let _client = Conversation::connect(server.path()).unwrap();
    drop(server);
}

#[test]
fn nbdcopy_and_nbdinfo_understand_the_server() {
    let nbdinfo = blockhaul_testkit::require_peer!("nbdinfo");
    let nbdcopy = blockhaul_testkit::require_peer!("nbdcopy");
    let scratch = ScratchDir::new().unwrap();
    for replies in FORMS {
        let server = ScriptedServer::offer(offer().replies(replies));
        let limit = Duration::from_secs(120);
        let mut size = nbdinfo.command();
        size.args(["--size", &server.uri()]);
        assert_eq!(tools::output(&mut size, limit).unwrap().stdout, b"1048576\n");
        let target = scratch.file("copy");
        let mut copy = nbdcopy.command();
        copy.args([&server.uri(), target.to_str().unwrap()]);
        let output = tools::output(&mut copy, limit).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(std::fs::read(&target).unwrap() == noise(), "{replies:?}");
        server.finish().unwrap();
    }
}

#[test]
fn the_client_understands_nbdkit_and_qemu_nbd() {
    let nbdkit = blockhaul_testkit::require_peer!("nbdkit");
    let qemu_nbd = blockhaul_testkit::require_peer!("qemu-nbd");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    std::fs::write(&image, noise()).unwrap();
    let path = image.to_str().unwrap();
    let one = PeerServer::nbdkit(&nbdkit, &scratch.socket("n"), &["file", path]).unwrap();
    let args = ["-f", "raw", "-e", "10", "-t", path];
    let two = PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket("q"), &args).unwrap();
    for (server, forms) in [(&one, &FORMS[..2]), (&two, &FORMS[..])] {
        for &replies in forms {
            let mut client = Conversation::connect(server.socket()).unwrap();
            client.hello(3).unwrap();
            client.negotiate(replies).unwrap();
            if replies != ReplyForm::Simple {
                client.select("", &["base:allocation"]).unwrap();
            }
            assert_eq!(client.go("").unwrap().size, SIZE);
            assert_eq!(client.read(4096, 10_240).unwrap(), noise()[4096..14_336]);
            if replies != ReplyForm::Simple {
                let request = client.request(CommandCode::BlockStatus, 0, SIZE);
                let status = client.ask(&request, &[]).unwrap();
                assert_eq!((status.error, status.status.len()), (0, 1));
            }
            assert_eq!(client.write(512, &noise()[512..1024]).unwrap(), 0);
        }
    }
}
