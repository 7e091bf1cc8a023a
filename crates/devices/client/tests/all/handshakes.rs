//! Handshakes with servers that are old, slow, silent or wrong: they work, or report why not, in
//! time.

use std::time::Duration;

use crate::common::{FORMS, SIZE, content, offer, on_worker, options, read, use_it, with};
use blockhaul_block::{Error, Kind};
use blockhaul_client::options::{ConnectTarget, OptionSession};
use blockhaul_testkit::peer::{
    Conversation, HandshakeFault, HandshakeStyle, ScriptResult, ScriptedServer,
};
use blockhaul_wire::{CommandCode, ReplyForm, magic};

/// The error of opening the server's export, if the server replies.
fn refused(server: &ScriptedServer) -> Error {
    with(server, options(), |_| async {}).unwrap_err()
}

/// The error of opening the server's export, if it stops replying.
fn given_up(server: &ScriptedServer) -> Error {
    let options = blockhaul_client::ConnectOptions {
        connect_timeout: Duration::from_millis(500),
        ..options()
    };
    with(server, options, |_| async {}).unwrap_err()
}

#[test]
fn handshakes_that_fail_say_why() {
    use HandshakeFault as Fault;
    let cases = [
        (Fault::Silent, Kind::TimedOut, "is this an NBD server?"),
        (Fault::CloseAtOnce, Kind::Disconnected, ""),
        (Fault::NotNbd, Kind::Io, "not an NBD server"),
        (Fault::WrongSecondMagic, Kind::Io, ""),
        (Fault::HalfGreeting, Kind::Disconnected, ""),
        (Fault::WrongReplyMagic, Kind::Io, "magic"),
        (Fault::AnswerToAnother, Kind::Io, ""),
        (Fault::HugeAnswer, Kind::Io, "4294967295"),
        (Fault::NoExportInfo, Kind::Io, ""),
        (
            Fault::Refuse(magic::REP_ERR_UNKNOWN, "who is that".into()),
            Kind::NotFound,
            "who is that",
        ),
        (Fault::Refuse(magic::REP_ERR_POLICY, "not you".into()), Kind::Refused, "not you"),
        (Fault::Refuse(magic::REP_ERR_TLS_REQD, "".into()), Kind::Refused, "TLS"),
        (Fault::Refuse(magic::REP_ERR_SHUTDOWN, "".into()), Kind::ShuttingDown, ""),
        (Fault::Refuse(magic::REP_ERR_INVALID, "\x1b[31m".into()), Kind::Invalid, ""),
        (Fault::Size(1 << 63), Kind::TooLarge, "9223372036854775808"),
        (Fault::Size(u64::MAX), Kind::TooLarge, "18446744073709551615"),
    ];
    for (fault, kind, text) in cases {
        let server = ScriptedServer::offer(offer().handshake(fault.clone()));
        let error = match kind {
            Kind::TimedOut => given_up(&server),
            _ => refused(&server),
        };
        let told = error.to_string();
        assert_eq!(error.kind(), kind, "{fault:?}: {told}");
        assert!(told.contains(text), "{fault:?}: {told}");
        let place = ["cannot connect to Unix socket", "cannot open an export at Unix socket"];
        assert!(place.iter().any(|place| told.contains(place)), "{told}");
        assert!(!told.contains(['\n', '\x1b']), "{told:?}");
    }
}

#[test]
fn servers_that_stop_or_close_at_any_option() {
    for number in 1..=3 {
        let server = ScriptedServer::offer(offer().handshake(HandshakeFault::StopAtOption(number)));
        assert_eq!(given_up(&server).kind(), Kind::TimedOut, "option {number}");
        let server =
            ScriptedServer::offer(offer().handshake(HandshakeFault::CloseAtOption(number)));
        assert_eq!(refused(&server).kind(), Kind::Disconnected, "option {number}");
    }
}

/// Asks a server for its exports that has these replies to this question, and then ends the connection.
fn list_of(replies: &'static [(u32, &'static [u8])]) -> Result<usize, Error> {
    let server = ScriptedServer::start(move |talk: &mut Conversation, _| {
        talk.greet(3)?;
        loop {
            match talk.receive_option()? {
                (magic::OPT_LIST, _) => break,
                (code, _) => talk.reply_option(code, magic::REP_ERR_UNSUP, &[])?,
            }
        }
        replies.iter().try_for_each(|(kind, data)| talk.reply_option(magic::OPT_LIST, *kind, data))
    });
    let place = ConnectTarget::parse(&server.uri()).unwrap();
    on_worker(move || async move {
        let mut session = OptionSession::connect(place, &options()).await.unwrap();
        session.list().await.map(|exports| exports.len())
    })
}

#[test]
fn a_list_of_exports_without_its_end_is_an_error() {
    const ONE: (u32, &[u8]) = (magic::REP_SERVER, b"\0\0\0\x01a");
    const END: (u32, &[u8]) = (magic::REP_ACK, b"");
    assert_eq!(list_of(&[ONE, ONE, END]).unwrap(), 2);
    assert_eq!(list_of(&[ONE, ONE]).unwrap_err().kind(), Kind::Disconnected);
    assert_eq!(list_of(&[]).unwrap_err().kind(), Kind::Disconnected);
    let refused = list_of(&[ONE, (magic::REP_ERR_SHUTDOWN, b"")]).unwrap_err();
    assert_eq!(refused.kind(), Kind::ShuttingDown);
}

#[test]
fn garbage_instead_of_a_greeting() {
    for seed in 1..20 {
        let server = ScriptedServer::start(move |talk, _| {
            talk.send_garbage(seed, 5000)?;
            talk.hang()
        });
        assert_eq!(refused(&server).kind(), Kind::Io);
        // After a correct greeting.
        let server = ScriptedServer::start(move |talk, _| {
            talk.greet(3)?;
            talk.send_garbage(seed, 5000)?;
            talk.hang()
        });
        assert_eq!(refused(&server).kind(), Kind::Io);
    }
}

#[test]
fn old_servers_are_used_as_they_are() {
    let styles = [
        HandshakeStyle::Oldstyle,
        HandshakeStyle::Newstyle,
        HandshakeStyle::FixedWithoutGo,
        HandshakeStyle::Fixed,
    ];
    for style in styles {
        for replies in FORMS {
            if style == HandshakeStyle::FixedWithoutGo && replies == ReplyForm::Extended {
                continue; // Such a server does not exist: there is no way on from there.
            }
            let server = ScriptedServer::offer(offer().style(style).replies(replies));
            with(&server, options(), use_it).unwrap().unwrap();
            server.finish().unwrap();
        }
    }
}

// nbd: sizes.go, export-name.fallback
#[test]
fn a_server_that_knows_no_option_but_the_export_name() {
    for no_zeroes in [true, false] {
        let server = ScriptedServer::start(move |talk, _| {
            talk.greet(if no_zeroes { 3 } else { 1 })?;
            loop {
                let (code, _) = talk.receive_option()?;
                if code == magic::OPT_EXPORT_NAME {
                    break;
                }
                talk.reply_option(code, magic::REP_ERR_UNSUP, b"what?")?;
            }
            talk.send(&[&SIZE.to_be_bytes()[..], &[0, 1]].concat())?;
            if !no_zeroes {
                talk.send(&[0; 124])?;
            }
            answer_reads(talk)
        });
        let found = with(&server, options(), |device| async move { read(&*device, 7, 700).await });
        assert_eq!(found.unwrap().unwrap(), content(7, 700));
        server.finish().unwrap();
    }
}

/// Answers reads correctly, with simple replies.
fn answer_reads(talk: &mut Conversation) -> ScriptResult {
    while let Some((request, _)) = talk.receive_request()? {
        if request.command == CommandCode::Disconnect {
            return Ok(());
        }
        let answer = talk.simple(request.cookie, 0);
        talk.send(&[answer, content(request.offset, request.length)].concat())?;
    }
    Ok(())
}

// nbd: sizes.obeyed
#[test]
fn odd_block_sizes_are_bent_into_shape_or_ignored() {
    let cases = [
        ((1, 4096, 32 << 20), (1, 4096, 32 << 20)),
        ((512, 512, u32::MAX), (512, 512, 32 << 20)),
        ((4096, 4096, 10_000), (4096, 4096, 8192)),
        ((1, 64 << 20, 64 << 20), (1, 32 << 20, 32 << 20)),
        ((65_536, 65_536, 65_537), (65_536, 65_536, 65_536)),
        // Those that violate the rules.
        ((0, 4096, 32 << 20), (1, 4096, 32 << 20)),
        ((3, 4096, 32 << 20), (1, 4096, 32 << 20)),
        ((512, 256, 32 << 20), (1, 4096, 32 << 20)),
        ((512, 5000, 32 << 20), (1, 4096, 32 << 20)),
        ((1 << 20, 1 << 20, 32 << 20), (1, 4096, 32 << 20)),
        ((512, 4096, 1024), (1, 4096, 32 << 20)),
    ];
    for ((minimum, preferred, maximum), expected) in cases {
        let fault = HandshakeFault::BlockSizes(minimum, preferred, maximum);
        let server = ScriptedServer::offer(offer().handshake(fault));
        let path = server.path().to_path_buf();
        let found = on_worker(move || async move {
            let address = blockhaul_client::ServerAddress::Unix(path);
            let connected = blockhaul_client::connect("test", &address, "", &options()).await?;
            let facts = connected.device.facts();
            Ok::<_, Error>((facts.block.minimum, facts.block.preferred, facts.block.maximum))
        });
        assert_eq!(found.unwrap(), expected, "{minimum} {preferred} {maximum}");
    }
}

#[test]
fn the_largest_size_and_none_are_taken() {
    for size in [0, 1, 511, i64::MAX as u64] {
        let server = ScriptedServer::offer(offer().handshake(HandshakeFault::Size(size)));
        let found = with(&server, options(), |device| async move { device.facts().size });
        assert_eq!(found.unwrap(), size);
    }
}

// nbd: info.unknown-reply
#[test]
fn a_slow_handshake_works_and_unknown_information_is_ignored() {
    let slow = HandshakeFault::Slow(Duration::from_millis(30));
    for fault in [slow, HandshakeFault::UnknownInfo] {
        let server = ScriptedServer::offer(offer().handshake(fault));
        with(&server, options(), use_it).unwrap().unwrap();
    }
}

#[test]
fn nobody_listens() {
    let scratch = blockhaul_testkit::tools::ScratchDir::new().unwrap();
    let nowhere = scratch.socket("nowhere");
    let uri = format!("nbd+unix:///?socket={}", nowhere.display());
    let error =
        on_worker(move || async move { crate::common::open(&uri, options()).await.map(drop) });
    let error = error.unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound);
    assert!(error.to_string().contains("No such file or directory"), "{error}");
    let error = on_worker(|| async {
        crate::common::open("nbd://127.0.0.1:1/", options()).await.map(drop)
    });
    assert!(error.unwrap_err().to_string().contains("127.0.0.1:1"));
}

/// The server of `[ CMD ]` lives as long as a device that it serves, whichever code opened it.
#[test]
fn a_started_server_lives_as_long_as_its_devices() {
    let Some(nbdkit) = blockhaul_testkit::tools::PeerProgram::require("nbdkit") else { return };
    let program = nbdkit.program().to_path_buf();
    on_worker(move || async move {
        let registry = blockhaul_catalog::Registry {
            backends: blockhaul_client::all(options()),
            path: "command",
            command: "command",
            ..blockhaul_catalog::Registry::default()
        };
        let words = [program.as_os_str(), "pattern".as_ref(), "1M".as_ref()].map(Into::into);
        let spec = blockhaul_catalog::DeviceSpec::Command(words.to_vec());
        let stack =
            registry.open(&spec, Vec::new(), blockhaul_catalog::Intent::READ).await.unwrap();
        let device = stack.device().clone();
        drop(stack);
        blockhaul_io::sleep(Duration::from_millis(100)).await;
        assert_eq!(read(&*device, 8, 8).await.unwrap(), 8_u64.to_be_bytes());
    });
}
