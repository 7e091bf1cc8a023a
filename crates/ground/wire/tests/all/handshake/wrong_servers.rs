//! A client's reactions to servers that violate the rules.

use blockhaul_wire::handshake::client::{self, ClientHandshake as Client};
use blockhaul_wire::handshake::server::HandshakeConfig;
use blockhaul_wire::option::{OptionReplyHeader, ReplyCode};
use blockhaul_wire::{ExportFlags, InfoSet, OptionCode, OptionError, ProtocolError, limits};

use super::{Talk, reply};

/// A client's reaction to a server's bytes, with one option sent after the greeting.
fn hear(
    bytes: &[u8],
    send: impl FnOnce(&mut Client, &mut Vec<u8>) -> Result<(), ProtocolError>,
) -> Result<client::ClientHandshakeEvent, ProtocolError> {
    let mut out = Vec::new();
    let mut client = Client::new();
    let greeting = [&b"NBDMAGICIHAVEOPT"[..], &[0, 3]].concat();
    client.receive(&greeting, &mut out).unwrap();
    send(&mut client, &mut out).unwrap();
    client.receive(bytes, &mut out).map(|(_, event)| event)
}

#[test]
fn who_is_no_server_is_told_apart() {
    let hear = |bytes: &[u8]| Client::new().receive(bytes, &mut Vec::new());
    for (bytes, shown) in [
        (&b"SSH-2.0-OpenSSH_9.2\r\n"[..], "SSH-2.0-OpenSSH_"),
        (b"HTTP/1.1 400 Bad\r\n", "HTTP/1.1 400 Bad"),
        (b"NBDMAGICIHAVENOT", "NBDMAGICIHAVENOT"),
        (b"\r\n", "\\r\\n"),
    ] {
        let error = hear(bytes).unwrap_err().to_string();
        assert_eq!(error, format!("not an NBD server: its greeting was \"{shown}\""));
    }
    assert!(matches!(hear(b"NBDMA"), Ok((0, client::ClientHandshakeEvent::NeedMore { .. }))));
    let error = Client::new().closed(&[]).unwrap_err().to_string();
    assert!(error.contains("closed before a greeting"), "{error}");
    let error = Client::new().closed(b"NBDM").unwrap_err().to_string();
    assert!(error.contains("\"NBDM\""), "{error}");
}

#[test]
fn a_servers_replies_are_checked() {
    use OptionCode::{Go, List, SetMetaContext};
    let list = |c: &mut Client, out: &mut Vec<u8>| c.list(out);
    let go = |c: &mut Client, out: &mut Vec<u8>| c.go("a", InfoSet::ALL, out);
    for (bytes, why) in [
        (reply(Go, ReplyCode::Ack, &[]), "answered GO, LIST was sent"),
        (reply(List, ReplyCode::Info, &[]), "answered LIST with Info"),
        (reply(List, ReplyCode::Other(9), &[]), "answered LIST with Other(9)"),
        (reply(List, ReplyCode::Ack, b"x"), "has a payload"),
        (reply(List, ReplyCode::Server, b"\0\0\0\x09a"), "longer than the reply"),
        (vec![0; 20], "wrong magic"),
    ] {
        let error = hear(&bytes, list).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let error = hear(&reply(Go, ReplyCode::Ack, &[]), go).unwrap_err().to_string();
    assert!(error.contains("size and flags are missing"), "{error}");
    let head = OptionReplyHeader {
        option: List,
        code: ReplyCode::Server,
        length: limits::OPTION_REPLY as u32 + 1,
    };
    assert!(matches!(hear(&head.encode(), list), Err(ProtocolError::TooLong { .. })));

    // Lists are limited.
    let entry = reply(List, ReplyCode::Server, b"\0\0\0\x01a");
    let most = entry.repeat(limits::EXPORTS);
    assert!(hear(&most, list).is_ok());
    assert!(matches!(hear(&[most, entry].concat(), list), Err(ProtocolError::TooLong { .. })));
    let big = reply(List, ReplyCode::Server, &[&[0; 4][..], &[b'x'; 4096]].concat());
    let many = big.repeat(limits::LIST_BYTES / 4096 + 1);
    assert!(matches!(hear(&many, list), Err(ProtocolError::TooLong { .. })));
    let info = reply(Go, ReplyCode::Info, &[0, 9]);
    assert!(hear(&info.repeat(limits::INFOS), go).is_err());

    // A context's number names one context.
    let twice = reply(SetMetaContext, ReplyCode::MetaContext, b"\0\0\0\x01base:x").repeat(2);
    let mut out = Vec::new();
    let mut talk = Talk::new(HandshakeConfig::default());
    talk.ask(|c, out| c.structured_replies(out));
    talk.client.set_meta_contexts("a", &["base:x".to_owned()], &mut out).unwrap();
    let error = talk.client.receive(&twice, &mut out).unwrap_err().to_string();
    assert!(error.contains("same number"), "{error}");
}

// nbd: flags.unknown, extended.extensions
#[test]
fn strange_information_is_tamed() {
    use OptionCode::Go;
    let go = |c: &mut Client, out: &mut Vec<u8>| c.go("a", InfoSet::ALL, out);
    let info = |bytes: &[u8]| reply(Go, ReplyCode::Info, bytes);
    let bytes = [
        // Flags that are invalid without structured replies and WRITE_ZEROES.
        info(&[&[0, 0][..], &9u64.to_be_bytes(), &[0x18, 0x81]].concat()),
        info(&[0, 3, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 5]),
        info(b"\0\x02evil \x1b[2J"),
        info(b"\x99\x99what"),
        reply(Go, ReplyCode::Ack, &[]),
    ]
    .concat();
    let client::ClientHandshakeEvent::Transmission(negotiated) = hear(&bytes, go).unwrap() else {
        panic!("no transmission");
    };
    let info = negotiated.info;
    assert_eq!(info.flags, ExportFlags::HAS_FLAGS);
    assert_eq!((info.size, info.block_sizes), (9, None));
    assert_eq!(info.description.as_deref(), Some("evil \\u{1b}[2J"));

    let text = [b'x'; 5000];
    let bytes = reply(Go, ReplyCode::Error(OptionError::Unknown), &text);
    let client::ClientHandshakeEvent::Refused { text, .. } = hear(&bytes, go).unwrap() else {
        panic!("not refused");
    };
    assert_eq!(text.len(), limits::ERROR_TEXT + 3);
}
